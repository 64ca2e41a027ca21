"""The table of rules: operator name -> how it can be cut. Families are in modules of their own; what is missing is tried by execution."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx

from graphpar.errors import GraphparError
from graphpar.ir.program import Helper, operator_name, value_of
from graphpar.operators import indexing, losses, matrix, moves, reduce, shape, spatial
from graphpar.operators.discover import discover, sums_gradients
from graphpar.operators.elementwise import POINTWISE_LOSSES, elementwise
from graphpar.operators.functions import OPERATORS, names_of
from graphpar.operators.notation import Rule, parse_rule
from graphpar.operators.placement import Context, Placement, from_rule, normalized, operands_of, results_of, whole
from graphpar.runtime.layout import R

__all__ = ["REGISTERED", "RULES", "SPECIAL", "has_rule", "placements", "register_rule", "rule_of"]

RuleOf = Callable[[fx.Node], Rule | None]
PlacementsOf = Callable[[fx.Node, Context], list[Placement]]


def _rows(rule: RuleOf, names: str) -> dict[str, RuleOf]:
    return dict.fromkeys(names.split(), rule)


def _special(rule: PlacementsOf, names: str) -> dict[str, PlacementsOf]:
    return dict.fromkeys(names.split(), rule)


# Operators that one line of factors describes.
RULES: dict[str, RuleOf] = {
    # products
    **_rows(matrix.matmul, "matmul mm bmm mv dot"),
    "einsum": matrix.einsum,
    "tensordot": matrix.tensordot,
    "outer": matrix.line("m, n -> m n", linear=2),
    "ger": matrix.line("m, n -> m n", linear=2),
    "inner": matrix.line("... k, n k -> ... n", linear=2),
    "vdot": matrix.line("k, k -> ", linear=2),
    "cdist": matrix.line("... m d, ... n d -> ... m n", fixed="d"),
    "embedding_bag": moves.uncut,
    # dims
    **_rows(moves.permuted, "transpose permute t mT mH numpy_T movedim moveaxis swapaxes swapdims adjoint"),
    "stack": moves.stack,
    "unbind": moves.unbind,
    "select": moves.selected,
    "diagonal": moves.diagonal,
    "unfold": moves.windows,
    "broadcast_tensors": moves.broadcast,
    **_rows(moves.complex_pairs, "view_as_complex view_as_real"),
    **_rows(moves.padding, "pad constant_pad_nd"),
    **_rows(moves.turned, "flip roll"),
    **_rows(moves.inside, "slice_scatter select_scatter"),
    **_rows(moves.last(2, linear=True), "tril triu"),
    # reductions and scans
    "sum": reduce.total,
    **_rows(reduce.counted, "count_nonzero nansum"),
    **_rows(
        reduce.reduction,
        "amax amin aminmax max min any all prod var std var_mean std_mean argmax argmin logsumexp norm linalg_vector_norm median "
        "nanmedian mode kthvalue nanmean",
    ),
    **_rows(reduce.normalization, "layer_norm rms_norm native_layer_norm"),
    **_rows(
        reduce.scan,
        "softmax log_softmax _softmax _log_softmax _safe_softmax cumsum cumprod cummax cummin logcumsumexp sort argsort topk diff",
    ),
    **_rows(reduce.similarity, "cosine_similarity pairwise_distance"),
    "_weight_norm": reduce.weight_norm,
    # losses
    **_rows(losses.classified, "nll_loss nll_loss_nd nll_loss2d"),
    **_rows(losses.rowwise, "cosine_embedding_loss triplet_margin_loss multi_margin_loss multilabel_margin_loss"),
    # indices
    "index": indexing.index,
    **_rows(indexing.gather, "gather take_along_dim"),
    "index_select": indexing.index_select,
    "one_hot": indexing.one_hot,
    "bucketize": indexing.bucketize,
    "searchsorted": indexing.searchsorted,
    "isin": indexing.membership,
    **_rows(indexing.scattered, "scatter scatter_add scatter_reduce"),
    **_rows(indexing.index_added, "index_add index_copy index_fill index_reduce"),
    # places
    "batch_norm": spatial.batch_norm,
    "instance_norm": spatial.instance_norm,
    **_rows(moves.last(1), "max_pool1d max_pool1d_with_indices adaptive_max_pool1d"),
    **_rows(moves.last(2), "max_pool2d max_pool2d_with_indices adaptive_max_pool2d max_unpool2d"),
    **_rows(moves.last(3), "max_pool3d max_pool3d_with_indices adaptive_max_pool3d max_unpool3d"),
    **_rows(
        moves.last(1, linear=True),
        "avg_pool1d adaptive_avg_pool1d upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d",
    ),
    **_rows(
        moves.last(2, linear=True),
        "avg_pool2d adaptive_avg_pool2d upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d "
        "_upsample_bilinear2d_aa _upsample_bicubic2d_aa",
    ),
    **_rows(
        moves.last(3, linear=True),
        "avg_pool3d adaptive_avg_pool3d upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d",
    ),
    **_rows(spatial.shuffled, "pixel_shuffle pixel_unshuffle"),
    **_rows(spatial.grid_sample, "grid_sampler grid_sampler_2d grid_sampler_3d"),
    **_rows(spatial.unfolded, "im2col col2im"),
    "affine_grid_generator": spatial.grid,
    # transforms
    **_rows(
        moves.transformed,
        "fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn fft_ifftn fft_rfftn "
        "fft_irfftn fft_fftshift fft_ifftshift",
    ),
    **_rows(moves.windowed, "stft istft"),
    **_rows(moves.matrices, "linalg_cholesky linalg_cholesky_ex cholesky cholesky_inverse logdet"),
    # what depends on all values, or on how torch stores them
    **_rows(
        moves.uncut,
        "lstm gru rnn_tanh rnn_relu nonzero masked_select masked_scatter unique _unique2 unique_dim unique_consecutive histc bincount "
        "ctc_loss as_strided take put bernoulli multinomial",
    ),
}

# Operators whose placements need more than factors.
SPECIAL: dict[str, PlacementsOf] = {
    "linear": matrix.linear,
    "addmm": matrix.added("m k, k n -> m n"),
    "baddbmm": matrix.added("b m k, b k n -> b m n"),
    "addbmm": matrix.added("b m k, b k n -> m n"),
    "addmv": matrix.added("m k, k -> m"),
    "addr": matrix.added("m, n -> m n"),
    "bilinear": matrix.bilinear,
    **_special(matrix.grouped_mm, "grouped_mm grouped_mm_fallback _grouped_mm"),
    "embedding": matrix.embedding,
    **_special(matrix.attention, "scaled_dot_product_attention dropout_attention"),
    "cross_entropy_loss": losses.cross_entropy,
    **_special(losses.class_loss, "nll_loss nll_loss_nd nll_loss2d"),
    **dict.fromkeys(POINTWISE_LOSSES, losses.pointwise),
    "batch_norm": spatial.batch_norm_placements,
    "mean": reduce.mean,
    **_special(
        shape.view,
        "view reshape _unsafe_view flatten unflatten squeeze unsqueeze view_as reshape_as ravel atleast_1d atleast_2d atleast_3d",
    ),
    **_special(shape.expand, "expand broadcast_to expand_as"),
    "cat": moves.cat,
    **_special(moves.split, "split split_with_sizes chunk tensor_split unsafe_chunk unsafe_split"),
    **_special(moves.sliced, "slice narrow"),
    "glu": moves.halves,
    **_special(moves.repeated, "repeat tile"),
    "repeat_interleave": moves.interleaved,
    **_special(moves.fresh, "new_zeros new_ones new_full new_empty"),
    "index_put": indexing.index_put,
    **_special(indexing.scatter, "scatter scatter_add scatter_reduce"),
    **_special(indexing.index_add, "index_add index_copy index_fill index_reduce"),
    **_special(
        spatial.convolution, "conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d"
    ),
    "group_norm": spatial.group_norm,
}

# Rules of the user's own operators, by qualified name.
REGISTERED: dict[str, str] = {}


def register_rule(operator: str, rule: str) -> None:
    """Say how a custom operator can be cut: ``register_rule("mylib::op", "b s d, d -> b s d")``.

    A custom ``autograd.Function`` goes by its qualified class name: ``register_rule("mymodule.Scaled", "b d -> b d")``; one of a
    model file ``model.py`` is ``model.Scaled``.

    The tensor operands and, after the arrow, the results; one factor a dim, ``...`` for leading dims, ``?`` after the factors of
    an operand that may be missing. A factor that appears in the operands but not in the results is summed; write every factor that
    may not be cut with a ``*`` after it.

    Raises:
        GraphparError: the notation is wrong.
    """
    wrong = _wrong(operator, rule)
    if wrong:
        raise GraphparError(f"The rule {rule!r} of {operator} {wrong}; a rule looks like 'b s d*, d* -> b s d*'.")
    REGISTERED[_key(operator)] = rule


def _key(operator: str) -> str:
    return operator.replace("::", ".")


def _registered_name(node: fx.Node) -> str | None:
    """The name under which a rule of ``node``'s operator is registered."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    function = OPERATORS.get(node.target)
    names = (node.target._schema.name,) if function is None else names_of(function.function)
    return next((key for name in names if (key := _key(name)) in REGISTERED), None)


