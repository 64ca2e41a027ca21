"""Every step of a compilation, from a model to a report, in order.

    capture ──► PASSES: Program ──► Program ──► annotate, plan ──► PREPARING, shard, FINISHING ──► split, STAGE_PASSES ──► codegen, report

A pass is a plain function from :class:`~graphpar.ir.program.Program` to Program. The passes that it requires must have run before;
after it ``check`` verifies what it provides, so that a broken pass is found at once.
"""

from __future__ import annotations

import inspect
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from graphpar.errors import GraphparError, near_match
from graphpar.ir.program import Helper, Program, operator_name, value_of, without_evaluation
from graphpar.passes.normalize.fp8_products import round_products
from graphpar.passes.normalize.functional import functionalize, is_inplace
from graphpar.passes.normalize.helpers import share_helpers
from graphpar.passes.normalize.idioms import use_idioms
from graphpar.passes.normalize.loss import share_loss
from graphpar.passes.normalize.outline import outline
from graphpar.passes.normalize.random_streams import assign_streams, is_random
from graphpar.passes.normalize.regions import cast_weights, inline_regions, keep_marks
from graphpar.passes.normalize.simplify import remove_dead_code, simplify
from graphpar.passes.normalize.static_masking import fill_unchosen, sizes_are_known
from graphpar.passes.normalize.windows import is_windowed, use_windows
from graphpar.passes.rank_passes import FINISHING, PREPARING, SHARD
from graphpar.passes.stage_passes import STAGE_PASSES
from graphpar.passes.step import Step


@dataclass(frozen=True)
class Pass(Step):
    """A step from Program to Program; ``check`` runs after it each time, and verifies what it provides.

    ``both_modes``: it changes what the model is in evaluation with the program; without it it also runs on that alone.
    """

    run: Callable[[Program], Program] = field(kw_only=True)
    check: Callable[[Program], bool] = field(kw_only=True)
    both_modes: bool = False


class PassList(tuple[Pass, ...]):
    """Passes in order. Insert your own with ``PASSES.insert_after("simplify", my_pass)``, which returns a new list."""

    @staticmethod
    def of(value: object) -> PassList:
        """Return ``value`` as a list of passes: a PassList, a sequence of passes, or a function without arguments that returns one.

        Raises:
            GraphparError: it is something else.
        """
        if isinstance(value, PassList):
            return value
        if isinstance(value, list | tuple):
            wrong = next((row for row in value if not isinstance(row, Pass)), None)
            if wrong is None:
                return PassList(value)
            raise GraphparError(
                f"passes holds {wrong!r}, which is not a pass; put a function between them with "
                "graphpar.PASSES.insert_after(NAME, function)."
            )
        if callable(value) and not inspect.signature(value).parameters:
            return PassList.of(value())
        raise GraphparError(
            f"passes is a {type(value).__name__}; give graphpar.PASSES.insert_after(NAME, function), or leave it out."
        )

    def names(self) -> list[str]:
        """Return the passes' names, in order."""
        return [row.name for row in self]

    def insert_after(self, name: str, added: Pass | Callable[[Program], Program]) -> PassList:
        """Return the list with a pass behind the one of this name.

        Args:
            added: a function from Program to Program, or a whole row.

        Raises:
            GraphparError: there is no pass of this name, or already one of the added pass's name.
        """
        return self._inserted(self.place(name) + 1, added, (name,))

    def insert_before(self, name: str, added: Pass | Callable[[Program], Program]) -> PassList:
        """Return the list with a pass before the one of this name. See :meth:`insert_after`."""
        return self._inserted(self.place(name), added, ())

    def place(self, name: str) -> int:
        """Return the index of the pass of this name.

        Raises:
            GraphparError: there is none.
        """
        if name not in self.names():
            raise GraphparError(
                f"There is no pass {name!r}; the passes are {', '.join(self.names())}.{near_match(name, self.names())}"
            )
        return self.names().index(name)

    def _inserted(self, place: int, added: Pass | Callable[[Program], Program], requires: tuple[str, ...]) -> PassList:
        row = added if isinstance(added, Pass) else _own(added, requires)
        if row.name in self.names():
            raise GraphparError(f"There is already a pass {row.name!r}; give yours another name.")
        return PassList((*self[:place], row, *self[place:]))

    def check_order(self, skipped: Collection[str] = ()) -> None:
        """Check that each pass has before it what it requires, and nothing that it conflicts with.

        Raises:
            GraphparError: a pass has not; both are named.
        """
        done: list[str] = ["capture"]
        for row in self:
            if row.name in skipped:
                continue
            for name in row.requires:
                if name not in done:
                    place = "comes after it" if name in self.names() else "is not in the list"
                    raise GraphparError(
                        f"The pass {row.name} requires {name}, which {'is skipped' if name in skipped else place}."
                    )
            for name in row.conflicts:
                if name in done:
                    raise GraphparError(f"The pass {row.name} must not come after {name}.")
            done.append(row.name)
        for step in STEPS:
            for name in step.requires:
                if not isinstance(step, Pass) and name in PASSES.names() and name not in done:
                    raise GraphparError(f"The step {step.name} requires the pass {name}, which is not in the list.")


