"""Errors for users: what was found, what was expected, and what to do.

``GraphparError`` is for the user (the command line prints it without a traceback and exits with 2); ``assert`` is for our own bugs.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator

from graphpar.runtime.errors import GraphparError, near_match

__all__ = ["GraphparError", "NothingFits", "OptionError", "near_match", "torch_is_quiet"]


class OptionError(GraphparError):
    """An option, which the message names, asks for what the model does not have: no step has to be named for that."""


class NothingFits(GraphparError):
    """No plan fits in the devices' memory."""


@contextlib.contextmanager
def torch_is_quiet() -> Iterator[None]:
    """Keep torch from printing the graph so far, or its own traceback, where a trace or a trial on fake tensors fails: graphpar's errors
    explain it."""
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
