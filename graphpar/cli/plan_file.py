"""Reading plans: a ``plan.json``, a folder that holds one, or what ``compile --json`` printed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from graphpar.cli.output import program_folder
from graphpar.errors import GraphparError, near_match
from graphpar.ir.plan import Plan
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.manifest import Manifest, load_manifest
from graphpar.runtime.plan_record import read_object


def read_record(path: str | Path) -> tuple[Path, dict[str, Any]]:
    """Find the file that ``path`` names, and read the JSON object in it."""
    file = Path(path)
    if file.is_dir() or not (file.suffix or file.exists()):
        file = program_folder(file, runs=False) / "plan.json"
    if not file.is_file():
        others = [entry.name for entry in file.parent.glob("*.json")] if file.parent.is_dir() else []
        raise GraphparError(f"There is no plan {file}.{near_match(file.name, others)}")
    if file.suffix == ".py":
        raise GraphparError(f"{file} is no plan; name the folder that graphpar compile wrote, or the plan.json in it.")
    try:
        return file, read_object(file)
    except RuntimeProgramError as error:
        raise GraphparError(f"{error}.") from None


def read_program(path: str | Path) -> tuple[Manifest, dict[str, Any]]:
    """Read the ``plan.json`` of an emitted folder, checked as far as that needs no model.

    Raises:
        GraphparError: it is damaged; the message names the file and the field.
    """
    file, record = read_record(program_folder(path))
    try:
        manifest = load_manifest(file.parent)
    except RuntimeProgramError as error:
        raise GraphparError(f"{error}".removesuffix(".") + ".") from None
    read_plan(file, record)
    return manifest, record


@contextlib.contextmanager
def reading_report(file: Path) -> Iterator[None]:
    """Raise a sentence where the block finds no field, or a wrong one, in the report that ``file`` holds."""
    try:
        yield
    except GraphparError:
        raise
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, ArithmeticError) as error:
        what = f"it lacks {error.args[0]!r}" if isinstance(error, KeyError) else str(error)
        raise GraphparError(f"The report in {file} can't be read: {what}. Compile the model again.") from error


def read_plan(file: Path, record: dict[str, Any]) -> Plan:
    """Read the plan in a record; errors name the file."""
    inner = record.get("plan", record)
    try:
        return Plan.from_json(inner, str(file))
    except GraphparError as error:
        raise GraphparError(f"{error}" if str(file) in str(error) else f"{file}: {error}") from None
