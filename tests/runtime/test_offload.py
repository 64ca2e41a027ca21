"""State on the host, and what blocks keep there, in one process on a CPU that is taken to have a host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import graphpar as gp
from graphpar.runtime import Pipeline, start
from graphpar.runtime.debugging.rank_alone import draw_values
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.stages.cast_once import CastOnce
from graphpar.runtime.stages.offloaded_activations import OffloadedActivations
from graphpar.runtime.state import gradient_buckets, gradients, offloaded_state
from graphpar.runtime.state import host as host_module
from graphpar.runtime.state.fully_sharded import like
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


# ---- shards of parameters ----------------------------------------------------------------------------------------

ELSEWHERE = torch.device("meta")
"""In place of a host: no shard is there."""


def when_it_begins(pipeline: Pipeline, move: Callable[..., None]) -> None:
    move()


def when_a_forward_runs(pipeline: Pipeline, move: Callable[..., None]) -> None:
    pipeline.stages[0].register_forward_pre_hook(lambda *_: move())


def when_gradients_are_finished(pipeline: Pipeline, move: Callable[..., None]) -> None:
    finish = pipeline._gradients.finish
    pipeline._gradients.finish = lambda *scale: (finish(*scale), move())[0]  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(4, 4)
    program = gp.export(model, (x,), loss_fn=nn.functional.mse_loss, targets=(x,))
    plan = gp.plan(program, mesh={"dp_shard": 2}, zero=3, offload="params", microbatch_size=1)
    return gp.partition(program, plan).save(tmp_path_factory.mktemp("sharded") / "out")


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        (lambda *_: None, None),
        (when_it_begins, "before a gather"),
        (when_a_forward_runs, "after a forward"),
        (when_gradients_are_finished, "after the backward"),
    ],
)
def test_a_shard_that_is_not_at_home_is_found(sharded: Path, planted: Callable[..., None], said: str | None) -> None:
    """By one of two ranks, alone."""
    with start(alone=(0, 2)) as ranks, pretended(), Pipeline(sharded, ranks.device) as pipeline:
        draw_values(pipeline)
        places = pipeline._places
        planted(pipeline, lambda: setattr(places, "_home", ELSEWHERE))
        batch = (torch.randn(4, 4), torch.randn(4, 4))
        if said is None:
            pipeline.step(batch)
            assert len(places._shards) == 4 and all(shard.offload_to_cpu for _, shard in places._shards)
            assert all(shard.sharded_param.grad is not None for _, shard in places._shards)
            return
        with pytest.raises(
            RuntimeProgramError, match=f"the shard of 0.weight is on the device cpu {said}; .* leave it on meta"
        ):
            pipeline.step(batch)


def test_gradients_on_the_host_are_summed_and_clipped_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fake tensors, which refuse operators on two devices: gradients on a CPU, of a GPU that this machine need not have."""
    gpu, summed = torch.device("cuda", 0), list[torch.device]()

    def all_reduce(value: Tensor, **_: object) -> SimpleNamespace:
        summed.append(value.device)
        return SimpleNamespace(wait=lambda: None)

    def multiply(parts: list[Tensor], scale: Tensor) -> None:
        assert all(part.device == scale.device and part.dtype == scale.dtype for part in parts)

    monkeypatch.setattr(gradient_buckets.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(torch, "_foreach_mul_", multiply)  # a fake one takes a number of another device
    with FakeTensorMode(), torch.no_grad():
        shards = [nn.Parameter(torch.empty(3)), nn.Parameter(torch.empty(5))]
        for shard in shards:
            shard.grad = torch.empty_like(shard)
        norm = gradients.clip(shards, shards, 1.0, gpu)
        assert norm.device == gpu and shards[0].grad is not None and shards[0].grad.device.type == "cpu"
        partials = [gradient_buckets.Partial([shard], before=[None]) for shard in shards]
        bucket = gradient_buckets.Bucket(None, gpu, partials, False, torch.bfloat16)  # type: ignore[arg-type]
        bucket.send()
        bucket.receive(iter([True, True]))
        for shard, partial in zip(shards, partials):
            partial.give()
            assert (shard.grad.device.type, shard.grad.dtype, shard.grad.shape) == ("cpu", shard.dtype, shard.shape)
    assert summed == [gpu, gpu] and bucket.alone


def test_a_part_stays_where_it_is_and_does_not_go_to_the_devices_of_its_mesh() -> None:
    """The roles changed: the mesh is of CPUs, and the part is elsewhere."""
    with start(), FakeTensorMode():
        assert dist.group.WORLD is not None
        mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
        parameter = DTensor.from_local(torch.empty(4), mesh, [Shard(0)])
        assert like(parameter, torch.empty(4, device="cuda")).device.type == "cuda"
