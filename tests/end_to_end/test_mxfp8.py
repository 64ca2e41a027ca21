"""Products in 8 bits with a scale for each 32 values: against loops written by hand, on meshes, with planted faults."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import graphpar as gp
from graphpar.cost_models.work import Collective, Phase, Product
from graphpar.cost_models.workload import Works
from graphpar.emitted import fp8
from graphpar.errors import GraphparError
from graphpar.passes.planning.planned import sharded_as
from graphpar.runtime.layout import coordinates, local_shard
from graphpar.runtime.manifest import load_manifest
from graphpar.runtime.option_kinds import FP8_RECIPES
from graphpar.verification import reference_for, verify_all
from graphpar.verification.rounded_products import RoundedProducts
from tests.ranks import precision_script
from tests.tools.rank_pool import RankPool
from tests.tools.samples import sample

ROWS, TOKENS, WIDTH, CLASSES = 8, 64, 64, 50


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 192), nn.Linear(192, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class _Model(nn.Module):
    """Rows of 192 divide by 32 on 2 ranks, and not on 4."""

    def __init__(self, flat: bool = False, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.flat = flat
        self.tokens = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(_Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)
        for layer in self.layers if frozen else ():
            layer.up.weight.requires_grad_(False)  # type: ignore[union-attr]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        x = x.flatten(0, 1) if self.flat else x
        for layer in self.layers:
            x = layer(x)
        x = self.head(x)
        return x.unflatten(0, (-1, ids.size(1))) if self.flat else x


def _loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def _batch(tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    first, second = (torch.randint(CLASSES, (ROWS, tokens), generator=draw) for _ in range(2))
    return first, second


@functools.cache
def _program(tokens: int = TOKENS, recipe: str = "mxfp8", flat: bool = False, frozen: bool = False) -> gp.Program:
    ids, labels = _batch(tokens)
    model = _Model(flat, frozen)
    return gp.export(model, (ids,), loss_fn=_loss, targets=(labels,), dtype="bf16", fp8="**", fp8_recipe=recipe)


def _recipes(program: gp.Program, **pins: Any) -> dict[str, str]:
    return _recipes_of(gp.partition(program, gp.plan(program, **pins)))


def _recipes_of(parts: gp.Parts) -> dict[str, str]:
    return {name: found[0] for name, found in load_manifest(parts.folder).rounded_weights.items()}


# ---- one product ------------------------------------------------------------------------------------------------


def _by_hand(x: Tensor, block: int) -> Tensor:
    """The rule of cuBLAS and torchao: the exponent of a scale is that of the largest value over 448, rounded up."""
    found = x.double().clone()
    for row in found.view(-1, x.size(-1)):
        for begin in range(0, len(row), block):
            piece = row[begin : begin + block]
            largest = float(piece.abs().max())
            scale = 2.0 ** max(math.ceil(math.log2(largest / 448)), -126) if largest else 1.0
            piece.copy_((piece / scale).to(torch.float8_e4m3fn).double() * scale)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("width", [64, 40])
def test_the_function_is_that_of_the_reference_and_of_a_loop(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(0)
    x, weight, gradient = torch.randn(2, 32, width), torch.randn(24, width), torch.randn(2, 32, 24)
    x *= 2.0 ** torch.randint(-20, 20, x.shape)
    x[0, 0], x[0, 1], x[1, 2, 3], weight[0] = 0, 1e-30, 449.0, 448.0 * 2**20
    x, weight, gradient = (each.to(dtype) for each in (x, weight, gradient))
    x.requires_grad_()
    for recipe, function in (("mxfp8", fp8.mxfp8_linear), ("mxfp8_with_gw_hp", fp8.mxfp8_linear_with_gw_hp)):
        parameter = nn.Parameter(weight.clone())
        linear = RoundedProducts({"w": parameter}, {"w": (recipe,)}, {})
        results = []
        for made in (function(x, parameter), linear(x, parameter)):
            results.append([made, *torch.autograd.grad(made, [x, parameter], gradient)])
        rows, columns = gradient.flatten(0, 1).t(), x.detach().flatten(0, 1).t()
        of_weight = (
            _by_hand(rows, 32) @ _by_hand(columns, 32).t()
            if recipe == "mxfp8"
            else rows.double() @ columns.t().double()
        )
        expected = [
            (_by_hand(x.detach(), 32) @ _by_hand(weight, 32).t()).to(dtype),
            (_by_hand(gradient, 32) @ _by_hand(weight.t(), 32).t()).to(dtype),
            of_weight.to(dtype),
        ]
        digits = {torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
        for found in results:
            for one, other in zip(found, expected, strict=True):
                assert (one - other).abs().max() <= digits * other.abs().max()


def test_what_is_not_finite_stays_so() -> None:
    x, weight = torch.randn(4, 64), torch.randn(6, 64)
    x[1, 2], x[2, 40] = torch.inf, torch.nan
    result = fp8.mxfp8_linear(x, weight)

    assert torch.isnan(result).all(1).tolist() == [False, True, True, False] and torch.isfinite(result[[0, 3]]).all()
    assert fp8.mxfp8_linear(torch.ones(0, 3, 64), weight).shape == (0, 3, 6)


def test_compiled_it_is_the_same() -> None:
    x, weight = torch.randn(64, 40).bfloat16().requires_grad_(), torch.randn(16, 40).bfloat16().requires_grad_()
    compiled = torch.compile(fp8.mxfp8_linear, fullgraph=True, backend="aot_eager")
    gradient = torch.randn(64, 16).bfloat16()
    both = [
        (made := function(x, weight), *torch.autograd.grad(made, [x, weight], gradient))
        for function in (fp8.mxfp8_linear, compiled)
    ]

    for one, other in zip(*both, strict=True):
        assert torch.equal(one, other)


def test_scales_have_the_layout_that_units_read() -> None:
    """The scale of block ``b`` of row ``r`` is in tile (r / 128, b / 4), at r % 32 * 16 + r % 128 / 32 * 4 + b % 4."""
    rows, blocks = 197, 7
    exponents = torch.randint(-126, 120, (rows, blocks))
    found = fp8._in_tiles(torch.ldexp(torch.ones(rows, blocks), exponents).unsqueeze(2))

    assert found.dtype is torch.float8_e8m0fnu and found.shape == (2 * 2 * 512,)
    tiles = found.view(torch.uint8).view(2, 2, 512).int() - 127
    for row in range(rows):
        for block in range(blocks):
            place = row % 32 * 16 + row % 128 // 32 * 4 + block % 4
            assert tiles[row // 128, block // 4, place] == exponents[row, block]
    assert fp8._in_tiles(torch.tensor([[[torch.nan]], [[torch.inf]]])).view(torch.uint8)[:32:16].tolist() == [255, 255]


def test_units_are_given_what_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the product that reads operands and scales as the documentation says."""

    def scaled(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, **options: Any) -> Tensor:
        assert a.size(1) % 32 == b.size(1) % 16 == 0 and a.is_contiguous() and b.t().is_contiguous()
        values = []
        for rows, scale in ((a, a_scale), (b.t(), b_scale)):
            tiles = scale.view(torch.uint8).view(-(-len(rows) // 128), -1, 32, 4, 4)
            exponents = tiles.permute(0, 3, 2, 1, 4).flatten(3).flatten(0, 2)[: len(rows), : rows.size(1) // 32]
            values.append(rows.double() * 2.0 ** (exponents.double() - 127).repeat_interleave(32, 1))
        return (values[0] @ values[1].t()).to(options["out_dtype"])

    monkeypatch.setattr(torch, "_scaled_mm", scaled)
    for m, n, k in ((5, 24, 64), (130, 17, 40), (1, 16, 160)):
        a, b = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
        found, expected = fp8._product_of_whole(a, b, 32), fp8._product(a, b, 32)
        assert found.shape == (m, n)
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


# ---- which gradients are rounded --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "flat", "pins", "rounded"),
    [
        (64, False, {"mesh": {"pp": 2}}, True),
        (64, False, {"mesh": {"cp": 2}}, True),
        (64, False, {"mesh": {"tp": 4}, "sp": True}, True),
        (64, True, {"mesh": {"dp_shard": 2}}, False),  # of the second layer's up, rows follow no sequence that is seen
        (40, False, {"mesh": {"pp": 2}}, False),
        (32, False, {"mesh": {"cp": 2}}, False),  # 16 tokens on each rank
    ],
)
def test_gradients_are_rounded_where_blocks_are_of_a_sequence(
    tokens: int, flat: bool, pins: dict[str, Any], rounded: bool
) -> None:
    program = _program(tokens, flat=flat)
    parts = gp.partition(program, gp.plan(program, **pins))
    recipes = _recipes_of(parts)

    assert recipes.keys() == {f"layers.{i}.{name}.weight" for i in range(2) for name in ("up", "down")}
    assert set(recipes.values()) == {"mxfp8" if rounded else "mxfp8_with_gw_hp"}
    assert ("gradients of 4 of 4 weights are products in bf16" in str(parts.report["warnings"])) == (not rounded)


def test_features_that_blocks_do_not_divide_leave_the_batch_open() -> None:
    model, x = nn.Sequential(nn.Linear(80, 40), nn.ReLU(), nn.Linear(40, 3)), torch.randn(4, 32, 80)
    loss: dict[str, Any] = {"loss_fn": lambda out: out.square().mean()}
    program = gp.export(model, (x,), dtype="bf16", fp8="0,2", fp8_recipe="mxfp8", **loss)
    recipes = _recipes(program, mesh={"dp_replicate": 2})
    assert recipes == {"0.weight": "mxfp8", "2.weight": "mxfp8"}


class _Twice(nn.Module):
    """A weight of tokens, and of means of sequences."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        return self.head(self.second(self.first(h.mean(1)).tanh()) + self.second(h).mean(1)).square().mean()


@pytest.mark.costly
def test_all_calls_of_a_weight_are_one_recipe() -> None:
    program = gp.export(_Twice(), (torch.randn(8, 32, 32),), dtype="bf16", fp8="**", fp8_recipe="mxfp8")
    assert set(_recipes(program, mesh={"tp": 2}).values()) == {"mxfp8_with_gw_hp"}
    assert verify_all([gp.partition(program, gp.plan(program, mesh={"dp_replicate": 2}))])[0].ok


@pytest.mark.costly
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_a_head_that_is_chosen_rounds_in_chunks_too(recipe: str) -> None:
    ids, labels = _batch(TOKENS)
    program = gp.export(
        _Model(), (ids,), loss_fn=_loss, targets=(labels,), dtype="bf16", fp8="head,**", fp8_recipe=recipe
    )
    parts = gp.partition(program, gp.plan(program, mesh={"dp_replicate": 2}, loss_chunk=96, microbatch_size=2))
    assert "def head_loss(" in parts.files["blocks.py"] and _recipes_of(parts)["head.weight"] == recipe
    assert verify_all([parts])[0].ok

    if recipe == "mxfp8":
        with pytest.raises(GraphparError, match="multiple of 32"):
            gp.partition(program, gp.plan(program, mesh={"dp_replicate": 2}, loss_chunk=48))


# ---- options ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fp8_recipe": "mxfp8", "dtype": "bf16"}, "fp8_recipe says how the layers of fp8 multiply; give fp8 with it"),
        ({"fp8": "**", "fp8_recipe": "mxfp9", "dtype": "bf16"}, "rowwise, mxfp8. Did you mean 'mxfp8'"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphparError, match=message):
        gp.export(_Model(), (_batch()[0],), loss_fn=_loss, targets=(_batch()[1],), **options)


def test_the_plan_has_the_recipe(tmp_path: Path) -> None:
    plan = gp.plan(_program(), mesh={"pp": 2})
    assert plan.fp8_recipe == "mxfp8" and gp.Plan.from_json(plan.to_json()).precision == plan.precision
    assert gp.plan(_program(recipe="rowwise"), mesh={"pp": 2}).fp8_recipe == "rowwise"
    with pytest.raises(GraphparError, match="fp8_recipe is 'rowwise', but the program was exported in 'mxfp8'"):
        gp.plan(_program(), mesh={"pp": 2}, fp8_recipe="rowwise")


def test_devices_without_units_for_blocks_are_refused_and_others_priced() -> None:
    with pytest.raises(GraphparError, match=r"H100-SXM-80GB has no units for blocks .*\(mxfp8\); take rowwise"):
        gp.plan(_program(), "2xH100")
    assert gp.plan(_program(), "2xB200").fp8_recipe == "mxfp8"


# ---- frozen weights ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [fp8.fp8_linear, fp8.mxfp8_linear])
def test_only_what_the_backward_reads_is_saved(function: Callable[..., Tensor]) -> None:
    for of_x, of_weight in ((True, False), (False, True), (True, True)):
        x, weight = torch.randn(32, 64, requires_grad=of_x), torch.randn(24, 64, requires_grad=of_weight)
        saved: list[int] = []

        def pack(tensor: Tensor, saved: list[int] = saved) -> Tensor:
            saved.append(tensor.data_ptr())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            function(x, weight).sum().backward()
        assert saved == [each.data_ptr() for each, read in ((x, of_weight), (weight, of_x)) if read]


@pytest.mark.costly
@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
def test_what_only_frozen_weights_read_is_gathered_in_8_bits(recipe: str) -> None:
    program = _program(recipe=recipe, frozen=True)
    parts = gp.partition(program, gp.plan(program, mesh={"tp": 2}, sp=True))
    text = parts.files["blocks.py"]

    assert text.count("for_weights=False") == text.count("all_gather_rounded(") == 1
    trained = _program(recipe=recipe)
    assert "for_weights" not in gp.partition(trained, gp.plan(trained, mesh={"tp": 2}, sp=True)).files["blocks.py"]
    again = gp.partition(program, gp.plan(program, mesh={"tp": 2}, sp=True, recompute="gathers"))
    assert all(result.ok for result in verify_all([parts, again]))


# ---- programs ---------------------------------------------------------------------------------------------------


class _Rounded(torch.autograd.Function):
    """A layer by hand, of ``parts`` of what its forward sums, or (negative) its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, block: int, parts: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.block, ctx.parts = block, parts
        pairs = zip(x.chunk(max(parts, 1), -1), weight.chunk(max(parts, 1), -1), strict=True)
        return sum(_made(a, b, block) for a, b in pairs)  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        parts = max(-ctx.parts, 1)
        pairs = zip(gradient.chunk(parts, -1), weight.t().chunk(parts, -1), strict=True)
        of_x = sum(_made(a, b, ctx.block) for a, b in pairs)
        of_weight = _made(gradient.flatten(0, 1).t(), x.flatten(0, 1).t(), ctx.block)
        return of_x, of_weight, None, None  # type: ignore[return-value]


def _made(a: Tensor, b: Tensor, block: int) -> Tensor:
    return _by_hand(a.contiguous(), block) @ _by_hand(b.contiguous(), block).t()


def _trained_by_hand(block: int, tp: int, pieces: int) -> dict[str, Tensor]:
    """Gradients of a step in fp64; what rows of ``down``, and columns of ``up``, sum is divided over ``tp`` ranks."""
    model, total = _Model().double(), dict[str, Tensor]()
    for ids, labels in zip(*(each.chunk(pieces) for each in _batch()), strict=True):
        cast = dict(model.named_parameters())
        x = cast["tokens.weight"][ids]
        for i in range(2):
            own = {name.removeprefix(f"layers.{i}."): value for name, value in cast.items()}
            h = F.layer_norm(x, (WIDTH,), own["norm.weight"], own["norm.bias"])
            h = F.gelu(_Rounded.apply(h, own["up.weight"], block, -tp) + own["up.bias"])
            x = x + (_Rounded.apply(h, own["down.weight"], block, tp) + own["down.bias"])
        logits = F.linear(x, cast["head.weight"], cast["head.bias"])
        (F.cross_entropy(logits.flatten(0, 1), labels.flatten()) / pieces).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        total[name] = parameter.grad
    return total


@pytest.mark.costly
@pytest.mark.parametrize(
    ("degree", "pins"),
    sample([(2, {"sp": True}), (4, {"sp": True, "recompute": "gathers"}), (1, {"microbatch_size": 2})], 2),
)
def test_gradients_are_those_of_a_loop_by_hand(
    tmp_path: Path, pool: RankPool, degree: int, pins: dict[str, Any]
) -> None:
    program = _program()
    parts = gp.partition(program, gp.plan(program, mesh={"tp": degree}, **pins))
    out = parts.save(tmp_path / "program", weights=_Model().state_dict())
    names = [spec.name for spec in load_manifest(out).inputs]
    save_file(dict(zip(names, _batch(), strict=True)), tmp_path / "batch.safetensors")
    options = json.dumps({"batches": [str(tmp_path / "batch.safetensors")], "double": True})
    pool.torchrun(Path(precision_script.__file__), [str(out), str(tmp_path), options], nproc=degree, timeout_s=200)

    degrees, types = parts.plan.mesh.degrees(), parts.plan.sharding.parameters
    off: dict[int, float] = {}
    for block in (32, 16):
        expected = _trained_by_hand(block, degree, parts.plan.microbatches)
        off[block] = 0.0
        for rank in range(degree):
            found = load_file(tmp_path / f"gradients_{rank}.safetensors")
            for name in ("layers.0.up.weight", "layers.1.up.weight", "layers.1.down.weight"):
                own = local_shard(expected[name], types.get(name, {}), degrees, coordinates(rank, degrees))
                off[block] = max(off[block], float((found[name] - own).norm() / own.norm()))
    assert off[32] < 1e-10 < 1e-9 < off[16], off


MESHES: dict[str, dict[str, Any]] = {
    "tp": {"mesh": {"tp": 2}},
    "uneven blocks": {"mesh": {"tp": 4}, "sp": True, "overlap_tp": True},
    "gathers": {"mesh": {"tp": 2}, "sp": True, "recompute": "gathers"},
    "cp": {"mesh": {"cp": 2}},
    "pp": {"mesh": {"pp": 2}, "schedule": "ZBVZeroBubble"},
    "zero 1": {"mesh": {"dp_shard": 2}, "zero": 1},
    "zero 3": {"mesh": {"dp_shard": 2, "tp": 2}, "zero": 3},
    "full": {"mesh": {"tp": 2}, "recompute": "full"},
    "budget": {"mesh": {"dp_replicate": 2}, "recompute": "budget:0.5"},
}
FAULTS = {
    "a scale that is twice as large": (" - 9 + (", " - 8 + ("),
    "blocks of 16": ("BLOCK = 32", "BLOCK = 16"),
    "gradient of the weight": (
        " if ctx.rounds_all else rows.t() @ columns",
        " if not ctx.block else rows.t() @ columns",
    ),
    "columns of the weight": ("_product(rows, weight.t(), ctx.block)", "(rows @ weight)"),
}


@pytest.mark.costly
def test_programs_train_as_the_model_does_with_the_same_recipe(tmp_path: Path) -> None:
    program = _program()
    parts = [gp.partition(program, gp.plan(program, **MESHES[name])) for name in sample(list(MESHES), 3)]
    wrong = gp.partition(program, gp.plan(program, mesh={"tp": 2}))
    text, folders = (wrong.folder / "fp8.py").read_text(), []
    for name, (right, fault) in FAULTS.items():
        assert right in text
        folders.append(wrong.save(tmp_path / name))
        (folders[-1] / "fp8.py").write_text(text.replace(right, fault))
    given = [None] * len(parts) + [reference_for(wrong)] * len(folders)
    results = verify_all([*parts, *folders], references=given, timeout_s=400)

    assert [result.ok for result in results] == [True] * len(parts) + [False] * len(folders), results
    assert all(result.decided_in == "fp64" for result in results[: len(parts)])


@pytest.mark.costly
def test_sequences_that_blocks_do_not_divide() -> None:
    program, flat = _program(40), _program(flat=True)
    parts = [gp.partition(program, gp.plan(program, **MESHES[name])) for name in ("pp", "cp")]
    parts.append(gp.partition(flat, gp.plan(flat, mesh={"dp_replicate": 2, "pp": 2})))
    for result in verify_all(parts, timeout_s=400):
        assert result.ok, result


@pytest.mark.costly
def test_inference() -> None:
    program = gp.export(_Model(), (_batch()[0],), mode="infer", dtype="bf16", fp8="**", fp8_recipe="mxfp8")
    parts = gp.partition(program, gp.plan(program, mesh={"tp": 2}, sp=True))

    assert "all_gather_rounded(" in parts.files["blocks.py"] and "with_gw_hp" not in parts.files["blocks.py"]
    assert verify_all([parts])[0].ok


def test_prices_have_the_products_and_the_bytes_that_run() -> None:
    for options, pins, itemsizes, sent in (
        ({}, {"recompute": "gathers"}, {1}, 1 + 2 / 32),
        ({"recipe": "rowwise"}, {"recompute": "gathers"}, {2}, 1 + 2 / WIDTH),
        ({"tokens": 40}, {"recompute": "gathers"}, {2}, 1 + 2 / 32),
        ({}, {}, {1}, 2),
        ({"frozen": True}, {}, {1}, 1 + 2 / 32),
    ):
        program = _program(**options)  # type: ignore[arg-type]
        plan = gp.plan(program, mesh={"tp": 2}, sp=True, **pins)
        local = sharded_as(program, plan).local
        (block,) = local.blocks.values()
        rows = Works(local, {"tp": 2}).block(block, shards=bool(pins)).rows
        products = [row for row in rows if isinstance(row, Product)]
        assert {row.itemsize for row in products if row.phase is not Phase.WEIGHT} == {1}
        assert {row.itemsize for row in products if row.phase is Phase.WEIGHT} == itemsizes
        gathers = [row for row in rows if isinstance(row, Collective) and row.kind == "all-gather"]
        nbytes = sum(rows[row] * row.nbytes.at(1) for row in gathers if row.phase is Phase.FORWARD)
        assert nbytes == sent * options.get("tokens", TOKENS) * WIDTH
