"""What is in ``fx.Node.meta``: every key that graphpar writes or reads, and its type. Tests look for others.

kept for good     val, batch_coefficients, module_stack, source        from the trace, on every operator
of a Program      block, stage_begins, batch_factor, batch_numbers, twin
while sharding    pin_point, bias_of, types, origin, transition, name
of a stage        boundary
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from torch import Tensor, fx

from graphpar.ir.source import Source
from graphpar.runtime.layout import Type


class NodeMeta(TypedDict, total=False):
    """The metadata of a node; no key is there always."""

    val: Any
    """The fake value: a tensor, a tuple of them, a number. Its sizes may be symbols of the batch."""
    batch_coefficients: tuple[int | None, ...]
    """Of a trace at a fixed batch: for each dim the ``c`` of a size ``c * batch``, None where it does not follow the batch."""
    batch_factor: int
    """Of a number in such a trace: it is this many times the batch."""
    batch_numbers: Mapping[Any, int]
    """The same for numbers among an operator's arguments."""
    twin: Any
    """The node's value in a trace at another batch size."""
    module_stack: tuple[tuple[str, str, str], ...]
    """The modules around it, outermost first: path, class, and which call of it."""
    source: Source | None
    """The user's line."""
    block: str
    """Of ``call_module``: the name of the block in :attr:`graphpar.ir.program.Program.blocks`."""
    stage_begins: bool
    """Whether ``pipe_split()`` stood before it."""
    pin_point: tuple[str, int, str]
    """Of an identity that stands for a pinned value: input or output, which, and the module's path."""
    bias_of: str
    """Of the sum of a bias that stands alone: the operator that it was part of."""
    types: Mapping[str, Type]
    """Of a rank's program: how the value is laid out on each axis."""
    origin: fx.Node
    """Of a rank's program: the node of the whole program that it was made from."""
    transition: tuple[str, str]
    """Of a collective: the types that it leads from and to."""
    name: str
    """Of a collective that is written for an operator: what the report calls it."""
    boundary: bool | fx.Node
    """Of a stage's placeholder: it is received. The node is the one of the stage before."""
    real: Tensor
    """While a rule is proven: the value that the operator is run on."""
    nn_module_stack: Any
    """torch's own: of a fresh trace alone."""
    stack_trace: str
    """torch's own: of a fresh trace alone."""
