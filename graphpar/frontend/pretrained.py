"""What a program keeps of the libraries that a model is from: configs of transformers, and low-rank adapters, also of ``peft``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from graphpar.errors import GraphparError
from graphpar.ir.program import Program
from graphpar.runtime.plan_record import Adapter
from graphpar.text import listed


def pretrained_of(model: nn.Module) -> dict[str, Any]:
    """Return the configs of the outermost module that is transformers', by file, and its path in the model; nothing where there is none."""
    for path, module in model.named_modules():
        config, generation = getattr(module, "config", None), getattr(module, "generation_config", None)
        if not (hasattr(module, "save_pretrained") and hasattr(config, "to_json_string")):
            continue
        wrapped = getattr(module, "get_base_model", None)  # by the package peft
        inner = wrapped() if callable(wrapped) else module
        files = {"config.json": {**_content(config), "architectures": [type(inner).__name__]}}
        if hasattr(generation, "to_json_string"):
            files["generation_config.json"] = _content(generation)
        return {"path": path, "files": files}
    return {}


def _content(config: Any) -> dict[str, Any]:
    return dict(json.loads(config.to_json_string()))


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
    requested = {
        name: value for name, value in config.to_diff_dict().items() if not name.startswith("_") and value is not None
    }
    unknown = [name for name, value in requested.items() if name not in _FOLLOWED and value not in _NOTHING]
    if unknown:
        raise GraphparError(
            f"{type(model).__name__}'s generation_config has {unknown[0]}={requested[unknown[0]]!r}, which generation doesn't support; "
            "it chooses the likeliest token, or draws by temperature, top_k, top_p and repetition_penalty. Set it to None."
        )
    found = {name: requested[name] for name in _KEPT if name in requested}
    if found.get("do_sample"):  # transformers draws from the 50 likeliest where nothing is said
        found.setdefault("top_k", 50)
    return found


# ---- adapters ---------------------------------------------------------------------------------------------------


def adapters_of(model: nn.Module) -> tuple[Adapter, ...]:
    """List the adapters whose product is all that they add to a weight, in the order of their layers."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        names[id(parameter)] = name
    found = []
    for path, module in model.named_modules():
        for adapter in (*_of_layer(path, module, names), *_of_stacks(path, module, names)):
            found.append(adapter)
    return tuple(found)


def with_adapters(program: Program, model: nn.Module) -> Program:
    """Note the adapters of ``model`` in its trace, with a warning of those whose layers are never called."""
    uses = Counter[str]()
    for node in program.graph.nodes:
        if node.op == "get_attr":
            uses[program.tie_of(str(node.target))[0]] += len(node.users)
    of = {name: uses[program.tie_of(name)[0]] for name in program.parameters}
    found = adapters_of(model)
    program.adapters = tuple(replace(each, shared=of[each.weight] > of[each.a]) for each in found)
    idle = [each.layer for each in found if not of[each.a]]
    if idle and program.mode == "train":
        program = program.warn(
            f"The adapters of {listed(idle, 6)} are never used, so they won't be trained: the model doesn't call these layers."
        )
    return program


def _of_layer(path: str, module: Any, names: Mapping[int, str]) -> Iterator[Adapter]:
    """The adapter of a linear layer. ``peft`` has several by name, of which one is active, and the layer itself below.

    What a model of one's own calls ``lora_A`` may be used in any way, so it is no adapter here.
    """
    a, b, base = getattr(module, "lora_A", None), getattr(module, "lora_B", None), module
    if isinstance(a, nn.ModuleDict) and type(module).__module__.startswith("peft."):
        active: Sequence[str] = getattr(module, "active_adapters", ())
        if len(active) != 1 or active[0] not in a or _adds_more(module, active[0]):
            return
        name, base = active[0], module.get_base_layer()
        a, b = a[name], module.lora_B[name]
        scale, alpha = module.scaling[name], module.lora_alpha[name]
    elif hasattr(type(module), "lora_of") and isinstance(a, nn.Linear):
        scale, alpha = module.scaling, module.lora_alpha
    else:
        return
    weight = getattr(base, "weight", None)
    if not isinstance(a, nn.Linear) or not isinstance(b, nn.Linear) or not isinstance(weight, Tensor):
        return
    transposed = type(base).__name__.endswith("Conv1D")
    if id(weight) in names and (weight.ndim == 2):
        found = (names[id(weight)], names[id(a.weight)], names[id(b.weight)])
        yield Adapter(path, *found, a.weight.shape[0], float(alpha), float(scale), transposed)


def _adds_more(module: Any, name: str) -> bool:
    """Whether a layer of ``peft`` computes more than a product, such as DoRA's norm or a bias."""
    variants, biases = getattr(module, "lora_variant", {}), getattr(module, "lora_bias", {})
    return name in variants or bool(biases.get(name)) or bool(getattr(module, "merged", False))


def _of_stacks(path: str, module: Any, names: Mapping[int, str]) -> Iterator[Adapter]:
    """The adapters of stacked weights of experts."""
    pairs = getattr(module, "lora", None)
    if not isinstance(pairs, nn.ModuleDict) or not hasattr(type(module), "lora_of"):
        return
    pair: Any
    for name, pair in pairs.items():
        found = (names[id(module._parameters[name])], names[id(pair.lora_A)], names[id(pair.lora_B)])
        yield Adapter(path, *found, pair.rank, float(pair.alpha), pair.scaling, stacked=True)
