"""Records hold against torch: what an operator's facts say is compared with what torch does on samples of it."""

from __future__ import annotations

import ast
import collections
import contextlib
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from graphpar.codegen.printer import FUNCTIONS, OF_FILES
from graphpar.codegen.spelling import spell
from graphpar.cost_models.flops import operator_flops
from graphpar.emitted import fp8, gated, random_streams, rotary
from graphpar.ir.program import operator_name
from graphpar.operators.elementwise import elementwise
from graphpar.operators.prove import Call, node_of
from graphpar.operators.record import Kind, Reads, Record
from graphpar.operators.spelling import Expression, literal
from graphpar.operators.table import COMPOSITES, TABLE, UNKNOWN, record_named, record_of
from tests.test_imports import ROOT, modules
from tests.tools.rule_samples import FAMILIES, family

pytestmark = pytest.mark.filterwarnings("ignore")


_WITHOUT = (
    "__invert__ agree_on _assert_async _assert_scalar _assert_tensor_metadata _guards_fn _log_softmax _safe_softmax _softmax _unsafe_view "
    "_upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d adaptive_avg_pool1d "
    "adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool3d addbmm addr affine_grid_generator arange as_strided avg_pool2d "
    "avg_pool3d bincount channel_batch_norm cholesky cholesky_inverse constant_pad_nd conv_transpose3d convolution ctc_loss cummin dot "
    "embedding_bag empty empty_like expert_rows expert_sums eye feature_dropout fill float_power floordiv full full_like ger "
    "getitem grid_sampler_2d grid_sampler_3d grouped_mm grouped_mm_fallback gru imag index_reduce isin istft linalg_cholesky "
    "linalg_cholesky_ex linspace logcumsumexp logdet logspace lstm max_pool1d max_pool1d_with_indices max_pool3d "
    "max_pool3d_with_indices max_unpool2d max_unpool3d mod moveaxis multi_margin_loss multilabel_margin_loss mv "
    "new_empty new_full new_ones nll_loss nll_loss2d norm ones poisson_nll_loss return_rows ring_attention rnn_relu rnn_tanh "
    "scalar_tensor "
    "scaled_dot_product_attention send_rows special_polygamma stft swapaxes swapdims sym_constrain_range sym_constrain_range_for_size "
    "sym_float sym_int sym_size sync_batch_norm tril_indices triu_indices truediv unique_consecutive unique_dim unsafe_chunk "
    "unsafe_split upsample_bicubic2d upsample_linear1d upsample_nearest1d upsample_nearest3d upsample_trilinear3d vdot "
    "vocab_cross_entropy vocab_embedding zeros cached_attention last window packed_attention balanced_packed_attention "
    "without_padding start_send finish_send start_return finish_return "
)
_SAMPLED = {*TABLE, "addcmul", "lerp"} - set(_WITHOUT.split()) - {n for n, each in COMPOSITES.items() if each.composed}
"""Names of operators of which there are samples; known here, so that nobody makes these to list the tests."""


@functools.cache
def calls() -> dict[str, list[Call]]:
    """Hand-made calls by the name of the operator."""
    torch.manual_seed(0)
    found: dict[str, list[Call]] = collections.defaultdict(list)
    for name in [*FAMILIES, "streams"]:
        for call in family(name):
            found[operator_name(_node(call))].append(call)
    for name in TABLE:
        if name not in found and (simple := _simple(name)) is not None:
            found[name] = [simple]
    return found


def _simple(name: str) -> Call | None:
    """A call with one, two or three tensors and nothing else, where torch has that."""
    packet = getattr(torch.ops.aten, name, None)
    for overload in ("default", "Tensor"):
        target = getattr(packet, overload, None)
        if target is None or target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
            continue
        if name in ("empty_like", "unique_consecutive"):  # has no values; torch's function leaves results out
            continue
        for count, make in itertools.product((1, 2, 3), (_between_0_and_1, _small, _mask)):
            call = Call(target, tuple(make() for _ in range(count)))
            with contextlib.suppress(Exception):
                if any(isinstance(item, Tensor) for item in tree_leaves(target(*call.args))):
                    return call
    return None


def _between_0_and_1() -> Tensor:
    return torch.rand(3, 4, dtype=torch.float64) * 0.8 + 0.1


def _small() -> Tensor:
    return torch.randint(1, 5, (3, 4))


def _mask() -> Tensor:
    return torch.rand(3, 4) > 0.5


