"""Reading plans: a ``plan.json``, a folder that holds one, or what ``compile --json`` printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from graphpar.cli.output import program_folder
from graphpar.errors import GraphparError, near_match
from graphpar.ir.plan import Plan


def read_record(path: str | Path) -> tuple[Path, dict[str, Any]]:
    """Find the file that ``path`` names, and read the JSON object in it."""
    file = Path(path)
    if file.is_dir() or not (file.suffix or file.exists()):
        file = program_folder(file) / "plan.json"
    if not file.is_file():
        others = [entry.name for entry in file.parent.glob("*.json")] if file.parent.is_dir() else []
        raise GraphparError(f"There is no plan {file}.{near_match(file.name, others)}")
    try:
        record = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise GraphparError(f"{file} is not JSON: {error}.") from None
    if not isinstance(record, dict):
        raise GraphparError(f"{file} holds no plan: it is a JSON {type(record).__name__}, not an object.")
    return file, record


def read_plan(file: Path, record: dict[str, Any]) -> Plan:
    """Read the plan in a record; errors name the file."""
    inner = record.get("plan", record)
    try:
        return Plan.from_json(inner)
    except GraphparError as error:
        raise GraphparError(f"{file}: {error}") from None
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise GraphparError(f"{file} is not a valid plan: {error}.") from None
