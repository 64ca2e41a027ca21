"""A pattern fits a call whichever way its operands are turned, and no call that computes something else."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx

from graphpar.operators.record import Kind
from graphpar.passes.normalize.graph_matching import Number, Pattern, Value, call, matches

aten = torch.ops.aten
X, EPS = Value("x"), Number("eps")
GRAPH = fx.Graph()
A, B = GRAPH.placeholder("a"), GRAPH.placeholder("b")


def made(target: Any, *args: Any, **options: Any) -> fx.Node:
    return GRAPH.call_function(target, args, options)


@pytest.mark.parametrize(
    ("pattern", "node", "found"),
    [
        (call("add", X, EPS), made(aten.add.Tensor, A, 0.5), [{"x": A, "eps": 0.5}]),
        (call("add", X, EPS), made(aten.add.Tensor, 0.5, A), [{"x": A, "eps": 0.5}]),
        (call("add", X, EPS), made(aten.add.Tensor, A, 0.5, alpha=2), []),
        (call("sub", X, EPS), made(aten.sub.Tensor, 0.5, A), []),
        (call("div", X, 2), made(aten.div.Tensor, A, 2), [{"x": A}]),
        (call("div", X, 2), made(aten.div.Tensor, A, True), []),
        (call("div", X, 2), made(aten.div.Tensor_mode, A, 2, rounding_mode="floor"), []),
        (call("mul", X, X), made(aten.mul.Tensor, A, A), [{"x": A}] * 2),
        (call("mul", X, X), made(aten.mul.Tensor, A, B), []),
        ((call("square", X), call("pow", X, 2)), made(aten.pow.Tensor_Scalar, A, 2), [{"x": A}]),
        (call("mean", X, keepdim=True), made(aten.mean.dim, A, [-1], True), [{"x": A}]),
        (call("mean", X, keepdim=True), made(aten.mean.dim, A, [-1]), []),
        (call("mean", X, keepdim=True), made(aten.mean.default, A), []),
        (call(Kind.POINTWISE, X), made(aten.tanh.default, A), [{"x": A}]),
        (call(Kind.POINTWISE), made(aten.view.default, A, [4]), []),
        (call("mul"), A, []),
        (call("mul", X, EPS), made(operator.getitem, A, 0), []),
    ],
)
def test_patterns_fit_what_computes_the_same(pattern: Pattern, node: fx.Node, found: list[dict[str, Any]]) -> None:
    assert list(matches(pattern, node)) == found


def test_names_stand_for_one_value_in_the_whole_pattern() -> None:
    exponentials = made(aten.exp.default, A)
    softmax = call("div", call("exp", X, name="e"), call("sum", Value("e")))
    own = made(aten.div.Tensor, exponentials, made(aten.sum.dim_IntList, exponentials, [-1], True))
    other = made(aten.div.Tensor, exponentials, made(aten.sum.dim_IntList, made(aten.exp.default, A), [-1], True))

    assert list(matches(softmax, own)) == [{"x": A, "e": exponentials}]
    assert list(matches(softmax, other)) == []
