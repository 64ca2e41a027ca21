"""Every key of ``fx.Node.meta`` that graphpar writes or reads, and its type. A test fails on any other key.

always            val, batch_coefficients, module_stack, source        from the trace, on every operator
of a Program      block, stage_begins, batch_factor, batch_numbers, twin
while sharding    pin_point, bias_of, types, origin, transition, name
of a stage        boundary
of training       model_output
of evaluation     evaluated
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from torch import Tensor, fx

from graphpar.ir.program import ModelOutput
from graphpar.ir.source import Source
from graphpar.runtime.layout import Type


class NodeMeta(TypedDict, total=False):
    """The metadata of a node. Every key is optional."""

    val: Any
    """The fake value: a tensor, a tuple of them, a number. Its sizes may be symbols of the batch."""
    batch_coefficients: tuple[int | None, ...]
    """In a trace at a fixed batch: for each dim the ``c`` of a size ``c * batch``, None where it does not follow the batch."""
    batch_factor: int
    """For a number in such a trace: how many times the batch it is."""
    batch_numbers: Mapping[Any, int]
    """The same for numbers among an operator's arguments."""
    twin: Any
    """The node's value in a trace at another batch size."""
    module_stack: tuple[tuple[str, str, str], ...]
    """The modules around it, outermost first: path, class, and which call of it."""
    source: Source | None
    """The user's line."""
    block: str
    """For ``call_module``: the name of the block in :attr:`graphpar.ir.program.Program.blocks`."""
    stage_begins: bool
    """Whether ``pipe_split()`` was called before it."""
    pin_point: tuple[str, int, str]
    """For the identity that marks a pinned value: input or output, which, and the module's path."""
    bias_of: str
    """For the addition of a bias that was split off: the operator that it was part of."""
    types: Mapping[str, Type]
    """In a rank's program: the value's type on each axis."""
    origin: fx.Node
    """In a rank's program: the node of the unsharded program that it was made from."""
    transition: tuple[str, str]
    """For a collective: the types before and after it."""
    name: str
    """For a collective that replaces an operator: its name in the report."""
    boundary: bool | fx.Node
    """For a stage's placeholder: it is received. A node is that of the stage before."""
    model_output: tuple[ModelOutput, ...]
    """From ``share_loss`` on, of a program for training: as what the model returns it."""
    evaluated: bool
    """Of what a model computes in evaluation alone: an operator is as it is there, and a block is called by its method for it."""
    real: Tensor
    """While a rule is proven: the tensor that the operator is run on."""
    nn_module_stack: Any
    """torch's own: of a fresh trace alone."""
    stack_trace: str
    """torch's own: of a fresh trace alone."""
