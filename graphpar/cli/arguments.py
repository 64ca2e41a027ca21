"""What the parsers of all commands share: the parser class, types of values, and arguments that several commands take.

Wrong options are refused before any work: numbers are checked here, and unknown names get the nearest known one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

from graphpar.cli.output import USER_ERROR
from graphpar.errors import GraphparError, near_match
from graphpar.runtime.option_kinds import ANY_COUNT, COUNT, SECONDS
from graphpar.runtime.options import Option, Request, flag_of, options_of


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviated options and no empty values; its errors are one line with the nearest name."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse as argparse does, but refuse unknown options with a near match, and empty values."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._unknown(unknown))
        for action in self._actions:
            if getattr(found, action.dest, None) == "":
                self.error(f"{_shown(action)} is empty; give it a value, or leave it out.")
        return found, []

    def _unknown(self, arguments: Sequence[str]) -> str:
        name = next((argument.partition("=")[0] for argument in arguments if argument.startswith("-")), None)
        if name is None:
            return f"{self.prog} takes no further argument, but there is {arguments[0]!r}."
        known = [option for action in self._actions for option in action.option_strings]
        return f"{self.prog} has no option {name}.{near_match(name, known)}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            what = (
                f"There is no command {value!r}"
                if isinstance(action, argparse._SubParsersAction)
                else f"{_shown(action)} is {value!r}"
            )
            raise _Refused(f"{what}; it is one of {', '.join(known)}.{near_match(str(value), known)}")

    def error(self, message: str) -> NoReturn:
        """Print a message for the user and exit with status 2."""
        self.exit(USER_ERROR, f"error: {message.removeprefix('argument ')}\n({self.prog} --help says what there is.)\n")


class _Refused(argparse.ArgumentError):
    """A message that needs no ``argument --name:`` before it."""

    def __init__(self, message: str) -> None:
        super().__init__(None, message)


def _shown(action: argparse.Action) -> str:
    return action.option_strings[-1] if action.option_strings else str(action.metavar or action.dest)


def typed(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return ``parse`` as the type of an argument, whose errors argparse tells."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except GraphparError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


count, count_or_none, seconds = typed(COUNT.parse), typed(ANY_COUNT.parse), typed(SECONDS.parse)


def add_option(group: argparse._ActionsContainer, name: str, known: Option) -> None:
    """Add an option of a plan to a parser, where it is None unless it is given."""
    kind, flag = known.kind, flag_of(name, known)
    if kind.flag == "either":
        group.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, help=known.help)
    elif kind.flag:
        group.add_argument(flag, dest=name, action="store_true", default=None, help=known.help)
    else:
        group.add_argument(
            flag,
            dest=name,
            type=typed(kind.parse),
            choices=kind.choices or None,
            metavar=known.metavar or None,
            help=known.help,
        )


def given_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a plan that were given, by name, as :func:`graphpar.plan` takes them.

    Raises:
        GraphparError: one can't be read.
    """
    found = {}
    for name, known in options_of(Request).items():
        text = getattr(options, name, None)
        if text is not None:
            found[name] = text if known.kind.read is None else known.kind.read(text)
    return found


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
"""Where a command adds its parser."""


def add_model(parser: Parser) -> None:
    """Add the model file, the first argument of a command that traces a model."""
    parser.add_argument(
        "model", metavar="MODEL", help="a Python file with `model` and `example_inputs`, or package.module"
    )


def add_cache(parser: argparse._ActionsContainer) -> None:
    """Add ``--no-cache``, which commands that trace a model take."""
    parser.add_argument(
        "--no-cache",
        action="store_true",
        help="trace the model even where a capture of it was kept (in GRAPHPAR_CACHE)",
    )


def add_program(parser: Parser) -> None:
    """Add the folder that ``graphpar compile`` wrote."""
    parser.add_argument("out", metavar="OUT", help="the emitted folder")


def add_json(parser: argparse._ActionsContainer, what: str = "print one JSON object") -> None:
    """Add ``--json``, which every command but ``completion`` takes."""
    parser.add_argument("--json", action="store_true", help=what)
