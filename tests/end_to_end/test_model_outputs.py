"""A program for training also returns what its model returns, measures it, and lists the losses of microbatches: as one device does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import graphpar as gp
from graphpar.runtime import RuntimeProgramError
from graphpar.runtime.manifest import Manifest, load_manifest
from graphpar.runtime.stages.model_outputs import _sums
from tests.ranks import model_outputs_script
from tests.tools.rank_pool import RankPool

ROWS, POSITIONS, WORDS = 8, 8, 32


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(attended))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """Returns logits, the states after each layer, a penalty that is a mean over the batch, and what no loss is computed from."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, WORDS, bias=False)

    def forward(self, ids: Tensor) -> dict[str, Any]:
        x, states = self.embed(ids), []
        for layer in self.layers:
            x = layer(x)
            states.append(x)
        x = self.norm(x)
        logits = self.head(x)
        return {
            "logits": logits,
            "states": tuple(states),
            "penalty": x.square().mean(),
            "guess": logits.argmax(-1),
            "name": "model",
        }


def loss_fn(output: dict[str, Any], labels: Tensor) -> Tensor:
    return F.cross_entropy(output["logits"].flatten(0, 1), labels.flatten()) + 0.1 * output["penalty"]


def summed(output: dict[str, Any], labels: Tensor) -> Tensor:
    return F.cross_entropy(output["logits"].flatten(0, 1), labels.flatten(), reduction="sum")


LOSSES = {"mean": loss_fn, "summed": summed}

PAIRS: dict[str, dict[str, Any]] = {
    "pp": {"mesh": {"pp": 2}, "microbatch_size": 2},
    "tp": {"mesh": {"tp": 2}, "microbatch_size": 4, "loss": "summed"},
    "dp_shard": {"mesh": {"dp_shard": 2}, "zero": 3, "microbatch_size": 2},
    "cp": {"mesh": {"cp": 2}, "microbatch_size": 4},
}
FOURS: dict[str, dict[str, Any]] = {
    "interleaved": {"mesh": {"pp": 2, "tp": 2}, "schedule": "Interleaved1F1B", "microbatch_size": 2},
    "pp, dp": {"mesh": {"pp": 2, "dp_replicate": 2}, "microbatch_size": 1},
    "cp, tp": {"mesh": {"cp": 2, "tp": 2}, "zero": 1, "microbatch_size": 4},
    "sequence": {"mesh": {"tp": 2, "pp": 2}, "microbatch_size": 2, "shard_plan": {"norm": {"inputs": ["S(1)@tp"]}}},
    "dropout": {"mesh": {"dp_shard": 2, "tp": 2}, "microbatch_size": 2, "dropout": 0.1},
    "mean of replicas": {"mesh": {"dp_shard": 2, "tp": 2}, "microbatch_size": 2, "dp_mean": True},
    "zero bubble": {"mesh": {"pp": 2, "dp_shard": 2}, "schedule": "ZBVZeroBubble", "microbatch_size": 1},
}


def saved(
    root: Path, case: str, loss: str = "mean", dropout: float = 0.0, **asked: Any
) -> tuple[Model, dict[str, Tensor]]:
    """Emit a program of a model with some weights, and of a batch some of whose labels are ignored."""
    torch.manual_seed(0)
    model = Model(dropout)
    batch = {name: torch.randint(WORDS, (ROWS, POSITIONS)) for name in ("ids", "labels")}
    batch["labels"][:3, 2:] = -100
    batch["labels"][5] = -100
    example = (batch["ids"],), {}, LOSSES[loss], (batch["labels"],)
    program = gp.export(model, *example, evaluates=True)
    out = gp.partition(program, gp.plan(program, **asked)).save(root / case)
    save_file({name: value.clone() for name, value in model.state_dict().items()}, out / "weights.safetensors")
    save_file(batch, out / "batch.safetensors")
    return model, batch


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def check(made: tuple[Model, dict[str, Tensor]], root: Path, case: str, nproc: int, asked: dict[str, Any]) -> None:
    model, batch = made
    program = load_manifest(root / case)
    ranks = [torch.load(root / f"rank_{rank}.pt")[case] for rank in range(nproc)]
    last = [found for found in ranks if found["plain"] is not None]
    assert len(last) == nproc // program.pp
    assert all(found["outputs"] is None and found["losses"] is None for found in ranks if found["plain"] is None)
    assert all("no output 'logit'" in found["refused"] and "logits" in found["refused"] for found in ranks)
    check_outputs(model, batch, last, asked)
    check_losses(model, batch, program, ranks, asked)


