"""verify must notice what is wrong: wrong gradients, wrong parameters, drifting ties, failures."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import graphpar as gp
from graphpar.cli import verify_command
from graphpar.runtime.launching.worker import JobResult
from graphpar.verification import Reference, Verification, compare, reference_for, verify_all
from graphpar.verification.substituted import Substituted
from tests.tools.programs import example, example_file, traced_once
from tests.tools.rank_pool import RankPool


def _program(name: str, folder: Path, **pins: object) -> tuple[gp.Parts, Path]:
    program = traced_once(example_file(name), None, None, evaluates=True)
    plan = gp.plan(program, mesh={"pp": 2}, **pins)  # type: ignore[arg-type]
    model_file = str(example_file(name).path.resolve())
    parts = gp.partition(program, plan, model_file=model_file)
    return parts, parts.save(folder)


def _edit(file: Path, change: Callable[[str], str]) -> None:
    text = file.read_text()
    changed = change(text)
    assert changed != text
    file.write_text(changed)


class Tables(nn.Module):
    """Tables that are in no state_dict: a buffer, and a tensor that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.arange(1.0, 9.0), persistent=False)
        self.plain = torch.linspace(1, 2, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.table) * self.plain


@pytest.fixture(scope="module")
def tampered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verification]:
    """One launch for all: the honest program, and copies with one fault each."""
    root = tmp_path_factory.mktemp("tampered")
    parts, honest = _program("gpt", root / "honest")
    reference = reference_for(parts)
    folders = {"honest": honest}

    def fault(name: str, file: str, change: Callable[[str], str]) -> None:
        folders[name] = Path(shutil.copytree(honest, root / name))
        _edit(folders[name] / file, change)

    fault("scaled gradient", "stage_1.py", lambda text: text.replace("/ valid_labels", "/ valid_labels * 2"))
    fault(
        "scaled gradient of one layer",
        "stage_0.py",
        lambda text: text.replace("        return ", "        return 0.5 * ", 1) if "return 0.5" not in text else text,
    )
    fault(
        "drifting ties",
        "plan.json",
        lambda text: json.dumps(json.loads(text) | {"interface": json.loads(text)["interface"] | {"ties": []}}),
    )
    fault(
        "local denominator", "stage_1.py", lambda text: text.replace("/ valid_labels", "/ (labels != -100).sum() / 4")
    )
    detached = "F.layer_norm(x, (64,), self.norm.weight.detach(), self.norm.bias)"
    fault("lost gradient", "stage_1.py", lambda text: text.replace("self.norm(x)", detached))
    fault("eps", "stage_1.py", lambda text: text.replace("nn.LayerNorm(64)", "nn.LayerNorm(64, eps=1.005e-5)"))
    fault("fewer bits", "stage_1.py", lambda text: text.replace("self.norm(x)", "self.norm(x.bfloat16().float())"))
    valid = int((reference.batches[0]["labels"] != -100).sum())
    fault(
        "the example's denominator",
        "stage_1.py",
        lambda text: text.replace(".sum()\n", f".sum() * 0 + {valid} / {parts.plan.microbatches}\n"),
    )
    fault(
        "an output of evaluation",
        "stage_1.py",
        lambda text: text.replace('("output", head)', '("output", head * 1.001)'),
    )
    names = list(folders)
    shifted, doubled = _shifted(root)
    evaluating, dropping = _dropping()
    results = verify_all(
        [*(folders[name] for name in names), shifted, doubled, evaluating, dropping],
        references=[*[reference] * len(names), None, None, None, None],
        timeout_s=400,
    )
    others = ("zero but for rounding", "zero but for rounding, scaled gradient", "evaluating", "dropping in evaluation")
    return dict(zip([*names, *others], results))


