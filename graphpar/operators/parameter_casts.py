"""Parameters that are stored in one dtype and read in another: their casts do not depend on a microbatch, so they are made once a step.

F.linear(x, self.up.weight.bfloat16())      weight in fp32      a copy in bf16, for all microbatches of a step
F.linear(x.float(), self.up.weight)         weight in bf16      refused: torch's kernels take one dtype
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, fx

from graphpar.emitted import collectives
from graphpar.errors import GraphparError
from graphpar.ir.program import Function, Program, operator_name, value_of
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of
from graphpar.runtime.layout import Shard, Type, divisions
from graphpar.runtime.option_kinds import TRAIN

FEW = 0.05
"""The largest share of parameters, of those that are read in another dtype than the others, that ranks rather store whole."""
_OF_ONE_DTYPE = {Kind.PRODUCT, Kind.GROUPED, Kind.CONVOLUTION, Kind.RECURRENT, Kind.LOOKUP}
_NAMED_OF_ONE_DTYPE = {"cdist", "gru_cell", "lstm_cell", "rnn_tanh_cell", "rnn_relu_cell"}
_NO_NARROWER = {Kind.ATTENTION, Kind.NORM}
"""Whose other operands may be in more bits than the first: masks and norms in 32."""


def mixed_operands(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the first floating operand, and one whose dtype torch's kernels don't take beside it, if there is one."""
    if node.op != "call_function":
        return None
    name, kind = operator_name(node), record_of(node).kind
    alike = kind in _OF_ONE_DTYPE or name in _NAMED_OF_ONE_DTYPE
    if not alike and (kind not in _NO_NARROWER or name == "rms_norm"):
        return None
    values = [(operand, value_of(operand)) for operand in node.all_input_nodes]
    floating = [(operand, v.dtype) for operand, v in values if isinstance(v, Tensor) and v.is_floating_point()]
    for operand, dtype in floating[1:]:
        first = floating[0][1]
        if dtype.itemsize < first.itemsize or (alike and dtype != first):
            return floating[0][0], operand
    return None


def read_dtypes(program: Program) -> dict[str, set[torch.dtype]]:
    """Return the dtypes in which each parameter is read, in training or evaluation, by every name under which it is: where it is cast, what
    it is cast to."""
    found = {} if program.evaluated is None else read_dtypes(program.evaluated)
    for scope in ("", *program.blocks):
        graph = program.blocks[scope].graph if scope else program.graph
        names = program.prefixes(scope)
        for node in graph.nodes:
            if node.op == "get_attr" and f"{names[0]}{node.target}" in program.parameters:
                dtypes = {value_of(user if is_copy(user) else node).dtype for user in node.users}
                for prefix in names:
                    found.setdefault(f"{prefix}{node.target}", set()).update(dtypes)
    return found


def cast_parameters(program: Program) -> dict[str, torch.dtype]:
    """Return the parameters that are read in one dtype alone, which is not that in which they are stored."""
    return {
        name: next(iter(dtypes))
        for name, dtypes in read_dtypes(program).items()
        if len(dtypes) == 1 and program.parameters[name].dtype not in dtypes
    }


def working_dtypes(program: Program) -> dict[str, torch.dtype]:
    """Return the trained parameters that are read, under all of their names, in one dtype of fewer bits than they are stored in: where
    ranks update pieces, they store that alone whole."""
    read, found = read_dtypes(program), dict[str, torch.dtype]()
    for name, info in program.parameters.items():
        dtypes = set[torch.dtype]().union(*(read.get(each, set()) for each in program.tie_of(name)))
        if info.requires_grad and len(dtypes) == 1 and (dtype := dtypes.pop()).itemsize < info.dtype.itemsize:
            found[name] = dtype
    return found


def gather_dtype(program: Program, among: Collection[str]) -> torch.dtype | None:
    """Return the dtype in which every parameter of ``among`` is read, in which they may be gathered; None where they differ."""
    found = set[torch.dtype]().union(*(dtypes for name, dtypes in read_dtypes(program).items() if name in among))
    return found.pop() if len(found) == 1 else None


def read_otherwise(program: Program) -> frozenset[str]:
    """Return the few parameters that are read in another dtype than the others, which are cast where they are read.

    All would have to be gathered in the dtype in which they are stored, twice the bytes, for these few: a network's norms.
    """
    read = read_dtypes(program)
    if not any(dtypes - {program.parameters[name].dtype} for name, dtypes in read.items()):
        return frozenset()
    sizes = Counter[torch.dtype]()
    for name, dtypes in read.items():
        if len(dtypes) == 1:
            sizes[next(iter(dtypes))] += program.parameters[name].numel
    most, size = sizes.most_common(1)[0] if sizes else (None, 0)
    if size < (1 - FEW) * sum(program.parameters[name].numel for name in read):
        return frozenset()
    return frozenset(name for name, dtypes in read.items() if dtypes != {most})


