"""What of a model file is kept with its capture, so that a later run does not import the file where it needs no more.

ModelFile ──described──► bytes ──kept──► ModelFile whose functions import the file when they are called
               └─► None: it has a built model, passes of its own, or values that only it can make
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten

from graphpar.frontend.modelfile import ModelFile

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_FUNCTIONS = ("model", "loss_fn", "optimizer")
_VALUES = ("args", "kwargs", "targets", "batch_dims", "split_points", "shard_plan")


def described(file: ModelFile) -> bytes | None:
    """Return what :func:`kept` makes the file's content of; None where it has to be imported."""
    if isinstance(file.model, nn.Module) or file.passes is not None or file.importer is not None:
        return None
    functions = [name for name in _FUNCTIONS if getattr(file, name) is not None]
    try:
        return pickle.dumps((functions, {name: getattr(file, name) for name in _VALUES}, str(file.path)))
    except Exception:  # a value of a kind that can't be stored
        return None


def kept(record: bytes, shown: Path | None, reference: str | None, importer: Callable[[], ModelFile]) -> ModelFile:
    """Return the content of a file that was described.

    Args:
        shown: the path by which the file is named now; None where it is named as a module, by ``reference``.
        importer: imports the file.
    """
    functions, values, path = pickle.loads(record)

    def function(name: str) -> Any:
        return (lambda *arguments: getattr(importer(), name)(*arguments)) if name in functions else None

    content = {name: function(name) for name in _FUNCTIONS}
    return ModelFile(**content, **values, path=shown or Path(path), reference=reference, importer=importer)


def inputs_described(args: Any, kwargs: Any, targets: Any, batch_dims: Any) -> str | None:
    """Describe example inputs by shapes, dtypes and content; None where that can't be done."""
    leaves, spec = tree_flatten((args, dict(kwargs), targets))
    texts = [_described(leaf) for leaf in leaves]
    return None if None in texts else repr((texts, str(spec), sorted((batch_dims or {}).items())))


def _described(leaf: Any) -> str | None:
    if not isinstance(leaf, Tensor):
        return repr(leaf) if isinstance(leaf, _PLAIN) else None
    if type(leaf) not in (Tensor, FakeTensor, torch.nn.Parameter) or leaf.layout is not torch.strided:
        return None
    kind = f"{tuple(leaf.shape)} {leaf.dtype} {leaf.device} {tuple(leaf.stride())} {leaf.requires_grad}"
    if isinstance(leaf, FakeTensor) or leaf.device.type == "meta":
        return kind
    content = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{kind} {hashlib.sha256(content).hexdigest()}"
