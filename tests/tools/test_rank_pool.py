"""The ranks of tests: one that dies without a word is started again once, and what fails each time is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphpar.runtime.errors import LaunchError
from tests.tools.rank_pool import WITHOUT_A_WORD, RankPool

DIES = """
import os, pathlib, sys
times = pathlib.Path(sys.argv[1])
with times.open("a") as file:
    file.write("x")
if len(times.read_text()) <= int(sys.argv[2]):
    os._exit(1)
"""


@pytest.mark.costly
@pytest.mark.parametrize("deaths", [1, 2])
def test_a_launch_whose_rank_died_is_done_again_once(deaths: int, pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text(DIES)
    arguments = [str(tmp_path / "times"), str(deaths)]
    with pytest.warns(UserWarning, match=f"runs again on new ranks: .*{WITHOUT_A_WORD}"):
        if deaths == 1:
            pool.torchrun(tmp_path / "dies.py", arguments, nproc=1, timeout_s=60)
        else:
            with pytest.raises(LaunchError, match=WITHOUT_A_WORD):
                pool.torchrun(tmp_path / "dies.py", arguments, nproc=1, timeout_s=60)
    assert (tmp_path / "times").read_text() == "xx"
