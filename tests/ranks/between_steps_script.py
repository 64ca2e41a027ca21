"""One rank of programs that generate between steps of training.

As a script (under torchrun): FOLDER STEPS PROGRAM...; each PROGRAM in FOLDER is of ``examples/grpo.py``, of
``tests.models.actor_critic`` where its name begins with ``gap``, or of ``tests.models.dropout_sampler`` where it begins with ``drops``:
each of these goes on for STEPS where the one before ended. It writes what it finds (``PROGRAM-rank_N.json``) into FOLDER.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from examples import grpo
from graphpar.runtime import Pipeline, start
from tests.models import actor_critic, dropout_sampler


def main(folder: str, steps: str, *programs: str) -> None:
    root = Path(folder)
    with start(200) as ranks:
        for number, program in enumerate(programs, 1):
            with Pipeline(root / program, ranks.device, seed=dropout_sampler.SEED) as pipeline:
                pipeline.load_weights()
                found: Any
                if program.startswith("gap"):
                    found = gaps(pipeline)
                elif program.startswith("drops"):
                    found = list(dropout_sampler.train(pipeline, str(root / "checkpoints"), number * int(steps)))
                else:
                    found = list(grpo.train(pipeline, int(steps)))
                pipeline.assert_idle()
            (root / f"{program}-rank_{ranks.rank}.json").write_text(json.dumps(found))


def gaps(pipeline: Pipeline) -> dict[str, float]:
    """Return how far a step is from what generation says of its tokens, and from what evaluation says; before and after a step."""
    found = {}
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    for moment in ("before", "after"):
        answers = pipeline.generate(actor_critic.PROMPTS, actor_critic.NEW, do_sample=True, logprobs=True)
        batch = actor_critic.batch_of([each.tokens for each in answers], [each.logprobs for each in answers])
        evaluated = pipeline.eval(batch, outputs=["logits", "values"])
        if evaluated is not None:
            own = evaluated["logits"].float().log_softmax(-1).gather(-1, batch["chosen"].unsqueeze(-1)).squeeze(-1)
            exact = batch | {"sampled": own, "returns": evaluated["values"].float()}
            sampled = ((own - batch["sampled"]).abs() * batch["mask"]).max().item()
            found[f"sampled {moment}"] = sampled
        exact = batch if evaluated is None else exact
        loss = pipeline.step({name: exact[name] for name in pipeline.data.names})
        pipeline.zero_grad()
        if loss is not None:
            found[f"step {moment}"] = loss.item()
        pipeline.step(batch)
        optimizer.step()
        pipeline.zero_grad()
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