def _wrong(operator: str, rule: str) -> str:
    if "::" not in operator and "." not in operator:
        return "names no operator: its name begins with a namespace, like mylib::op"
    if "->" not in rule:
        return "has no '->'"
    if rule.count("->") > 1:
        return "has more than one '->'"
    sides = [[part.split() for part in side.split(",")] for side in rule.split("->")]
    for factors in (*sides[0], *sides[1]):
        for word in factors:
            if word != "..." and not word.rstrip("*?").isalnum():
                return f"has the factor {word!r}, which is no word"
        names = [word.rstrip("*?") for word in factors]
        repeated = [name for name in names if names.count(name) > 1 and name != "1"]
        if repeated:
            return f"names {repeated[0]!r} twice in one tensor"
    known = {word.rstrip("*?") for factors in sides[0] for word in factors}
    new = [word for factors in sides[1] for word in factors if word.rstrip("?") == word and word not in known]
    new = [word for word in new if not word.endswith("*") and word != "1"]
    if new:
        return f"has {new[0]!r} in the result alone: no operand says how it is cut, so write '{new[0]}*'"
    return ""


def _registered(node: fx.Node) -> Rule | None:
    name = _registered_name(node)
    if name is None:
        return None
    text = REGISTERED[name]
    fixed = [word.rstrip("*") for word in text.replace(",", " ").split() if word.endswith("*")]
    ranks = [value_of(operand).ndim for operand in operands_of(node)]
    try:
        return parse_rule(text.replace("*", ""), ranks, [result.ndim for result in results_of(node)], fixed=fixed)
    except ValueError as error:
        raise GraphparError(f"The registered rule of {name} does not fit its use: {error}.") from error


