"""What a program for generation is traced with: the model's tokens alone, and their positions as what varies.

    input_ids [4, 1024], labels, attention_mask  ──►  input_ids [4, s]      s: the positions of a window

Labels and masks of padding are left out: they have defaults in the model's forward, or it can't generate.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from graphpar.errors import GraphparError
from graphpar.ir.program import ModelSource

SHORTEST = 4
"""Positions of an example at least: a trace must see a length that is none of 0, 1 and the longest."""


def of_tokens(
    source: ModelSource, model: nn.Module, batch_dims: Mapping[str, int | None] | None
) -> tuple[ModelSource, dict[str, int | None]]:
    """Return the source with its tokens as the only input, and the dim of their positions.

    Raises:
        GraphparError: the model has no input of token ids [batch, positions], or needs others.
    """
    given = _given(source, model)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise GraphparError(
            f"{type(model).__name__} can't generate: it is an encoder and a decoder, and only models of one sequence can; compile it with "
            "--mode infer."
        )
    needed = [name for name, value in given.items() if isinstance(value, Tensor) and _is_needed(model, name)]
    tokens = [name for name, value in given.items() if _is_tokens(value)]
    preferred = [name for name in ("input_ids", "tokens", "idx", "ids") if name in tokens]
    chosen = next((name for name in (*needed, *preferred, *tokens) if name in tokens), None)
    if chosen is None:
        raise GraphparError(
            f"{type(model).__name__} can't generate: none of its inputs ({', '.join(given) or 'there are none'}) holds token ids, whole "
            "numbers [batch, positions]."
        )
    if given[chosen].size(1) < SHORTEST:
        raise GraphparError(
            f"The example {chosen} has {given[chosen].size(1)} positions, all the room there is for tokens; give it {SHORTEST} or more."
        )
    others = [name for name in needed if name != chosen]
    if others:
        raise GraphparError(
            f"{type(model).__name__} can't generate: its forward needs {', '.join(others)} besides the tokens {chosen}; give "
            f"{'them defaults' if len(others) > 1 else 'it a default'}, or wrap the model in one that takes tokens alone."
        )
    if batch_dims and any(dim not in (0, None) for dim in batch_dims.values()):
        raise GraphparError("A program for generation takes tokens [batch, positions]; batch_dims can't say otherwise.")
    plain = {name: value for name, value in given.items() if not isinstance(value, Tensor) and name in source.kwargs}
    cache = {"use_cache": False} if "use_cache" in _parameters(model) else {}  # the program has its own
    arguments: dict[str, Any] = {**plain, **cache, chosen: given[chosen]}
    return replace(source, args=(), kwargs=arguments, loss_fn=None, targets=()), {chosen: 1}


def _given(source: ModelSource, model: nn.Module) -> dict[str, Any]:
    """Return the example's arguments by name."""
    names = [name for name, p in _parameters(model).items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(source.args) > len(names):
        raise GraphparError(f"{type(model).__name__}.forward takes {len(names)} arguments; the example has more.")
    return {**dict(zip(names, source.args)), **source.kwargs}


def _parameters(model: nn.Module) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(model.forward).parameters)


def _is_needed(model: nn.Module, name: str) -> bool:
    parameter = _parameters(model).get(name)
    return (
        parameter is not None and parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    )


def _is_tokens(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 2 and value.dtype in (torch.int64, torch.int32)


_FOLLOWED = (
    "do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "eos_token_id", "max_new_tokens", "max_length", "pad_token_id",
    "bos_token_id", "decoder_start_token_id", "transformers_version", "use_cache", "cache_implementation", "cache_config",
)  # fmt: skip
"""Fields of transformers' generation config that are followed, or mean nothing here."""
_NOTHING: tuple[Any, ...] = (False, 0, 1, "", [], {})
"""What leaves a field without effect."""
_KEPT = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "eos_token_id", "max_new_tokens")


def token_choice(model: nn.Module) -> dict[str, Any]:
    """Return how the model's generation config, if it has one, chooses tokens: the fields that say something.

    Raises:
        GraphparError: it asks for something else than greedy or sampled tokens, such as beams.
    """
    config = getattr(model, "generation_config", None)
    if config is None or not hasattr(config, "to_diff_dict"):
        return {}
    asked = {
        name: value for name, value in config.to_diff_dict().items() if not name.startswith("_") and value is not None
    }
    unknown = [name for name, value in asked.items() if name not in _FOLLOWED and value not in _NOTHING]
    if unknown:
        raise GraphparError(
            f"{type(model).__name__}'s generation_config has {unknown[0]}={asked[unknown[0]]!r}, which generation doesn't do; it "
            "chooses the likeliest token, or draws by temperature, top_k, top_p and repetition_penalty. Set it to None."
        )
    found = {name: asked[name] for name in _KEPT if name in asked}
    if found.get("do_sample"):  # transformers draws from the 50 likeliest where nothing is said
        found.setdefault("top_k", 50)
    return found
