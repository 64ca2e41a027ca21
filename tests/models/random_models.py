"""Small models that draw random numbers: diffusion with DropPath, a variational autoencoder with a noisy router, a masked autoencoder."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tools.equality import Case


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.down(F.gelu(self.up(self.norm(x + t[:, None]))))
        if self.training:  # DropPath
            mask = h.new_empty((h.shape[0],) + (1,) * (h.ndim - 1)).bernoulli_(0.8)
            h = h * mask.div_(0.8)
        return x + self.dropout(h)


class Diffusion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.times, self.first, self.last = nn.Embedding(50, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.blocks = nn.ModuleList(_Block() for _ in range(4))
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-4, 0.02, 50), 0))

    def forward(self, x: Tensor) -> Tensor:
        t = torch.randint(0, 50, (x.shape[0],), device=x.device).long()
        noise = torch.randn_like(x)
        kept = self.kept[t][:, None, None]
        h, time = self.first(kept.sqrt() * x + (1 - kept).sqrt() * noise), self.times(t)
        for block in self.blocks:
            h = block(h, time)
        return F.mse_loss(self.last(h), noise)


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.mean, self.spread = nn.Linear(16, 32), nn.Linear(32, 8), nn.Linear(32, 8)
        self.router, self.experts = nn.Linear(8, 4), nn.Linear(8, 32)
        self.decoder, self.last = nn.Linear(8, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.encoder(x))
        mean, spread = self.mean(h), self.spread(h)
        z = mean + torch.randn_like(spread) * torch.exp(0.5 * spread)
        scores = self.router(z) + torch.empty_like(mean[:, :4]).normal_(0.0, 0.5)
        top = scores.topk(2, -1)
        weights = torch.zeros_like(scores).scatter(-1, top.indices, top.values.softmax(-1))
        weights = weights + F.gumbel_softmax(self.router(z), hard=True)
        z = z + (self.experts(z).unflatten(-1, (4, 8)) * weights[..., None]).sum(-2)
        z = z * torch.floor(0.8 + torch.rand(1, device=x.device)) / 0.8  # depth, once for the batch
        z = z + 0.1 * z[:, torch.randperm(8, device=x.device)]
        z = z + weights.gather(-1, torch.multinomial(weights.detach() + 0.1, 2)).mean(-1, keepdim=True)
        return (
            F.mse_loss(self.last(F.relu(self.decoder(z))), x) - 0.5 * (1 + spread - mean.pow(2) - spread.exp()).mean()
        )


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Linear(12, 16), nn.Linear(16, 12)
        self.places, self.missing = nn.Parameter(torch.randn(1, 8, 16) * 0.1), nn.Parameter(torch.randn(16) * 0.1)
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True) for _ in range(2)
        )
        self.decoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, patches: Tensor) -> Tensor:
        b, n, _ = patches.shape
        order = torch.rand(b, n, device=patches.device).argsort(1)
        back = order.argsort(1)
        h = (self.embed(patches) + self.places).gather(1, order[:, :4, None].expand(-1, -1, 16))
        for layer in self.encoder:
            h = layer(h)
        h = torch.cat([h, self.missing.expand(b, n - 4, -1)], 1).gather(1, back[..., None].expand(-1, -1, 16))
        loss = (self.last(self.decoder(h + self.places)) - patches).pow(2).mean(-1)
        masked = (back >= 4).float()
        return (loss * masked).sum() / masked.sum()


def case(name: str) -> Case:
    """Make a model and a batch of four."""
    torch.manual_seed(0)
    model, shape = {"diffusion": (Diffusion, (6, 8)), "autoencoder": (Autoencoder, (16,)), "masked": (Masked, (8, 12))}[
        name
    ]
    return Case(model().train(), (torch.randn(4, *shape),))
