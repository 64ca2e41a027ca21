"""What stands for an argument that a model may be given and never reads, so that nothing in the program depends on it.

A graph does not show what a trace made a number of: a size, or an argument that is a number. So the model is traced again with this in the
argument's place, which can be passed on and compared with None, has the argument's type, and refuses all else.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from graphpar.errors import GraphparError


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
