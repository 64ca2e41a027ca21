"""Group-relative policy optimisation (GRPO): a GPT learns to sort digits by what it samples itself.

    graphpar compile examples/grpo.py --devices 2 --mode train,generate -o out
    torchrun --nproc-per-node 2 examples/grpo.py out

Each step samples a group of answers to each prompt with the weights as they are, scores them, and makes answers that are better than their
group's mean more likely. A frozen copy of the first weights keeps the model from drifting. Tokens depend on the step, the number of the
answer and its position alone, so any number of processes gives the same rewards and losses.
"""

import copy
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIGITS, LENGTH, SEPARATOR = 6, 3, 6
PROMPTS, GROUP = 8, 8
WIDTH, HEADS, LAYERS = 32, 4, 4
CLIP, KL = 0.2, 0.02
POSITIONS = 2 * LENGTH  # of a prompt, the separator and an answer, without the last token, after which nothing comes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = (t.view(b, s, HEADS, d // HEADS).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(d, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, s, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(DIGITS + 1, WIDTH), nn.Embedding(POSITIONS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, DIGITS + 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class WithReference(nn.Module):
    """A policy, and what it was at first. Generation reads ``logits`` alone, so it does not run the reference."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = GPT()
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            reference = self.reference(tokens)
        return {"logits": self.policy(tokens), "reference": reference}


def model() -> nn.Module:
    torch.manual_seed(0)
    return WithReference()


def loss_fn(output: dict[str, Tensor], chosen: Tensor, sampled: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """The clipped surrogate and the divergence from the reference, a mean over the tokens of answers.

    Args:
        chosen: the token after each position [b, n].
        sampled: the log-probability with which it was sampled.
        advantage: of its answer.
        mask: 1 where it is of an answer.
    """
    own, first = (
        output[name].float().log_softmax(-1).gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
        for name in ("logits", "reference")
    )
    ratio = (own - sampled).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    apart = (first - own).exp() - (first - own) - 1
    return ((KL * apart - gain) * mask).sum() / mask.sum()


def optimizer(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.0)  # type: ignore[arg-type]


def prompts_of(step: int) -> list[list[int]]:
    """Digits and the separator, each prompt as often as its group has answers."""
    draw = random.Random(step)
    prompts = [[draw.randrange(DIGITS) for _ in range(LENGTH)] + [SEPARATOR] for _ in range(PROMPTS)]
    return [prompt for prompt in prompts for _ in range(GROUP)]


def rewards_of(prompts: list[list[int]], answers: list[list[int]]) -> Tensor:
    """The share of positions of each answer that are right [answers]."""
    right = [sorted(prompt[:LENGTH]) for prompt in prompts]
    return (torch.tensor(answers) == torch.tensor(right)).float().mean(1)


def batch_of(prompts: list[list[int]], answers: list[list[int]], logprobs: list[list[float]]) -> dict[str, Tensor]:
    """What a step of training takes."""
    rewards = rewards_of(prompts, answers).view(PROMPTS, GROUP)
    advantage = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    text = torch.tensor([prompt + answer for prompt, answer in zip(prompts, answers)])
    answered = (torch.arange(POSITIONS) >= LENGTH).float().expand(len(text), -1)
    return {
        "tokens": text[:, :-1],
        "chosen": text[:, 1:],
        "sampled": torch.cat([torch.zeros(len(text), LENGTH), torch.tensor(logprobs)], 1),
        "advantage": advantage.expand(-1, POSITIONS).contiguous(),
        "mask": answered.contiguous(),
    }


_some = batch_of(prompts_of(0), [[0] * LENGTH] * (PROMPTS * GROUP), [[-1.0] * LENGTH] * (PROMPTS * GROUP))
example_inputs = (_some["tokens"],)
example_targets = tuple(_some[name] for name in ("chosen", "sampled", "advantage", "mask"))


def train(pipeline: Any, steps: int) -> Iterator[tuple[float, float]]:
    """Yield the mean reward and the loss of each step."""
    own = pipeline.optimizer()
    for step in range(steps):
        prompts = prompts_of(step)
        found = pipeline.generate(prompts, LENGTH, do_sample=True, seed=step, logprobs=True)
        answers, logprobs = [each.tokens for each in found], [each.logprobs for each in found]
        loss = pipeline.step(batch_of(prompts, answers, logprobs), broadcast_loss=True)
        own.step()
        pipeline.zero_grad()
        yield rewards_of(prompts, answers).mean().item(), loss.item()


def main(folder: str, steps: str = "100") -> None:
    """Train a program that was compiled of this file, on this rank; rank 0 prints rewards and losses."""
    from graphpar.runtime import Pipeline, start

    with start() as ranks, Pipeline(folder, ranks.device) as pipeline:
        pipeline.load_weights()
        for step, (reward, loss) in enumerate(train(pipeline, int(steps))):
            if ranks.rank == 0:
                print(f"step {step}  reward {reward:.6f}  loss {loss:.6f}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
