"""Two networks in one module: preferences (DPO, KTO) with a frozen reference, and distillation from a teacher of another size.

Each model is an ordinary module whose forward applies its networks to what it is given, and returns the loss, or outputs for a loss
function with targets. ``CASES`` lists them with their inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphpar as gp

VOCABULARY, LENGTH, ROWS = 32, 6, 8


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        before = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        x = x + self.mix(before)
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Network(nn.Module):
    """A small language model: logits of every token."""

    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def logits_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


def log_probability(network: nn.Module, ids: Tensor, answer: Tensor) -> Tensor:
    """The log-probability of the tokens of each answer, [rows]; ``answer``: 1 where a token belongs to it."""
    logits = logits_of(network(ids))[:, :-1]
    each = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (each * answer[:, 1:]).sum(-1)


class Pair(nn.Module):
    """A policy and its frozen reference."""

    def __init__(self, build: Callable[[], nn.Module] = Network, beta: float = 0.5) -> None:
        super().__init__()
        self.policy = build()
        self.reference = build().requires_grad_(False)
        self.beta = beta


class DPO(Pair):
    def forward(self, chosen: Tensor, rejected: Tensor, chosen_answer: Tensor, rejected_answer: Tensor) -> Tensor:
        gained = log_probability(self.policy, chosen, chosen_answer) - log_probability(
            self.policy, rejected, rejected_answer
        )
        with torch.no_grad():
            expected = log_probability(self.reference, chosen, chosen_answer) - log_probability(
                self.reference, rejected, rejected_answer
            )
        return -F.logsigmoid(self.beta * (gained - expected)).mean()


class ReferenceFirst(Pair):
    """As DPO, in another order, and without ``no_grad``: parameters that are frozen have no gradient anyway."""

    def forward(self, chosen: Tensor, rejected: Tensor, chosen_answer: Tensor, rejected_answer: Tensor) -> Tensor:
        margins = []
        for ids, answer in ((chosen, chosen_answer), (rejected, rejected_answer)):
            expected = log_probability(self.reference, ids, answer)
            margins.append(log_probability(self.policy, ids, answer) - expected)
        return -F.logsigmoid(self.beta * (margins[0] - margins[1])).mean()


class PrecomputedDPO(nn.Module):
    """The reference's log-probabilities are inputs."""

    def __init__(self, build: Callable[[], nn.Module] = Network, beta: float = 0.5) -> None:
        super().__init__()
        self.policy, self.beta = build(), beta

    def forward(
        self,
        chosen: Tensor,
        rejected: Tensor,
        chosen_answer: Tensor,
        rejected_answer: Tensor,
        reference_chosen: Tensor,
        reference_rejected: Tensor,
    ) -> Tensor:
        gained = log_probability(self.policy, chosen, chosen_answer) - log_probability(
            self.policy, rejected, rejected_answer
        )
        return -F.logsigmoid(self.beta * (gained - (reference_chosen - reference_rejected))).mean()


class KTO(Pair):
    """Answers that are desirable or not; ``baseline``: the divergence of policy and reference, as it was measured before the step."""

    def forward(self, ids: Tensor, answer: Tensor, desirable: Tensor, baseline: Tensor) -> Tensor:
        gained = log_probability(self.policy, ids, answer) - log_probability(self.reference, ids, answer)
        towards = torch.where(desirable, gained - baseline, baseline - gained)
        weight = torch.where(desirable, 1.0, 0.75)
        return (weight * (1 - torch.sigmoid(self.beta * towards))).mean()


class BatchKTO(Pair):
    """The baseline is that of the batch: examples depend on each other."""

    def forward(self, ids: Tensor, answer: Tensor, desirable: Tensor, others: Tensor) -> Tensor:
        gained = log_probability(self.policy, ids, answer) - log_probability(self.reference, ids, answer)
        with torch.no_grad():
            divergence = log_probability(self.policy, others, answer) - log_probability(self.reference, others, answer)
            baseline = divergence.mean().clamp(min=0)
        towards = torch.where(desirable, gained - baseline, baseline - gained)
        return (1 - torch.sigmoid(self.beta * towards)).mean()


class Distillation(nn.Module):
    """Returns the logits of both networks: the loss function takes them and the targets."""

    def __init__(self, student: Callable[[], nn.Module], teacher: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.student, self.teacher = student(), teacher().requires_grad_(False).eval()

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        return {"student": logits_of(self.student(ids)), "teacher": logits_of(self.teacher(ids))}


def distillation_loss(outputs: dict[str, Tensor], labels: Tensor, temperature: float = 2.0) -> Tensor:
    student, teacher = outputs["student"].flatten(0, 1), outputs["teacher"].flatten(0, 1)
    soft = F.kl_div((student / temperature).log_softmax(-1), (teacher / temperature).softmax(-1), reduction="batchmean")
    return 0.5 * temperature**2 * soft + 0.5 * F.cross_entropy(student, labels.flatten())


def ids(seed: int, rows: int = ROWS) -> Tensor:
    return torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


def answers(seed: int, rows: int = ROWS) -> Tensor:
    begins = torch.randint(1, LENGTH - 1, (rows, 1), generator=torch.Generator().manual_seed(seed))
    return (torch.arange(LENGTH) >= begins).float()


def preferences() -> dict[str, Tensor]:
    return {"chosen": ids(1), "rejected": ids(2), "chosen_answer": answers(3), "rejected_answer": answers(4)}


def unpaired() -> dict[str, Tensor]:
    return {"ids": ids(1), "answer": answers(3), "desirable": torch.arange(ROWS) % 3 > 0}


def llama(width: int = 16, depth: int = 4) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=depth, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2(width: int = 24, depth: int = 5) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=width, n_layer=depth, n_head=2, n_positions=LENGTH, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


@dataclass(frozen=True)
class Case:
    """How to export a model."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    trained: str
    frozen: str
    loss_fn: Callable[..., Tensor] | None = None
    targets: tuple[Tensor, ...] = field(default=())

    def export(self) -> gp.Program:
        return gp.export(self.build, (), self.inputs(), loss_fn=self.loss_fn, targets=self.targets)


def _distillation(student: Callable[[], nn.Module], teacher: Callable[[], nn.Module]) -> Case:
    return Case(
        lambda: Distillation(student, teacher),
        lambda: {"ids": ids(1)},
        "student",
        "teacher",
        distillation_loss,
        (ids(5),),
    )


CASES = {
    "DPO": Case(DPO, preferences, "policy", "reference"),
    "DPO, the reference first": Case(ReferenceFirst, preferences, "policy", "reference"),
    "KTO": Case(KTO, lambda: {**unpaired(), "baseline": torch.linspace(-1, 1, ROWS)}, "policy", "reference"),
    "a wide and deep teacher": _distillation(lambda: Network(16, 3), lambda: Network(24, 5)),
    "a narrow and flat teacher": _distillation(lambda: Network(16, 4), lambda: Network(8, 2)),
    "DPO of a Llama": Case(lambda: DPO(llama), preferences, "policy", "reference"),
    "a Llama and its GPT-2": _distillation(lambda: llama(16, 3), gpt2),
}
BATCHED_KTO = Case(BatchKTO, lambda: {**unpaired(), "others": ids(9)}, "policy", "reference")
