"""What generation is asked for: prompts, how many tokens, and how they are chosen; checked without a rank.

prompts, max_new_tokens, do_sample, ...  ──requested──►  Request      or one sentence that says what does not fit the program
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.manifest import Manifest
from graphpar.runtime.sampling import Sampling

_CHOICE = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty")
"""What :class:`~graphpar.runtime.sampling.Sampling` takes from a call or from the model."""


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


def _ends(program: Manifest, given: Any, asked: bool) -> frozenset[int]:
    """Return the tokens that end a sequence; those of the model's own config (not ``asked``) that it does not know never come.

    Raises:
        RuntimeProgramError: they are no token ids.
    """
    tokens = [given] if isinstance(given, int) or not isinstance(given, Sequence | set | frozenset) else list(given)
    below = program.inputs[0].below
    for token in tokens:
        known = type(token) is int and token >= 0 and (below is None or token < below)
        if not known and asked:
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
                    f"attention_mask hides tokens in the middle of prompt {number}; padding stands at one end"
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
