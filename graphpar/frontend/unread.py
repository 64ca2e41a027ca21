"""What stands for an argument that a model may be given and never reads, so that nothing in the program depends on it.

A graph does not show what a trace made a number of: a size, or an argument that is a number. So the model is traced again with this in the
argument's place, which can be passed on and compared with None, has the argument's type, and refuses all else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from graphpar.errors import GraphparError
from graphpar.frontend.evaluation import differs
from graphpar.frontend.signature import Request
from graphpar.ir.program import Program
from graphpar.runtime.option_kinds import GENERATE


class Unread:
    """An argument in whose place this is.

    Attributes:
        read: whether anything was asked of it.
    """

    def __init__(self, value: Tensor | float) -> None:
        vars(self).update(read=False, kind=type(value))

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        kind: type = vars(self)["kind"]
        return kind

    def __getattr__(self, name: str) -> Any:
        self._refuse()

    def _refuse(self, *args: object, **options: object) -> Any:
        self.read = True
        raise GraphparError("an argument is read that was taken for one that is not")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _refuse  # type: ignore[assignment]
    __str__ = __repr__ = __format__ = __reduce_ex__ = _refuse  # type: ignore[assignment]


for _name in {*dir(int), *dir(float), *dir(Tensor)} - {*dir(object), *vars(Unread)}:
    if _name.startswith("__"):
        setattr(Unread, _name, Unread._refuse)


def unread_in(request: Request, program: Program, trace: Callable[[Request], Program]) -> tuple[str, ...]:
    """Name the arguments that the model never reads: neither their values, nor their shapes and types."""
    used = {str(node.target) for node in program.graph.nodes if node.op == "placeholder" and node.users}
    kinds = (Tensor, int, float)
    left = {
        place: Unread(leaf)
        for place, (name, leaf) in enumerate(zip(request.names, request.leaves))
        if isinstance(leaf, kinds) and not isinstance(leaf, bool) and name not in used
    }
    while left and program.mode != GENERATE:
        changed: dict[str, Any] = {"still": {}, "scalars": [], "output_names": [], "returned": [], "assigned": []}
        try:
            other = trace(replace(request, unread=left, **changed))
            kept = {id(each.after) for each in changed["assigned"]}  # for the next step to read
            if not differs(program.graph, other.graph) and not any(
                each.read or id(each) in kept for each in left.values()
            ):
                return tuple(request.names[place] for place in left)
        except Exception:  # it was read, or something was that cannot say so
            pass
        read = {place for place, each in left.items() if each.read} or set(left)
        left = {place: Unread(request.leaves[place]) for place in left if place not in read}
    return ()
