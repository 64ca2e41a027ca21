"""Operators that make tensors and numbers from no tensor, and those that return nothing."""

from __future__ import annotations

from torch import fx

from graphpar.operators import spelling as write
from graphpar.operators.placement import Context, Placement, can_shard, operands_of, results_of, sizes_of
from graphpar.operators.record import Kind, Record, each
from graphpar.runtime.layout import R, Shard


def fresh(node: fx.Node, context: Context) -> list[Placement]:
    """new_zeros and its like: the operand gives dtype and device only."""
    (source,) = operands_of(node)
    shards = [Shard(dim) for dim, size in enumerate(sizes_of(source)) if not size[1]] + list(context.known(source, 0))
    return [
        Placement((shard,), tuple(R for _ in results_of(node)))
        for shard in dict.fromkeys(shards)
        if can_shard(sizes_of(source)[shard.dim], shard, context.degree, padded=True)
    ]


# ---- records ---------------------------------------------------------------------------------------------------

_NUMBER = Record(Kind.NUMBER)

RECORDS: dict[str, Record] = {
    **each(
        "arange zeros ones full empty scalar_tensor linspace logspace eye tril_indices triu_indices",
        Record(Kind.FACTORY),
    ),
    **each(
        "new_zeros new_ones new_full",
        Record(Kind.FACTORY, placements=fresh, spelling=write.METHOD),
    ),
    "new_empty": Record(Kind.FACTORY, placements=fresh),
    # numbers
    "sym_size": Record(Kind.NUMBER, spelling=(write.size,)),
    "sym_float": Record(Kind.NUMBER, spelling=(write.renamed("float"),)),
    "sym_int": Record(Kind.NUMBER, spelling=(write.renamed("int"),)),
    "truediv": Record(Kind.NUMBER, spelling=(write.infix("/", write.PRODUCT),)),
    "floordiv": Record(Kind.NUMBER, spelling=(write.infix("//", write.PRODUCT),)),
    "mod": Record(Kind.NUMBER, spelling=(write.infix("%", write.PRODUCT),)),
    # what a trace asserts
    **each(
        "_assert_tensor_metadata _assert_scalar _assert_async sym_constrain_range sym_constrain_range_for_size _guards_fn",
        Record(Kind.CHECK),
    ),
}