def casts_parameter(node: fx.Node) -> bool:
    """Return whether a node copies what the graph holds: whether that is a parameter is the program's to say."""
    return is_copy(node) and node.all_input_nodes[0].op == "get_attr"


def is_copy(node: fx.Node) -> bool:
    """Return whether a node only copies its operand, into another dtype for example."""
    return node.op == "call_function" and record_of(node).kind is Kind.COPY


def rounded_weights(program: Program, stored: Mapping[str, Mapping[str, Type]]) -> dict[str, tuple[str, ...]]:
    """Return the weights of products that round their operands, each with the recipe, and how it is divided where it is
    multiplied: ``mxfp8``, ``tp S(0)``.

    Args:
        stored: the types of parameters by axis, as ranks store them.

    Raises:
        GraphparError: one is gathered from shards of another axis than the last that divided it, follows no parameter by casts alone, or is
            divided otherwise in evaluation.
    """
    found = {} if program.evaluated is None else rounded_weights(program.evaluated, stored)
    for scope, node, given in _products(program):
        if (rounding := record_of(node).rounding) is not None:
            name, steps = weight_of(node, given)
            if not name:
                raise GraphparError(f"fp8: the weight of {node.name} is computed; leave its layer out of fp8.")
            for each in (f"{prefix}{name}" for prefix in program.prefixes(scope)):
                divided = _divided(node, stored.get(each, {}), steps)
                if each in found and found[each][1:] != divided:
                    raise GraphparError(
                        f"fp8: {each} is divided in two ways where it is multiplied; pin one placement of it, or leave its "
                        "layer out of fp8."
                    )
                found[each] = (rounding.recipe, *divided)  # that of training, which evaluation does not know
    return found


def _products(program: Program) -> Iterator[tuple[str, fx.Node, Mapping[fx.Node, fx.Node]]]:
    """Yield all products, each with the block that it is in, and what the arguments of its function are, if it is in one."""
    for scope, graph in program.scopes():
        for node in graph.nodes:
            inner = node.target.graph.nodes if isinstance(node.target, Function) else ()
            given = dict(zip(inner, node.args))  # arguments come first
            yield from ((scope, each, given) for each in inner or (node,) if record_of(each).kind is Kind.PRODUCT)


def weight_names(program: Program, scope: str, product: fx.Node) -> set[str]:
    """Return all names of a product's weight, in each instance of its block ``scope``; none where it is computed."""
    name, _ = weight_of(product)
    return {each for prefix in program.prefixes(scope) for each in program.tie_of(f"{prefix}{name}")} if name else set()


def trains_weight(program: Program, scope: str, product: fx.Node) -> bool:
    """Whether the backward computes a gradient of the weight of a product, in any instance of its block ``scope``."""
    names = weight_names(program, scope, product)
    found = [program.parameters[name].requires_grad for name in names if name in program.parameters]
    return program.mode == TRAIN and (not names or any(found))


def _divided(product: fx.Node, stored: Mapping[str, Type], steps: Sequence[fx.Node]) -> tuple[str, ...]:
    found = [f"{axis} {each.shard}" for each in divisions(stored) for axis in each.axes]
    for step in steps:
        axis, dim = step.args[1], cast("int | None", step.kwargs.get("dim"))
        if step.target is collectives.shard and dim is not None:
            parts: Any = step.kwargs.get("parts", ())
            found.append(f"{axis} {Shard(dim, tuple(parts))}")
        elif dim is not None and found and found[-1].startswith(f"{axis} "):
            del found[-1]
        elif dim is not None or step.target is not collectives.sum_gradient:
            raise GraphparError(
                f"fp8: the weight of {product.name} is gathered before it is multiplied; pin another placement of it, or leave its "
                "layer out of fp8."
            )
    return tuple(found)


def weight_of(product: fx.Node, given: Mapping[fx.Node, Any] = MappingProxyType({})) -> tuple[str, list[fx.Node]]:
    """Return the name of the parameter that a product multiplies by, perhaps cast, and the collectives between, in order; no name where it
    follows otherwise. ``given``: what the arguments of a function are that the product is in."""
    weight, steps = product.args[1], list[fx.Node]()
    assert isinstance(weight, fx.Node)
    while weight in given or (
        weight.op == "call_function" and (record_of(weight).same_value or "transition" in weight.meta)
    ):
        steps += [weight] if "transition" in weight.meta else []
        weight = given[weight] if weight in given else weight.all_input_nodes[0]
    return str(weight.target) if weight.op == "get_attr" else "", steps[::-1]