def check_outputs(model: Model, batch: dict[str, Tensor], last: list[dict[str, Any]], asked: dict[str, Any]) -> None:
    with torch.no_grad():
        expected = model.eval()(batch["ids"])
    labels, logits = batch["labels"], expected["logits"]
    whole = {"logits": logits, "penalty": expected["penalty"]}
    whole |= {f"states_{i}": state for i, state in enumerate(expected["states"])}
    if asked.get("loss") == "summed":
        del whole["penalty"]  # of which its loss is not computed
    measured = {
        "accuracy": (logits.argmax(-1) == labels).sum() / (labels != -100).sum(),
        "first_token": (logits[:, 0].argmax(-1) == batch["ids"][:, 0]).float().mean(),
        "largest": expected["states"][1].amax((1, 2)).sum() * 2,
    }
    parts = 2 if asked.get("dp_mean") else 1
    losses = [
        LOSSES[asked.get("loss", "mean")](model(ids), own)
        for ids, own in zip(batch["ids"].chunk(parts), labels.chunk(parts))
    ]
    loss = torch.stack(losses).mean().detach()
    for found in last:
        close(found["plain"], {"loss": loss})
        close(found["outputs"], {"loss": loss, **whole})
        close(found["several"]["logits"], torch.cat([logits, logits.flip(0)]))
        for name, value in found["metrics"].items():
            assert name == "loss" or float(value) == pytest.approx(float(measured[name]), rel=1e-5), name
    assert set(last[0]["metrics"]) >= {"loss", "accuracy", "largest"}


def check_losses(
    model: Model, batch: dict[str, Tensor], program: Manifest, ranks: list[dict[str, Any]], asked: dict[str, Any]
) -> None:
    """Compare each loss with what one device computes of the rows of its microbatch, of all replicas."""
    count, shares = (batch["labels"] != -100).sum(), []
    for rows in torch.arange(ROWS).view(program.replicas, program.microbatches, -1).transpose(0, 1).flatten(1):
        with torch.no_grad():
            output = model(batch["ids"][rows])
            total = summed(output, batch["labels"][rows])
            mean = total / count + 0.1 * output["penalty"] * len(rows) / ROWS
        shares.append(total if asked.get("loss") == "summed" else mean)
    for found in ranks:
        assert len(found["all_losses"]) == 2 * program.microbatches
    for found in (each for each in ranks if each["losses"] is not None):
        assert len(found["losses"]) == program.microbatches
        close(torch.stack(found["losses"]).sum(), found["loss"])
        if not asked.get("dropout") and not asked.get("dp_mean"):
            close(torch.stack(found["losses"]), torch.stack(shares))


def run(pool: RankPool, root: Path, cases: dict[str, dict[str, Any]], nproc: int) -> None:
    made = {case: saved(root, case, **asked) for case, asked in cases.items()}
    pool.torchrun(Path(model_outputs_script.__file__), [str(root)], nproc=nproc, timeout_s=300)
    for case, asked in cases.items():
        check(made[case], root, case, nproc, asked)


@pytest.mark.costly
def test_outputs_metrics_and_losses_of_microbatches(tmp_path: Path, pool: RankPool) -> None:
    run(pool, tmp_path, PAIRS, 2)


def test_what_a_metric_returns_says_how_it_adds_up() -> None:
    assert _sums("m", (torch.tensor(3), 4)) == (3.0, 4.0)
    assert _sums("m", torch.tensor([1, 2, 3])) == (6.0, 3.0)
    assert _sums("m", torch.tensor(5)) == (5.0, None)
    with pytest.raises(RuntimeProgramError, match="metric m returned a tensor of 2 dims; it must return a total"):
        _sums("m", torch.ones(2, 2))
    with pytest.raises(RuntimeProgramError, match="metric m returned a float"):
        _sums("m", 0.5)


@pytest.mark.slow
def test_on_meshes_of_two_axes(tmp_path: Path, pool: RankPool) -> None:
    run(pool, tmp_path, FOURS, 4)
