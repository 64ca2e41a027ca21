"""Which inputs of a language model are its token ids and its labels, so that ``train.py --data`` can read any text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from graphpar.emitted import collectives
from graphpar.ir.program import Input, Program, run_plain, value_of
from graphpar.operators.placement import literal
from graphpar.operators.record import Kind
from graphpar.operators.table import record_of
from graphpar.runtime.training.data import IGNORED


@dataclass(frozen=True)
class TokenInputs:
    """The inputs of a language model.

    Attributes:
        length: tokens of a sequence.
        vocabulary: how many tokens the model knows.
        labels: none for inference.
        ahead: 1 where the label of a position is the next token, 0 where the loss itself compares with the next one.
        padded: whether the loss ignores labels of -100.
    """

    ids: Input
    length: int
    vocabulary: int
    labels: Input | None = None
    ahead: int = 0
    padded: bool = False


def token_inputs(program: Program) -> TokenInputs | str:
    """Find the inputs of a language model; a string says why the program is none."""
    given = [entry for entry in program.inputs if entry.role != "sample_keys"]
    tables = vocabularies(program)
    rows = [entry for entry in given if entry.batch_dim == 0 and len(entry.shape) == 2 and _is_integer(entry)]
    found = [entry for entry in rows if entry.name in tables]
    if len(found) != 1:
        names = " and ".join(entry.name for entry in found)
        return f"{names} are all token ids" if found else "no input is a batch of token ids"
    (ids,) = found
    length, vocabulary = ids.shape[1], tables[ids.name]
    others = [entry for entry in given if entry is not ids]
    if program.mode != "train":
        return f"it can't fill the input {others[0].name}" if others else TokenInputs(ids, length, vocabulary)
    labels = others[0] if others else ids
    if len(others) > 1 or labels not in rows or labels.shape != ids.shape:
        strange = next((entry for entry in others if entry not in rows or entry.shape != ids.shape), labels)
        names = strange.name if strange is not labels else " and ".join(entry.name for entry in others)
        return f"it can't fill {names} from a text"
    counted = _counted(program, labels)
    whole = ids.shape[0] * length
    if counted == (whole, whole - ids.shape[0], whole - ids.shape[0]):
        return TokenInputs(ids, length, vocabulary, labels, 1, True) if others else "the model predicts its own inputs"
    if counted == (whole, whole, whole):
        return TokenInputs(ids, length, vocabulary, labels, 1) if others else "the model predicts its own inputs"
    if counted == (whole - ids.shape[0], whole - ids.shape[0], whole - 2 * ids.shape[0]):
        return TokenInputs(ids, length, vocabulary, labels, 0, bool(others))
    return f"the loss doesn't say whether {labels.name} are the next tokens"


def _is_integer(entry: Input) -> bool:
    return not entry.dtype.is_floating_point and entry.dtype is not torch.bool


def vocabularies(program: Program) -> dict[str, int]:
    """The rows of the table in which each input looks up rows."""
    found: dict[str, int] = {}
    for node in program.graph.nodes:
        if node.op != "call_function" or record_of(node).kind is not Kind.LOOKUP:
            continue
        operands = [_source(argument) for argument in node.all_input_nodes]
        tables = [operand for operand in operands if operand.op == "get_attr"]
        inputs = [str(operand.target) for operand in operands if operand.op == "placeholder"]
        if inputs and tables:
            info = program.tensor_info(str(tables[0].target))
            rows = (info.whole or info.shape)[0]
            found[inputs[0]] = min(rows, found.get(inputs[0], rows))
    return found


def classes(program: Program) -> dict[str, tuple[int, int]]:
    """How many classes a loss knows for each target whose every element is a label, and the label that it ignores."""
    found: dict[str, tuple[int, int]] = {}
    for node in program.graph.nodes:
        if node.op != "call_function" or record_of(node).kind is not Kind.CLASS_LOSS:
            continue
        logits, target = value_of(node.args[0]), _source(node.args[1])
        if target.op != "placeholder" or value_of(target).is_floating_point():
            continue
        sharded = node.target is collectives.vocab_cross_entropy
        count = int(node.args[3] if sharded else logits.shape[min(1, logits.ndim - 1)])
        ignored = (
            node.kwargs.get("ignore_index", IGNORED) if sharded else literal(node, "ignore_index", default=IGNORED)
        )
        found[str(target.target)] = min((count, ignored), found.get(str(target.target), (count, ignored)))
    return found


def _source(node: fx.Node) -> fx.Node:
    """What a value is made of by changes of shape and by collectives."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        if not record_of(node).same_elements and getattr(node.target, "__module__", "") != collectives.__name__:
            break
        (node,) = node.all_input_nodes
    return node


def _counted(program: Program, labels: Input) -> tuple[int, ...] | None:
    """How many labels the loss divides by: of all, without those of first positions, and without those of last ones."""
    if program.counts is None:
        return None
    leaves = [str(node.target) for node in program.counts.nodes if node.op in ("placeholder", "get_attr")]
    if leaves != [labels.name]:  # or it weighs them, by classes
        return None

    def count(ignored: int | None) -> int | None:
        values = torch.ones(labels.shape, dtype=labels.dtype)
        if ignored is not None:
            values[:, ignored] = IGNORED
        try:
            results: list[Tensor] = run_plain(program.counts, [values])  # type: ignore[arg-type]
        except (IndexError, RuntimeError):  # it takes no labels of -100
            return None
        return int(results[0]) if results[0].numel() == 1 else None  # or one of each class

    found = [count(each) for each in (None, 0, -1)]
    return None if None in found else tuple(found)  # type: ignore[arg-type]
