"""Merging the shard plans of submodules into one, and loading a plan from a file.

{"": {"head": "colwise"}, "encoder": {"q": "colwise"}}  ──merge_plans──►  {"head": "colwise", "encoder.q": "colwise"}
plan.json | plan.toml | plan.py with ``shard_plan``     ──load_shard_plan──►  the same kind of mapping
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphpar.annotations.patterns import ShardPlan, path_under, read_entry
from graphpar.annotations.values import read_value
from graphpar.errors import GraphparError, near_match
from graphpar.frontend.modelfile import import_file


def merge_plans(plans: Mapping[str, ShardPlan]) -> dict[str, Any]:
    """Merge the plans of submodules into one, each under its path: ``{"": a, "encoder": b}``.

    The order is that of the inputs, which are not changed nor shared with the result. A merged plan can be merged again.

    Raises:
        GraphparError: two plans give one pattern different values, or a value is malformed.
    """
    merged: dict[str, Any] = {}
    origins: dict[str, tuple[str, str]] = {}
    for prefix, plan in plans.items():
        if not isinstance(plan, Mapping):
            raise GraphparError(f"merge_plans takes a plan for each path, but {prefix!r} has a {type(plan).__name__}.")
        for pattern, value in plan.items():
            constraints = read_entry(pattern, value)
            key = path_under(prefix.removesuffix("."), pattern)
            if key not in merged:
                merged[key], origins[key] = _copy_of_value(value), (prefix, pattern)
            elif read_value(merged[key], key) != constraints:
                first, first_pattern = origins[key]
                raise GraphparError(
                    f"Two shard plans disagree about {key!r}: {first_pattern!r} in the plan of {first!r} says {merged[key]!r}, "
                    f"and {pattern!r} in the plan of {prefix!r} says {value!r}."
                )
    return merged


def _copy_of_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy_of_value(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copy_of_value(entry) for entry in value)
    return value


def load_shard_plan(path: str | Path) -> dict[str, Any]:
    """Load the plan in a JSON or TOML file (patterns as its keys), or ``shard_plan`` of a Python file.

    Raises:
        GraphparError: the file is missing, can't be read, or a value in it is malformed; the file is named.
    """
    file = Path(path)
    if not file.is_file():
        siblings = [entry.name for entry in file.parent.iterdir()] if file.parent.is_dir() else []
        raise GraphparError(f"There is no shard plan {file}.{near_match(file.name, siblings)}")
    readers = {".json": _from_json, ".toml": _from_toml, ".py": _from_python}
    if file.suffix not in readers:
        raise GraphparError(f"{file} is not a shard plan: its name must end in {', '.join(readers)}.")
    plan = readers[file.suffix](file)
    if not isinstance(plan, Mapping):
        raise GraphparError(f"{file}: a shard plan is a mapping of patterns to values, not a {type(plan).__name__}.")
    try:
        for pattern, value in plan.items():
            read_entry(pattern, value)
    except GraphparError as error:
        raise GraphparError(f"{file}: {error}") from None
    return dict(plan)


def _from_json(file: Path) -> Any:
    def checked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise GraphparError(f"{file} has the key {twice!r} twice.")
        return dict(pairs)

    try:
        return json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=checked)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise GraphparError(f"{file} is not JSON: {error}.") from None


def _from_toml(file: Path) -> Any:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise GraphparError(f"{file} is not TOML: {error}.") from None


def _from_python(file: Path) -> Any:
    module = import_file(file)
    if not hasattr(module, "shard_plan"):
        raise GraphparError(f"{file} has no 'shard_plan'.{near_match('shard_plan', vars(module))}")
    return module.shard_plan
