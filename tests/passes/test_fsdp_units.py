"""Units of networks whose modules don't repeat: large ones are called, small ones stay together."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphpar as gp
from graphpar.errors import GraphparError
from graphpar.runtime.stages.compiled import compile_blocks
from graphpar.verification import verify_all
from tests.models import architectures


class Network(nn.Module):
    """Convolutions and a classifier with two large layers; one more layer that is read by others, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.BatchNorm2d(8), nn.Conv2d(8, 16, 3, 2))
        self.classifier = nn.Sequential(nn.Linear(144, 64), nn.ReLU(), nn.Linear(64, 144), nn.Linear(144, 10))
        self.penalized = nn.Linear(10, 300)

    def forward(self, x: Tensor) -> Tensor:
        found = self.penalized(self.classifier(self.features(x).flatten(1)))
        return found + self.penalized.weight.square().sum()


def _parts(**asked: object) -> gp.Parts:
    x = torch.randn(8, 3, 9, 9, generator=torch.Generator().manual_seed(0))
    program = gp.export(Network(), (x,), loss_fn=lambda found: found.square().mean())
    return gp.partition(program, gp.plan(program, **asked))  # type: ignore[arg-type]


@pytest.mark.costly
def test_large_modules_are_units() -> None:
    parts = [_parts(mesh={"dp_shard": 2}, zero=2), _parts(mesh={"dp_shard": 2, "tp": 2})]
    for each in parts:
        units = re.findall(r"fully_shard\((.*?), \*\*", each.files["stage_0.py"])
        assert units == ['stage.classifier["0"]', 'stage.classifier["2"]', "stage"]
    for outcome in verify_all(parts, 3):
        assert outcome.ok, outcome.problems