class _Shifted(nn.Module):
    """A shift before a norm has no gradient; what rounding leaves of it is large, since the shift is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.shift = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        normed = F.layer_norm(self.first(x) + 100 * self.shift, (16,))
        return (self.second(normed).tanh() * torch.arange(16, device=x.device)).mean()


def _shifted(root: Path) -> tuple[gp.Parts, gp.Parts]:
    """The honest program, and one with the same gradients but for a factor of one."""
    torch.manual_seed(0)
    program = gp.export(_Shifted(), (torch.randn(8, 16),))
    plan = gp.plan(program, mesh={"pp": 2}, split=["second"])
    honest, wrong = gp.partition(program, plan), gp.partition(program, plan)
    _edit(wrong.folder / "stage_1.py", lambda text: text.replace("tanh()", "tanh() * 1.0001"))
    return honest, wrong


def test_the_reference_normalizes_single_rows_of_any_strides() -> None:
    """On CPUs torch's backward of batch_norm is wrong for one row of channels-last strides, which unbind gives."""
    norm, conv = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)
    tokens, factor = torch.randn(4, 16, 8), torch.rand(4, 8, 2, 2)

    def gradient(images: Tensor, factor: Tensor) -> Tensor:
        norm.zero_grad()
        (conv(norm(images)) * factor).sum().backward()
        assert norm.bias.grad is not None
        return norm.bias.grad.clone()

    images = tokens.permute(0, 2, 1).unflatten(-1, (4, 4))
    with Substituted(None, (), microbatches=4, replicas=1):
        found = gradient(images, factor)
    expected = [gradient(images[row : row + 1].contiguous(), factor[row : row + 1]) for row in range(4)]

    torch.testing.assert_close(found, torch.stack(expected).sum(0))


class _Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(self.norm(self.first(x)).tanh(), 0.3, self.training)).square().mean()


def _dropping() -> tuple[gp.Parts, gp.Parts]:
    """An honest program that evaluates, and one that drops out there as in training."""
    torch.manual_seed(0)
    program = gp.export(_Dropping(), (torch.randn(8, 16),), evaluates=True)
    assert program.no_eval is None
    plan = gp.plan(program, mesh={"pp": 2}, split=["second"], allow_batch_coupling=True)
    honest, wrong = gp.partition(program, plan), gp.partition(program, plan)
    for file in wrong.folder.glob("stage_*.py"):
        file.write_text(file.read_text().replace("training=self.training", "training=True"))
    return honest, wrong


@pytest.mark.costly
def test_evaluation_is_compared(tampered: dict[str, Verification]) -> None:
    honest, wrong = tampered["evaluating"], tampered["dropping in evaluation"]

    assert honest.ok, honest
    assert not wrong.ok and wrong.first_difference is not None
    assert (wrong.first_difference.step, wrong.first_difference.kind) == ("evaluation", "loss")


@pytest.mark.costly
def test_what_evaluation_gives_besides_the_loss_is_compared(tampered: dict[str, Verification]) -> None:
    wrong = tampered["an output of evaluation"]

    assert not wrong.ok and wrong.first_difference is not None
    assert (wrong.first_difference.step, wrong.first_difference.kind, wrong.first_difference.name) == (
        "evaluation",
        "output",
        "output",
    )
    assert tampered["honest"].max_error["output"] <= tampered["honest"].tolerance["output"]


@pytest.mark.costly
def test_the_honest_program_passes(tampered: dict[str, Verification]) -> None:
    assert tampered["honest"].ok, tampered["honest"].to_json()


@pytest.mark.costly
@pytest.mark.parametrize(
    ("fault", "kind"),
    [("scaled gradient", "gradient"), ("scaled gradient of one layer", "gradient"), ("local denominator", "gradient")],
)
def test_a_wrong_gradient_fails(tampered: dict[str, Verification], fault: str, kind: str) -> None:
    result = tampered[fault]

    assert not result.ok
    assert result.max_error[kind] > 100 * result.tolerance[kind]


@pytest.mark.costly
def test_drifting_ties_fail(tampered: dict[str, Verification]) -> None:
    result = tampered["drifting ties"]

    assert not result.ok
    assert any("tied parameter" in problem and "differ" in problem for problem in result.problems)


@pytest.mark.costly
def test_a_lost_gradient_fails(tampered: dict[str, Verification]) -> None:
    result = tampered["lost gradient"]

    assert not result.ok
    assert any("norm.weight" in problem and "no gradient" in problem for problem in result.problems)


