"""A GPT with dropout and a sliced table of positions, which learns from what it samples: by a program, or by a loop of one's own."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from examples import gpt_dropout
from examples.gpt_dropout import BATCH, SEQ, VOCAB, loss_fn
from graphpar.runtime import Pipeline, sample_keys
from graphpar.runtime.generation.prompts import Sampling
from graphpar.verification.substituted import Substituted

SEED, NEW, CLIP = 5, 4, 0.5


class Model(gpt_dropout.Transformer):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.dropout(self.tokens(ids) + self.positions[: ids.shape[1]])
        return self.head(self.norm(self.blocks(x)))


def model() -> nn.Module:
    torch.manual_seed(0)
    return Model()


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)


def lr_schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.3 * step))


def prompts_of(step: int) -> list[list[int]]:
    draw = random.Random(step)
    return [[draw.randrange(VOCAB) for _ in range(draw.randrange(3, 7))] for _ in range(BATCH)]


def batch_of(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    ids, labels = torch.zeros(BATCH, SEQ, dtype=torch.long), torch.full((BATCH, SEQ), -100)
    for row, (prompt, answer) in enumerate(zip(prompts, answers)):
        text = torch.tensor([*prompt, *answer])
        ids[row, : len(text) - 1] = text[:-1]
        labels[row, len(prompt) - 1 : len(text) - 1] = text[len(prompt) :] * 7 % VOCAB
    return {"ids": ids, "labels": labels}


def train(pipeline: Pipeline, checkpoints: str, end: int) -> Iterator[tuple[float, float, list[list[int]]]]:
    """Yield the loss, the norm of gradients and the tokens of each step, from the last checkpoint to ``end``, where one is saved."""
    own = pipeline.optimizer()
    schedule = lr_schedule(own)
    if (before := pipeline.resume(checkpoints, own)) is not None:
        schedule.load_state_dict(before.data["schedule"])
    for step in range(before.step if before is not None else 0, end):
        answers = [
            each.tokens for each in pipeline.generate(prompts_of(step), NEW, do_sample=True, seed=step, logprobs=True)
        ]
        loss = pipeline.step(batch_of(prompts_of(step), answers), broadcast_loss=True)
        norm = pipeline.clip_grad_norm_(CLIP)
        own.step()
        schedule.step()
        pipeline.zero_grad()
        yield loss.item(), float(norm), answers
    pipeline.save_checkpoint(f"{checkpoints}/{end}", own, step=end, data={"schedule": schedule.state_dict()})


def eager(layouts: Sequence[Sequence[int]], steps: int) -> Iterator[tuple[float, float, list[list[int]]]]:
    """What :func:`train` yields from the first step on, by the model itself with the masks of its examples."""
    own = model()
    stepped = optimizer(own.parameters())
    schedule = lr_schedule(stepped)
    for step in range(steps):
        answers = []
        for number, prompt in enumerate(prompts_of(step)):
            text = list(prompt)
            for _ in range(NEW):
                with torch.no_grad():
                    logits = own.eval()(torch.tensor([text]))[:, -1]
                text += Sampling(do_sample=True, seed=step).tokens(logits, [text], range(number, number + 1)).tolist()
            answers.append(text[len(prompt) :])
        batch = batch_of(prompts_of(step), answers)
        with Substituted(sample_keys(SEED, step, BATCH), layouts, 1, 1):
            loss = loss_fn(own.train()(batch["ids"]), batch["labels"])
        stepped.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(own.parameters(), CLIP)
        stepped.step()
        schedule.step()
        yield loss.item(), norm.item(), answers
