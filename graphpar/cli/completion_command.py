"""``graphpar completion``: a script that completes commands, options and their values in a shell.

    parsers ──actions──► names, values, help ──bash | zsh | fish──► the script

The script is text made from the parsers: it asks no program while somebody types.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence

from graphpar.cli.output import Result
from graphpar.cli.parser import Parser


def run(options: argparse.Namespace) -> Result:
    """Print the script for the shell."""
    text = script(options.parser, options.shell)
    return Result({"shell": options.shell, "script": text}, lambda console: console.out(text, end="", highlight=False))


def script(parser: Parser, shell: str) -> str:
    """Write the script for ``bash``, ``zsh`` or ``fish`` that completes what ``parser`` takes."""
    if shell == "fish":
        return "\n".join(_fish(parser)) + "\n"
    before = (
        ["autoload -U +X compinit && compinit", "autoload -U +X bashcompinit && bashcompinit"] if shell == "zsh" else []
    )
    return "\n".join([*before, *_bash(parser)]) + "\n"


def _commands(parser: Parser) -> dict[str, tuple[str, list[argparse.Action]]]:
    """Return the help and the arguments of each command."""
    (subparsers,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    helps = {action.dest: action.help or "" for action in subparsers._choices_actions}
    return {name: (helps[name], own._actions) for name, own in subparsers.choices.items()}


def _flags(actions: Sequence[argparse.Action]) -> list[str]:
    return [name for action in actions for name in action.option_strings]


def _values(action: argparse.Action) -> list[str]:
    return [str(value) for value in action.choices or ()]


def _is_path(action: argparse.Action) -> bool:
    parts = str(action.metavar or "").split("|")
    return any(part in ("DIR", "OUT", "MODEL") or part.startswith("FILE") or part.endswith(".json") for part in parts)


# ---- shells ----------------------------------------------------------------------------------------------------


def _bash(parser: Parser) -> Iterator[str]:
    commands = _commands(parser)

    def offered(words: Sequence[str]) -> str:
        return f'COMPREPLY=($(compgen -W {shlex.quote(" ".join(words))} -- "$word"))'

    yield from (
        "_graphpar() {",
        "    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} command=${COMP_WORDS[1]}",
        "    COMPREPLY=()",
        f"    if ((COMP_CWORD == 1)); then {offered([*commands, *_flags(parser._actions)])}; return; fi",
        '    case "$command $before" in',
    )
    for name, (_, actions) in commands.items():
        for action in actions:
            if action.option_strings and (values := _values(action)):
                cases = "|".join(shlex.quote(f"{name} {flag}") for flag in action.option_strings)
                yield f"        {cases}) {offered(values)}; return ;;"
    yield from ("    esac", '    case "$command" in')
    for name, (_, actions) in commands.items():
        values = [value for action in actions if not action.option_strings for value in _values(action)]
        otherwise = f"; else {offered(values)}" if values else ""
        yield f"        {name}) if [[ $word == -* ]]; then {offered(_flags(actions))}{otherwise}; fi ;;"
    yield from (
        "    esac",
        "}",
        "complete -o default -F _graphpar graphpar",
    )  # default: paths, where nothing is offered


def _fish(parser: Parser) -> Iterator[str]:
    def quoted(text: str) -> str:
        escaped = text.replace("\\", "\\\\").replace("'", "\\'")
        return f"'{escaped}'"

    def lines(when: str, actions: Sequence[argparse.Action]) -> Iterator[str]:
        for action in actions:
            values = f" -a {quoted(' '.join(_values(action)))}" if _values(action) else ""
            start = f"complete -c graphpar -n {quoted(when)}"
            if action.option_strings:
                flags = " ".join(
                    f"-l {flag[2:]}" if flag[1] == "-" else f"-s {flag[1:]}" for flag in action.option_strings
                )
                taken = "" if action.nargs == 0 else " -r -F" if _is_path(action) and not values else " -x"
                yield f"{start} {flags}{taken}{values} -d {quoted((action.help or '').replace('%%', '%'))}"
            elif values:
                yield f"{start} -f{values}"

    first, commands = "__fish_use_subcommand", _commands(parser)
    for name, (what, _) in commands.items():
        yield f"complete -c graphpar -f -n {quoted(first)} -a {name} -d {quoted(what)}"
    yield from lines(first, [action for action in parser._actions if action.nargs == 0])
    for name, (_, actions) in commands.items():
        yield from lines(f"__fish_seen_subcommand_from {name}", actions)
