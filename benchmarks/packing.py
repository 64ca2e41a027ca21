"""Tokens a second of documents that are packed into rows, and of one padded document a row, by the same program.

    python -m benchmarks.packing [--steps 6] [--json]

A small Llama of transformers on one process; lengths of documents are drawn from a log-normal distribution. Steps alternate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import graphpar as gp
from graphpar.runtime import PackedDataset, Pipeline, pad, start

LENGTH, ROWS, VOCABULARY, END = 512, 8, 512, 0
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
    use_cache=False,
)  # fmt: skip


def model() -> LlamaForCausalLM:
    """Build the model."""
    return LlamaForCausalLM(CONFIG)


def documents(count: int) -> list[list[int]]:
    """Draw documents, each with its end."""
    drawn = np.random.default_rng(0)
    lengths = np.clip(drawn.lognormal(4.5, 0.9, count).astype(int), 4, LENGTH)
    return [[*drawn.integers(1, VOCABULARY, length - 1).tolist(), END] for length in lengths.tolist()]


def padded(found: list[list[int]]) -> dict[str, Tensor]:
    """Return a batch of one document a row."""
    ids = torch.stack([pad(torch.tensor(each), LENGTH, END) for each in found])
    labels = torch.stack([pad(torch.tensor(each), LENGTH) for each in found])
    return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(LENGTH).repeat(len(found), 1)}


def main() -> None:
    """Print tokens a second of both, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    texts = documents(4000)
    program = gp.export(model, kwargs=padded(texts[:ROWS]))
    seconds: dict[str, list[float]] = {"packed": [], "padded": []}
    tokens: dict[str, list[int]] = {"packed": [], "padded": []}
    with tempfile.TemporaryDirectory() as folder:
        gp.partition(program, gp.plan(program)).save(f"{folder}/out")
        np.save(f"{folder}/tokens.npy", np.array([token for each in texts for token in each], dtype=np.int32))
        rows = PackedDataset(
            Path(folder) / "tokens.npy", length=LENGTH, vocabulary=VOCABULARY, end=END, ids="input_ids", labels="labels",
            positions="position_ids", ahead=0,
        )  # fmt: skip
        with start() as ranks, Pipeline(f"{folder}/out", ranks.device, seed=0) as pipeline:
            pipeline.initialise(model)
            optimizer = pipeline.optimizer()
            for step in range(args.steps + 1):
                taken = [rows[step * ROWS + row] for row in range(ROWS)]
                batches = {
                    "packed": {name: torch.stack([row[name] for row in taken]) for name in taken[0]},
                    "padded": padded(texts[step * ROWS : (step + 1) * ROWS]),
                }
                for kind, batch in batches.items():
                    began = time.perf_counter()
                    pipeline.step(batch, step=step)
                    optimizer.step()
                    pipeline.zero_grad()
                    if step:  # the first warms up
                        seconds[kind].append(time.perf_counter() - began)
                        tokens[kind].append(int((batch["labels"] != -100).sum()))
    rate = {kind: sum(tokens[kind]) / sum(seconds[kind]) for kind in seconds}
    found = {
        "tokens_per_s": rate, "ratio": rate["packed"] / rate["padded"], "filled": rows.filled,
        "step_s": {kind: statistics.median(values) for kind, values in seconds.items()},
    }  # fmt: skip
    if args.json:
        print(json.dumps(found))
    else:
        for kind in rate:
            print(f"{kind}: {rate[kind]:,.0f} tokens a second, {found['step_s'][kind]:.2f} s a step")  # type: ignore[index]
        print(f"ratio {found['ratio']:.2f}; rows are {rows.filled:.1%} full")


if __name__ == "__main__":
    main()