@pytest.mark.costly
def test_an_eps_that_is_off_by_5e_8_fails(tampered: dict[str, Verification]) -> None:
    """In fp32 it is within what rounding may do; in fp64 it is not."""
    result = tampered["eps"]

    assert not result.ok and result.decided_in == "fp64"
    assert result.native is not None and result.native.ok, result.native.max_error


@pytest.mark.costly
def test_fewer_bits_than_the_models_fail(tampered: dict[str, Verification]) -> None:
    """In fp64 a cast to bf16 is none; the first loss in fp32 shows it."""
    result = tampered["fewer bits"]

    assert not result.ok and max(result.max_error.values()) < 1e-8
    assert any("computes something in fewer bits than the model" in problem for problem in result.problems)


@pytest.mark.costly
def test_a_denominator_that_fits_the_example_alone_fails(tampered: dict[str, Verification]) -> None:
    result = tampered["the example's denominator"]

    assert not result.ok
    assert result.reference_losses[0] == pytest.approx(result.parallel_losses[0], rel=1e-6)
    assert result.first_difference is not None
    assert (result.first_difference.step, result.first_difference.kind) == (1, "loss")


@pytest.mark.costly
def test_what_is_rounding_alone_is_decided_in_fp64(tampered: dict[str, Verification]) -> None:
    honest, wrong = tampered["zero but for rounding"], tampered["zero but for rounding, scaled gradient"]

    assert honest.ok and honest.decided_in == "fp64"
    assert honest.native is not None and not honest.native.ok and honest.native.worst["gradient"] == "shift"
    assert max(honest.max_error.values()) < 1e-8
    assert not wrong.ok


