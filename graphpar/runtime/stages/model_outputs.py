"""What the model of a training program returns besides its loss, in an evaluation: joined, or measured a microbatch at a time.

logits [b, s, v/2] of a microbatch ──over tp, cp, ep──► [b, s, v] on the last stage ─┬─over microbatches, replicas──► outputs
                                                                                     └─a metric's sums──over replicas──► metrics

Nothing is kept, joined or sent of what nobody asks for, and without outputs no rank holds more than a microbatch's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from types import ModuleType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphpar.runtime.distributed import gather_tensors
from graphpar.runtime.errors import RuntimeProgramError, near_match
from graphpar.runtime.layout import P, divisions, joined, local_size
from graphpar.runtime.manifest import Manifest, ModelOutputInterface
from graphpar.runtime.stages.lengths import cropped
from graphpar.runtime.stages.own_stages import OwnStages

Metric = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Tensor | tuple[Tensor | float, Tensor | float]]
"""Measures some rows, from the model's outputs and the batch, both by name. What it returns says how results add up: ``(total, count)``,
the metric being all totals over all counts; a tensor of a number for each row, whose mean it is; or a scalar, whose sum it is."""


class ModelOutputs:
    """Takes what the model returns of each microbatch, as a context of a forward alone.

    Args:
        outputs: the names of what is returned whole; True: all that the program has.
        metrics: by the names of their results.

    Raises:
        RuntimeProgramError: the program does not have an output.
    """

    def __init__(self, own: OwnStages, outputs: bool | Collection[str], metrics: Mapping[str, Metric]) -> None:
        self._own, self._program, self._groups = own, own.program, own.groups
        self._metrics, self._sums = metrics, {name: list[tuple[Tensor, Tensor | None]]() for name in metrics}
        program = own.program
        has = {spec.name: spec for spec in program.offered_outputs}
        _check(own.program, list(has), outputs, metrics)
        names = list(has) if outputs is True else outputs or ()
        self._returned = [spec for name, spec in has.items() if name in names]
        self._taken = list(has.values()) if metrics else self._returned
        self._parts: dict[str, list[Tensor]] = {spec.name: [] for spec in self._returned}
        self._found: dict[str, Tensor] = {}
        self._sent: list[tuple[dist.Work | None, Tensor]] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    @property
    def _emitted(self) -> ModuleType | None:
        return sys.modules.get(f"{self._own.package}.model_outputs")

    def __enter__(self) -> ModelOutputs:
        if self._taken and self._emitted is not None:
            self._emitted.kept = self._found  # type: ignore[attr-defined]
        stages = {interface.index: module for interface, module in zip(self._own.interfaces, self._own.modules)}
        for spec in self._taken:
            if spec.module is not None and spec.stage in stages:
                self._hooks.append(self._hook(stages[spec.stage].get_submodule(spec.module), spec.name))
        return self

    def _hook(self, module: nn.Module, name: str) -> torch.utils.hooks.RemovableHandle:
        def keep(_: nn.Module, given: Any, result: Tensor) -> None:
            self._found[name] = result

        return module.register_forward_hook(keep)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._emitted is not None:
            self._emitted.kept = None  # type: ignore[attr-defined]
        for hook in self._hooks:
            hook.remove()
        for work, _ in self._sent if error is None else ():
            if work is not None:
                work.wait()

    @property
    def joins(self) -> bool:
        """Whether outputs of replicas are joined."""
        return bool(self._returned)

    def take(self, program: Manifest, batch: Mapping[str, Tensor]) -> None:
        """Take what this rank's stages have computed of a microbatch, whose inputs are ``batch``, of a ``program`` of their length."""
        own, last = self._groups.place["pp"], self._program.stages[-1].rank
        outputs: dict[str, Tensor] = {}
        specs = {spec.name: spec for spec in program.offered_outputs}
        for spec in (specs[each.name] for each in self._taken):
            maker = self._program.stages[spec.stage].rank
            if own == maker:
                outputs[spec.name] = self._joined(spec, self._found.pop(spec.name))
            if maker != last and own == maker:
                sent = _as_bytes(outputs[spec.name])
                self._sent.append((dist.isend(sent, self._groups.rank_at(pp=last), self._groups["pp"]), sent))
            elif maker != last and own == last:
                value = torch.empty(spec.shape, dtype=spec.dtype, device=self._groups.device)
                dist.recv(_as_bytes(value), self._groups.rank_at(pp=maker), self._groups["pp"])
                outputs[spec.name] = value
        if own == last:
            outputs = {name: cropped(value, specs[name].per_position, program) for name, value in outputs.items()}
            batch = {name: cropped(value, program.input(name).per_position, program) for name, value in batch.items()}
            for spec in self._returned:
                self._parts[spec.name].append(outputs[spec.name])
            for name, metric in self._metrics.items():
                self._sums[name].append(_sums(name, metric(outputs, batch)))

    def _joined(self, spec: ModelOutputInterface, value: Tensor) -> Tensor:
        """Return a replica's value of a microbatch, of which this rank has a part."""
        share = self._own.adapters[-1].share if spec.adds else None
        value = value if share is None else value * share
        for axis, kind in spec.types.items():
            if kind == P and (group := self._groups[axis]) is not None:
                value = value.clone()
                dist.all_reduce(value, group=group)
        sizes, steps = list(spec.shape), []
        for each in divisions(spec.types):
            size = sizes[each.shard.dim]
            steps.append((each, size))
            sizes[each.shard.dim] = local_size(size, each.shard, each.degree(self._groups.degrees))
        for each, size in reversed(steps):
            group = self._groups[each.axes[0]]
            value = value if group is None else joined(gather_tensors(value, group), each.shard, size)
        if tuple(value.shape) != spec.shape or value.dtype != spec.dtype:
            raise RuntimeProgramError(
                f"the output {spec.name} is {value.dtype} {list(value.shape)}; plan.json says {spec.dtype} {list(spec.shape)}"
            )
        return value

    def drop(self, microbatches: int) -> None:
        """Drop what was taken of so many microbatches, the last ones."""
        for parts in self._parts.values():
            del parts[-microbatches:]
        for sums in self._sums.values():
            del sums[-microbatches:]

    def results(self) -> dict[str, Tensor]:
        """Return outputs and metrics of all that was taken, by name; a collective call of the last stage's replicas."""
        found, replicas = {}, self._groups["batch"]
        for spec in self._returned:
            parts = self._parts[spec.name]
            batches = [
                parts[i : i + self._program.microbatches] for i in range(0, len(parts), self._program.microbatches)
            ]
            each = [join(spec.name, batch, spec.batch_dim, spec.adds) for batch in batches]
            if replicas is not None:
                each = [join(spec.name, gather_tensors(part, replicas), spec.batch_dim, spec.adds) for part in each]
            found[spec.name] = join(spec.name, each, spec.batch_dim, spec.adds)
        for name, sums in self._sums.items():
            counts = [count for _, count in sums if count is not None]
            total = torch.stack(
                [torch.stack([total for total, _ in sums]).sum(), *([torch.stack(counts).sum()] if counts else [])]
            )
            if replicas is not None:
                dist.all_reduce(total, group=replicas)
            found[name] = total[0] / total[1] if counts else total[0]
        return found


