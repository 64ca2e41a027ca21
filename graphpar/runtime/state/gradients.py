"""Finish gradients: partial gradients of parameters are all-reduced once a step.

A gradient is partial over an axis on which its parameter is stored as R (data parallelism; the norm weights of
sequence parallelism), and over the copies of a parameter that several stages hold (tied weights). One mechanism:

    before a step        take(): set aside what earlier steps accumulated
    in the last backward all-reduces over replicas start, a flat bucket at a time, as soon as its gradients are complete
    after a step         finish(): start those of the other buckets, wait for all, add what was set aside
    accumulating steps   take(accumulate=True), once for all of them: nothing is summed until a step that is finished

Where a rank updates pieces (ZeRO level 1) gradients are first summed over the ranks that share state, a unit at a time, to those whose
pieces they are (:mod:`graphpar.runtime.state.zero1`); over other axes and stages the pieces' gradients are summed then, as above.

Then every rank that stores the parameter has the single-device gradient (its shard of it), with the same bits on all
ranks of a group. Where a parameter is stored as I, ranks compute its full gradient each, and nothing is summed; on devices whose kernels
round apart (:data:`~graphpar.runtime.state.replicas.ROUND_APART`) all then take that of the axis's first rank, in flat buckets.

Only groups that no forward or backward uses may start early, which are those over axes of replicas where no operator is
placed on them. All-reduces of buckets start in one order on all ranks, and that of an incomplete bucket (a zero-bubble
schedule adds weights' gradients outside autograd, or a parameter was not used) starts when the step ends.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from graphpar.runtime.axes import REPLICAS
from graphpar.runtime.debugging.fp64 import current
from graphpar.runtime.distributed import StopSignal, agreed, gather_tensors
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.layout import I, R, Shard
from graphpar.runtime.state.fully_sharded import like, local
from graphpar.runtime.state.gradient_buckets import Bucket, Partial, Presence, Started, Sum, UnitBucket, buckets, send
from graphpar.runtime.state.parameters import Replicated
from graphpar.runtime.state.replicas import ROUND_APART, checksum
from graphpar.runtime.state.units import counts_of_copies, pieces_of


class Gradients:
    """The gradients of this rank's parameters. Building it is a collective call: it creates process groups.

    ``requires_grad`` may be changed between steps, but alike on all ranks.
    """

    def __init__(self, parameters: Replicated, device: torch.device) -> None:
        program, groups, held = parameters.program, parameters.groups, parameters.held
        self.device = device
        self._rank = groups.rank
        self.microbatches = program.microbatches
        aside = program.scales_loss or program.expert_room is not None  # what a step adds may have to be dropped
        everyone = counts_of_copies(parameters.stages, program, groups)
        self.counted: list[nn.Parameter] = []
        """The parameters whose elements this rank counts, where each of the whole model's is counted once."""
        sums: dict[Any, Sum] = {}
        # alike on all ranks: those of other stages first, and within a stage the last used first, as a backward goes
        for name in dict.fromkeys(reversed([name for counts in everyone for name in counts])):
            holders = tuple(at for at, counts in enumerate(everyone) if name in counts)
            spec = program.stored(name)
            # a piece's own gradient is summed over the axes that divide it already
            axes = tuple(axis for axis, kind in spec.items() if kind == R and axis not in parameters.divides)
            copies = parameters.updated.get(name, [])
            alike = tuple(axis for axis, kind in spec.items() if kind == I and axis in groups.axes)
            alike = alike if device.type in ROUND_APART else ()
            key = axes, holders if len(holders) > 1 else None
            elsewhere = key != ((), None)
            if key not in sums:
                early = set(axes[:1]) <= set(REPLICAS) - set(program.placed) and key[1] is None and bool(axes)
                early &= not parameters.sums_first
                beyond = bool(set(axes) - set(REPLICAS)) or key[1] is not None
                reduced = bool(set(axes) & set(REPLICAS))
                sums[key] = Sum(groups.over(*key) if elsewhere else None, reduced, beyond, early)
            if copies and (elsewhere or len(copies) > 1 or parameters.units or aside or alike):
                sums[key].partials.append(Partial(copies, name, alike))
            replicated = [
                axis for axis, kind in spec.items() if not isinstance(kind, Shard) and axis not in parameters.divides
            ]
            if copies and groups.place["pp"] == holders[0] and all(groups.place[axis] == 0 for axis in replicated):
                self.counted.append(copies[0])
        self._groups = groups.axes
        self._reduce_dtype = current(program.reduced)
        self._scales = program.scales_loss
        self._units = parameters.units
        self._early_units = "dp_shard" not in program.placed
        self._sums = sorted(sums.values(), key=lambda total: not total.early)
        self._held = {copy for copies in (*held.values(), *parameters.updated.values()) for copy in copies}
        self._refusal: RemovableHandle | None = None  # while there are gradients that are not reduced
        self._may_repeat = program.expert_room is not None
        self._unreduced: dict[
            nn.Parameter, Tensor
        ] = {}  # copies of those of steps before, while a step may be repeated
        self._kept: list[
            tuple[nn.Parameter, Tensor, bool]
        ] = []  # parameters, their gradients, whether those stand for others
        named = [pair for stage in parameters.stages for pair in stage.named_parameters()]
        copied = program.dtype != "fp32" and any(each.requires_grad and each.itemsize > 2 for _, each in named)
        self._in_16_bits = [
            (name, each) for name, each in named if copied and not each.requires_grad and each.itemsize == 2
        ]
        self._readers = Counter(each for stage in parameters.stages for each in stage.parameters())
        """In how many stages of this rank a parameter is."""
        self._trained: set[nn.Parameter] = set()  # while there are gradients that are not reduced
        self._alone: list[Partial] = []
        self._of_units: list[Bucket] = []
        self._buckets: list[Bucket] = []
        self._sent = 0
        self._presence: dict[tuple[dist.ProcessGroup, type[Bucket]], Presence] = {}
        self._to_come: dict[nn.Parameter, tuple[int, Bucket]] = {}
        arrived = weakref.WeakMethod(self._arrived)  # a parameter must not keep process groups alive
        watched = [copy for total in self._sums if total.early for partial in total.partials for copy in partial.copies]
        if self._early_units:
            watched += [copy for unit in self._units for copies in unit.copies for copy in copies]
        for parameter in watched:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p: call(p) if (call := arrived()) else None)

    def take(self, accumulate: bool = False) -> None:
        """Set aside the gradients accumulated so far, so that only those of this step are summed.

        Those of steps before that were not finished, with ``accumulate``, are summed with this step's.

        Raises:
            RuntimeProgramError: these were dropped in part, or other parameters are trained since, or one that is stored in 16 bits.
        """
        self._check_kept()
        thawed = next((name for name, parameter in self._in_16_bits if parameter.requires_grad), None)
        if thawed is not None:
            raise RuntimeProgramError(
                f"{thawed} was frozen when the program was compiled, so it is stored in 16 bits, without a copy in fp32; compile the "
                "model with it trainable"
            )
        self._alone, self._buckets, self._sent, self._to_come = [], [], 0, {}
        for total in self._sums:
            trained = [
                partial
                for partial in total.partials
                if partial.before or any(copy.requires_grad for copy in partial.copies)
            ]
            for partial in trained:
                if not partial.before:
                    partial.before = [copy.grad for copy in partial.copies]
                    for copy in partial.copies:
                        copy.grad = None
            if accumulate:
                continue
            if total.group is None:
                self._alone += trained
                continue
            for indices in buckets([local(partial.copies[0]) for partial in trained]):
                partials = [trained[i] for i in indices]
                dtype = self._dtype_of_sum(total, partials[0].copies[0].dtype)
                self._buckets.append(Bucket(total.group, self.device, partials, total.early, dtype))
        if self._may_repeat:
            self._unreduced = {each: each.grad.clone() for each in self._held if each.grad is not None}
        self._of_units = [
            UnitBucket(
                group,
                self.device,
                [Partial(copies) for copies in unit.copies],
                self._early_units,
                self._reduce_dtype,
                unit=unit,
            )
            for unit in (() if accumulate else reversed(self._units))
            if (group := unit.groups["fsdp"]) is not None
        ]
        for bucket in [*self._of_units, *self._buckets]:
            if bucket.early:
                copies = [copy for partial in bucket.partials for copy in partial.copies]
                bucket.incomplete = {copy for copy in copies if copy.requires_grad}
                self._to_come |= {copy: (self.microbatches * self._readers[copy], bucket) for copy in bucket.incomplete}
        if accumulate and self._refusal is None:
            self._refusal = register_optimizer_step_pre_hook(self._refuse)

    @property
    def accumulated(self) -> bool:
        """Whether steps have left gradients that are not reduced, to which the next one adds."""
        return self._refusal is not None

    def again(self, accumulate: bool) -> None:
        """Drop the gradients of a step that is computed again; a collective call.

        All ranks wait for the same sums: those that the backward starts.
        """
        queue = list(itertools.takewhile(lambda bucket: bucket.early, [*self._of_units, *self._buckets]))
        for at in range(self._sent, len(queue)):
            send(queue, at)
        for bucket in queue:
            bucket.settle()
        for parameter in self._held:
            if parameter.requires_grad:
                parameter.grad = self._unreduced.get(parameter)
        self.take(accumulate)

    def _refuse(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Refuse a step of an optimizer of ours while gradients are not reduced: each rank would make another."""
        updated = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        if not updated.isdisjoint(self._held):
            self.check_reduced("the optimizer's step")

    def keep(self, parameters: Iterable[nn.Parameter]) -> None:
        """After a step that is not finished: let each of ``parameters`` have a gradient, without memory where it is elsewhere, so that
        it is seen when someone drops them."""
        self._unreduced = {}
        self._trained = {parameter for parameter in self._held if parameter.requires_grad}
        for parameter in parameters:
            if (stands := parameter.grad is None) and parameter.requires_grad:
                nothing = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
                parameter.grad = like(parameter, nothing.expand(local(parameter).shape))
            if parameter.grad is not None:
                self._kept.append((parameter, parameter.grad, stands))

    def _check_kept(self) -> None:
        kept, self._kept = self._kept, []
        for parameter, gradient, stands in kept:
            if parameter.grad is not gradient:
                raise RuntimeProgramError(
                    "gradients were dropped after a step with accumulate=True, as by optimizer.zero_grad(), which does not reach those "
                    "that are not reduced yet; call pipeline.zero_grad()"
                )
            if stands:
                parameter.grad = None
        if kept and self._trained != {parameter for parameter in self._held if parameter.requires_grad}:
            raise RuntimeProgramError(
                "requires_grad was changed between steps whose gradients are reduced together (accumulate=True); "
                "change it after the step that reduces them"
            )

    def check_reduced(self, what: str) -> None:
        """Check that no step has left gradients that are still to be reduced.

        Raises:
            RuntimeProgramError: one has.
        """
        if self._refusal is not None:
            raise RuntimeProgramError(
                f"{what} needs reduced gradients, but those of the last steps, with accumulate=True, stay on their ranks until a "
                "step without it; call pipeline.step(batch) once more, or pipeline.zero_grad() to drop them"
            )

    def check_copies(self) -> None:
        """Compare the parameters whose gradients are summed, over the same ranks and copies; a collective call.

        Raises:
            AgreedError: on every rank, if one has other values than its copies.
        """
        found: str | None = None
        with agreed():
            for presence in self._presence.values():
                presence.check()
        for total in self._sums:
            if not total.partials:
                continue
            sums = [torch.stack([checksum(local(copy.detach())) for copy in each.copies]) for each in total.partials]
            differing = {
                each.name: (self._rank,) * 2 for each, own in zip(total.partials, sums) if (own != own[0]).any()
            }
            if total.group is not None:
                gathered = gather_tensors(torch.stack([own[0].to(self.device) for own in sums]), total.group)
                ranks = dist.get_process_group_ranks(total.group)
                for rank, theirs in zip(ranks, gathered):
                    names = [
                        each.name for each, other in zip(total.partials, (theirs != gathered[0]).tolist()) if other
                    ]
                    differing |= dict.fromkeys(names, (ranks[0], rank))
            if differing and found is None:
                name, (first, second) = next(iter(differing.items()))
                more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
                where = f"ranks {first} and {second}" if first != second else f"two stages of rank {first}"
                found = (
                    f"{name}{more} should be the same on {where}, which have the same gradients of it, but their optimizers have made it "
                    "different; make them with pipeline.optimizer(), or identically for all parameters that "
                    "have one name in pipeline.named_parameters()"
                )
        with agreed():
            if found is not None:
                raise RuntimeProgramError(found)

    def drop(self) -> None:
        """Forget what was set aside: the gradients of steps that were not finished are dropped."""
        for partial in (partial for total in self._sums for partial in total.partials):
            partial.before = []
        if self._refusal is not None:
            for parameter in self._held:
                parameter.grad = None
        self._kept = []
        self._reduced()

    def _reduced(self) -> None:
        if self._refusal is not None:
            self._refusal.remove()
            self._refusal = None

    def _dtype_of_sum(self, total: Sum, own: torch.dtype) -> torch.dtype | None:
        """Return the dtype of a sum: over replicas as planned, over other ranks the parameter's, over both the wider one."""
        if self._reduce_dtype is None or not total.reduced:
            return None
        return torch.promote_types(own, self._reduce_dtype) if total.beyond else self._reduce_dtype

    def _arrived(self, parameter: nn.Parameter) -> None:
        """A microbatch's gradient of this parameter has been added up."""
        if parameter not in self._to_come:
            return  # a backward outside of a step
        count, bucket = self._to_come[parameter]
        assert count, "a gradient came after those of all microbatches"
        self._to_come[parameter] = count - 1, bucket
        if count == 1:
            bucket.incomplete.discard(parameter)
            queue = [*self._of_units, *self._buckets]
            while self._sent < len(queue) and queue[self._sent].early and not queue[self._sent].incomplete:
                send(queue, self._sent)
                self._sent += 1

    def started(self) -> list[Started]:
        """Wait for the sums that began in the backward, and return them."""
        found: list[Started] = []
        for bucket in [*self._of_units, *self._buckets][: self._sent]:
            bucket.settle()
            assert bucket.flat is not None
            found.append(Started(bucket.flat, bucket.present))
        return found

    def put_started(self, sums: Sequence[Started]) -> None:
        """Have these sums, in the place of a backward that would begin them."""
        self._sent, self._to_come = len(sums), {}
        for bucket, made in zip([*self._of_units, *self._buckets], sums):
            bucket.flat, bucket.present = made.flat, list(made.present)

    def finish(self, scale: float = 1.0) -> bool:
        """Sum the gradients of this step, and add what was set aside; a collective call.

        A parameter that got a gradient on some ranks only counts as zero on the others.

        Args:
            scale: of the loss; gradients are divided by it.

        Returns:
            Whether all of them are finite, on all ranks, where the loss is scaled. If not, none is given to any parameter.
        """
        self._to_come, self._unreduced = {}, {}
        self._complete(self._of_units, self._sent)
        for partial in self._alone:
            partial.total = partial.take_part()
        self._complete(self._buckets, max(0, self._sent - len(self._of_units)))
        partials = [*self._alone, *(partial for bucket in self._buckets for partial in bucket.partials)]
        finite = not self._scales or self._unscale(partials, scale)
        self._make_equal(partials)
        for partial in partials:
            partial.give()
        self._alone, self._of_units, self._buckets, self._sent = [], [], [], 0
        self._reduced()
        return finite

    def _unscale(self, partials: Sequence[Partial], scale: float) -> bool:
        """Divide the sums by ``scale``, or drop them all where one is not finite on any rank; a collective call."""
        overflown = torch.zeros((), device=self.device)
        for partial in partials:
            if partial.total is not None:
                partial.total = partial.total / scale
                overflown += ~partial.total.isfinite().all()
        dist.all_reduce(overflown)
        finite = not overflown.item()
        for partial in () if finite else partials:
            partial.total = None
        return finite

    def _make_equal(self, partials: Sequence[Partial]) -> None:
        """Give ranks that compute the same gradient that of the first of them; a collective call where there are any.

        Axes one after the other, so that in the end all have that of the first rank on each. What gradients there are follows from the
        program and ``requires_grad``, so it is the same on these ranks.
        """
        for axis, group in self._groups.items():
            given = [(each, each.total) for each in partials if axis in each.alike and each.total is not None]
            for indices in buckets([total for _, total in given]):
                parts = [given[i][1] for i in indices]
                own = [part.to(self.device) for part in parts]
                flat = torch.cat([part.reshape(-1) for part in own]) if len(own) > 1 else own[0].contiguous()
                dist.broadcast(flat, group_src=0, group=group)
                for i, total in zip(indices, pieces_of(flat, [part.shape for part in parts])):
                    given[i][0].total = total.to(given[i][1].device)

    def _complete(self, buckets: Sequence[Bucket], sent: int) -> None:
        """Start what is left of ``buckets``, of which ``sent`` are under way, and wait for all."""
        for at in range(sent, len(buckets)):
            send(buckets, at)
        by_group: dict[dist.ProcessGroup, list[Bucket]] = {}
        for bucket in buckets:
            by_group.setdefault(bucket.group, []).append(bucket)
        presences = {
            group: self._presence.setdefault((group, type(own[0])), Presence()) for group, own in by_group.items()
        }
        for group, presence in presences.items():
            presence.ask(group, by_group[group], self.device)
        # After everything has been started: the answer may have to be waited for.
        has_gradient = {group: iter(presence.answer()) for group, presence in presences.items()}
        for bucket in buckets:
            bucket.receive(has_gradient[bucket.group])

    def left(self) -> Iterator[str]:
        """Say what a step that did not end has left: sums not waited for, gradients set aside."""
        if self._sent:
            yield f"{self._sent} reductions of gradients have not been waited for"
        if waiting := len(self._of_units) + len(self._buckets) - self._sent:
            yield f"{waiting} reductions of gradients have not been started"
        if aside := sum(bool(partial.before) for total in self._sums for partial in total.partials):
            yield f"the gradients of {aside} parameters from earlier steps are set aside"


@torch.no_grad()
def clip(
    counted: Iterable[nn.Parameter],
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    device: torch.device,
    stop: StopSignal | None = None,
) -> Tensor:
    """Scale the gradients of ``parameters`` so that their norm over the model is at most ``max_norm``; a collective call.

    Args:
        counted: those of this rank's parameters that no other rank counts.
        stop: what is summed over all ranks together with the norm.

    Returns:
        The norm before.
    """
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for gradients in _alike(parameter for parameter in counted if parameter.grad is None or parameter.grad.numel()):
        norms = torch._foreach_norm(gradients, 2, dtype=torch.promote_types(gradients[0].dtype, torch.float32))
        squares += torch.stack(norms).double().square().sum().to(device)
    if stop is None:
        dist.all_reduce(squares)
    else:
        squares = stop.summed(squares)
    norm = squares.sqrt()
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradients in _alike(parameters):
        torch._foreach_mul_(gradients, scale.to(gradients[0]))
    return norm


def _alike(parameters: Iterable[nn.Parameter]) -> list[list[Tensor]]:
    """Return this rank's parts of the gradients that there are, of one dtype and on one device together."""
    found: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            part = local(parameter.grad)
            found.setdefault((part.dtype, part.device), []).append(part)
    return list(found.values())
