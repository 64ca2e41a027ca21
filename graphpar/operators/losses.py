"""Losses over classes: rows are independent; the classes of cross entropy can be sharded with small all-reduces inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from graphpar.emitted import collectives
from graphpar.ir.program import operator_name, value_of
from graphpar.operators import spelling as write
from graphpar.operators.composite import Composite, Local, LocalCall, Message, Messages
from graphpar.operators.moves import unsharded
from graphpar.operators.notation import Rule
from graphpar.operators.placement import Context, Placement, averaged, from_rule, literal, operands_of, sizes_of
from graphpar.operators.record import Kernel, Kind, Record, each
from graphpar.runtime.layout import I, R, Shard


def classified(node: fx.Node, free: bool = False) -> Rule:
    """cross_entropy, nll_loss: input [n, c, ...], target [n, ...] (or [n, c, ...] as probabilities), weight [c].

    ``free``: the rows of a mean can be sharded, too.
    """
    operands = operands_of(node)
    rank = value_of(operands[0]).ndim
    rows = tuple(f"r{i}" for i in range(rank - 1))
    labels = (*rows[:1], "c", *rows[1:])
    hard = value_of(operands[1]).ndim < rank
    mean = literal(node, "reduction") == 1 and not free
    return Rule(
        (labels, rows if hard else labels, *(("c",) for _ in operands[2:])),
        (rows if literal(node, "reduction") == 0 else (),),
        frozenset({"c", *(rows if mean else ())}),
    )


def class_loss(node: fx.Node, context: Context) -> list[Placement]:
    """Sharded by rows, a sum is partial; a mean is the sum divided by the number of labels that count on all ranks."""
    if literal(node, "reduction") != 1:
        return from_rule(node, classified(node), context)
    operands = operands_of(node)
    hard = not value_of(operands[1]).is_floating_point()
    free = value_of(operands[0]).ndim > 1 and len(operands) == 2
    return averaged(from_rule(node, classified(node, free), context), "mean_of_labels" if hard else "mean_of_pieces")


def vocab_cross_entropy(node: fx.Node, context: Context) -> list[Placement]:
    """Sharded by classes, with small all-reduces inside."""
    operands = operands_of(node)
    sizes, target = sizes_of(operands[0]), value_of(operands[1])
    classes = 1 if len(sizes) > 1 else 0
    if target.is_floating_point() or literal(node, "label_smoothing"):
        return []
    if sizes[classes][0] <= context.degree or sizes[classes][1]:
        return []
    return [Placement((Shard(classes), *(R for _ in operands[1:])), (I,), "vocab_cross_entropy")]


def _vocab_arguments(call: LocalCall, axes: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    logits = value_of(operands_of(call.node)[0])
    options: dict[str, Any] = {}
    if call.get("weight") is not None:
        options["weight"] = call.get("weight")
    options["reduction"] = ("none", "mean", "sum")[call.get("reduction", 1)]
    if call.get("ignore_index", -100) != -100:
        options["ignore_index"] = call.get("ignore_index")
    vocabulary = int(logits.shape[min(1, logits.ndim - 1)])
    return (call.args[0], call.args[1], *axes, vocabulary), options


def _vocab_messages(node: fx.Node, operands: Sequence[Local], result: Local, degree: int) -> Messages:
    """Each row's largest logit, then its sum of exponentials and its label's score; backward nothing."""
    rows = operands[1].elements
    return [Message("all-reduce", 4 * rows), Message("all-reduce", 8 * rows)], []


def _loss_of_parts(
    logits: Tensor,
    target: Tensor,
    vocab: int,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
) -> Tensor:
    logits = logits.narrow(min(1, logits.ndim - 1), 0, vocab)
    return F.cross_entropy(logits, target, weight, reduction=reduction, ignore_index=ignore_index)


def rowwise(node: fx.Node) -> Rule:
    """Losses that compare whole rows: cosine_embedding_loss, triplet_margin_loss, multi_margin_loss, ..."""
    operands = [sizes_of(operand) for operand in operands_of(node)]
    rank = max(len(sizes) for sizes in operands)
    reduction = literal(node, "reduction")
    if rank < 2 or operator_name(node) == "ctc_loss":
        return unsharded(node)
    split = [
        tuple("r" if dim == 0 and size == operands[0][0] else f"o{k}_{dim}" for dim, size in enumerate(sizes))
        for k, sizes in enumerate(operands)
    ]
    weighted = any(factors[:1] and factors[0] != "r" for factors in split)
    fixed = frozenset(label for factors in split for label in factors if label != "r" or reduction == 1 or weighted)
    return Rule(tuple(split), (("r",) if value_of(node).ndim else (),), fixed)


# ---- records ---------------------------------------------------------------------------------------------------

_CROSS_ENTROPY = write.loss("F.cross_entropy", "weight ignore_index label_smoothing")
_NLL = write.loss("F.nll_loss", "weight ignore_index label_smoothing")

RECORDS: dict[str, Record] = {
    "cross_entropy_loss": Record(Kind.CLASS_LOSS, placements=class_loss, spelling=(_CROSS_ENTROPY,)),
    **each("nll_loss nll_loss_nd", Record(Kind.CLASS_LOSS, classified, class_loss, spelling=(_NLL,))),
    "nll_loss2d": Record(Kind.CLASS_LOSS, classified, class_loss),
    "vocab_cross_entropy": Record(
        Kind.CLASS_LOSS,
        # logits are read three times and written once
        kernels=(Kernel(5, True, operand=0, fused=2),),
        backward=(Kernel(2, True, operand=0),),
        alone=True,
        composite=Composite(
            collectives.vocab_cross_entropy,
            _loss_of_parts,
            of=torch.ops.aten.cross_entropy_loss.default,
            placements=vocab_cross_entropy,
            arguments=_vocab_arguments,
            sends=_vocab_messages,
            title="vocabulary-parallel loss",
            samples=(lambda draw: ((draw(6, 8), draw(6, below=8)), {}),),
        ),
    ),
    **each(
        "cosine_embedding_loss triplet_margin_loss multi_margin_loss multilabel_margin_loss", Record(Kind.LOSS, rowwise)
    ),
    "ctc_loss": Record(Kind.LOSS, unsharded),
}