def rule_of(node: fx.Node) -> Rule | None:
    """The factors of an operator, where a line of factors describes it."""
    registered = _registered(node)
    if registered is not None:
        return registered
    pointwise = elementwise(node)  # max and min of two tensors, among others
    row = RULES.get(operator_name(node))
    return row(node) if row is not None and pointwise is None else pointwise


def has_rule(node: fx.Node) -> bool:
    """Whether graphpar knows how ``node`` can be cut (not at all is an answer, too), without trying."""
    created = not operands_of(node)
    return created or isinstance(node.target, Helper) or operator_name(node) in SPECIAL or rule_of(node) is not None


def placements(node: fx.Node, context: Context) -> list[Placement]:
    """Every legal placement of an operator on one axis, those that cut nothing included."""
    found = whole(node)
    if operands_of(node) and not isinstance(node.target, Helper) and isinstance(value_of(node), Tensor | tuple | list):
        special = SPECIAL.get(operator_name(node)) if _registered(node) is None else None
        if special is not None:
            found += special(node, context)
        else:
            rule = rule_of(node)
            if rule is None:
                rule = discover(node)
                if not sums_gradients(node):
                    found = [placement for placement in found if R not in placement.operands]
            found += from_rule(node, rule, context) if rule is not None else []
    return normalized(found, node, context)
