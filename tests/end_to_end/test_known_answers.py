"""Models whose plans an expert knows: what is chosen, that its program type-checks at its whole size, and that a small twin of it is right.

The twin is the same kind of model at toy sizes, under the plan's kinds of parallelism in degrees of at most 2.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import graphpar as gp
from graphpar.cli.main import main
from tests.tools.samples import sample

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

GPT3 = """
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

config = GPT2Config(vocab_size={words}, n_positions={seq}, n_embd={width}, n_layer={layers}, n_head={heads}, use_cache=False,
                    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def model() -> nn.Module:
    return GPT2LMHeadModel(config)


def example_inputs() -> dict[str, Tensor]:
    ids = torch.randint({words}, (8, {seq}), generator=torch.Generator().manual_seed(0))
    return {{"input_ids": ids, "labels": ids.clone()}}
"""

LONG = """
import torch
import torch.nn.functional as F
from torch import Tensor, nn

SEQ, WIDTH, HEADS, LAYERS, WORDS = {seq}, {width}, {heads}, {layers}, {words}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, seq, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, seq, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(rows, seq, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for each in self.layers:
            x = each(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def model() -> nn.Module:
    return Model()


def example_inputs() -> dict[str, Tensor]:
    ids = torch.randint(WORDS, ({rows}, SEQ), generator=torch.Generator().manual_seed(0))
    return {{"ids": ids, "labels": ids.clone()}}
"""

MIXTRAL = """
import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

config = MixtralConfig(vocab_size={words}, hidden_size={width}, intermediate_size={hidden}, num_hidden_layers={layers},
                       num_attention_heads={heads}, num_key_value_heads={groups}, num_local_experts=8, sliding_window=None, use_cache=False)


def model() -> nn.Module:
    return MixtralForCausalLM(config)


def example_inputs() -> dict[str, Tensor]:
    ids = torch.randint({words}, (8, {seq}), generator=torch.Generator().manual_seed(0))
    return {{"input_ids": ids, "labels": ids.clone()}}
"""


@dataclass(frozen=True)
class Known:
    """A model, a cluster and a global batch, and what an expert expects of the plan.

    Attributes:
        model, twin: an example, or the text of a model file.
        expected: of the degrees of the mesh.
        published: a mesh that somebody runs on this cluster; whatever schedule, microbatches and recomputation suit it best, it may be
            no faster than the plan.
        options: how the model is compiled besides.
    """

    name: str
    model: str
    twin: str
    cluster: str
    batch: int
    expected: Callable[[Mapping[str, int]], bool]
    published: str | None = None
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


SIZES = {"words": 50304, "seq": 2048, "width": 12288, "layers": 96, "heads": 96}
TOY = {"words": 64, "seq": 16, "width": 32, "layers": 2, "heads": 4}
KNOWN = [
    Known(
        "8B on 8 H100", "llama3_8b", "llama", "8xH100-SXM-80GB", 128,
        lambda mesh: mesh["dp_shard"] * mesh["dp_replicate"] >= 4 and mesh["tp"] <= 2 and mesh["pp"] == 1,
    ),
    Known(
        "70B on 64 H100", "llama3_70b", "llama", "8x8xH100-SXM-80GB", 1024,
        lambda mesh: mesh["dp_shard"] > 1 and mesh["tp"] <= 8,
    ),
    Known(
        "175B on 96 A100", GPT3.format(**SIZES), GPT3.format(**TOY), "12x8xA100-SXM-80GB", 1536,
        lambda mesh: mesh["tp"] <= 8 and mesh["pp"] * mesh["dp_shard"] > 1,
    ),
    Known(
        "405B on 16,384 H100", "llama3_405b", "llama", "2048x8xH100-SXM-80GB", 2048,
        lambda mesh: mesh["tp"] <= 16 and mesh["pp"] * mesh["dp_shard"] >= 16, "pp=16,tp=8,dp_shard=128", ("--dtype", "bf16"),
    ),
    Known(
        "a sequence of a million tokens", LONG.format(rows=1, seq=2**20, width=4096, layers=32, heads=32, words=32000),
        LONG.format(rows=4, **TOY), "8x8xH100-SXM-80GB", 1, lambda mesh: mesh["cp"] > 1,
    ),
    Known(
        "Mixtral 8x7B on 64 H100",
        MIXTRAL.format(words=32000, width=4096, hidden=14336, layers=32, heads=32, groups=8, seq=4096),
        MIXTRAL.format(words=64, width=32, hidden=64, layers=2, heads=4, groups=2, seq=16), "8x8xH100-SXM-80GB", 1024,
        lambda mesh: mesh["dp_expert"] > 1 and mesh["ep"] == mesh["tp"] == 1, options=("--dtype", "bf16"),
    ),
    Known(
        "Mixtral 8x22B on 256 H100", "mixtral_8x22b",
        MIXTRAL.format(words=64, width=32, hidden=64, layers=2, heads=4, groups=2, seq=16), "32x8xH100-SXM-80GB", 1024,
        lambda mesh: mesh["dp_expert"] * mesh["ep"] > 1 and mesh["dp_shard"] > 1 and mesh["tp"] <= 8,
        options=("--dtype", "bf16"),
    ),
]  # fmt: skip


def test_what_does_not_fit_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(EXAMPLES / "llama3_70b.py")
    assert main(["compile", model, "--cluster", "8xH100-SXM-80GB", "--batch", "128", "--no-emit"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "No plan for" in told and "What would fit: " in told and "GiB too much" in told


@pytest.mark.parametrize("known", sample(KNOWN, 2), ids=str)
def test_a_known_answer(known: Known, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, twin = tmp_path / "whole", tmp_path / "twin"
    asked = ["--cluster", known.cluster, "--batch", str(known.batch), *known.options]
    found = compiled(known.model, whole, asked, capsys)
    plan = found["plan"]
    assert known.expected(plan["mesh"]), plan["mesh"]
    if known.published is not None:
        pins = ["--mesh", known.published, "--recompute", "gathers+pointwise"]  # no block runs again
        theirs = compiled(known.model, tmp_path / "theirs", [*asked, *pins], capsys)["predicted"]
        assert max(theirs["peak_memory_bytes"]) <= theirs["memory_bytes"]
        assert found["predicted"]["step_time_s"] <= theirs["step_time_s"]
    result = gp.check(whole)
    assert result.ok, result.problems
    mesh = {axis: min(degree, 2) for axis, degree in plan["mesh"].items()}
    options = ["--mesh", ",".join(f"{axis}={degree}" for axis, degree in mesh.items()), "--recompute"]
    options.append("none" if plan["recompute"] == "none" else "full")
    if mesh["dp_shard"] > 1:
        options += ["--zero", str(plan["zero"]), "--reshard", str(plan["reshard"])]
    if mesh["pp"] > 1:
        options += ["--schedule", plan["schedule"]]
    compiled(known.twin, twin, options, capsys)
    verified = gp.verify(twin, steps=2)
    assert verified.ok, verified


def compiled(model: str, folder: Path, options: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Compile an example or the text of a model file, and return what ``--json`` prints."""
    path = EXAMPLES / f"{model}.py"
    if "\n" in model:
        path = folder.with_name(f"{folder.name}_model.py")
        path.write_text(model)
    assert main(["compile", str(path), *options, "-o", str(folder), "--no-weights", "--json"]) == 0, (
        capsys.readouterr().err
    )
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found