def _own(function: Callable[[Program], Program], requires: tuple[str, ...]) -> Pass:
    """Return the row of a user's function."""
    if not callable(function):
        raise GraphparError(f"A pass is a function from Program to Program, not {function!r}.")
    name = getattr(function, "__name__", type(function).__name__)
    words = (inspect.getdoc(function) or "the same results").splitlines()[0].rstrip(".")
    return Pass(
        name,
        function.__module__,
        requires,
        words,
        "the graph is complete, and its inputs are those of the program",
        run=function,
        check=_inputs_known,
    )


@dataclass(frozen=True)
class PassResult:
    """The seconds that one pass took."""

    name: str
    seconds: float


def _inputs_known(program: Program) -> bool:
    known = {entry.name for entry in program.inputs} | set(program.count_names)
    return all(str(node.target) in known for node in program.graph.nodes if node.op == "placeholder")


def _no_marks(program: Program) -> bool:
    return not any(operator_name(node) == "_pipe_split" for node in program.graph.nodes)


def _no_regions(program: Program) -> bool:
    return not any(isinstance(node.target, torch._ops.HigherOrderOperator) for node in program.graph.nodes)


def _stored_as_read(program: Program) -> bool:
    attributes = (node for node in program.graph.nodes if node.op == "get_attr")
    read = {str(node.target): value_of(node).dtype for node in attributes if str(node.target) in program.parameters}
    return not program.stored and all(program.parameters[name].dtype == dtype for name, dtype in read.items())


def _only_buffers_written(program: Program) -> bool:
    return all(
        isinstance(node.args[0], fx.Node) and node.args[0].op != "placeholder"
        for node in program.graph.nodes
        if is_inplace(node)
    )


def _streams_counted(program: Program) -> bool:
    keyed = program.random_calls == 0 or any(entry.role == "sample_keys" for entry in program.inputs)
    graphs = [program.graph, *(block.graph for block in program.blocks.values())]
    return keyed and not any(is_random(node) for graph in graphs for node in graph.nodes)


def _no_dead_code(program: Program) -> bool:
    return all(node.users or node.op in ("placeholder", "output") or is_inplace(node) for node in program.graph.nodes)


def _counts_are_inputs(program: Program) -> bool:
    placeholders = {str(node.target) for node in program.graph.nodes if node.op == "placeholder"}
    return set(program.count_names) <= placeholders


def _instances_named(program: Program) -> bool:
    classes: dict[str, set[str]] = {}
    for node in program.graph.nodes:
        if node.op == "call_module":
            classes.setdefault(str(node.target), set()).add(str(node.meta["block"]))
    known = all(names <= program.blocks.keys() for names in classes.values())
    return known and all(len(names) == 1 for names in classes.values())


def _helpers_are_free(program: Program) -> bool:
    return not any(
        argument.op == "get_attr" and str(argument.target) in program.parameters
        for node in program.graph.nodes
        if isinstance(node.target, Helper)
        for argument in node.all_input_nodes
    )


