"""Composite operators: each is what its parts are, and a new one is a file of ``graphpar.emitted`` and a record, whatever it needs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import graphpar
from graphpar.emitted import fp8_gathers, parallel_products
from graphpar.operators.composite import Sample
from graphpar.operators.prove import Call, prove
from graphpar.operators.rules import placements
from graphpar.operators.table import COMPOSITES
from graphpar.runtime.axes import Divides
from graphpar.verification.products_proof import product_problems

LOCAL = [name for name, composite in COMPOSITES.items() if composite.of is None and not composite.composed]
ON_SHARDS = [name for name, composite in COMPOSITES.items() if composite.of is not None]


def _draw(*shape: int, below: int | None = None) -> Tensor:
    return torch.randn(shape, dtype=torch.float64) if below is None else torch.randint(0, below, shape)


def test_all_are_tried() -> None:
    composed = [name for name, composite in COMPOSITES.items() if composite.composed]

    assert {*LOCAL, *ON_SHARDS, *composed} == {*COMPOSITES}
    assert all(composite.samples for composite in COMPOSITES.values())
    assert all(any(hasattr(module, name) for module in (parallel_products, fp8_gathers)) for name in composed)
    assert product_problems(parallel_products, {"tp": 2}) == product_problems(fp8_gathers, {"tp": 2}) == []


@pytest.mark.parametrize("name", LOCAL)
def test_a_function_computes_what_its_parts_do(name: str) -> None:
    composite = COMPOSITES[name]
    for sample in composite.samples:
        expected, found = (_results(function, sample) for function in (composite.parts, composite.function))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


def _results(function: Any, sample: Sample) -> list[Tensor]:
    """Results, and gradients of the first operand where it is no whole number."""
    torch.manual_seed(0)
    operands, options = tree_map(
        lambda x: x.requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x, sample(_draw)
    )
    made = tree_leaves(function(*operands, **options))
    gradients = (
        torch.autograd.grad([result.square().sum() for result in made], operands[:1])
        if operands[0].is_floating_point()
        else ()
    )
    return [*made, *gradients]


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("name", ON_SHARDS)
def test_shards_of_a_function_are_those_of_the_operator_that_it_replaces(name: str, degree: int) -> None:
    composite, tried = COMPOSITES[name], 0
    for sample in composite.samples:
        torch.manual_seed(0)
        call = Call(composite.of, *sample(_draw))
        replicas = composite.updates and Divides.ROWS in composite.divides
        for proof in prove(call, placements, degree, replicas=replicas):
            if proof.placement.rewrite == name:
                assert not proof.problem, str(proof.placement)
                tried += 1
    assert tried or degree == 3


def test_types_are_declared_where_the_function_is() -> None:
    types = {name: COMPOSITES[name].types for name in ON_SHARDS}

    assert {name: f"{found.text} -> {found.result}" for name, found in types.items() if found is not None} == {
        "ring_attention": "query, key, value S(2) -> S(2)",
        "balanced_packed_attention": "query, key, value S(2) -> S(2)",
        "vocab_embedding": "weight S(0), ids R -> P",
        "vocab_cross_entropy": "logits S(1), target R -> I",
        "sync_batch_norm": "x S(0), weight, bias R -> S(0)",
        "channel_batch_norm": "x S(1), weight, bias S(0) -> S(1)",
    }


# ---- a new one, in a copy of the package -------------------------------------------------------------------------

FUSED = '''"""A square of a value that is not negative, times another."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def square_gate(gate: Tensor, up: Tensor) -> Tensor:
    """``F.relu(gate).square() * up``, of tensors of one shape."""
    return F.relu(gate).square() * up
'''
FUSED_RECORD = """

from graphpar.emitted import square_gates

RECORDS["square_gate"] = Record(
    Kind.POINTWISE,
    elementwise,
    composite=Composite(
        square_gates.square_gate,
        lambda gate, up: F.relu(gate).square() * up,
        fuses=True,
        title="squared gates",
        samples=(lambda draw: ((draw(2, 3), draw(2, 3)), {}),),
    ),
)
"""
WITH_COLLECTIVE = '''"""Norms by root mean square of features that are sharded."""

from __future__ import annotations