def _node(call: Call) -> fx.Node:
    return fx.Graph().call_function(call.target)


def _with_records(known: Any) -> list[str]:
    names = sorted(name for name in _SAMPLED if known(record_named(name)))
    assert names
    return names


def test_there_are_samples() -> None:
    assert set(calls()) == _SAMPLED


def _fresh(call: Call) -> tuple[list[Tensor], Any, Any]:
    """(what has a gradient, positional arguments, options), all new."""
    leaves: list[Tensor] = []

    def copied(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        made = item.detach().clone()
        if made.is_floating_point() or made.is_complex():
            leaves.append(made.requires_grad_())
        return made

    args, kwargs = tree_map(copied, (call.args, call.kwargs))
    return leaves, args, kwargs


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


# ---- backward ----------------------------------------------------------------------------------------------------


def _kept(call: Call) -> Reads | None:
    """What autograd keeps of one call: results, operands (or values as large that torch makes of them); None without a gradient."""
    leaves, args, kwargs = _fresh(call)
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):  # type: ignore[func-returns-value]
        try:
            made = call.target(*args, **kwargs)
        except RuntimeError:  # statistics and weights of losses may have no gradient
            for leaf in leaves[1:]:
                leaf.requires_grad_(False)
            made = call.target(*args, **kwargs)
    results = [item for item in tree_leaves(made) if isinstance(item, Tensor) and item.requires_grad]
    if not results or not leaves:
        return None
    given = {_memory(leaf) for leaf in leaves}
    returned = {_memory(result) for result in results} - given
    largest = max(leaf.numel() for leaf in leaves)
    inside = [t for t in saved if t.is_floating_point() and t.numel() >= largest > 1 and _memory(t) not in returned]
    if inside or given & {_memory(tensor) for tensor in saved}:
        return Reads.OPERANDS
    return Reads.RESULT if returned & {_memory(tensor) for tensor in saved} else Reads.NOTHING


@pytest.mark.parametrize("name", _with_records(lambda record: record is not UNKNOWN))
def test_the_backward_reads_what_the_record_says(name: str) -> None:
    if name == "aminmax" and torch.__version__ < "2.13":
        pytest.skip("before, its backward read no operand")
    order = [Reads.NOTHING, Reads.RESULT, Reads.OPERANDS]
    kept = [found for call in calls()[name] if (found := _kept(call)) is not None]

    assert not kept or max(kept, key=order.index) is record_named(name).reads


@pytest.mark.parametrize("name", _with_records(lambda record: record.passes))
def test_the_gradient_is_passed_on_as_it_is(name: str) -> None:
    for call in calls()[name]:
        leaves, args, kwargs = _fresh(call)
        result = call.target(*args, **kwargs)
        if leaves and leaves[0] is args[0] and leaves[0].shape == result.shape:
            given = torch.randn_like(result)

            (gradient,) = torch.autograd.grad(result, leaves[:1], given)

            assert _memory(gradient) == _memory(given)


# ---- memory and values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", _with_records(lambda record: record.free))
def test_what_is_free_shows_the_memory_of_its_operand(name: str) -> None:
    for call in calls()[name]:
        args = tree_map(lambda item: item.contiguous() if isinstance(item, Tensor) else item, call.args)
        shown = {_memory(item) for item in tree_leaves(args) if isinstance(item, Tensor)}

        made = call.target(*args, **call.kwargs)

        assert {_memory(item) for item in tree_leaves(made) if isinstance(item, Tensor)} <= shown, call


def test_views_of_torch_are_free() -> None:
    """An operator of which torch says that it is a view costs nothing."""
    views = {name for name, found in calls().items() if all(getattr(call.target, "is_view", False) for call in found)}
    views -= {"to", "resolve_conj", "resolve_neg"}  # views where there is nothing to cast, to conjugate, to negate

    assert len(views) > 10
    assert [name for name in views if not record_named(name).free] == []


@pytest.mark.parametrize("name", sorted(name for name, record in TABLE.items() if record.neutral is not None))
def test_the_neutral_operand_changes_nothing(name: str) -> None:
    x, operator = torch.randn(3), getattr(torch.ops.aten, name)

    assert torch.equal(operator(x, record_named(name).neutral), x)
    assert not torch.equal(operator(x, record_named(name).neutral + 1), x)  # type: ignore[operator]