class Behind(nn.Module):
    """A layer in float64 behind one in float32, whose rounding it inherits."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 64), nn.Linear(64, 5).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)).double()).float()


@pytest.mark.costly
def test_float64_behind_float32_is_decided_in_fp64() -> None:
    torch.manual_seed(0)
    program = gp.export(Behind(), (torch.randn(8, 6),), loss_fn=lambda output: output.square().mean())

    result = gp.verify(gp.partition(program, gp.plan(program, mesh={"dp_replicate": 2})))

    assert result.ok, result.problems


@pytest.mark.costly
def test_the_first_difference_is_the_gradient_that_the_backward_comes_to_first(
    tampered: dict[str, Verification],
) -> None:
    found = tampered["scaled gradient of one layer"].first_difference

    assert found is not None and found.step == 0
    assert "step 0" in str(found)


class _Faked(JobResult):
    """What a program would have written that is its reference, but for one tensor that is changed in place."""

    @classmethod
    def of(cls, reference: Reference, key: str = "", change: Callable[[Tensor], Any] = id, **numbers: Any) -> _Faked:
        assert reference.accumulated is not None
        clipped = reference.accumulated
        exact = {"losses": tuple(reference.losses), "accumulated_losses": (clipped.loss,), "norms": (clipped.norm,)}
        made = cls(Path(), 1, None, missing_gradients=(), **{**exact, **numbers})
        written = {f"param/{name}": value.clone() for name, value in reference.parameters.items()}
        written |= {f"buffer/{name}": value.clone() for name, value in reference.buffers.items()}
        for step, gradients in [*enumerate(reference.gradients), ("accumulated", clipped.gradients)]:
            written |= {f"grad/{step}/{name}": value.clone() for name, value in gradients.items()}
        if key:
            change(written[key].view(-1))
        object.__setattr__(made, "written", written)
        return made

    def tensors(self, rank: int) -> dict[str, Tensor]:
        return dict(vars(self)["written"])


@pytest.fixture(scope="module")
def head_first() -> tuple[gp.Plan, Reference]:
    program = example("head_first")
    plan = gp.plan(program, 1)
    return plan, reference_for(gp.partition(program, plan), 2)


def test_one_parameter_off_by_a_thousandth_fails(head_first: tuple[gp.Plan, Reference]) -> None:
    """The comparison itself: one element of one parameter, moved by 1e-3 of the largest magnitude."""
    plan, reference = head_first

    def off(flat: Tensor) -> None:
        flat[7] += 1e-3 * flat.abs().max()

    assert compare(reference, _Faked.of(reference), plan, 2).ok
    outcome = compare(reference, _Faked.of(reference, "param/body.3.up.weight", off), plan, 2)
    assert not outcome.ok
    assert outcome.worst["parameter"] == "body.3.up.weight"
    assert outcome.max_error["parameter"] == pytest.approx(1e-3, rel=1e-2)
    assert str(outcome.first_difference) == "parameter of body.3.up.weight, after the last step (1.0e-03)"


def test_accumulated_and_clipped_gradients_are_compared(head_first: tuple[gp.Plan, Reference]) -> None:
    plan, reference = head_first
    assert reference.accumulated is not None
    norm = reference.accumulated.norm

    assert reference.accumulated.max_norm == pytest.approx(norm / 2)
    clipped = sum(float(g.square().sum()) for g in reference.accumulated.gradients.values()) ** 0.5
    assert clipped == pytest.approx(norm / 2, rel=1e-4)
    for fault, kind in (
        (_Faked.of(reference, norms=(norm * 1.001,)), "norm"),
        (_Faked.of(reference, accumulated_losses=(reference.losses[-1],)), "loss"),
        (_Faked.of(reference, "grad/accumulated/body.3.up.weight", lambda flat: flat.mul_(2)), "gradient"),
    ):
        outcome = compare(reference, fault, plan, 2)
        assert not outcome.ok and outcome.first_difference is not None
        assert (outcome.first_difference.step, outcome.first_difference.kind) == ("accumulated", kind)
    assert not compare(reference, _Faked.of(reference, norms=()), plan, 2).ok


def test_a_tensor_is_held_to_its_own_dtype(head_first: tuple[gp.Plan, Reference]) -> None:
    """A model that computes something in bf16 has no more room in its fp32 tensors."""
    plan, reference = head_first
    loose = replace(reference, dtype=torch.bfloat16)

    outcome = compare(loose, _Faked.of(reference, "param/body.3.up.weight", lambda flat: flat.mul_(1.001)), plan, 2)

    assert not outcome.ok and outcome.tolerance["parameter"] == 1e-5


def test_buffers_are_held_to_their_own_dtypes_and_spread(head_first: tuple[gp.Plan, Reference]) -> None:
    """A count that is off beside means that are right but for rounding; a mean whose true value is 0."""
    plan, plain = head_first
    buffers = {
        "n.running_mean": torch.tensor([1e-18]),
        "n.running_var": torch.tensor([4.0]),
        "n.steps": torch.tensor(3),
    }
    reference = replace(plain, buffers=buffers, persistent=frozenset(buffers))

    def compared(key: str, change: Callable[[Tensor], Any]) -> Verification:
        return compare(reference, _Faked.of(reference, f"buffer/{key}", change), plan, 2)

    assert compared("n.running_mean", lambda flat: flat.neg_()).ok
    assert not compared("n.running_mean", lambda flat: flat.add_(1e-4)).ok
    assert compared("n.running_var", lambda flat: flat.mul_(1 + 1e-6)).ok
    outcome = compared("n.steps", lambda flat: flat.add_(1))
    assert not outcome.ok and outcome.worst["buffer"] == "n.steps"


@pytest.mark.parametrize("key", ["buffer/n.steps", "param/body.3.up.weight", "grad/0/body.3.up.weight"])
def test_what_no_rank_has_written_is_no_success(head_first: tuple[gp.Plan, Reference], key: str) -> None:
    plan, plain = head_first
    reference = replace(plain, buffers={"n.steps": torch.tensor(3)}, persistent=frozenset({"n.steps"}))
    written = _Faked.of(reference)
    assert compare(reference, written, plan, 2).ok
    del vars(written)["written"][key]

    outcome = compare(reference, written, plan, 2)

    assert not outcome.ok and key.rpartition("/")[2] in outcome.problems[0]


def test_buffers_are_compared_before_the_first_step(tmp_path: Path) -> None:
    """A table that no weights hold, read from the program's own file; the first difference names it."""
    model = Tables()
    program = gp.export(model, (torch.randn(4, 8),), loss_fn=lambda output: output.square().mean())
    parts = gp.partition(program, gp.plan(program, 1))
    honest = parts.save(tmp_path / "honest")
    values = load_file(honest / "constants.safetensors")
    folders = [honest]
    for name in values:
        folders.append(Path(shutil.copytree(honest, tmp_path / name)))
        save_file({**values, name: values[name] * 1.5}, folders[-1] / "constants.safetensors")

    first, *others = verify_all(folders, 1, references=[reference_for(parts, 1)] * len(folders))

    assert first.ok and set(values) == {"table", "plain"}
    for name, outcome in zip(values, others):
        assert not outcome.ok and str(outcome.first_difference).startswith(f"buffer of {name}, before the first step")


