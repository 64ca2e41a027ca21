"""What generation is asked for: prompts, how many tokens, and how each is chosen; checked without a rank.

prompts, max_new_tokens, do_sample, ...  ──requested──►  Request      or one sentence that says what does not fit the program

logits ─► / repetition penalty ─► / temperature ─► top k ─► top p ─► softmax ─► the token at which the sum passes u

Options are those of transformers' ``generate``. ``u`` depends on the seed, the sequence and the position alone, so any number of
ranks and of sequences beside it give the same token.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.manifest import Manifest

_CHOICE = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty")
"""What :class:`~graphpar.runtime.generation.prompts.Sampling` takes from a call or from the model."""


@dataclass(frozen=True)
class Request:
    """What is to be generated.

    Attributes:
        new_tokens: how many tokens follow each prompt, at most.
        ends: the tokens that end a sequence.
    """

    prompts: list[list[int]]
    new_tokens: list[int]
    sampling: Sampling
    ends: frozenset[int]

    @property
    def digests(self) -> dict[str, str]:
        """What is the same where ranks ask for the same, by the name of the argument."""
        asked = {
            "prompts": self.prompts,
            "max_new_tokens": self.new_tokens,
            "eos_token_id": sorted(self.ends),
            **vars(self.sampling),
            "seed": self.sampling.seed if self.sampling.do_sample else None,
        }
        return {name: hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest() for name, value in asked.items()}


def check_alike(digests: Sequence[Mapping[str, str]]) -> None:
    """Check that ranks ask for the same: each computes its part of all that is asked.

    Args:
        digests: of each rank's request.

    Raises:
        RuntimeProgramError: two do not.
    """
    for rank, theirs in enumerate(digests):
        for name, own in digests[0].items():
            if theirs[name] != own:
                raise RuntimeProgramError(
                    f"ranks 0 and {rank} generate with different {name}; all ranks pass the same prompts and options, and get all answers"
                )


def requested(
    program: Manifest,
    prompts: Sequence[Sequence[int]] | Tensor,
    new_tokens: int | None,
    mask: Tensor | None,
    seed: int,
    choice: Mapping[str, Any],
) -> Request:
    """Read the arguments of :meth:`graphpar.runtime.pipeline.Pipeline.generate`.

    Raises:
        RuntimeProgramError: one is wrong, or the program has no room for it.
    """
    given = as_prompts(prompts, mask)
    options = {name: value for name, value in choice.items() if value is not None}
    if unknown := sorted(set(options) - {*_CHOICE, "eos_token_id"}):
        raise RuntimeProgramError(
            f"generate has no option {unknown[0]!r}; there are {', '.join((*_CHOICE, 'eos_token_id'))}"
        )
    chosen = {**program.generation, **options}
    sampling = Sampling(**{name: chosen[name] for name in _CHOICE if name in chosen}, seed=seed)
    counts = _counts(program, given, new_tokens if new_tokens is not None else chosen.get("max_new_tokens"))
    return Request(given, counts, sampling, _ends(program, chosen.get("eos_token_id", ()), "eos_token_id" in options))


def _ends(program: Manifest, given: Any, explicit: bool) -> frozenset[int]:
    """Return the tokens that end a sequence; those of the model's own config (not ``explicit``) that it does not know never come.

    Raises:
        RuntimeProgramError: they are no token ids.
    """
    tokens = [given] if isinstance(given, int) or not isinstance(given, Sequence | set | frozenset) else list(given)
    below = program.inputs[0].below
    for token in tokens:
        known = type(token) is int and token >= 0 and (below is None or token < below)
        if not known and explicit:
            raise RuntimeProgramError(f"eos_token_id is {given!r}; it must be a token id of the model, or several")
    return frozenset(tokens)


def _counts(program: Manifest, prompts: Sequence[Sequence[int]], new_tokens: int | None) -> list[int]:
    """Return how many tokens follow each prompt.

    Raises:
        RuntimeProgramError: the cache has no room for them, or a prompt has ids that the model does not know.
    """
    if new_tokens is not None and (type(new_tokens) is not int or new_tokens < 1):
        raise RuntimeProgramError(f"max_new_tokens is {new_tokens!r}; it must be a whole number of at least 1")
    below, length = program.inputs[0].below, program.inputs[0].shape[1]
    for number, prompt in enumerate(prompts):
        strange = [token for token in prompt if token < 0 or (below is not None and token >= below)]
        if strange:
            raise RuntimeProgramError(
                f"prompt {number} has the token {strange[0]}; the model knows {below} tokens, from 0"
            )
        needed = len(prompt) + (new_tokens or 1) - 1
        if needed > length:
            more = f" and {new_tokens} new ones need {needed} positions" if new_tokens else ""
            raise RuntimeProgramError(
                f"prompt {number} has {len(prompt)} tokens{more}, but the program's cache has room for {length}, the length "
                "of the example that it was compiled with"
            )
    return [new_tokens or length + 1 - len(prompt) for prompt in prompts]


def as_prompts(prompts: Sequence[Sequence[int]] | Tensor, mask: Tensor | None) -> list[list[int]]:
    """Return the tokens of each prompt, without those that ``mask`` [prompts, positions] hides on the left or on the right.

    Raises:
        RuntimeProgramError: a prompt is empty or no sequence of token ids, or the mask has holes.
    """
    if mask is not None:
        tokens = torch.as_tensor(prompts)
        if tokens.ndim != 2 or mask.shape != tokens.shape:
            raise RuntimeProgramError("attention_mask must have the shape of the prompts, [prompts, positions]")
        for number, row in enumerate(mask.bool()):
            places = row.nonzero().flatten()
            if len(places) and int(places[-1] - places[0]) + 1 != len(places):
                raise RuntimeProgramError(
                    f"attention_mask hides tokens in the middle of prompt {number}; padding must be at one end"
                )
        found = [row[shown].tolist() for row, shown in zip(tokens, mask.bool())]
    else:
        if isinstance(prompts, Tensor):
            if prompts.ndim != 2 or prompts.is_floating_point() or prompts.dtype == torch.bool:
                raise RuntimeProgramError("a tensor of prompts must hold token ids, whole numbers [prompts, positions]")
            prompts = prompts.tolist()
        if not isinstance(prompts, Sequence) or not all(isinstance(prompt, Sequence) for prompt in prompts):
            raise RuntimeProgramError("prompts must be a list of lists of token ids, or a tensor [prompts, positions]")
        found = [list(map(_token, prompt)) for prompt in prompts]
    if not found or not all(isinstance(prompt, list) for prompt in found):
        raise RuntimeProgramError("prompts must be a list of lists of token ids, or a tensor [prompts, positions]")
    for number, prompt in enumerate(found):
        if not prompt:
            raise RuntimeProgramError(f"prompt {number} is empty; give it a token, such as the one that begins a text")
    return found


def _token(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RuntimeProgramError(f"a prompt has {value!r}; prompts are lists of token ids")
    return value


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
        # In the order of the tokens, which rounding doesn't change, unlike that of nearly equal logits.
        shares = torch.zeros_like(shares).scatter(-1, order, shares)
        sums = shares.cumsum(-1)
        drawn = [self._uniform(number, len(sequence)) for number, sequence in zip(numbers, sequences)]
        places = torch.searchsorted(
            sums, torch.tensor(drawn, device=sums.device).unsqueeze(-1) * sums[:, -1:], right=True
        )
        last = (shares > 0).int().cumsum(-1).argmax(-1, keepdim=True)
        chosen: Tensor = places.minimum(last).squeeze(-1)
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


FILE = "tokenizer.json"


class Texts:
    """Encodes and decodes with the tokenizer of a file."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with those that the tokenizer puts around it."""
        return list(self._tokenizer.encode(text).ids)

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens, without special ones."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


def text_file(path: Path | None) -> Texts:
    """Read a tokenizer.

    Args:
        path: its ``tokenizer.json``, or the folder that has it.

    Raises:
        RuntimeProgramError: there is none, it can't be read, or the package is not installed.
    """
    if path is None:
        raise RuntimeProgramError(
            f"a prompt of text needs a tokenizer: --tokenizer takes a {FILE}, or the folder that has one; --tokens takes ids"
        )
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise RuntimeProgramError(f"there is no {file}, the tokenizer of the prompts")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise RuntimeProgramError("a prompt of text needs the package tokenizers: pip install tokenizers") from None
    try:
        return Texts(Tokenizer.from_file(str(file)))
    except Exception as error:
        raise RuntimeProgramError(f"{file} is not a tokenizer: {error}") from None