_CAREFUL = (
    "_prelu_kernel absolute atan atan2 celu conj erfc greater greater_equal isclose isfinite isinf isnan isreal less "
    "less_equal logaddexp logical_xor multiply negative not_equal pow prelu round selu special_expit special_ndtr tan"
)
"""Operators that would be tame, but are of no record that says so: they are seldom where rows are padded."""


def _finite(call: Call, value: float) -> bool:
    """Whether a call of tensors that are ``value`` everywhere has real, finite results and slopes."""
    leaves, args, kwargs = _fresh(call)
    for leaf in leaves:
        leaf.data.fill_(value)
    found = [item for item in tree_leaves(call.target(*args, **kwargs)) if isinstance(item, Tensor)]
    if any(item.is_complex() for item in found):
        return False
    results = [item for item in found if item.requires_grad]
    try:
        slopes = torch.autograd.grad([result.sum() for result in results], leaves, allow_unused=True) if results else ()
    except RuntimeError:  # torch has no derivative of some
        slopes = ()
    return all(bool(item.isfinite().all()) for item in (*found, *slopes) if item is not None)


def test_tame_operators_are_finite_where_their_operands_are() -> None:
    finite, tame = set(), set()
    for name in _with_records(lambda record: record.rule is elementwise):
        tried = [call for call in calls()[name] if (leaves := _fresh(call)[0]) and not leaves[0].is_complex()]
        if tried:
            finite |= {name} if all(_finite(call, x) for call in tried for x in (0.0, 1.0, -1.0, 2e3, -2e3)) else set()
            tame |= {name} if record_named(name).tame else set()
    assert tame <= finite
    assert finite - tame == {*_CAREFUL.split()}


@pytest.mark.parametrize("name", _with_records(lambda record: record.kind in (Kind.ALIAS, Kind.COPY, Kind.RESHAPE)))
def test_the_same_elements_come_in_the_same_order(name: str) -> None:
    for call in calls()[name]:
        made = call.target(*call.args, **call.kwargs)
        if getattr(call.target, "_overloadname", "") == "dtype" and name == "view":
            continue  # reads the bytes anew

        assert made.numel() == call.args[0].numel()
        assert torch.equal(made.flatten(), call.args[0].flatten().to(made.dtype))


def test_torch_is_asked_about_what_has_no_record() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")

    assert record_of(graph.call_function(torch.ops.aten.digamma.default, (x,))).kind is Kind.POINTWISE
    assert record_of(graph.call_function(torch.ops.aten.linalg_eigh.default, (x,))) is UNKNOWN
    assert not UNKNOWN.fusible


# ---- flops -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", _with_records(lambda record: record.kind in (Kind.PRODUCT, Kind.CONVOLUTION, Kind.GROUPED))
)
def test_flops_are_those_that_torch_counts(name: str) -> None:
    for call in calls()[name]:
        with FlopCounterMode(display=False) as counter:
            call.target(*call.args, **call.kwargs)
        counted = counter.get_total_flops()

        if counted:  # torch counts nothing for products with a vector, and for diagonals
            assert operator_flops(node_of(call)[0], 1) == counted, call


# ---- spelling ----------------------------------------------------------------------------------------------------


def _shown(item: Any) -> Expression:
    if isinstance(item, fx.Node):
        return Expression(item.name)
    if isinstance(item, list | tuple):
        return Expression(f"[{', '.join(_shown(part).text for part in item)}]")
    return Expression(literal(item))


@pytest.mark.parametrize("name", _with_records(lambda record: True))
def test_what_is_printed_computes_the_same(name: str) -> None:
    own = {key: getattr(random_streams, key) for key in FUNCTIONS} | {
        key: getattr(module, key)
        for module in (fp8, gated, rotary)
        for key in OF_FILES[module.__name__.rpartition(".")[2]]
    }
    for call in calls()[name]:
        node, values = node_of(call)
        names = [argument.name for argument in node.all_input_nodes]
        given = {argument.name: argument.meta["real"] for argument in node.all_input_nodes}
        known = {"torch": torch, "F": F, "anchor": torch.empty(()), "self": SimpleNamespace(training=True), **own}
        text = spell(node, _shown, "anchor").text

        printed = eval(text, known | given)

        expected = call.target(*call.args, **call.kwargs)
        assert len(values) >= len(names)
        for a, b in zip(tree_leaves(printed), tree_leaves(expected), strict=True):
            torch.testing.assert_close(a, b, equal_nan=True, msg=lambda told, text=text: f"{text}: {told}")