import torch
from torch import Tensor

from graphpar.emitted.collectives import all_reduce_both


def feature_norm(x: Tensor, weight: Tensor, axis: str, width: int, eps: float) -> Tensor:
    """x S(2), weight S(0) -> S(2): ``F.rms_norm`` of rows of ``width``. [b, n, width / k] -> [b, n, width / k]"""
    squares = all_reduce_both(x.square().sum(-1, keepdim=True), axis)
    return x * torch.rsqrt(squares / width + eps) * weight
'''
RECORD_WITH_COLLECTIVE = """

import torch
from torch.nn import functional as F

from graphpar.emitted import feature_norms
from graphpar.operators.composite import Composite, Message
from graphpar.runtime.layout import Shard


def _feature_norm(node, context):
    x, weight = operands_of(node)
    whole = value_of(x).ndim == 3 and sizes_of(x)[2][0] % context.degree == 0
    return [Placement((Shard(2), Shard(0)), (Shard(2),), "feature_norm")] if whole else []


def _rows(node, operands, result, degree):
    rows = operands[0].sizes[0] * operands[0].sizes[1]
    return [Message("all-reduce", 4 * rows)], [Message("all-reduce", 4 * rows)]


RECORDS["feature_norm"] = Record(
    Kind.NORM,
    composite=Composite(
        feature_norms.feature_norm,
        lambda x, weight, width, eps: F.rms_norm(x, [width], weight, eps),
        of=torch.ops.aten.rms_norm.default,
        placements=_feature_norm,
        arguments=lambda call, axes: ((call.args[0], call.args[2], *axes, call.get("normalized_shape")[0], call.get("eps")), {}),
        sends=_rows,
        title="norms of sharded features",
        samples=(lambda draw: ((draw(2, 3, 4), [4], draw(4), 1e-5), {}),),
    ),
)
"""
MODEL = """
import torch
from torch import nn
from torch.nn import functional as F


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate, self.norm = nn.Linear(8, 16), nn.Linear(8, 16), nn.RMSNorm(16, eps=1e-5)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.norm(self.up(x) * F.relu(self.gate(x)).square())).square().mean()
"""
RUN = """
import json

import torch

import graphpar as gp
from graphpar.operators.table import COMPOSITES
from graphpar.runtime.axes import Divides
from model import Toy

if __name__ == "__main__":
    program = gp.export(Toy(), (torch.randn(4, 3, 8),))
    pins = {"norm": {"inputs": ["S(2)@tp"], "outputs": ["S(2)@tp"]}, "norm.weight": "S(0)@tp"}
    plan = gp.plan(program, mesh={"tp": 2}, shard_plan=pins if "feature_norm" in COMPOSITES else None)
    parts = gp.partition(program, plan)
    parts.save("out")
    checked = gp.check(parts)
    outcome = {"problems": checked.problems, "unchecked": checked.unchecked, "verified": gp.verify(parts).ok}
    print(json.dumps(outcome))
"""
NEW = {
    "square_gate": ("square_gates", FUSED, "elementwise", FUSED_RECORD),
    "feature_norm": ("feature_norms", WITH_COLLECTIVE, "reduce", RECORD_WITH_COLLECTIVE),
}


@pytest.mark.costly
@pytest.mark.parametrize("name", NEW)
def test_a_new_one_touches_two_files(name: str, tmp_path: Path) -> None:
    file, function, family, record = NEW[name]
    package = Path(str(graphpar.__file__)).parent
    shutil.copytree(package, tmp_path / "graphpar", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "graphpar" / "emitted" / f"{file}.py").write_text(function)
    with (tmp_path / "graphpar" / "operators" / f"{family}.py").open("a") as family_file:
        family_file.write(record)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "run.py").write_text(RUN)

    run = subprocess.run(
        [sys.executable, "run.py"], cwd=tmp_path, capture_output=True, text=True, timeout=600,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    stage = (tmp_path / "out" / "stage_0.py").read_text()

    assert (found["problems"], found["unchecked"], found["verified"]) == ([], {}, True)
    assert f"from .{file} import {name}" in stage and f"{name}(" in stage
    assert (tmp_path / "out" / f"{file}.py").is_file()
