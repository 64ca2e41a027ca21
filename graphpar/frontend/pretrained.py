"""What transformers' ``from_pretrained`` needs besides weights: the configs of a model of theirs, for ``graphpar checkpoint export``."""

from __future__ import annotations

import json
from typing import Any

from torch import nn


def pretrained_of(model: nn.Module) -> dict[str, Any]:
    """Return the configs of the outermost module that is transformers', by file, and its path in the model; nothing where there is none."""
    for path, module in model.named_modules():
        config, generation = getattr(module, "config", None), getattr(module, "generation_config", None)
        if not (hasattr(module, "save_pretrained") and hasattr(config, "to_json_string")):
            continue
        files = {"config.json": {**_content(config), "architectures": [type(_inner(module)).__name__]}}
        if hasattr(generation, "to_json_string"):
            files["generation_config.json"] = _content(generation)
        return {"path": path, "files": files}
    return {}


def _inner(module: nn.Module) -> nn.Module:
    """The model that the package ``peft`` has wrapped, if it has."""
    wrapped = getattr(module, "get_base_model", None)
    return wrapped() if callable(wrapped) else module


def _content(config: Any) -> dict[str, Any]:
    return dict(json.loads(config.to_json_string()))
