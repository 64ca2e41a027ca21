"""Parameters that are read in 16 bits are cast once a step: the same gradients to the bit, and one copy however many microbatches wait."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import graphpar as gp
from graphpar.emitted.recomputation import recompute
from graphpar.runtime.manifest import load_manifest
from graphpar.runtime.stages.cast_once import CastOnce
from tests.models.architectures import program_of

BF16 = torch.bfloat16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(nn.functional.linear(x, self.up.weight.bfloat16(), self.up.bias.bfloat16()))
        return x + nn.functional.linear(hidden, self.down.weight.bfloat16(), self.down.bias.bfloat16())


class Stage(nn.Module):
    """Two blocks, the first of which is applied twice; a scale in fp32; a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Block(), Block()])
        self.layers[1].up.bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.randn(8))
        self.head = nn.Parameter(torch.randn(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, self.layers[0]):
            x = layer(x)
        return (x * self.scale) @ self.head.bfloat16().float()


def _casts(stage: nn.Module) -> dict[str, torch.dtype]:
    return {name: BF16 for name, _ in stage.named_parameters() if name != "scale"}


def _microbatches() -> list[Tensor]:
    return [torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).to(BF16) for seed in range(3)]


def _gradients(stage: nn.Module) -> dict[str, Tensor]:
    """All forwards before all backwards, as in GPipe."""
    losses = [stage(rows).float().square().sum() for rows in _microbatches()]
    for loss in reversed(losses):
        loss.backward()
    return {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("again", [False, True])
def test_gradients_are_the_same_to_the_bit(again: bool) -> None:
    plain, once = Stage(), Stage()
    casts = CastOnce(once, list(once.layers), _casts(once))
    for layer in once.layers if again else ():
        recompute(layer)
    expected = _gradients(plain)
    with casts.step():
        found = _gradients(once)
    assert set(found) == set(expected) and "layers.1.up.bias" not in found
    assert all(found[name].dtype == torch.float32 for name in found)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_stages_of_a_rank_share_the_copy_of_a_parameter_of_both() -> None:
    first, second, plain = Stage(), Stage(), Stage()
    second.layers[0].up.weight = first.layers[1].up.weight
    casts = [CastOnce(stage, list(stage.layers), _casts(stage)) for stage in (first, second)]
    casts[1].share(casts[0])
    with casts[0].step(), casts[1].step():
        for stage in (second, first):
            stage(_microbatches()[0]).float().square().sum().backward()
        assert len(casts[0].storages) == 2 * len(_casts(first)) - 1
    plain(_microbatches()[0]).float().square().sum().backward()
    alone = Stage()
    alone.layers[0].up.weight = nn.Parameter(plain.layers[1].up.weight.detach().clone())
    alone(_microbatches()[0]).float().square().sum().backward()
    expected = plain.layers[1].up.weight.grad + alone.layers[0].up.weight.grad
    torch.testing.assert_close(first.layers[1].up.weight.grad, expected)
    assert not [*casts[0].left(), *casts[1].left()]


def test_microbatches_in_flight_share_one_copy() -> None:
    def copies(stage: nn.Module) -> int:
        """How many storages of 16 bits as large as a weight wait for a backward."""
        kept: dict[int, Tensor] = {}

        def note(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage().nbytes() == 2 * 8 * 16:
                kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with saved_tensors_hooks(note, lambda tensor: tensor):
            graphs = [stage(rows) for rows in _microbatches()]
        assert graphs
        return len(kept)

    stage = Stage()
    casts = CastOnce(stage, list(stage.layers), _casts(stage))
    plain = copies(stage)
    with casts.step():
        once = copies(stage)
    # Three calls of blocks with two weights, of which the first needs no gradient of its input; two blocks.
    assert plain == 3 * (3 * 2 - 1) and once == 2 * 2


def test_a_step_reads_the_values_of_its_time() -> None:
    stage = Stage()
    casts = CastOnce(stage, list(stage.layers), _casts(stage))
    rows = _microbatches()[0]
    for factor in (1.0, 2.0):
        with torch.no_grad():
            for parameter in stage.parameters():
                parameter.data.mul_(factor)  # what is written through ``.data`` counts as no change
        expected = stage(rows)
        with casts.step():
            assert torch.equal(stage(rows), expected)
            assert list(casts.left())
        assert not list(casts.left())
    assert isinstance(stage.layers[0].up.weight, nn.Parameter)


def test_a_forward_that_fails_leaves_parameters_in_their_places() -> None:
    stage = Stage()
    casts = CastOnce(stage, list(stage.layers), _casts(stage))
    with pytest.raises(RuntimeError), casts.step():
        stage(torch.ones(4, 7, dtype=BF16))
    assert not list(casts.left())
    modules = [module for module in stage.modules() if module._parameters]
    assert all(not set(module._parameters) & set(vars(module)) for module in modules)


def test_values_that_arrive_when_a_block_is_entered_are_read() -> None:
    stage = Stage()
    casts = CastOnce(stage, list(stage.layers), _casts(stage))

    def arrives(module: nn.Module, args: object) -> None:
        module.up.weight.data.fill_(0.5)

    stage.layers[1].register_forward_pre_hook(arrives)
    with casts.step():
        stage(_microbatches()[0])
        copy = casts._copies[stage.layers[1].up.weight, BF16]
    assert (copy == 0.5).all()


@pytest.mark.costly
@pytest.mark.parametrize(
    ("mesh", "listed"),
    [({"pp": 2}, True), ({"tp": 2}, True), ({"dp_shard": 2}, False)],
    ids=str,
)
def test_plans_list_what_is_cast(mesh: dict[str, int], listed: bool, tmp_path: Path) -> None:
    program = program_of("llama", dtype="bf16")
    folder = gp.partition(program, gp.plan(program, mesh=mesh)).save(tmp_path / "out")
    casts = load_manifest(folder).casts
    assert set(casts) == (set(program.parameters) if listed else set())
    assert set(casts.values()) <= {BF16}
