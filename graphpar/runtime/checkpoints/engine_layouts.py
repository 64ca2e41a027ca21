"""Where tensors of a model go in those of another engine: rules of a mapping file, in TOML.

    [[tensor]]
    name = ["{path}.qkv_proj.{kind}"]                          the engine's, concatenated along dim 0 (``dim``) of
    of = [{ tensor = "{path}.q_proj.{kind}", over = { 0 = "tp" } },
          { tensor = "{path}.k_proj.{kind}", over = { 0 = "kv" } },
          { tensor = "{path}.v_proj.{kind}", over = { 0 = "kv" } }]

    q_proj [8, 4]  rank 1 of tp=2: rows [4, 8) ──► qkv_proj [8, 4], rows [0, 4)
    k_proj [4, 4]                  rows [2, 4) ──► rows [4, 6)
    v_proj [4, 4]                  rows [2, 4) ──► rows [6, 8)

So what a rank of the engine needs of each tensor of the model is a box of it, and the place of its values a view of the engine's tensor:
the same as a rank of a program has, and :mod:`graphpar.runtime.checkpoints.resharding` moves nothing else.
"""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphpar.runtime.checkpoints.tensor_chunks import MODEL, Box, Entry
from graphpar.runtime.checkpoints.weights import listed
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.records import Record

FOLDER = Path(__file__).parent / "engines"
AXES = ("tp", "kv", "ep", "moe_tp")
"""The axes of an engine; ``kv`` is ``tp``, but for ranks that have a head of keys and values in common."""

NUMBERS = ("heads", "kv_heads")
"""What the sizes of parts may name."""

Shapes = Mapping[str, Sequence[int]]
Share = tuple[Fraction, Fraction]
"""Where a part of a dim begins and ends."""


@dataclass(frozen=True)
class Source:
    """A tensor of the model that a tensor of the engine has a part of.

    Attributes:
        pattern: its name, with placeholders.
        part: which of the parts along the rule's ``dim``.
        sizes: of these parts, each a number or the name of one, in proportion: (1, 1) are halves.
        over: the axis that divides each dim; dims are those of the engine's tensor.
    """

    pattern: str
    part: int
    sizes: tuple[int | str, ...]
    over: Mapping[int, str]

    def share(self, numbers: Mapping[str, int]) -> Share:
        """Return where the part begins and ends, as shares of the dim.

        Raises:
            RuntimeProgramError: a number that sizes name is not among ``numbers``.
        """
        for name in self.sizes:
            if isinstance(name, str) and name not in numbers:
                raise RuntimeProgramError(f"the mapping divides {self.pattern} by {name}: give EngineTensors {name}=")
        sizes = [numbers[size] if isinstance(size, str) else size for size in self.sizes]
        begin, whole = sum(sizes[: self.part]), sum(sizes)
        return Fraction(begin, whole), Fraction(begin + sizes[self.part], whole)


@dataclass(frozen=True)
class Rule:
    """How tensors of an engine are made.

    Attributes:
        names: patterns of their names; the first is used where tensors are made, all where the engine has them.
        of: what is concatenated along ``dim``, after each is divided.
        stack: a placeholder of the sources that numbers what is stacked along dim 0.
        index: a placeholder of the name that numbers what dim 0 of the sources is divided into.
        pad: ``dim`` is padded with zeros to a multiple of this before it is divided (of this times the ranks where these don't divide it).
    """

    names: tuple[str, ...]
    of: tuple[Source, ...]
    dim: int = 0
    stack: str | None = None
    index: str | None = None
    pad: int = 1


