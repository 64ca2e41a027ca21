"""Tokens one after the other, over a pipeline's ranks.

    round     group 0: a window of its sequences goes through the stages; the last one chooses the next tokens
              group 1: the same, while group 0's window is in later stages
    next round begins with the tokens of the last: they go to all ranks over a group of their own, beside the next groups' windows

A group is as many sequences as the program computes at once. The first windows of a group are its prompts, up to the end of the shortest;
from there on positions come one by one, and a longer prompt gives its own token where another sequence takes the chosen one. So no position
is padding, whatever the lengths.

Each replica takes its share of the prompts, and has as many groups in flight as the plan says; the next one begins where one ends. In the
end replicas tell each other what they found.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from graphpar.runtime.axes import AXIS
from graphpar.runtime.distributed import agreed, gather_objects, gather_tensors
from graphpar.runtime.generation.prompts import Sampling, check_alike, requested
from graphpar.runtime.groups import Groups
from graphpar.runtime.manifest import Manifest
from graphpar.runtime.stages.batches import share_of
from graphpar.runtime.stages.modules import StageAdapter, keywords

TOKENS = 2048
"""Of a window, all sequences together: a long prompt goes through the stages in windows of at most so many."""


class Answer(NamedTuple):
    """The tokens that follow a prompt, and the log-probability that the model gives each of them."""

    tokens: list[int]
    logprobs: list[float]


@dataclass
class _Group:
    """Sequences that go through the stages together.

    Attributes:
        numbers: which they are among all.
        prompts: how many tokens of each were given.
        limits: how many tokens each has in the end, at most.
        caches: of each of this rank's stages, while it is in flight.
        position: how many positions the caches have.
        logprobs: of the new tokens of each so far.
        pending: the tokens that are on their way to this rank, with their log-probabilities.
    """

    numbers: list[int]
    sequences: list[list[int]]
    prompts: list[int]
    limits: list[int]
    caches: list[Any] = field(default_factory=list)
    position: int = 0
    ended: list[bool] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    pending: tuple[dist.Work | None, Tensor] | None = None

    @property
    def window(self) -> int:
        """How many positions come next: those that all sequences know, within :data:`TOKENS`."""
        return min(widest(len(self.sequences)), min(map(len, self.sequences)) - self.position)

    @property
    def done(self) -> bool:
        return all(self.ended)

    @property
    def found(self) -> dict[int, Answer]:
        """The new tokens of each sequence, by its number."""
        return {
            number: Answer(self.sequences[row][self.prompts[row] : self.limits[row]], self.logprobs[row])
            for row, number in enumerate(self.numbers)
        }


class Generator:
    """Computes windows of positions on this rank's stages, and chooses tokens.

    Args:
        adapters: this rank's stages, first to last.
        package: the emitted package.
        device: where this rank computes.
    """

    def __init__(
        self, program: Manifest, adapters: Sequence[StageAdapter], package: str, groups: Groups, device: torch.device
    ) -> None:
        self.program, self.adapters, self.groups, self.device = program, adapters, groups, device
        self.tokens = program.inputs[0].name
        sequences, self.length = program.inputs[0].shape
        self.rows = sequences // program.replicas
        self._kv_cache = importlib.import_module(f"{package}.kv_cache")
        self._last = program.stages[-1].rank
        self._placed = [axis for axis in program.placed if not AXIS[axis].replicas]
        self._sent: list[tuple[dist.Work, Tensor]] = []
        self._chosen = groups.of_stages("tokens")
        self.cache_bytes = 0
        """Of the keys and values of a group of sequences, on this rank, the last time that tokens were generated."""

    # ---- whole sequences -------------------------------------------------------------------------------------------

    def logits(self, values: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Compute the logits of this replica's tokens [rows, n], window after window.

        Returns:
            Those of all replicas' tokens [sequences, n, vocabulary], where the last stage is.
        """
        tokens = values.get(self.tokens)
        if tokens is None:  # no stage of this rank takes them
            tokens = torch.zeros(self.rows, self.length, dtype=torch.int64, device=self.device)
        caches, position, parts = self._caches(), 0, []
        for window in _windows(self.length, widest(self.rows)):
            made = self._forward(tokens[:, position : position + window], position, caches, False)
            position += window
            if made is not None:
                parts.append(made)
        self._wait()
        if not parts:
            return None
        found, replicas = torch.cat(parts, 1), self.groups["batch"]
        return {self.program.outputs[0].name: found if replicas is None else torch.cat(gather_tensors(found, replicas))}

    def _caches(self) -> list[Any]:
        return [self._kv_cache.KeyValueCache() for _ in self.adapters]

    # ---- generation: what is asked--------------------------------------------------------------------------------------------

    def answers(
        self,
        prompts: Sequence[Sequence[int]] | Tensor,
        new_tokens: int | None,
        mask: Tensor | None,
        seed: int,
        show: Callable[[int, int], None] | None,
        choice: Mapping[str, Any],
    ) -> list[Answer]:
        """Check what :meth:`graphpar.runtime.pipeline.Pipeline.generate` was asked, and do it."""
        with agreed():
            request = requested(self.program, prompts, new_tokens, mask, seed, choice)
        with agreed():
            check_alike(gather_objects(request.digests))
        return self.generate(request.prompts, request.new_tokens, request.sampling, request.ends, show)

    # ---- generation: rounds --------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: Sequence[int],
        sampling: Sampling,
        ends: frozenset[int],
        show: Callable[[int, int], None] | None = None,
    ) -> list[Answer]:
        """Return the tokens that follow each prompt, at most ``new_tokens``, up to and with one of ``ends``; on every rank the same.

        Args:
            show: called on every rank with the number of a sequence and its next token: as it is chosen, or in the end, of other replicas.
        """
        waiting = self._groups(prompts, new_tokens)
        left: list[_Group] = []
        own: dict[int, Answer] = {}
        self.cache_bytes = 0
        while waiting or left:
            while waiting and len(left) < self.program.microbatches:
                left.append(waiting.pop(0))
                left[-1].caches = self._caches()
            for group in left:
                window = group.window
                given = [sequence[group.position : group.position + window] for sequence in group.sequences]
                made = self._forward(torch.tensor(given, device=self.device), group.position, group.caches, True)
                group.position += window
                self._choose(group, made, sampling)
            for group in left:
                self._take(group, ends, show)
            for group in left:
                self.cache_bytes = max(self.cache_bytes, sum(cache.nbytes for cache in group.caches))
                own |= group.found if group.done else {}
            left = [group for group in left if not group.done]
        self._wait()
        return self._of_all_replicas(own, len(prompts), show)

    def _of_all_replicas(
        self, own: Mapping[int, Answer], prompts: int, show: Callable[[int, int], None] | None
    ) -> list[Answer]:
        """Return the new tokens of every sequence; ``show`` those that other replicas chose."""
        replicas = self.groups["batch"]
        found = dict(own)
        for others in [] if replicas is None else gather_objects(own, replicas):
            found |= others
        if show is not None:
            for number in sorted(set(found) - set(own)):
                for token in found[number].tokens:
                    show(number, token)
        return [found[number] for number in range(prompts)]

    def _groups(self, prompts: Sequence[Sequence[int]], new_tokens: Sequence[int]) -> list[_Group]:
        """Divide this replica's share of the sequences into groups, the last filled up with copies of its first."""
        groups = []
        share = share_of(len(prompts), self.program.replicas, self.groups.replica)
        for first in share[:: self.rows]:
            numbers = list(range(first, min(first + self.rows, share.stop)))
            filled = numbers + [first] * (self.rows - len(numbers))
            sequences = [list(prompts[number]) for number in filled]
            limits = [len(prompts[number]) + new_tokens[number] for number in filled]
            ended = [len(sequence) >= limit for sequence, limit in zip(sequences, limits)]
            ended[len(numbers) :] = [True] * (self.rows - len(numbers))
            lengths = list(map(len, sequences))
            groups.append(_Group(numbers, sequences, lengths, limits, ended=ended, logprobs=[[] for _ in filled]))
        return groups

    def _choose(self, group: _Group, logits: Tensor | None, sampling: Sampling) -> None:
        """Choose the tokens after the window where the last stage is, and send them to the other ranks."""
        if logits is None:
            chosen = torch.empty(2, self.rows, dtype=torch.float64, device=self.device)
        else:
            known = [sequence[: group.position] for sequence in group.sequences]
            numbers = (group.numbers + group.numbers[:1] * self.rows)[: self.rows]
            tokens = sampling.tokens(logits[:, -1], known, numbers)
            logprobs = logits[:, -1].float().log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
            chosen = torch.stack([tokens.double(), logprobs.double()])  # one message; ids are exact in float64
            for axis in self._placed:
                if (ranks := self.groups[axis]) is not None:
                    dist.broadcast(chosen, src=dist.get_global_rank(ranks, 0), group=ranks)
        work: dist.Work | None = None
        if self._chosen is not None:
            last = self.groups.rank_at(pp=self._last)
            work = dist.broadcast(chosen, src=last, group=self._chosen, async_op=True)
        group.pending = work, chosen

    def _take(self, group: _Group, ends: frozenset[int], show: Callable[[int, int], None] | None) -> None:
        """Append the tokens to the sequences that have no other at that place."""
        assert group.pending is not None
        work, chosen = group.pending
        if work is not None:
            work.wait()
        for row, (number, logprob) in enumerate(zip(*chosen.tolist())):
            token = int(number)
            sequence = group.sequences[row]
            if len(sequence) > group.position:
                continue
            if group.ended[row]:
                sequence.append(token)  # computed and not shown
                continue
            sequence.append(token)
            group.logprobs[row].append(logprob)
            if show is not None:
                show(group.numbers[row], token)
            group.ended[row] = token in ends or len(sequence) >= group.limits[row]
            if group.ended[row]:
                group.limits[row] = len(sequence)

    # ---- one window ------------------------------------------------------------------------------------------------

    def _forward(self, tokens: Tensor, position: int, caches: Sequence[Any], last: bool) -> Tensor | None:
        """Run a window through this rank's stages; the logits where the last one is, of all positions or the ``last``."""
        given = keywords({self.tokens: tokens})
        window = tokens.size(1)
        local: tuple[Tensor, ...] = ()
        result: Tensor | None = None
        for adapter, cache in zip(self.adapters, caches):
            received = self._receive(adapter, local, window)
            cache.begin(position, last)
            self._kv_cache.bind(cache)
            try:
                adapter.positions = window
                made = adapter(*received, **given)
            finally:
                self._kv_cache.bind(None)
            local = made if isinstance(made, tuple) else (made,)
            if adapter.interface.sends:
                self._send(adapter, local)
            else:
                (result,) = local
        return result

    def _receive(self, adapter: StageAdapter, local: tuple[Tensor, ...], window: int) -> tuple[Tensor, ...]:
        index, rank = adapter.interface.index, adapter.interface.rank
        if index == 0:
            return ()
        before = self.program.stages[index - 1].rank
        if before == rank:
            return local
        received = tuple(
            torch.empty(spec.shape_at(window), dtype=spec.dtype, device=self.device)
            for spec in adapter.interface.receives
        )
        for tensor in received:
            dist.recv(tensor, src=self.groups.rank_at(pp=before), group=self.groups["pp"])
        return received

    def _send(self, adapter: StageAdapter, outputs: tuple[Tensor, ...]) -> None:
        after = self.program.stages[adapter.interface.index + 1].rank
        if after == adapter.interface.rank:
            return
        for tensor in outputs:
            work = dist.isend(tensor, dst=self.groups.rank_at(pp=after), group=self.groups["pp"])
            assert work is not None
            self._sent.append((work, tensor))
        self._sent = [(work, tensor) for work, tensor in self._sent if not work.is_completed()]

    def _wait(self) -> None:
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()


def widest(rows: int) -> int:
    """Return how many positions a window has at most, for so many sequences."""
    return max(1, TOKENS // rows)


def _windows(length: int, widest: int) -> list[int]:
    """Divide a sequence as generation does: a prompt, then some positions one by one; and the rest as a prompt that goes on."""
    first = max(1, min(widest, length // 2))
    found = [first] + [1] * min(4, length - first)
    while sum(found) < length:
        found.append(min(widest, length - sum(found)))
    return found