def test_a_model_that_fails_on_one_device_is_said_to() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            made = self.linear(x).relu()
            made.mul_(1.1)
            return made

    program = gp.export(Fails, (torch.randn(4, 8),), loss_fn=lambda output: output.square().mean())
    parts = gp.partition(program, gp.plan(program, 1))

    with pytest.raises(
        gp.GraphparError, match=r"the model itself fails to train on one device.*modified by an inplace"
    ):
        reference_for(parts, 1)


def test_a_loss_may_read_the_models_parameters() -> None:
    """The reference trains the user's own model, and gives it back as it was."""
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), nn.BatchNorm1d(4, dtype=torch.float64))
    model[0].weight.grad = torch.ones(4, 4, dtype=torch.float64)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def penalised(output: Tensor) -> Tensor:
        return output.square().mean() + sum(p.square().sum() for p in model.parameters())

    program = gp.export(model, (torch.randn(4, 4, dtype=torch.float64),), loss_fn=penalised)
    reference = reference_for(gp.partition(program, gp.plan(program, 1, microbatch_size=4)), 3)

    eager = before["0.weight"]
    first = reference.gradients[0]["0.weight"] - 2 * eager
    second = reference.gradients[1]["0.weight"] - 2 * (
        eager - reference.learning_rate * reference.gradients[0]["0.weight"]
    )
    assert float(first.abs().max()) < 1 and float(second.abs().max()) < 1  # what is left is the output's part alone
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones(4, 4, dtype=torch.float64))


@pytest.mark.costly
def test_it_runs_from_saved_weights_without_the_model_file(tmp_path: Path, pool: RankPool) -> None:
    """The emitted folder and its weights are all that is needed."""
    shutil.copy(example_file("gpt").path, tmp_path / "model.py")
    from graphpar.frontend.modelfile import initial_weights, load_model_file

    file = load_model_file(tmp_path / "model.py")
    program = gp.export(file.model, file.args, file.kwargs, file.loss_fn, file.targets)
    parts = gp.partition(program, gp.plan(program, mesh={"pp": 2}))
    out = parts.save(tmp_path / "out", weights=initial_weights(file))
    (tmp_path / "model.py").unlink()

    pool.torchrun(out / "train.py", ["--steps", "2", "--json", str(tmp_path / "history.json")], nproc=2, timeout_s=120)

    history = json.loads((tmp_path / "history.json").read_text())
    assert len(history) == 2 and history[1]["loss"] != history[0]["loss"]


def test_a_failing_stage_ends_all_ranks_with_its_own_message(tmp_path: Path) -> None:
    _, out = _program("head_first", tmp_path / "out")
    boom = "        raise RuntimeError('boom in stage 1')\n        return "
    _edit(out / "stage_1.py", lambda text: text.replace("        return ", boom, 1))

    result = gp.verify(out, steps=1)

    assert not result.ok
    assert any("boom in stage 1" in problem for problem in result.problems)
    shown = io.StringIO()
    verify_command.show(result.to_json(), Console(file=shown))
    assert (
        "largest error" not in shown.getvalue() and "boom in stage 1" in shown.getvalue()
    )  # no figures that nobody measured