_METHODS = (
    "abs all amax amin any argmax argmin argsort chalf chunk clamp clone contiguous cos cumprod cumsum detach diff erf exp expand "
    "expand_as flatten flip gather histc index_select log logical_not logsumexp masked_fill max mean min movedim narrow new_zeros "
    "permute pow prod repeat repeat_interleave reshape_as roll rot90 round rsqrt scatter scatter_add select_scatter sigmoid sin "
    "slice_scatter sort split sqrt square squeeze std sum t tanh tile topk transpose tril triu type_as unbind unflatten unfold "
    "unsqueeze var view view_as"
)


def test_methods_are_what_people_write_as_methods() -> None:
    found = set()
    for name in _SAMPLED & {*dir(Tensor)}:
        texts = [spell(node_of(call)[0], _shown, "anchor").text for call in calls()[name]]
        if all(f".{name}(" in text and not text.startswith(("torch.", "F.")) for text in texts):
            found.add(name)
    assert found == {*_METHODS.split()}


# ---- one table ---------------------------------------------------------------------------------------------------

_ALLOWED = {
    "graphpar/emitted/pointwise.py": "what a program computes again, by the names of functions; users edit it",
    "graphpar/cost_models/fit_device.py": "rows of a calibration, which are named after what was measured",
    "graphpar/passes/normalize/random_streams.py": "the pass itself: how each random operator draws",
    "graphpar/verification/substituted.py": "how the reference draws, apart from the pass",
    "graphpar/passes/normalize/mask_indexing.py": "the pass itself: what repeats a position, and what leaves it where it is",
    "graphpar/passes/normalize/static_masking.py": "the pass itself: which operators choose rows by a mask",
    "graphpar/passes/normalize/simplify.py": "the pass itself: which function simplifies which operator",
    "graphpar/runtime/checkpoints/engine_layouts.py": "fields of a file, some of which operators are named like",
    "graphpar/ir/source.py": "what Python's brackets are traced as; the folder is below the operators",
    "graphpar/runtime/stages/deferred.py": "which operators leave memory unwritten; the folder is below the operators",
    "graphpar/runtime/state/optimizer_scope.py": "which operators of a step look at one element; the folder is below the operators",
}


def test_no_table_of_operators_stands_elsewhere() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line} {names}"
        for module, path in modules().items()
        if not module.startswith("graphpar.operators") and str(path.relative_to(ROOT)) not in _ALLOWED
        for line, names in _tables(path)
    }

    assert not found


def test_what_is_allowed_is_there() -> None:
    assert [path for path in _ALLOWED if not list(_tables(ROOT / path))] == []


def _tables(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Literals that hold three names of operators or more, and little else."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Dict):
            items = [key for key in node.keys if key is not None]
        elif isinstance(node, ast.Set | ast.List | ast.Tuple):
            items = list(node.elts)
        else:
            continue
        texts = [item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str)]
        names = [text for text in texts if hasattr(torch.ops.aten, text)]
        if len(names) >= 3 and 2 * len(names) > len(texts):
            yield node.lineno, names


def test_a_table_elsewhere_is_found(tmp_path: Path) -> None:
    path = tmp_path / "table.py"
    path.write_text('_SILENT = {"add", "sub", "neg"}\n_KINDS = {"add": 1, "title": 2}\n')

    assert list(_tables(path)) == [(1, ["add", "sub", "neg"])]


def test_records_name_operators_that_there_are() -> None:
    """A name that torch does not have would never be found."""
    own = {name for name, record in TABLE.items() if not hasattr(torch.ops.aten, name)}

    assert own <= {
        *_of_python(), *dir(random_streams), *_emitted(), "grouped_mm", "grouped_mm_fallback", "_guards_fn",
        "cholesky",  # torch has it up to 2.13
    }  # fmt: skip


def _of_python() -> set[str]:
    return {"__invert__", "getitem", "truediv", "floordiv", "mod", "sym_float", "sym_int"}


def _emitted() -> set[str]:
    texts = [
        (ROOT / "graphpar" / "emitted" / f"{name}.py").read_text()
        for name in (
            "collectives",
            "expert_rows",
            "fp8",
            "fp8_gathers",
            "gated",
            "kv_cache",
            "packed_attention",
            "parallel_products",
            "ring_attention",
            "rotary",
        )
    ]
    return {node.name for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}


def test_a_record_says_what_follows_from_its_kind() -> None:
    record = Record(Kind.VIEW)

    assert record.free and record.reads is Reads.NOTHING and not record.multiplies and not record.same_elements