@dataclass(frozen=True)
class Target:
    """A tensor of the engine: its rule, the names of what each source of it is (several where they are stacked), which share of each, and
    which of dim 0."""

    rule: Rule
    sources: tuple[tuple[str, ...], ...]
    shares: tuple[Share, ...]
    index: int | None = None

    def parts(self, shapes: Shapes, places: Mapping[str, tuple[int, int]]) -> tuple[list[int], list[_Part]]:
        """Return the shape of what a rank at ``places`` has, and the parts that are concatenated."""
        rule, found, at, shape = self.rule, list[_Part](), 0, list[int]()
        for source, names, (begin, end) in zip(rule.of, self.sources, self.shares):
            inner = shapes[names[0]]
            whole = list(inner[1:]) if rule.index else [len(names), *inner] if rule.stack else list(inner)
            fits = max((rule.dim, *source.over), default=0) < max(len(whole), 1)
            if not fits or (whole and any((whole[rule.dim] * place).denominator > 1 for place in (begin, end))):
                raise RuntimeProgramError(f"{names[0]} is {list(inner)}; the mapping can't divide it")
            if not whole:  # a number
                return [], [_Part(names, (), (), 0)]
            first, after = int(whole[rule.dim] * begin), int(whole[rule.dim] * end)
            whole[rule.dim] = after - first
            begins, sizes, room = [0] * len(whole), list(whole), list(whole)
            for dim, axis in source.over.items():
                pad = rule.pad if dim == rule.dim else 1
                begins[dim], sizes[dim], room[dim] = _share(whole[dim], *places[axis], pad)
            begins[rule.dim] += first
            found.append(_Part(names, tuple(begins), tuple(sizes), at))
            at += room[rule.dim]
            shape = room
        return [at if dim == rule.dim else size for dim, size in enumerate(shape)], found

    def boxes(self, part: _Part, tensor: Tensor) -> list[tuple[str, Box]]:
        """Return the boxes of sources that a part is, by name, as views of the engine's tensor."""
        if not all(part.sizes):
            return []
        view = tensor.narrow(self.rule.dim, part.at, part.sizes[self.rule.dim]) if part.sizes else tensor
        if self.index is not None:
            return [(part.names[0], Box((self.index, *part.begins), view.unsqueeze(0)))]
        if self.rule.stack:
            first, *rest = part.begins
            return [(part.names[first + place], Box(tuple(rest), each)) for place, each in enumerate(view)]
        return [(part.names[0], Box(part.begins, view))]


@dataclass(frozen=True)
class _Part:
    """A box of a source (dims as the engine's), which is at ``at`` along the rule's dim of the engine's tensor."""

    names: tuple[str, ...]
    begins: tuple[int, ...]
    sizes: tuple[int, ...]
    at: int


