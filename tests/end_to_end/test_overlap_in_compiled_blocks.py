"""Inductor leaves products between the start of a collective of tp and its wait."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphpar.cli.main import main
from graphpar.runtime.torch_versions import COMPILES_COLLECTIVES
from tests.tools.programs import EXAMPLES

START, WAIT, PRODUCT = "reduce_scatter_tensor.default(", "wait_tensor.default(", "extern_kernels."


@pytest.mark.slow
@pytest.mark.skipif(not COMPILES_COLLECTIVES, reason="this torch loses collectives in blocks that it compiles")
def test_gradients_of_weights_are_computed_while_those_of_inputs_are_summed(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    assert main(["compile", str(EXAMPLES / "llama.py"), "--mesh", "tp=2", "--sp", "-o", out]) == 0
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--local-ranks-filter", "0"]
    environment = {"TORCH_LOGS": "output_code", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, *command, f"{out}/train.py", "--steps", "1", "--compile"],
        env=os.environ | environment, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]

    text = run.stdout + run.stderr
    backward = [graph for graph in re.split(r"def call\(", text)[1:] if "tangents_1" in graph]
    assert backward and max(products for graph in backward for products in between(graph)) >= 2


def between(graph: str) -> Iterator[int]:
    """Yield how many products stand between the start of each sum and the first wait after it."""
    for begun in re.split(re.escape(START), graph)[1:]:
        yield begun.partition(WAIT)[0].count(PRODUCT)
