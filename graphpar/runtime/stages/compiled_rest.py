"""``torch.compile`` of what a stage computes outside of its blocks: embeddings, heads, losses.

    def forward(self, *, input_ids, labels):                          def forward(self, *, input_ids, labels):
        hidden = self.embed(input_ids) * 8.0                              (hidden,) = part_0(self, input_ids)
        for block in self.blocks.values():                   ──►          for block in self.blocks.values():
            hidden = block(hidden)                                            hidden = block(hidden)
        logits = self.head(self.norm(hidden))                             return part_1(self, hidden, labels)
        return F.cross_entropy(logits, labels)

A graph breaks where a compiled block is called, and torch compiles nothing around a loop in which one breaks. So the statements between
blocks become functions, with the lines of the stage's file. Whatever branches, or has an effect on Python, stays between them.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from types import CodeType
from typing import Any

from torch import nn


def with_parts(
    forward: Callable[..., Any], stage: nn.Module, apart: Collection[object], make: Callable[..., Callable[..., Any]]
) -> Callable[..., Any]:
    """Return the emitted ``forward`` of a class, of which each run of statements is a function that ``make`` makes of it.

    Args:
        apart: blocks of ``stage``, and functions, whose calls stay outside.
    """
    function, file, names = _source(forward), forward.__code__.co_filename, forward.__globals__
    if function is None:
        return forward
    local = {*forward.__code__.co_varnames, *forward.__code__.co_cellvars}
    groups, later = list[tuple[bool, list[ast.stmt]]](), set[str]()
    for together, run in reversed(
        [
            (together, list(run))
            for together, run in itertools.groupby(function.body, lambda each: _joins(each, stage, names, local, apart))
        ]
    ):
        groups[:0] = [(together, part) for part in (_by_results(run, later) if together else [run])]
        later |= _read(run)
    free, known, body = _free_names(function), local - {"self"}, list[ast.stmt]()
    made: dict[str, Callable[..., Any]] = {}
    for place, (together, run) in enumerate(groups):
        if together and _operators(run) > 1:
            later = {name for _, rest in groups[place + 1 :] for name in _read(rest)}
            part, call = _part(next(free), run, known, later)
            made[part.name] = make(_defined(part, file, names))
            body.append(call)
        else:
            body += run
    if not made:
        return forward
    function.body = body
    outer = _function(next(free), list(made), [function, ast.Return(_name(function.name))], function)
    result: Callable[..., Any] = _defined(outer, file, names)(**made)
    return result


def _source(forward: Callable[..., Any]) -> ast.FunctionDef | None:
    """Return a method as its file has it; None where that by itself says something else than what the method does: it is wrapped, names
    variables of its class or module, or the file has changed since it was imported."""
    code = forward.__code__
    try:
        lines, _ = inspect.findsource(code)
        own, first = inspect.getsourcelines(code)
        file = compile("".join(lines), code.co_filename, "exec", dont_inherit=True)
        (function,) = ast.increment_lineno(ast.parse(textwrap.dedent("".join(own))), first - 1).body
    except (OSError, SyntaxError):
        return None
    if code.co_freevars or code.co_varnames[:1] != ("self",) or code not in _codes(file):
        return None
    if not isinstance(function, ast.FunctionDef) or function.decorator_list:
        return None
    return None if any(_belongs(node) for node in ast.walk(function)) else function


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def _belongs(node: ast.AST) -> bool:
    private = isinstance(node, ast.Attribute) and node.attr.startswith("__") and not node.attr.endswith("__")
    return private or isinstance(node, ast.Global | ast.Nonlocal)


def _by_results(run: Sequence[ast.stmt], later: Collection[str]) -> list[list[ast.stmt]]:
    """Divide statements where others of the names that are read ``later`` follow from them.

    One of these may have no gradient, as what is detached before it is used. Autograd then leaves alone what was computed for it, whose
    parameters have none either; one graph that had other results, too, would give them zeros, by which optimizers move parameters.
    """
    needed = {name: frozenset([name]) for name in later}
    serves: list[frozenset[str]] = []
    for each in reversed(run):
        stored = [needed.pop(name, frozenset()) for name in _names([each], ast.Store)]
        results = frozenset[str]().union(*stored) if isinstance(each, ast.Assign) else frozenset([""])
        serves.insert(0, results)
        for name in _names([each], ast.Load):
            needed[name] = needed.get(name, frozenset()) | results
    pairs = itertools.groupby(zip(serves, run, strict=True), lambda pair: pair[0])
    return [[each for _, each in part] for _, part in pairs]


def _free_names(function: ast.FunctionDef) -> Iterator[str]:
    """Yield names that a function does not use: ``part_0``, ``part_1``."""
    used = {
        *_names([function], ast.Load, ast.Store, ast.Del),
        *(each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)),
    }
    return (name for name in map("part_{}".format, itertools.count()) if name not in used)


def _joins(
    statement: ast.stmt, stage: nn.Module, names: dict[str, Any], local: Collection[str], apart: Collection[object]
) -> bool:
    """Whether a statement is computed as part of a graph: it is a line without branches that calls nothing that is ``apart``."""
    nodes = list(ast.walk(statement))
    simple = isinstance(statement, ast.Assign | ast.Expr | ast.Return) and not any(
        isinstance(node, ast.comprehension | ast.Lambda | ast.NamedExpr | ast.IfExp | ast.BoolOp) for node in nodes
    )
    if isinstance(statement, ast.Return) and isinstance(statement.value, ast.Tuple):
        return False  # several results
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    return simple and not any(_is_apart(called, stage, names, local, apart) for called in calls)


def _is_apart(
    called: ast.expr, stage: nn.Module, names: dict[str, Any], local: Collection[str], apart: Collection[object]
) -> bool:
    if isinstance(called, ast.Name):
        return called.id in local or names.get(called.id) in apart  # a variable may be a block
    place = ast.unparse(called)
    if not place.startswith("self.") or any(isinstance(node, ast.Call) for node in ast.walk(called)):
        return False
    try:
        found = eval(place, {"self": stage})  # a path such as self.encoder.block["0"]
    except (AttributeError, LookupError, NameError, TypeError):
        return True
    if isinstance(found, nn.Module):
        return any(module in apart for module in found.modules())
    return isinstance(getattr(found, "__self__", None), nn.Module)  # a method


def _operators(statements: Sequence[ast.stmt]) -> int:
    return sum(isinstance(node, ast.Call | ast.BinOp) for each in statements for node in ast.walk(each))


def _names(statements: Sequence[ast.stmt], *contexts: type[ast.expr_context]) -> set[str]:
    nodes = [node for each in statements for node in ast.walk(each)]
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, contexts)}


def _read(statements: Sequence[ast.stmt]) -> set[str]:
    """The names of variables that statements need, which they may change in place."""
    nodes = [node.target for each in statements for node in ast.walk(each) if isinstance(node, ast.AugAssign)]
    return _names(statements, ast.Load, ast.Del) | {node.id for node in nodes if isinstance(node, ast.Name)}


def _part(name: str, run: list[ast.stmt], known: set[str], later: set[str]) -> tuple[ast.FunctionDef, ast.stmt]:
    """Return the function ``name`` of statements, and what calls it; ``known``: names before them, ``later``: those that are read after."""
    given: set[str] = set()
    stored: set[str] = set()
    for each in run:
        given |= (_names([each], ast.Load) & known) - stored
        stored |= _names([each], ast.Store)
    arguments, found, last = ["self", *sorted(given)], sorted(stored & later), run[-1]
    call = ast.Call(_name(name), [_name(each) for each in arguments], [])
    if isinstance(last, ast.Return):
        return _function(name, arguments, run, last), ast.copy_location(ast.Return(call), last)
    result = ast.Return(ast.Tuple([_name(each) for each in found], ast.Load()))
    target = ast.Tuple([ast.Name(each, ast.Store()) for each in found], ast.Store())
    return _function(name, arguments, [*run, result], last), ast.copy_location(ast.Assign([target], call), last)


def _function(name: str, arguments: list[str], body: Sequence[ast.stmt], like: ast.stmt) -> ast.FunctionDef:
    given = ast.arguments(
        posonlyargs=[], args=[ast.arg(each) for each in arguments], kwonlyargs=[], kw_defaults=[], defaults=[]
    )
    made = ast.FunctionDef(name=name, args=given, body=list(body), decorator_list=[], type_params=[])  # type: ignore[call-arg,unused-ignore]
    return ast.copy_location(made, like)


def _name(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _defined(function: ast.FunctionDef, file: str, names: dict[str, Any]) -> Callable[..., Any]:
    """Compile a function, whose global names are ``names``."""
    own: dict[str, Any] = {}
    exec(compile(ast.fix_missing_locations(ast.Module([function], [])), file, "exec"), names, own)
    made: Callable[..., Any] = own[function.name]
    return made
