"""One rank of programs that generate.

As a script (under torchrun): FOLDER PROGRAM...; FOLDER has ``prompts.json`` and, for each program, ``PROGRAM.safetensors``, or what the
program ``trained`` makes of ``batch.safetensors`` first: a checkpoint. It writes what it generates (``PROGRAM-rank_N.json``) into FOLDER.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from graphpar.runtime import Pipeline, start

NEW = 32
DRAWN: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 11}


def main(folder: str, *programs: str) -> None:
    root = Path(folder)
    prompts = json.loads((root / "prompts.json").read_text())
    with start(200) as ranks:
        if (root / "trained").is_dir():
            train(root, ranks.device)
        for program in programs:
            with Pipeline(root / program, ranks.device) as pipeline:
                if (root / "checkpoints").is_dir():
                    pipeline.load_checkpoint(root / "checkpoints")
                else:
                    pipeline.load_weights(root / f"{program}.safetensors", strict=False)
                shown: list[list[int]] = [[] for _ in prompts]
                greedy = pipeline.generate(prompts, NEW, show=lambda number, token, to=shown: to[number].append(token))
                assert shown == greedy
                drawn = pipeline.generate(prompts, NEW, **DRAWN)
                cache = pipeline.cache_bytes
                with messages() as sent:
                    one = pipeline.generate(torch.tensor([prompts[0]]), 4)
                seen = {"greedy": greedy, "drawn": drawn, "one": one, "cache": cache, "messages": sent}
                (root / f"{program}-rank_{ranks.rank}.json").write_text(json.dumps(seen))


@contextmanager
def messages() -> Iterator[dict[str, list[str]]]:
    """Note over which groups activations and tokens go, by their dtype: tokens go with log-probabilities in float64."""
    sent: dict[str, list[str]] = {"activations": [], "tokens": []}

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(tensor: torch.Tensor, *args: Any, group: dist.ProcessGroup | None = None, **options: Any) -> Any:
            kind = "tokens" if tensor.dtype == torch.float64 else "activations"
            sent[kind].append("" if group is None else group.group_name)
            return function(tensor, *args, group=group, **options)

        return noted

    before = {name: getattr(dist, name) for name in ("isend", "recv", "irecv", "broadcast")}
    for name, function in before.items():
        setattr(dist, name, noting(function))
    try:
        yield sent
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


def train(root: Path, device: torch.device) -> None:
    with Pipeline(root / "trained", device) as pipeline:
        pipeline.load_weights()
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            pipeline.step(load_file(root / "batch.safetensors"))
            optimizer.step()
            pipeline.zero_grad()
        pipeline.save_weights(root / "trained.safetensors")
        pipeline.save_checkpoint(root / "checkpoints" / "2", optimizer, step=2)


if __name__ == "__main__":
    main(*sys.argv[1:])
