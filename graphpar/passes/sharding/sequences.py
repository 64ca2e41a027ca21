"""Whether an axis of sequences divides these in a solution, and not the features of products instead."""

from __future__ import annotations

from graphpar.errors import GraphparError
from graphpar.ir.program import module_path, operator_name, value_of
from graphpar.operators.table import record_of
from graphpar.passes.sharding.problem import Choice, Operator
from graphpar.passes.sharding.search import SearchConstraints, views_of_weights
from graphpar.passes.sharding.solution import Solution
from graphpar.runtime.axes import AXIS, Divides
from graphpar.runtime.layout import Shard


def check_sequences(solution: Solution, pins: SearchConstraints) -> None:
    """Check that axes of sequences divide these, where the user pins nothing on them.

    Raises:
        GraphparError: one does not: its degree does not divide the sequence, or there is none.
    """
    problem, weights = solution.problem, views_of_weights(solution.problem)
    products = [o for o in problem.operators if record_of(o.node).multiplies and not weights.isdisjoint(o.operands)]
    pinned = {axis for spec in (*pins.parameters.values(), *pins.values.values()) for axis in spec}

    def divides_rows(choice: Choice, product: Operator, place: int) -> bool:
        of_weights = [types[place] for node, types in zip(product.operands, choice.operands) if node in weights]
        return choice.divided[place] and not any(isinstance(kind, Shard) for kind in of_weights)

    for place, axis in enumerate(problem.axes):
        degree, name = problem.degrees[axis], problem.program.name
        if AXIS[axis].divides is not Divides.SEQUENCE or axis in pinned or not products:
            continue
        for product in products:
            given = next((node for node in product.operands if node not in weights), None)
            shape = () if given is None else value_of(given).shape
            lengths = [size for size in shape[1:-1] if isinstance(size, int)]
            uneven = operator_name(product.node) == "linear" and any(length % degree for length in lengths)
            if uneven and not divides_rows(solution.choices[product], product, place):
                remedy = (
                    "pad the sequence"
                    if problem.program.lengths is None
                    else "end the range of lengths at a multiple of it"
                )
                raise GraphparError(
                    f"Mesh {axis}={degree} divides sequences, but {module_path(product.node) or name} takes "
                    f"{' x '.join(map(str, lengths))} positions of each example, which {degree} does not divide; take a degree that does, "
                    f"{remedy}, or leave it out."
                )
        if not any(divides_rows(choice, product, place) for product in products for choice in product.choices):
            shapes = ", ".join(f"{entry.name} {list(entry.shape)}" for entry in problem.program.inputs)
            raise GraphparError(
                f"Mesh {axis}={degree} divides sequences, but no matrix product of {name} has one; its inputs are {shapes}. Leave it out."
            )
