"""A GPT with a head of values beside that of tokens; its loss is how far both are from what the batch says."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from examples.grpo import DIGITS, GPT, LENGTH, POSITIONS, SEPARATOR, WIDTH

NEW = LENGTH
PROMPTS = [[number % DIGITS, number // 2 % DIGITS, 3, SEPARATOR] for number in range(8)]


class ActorCritic(nn.Module):
    """The value of a position is computed from the embedding of the same token that the logits follow."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = GPT()
        self.actor.head, self.head = nn.Identity(), nn.Linear(WIDTH, DIGITS + 1)  # type: ignore[assignment]
        self.value = nn.Linear(WIDTH, 1)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        """[b, n] -> logits [b, n, tokens], values [b, n]"""
        hidden = self.actor(tokens)
        return {"values": self.value(hidden).squeeze(-1), "logits": self.head(hidden)}


def model() -> nn.Module:
    torch.manual_seed(1)
    return ActorCritic()


def loss_fn(output: dict[str, Tensor], chosen: Tensor, sampled: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    own = output["logits"].float().log_softmax(-1).gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
    return ((own - sampled).abs() * mask + (output["values"] - returns).square()).sum()


def batch_of(answers: list[list[int]], logprobs: list[list[float]]) -> dict[str, Tensor]:
    text = torch.tensor([prompt + answer for prompt, answer in zip(PROMPTS, answers)])
    return {
        "tokens": text[:, :-1],
        "chosen": text[:, 1:],
        "sampled": torch.cat([torch.zeros(len(text), LENGTH), torch.tensor(logprobs)], 1),
        "returns": torch.ones(len(text), POSITIONS),
        "mask": (torch.arange(POSITIONS) >= LENGTH).float().expand(len(text), -1).contiguous(),
    }