class Residual(nn.Module):
    """Three alike parts of a large layer and a small one; a stage may begin between the two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)

        def part() -> nn.Sequential:
            large, small = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
            return nn.Sequential(large, nn.BatchNorm2d(8), small, nn.BatchNorm2d(8))

        self.blocks = nn.ModuleList(part() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def test_a_module_that_two_stages_share_is_no_unit() -> None:
    program = gp.export(Residual(), (torch.randn(8, 8, 4, 4),), loss_fn=lambda found: found.square().mean())
    expected = set(Residual().state_dict())
    parts = gp.partition(program, gp.plan(program, mesh={"pp": 2, "dp_shard": 2}, zero=3, split=["blocks.1.2"]))
    held = [set(parts.stage(rank).state_dict()) for rank in range(2)]
    assert held[0] | held[1] == expected and not held[0] & held[1]


@pytest.mark.costly
def test_elsewhere_they_are_not() -> None:
    for asked in ({"mesh": {"dp_replicate": 2}}, {"mesh": {"dp_shard": 2}, "zero": 1}):
        assert "blocks.py" not in _parts(**asked).files


# ---- units by choice ---------------------------------------------------------------------------------------------


def _llama(**asked: Any) -> gp.Parts:
    program = architectures.program_of("llama")
    return gp.partition(program, gp.plan(program, **{"mesh": {"dp_shard": 2}, **asked}))


def _units(parts: gp.Parts) -> list[str]:
    text = parts.files[f"stage_{len(parts.plan.stages) - 1}.py"]
    return re.findall(r"^ +fully_shard\((.*?), \*\*", text, re.MULTILINE)


ENDS = "[stage.model.norm, stage.lm_head]"


def test_usual_units_are_those_of_torchtitan() -> None:
    parts = _llama()
    text = parts.files["stage_0.py"]
    assert _units(parts) == ["stage.model.embed_tokens", "layer", ENDS, "stage"]
    assert f'fully_shard({ENDS}, **{{**options, "reshard_after_forward": False}})' in text
    assert "    stage.model.embed_tokens.set_unshard_in_backward(False)\n" in text
    assert "reshard_after_forward" not in _llama(reshard="always").files["stage_0.py"]


def test_tied_modules_are_gathered_with_the_stage_or_as_one_unit() -> None:
    program = architectures.program_of("gpt2")
    usual, together = (
        gp.partition(program, gp.plan(program, mesh={"dp_shard": 2}, units=units))
        for units in (None, ["transformer.h.*", "transformer.wte+lm_head"])
    )
    assert _units(usual)[-1] == "stage" and "wte" not in "".join(_units(usual))
    assert _units(together) == ["[stage.transformer.wte, stage.lm_head]", "block", "stage"]
    for outcome in verify_all([usual, together], 3):
        assert outcome.ok, outcome.problems


@pytest.mark.costly
def test_chosen_units_are_exact() -> None:
    norm, pairs = ["model.layers.*", "model.norm"], ["model.layers.0+model.layers.1", "model.layers.2+model.layers.3"]
    parts = [
        _llama(mesh={"dp_shard": 2, "tp": 2}),
        _llama(mesh={"dp_shard": 2, "cp": 2}, zero=2, units=norm),
        _llama(mesh={"dp_shard": 2, "pp": 2}, units=["model.*", "model.layers.*", "lm_head"]),
        _llama(units=[*pairs, "model.norm+lm_head"], loss_chunk=4, microbatch_size=2, prefetch="post"),
        _llama(units="model.layers.*", recompute="full", reshard="always", microbatch_size=2),
    ]
    assert _units(parts[1]) == ["layer", "stage.model.norm", "stage"]
    assert _units(parts[2]) == ["layer", "stage.model.norm", "stage.lm_head", "stage"]
    assert _units(parts[3])[:2] == [f'[stage.model.layers["{i}"], stage.model.layers["{i + 1}"]]' for i in (0, 2)]
    assert "head_loss" in parts[3].files["blocks.py"]  # gathered once a microbatch, for all chunks
    for outcome in verify_all(parts, 3, timeout_s=600):
        assert outcome.ok, outcome.problems


@pytest.mark.parametrize(
    ("units", "said"),
    [
        (["model.layer.*"], "There is no 'layer' in 'model'. Did you mean 'layers'?"),
        (["model.layers.0.mlp"], "model.layers.0.mlp is inside the block model.layers.0, which is gathered as one"),
        (["model"], "model is around blocks such as model.layers.0. Name these (model.layers.*)"),
        (
            ["model.norm", "model.norm+lm_head"],
            "(of 'model.norm+lm_head') and model.norm (of 'model.norm') share parameters",
        ),
        (["model.rotary_emb"], "model.rotary_emb has no parameters to gather"),
        (["model.norm+"], "where a pattern is empty"),
    ],
)
def test_units_that_can_not_be_are_refused(units: list[str], said: str) -> None:
    with pytest.raises(GraphparError, match=re.escape(said)):
        _llama(units=units)


def test_a_tied_module_alone_is_refused() -> None:
    program = architectures.program_of("gpt2")
    with pytest.raises(
        GraphparError, match=r"transformer\.wte can't be gathered where it is called: its parameters are tied"
    ):
        gp.plan(program, mesh={"dp_shard": 2}, units=["transformer.wte"])


def test_units_need_a_level_that_gathers() -> None:
    with pytest.raises(GraphparError, match="units says what ZeRO-2 and 3 gather together; with dp_shard=2 and zero=1"):
        _llama(zero=1, units=["model.layers.*"])


def test_memory_and_price_follow_the_units() -> None:
    """What is gathered with the stage stays for all of a microbatch; of two blocks in a unit both are whole at once."""
    program = architectures.program_of("llama")
    cluster = gp.Cluster.parse("2xA100-SXM-80GB")

    def estimate(*units: str) -> Any:
        plan = gp.plan(
            program, cluster, mesh={"dp_shard": 2}, zero=3, microbatch_size=2, recompute="none", units=units or None
        )
        return gp.estimate(program, plan, cluster)

    usual, blocks, pairs = (
        estimate(),
        estimate("model.layers.*"),
        estimate("model.layers.0+model.layers.1", "model.layers.[23]"),
    )
    assert usual.memory[0].buckets < blocks.memory[0].buckets < pairs.memory[0].buckets
    assert usual.communication_s["dp_shard"] == pytest.approx(blocks.communication_s["dp_shard"])
    assert pairs.communication_s["dp_shard"] < blocks.communication_s["dp_shard"]


def test_a_head_in_chunks_is_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its chunks run their gradients in the forward, which torch.compile can't trace."""
    _llama(loss_chunk=8).save(tmp_path / "in_chunks_of_8")
    monkeypatch.syspath_prepend(tmp_path)
    stage = importlib.import_module("in_chunks_of_8.stage_0").Stage0()
    compile_blocks(stage, "in_chunks_of_8", "eager")
    compiled = {type(module).__name__ for module in stage.modules() if "forward" in vars(module)}
    assert compiled == {"Embedding", "LlamaDecoderLayer", "LlamaRMSNorm", "Stage0"}  # what stands between them
