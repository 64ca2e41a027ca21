"""What importing a model file does besides defining names: it prints, or changes how torch, Python or graphpar behave.

    with EFFECTS.noticing():     a process-wide record, since a module is imported once a process
        import
    EFFECTS.why ──► why a later run has to import the file, too, though its capture is kept

Functions of torch that the file replaces are not seen.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from graphpar.frontend.file_dependencies import OF_KERNELS
from graphpar.operators.rules import REGISTERED


@dataclass
class Effects:
    """The record of this process. ``why``: what an import did that only another import does again."""

    why: str | None = None

    @contextlib.contextmanager
    def noticing(self) -> Iterator[None]:
        """Compare what is after the block with what was before."""
        before = _state()
        with _writing(self._printed):
            yield
        changed = [name for name, value in _state().items() if value != before[name]]
        if changed and self.why is None:
            self.why = f"the model file changes {', '.join(changed)}"

    def _printed(self) -> None:
        self.why = self.why or "the model file prints"


EFFECTS = Effects()


def _state() -> dict[str, Any]:
    variables = {name: value for name, value in os.environ.items() if name not in OF_KERNELS}
    cuda = torch.backends.cuda
    return {
        "torch's default dtype": torch.get_default_dtype(),
        "torch's default device": torch.get_default_device(),
        "whether gradients are computed": torch.is_grad_enabled(),
        "whether torch is deterministic": torch.are_deterministic_algorithms_enabled(),
        "how precise products are": (torch.get_float32_matmul_precision(), cuda.matmul.allow_tf32),
        "which attention is computed": (
            cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled(),
        ),
        "how many threads torch has": torch.get_num_threads(),
        "the rules of operators": dict(REGISTERED),
        "sys.path": list(sys.path),
        "the current folder": os.getcwd(),
        "the environment": variables,
    }  # fmt: skip


@contextlib.contextmanager
def _writing(wrote: Callable[[], None]) -> Iterator[None]:
    """Call ``wrote`` whenever something is printed in the block."""

    def noticed(write: Callable[..., Any]) -> Callable[..., Any]:
        def function(*arguments: Any) -> Any:
            wrote()
            return write(*arguments)

        return function

    streams = {id(stream): stream for stream in (sys.stdout, sys.stderr)}.values()
    own = {id(stream): vars(stream).get("write") for stream in streams}
    for stream in streams:
        stream.write = noticed(stream.write)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for stream in streams:
            if own[id(stream)] is None:
                del stream.write
            else:
                stream.write = own[id(stream)]  # type: ignore[method-assign]
