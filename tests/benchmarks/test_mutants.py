"""Faults that are planted: one small change each, of what runs, in a text that still parses."""

from __future__ import annotations

import ast

from benchmarks import mutants

SOURCE = '''
"""What it is: 1 < 2."""

LIMIT = 3


def chosen(names: list[str | None], prefix: str = "a", whole: bool = True) -> list[str]:
    """Not here: a == b."""
    kept = sorted(name.strip() for name in names if name and name.startswith(prefix))
    if not kept:
        raise ValueError(f"none of {len(names) + 1}")
    kept.append(str(min(len(kept), LIMIT - 1)))
    return join(kept, names, sep="é") if whole else kept.copy()
'''


def test_each_kind_of_fault_is_found_where_it_can_be() -> None:
    found = mutants.faults("a.py", SOURCE)

    texts = {(fault.kind, fault.planted(SOURCE).splitlines()[fault.line - 1].strip()) for fault in found}
    assert ("off by one", "LIMIT = 4") in texts
    assert (
        "wrong value",
        'def chosen(names: list[str | None], prefix: str = "a", whole: bool = False) -> list[str]:',
    ) in texts
    assert ("not removed", "if (kept):") in texts
    assert ("statement dropped", "pass") in texts
    assert (
        "order dropped",
        "kept = list((name.strip() for name in names if name and name.startswith(prefix)))",
    ) in texts
    assert ("off by one", "kept.append(str(min(len(kept), (LIMIT))))") in texts
    assert ("copy dropped", 'return join(kept, names, sep="é") if whole else kept') in texts
    assert ("arguments swapped", "return join(names, kept, sep='é') if whole else kept.copy()") in texts
    kinds = {
        "and, or",
        "equal for prefix",
        "filter dropped",
        "the other function",
        "branches swapped",
        "keyword dropped",
    }
    assert kinds <= {fault.kind for fault in found}


def test_what_does_not_run_stays_and_every_text_parses() -> None:
    for fault in mutants.faults("a.py", SOURCE):
        tree = ast.parse(fault.planted(SOURCE))
        assert ast.get_docstring(
            tree
        ) == "What it is: 1 < 2." and "raise ValueError(f'none of {len(names) + 1}')" in ast.unparse(tree)
        assert "names: list[str | None]" in ast.unparse(tree)


def test_a_seed_draws_the_same_faults_of_the_product() -> None:
    first, again = (mutants.drawn(5, 1, "graphpar/schedules") for _ in range(2))

    assert first == again != mutants.drawn(5, 2, "graphpar/schedules")
    for fault in first:
        source = (mutants.ROOT / fault.path).read_text()
        assert fault.planted(source) != source
        assert mutants.naming(fault)
