"""What a program of one device does in one process: which parameters it trains, which weights it takes, what a save holds."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import graphpar as gp
from graphpar.runtime import Pipeline, start
from graphpar.runtime.checkpoints.weight_transfer import all_ranks, transfer
from graphpar.runtime.debugging import events
from graphpar.runtime.errors import RuntimeProgramError


class Words(nn.Module):
    """A head that is tied to the embedding, and a layer whose weight is frozen while its bias is trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.middle, self.head = nn.Embedding(11, 4), nn.Linear(4, 4), nn.Linear(4, 11, bias=False)
        self.head.weight = self.words.weight
        self.middle.weight.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.middle(self.words(ids))).square().mean()


IDS = torch.arange(8).view(2, 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = gp.export(Words, (IDS,))
    weights = {name: value for name, value in Words().state_dict().items() if name != "head.weight"}
    return gp.partition(program, gp.plan(program)).save(tmp_path_factory.mktemp("one") / "out", weights=weights)


def test_a_frozen_parameter_beside_a_trained_one_stays(folder: Path) -> None:
    with start() as ranks, Pipeline(folder, ranks.device) as pipeline:
        pipeline.load_weights()
        held = dict(pipeline.named_parameters())
        before = {name: value.detach().clone() for name, value in held.items()}
        pipeline.step({"ids": IDS})
        torch.optim.SGD(pipeline.parameters(), lr=0.1).step()
        changed = {name for name, value in held.items() if not torch.equal(value, before[name])}

    assert {name for name, value in held.items() if not value.requires_grad} == {"middle.weight"}
    assert changed == held.keys() - {"middle.weight"}


def test_weights_are_as_the_model_makes_them_and_of_another_model_they_are_refused(folder: Path) -> None:
    class Wider(Words):
        def __init__(self) -> None:
            super().__init__()
            self.middle = nn.Linear(4, 5)

    class Less(Words):
        def __init__(self) -> None:
            super().__init__()
            del self.middle

    with start() as ranks, Pipeline(folder, ranks.device) as pipeline:
        pipeline.initialise(Words)
        held, expected = dict(pipeline.named_parameters()), dict(Words().named_parameters())
        assert held.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in held.items())
        with pytest.raises(
            RuntimeProgramError, match=r"^middle\.weight is built with the shape \(5, 4\); .* \(4, 4\)$"
        ):
            pipeline.initialise(Wider)
        with pytest.raises(RuntimeProgramError, match=r"^the model is built without middle\.bias, middle\.weight$"):
            pipeline.initialise(Less)


