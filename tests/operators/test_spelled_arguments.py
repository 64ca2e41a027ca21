"""No argument is lost in print: of every operator that graphpar knows, each argument shows in the text, which computes what torch does."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

import graphpar as gp
from graphpar.codegen.spelling import LEFT_OUT, SILENT, spell
from graphpar.operators.prove import Call, node_of
from graphpar.operators.spelling import Expression, literal
from graphpar.operators.table import TABLE
from tests.operators.test_records import _SAMPLED, _fresh, calls

pytestmark = pytest.mark.filterwarnings("ignore")


def _shown(item: Any) -> Expression:
    if isinstance(item, fx.Node):
        return Expression(item.name)
    if isinstance(item, list | tuple):
        return Expression(f"[{', '.join(_shown(part).text for part in item)}]")
    return Expression(literal(item))


# ---- in print ------------------------------------------------------------------------------------------------------

_NOT_TRACED = {"sublist", "str", "list_int", "list_float", "list_bool", "list_Tensor", "list_str", "t", "Dimname"}
"""Overloads on Python's lists and strings and on names of dims, which no trace holds."""


def _overloads(name: str) -> list[torch._ops.OpOverload]:
    packet = getattr(torch.ops.aten, name, None)
    found = [getattr(packet, key) for key in packet.overloads() if key not in _NOT_TRACED] if packet else []
    return [each for each in found if not each._schema.is_mutable and _has_tensors(each)]


def _has_tensors(target: torch._ops.OpOverload) -> bool:
    return any("Tensor" in str(argument.type) for argument in target._schema.arguments)


def _values(kind: str, tensor: Callable[[], fx.Node]) -> list[Any]:
    """Two values of an argument of the schema's type ``kind``."""
    if "Tensor" in kind:
        return [[tensor()], [tensor(), tensor()]] if "List" in kind else [tensor(), tensor()]
    base: list[Any] = next(
        values
        for word, values in {
            "bool": [True, False], "int": [1, 0], "float": [0.5, 0.25], "number": [0.5, 2], "str": ["a", "b"], "": []
        }.items() if word in kind.replace("SymInt", "int")
    )  # fmt: skip
    return [base, base[::-1]] if "List" in kind else base


@pytest.mark.parametrize("name", sorted(name for name in TABLE if _overloads(name) and name != "sym_size"))
def test_each_argument_shows_in_the_text(name: str) -> None:
    for target in _overloads(name):
        graph = fx.Graph()

        def tensor(graph: fx.Graph = graph) -> fx.Node:
            made = graph.placeholder(f"t{len(graph.nodes)}")
            made.meta["val"] = torch.empty(2, 2, device="meta")
            return made

        def text(values: Sequence[Any], target: Any = target, graph: fx.Graph = graph) -> str:
            described = list(zip(target._schema.arguments, values))
            args = tuple(value for argument, value in described if not argument.kwarg_only)
            kwargs = {argument.name: value for argument, value in described if argument.kwarg_only}
            node = graph.call_function(target, args, kwargs)
            node.meta["val"] = torch.empty(2, 2, device="meta")
            return spell(node, _shown, "anchor").text

        described = target._schema.arguments
        options = [_values(str(argument.type), tensor) for argument in described]
        if "scale_factors" in [argument.name for argument in described]:  # given in place of a size, never beside it
            options[[argument.name for argument in described].index("output_size")] = []
        first = [
            argument.default_value if argument.has_default_value() else (given or [None])[0]
            for argument, given in zip(described, options)
        ]
        plain = text(first)
        for place, (argument, given) in enumerate(zip(described, options)):
            same = (first[place], LEFT_OUT.get(argument.name) if first[place] is None else None)
            for other in [] if argument.name in SILENT else [value for value in given if value not in same]:
                changed = text([*first[:place], other, *first[place + 1 :]])

                assert changed != plain, f"{target}: {argument.name}={other!r} does not show in {plain}"


# ---- in numbers ----------------------------------------------------------------------------------------------------

