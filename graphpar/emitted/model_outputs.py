"""What the model returns besides its loss, where an evaluation asks for it; else nothing is kept."""

from __future__ import annotations

from torch import Tensor

kept: dict[str, Tensor] | None = None
"""The runtime's, while it evaluates."""


def keep_output(name: str, value: Tensor) -> None:
    """Keep a value that the model returns, as this rank has it, if it is asked for."""
    if kept is not None:
        kept[name] = value
