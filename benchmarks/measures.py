"""How large the product is, and how it is cut: lines, files, functions.

    python -m benchmarks.measures [--json]

Counted is ``graphpar``, with comments and blank lines.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from graphpar.runtime.axes import AXES
from graphpar.runtime.options import Request, options_of
from graphpar.runtime.schedule_records import SCHEDULES

ROOT = Path(__file__).parents[1]
SMALL_FILE, LARGE_FILE, SMALL_FUNCTION = 60, 600, 6


def sources() -> dict[Path, str]:
    """The text of each file of the product, by its path from the root."""
    files = sorted((ROOT / "graphpar").rglob("*.py"))
    return {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in files}


def measures() -> dict[str, int]:
    """Return the figures by name."""
    texts = sources()
    lengths = {path: text.count("\n") for path, text in texts.items()}
    words = Counter(word for text in texts.values() for word in re.findall(r"\w+", text))
    names = Counter(path.name for path in texts if path.name != "__init__.py")
    return {
        "lines": sum(lengths.values()),
        "files": len(texts),
        f"files under {SMALL_FILE} lines": sum(length < SMALL_FILE for length in lengths.values()),
        f"files over {LARGE_FILE} lines": sum(length > LARGE_FILE for length in lengths.values()),
        f"functions used once of at most {SMALL_FUNCTION} lines": sum(
            words[name] == 2 for text in texts.values() for name in _small_functions(text)
        ),
        "file names that stand in three folders": sum(count >= 3 for count in names.values()),
        "files that name zero1_by": _naming(texts, "zero1_by"),
        "files that name reshard": _naming(texts, "reshard"),
        "options of a plan": len(options_of(Request)),
        "places that name tp": _places(texts, ("tp",)),
        "places that name an axis": _places(texts, AXES),
        "places that name a schedule": _places(texts, tuple(SCHEDULES)),
    }


def _small_functions(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and re.match("_[a-z]", node.name):
            yield from [node.name] if (node.end_lineno or 0) - node.lineno < SMALL_FUNCTION else []


def _naming(texts: dict[Path, str], word: str) -> int:
    return sum(bool(re.search(rf"\b{word}\b", text)) for text in texts.values())


def _places(texts: dict[Path, str], names: Sequence[str]) -> int:
    """How many texts in code are one of ``names``, or attributes ``mesh.NAME``, without emitted templates."""
    pattern = re.compile(rf"[\"']({'|'.join(names)})[\"']|\bmesh\.({'|'.join(names)})\b")
    return sum(len(pattern.findall(text)) for text in texts.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Print them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.measures", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    found = measures()
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print("\n".join(f"{value:7,}  {name}" for name, value in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
