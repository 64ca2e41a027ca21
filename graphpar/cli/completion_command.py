"""``graphpar completion``: a script that completes commands, options and their values in a shell.

    parsers ──commands──► names, options, what each takes ──bash | zsh | fish──► the script

The script is text made from the parsers: it asks no program while somebody types.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from graphpar.cli.arguments import Commands, Parser
from graphpar.cli.output import Result

SHELLS = ("bash", "zsh", "fish")

_EXAMPLES = """to use it, add to the shell's own configuration:
  bash   source <(graphpar completion bash)
  zsh    source <(graphpar completion zsh)
  fish   graphpar completion fish | source
"""


@dataclass(frozen=True)
class _Argument:
    """An option, or without ``names`` a positional argument. It takes one of ``words``, a path, or anything else."""

    names: tuple[str, ...]
    metavar: str
    help: str
    flag: bool
    words: tuple[str, ...]
    path: bool


@dataclass(frozen=True)
class _Command:
    name: str
    help: str
    arguments: tuple[_Argument, ...]

    @property
    def options(self) -> list[_Argument]:
        return [argument for argument in self.arguments if argument.names]

    @property
    def positional(self) -> list[_Argument]:
        return [argument for argument in self.arguments if not argument.names]


def add_parser(commands: Commands) -> None:
    """Add the parser of the command."""
    parser = commands.add_parser(
        "completion",
        help="print the script that completes commands and options in a shell",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help="bash, zsh or fish")
    parser.set_defaults(json=False)


def run(options: argparse.Namespace) -> Result:
    """Print the script for the shell."""
    text = script(options.parser, options.shell)
    return Result({"shell": options.shell, "script": text}, lambda console: console.out(text, end="", highlight=False))


def script(parser: Parser, shell: str) -> str:
    """Write the script for ``bash``, ``zsh`` or ``fish`` that completes what ``parser`` takes."""
    root = [argument for argument in map(_argument, parser._actions) if argument.flag]
    return "\n".join(_SHELLS[shell](list(_commands(parser)), root)) + "\n"


def _commands(parser: Parser) -> Iterator[_Command]:
    (subparsers,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    helps = {action.dest: action.help or "" for action in subparsers._choices_actions}
    for name, own in subparsers.choices.items():
        yield _Command(name, helps[name], tuple(map(_argument, own._actions)))


def _argument(action: argparse.Action) -> _Argument:
    from graphpar.schedules.registry import SCHEDULES

    metavar = action.metavar if isinstance(action.metavar, str) else action.dest
    # schedules are not choices to argparse, since they are taken in other spellings too
    words = tuple(map(str, action.choices or (SCHEDULES if action.dest == "schedule" else ())))
    return _Argument(
        names=tuple(action.option_strings),
        metavar=metavar,
        help=(action.help or "").replace("%%", "%"),
        flag=action.nargs == 0,
        words=() if isinstance(action, argparse._SubParsersAction) else words,
        path=any(_is_path(part) for part in metavar.split("|")),
    )


def _is_path(metavar: str) -> bool:
    return metavar in ("DIR", "OUT", "MODEL") or metavar.startswith("FILE") or metavar.endswith(".json")


# ---- shells ----------------------------------------------------------------------------------------------------


def _bash(commands: Sequence[_Command], root: Sequence[_Argument]) -> Iterator[str]:
    def offered(words: Sequence[str]) -> str:
        return f'COMPREPLY=($(compgen -W {shlex.quote(" ".join(words))} -- "$word"))'

    yield from (
        "_graphpar() {",
        "    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} command=${COMP_WORDS[1]}",
        "    COMPREPLY=()",
        "    if ((COMP_CWORD == 1)); then",
        f"        {offered([command.name for command in commands] + _names(root))}",
        "        return",
        "    fi",
        '    case "$command $before" in',
    )
    for command in commands:
        for option in command.options:
            if option.words:
                cases = "|".join(shlex.quote(f"{command.name} {name}") for name in option.names)
                yield f"        {cases}) {offered(option.words)}; return ;;"
    yield from ("    esac", '    case "$command" in')
    for command in commands:
        plain = [word for argument in command.positional for word in argument.words]
        otherwise = f"; else {offered(plain)}" if plain else ""
        yield f"        {command.name}) if [[ $word == -* ]]; then {offered(_names(command.options))}{otherwise}; fi ;;"
    yield from (
        "    esac",
        "}",
        "complete -o default -F _graphpar graphpar",
    )  # default: paths, where nothing is offered


def _zsh(commands: Sequence[_Command], root: Sequence[_Argument]) -> Iterator[str]:
    def taken(argument: _Argument) -> str:
        return f"({' '.join(argument.words)})" if argument.words else "_files" if argument.path else " "

    def spec(option: _Argument, name: str) -> str:
        help_text = option.help.replace("[", "\\[").replace("]", "\\]")
        value = "" if option.flag else f":{_plain(option.metavar)}:{taken(option)}"
        return shlex.quote(f"{name}[{help_text}]{value}")

    yield from (
        "#compdef graphpar",
        "_graphpar() {",
        "    local -a commands=(",
        *(f"        {shlex.quote(f'{command.name}:{command.help}')}" for command in commands),
        "    )",
        "    if (( CURRENT == 2 )); then",
        "        _describe command commands",
        f"        _arguments {' '.join(spec(option, name) for option in root for name in option.names)}",
        "        return",
        "    fi",
        "    local command=$words[2]",
        "    shift words",
        "    (( CURRENT-- ))",
        "    case $command in",
    )
    for command in commands:
        specs = [spec(option, name) for option in command.options for name in option.names]
        specs += [
            shlex.quote(f"{place}:{_plain(argument.metavar)}:{taken(argument)}")
            for place, argument in enumerate(command.positional, 1)
        ]
        yield f"        {command.name})"
        yield "            _arguments \\"
        yield from (f"                {each} \\" for each in specs[:-1])
        yield from (f"                {specs[-1]}", "            ;;")
    yield from ("    esac", "}", "compdef _graphpar graphpar")


def _plain(metavar: str) -> str:
    """A name of a value without what zsh reads as its own."""
    return metavar.replace(":", " ")


def _fish(commands: Sequence[_Command], root: Sequence[_Argument]) -> Iterator[str]:
    def line(when: str, option: _Argument) -> str:
        names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
        value = "" if option.flag else " -r -F" if option.path and not option.words else " -x"
        words = f" -a {_fish_quoted(' '.join(option.words))}" if option.words else ""
        return f"complete -c graphpar -n {_fish_quoted(when)} {names}{value}{words} -d {_fish_quoted(option.help)}"

    first = "__fish_use_subcommand"
    for command in commands:
        yield f"complete -c graphpar -f -n {_fish_quoted(first)} -a {command.name} -d {_fish_quoted(command.help)}"
    yield from (line(first, option) for option in root)
    for command in commands:
        when = f"__fish_seen_subcommand_from {command.name}"
        yield from (line(when, option) for option in command.options)
        for argument in command.positional:
            if argument.words:
                yield f"complete -c graphpar -f -n {_fish_quoted(when)} -a {_fish_quoted(' '.join(argument.words))}"


def _fish_quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _names(arguments: Sequence[_Argument]) -> list[str]:
    return [name for argument in arguments for name in argument.names]


_SHELLS: dict[str, Callable[[Sequence[_Command], Sequence[_Argument]], Iterator[str]]] = {
    "bash": _bash,
    "zsh": _zsh,
    "fish": _fish,
}