def _check(
    program: Manifest, has: Sequence[str], outputs: bool | Collection[str], metrics: Mapping[str, Metric]
) -> None:
    unknown = [] if isinstance(outputs, bool) else [name for name in outputs if name not in has]
    if program.mode != "train":
        if metrics:
            raise RuntimeProgramError("metrics need a program for training, which takes targets")
        return
    if unknown or (outputs and not has):
        which = f"output {unknown[0]!r}" if unknown else "outputs"
        near = near_match(unknown[0], has) if unknown else ""
        raise RuntimeProgramError(
            f"the program has no {which}: of what the model returns with the loss, it keeps what the loss is computed from and ranks "
            f"can join, here {', '.join(has) or 'nothing'}.{near} Compile the model with --mode infer for the rest, or with --loss-chunk 0 "
            "for logits that the loss takes in chunks."
        )
    taken = [name for name in metrics if name in ("loss", *has)]
    if taken:
        raise RuntimeProgramError(f"a metric is named {taken[0]!r}, as what the model returns; give it another name")


def _sums(name: str, found: Any) -> tuple[Tensor, Tensor | None]:
    """Return what a metric adds to its total, and to its count."""
    if isinstance(found, tuple) and len(found) == 2:
        total = torch.as_tensor(found[0]).double()
        return total, torch.as_tensor(found[1]).double().to(total.device)
    if isinstance(found, Tensor) and found.ndim < 2:
        total = found.double().sum()
        return total, torch.full_like(total, found.numel()) if found.ndim else None
    what = f"a tensor of {found.ndim} dims" if isinstance(found, Tensor) else f"a {type(found).__name__}"
    raise RuntimeProgramError(
        f"the metric {name} returned {what}; it must return a total and a count, a number for each row, or a scalar to add up"
    )


def _as_bytes(value: Tensor) -> Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)  # gloo does not know every dtype


def join(name: str, parts: Sequence[Tensor], batch_dim: int | None, adds: bool) -> Tensor:
    """Join an output of microbatches, replicas or batches: along the batch dim, or as the sum of shares.

    Raises:
        RuntimeProgramError: it has no batch dim, and differs.
    """
    if batch_dim is not None:
        if len({(*part.shape[:batch_dim], *part.shape[batch_dim + 1 :]) for part in parts}) > 1:
            raise RuntimeProgramError(
                f"the output {name} has other sizes in other batches; ask for outputs of batches of one length"
            )
        return torch.cat(list(parts), dim=batch_dim)
    if adds:
        return torch.stack(list(parts)).sum(0)
    if any(not torch.equal(part, parts[0]) for part in parts[1:]):
        raise RuntimeProgramError(
            f"the output {name} has no batch dim and differs between microbatches or replicas: emit the program with one"
        )
    return parts[0]
