"""State on the host, and what blocks keep there, in one process on a CPU that is taken to have a host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.stages.cast_once import CastOnce
from graphpar.runtime.stages.offloaded_activations import OffloadedActivations
from graphpar.runtime.state import host as host_module
from graphpar.runtime.state import offloaded_state
from graphpar.runtime.state.host import Host, pretended
from graphpar.runtime.state.offloaded_state import OffloadedState

KINDS: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"amsgrad": True}),
    ("SGD", {"momentum": 0.9}),
    ("Adagrad", {}),
    ("NAdam", {}),
]


def host() -> Host:
    with pretended():
        return Host(torch.device("cpu"))


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=lambda value: str(value))
def test_updates_in_pieces_are_those_of_the_whole(
    kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a schedule of the learning rate, hooks, a parameter without a gradient, and state that is loaded between."""
    monkeypatch.setattr(offloaded_state, "PIECE_BYTES", 100)

    def trained(offload: bool) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1))
        unused = nn.Parameter(torch.ones(3))
        optimizer = getattr(torch.optim, kind)([*model.parameters(), unused], lr=0.1, **options)
        if offload:
            OffloadedState(optimizer, host())
        calls: list[int] = []
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        for step in range(4):
            model(torch.full((2, 8), step + 1.0)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if step == 1:
                optimizer.load_state_dict(optimizer.state_dict())
        assert len(optimizer.param_groups[0]["params"]) == 7
        return [parameter.detach() for parameter in model.parameters()], len(calls)

    (expected, once), (found, calls) = trained(False), trained(True)
    assert once == calls == 4
    assert all(torch.equal(one, other) for one, other in zip(found, expected))


def test_optimizers_that_may_update_parameters_together_are_refused() -> None:
    class Own(torch.optim.SGD):
        pass

    for kind in (Own, torch.optim.LBFGS):
        with pytest.raises(RuntimeProgramError, match=f"known to be exact for torch.optim's own .*{kind.__name__}"):
            OffloadedState(kind(nn.Linear(1, 1).parameters()), host())


class Block(nn.Module):
    """``writes``: what a product has made is written after an operator has kept it."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.up, self.writes = nn.Linear(4, 4), writes

    def forward(self, x: Tensor) -> Tensor:
        made = self.up(x)
        result = made.exp() * made
        if self.writes:
            made.add_(1)
        return result


def blocks(writes: bool) -> tuple[nn.Sequential, OffloadedActivations]:
    torch.manual_seed(0)
    stage = nn.Sequential(Block(False), Block(writes), Block(False))
    activations = OffloadedActivations(host())
    activations.add(stage, list(stage), CastOnce(stage, list(stage), {}))
    return stage, activations


def test_all_but_the_last_block_fetches_what_it_kept() -> None:
    stage, activations = blocks(writes=False)
    x = torch.randn(2, 4)
    stage(x).sum().backward()
    found = [parameter.grad for parameter in stage.parameters()]
    torch.manual_seed(0)
    plain = nn.Sequential(*(Block(False) for _ in range(3)))
    plain(x).sum().backward()
    assert all(torch.equal(one, other) for one, other in zip(found, (p.grad for p in plain.parameters())))  # type: ignore[arg-type]
    each = x.nbytes
    assert activations.host.sent == 3 * 3 * each  # what enters, what the product made, its exponential
    assert activations.host.fetched == 2 * 3 * each


def test_memory_of_the_host_has_the_size_of_what_is_kept_and_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the next power of two, and not more in a second step, also after a forward whose backward never came."""
    taken: list[int] = []

    def noted(nbytes: int, device: torch.device) -> Tensor:
        taken.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(host_module, "host_memory", noted)
    stage, _ = blocks(writes=False)
    x = torch.randn(3, 4)
    for _ in range(3):
        stage(x).sum().backward()
        stage(x)
        assert taken == 3 * 3 * [x.nbytes]


def test_what_is_written_after_it_was_kept_is_an_error_as_without() -> None:
    stage, _ = blocks(writes=True)
    with pytest.raises(RuntimeProgramError, match="was written after the forward"):
        stage(torch.randn(2, 4)).sum().backward()
