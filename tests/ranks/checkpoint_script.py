"""Checkpoints of small models: the models, an eager loop that knows nothing of graphpar, and a script that trains programs on ranks.

The script gets a file of jobs. Each loads weights or a checkpoint, trains some steps of AdamW with two groups, saves, and writes its
losses.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from threading import Timer
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from graphpar.runtime import Pipeline, RuntimeProgramError, start

ROWS, TOKENS, WIDTH, HIDDEN = 8, 6, 12, 10
LR, GROWTH = 0.02, 1.5


class Block(nn.Module):
    """Attention with a fused projection of 3 heads, and a gated unit with a fused one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        gate, value = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class Transformer(nn.Module):
    """Two layers over a vocabulary; the head is tied to the embedding. ``steps`` is a number, and an integer buffer."""

    def __init__(self, words: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(words, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, words, bias=False)
        self.head.weight = self.tokens.weight
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("version", torch.tensor(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x) * self.scale)
        return logits


class Pretrained(nn.Module):
    """A model of transformers: Mixtral, with experts, or Llama, with a tied head and groups of heads."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        from tests.models import architectures

        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
        llama = LlamaConfig(vocab_size=70, num_hidden_layers=2, tie_word_embeddings=True, **sizes)
        self.model = architectures.build("mixtral") if kind == "moe" else LlamaForCausalLM(llama)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(ids).logits
        return logits


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build(kind: str) -> nn.Module:
    """Make a model: "moe", "llama", or a transformer with so many words."""
    return Transformer(int(kind)) if kind.isdecimal() else Pretrained(kind)


def batch_of(kind: str, step: int) -> dict[str, Tensor]:
    """The global batch of a step."""
    words = int(kind) if kind.isdecimal() else 64
    generator = torch.Generator().manual_seed(100 + step)
    ids, labels = (torch.randint(3, words, (ROWS, TOKENS), generator=generator) for _ in range(2))
    return {"ids": ids, "labels": labels}


def groups_of(named: Iterable[tuple[str, nn.Parameter]], lr: float) -> list[dict[str, Any]]:
    """Weights of matrices decay, others do not; by name, since a rank may hold slices."""
    pairs = list(named)
    plain = [parameter for name, parameter in pairs if "norm" in name or "bias" in name or "scale" in name]
    decayed = [parameter for name, parameter in pairs if not any(parameter is other for other in plain)]
    return [{"params": decayed, "lr": lr, "weight_decay": 0.1}, {"params": plain, "lr": lr / 2, "weight_decay": 0.0}]


def optimizer_of(
    named: Iterable[tuple[str, nn.Parameter]], kind: str = "AdamW", lr: float = LR
) -> torch.optim.Optimizer:
    groups = groups_of(named, lr)
    if kind == "AdamW":
        return torch.optim.AdamW(groups, lr=lr, eps=1e-3, betas=(0.8, 0.95))
    options = {"SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.5}}.get(kind, {})
    optimizer: torch.optim.Optimizer = getattr(torch.optim, kind)(groups, lr=lr, **options)
    return optimizer


@cache
def eager(kind: str, steps: int) -> tuple[list[float], dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Train on one device: the losses, the parameters, and the optimizer's state by name."""
    model = build(kind)
    optimizer = optimizer_of(model.named_parameters())
    losses = []
    for step in range(steps):
        batch = batch_of(kind, step)
        loss = loss_fn(model(batch["ids"]), batch["labels"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduled(optimizer)
        losses.append(loss.item())
    names = {parameter: name for name, parameter in model.named_parameters()}
    return losses, dict(model.state_dict()), {names[p]: dict(state) for p, state in optimizer.state.items()}


def scheduled(optimizer: torch.optim.Optimizer) -> None:
    """Change the learning rate, as a schedule does."""
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] / GROWTH


def main(jobs: Path) -> None:
    with start(120.0) as ranks:
        for job in json.loads(jobs.read_text()):
            _run(job, ranks.device)


def _run(job: dict[str, Any], device: torch.device) -> None:
    report: dict[str, Any] = {"losses": []}
    try:
        with Pipeline(job["program"], device, seed=job.get("seed", 0)) as pipeline:
            _train(pipeline, job, report)
    except RuntimeProgramError as error:
        report["error"] = str(error)
    if dist.get_rank() == 0:
        Path(job["report"]).write_text(json.dumps(report))


def _train(pipeline: Pipeline, job: dict[str, Any], report: dict[str, Any]) -> None:
    begin, end = job.get("steps", (0, 0))
    kept = {"memory": job["memory"][dist.get_rank()]} if "memory" in job else {}  # of this rank's node
    # With another learning rate: that of the checkpoint counts.
    lr = LR if job.get("load") is None else 1.0
    optimizer = optimizer_of(pipeline.named_parameters(), job.get("optimizer", "AdamW"), lr)
    saved = None if job.get("weights_only") else optimizer
    if kept and (resumed := pipeline.resume(job["folder"], saved, **kept)) is not None:
        begin = resumed.step
        report |= {"step": resumed.step, "data": dict(resumed.data), "path": str(resumed.path)}
        pipeline.save_snapshot(job["folder"], saved, step=begin, data=resumed.data, **kept)
    elif job.get("load") is None:
        pipeline.load_weights(job["weights"])
    else:
        loaded = pipeline.load_checkpoint(job["load"], saved)
        report |= {"step": loaded.step, "data": dict(loaded.data), "seed": pipeline.seed, "path": str(loaded.path)}
        if job.get("copy"):
            pipeline.save_checkpoint(job["copy"], saved, step=loaded.step)
    for step in range(begin, end):
        loss = pipeline.step(batch_of(job["kind"], step), broadcast_loss=True)
        assert loss is not None
        optimizer.step()
        pipeline.zero_grad()
        scheduled(optimizer)
        report["losses"].append(loss.item())
        if kept and (step + 1) % job["snapshot_every"] == 0:
            pipeline.save_snapshot(job["folder"], saved, step=step + 1, data={"rows": (step + 1) * ROWS}, **kept)
        if kept and step + 1 == job.get("killed_at") and dist.get_rank() in job["killed"]:
            Timer(job["killed_after"], os.kill, (os.getpid(), signal.SIGKILL)).start()
        if job.get("folder") and (step + 1) % job.get("save_every", 1) == 0:
            path, wait = Path(job["folder"]) / str(step + 1), job.get("wait", True)
            pipeline.save_checkpoint(path, saved, step=step + 1, keep=job.get("keep"), wait=wait)
            first = begin if wait else begin + 1  # a save waits for the one before it: from here one is whole
            if step == first and job.get("killed_after") is not None and dist.get_rank() in job["killed"]:
                Timer(job["killed_after"], os.kill, (os.getpid(), signal.SIGKILL)).start()
    if job.get("save"):
        pipeline.save_checkpoint(job["save"], saved, step=end, data={"rows": end * ROWS}, keep=job.get("keep"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
