"""Silence torch, which prints failures before it raises them; graphpar's errors explain them."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def torch_is_quiet() -> Iterator[None]:
    """Keeps torch from printing the graph so far, or its own traceback, where a trace or a trial on fake tensors fails."""
    names = (
        "torch.fx.experimental.symbolic_shapes",
        "torch._subclasses.fake_tensor",
        "torch.fx.experimental.proxy_tensor",
    )
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, disabled in zip(loggers, before):
            logger.disabled = disabled
