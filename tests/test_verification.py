"""verify must notice what is wrong: wrong gradients, wrong parameters, drifting ties, failures."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import graphpar as gp
from graphpar.runtime.launch import torchrun
from graphpar.verification import Verification, reference_for, verify_all
from tests.programs import example, example_file


def _program(name: str, folder: Path, **pins: object) -> tuple[gp.Parts, Path]:
    program = example(name)
    plan = gp.plan(program, mesh={"pp": 2}, **pins)  # type: ignore[arg-type]
    model_file = str(example_file(name).path.resolve())
    parts = gp.partition(program, plan, model_file=model_file)
    return parts, parts.save(folder)


def _edit(file: Path, change: Callable[[str], str]) -> None:
    text = file.read_text()
    changed = change(text)
    assert changed != text
    file.write_text(changed)


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
    fault("lost gradient", "stage_1.py", lambda text: text.replace("self.norm.weight", "self.norm.weight.detach()"))
    names = list(folders)
    results = verify_all([folders[name] for name in names], references=[reference] * len(names), timeout_s=240)
    return dict(zip(names, results))


def test_the_honest_program_passes(tampered: dict[str, Verification]) -> None:
    assert tampered["honest"].ok, tampered["honest"].to_json()


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("scaled gradient", "gradient"), ("scaled gradient of one layer", "gradient"), ("local denominator", "gradient")],
)
def test_a_wrong_gradient_fails(tampered: dict[str, Verification], fault: str, kind: str) -> None:
    result = tampered[fault]

    assert not result.ok
    assert result.max_error[kind] > 100 * result.tolerance[kind]


def test_drifting_ties_fail(tampered: dict[str, Verification]) -> None:
    result = tampered["drifting ties"]

    assert not result.ok
    assert any("tied parameter" in problem and "differ" in problem for problem in result.problems)


def test_a_lost_gradient_fails(tampered: dict[str, Verification]) -> None:
    result = tampered["lost gradient"]

    assert not result.ok
    assert any("norm.weight" in problem and "no gradient" in problem for problem in result.problems)


def test_one_parameter_off_by_a_thousandth_fails() -> None:
    """The comparison itself: one element of one parameter, moved by 1e-3 of the largest magnitude."""
    from graphpar.runtime.worker import JobResult
    from graphpar.verification import compare

    program = example("head_first")
    plan = gp.plan(program, 1)
    reference = reference_for(gp.partition(program, plan))

    class Faked(JobResult):
        def tensors(self, rank: int) -> dict[str, torch.Tensor]:
            written = {f"param/{name}": value.clone() for name, value in reference.parameters.items()}
            written |= {f"buffer/{name}": value.clone() for name, value in reference.buffers.items()}
            for step, gradients in enumerate(reference.gradients):
                written |= {f"grad/{step}/{name}": value for name, value in gradients.items()}
            name = "param/body.3.up.weight"
            flat = written[name].view(-1)
            flat[7] += 1e-3 * flat.abs().max() * off
            return written

    off = 0.0
    result = Faked(Path(), 1, None, tuple(reference.losses), ())
    assert compare(reference, result, plan, 3).ok
    off = 1.0
    outcome = compare(reference, result, plan, 3)
    assert not outcome.ok
    assert outcome.worst["parameter"] == "body.3.up.weight"
    assert outcome.max_error["parameter"] == pytest.approx(1e-3, rel=1e-2)


def test_it_runs_from_saved_weights_without_the_model_file(tmp_path: Path) -> None:
    """The emitted folder and its weights are all that is needed."""
    shutil.copy(example_file("gpt").path, tmp_path / "model.py")
    from graphpar.modelfile import initial_weights, load_model_file

    file = load_model_file(tmp_path / "model.py")
    program = gp.export(file.model, file.args, file.kwargs, file.loss_fn, file.targets)
    parts = gp.partition(program, gp.plan(program, mesh={"pp": 2}))
    out = parts.save(tmp_path / "out", weights=initial_weights(file))
    (tmp_path / "model.py").unlink()

    result = torchrun(
        str(out / "train.py"), ["--steps", "2", "--json", str(tmp_path / "history.json")], nproc=2, timeout_s=120
    )

    history = json.loads((tmp_path / "history.json").read_text())
    assert len(history) == 2 and history[1]["loss"] != history[0]["loss"]
    assert "loss" in result.stdout


def test_a_failing_stage_ends_all_ranks_with_its_own_message(tmp_path: Path) -> None:
    _, out = _program("head_first", tmp_path / "out")
    boom = "        raise RuntimeError('boom in stage 1')\n        return "
    _edit(out / "stage_1.py", lambda text: text.replace("        return ", boom, 1))

    result = gp.verify(out, steps=1)

    assert not result.ok
    assert any("boom in stage 1" in problem for problem in result.problems)