def test_listeners_are_told_of_events(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(events, "listeners", [lambda name, unit: told.append(name)])
    with start() as ranks, Pipeline(folder, ranks.device) as pipeline:
        pipeline.load_weights()
        pipeline.step({"ids": IDS})
    assert told and set(told) <= set(events.EVENTS)


def test_a_program_that_was_traced_in_training_alone_does_not_evaluate(folder: Path) -> None:
    with start() as ranks, Pipeline(folder, ranks.device) as pipeline:
        pipeline.load_weights()
        with pytest.raises(RuntimeProgramError, match=r"^the program can't evaluate: .* compile it with --eval$"):
            pipeline.eval({"ids": IDS})


def test_a_file_may_have_a_tied_tensor_under_any_of_its_names_but_not_two_values(folder: Path, tmp_path: Path) -> None:
    values = {name: value.clone() for name, value in Words().state_dict().items()}
    files = {
        "both": values,
        "second": {name: value for name, value in values.items() if name != "words.weight"},
        "two": {**values, "head.weight": values["head.weight"] + 1},
    }
    for name, tensors in files.items():
        save_file(tensors, str(tmp_path / f"{name}.safetensors"))
    with start() as ranks, Pipeline(folder, ranks.device) as pipeline:
        for name in ("both", "second"):
            pipeline.load_weights(tmp_path / f"{name}.safetensors")
            assert torch.equal(dict(pipeline.named_parameters())["words.weight"], values["words.weight"])
        with pytest.raises(RuntimeProgramError, match=r"different values for .* which are one tensor in the model"):
            pipeline.load_weights(tmp_path / "two.safetensors")


def test_a_save_that_is_not_waited_for_holds_the_values_of_its_call(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What trains on may be faster than the thread that writes."""
    begin, later = threading.Thread.start, []

    def started(thread: threading.Thread) -> None:
        later.append(thread) if thread.name == "checkpoint" else begin(thread)

    monkeypatch.setattr(threading.Thread, "start", started)
    with start() as ranks, Pipeline(folder, ranks.device) as pipeline:
        pipeline.load_weights()
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)
        pipeline.step({"ids": IDS})
        optimizer.step()
        saved = {name: value.detach().clone() for name, value in pipeline.named_parameters()}
        moments = [state["momentum_buffer"].clone() for state in optimizer.state.values()]
        pipeline.save_checkpoint(tmp_path / "1", optimizer, step=1, wait=False)
        optimizer.step()
        for thread in later:
            begin(thread)
        assert len(later) == 1
        pipeline.load_checkpoint(tmp_path / "1", optimizer)
        assert all(torch.equal(value, saved[name]) for name, value in pipeline.named_parameters())
        assert all(map(torch.equal, (state["momentum_buffer"] for state in optimizer.state.values()), moments))


def test_an_optimizer_of_which_a_checkpoint_would_lack_something_is_refused_at_once(
    folder: Path, tmp_path: Path
) -> None:
    """Made by the pipeline, or by hand: when training would resume, and not first when it is saved."""

    class Counting(torch.optim.SGD):
        count = 0

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            self.count += 1
            for parameter in (each for group in self.param_groups for each in group["params"]):
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.1 / self.count)

    with start() as ranks, Pipeline(folder, ranks.device) as pipeline:
        made = pipeline.optimizer(make=lambda named: Counting([parameter for _, parameter in named], lr=0.1))
        for each in (made, Counting(pipeline.parameters(), lr=0.1)):
            for call in (
                lambda each=each: pipeline.resume(tmp_path, each),
                lambda each=each: pipeline.save_checkpoint(tmp_path / "1", each, step=1),
            ):
                with pytest.raises(
                    RuntimeProgramError, match="the steps of Counting depend on something that is neither"
                ):
                    call()
        pipeline.save_checkpoint(tmp_path / "1", step=1)  # the weights alone


def test_state_that_has_one_element_for_some_parameters_is_saved_for_all(tmp_path: Path) -> None:
    """Adafactor keeps a sum for each column: one for the first weight, and as many as the second has elements."""
    model = nn.Sequential(nn.Linear(1, 8), nn.Linear(8, 1))
    program = gp.export(model, (torch.randn(4, 1),), loss_fn=lambda output: output.square().mean())
    out = gp.partition(program, gp.plan(program)).save(tmp_path / "out", weights=model.state_dict())
    with start() as ranks, Pipeline(out, ranks.device) as pipeline:
        pipeline.load_weights()
        optimizer = torch.optim.Adafactor(pipeline.parameters(), lr=0.01)
        pipeline.step({program.inputs[0].name: torch.randn(4, 1)})
        optimizer.step()
        saved = [state["col_var"].clone() for state in optimizer.state.values() if "col_var" in state]
        pipeline.save_checkpoint(tmp_path / "1", optimizer, step=1)
        optimizer.step()
        pipeline.load_checkpoint(tmp_path / "1", optimizer)
        loaded = [state["col_var"] for state in optimizer.state.values() if "col_var" in state]
    assert [tuple(each.shape) for each in saved] == [(1, 1), (1, 8)] and all(map(torch.equal, saved, loaded))


class Decaying(nn.Module):
    """A loss whose weight falls with each step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 4)
        self.register_buffer("weight", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.get_buffer("weight").mul_(0.5)
        loss: Tensor = self.inner(x).square().mean() * weight
        return loss


def test_a_buffer_is_written_once_in_a_step_of_several_batches(tmp_path: Path) -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    program = gp.export(Decaying, (x[:4],))
    plan = gp.plan(program, microbatch_size=2)
    out = gp.partition(program, plan).save(tmp_path / "out", weights=Decaying().state_dict())
    model = Decaying()
    losses = [model(x).item() for _ in range(2)]
    with start() as ranks, Pipeline(out, ranks.device) as pipeline:
        pipeline.load_weights()
        found = [pipeline.step([{"x": x[:4]}, {"x": x[4:]}]) for _ in range(2)]
        weight = pipeline.stages[0].get_buffer("weight").item()

    assert [float(each) for each in found if each is not None] == pytest.approx(losses)
    assert weight == model.get_buffer("weight").item()


def test_dtypes_of_weights_for_another_engine_have_names(folder: Path) -> None:
    with start() as ranks, Pipeline(folder, ranks.device) as pipeline:
        pipeline.load_weights()
        for dtype in ("bf16", torch.bfloat16):
            assert {value.dtype for _, value in pipeline.weights_for(dtype=dtype)} == {torch.bfloat16}
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"dtype": "bfloat"}, "dtype is 'bfloat', not fp32, bf16, fp16"),
            ({"dtype": torch.int8}, "dtype is torch.int8"),
            ({"dtype": 16}, "dtype is 16"),
            ({"ranks": 0}, "ranks is 0, not a list of ranks"),
        ]
        for options, message in wrong:
            with pytest.raises(RuntimeProgramError, match=message):
                pipeline.weights_for(**options)


def test_a_transfer_says_the_seconds_after_the_wait(folder: Path) -> None:
    with start() as ranks, Pipeline(folder, ranks.device) as pipeline:
        pipeline.load_weights()
        began, state = time.monotonic(), pipeline._state(None)
        moved = transfer(
            all_ranks(ranks.device), state, state, 1, may=lambda: time.sleep(0.5)
        )  # as in the other launch
        assert moved.seconds <= time.monotonic() - began - 0.5
