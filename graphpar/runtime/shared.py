"""Parameters that several stages hold: tied weights, and weights that stages share under one name.

Each holder is a copy. torch's pipeline fills each copy's ``.grad`` with that stage's part only, so:

    before a step   take(): put away what earlier steps accumulated in the copies
    after a step    put_back(): sum the new parts over all copies, add what was put away

Then every copy has the single-device gradient, the same bits everywhere, and stays equal to the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphpar.runtime.distributed import gather_objects, group_timeout
from graphpar.runtime.weights import names_by_tie


@dataclass
class SharedParameter:
    """One parameter of the user's model that more than one stage holds."""

    name: str
    ranks: tuple[int, ...]
    copies: list[nn.Parameter]
    group: dist.ProcessGroup | None = None
    before: list[Tensor | None] = field(default_factory=list)


class SharedParameters:
    """All shared parameters of the program, as this rank sees them.

    Building it is a collective call: it creates the process groups, in the same order on every rank.
    """

    def __init__(self, stages: Sequence[nn.Module], ties: Sequence[Sequence[str]], device: torch.device) -> None:
        self.device = device
        held = parameters_by_name(stages, ties)
        everyone = gather_objects({name: len(copies) for name, copies in held.items()})
        names = sorted({name for counts in everyone for name in counts})
        self.rank = dist.get_rank()
        self._timeout = group_timeout(device)
        self.shared: list[SharedParameter] = []
        self.owned: list[nn.Parameter] = []
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for name in names:
            ranks = tuple(rank for rank, counts in enumerate(everyone) if name in counts)
            if sum(everyone[rank][name] for rank in ranks) > 1:
                group = self._group(ranks) if len(ranks) > 1 else None
                self.shared.append(SharedParameter(name, ranks, held.get(name, []), group))
            if ranks[0] == self.rank:
                self.owned.append(held[name][0])
        self._crosses = any(len(shared.ranks) > 1 for shared in self.shared)

    def _group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        if ranks not in self._groups:
            everyone = tuple(range(dist.get_world_size()))
            group = dist.group.WORLD if ranks == everyone else dist.new_group(list(ranks), timeout=self._timeout)
            assert group is not None
            self._groups[ranks] = group
        return self._groups[ranks]

    def close(self) -> None:
        """Destroy the process groups that were created for this program."""
        for group in self._groups.values():
            if group is not dist.group.WORLD and isinstance(group, dist.ProcessGroup):
                dist.destroy_process_group(group)
        self._groups.clear()

    def take(self) -> None:
        """Put away the gradients that the copies have, so that a step's own parts can be told from them."""
        for shared in self.shared:
            shared.before = [copy.grad for copy in shared.copies]
            for copy in shared.copies:
                copy.grad = None

    def put_back(self) -> None:
        """Give every copy the sum of all copies' new gradients, added to what was put away."""
        present = self._present()
        for shared, is_present in zip(self.shared, present):
            if is_present and shared.copies:
                total = _sum_of_copies(shared)
                if shared.group is not None:
                    dist.all_reduce(total, group=shared.group)
            for i, (copy, before) in enumerate(zip(shared.copies, shared.before)):
                if not is_present:
                    copy.grad = before
                elif before is not None:
                    copy.grad = before.add_(total)
                else:
                    copy.grad = total if i == 0 else total.clone()
            shared.before = []

    def _present(self) -> list[bool]:
        """For each shared parameter, whether any copy anywhere got a gradient in this step."""
        local = [any(copy.grad is not None for copy in shared.copies) for shared in self.shared]
        if not self._crosses:
            return local
        flags = torch.tensor(local, dtype=torch.int32, device=self.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return [bool(flag) for flag in flags.tolist()]


def _sum_of_copies(shared: SharedParameter) -> Tensor:
    """The sum of this rank's copies' gradients, in a tensor of its own; zero when there are none."""
    parts = [copy.grad for copy in shared.copies if copy.grad is not None]
    if not parts:
        return torch.zeros_like(shared.copies[0], requires_grad=False)
    total = parts[0].contiguous()
    for part in parts[1:]:
        total = total.add_(part)
    return total


def parameters_by_name(stages: Sequence[nn.Module], ties: Sequence[Sequence[str]]) -> Mapping[str, list[nn.Parameter]]:
    """The distinct parameter objects of these stages, by the first name of their tie (or their own)."""
    tied = names_by_tie(ties)
    held: dict[str, list[nn.Parameter]] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            copies = held.setdefault(tied.get(name, (name,))[0], [])
            if not any(parameter is copy for copy in copies):
                copies.append(parameter)
    return held