PASSES = PassList(
    (
        Pass(
            "inline_regions", "graphpar.passes.normalize.regions", ("capture",),
            "no_grad and autocast regions are plain operators",
            "no operator holds a subgraph",
            run=inline_regions, check=_no_regions,
        ),
        Pass(
            "cast_weights", "graphpar.passes.normalize.regions", ("inline_regions",),
            "parameters are in the dtype in which they are stored, cast where they are read in another",
            "each parameter is read in its own dtype",
            run=cast_weights, check=_stored_as_read,
        ),
        Pass(
            "keep_marks", "graphpar.passes.normalize.regions", ("inline_regions",),
            "pipe_split() is a mark on the operator after it",
            "no call of pipe_split is left",
            run=keep_marks, check=_no_marks,
        ),
        Pass(
            "functionalize", "graphpar.passes.normalize.functional", ("cast_weights",),
            "only buffers are written in place",
            "what is written in place is a buffer",
            run=functionalize, check=_only_buffers_written,
        ),
        Pass(
            "fill_unchosen", "graphpar.passes.normalize.static_masking", ("functionalize",),
            "boolean indexing becomes masking; all shapes are static",
            "every size is known",
            run=fill_unchosen, check=sizes_are_known,
        ),
        Pass(
            "assign_streams", "graphpar.passes.normalize.random_streams", ("functionalize",),
            "random numbers are functions of the key of each example, or of the step",
            "no operator draws from torch's generator; where numbers are drawn, keys are an input",
            run=assign_streams, check=_streams_counted,
        ),
        Pass(
            "simplify", "graphpar.passes.normalize.simplify", ("assign_streams",),
            "no asserts, no empty casts, no dead code",
            "every value is used",
            run=simplify, check=_no_dead_code,
        ),
        Pass(
            "idioms", "graphpar.passes.normalize.idioms", ("simplify",),
            "idioms become one operator: norms, attention, causal masks, groups of heads, rotary embeddings, gates",
            "every value is used", optional=True,
            run=use_idioms, check=_no_dead_code,
        ),
        Pass(
            "round_products", "graphpar.passes.normalize.fp8_products", ("simplify",),
            "linear layers that are chosen multiply in 8 bits",
            "every value is used",
            run=round_products, check=_no_dead_code,
        ),
        Pass(
            "windows", "graphpar.passes.normalize.windows", ("simplify",),
            "a program for generation computes a window of positions; attention has a cache",
            "no attention is without a cache",
            run=use_windows, check=is_windowed,
        ),
        Pass(
            "share_loss", "graphpar.passes.normalize.loss", ("keep_marks", "fill_unchosen", "simplify"),
            "microbatches return shares of the loss; couplings are known",
            "denominators are inputs",
            run=share_loss, check=_counts_are_inputs,
        ),
        Pass(
            "outline", "graphpar.passes.normalize.outline", ("share_loss",),
            "repeated modules are blocks",
            "every call names a block, and each instance one class", optional=True,
            run=outline, check=_instances_named, both_modes=True,
        ),
        Pass(
            "share_helpers", "graphpar.passes.normalize.helpers", ("share_loss",),
            "masks and tables are functions that any stage calls",
            "no recomputed value depends on a parameter", optional=True,
            run=share_helpers, check=_helpers_are_free,
        ),
    )
)  # fmt: skip
"""From a captured program to one that can be split and sharded."""

DRAW_DROPOUT = Step(
    "draw_dropout", "graphpar.passes.kernel_dropout", ("annotate",), "attention draws its dropout as the plan says", "graphpar verify"
)  # fmt: skip
SPLIT = Step(
    "split", "graphpar.passes.split", ("exchange_experts",), "a graph a stage, and the values sent", "none is empty, nothing goes back"
)  # fmt: skip
STEPS: tuple[Step, ...] = (
    Step("capture", "graphpar.frontend.capture", (), "a program: the traced graph, inputs, parameters, ties", "torch.export"),
    *PASSES,
    Step("annotate", "graphpar.annotations.patterns", ("capture",), "the user's pins, by parameter and value", "each pattern fits a name"),
    DRAW_DROPOUT,
    Step(
        "plan", "graphpar.passes.planning.plan_request", ("share_loss", "annotate", "draw_dropout"),
        "mesh, schedule, stages, placements", "the rules",
    ),
    *PREPARING,
    SHARD,
    Step("check_types", "graphpar.passes.sharding.check_types", ("shard",), "a proof of the placements", "itself, operator by operator"),
    *FINISHING,
    SPLIT,
    *STAGE_PASSES,
    Step("codegen", "graphpar.codegen.package", ("join_products",), "the text of the package", "graphpar check and graphpar verify"),
    Step("report", "graphpar.report.report", ("split",), "the decisions and their cost", "the lines of a step add up to it"),
)  # fmt: skip
"""All steps of a compilation, from the model to the report."""