_OTHERS = {
    "bool": (True, False), "int": (0, 1, 2), "SymInt": (0, 1, 2), "float": (0.25, 2.0), "number": (0.5,),
    "str": ("floor", "tanh", "reflect"), "List[int]": ([1], [1, 1], [0]), "List[SymInt]": ([1], [2, 2], [0]),
}  # fmt: skip
_UNSAFE = ("_weight_norm", "put")
"""Operators that write past the end of memory where an argument does not fit."""


def _variants(call: Call) -> Iterator[Call]:
    """The call with each argument that has a default given in turn, where torch takes that."""
    schema = call.target._schema.arguments
    for place, argument in enumerate(schema):
        kind = (
            str(argument.type).removeprefix("Optional[").removesuffix("]" if "Optional" in str(argument.type) else "")
        )
        if not argument.has_default_value() or argument.name in SILENT | {"dtype", "memory_format", "sparse"}:
            continue
        for value in _OTHERS.get(kind, ()):
            args, kwargs = list(call.args), dict(call.kwargs)
            kwargs.pop(argument.name, None)
            if argument.kwarg_only:
                kwargs[argument.name] = value
            else:
                more = schema[len(args) : place]
                args = [*args, *(kwargs.pop(each.name, each.default_value) for each in more)]
                args[place : place + 1] = [value]
            yield Call(call.target, tuple(args), kwargs)


def _results(made: Any, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that a call gave, and the gradients of what it was given."""
    results = [item for item in tree_leaves(made) if isinstance(item, Tensor)]
    smooth = [item for item in results if item.requires_grad]
    if not smooth:
        return results
    generator = torch.Generator().manual_seed(1)
    given = [torch.rand(item.shape, generator=generator).to(item.dtype) for item in smooth]
    gradients = torch.autograd.grad(smooth, leaves, given, allow_unused=True)
    return [*results, *(gradient for gradient in gradients if gradient is not None)]


@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize("name", sorted(_SAMPLED - {*_UNSAFE}))
def test_the_text_computes_the_same_with_each_argument(name: str) -> None:
    own = [call for call in calls()[name] if isinstance(call.target, torch._ops.OpOverload)][:2]
    for given in itertools.chain.from_iterable(map(_variants, own)):
        leaves, args, kwargs = _fresh(given)
        call = Call(given.target, args, kwargs)
        try:
            node, _ = node_of(call)
        except Exception:  # torch does not take the argument here
            continue
        text = spell(node, _shown, "anchor").text
        known = {argument.name: argument.meta["real"] for argument in node.all_input_nodes}
        known |= {"torch": torch, "F": F, "anchor": torch.empty(()), "self": SimpleNamespace(training=True)}
        expected = None
        with contextlib.suppress(Exception):  # torch takes no gradient of it, or not with these arguments
            expected = _results(call.target(*call.args, **call.kwargs), leaves)
        if expected is not None:
            torch.testing.assert_close(_results(eval(text, known), leaves), expected, equal_nan=True, msg=text)


# ---- in a program --------------------------------------------------------------------------------------------------


class _Counted(nn.Module):
    """Tables with options, in float64, and a loss with weights of classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.often = nn.Embedding(12, 8, scale_grad_by_freq=True, dtype=torch.float64)
        self.seldom = nn.Embedding(12, 8, sparse=True, padding_idx=2, dtype=torch.float64)
        self.down = nn.Linear(8, 4, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        return self.down((self.often(ids) + self.seldom(ids)).tanh().mean(1))


WEIGHTS = torch.tensor([0.1, 1.3, 0.7, 2.1], dtype=torch.float64)


@pytest.mark.costly
@pytest.mark.parametrize("mesh", [{"dp_replicate": 2}, {"tp": 2}])
def test_a_program_computes_with_the_options_of_its_tables_and_its_loss(mesh: dict[str, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(12, (8, 5), generator=generator), torch.randint(4, (8,), generator=generator)
    program = gp.export(
        _Counted(), (ids,), loss_fn=lambda out, labels: F.cross_entropy(out, labels, weight=WEIGHTS), targets=(labels,)
    )
    parts = gp.partition(program, gp.plan(program, mesh=mesh))

    assert "scale_grad_by_freq=True" in parts.files["stage_0.py"]
    assert "sparse" not in parts.files["stage_0.py"]
    assert any("dense gradients" in warning for warning in program.warnings)
    assert gp.verify(parts, 2).ok
