"""Pages, help, messages and reports use the words of the glossary, and none of ``words.txt``.

    docs/*.md, README.md, CHANGELOG.md      without code
    graphpar/**/*.html                      templates
    graphpar/**/*.py                        literals of three words or more that are no docstrings: messages, help, reports

What is found is named with its file, its line and a better word.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.docs.test_docs import PAGES, ROOT, page_name

PRODUCT = sorted((ROOT / "graphpar").rglob("*.py"))
GLOSSARY = 40
"""Terms that a reader is expected to learn, at most."""
_CODE = re.compile(r"^```.*?^```$|`[^`\n]*`|\]\([^)]*\)|<!--.*?-->", re.DOTALL | re.MULTILINE)


@cache
def unused() -> tuple[tuple[re.Pattern[str], str, str], ...]:
    """The phrases of ``words.txt``, as patterns, each with what to say instead."""
    rows = []
    for line in (Path(__file__).parent / "words.txt").read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            phrase, better = map(str.strip, line.split(" = "))
            better, _, context = better.partition("; unless before ")
            following = rf"(?! (?:{'|'.join(context.split(', '))})\b)" if context else ""
            rows.append((re.compile(rf"\b{re.escape(phrase)}\b{following}", re.IGNORECASE), phrase, better))
    return tuple(rows)


def faults(text: str, file: str, line: int = 1) -> list[str]:
    """What of a text is in the list."""
    return [
        f"{file}:{line + text[: match.start()].count(chr(10))}: {phrase!r}; say: {better}"
        for pattern, phrase, better in unused()
        for match in pattern.finditer(text)
    ]


def prose(page: Path) -> str:
    """A page with its code blanked, so that lines are not moved."""
    return _CODE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), page.read_text())


def literals(path: Path) -> Iterator[tuple[int, str]]:
    """The strings of a file that are read by people, with their lines: no docstrings, f-strings with ``{}`` for values."""
    tree = ast.parse(path.read_text())
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            shown = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts | documentation:
            shown = node.value
        else:
            continue
        if len(shown.split()) >= 3:
            yield node.lineno, shown


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=page_name)
def test_pages_use_the_words_of_the_field(page: Path) -> None:
    assert faults(prose(page), page_name(page)) == []


def test_messages_help_and_reports_use_the_words_of_the_field() -> None:
    found = [
        fault
        for path in PRODUCT
        for line, text in literals(path)
        for fault in faults(text, str(path.relative_to(ROOT)), line)
    ]
    templates = sorted((ROOT / "graphpar").rglob("*.html"))
    found += [fault for path in templates for fault in faults(_template_text(path), str(path.relative_to(ROOT)))]
    assert found == []


def _template_text(template: Path) -> str:
    """A template without the fields of values that it reads."""
    return re.sub(r"\.\w+", "", template.read_text())


def test_the_glossary_is_short_and_sorted() -> None:
    _, _, glossary = (ROOT / "docs" / "reference" / "words.md").read_text().partition("## Glossary\n")
    terms = [row.split(" | ")[0].removeprefix("| ") for row in glossary.strip().splitlines()[2:]]
    assert 0 < len(terms) <= GLOSSARY and terms == sorted(terms)


def test_a_phrase_is_found_in_any_case_and_not_within_a_word_or_in_its_context() -> None:
    assert faults("Beside it, whole numbers; a wholesale\nWHOLE tensor", "page") == [
        "page:1: 'beside'; say: next to, with, overlapped with, compared with",
        "page:2: 'whole'; say: full, unsharded, complete, entire",
    ]
