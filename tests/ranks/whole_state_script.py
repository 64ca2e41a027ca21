"""A script for ranks: what a step of a pipeline holds of its sharded state beside the shards, whenever a stage has run.

    whole_state_script.py PROGRAM BATCH OUT

Writes OUT/{rank}.json: the place on pp, and the most bytes at one time of gathered parameters and of gradients that are not reduced.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from graphpar.runtime import Pipeline, start
from graphpar.runtime.stages.schedules import ShardedStage
from graphpar.runtime.state.fully_sharded import shards_of

RUNS = ("forward_maybe_with_nosync", "backward_maybe_with_nosync")


def _whole(pipeline: Pipeline) -> tuple[int, int]:
    gathered = gradients = 0
    for shard in (shard for stage in pipeline.stages for shard in shards_of(stage)):
        if shard.sharded_state == ShardedState.UNSHARDED:
            gathered += shard._unsharded_param.nbytes
        summed: list[Tensor | None] = [shard.unsharded_accumulated_grad, shard._unsharded_param.grad]
        gradients += sum(each.nbytes for each in summed if each is not None)
    return gathered, gradients


def main(program: str, batch: str, out: Path) -> None:
    most = [0, 0]
    with start(60.0) as ranks:
        pipeline = Pipeline(program, ranks.device)
        pipeline.load_weights()
        pipeline.step(load_file(batch))  # makes what later steps have
        pipeline.zero_grad()
        for name in RUNS:
            plain = getattr(ShardedStage, name)

            def watched(self: Any, *args: Any, plain: Any = plain, **options: Any) -> Any:
                found = plain(self, *args, **options)
                most[:] = map(max, most, _whole(pipeline))
                return found

            setattr(ShardedStage, name, watched)
        pipeline.step(load_file(batch))
        place = pipeline.groups.place["pp"]
        (out / f"{pipeline.rank}.json").write_text(json.dumps([place, *most]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