def _share(size: int, rank: int, ranks: int, pad: int) -> tuple[int, int, int]:
    """Return where a rank's share of a dim begins, its size, and that with padding."""
    if pad > 1:
        unit = pad if -(-size // pad) * pad % ranks == 0 else pad * ranks
        each = -(-size // unit) * unit // ranks
        begin = min(rank * each, size)
        return begin, min(each, size - begin), each
    each, more = divmod(size, ranks)
    return rank * each + min(rank, more), each + (rank < more), each + (rank < more)


def read_mapping(mapping: str | Path) -> list[Rule]:
    """Read the rules of a mapping file, or of one that graphpar has, by its name.

    Raises:
        RuntimeProgramError: there is none, or it is no such file; the message says where.
    """
    shipped = {file.stem: file for file in sorted(FOLDER.glob("*.toml"))}
    file = shipped.get(str(mapping), Path(mapping))
    if not file.is_file():
        raise RuntimeProgramError(f"there is no mapping {mapping}: name a TOML file, or one of {', '.join(shipped)}")
    try:
        read = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RuntimeProgramError(f"{file} is no TOML file: {error}") from None
    top = Record(read, str(file))
    top.only(["tensor"])
    return [_rule(each) for each in top.records("tensor")]


def _rule(record: Record) -> Rule:
    record.only(["name", "of", "dim", "stack", "index", "pad"])
    sources = []
    for each in record.records("of"):
        each.only(["tensor", "part", "over"])
        which, *sizes = each.items("part", (int, str)) if each.has("part") else (0, 1)
        if len(sizes) == 1 and isinstance(sizes[0], int):
            sizes = [1] * sizes[0]
        over = {int(dim): str(axis) for dim, axis in each.optional("over", dict, {}).items() if dim.isdecimal()}
        possible = all(size in NUMBERS if isinstance(size, str) else size > 0 for size in sizes)
        if not (possible and which in range(len(sizes)) and len(over) == len(each.optional("over", dict, {}))):
            raise RuntimeProgramError(
                f"{each.where}: part is [which, of how many], or [which, size, size, ...] where sizes are numbers, "
                f"{' or '.join(NUMBERS)}; over maps dims to axes"
            )
        if unknown := sorted(set(over.values()) - set(AXES)):
            raise RuntimeProgramError(f"{each.where}: {', '.join(unknown)} is no axis; there are {', '.join(AXES)}")
        sources.append(Source(each.get("tensor", str), which, tuple(sizes), over))
    if not sources:
        raise RuntimeProgramError(f"{record.where}: of is empty")
    options: dict[str, Any] = {
        key: record.optional(key, kind, None)
        for key, kind in (("dim", int), ("stack", str), ("index", str), ("pad", int))
        if record.has(key)
    }
    rule = Rule(record.strings("name"), tuple(sources), **options)
    known = _placeholders(sources[0].pattern)
    used = {each for source in sources for each in _placeholders(source.pattern)}
    named = {each for name in rule.names for each in _placeholders(name)}
    if not rule.names or used - known or named - known - {rule.index} or (rule.stack and rule.stack not in known):
        raise RuntimeProgramError(f"{record.where}: the first tensor is to have each placeholder but that of index")
    return rule


def _placeholders(pattern: str) -> set[str]:
    return set(re.findall(r"\{(\w+)\}", pattern))


def targets(rules: Sequence[Rule], shapes: Shapes, numbers: Mapping[str, int] | None = None) -> dict[str, Target]:
    """Return the tensors of an engine, by each name they may have, that rules make of a model's with these names and shapes.

    The first rule that has all of its sources takes them, or its parts of them.

    Args:
        numbers: those of the model that sizes of parts may name.

    Raises:
        RuntimeProgramError: one is missing.
    """
    found: dict[str, Target] = {}
    taken: dict[str, list[Share]] = {name: [] for name in shapes}
    for rule in rules:
        claims: list[tuple[str, Share]] = []
        for bound, group in _bound(rule, shapes).items():
            values = dict(bound)
            sources = tuple(
                tuple(source.pattern.format(**values, **({rule.stack: each} if rule.stack else {})) for each in group)
                for source in rule.of
            )
            if any(name not in taken for names in sources for name in names):
                continue
            shares = tuple(source.share(numbers or {}) for source in rule.of)
            own = [(name, share) for share, names in zip(shares, sources) for name in names]
            if any(begin < after and first < end for name, (begin, end) in own for first, after in taken[name]):
                continue
            claims += own
            for place in range(shapes[sources[0][0]][0] if rule.index else 1):
                numbered = {rule.index: place} if rule.index else {}
                target = Target(rule, sources, shares, place if rule.index else None)
                for pattern in rule.names:
                    found.setdefault(pattern.format(**values, **numbered), target)
        for name, share in claims:
            taken[name].append(share)
    return found


def distinct(made: Mapping[str, Target]) -> Iterator[tuple[str, Target]]:
    """Yield each tensor of an engine once, under the first of the names it may have."""
    seen: set[int] = set()
    for name, target in made.items():
        if id(target) not in seen:
            seen.add(id(target))
            yield name, target


def left_over(made: Mapping[str, Target], names: Iterable[str]) -> list[str]:
    """Return the names of the model's tensors of which a part is in no tensor of the engine."""
    parts: dict[str, Fraction] = defaultdict(Fraction)
    for _, target in distinct(made):
        for (begin, end), each in zip(target.shares, target.sources):
            for name in each if not target.index else ():
                parts[name] += end - begin
    return [name for name in names if parts[name] != 1]


def _bound(rule: Rule, names: Iterable[str]) -> dict[tuple[tuple[str, str], ...], list[int]]:
    """Return what placeholders of the first source are in names that are like it; with the numbers of what is stacked."""
    parts = re.split(r"\{(\w+)\}", rule.of[0].pattern)
    seen: set[str] = set()
    pattern = ""
    for place, text in enumerate(parts):
        if place % 2 == 0:
            pattern += re.escape(text)
        else:
            kind = r"\d+" if text == rule.stack else ".+"
            pattern += f"(?P={text})" if text in seen else f"(?P<{text}>{kind})"
            seen.add(text)
    like, found = re.compile(pattern), dict[tuple[tuple[str, str], ...], list[int]]()
    for name in names:
        if match := like.fullmatch(name):
            values = match.groupdict()
            number = int(values.pop(rule.stack)) if rule.stack else 0
            found.setdefault(tuple(values.items()), []).append(number)
    return {
        values: sorted(numbers) for values, numbers in found.items() if sorted(numbers) == list(range(len(numbers)))
    }


class EngineTensors:
    """Tensors of a rank of another engine, which weights are written into: a receiver of :meth:`Pipeline.send_weights`.

    Args:
        mapping: a mapping file, or the name of one that graphpar has: "fused" (vLLM, SGLang), "hf", "hf_mixtral", "hf_qwen_moe".
        tensors: the rank's parameters by the engine's names, such as ``dict(model.named_parameters())``; those of its own layers where the
            engine is a pipeline.
        tp: which rank of how many tensor-parallel ones this is.
        heads: how many heads of queries the model has, which the mapping asks for where queries, keys and values are one tensor of it.
        kv_heads: how many heads of keys and values it has, which several ranks share where they are fewer than ranks.
        ep: which rank of how many have experts of their own.
        moe_tp: which rank of how many divide each expert; by default as ``tp``. Of vLLM with expert parallelism it is (0, 1).

    Attributes:
        version: the number with which weights were last received; None where none were, or where a sender failed and the engine has some
            of two versions.

    Raises:
        RuntimeProgramError: the mapping can't be read, or ranks can't share heads evenly.
    """

    def __init__(
        self,
        mapping: str | Path,
        tensors: Mapping[str, Tensor],
        *,
        tp: tuple[int, int] = (0, 1),
        heads: int | None = None,
        kv_heads: int | None = None,
        ep: tuple[int, int] = (0, 1),
        moe_tp: tuple[int, int] | None = None,
    ) -> None:
        self.version: int | None = None
        self.mapping, self._rules = str(mapping), read_mapping(mapping)
        self._numbers = {name: size for name, size in zip(NUMBERS, (heads, kv_heads)) if size is not None}
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        for axis, place in {"tp": tp, "ep": ep, "moe_tp": moe_tp or tp}.items():
            try:
                own, count = place
                known = 0 <= own < count
            except (TypeError, ValueError):  # such as a number
                known = False
            if not known:
                raise RuntimeProgramError(f"{axis} is (rank, ranks), counted from 0, such as (1, 4); it is {place!r}")
        rank, ranks = tp
        heads = min(kv_heads or ranks, ranks)
        if ranks % heads:
            raise RuntimeProgramError(f"{ranks} ranks can't share {heads} heads of keys and values evenly")
        self._places = {"tp": tp, "kv": (rank // (ranks // heads), heads), "ep": ep, "moe_tp": moe_tp or tp}
        scaled = [name for name, each in self._tensors.items() if each.is_floating_point() and each.itemsize < 2]
        if scaled:
            raise RuntimeProgramError(
                f"{listed(scaled)} have 8 bits, and scales that a mapping does not make; send in 16 bits"
            )

    def entries(self, offered: Mapping[str, tuple[str, Sequence[int]]]) -> dict[str, Entry]:
        """Describe where boxes of the model's tensors are in the engine's.

        Args:
            offered: the sender's name of a tensor, and its shape, by each name that it may have.

        Returns:
            By the sender's name.

        Raises:
            RuntimeProgramError: a tensor of the engine has no rule, no sender, or another shape.
        """
        shapes = {name: shape for name, (_, shape) in offered.items()}
        known, found = targets(self._rules, shapes, self._numbers), dict[str, Entry]()
        missing = [name for name in self._tensors if name not in known]
        if missing:
            raise RuntimeProgramError(
                f"the mapping {self.mapping} makes no {listed(missing)} of what is sent: no rule of that name finds all of its tensors; "
                "leave out tensors that are no weights of the model"
            )
        self._check_apart({name: known[name] for name in self._tensors}, offered)
        for name, tensor in self._tensors.items():
            shape, parts = known[name].parts(shapes, self._places)
            if tuple(shape) != tuple(tensor.shape):
                raise RuntimeProgramError(
                    f"{name} is {list(tensor.shape)} on this rank of the engine, and {shape} by the mapping {self.mapping}, at "
                    f"{', '.join(f'{axis} {own} of {count}' for axis, (own, count) in self._places.items())}"
                )
            for part in parts:
                boxes = known[name].boxes(part, tensor)
                for source in dict.fromkeys(
                    [*(each for each, _ in boxes), *(part.names if known[name].rule.pad > 1 else ())]
                ):
                    first, whole = offered[source]
                    entry = found.setdefault(first, Entry((*MODEL, first), tuple(whole), tensor.dtype, [], []))
                    entry.dtype = torch.promote_types(entry.dtype, tensor.dtype)
                    entry.boxes += [box for each, box in boxes if each == source]
                    entry.tensors += [tensor] if known[name].rule.pad > 1 else []
        return found

    def _check_apart(self, known: Mapping[str, Target], offered: Mapping[str, tuple[str, Sequence[int]]]) -> None:
        """Check that what is one tensor in the engine is one in the model."""
        seen: dict[tuple[int, tuple[int, ...]], str] = {}
        for name, tensor in self._tensors.items():
            other = seen.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name)
            own, others = (
                [offered[each][0] for names in known[which].sources for each in names] for which in (name, other)
            )
            if own != others and tensor.numel():
                raise RuntimeProgramError(
                    f"{other} and {name} are one tensor in the engine, and {listed(others)} and {listed(own)} in the model"
                )
