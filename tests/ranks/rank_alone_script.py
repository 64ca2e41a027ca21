"""A rank among its peers, measured as a rank alone is: ``rank_alone_script.py PROGRAM OUT``."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed import Work

from graphpar.runtime import Pipeline, start
from graphpar.runtime.debugging.rank_alone import Clock, Memory, run
from graphpar.runtime.state.fully_sharded import local


def shapes(pipeline: Pipeline, found: dict[str, Any]) -> dict[str, list[int]]:
    """The shapes of what a rank holds, its gradients, and what a step returns."""
    held = {name: value for stage in pipeline.stages for name, value in stage.state_dict().items()}
    gradients = {f"grad {name}": each.grad for name, each in pipeline.named_parameters() if each.grad is not None}
    return {name: list(local(value).shape) for name, value in {**held, **gradients, **found}.items()}


@contextlib.contextmanager
def let_go_in_time() -> Iterator[None]:
    """Let gloo's threads drop a collective's tensors before the rank does: what they are the last to free is not seen as freed."""
    wait = Work.wait

    def waited(work: Work, *args: Any) -> Any:
        found = wait(work, *args)
        time.sleep(0.003)
        return found

    Work.wait = waited  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Work.wait = wait  # type: ignore[method-assign]


def main(program: str, out: Path) -> None:
    with start(120) as ranks, Memory(ranks.device) as memory:
        pipeline = Pipeline(program, ranks.device)
        found = run(pipeline, Clock(ranks.device), memory)
        (out / f"{ranks.rank}.json").write_text(json.dumps([memory.allocated, shapes(pipeline, found)]))


if __name__ == "__main__":
    with let_go_in_time():
        main(sys.argv[1], Path(sys.argv[2]))