def run_passes(
    program: Program,
    passes: PassList = PASSES,
    *,
    skip: Collection[str] = (),
    after: Callable[[Pass, Program], None] | None = None,
) -> tuple[Program, list[PassResult]]:
    """Run ``passes`` in order, each followed by its check.

    Args:
        skip: optional passes to leave out.
        after: called with each pass and the program after it (for dumps).

    Returns:
        The program, and how long each pass took.

    Raises:
        GraphparError: the order is illegal, a skipped pass is not optional, or a user's pass fails.
    """
    check_skipped(passes, skip)
    results = []
    done: list[Pass] = []
    for row in passes:
        if row.name in skip:
            continue
        started = time.perf_counter()
        program = _run_pass(row, program, done)
        if (evaluated := program.evaluated) is not None and not row.both_modes:
            try:
                program = replace(program, evaluated=_run_pass(row, evaluated, done))
            except GraphparError as error:
                program = without_evaluation(program, str(error))
        results.append(PassResult(row.name, time.perf_counter() - started))
        done.append(row)
        if after is not None:
            after(row, program)
    return program, results


def _run_pass(row: Pass, program: Program, done: Sequence[Pass]) -> Program:
    if row not in PASSES:
        return _run_own(row, program, done)
    with row.named():
        program = row.run(program)
        program.graph.lint()
    assert row.check(program), f"pass {row.name} did not provide that {row.provides}"
    return program


def check_skipped(passes: PassList, skip: Collection[str]) -> None:
    """Check that the passes in ``skip`` are optional, and that the order is legal without them.

    Raises:
        GraphparError: they are not, or it is not.
    """
    for name in skip:
        if not passes[passes.place(name)].optional:
            optional = ", ".join(row.name for row in passes if row.optional)
            raise GraphparError(f"The pass {name} can't be skipped; those that can are {optional}.")
    passes.check_order(skip)


def _run_own(row: Pass, program: Program, done: Sequence[Pass]) -> Program:
    """Run a user's pass; all checks that held before it must hold after it.

    Raises:
        GraphparError: it raised, returned no program, or a malformed one.
    """
    held = [other for other in done if other.check(program)]
    try:
        made = row.run(program)
    except GraphparError:
        raise
    except Exception as error:
        line = next(
            (f" ({frame.filename}:{frame.lineno})" for frame in reversed(traceback.extract_tb(error.__traceback__))), ""
        )
        raise GraphparError(f"The pass {row.name} raised {type(error).__name__}: {error}{line}") from error
    if not isinstance(made, Program):
        raise GraphparError(
            f"The pass {row.name} returned a {type(made).__name__}; a pass takes a Program and returns one."
        )
    try:
        made.graph.lint()
    except Exception as error:
        what = (str(error).splitlines() or [type(error).__name__])[0]
        raise GraphparError(f"The pass {row.name} left a malformed graph: {what}") from error
    if not made.blocks:
        remove_dead_code(made.graph)
    for node in made.graph.nodes:
        if node.op == "call_function" and "val" not in node.meta:
            raise GraphparError(
                f"The pass {row.name} left the operator {node.name} without metadata; give it that of the operator it replaces: "
                "new.meta = dict(old.meta)."
            )
    if not row.check(made):
        raise GraphparError(f"The pass {row.name} failed its check: {row.checked_by}.")
    for other in held:
        if not other.check(made):
            raise GraphparError(f"The pass {row.name} undid what {other.name} provides: {other.checked_by}.")
    return made
