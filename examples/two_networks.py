"""Direct preference optimisation (DPO): a policy and its frozen reference, each on the chosen and on the rejected answer."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH, BATCH, BETA = 211, 64, 4, 8, 16, 8, 0.1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, width // HEADS).transpose(1, 2)
            for part in self.qkv(self.ln_1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def log_probability(network: nn.Module, ids: Tensor, answer: Tensor) -> Tensor:
    """The log-probability of each row's answer, [rows]; ``answer``: 1 where a token belongs to it."""
    each = network(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (each * answer[:, 1:]).sum(-1)


class DPO(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy = LanguageModel()
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)

    def forward(self, chosen: Tensor, rejected: Tensor, chosen_answer: Tensor, rejected_answer: Tensor) -> Tensor:
        gained, expected = (
            log_probability(network, chosen, chosen_answer) - log_probability(network, rejected, rejected_answer)
            for network in (self.policy, self.reference)
        )
        return -F.logsigmoid(BETA * (gained - expected)).mean()


def model() -> nn.Module:
    return DPO()


def example_inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    chosen, rejected = torch.randint(VOCABULARY, (2, BATCH, LENGTH), generator=generator)
    prompt = torch.tensor([4, 7, 2, 5, 9, 3, 6, 8])[:, None]
    answer = (torch.arange(LENGTH) >= prompt).float()
    return {"chosen": chosen, "rejected": rejected, "chosen_answer": answer, "rejected_answer": answer.clone()}
