"""The next token of each sequence: the likeliest, or one that is drawn.

    logits ─► / repetition penalty ─► / temperature ─► top k ─► top p ─► softmax ─► the token at which the sum passes u

Options are those of transformers' ``generate``. ``u`` depends on the seed, the sequence and the position alone, so any number of
ranks and of sequences beside it give the same token.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphpar.runtime.errors import RuntimeProgramError


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        do_sample: draw them; else the likeliest is taken.
        temperature, top_k, top_p: of the distribution that is drawn from; ``top_k`` 0 and ``top_p`` 1 leave it whole.
        repetition_penalty: logits of tokens that the sequence has already are divided by it, or multiplied where they are negative.
        seed: of what is drawn.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("temperature", 0.0), ("top_p", 0.0), ("repetition_penalty", 0.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not least < value < math.inf:
                raise RuntimeProgramError(f"{name} is {value!r}; it must be a number above 0")
        if not isinstance(self.do_sample, bool):
            raise RuntimeProgramError(f"do_sample is {self.do_sample!r}; it must be True or False")
        if self.top_p > 1:
            raise RuntimeProgramError(f"top_p is {self.top_p!r}; it must be at most 1")
        if type(self.top_k) is not int or self.top_k < 0:
            raise RuntimeProgramError(
                f"top_k is {self.top_k!r}; it must be a whole number from 0, which keeps all tokens"
            )
        if type(self.seed) is not int:
            raise RuntimeProgramError(f"seed is {self.seed!r}; it must be a whole number")

    def tokens(self, logits: Tensor, sequences: Sequence[Sequence[int]], numbers: Sequence[int]) -> Tensor:
        """Choose a token for each sequence: logits [b, vocabulary] -> [b].

        Args:
            sequences: the tokens of each so far.
            numbers: which sequence each row is, among all that are generated.
        """
        logits = logits.double()
        if self.repetition_penalty != 1.0:
            logits = self._penalised(logits, sequences)
        if not self.do_sample:
            return logits.argmax(-1)
        values, order = (logits / self.temperature).sort(dim=-1, descending=True, stable=True)
        if self.top_k:
            values[:, self.top_k :].masked_fill_(
                values[:, self.top_k :] < values[:, [min(self.top_k, values.size(1)) - 1]], -math.inf
            )
        shares = values.softmax(-1)
        before = shares.cumsum(-1) - shares
        shares = shares.masked_fill(before >= self.top_p, 0.0) if self.top_p < 1 else shares
        sums = shares.cumsum(-1)
        drawn = [self._uniform(number, len(sequence)) for number, sequence in zip(numbers, sequences)]
        places = torch.searchsorted(
            sums, torch.tensor(drawn, device=sums.device).unsqueeze(-1) * sums[:, -1:], right=True
        )
        last = (shares > 0).sum(-1, keepdim=True) - 1
        chosen: Tensor = order.gather(-1, places.minimum(last)).squeeze(-1)
        return chosen

    def _penalised(self, logits: Tensor, sequences: Sequence[Sequence[int]]) -> Tensor:
        logits = logits.clone()
        for row, sequence in zip(logits, sequences):
            seen = torch.tensor(sorted(set(sequence)), device=row.device)
            own = row[seen]
            row[seen] = torch.where(own < 0, own * self.repetition_penalty, own / self.repetition_penalty)
        return logits

    def _uniform(self, number: int, position: int) -> float:
        """Draw a number from [0, 1) for a position of a sequence."""
        digest = hashlib.blake2b(f"{self.seed} {number} {position}".encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 11) / 2**53
