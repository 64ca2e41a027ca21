"""Models with adapters train as the package ``peft`` trains them on one device, and adapters travel between it and programs."""

from __future__ import annotations

import json
import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import graphpar as gp
from graphpar.cli.main import main
from graphpar.errors import GraphparError
from graphpar.runtime.checkpoints import conversion
from graphpar.runtime.checkpoints.saved_state import may_become
from graphpar.verification.comparison import relative_error
from graphpar.verification.tolerances import PRECISIONS
from tests.ranks import lora_script
from tests.tools.programs import EXAMPLES
from tests.tools.rank_pool import RankPool
from tests.tools.samples import sample

LAYERS = {
    "llama": {"model.layers.*.self_attn.[qvo]_proj": 4, "model.layers.*.mlp.*_proj": 2},
    "gpt2_tiny": {"transformer.h.*.attn.c_*": 4, "transformer.h.*.mlp.c_fc": 4},
    "mixtral": {"model.layers.*.self_attn.[kv]_proj": 4, "model.layers.*.mlp.experts.*_proj": 4},
}
IN_PEFT: dict[str, dict[str, Any]] = {
    "llama": {
        "target_modules": ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "rank_pattern": {"gate_proj": 2, "up_proj": 2, "down_proj": 2},
    },
    "gpt2_tiny": {"target_modules": r".*(attn.c_attn|attn.c_proj|c_fc)", "fan_in_fan_out": True},
    "mixtral": {
        "target_modules": ["k_proj", "v_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
}
MESHES: dict[str, dict[str, Any]] = {
    "tp": {"mesh": {"tp": 2}},
    "pp": {"mesh": {"pp": 2}},
    "zero-1": {"mesh": {"dp_shard": 2}, "zero": 1},
    "zero-3": {"mesh": {"dp_shard": 2}, "zero": 3},
    "ep": {"mesh": {"ep": 2}},
    "dp-pp": {"mesh": {"dp_replicate": 2, "pp": 2}},
    "pp-tp": {"mesh": {"pp": 2, "tp": 2}},
}
ALLOWED = PRECISIONS[torch.float32].allowed


class Example:
    """An example's model with two layers, the same values each time, and its adapters in ``peft``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._file = runpy.run_path(str(EXAMPLES / f"{name}.py"))
        self._file["config"].num_hidden_layers = 2
        self.batch: dict[str, Tensor] = self._file["example_inputs"]()

    def base(self) -> nn.Module:
        torch.manual_seed(5)
        model: nn.Module = self._file["model"]()
        return model

    def in_peft(self) -> Any:
        model = get_peft_model(self.base(), LoraConfig(r=4, lora_alpha=8, **IN_PEFT[self.name]))
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
        return model


def in_turn(name: str, meshes: list[str], folder: Path, pool: RankPool) -> None:
    """Train an example in ``peft`` and as a program of each mesh, and compare."""
    example = Example(name)
    save_file({key: value.clone() for key, value in example.base().state_dict().items()}, folder / "base.safetensors")
    save_file(example.batch, folder / "batch.safetensors")
    reference = example.in_peft()
    reference.save_pretrained(folder / "start")
    trained = [p for p in reference.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=lora_script.LR, momentum=0.9)
    losses = []
    for _ in range(lora_script.STEPS):
        loss = reference(**example.batch).loss
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    last = float(reference(**example.batch).loss)
    reference.save_pretrained(folder / "expected")
    merged = reference.merge_and_unload().state_dict()

    program = gp.export(gp.lora(example.base, LAYERS[name], alpha=8), kwargs=example.batch)
    names = {name for name, info in program.parameters.items() if info.requires_grad}
    assert names and all(".lora" in name for name in names)
    for mesh in meshes:
        gp.partition(program, gp.plan(program, **MESHES[mesh])).save(folder / mesh)
        nproc = math.prod(MESHES[mesh]["mesh"].values())
        pool.torchrun(Path(lora_script.__file__), [str(folder), mesh], nproc=nproc, timeout_s=300)
        every = [json.loads((folder / f"{mesh}-rank_{rank}.json").read_text()) for rank in range(nproc)]
        assert any(seen["merged"] for seen in every), mesh
        for seen in every:
            assert seen["losses"] == pytest.approx(losses, rel=ALLOWED["loss"]), mesh
            assert seen["unmerged"] == pytest.approx(last, rel=ALLOWED["loss"]), mesh
            assert seen["merged"] in ([], [pytest.approx(last, rel=ALLOWED["loss"])]), mesh
            assert seen["restored"], mesh
            assert seen["resumed"] == [pytest.approx(last, rel=ALLOWED["loss"])] * meshes.index(mesh), mesh
            assert seen["changed"] and all(".lora" in changed for changed in seen["changed"]), mesh
            assert all(".lora" in held or not held for held in seen["in optimizer"]), mesh
        for part, expected in [("after", "expected"), ("drawn", f"{meshes[0]}-drawn")]:
            file = load_file(folder / expected / "adapter_model.safetensors")
            agrees(folder / f"{mesh}-{part}" / "adapter_model.safetensors", file)
        agrees(folder / f"{mesh}-merged.safetensors", merged)
        without_ranks(folder, mesh)
    loaded = PeftModel.from_pretrained(example.base(), folder / f"{meshes[-1]}-after")
    assert float(loaded(**example.batch).loss) == pytest.approx(last, rel=ALLOWED["loss"])


def agrees(path: Path, expected: dict[str, Tensor]) -> None:
    found = load_file(path)
    assert found.keys() == expected.keys()
    largest = max(float(value.abs().max()) for value in expected.values())
    for name, value in expected.items():
        assert relative_error(value, found[name], largest) <= ALLOWED["parameter"], (path.name, name)


def without_ranks(folder: Path, mesh: str) -> None:
    """What is taken out of a checkpoint is what the program has written, to the bit."""
    checkpoint = str(folder / "checkpoints" / mesh)
    conversion.adapters(checkpoint, folder / f"{mesh}-extracted")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        written = (folder / f"{mesh}-{kind}" / name for kind in ("after", "extracted"))
        assert len({path.read_bytes() for path in written}) == 1, (mesh, name)
    merged = load_file(folder / f"{mesh}-merged.safetensors")
    file, exported = folder / f"{mesh}-base.safetensors", folder / f"{mesh}-exported"
    conversion.merge(checkpoint, file, merged=True)
    largest = max(value.nbytes for value in merged.values())
    files = conversion.export(checkpoint, exported, largest, merged=True)["files"]
    assert len(files) > 1
    parts = [load_file(exported / name) for name in files]
    for found in (load_file(file), {name: value for part in parts for name, value in part.items()}):
        assert found.keys() <= merged.keys()
        assert all(torch.equal(value, merged[name]) for name, value in found.items())
    assert load_file(file).keys() == merged.keys()


@pytest.mark.costly
def test_adapters_train_as_in_peft(tmp_path: Path, pool: RankPool) -> None:
    in_turn("llama", ["tp", "zero-1"], tmp_path, pool)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), sample([(name, mesh) for name in LAYERS for mesh in ("dp-pp", "pp-tp")], 2))
def test_adapters_train_as_in_peft_over_two_axes(name: str, mesh: str, tmp_path: Path, pool: RankPool) -> None:
    in_turn(name, [mesh], tmp_path, pool)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "meshes"),
    [("llama", ["zero-3", "pp"]), ("gpt2_tiny", ["tp", "pp", "zero-1", "zero-3"]), ("mixtral", ["ep", "tp", "zero-3"])],
)
def test_adapters_train_as_in_peft_everywhere(name: str, meshes: list[str], tmp_path: Path, pool: RankPool) -> None:
    in_turn(name, meshes, tmp_path, pool)


def test_bad_adapters_are_refused() -> None:
    base: Callable[[], nn.Module] = Example("llama").base
    for patterns, message in [
        ({}, r"mapping of patterns to ranks"),
        ({"model.layers.*.self_attn.q_porj": 4}, r"matches no module and no parameter.*Did you mean 'q_proj'"),
        ({"model.layers.*.self_attn.q_proj": 0}, r"have rank 0; a rank is a whole number of at least 1"),
        ({"model.layers.*.self_attn.q_proj": True}, r"have rank True"),
        (
            {"model.layers.*.self_attn": 4},
            r"\(LlamaAttention\), which is not a matrix product.*It has model.layers.0.self_attn.q_proj",
        ),
        ({3: 4}, r"pattern 3 is not a string"),
        ({"model.norm.weight": 4}, r"the parameter 'model.norm.weight' \[64\]; of parameters only stacked"),
        ({"**.q_proj": 4, "model.layers.0.self_attn.*_proj": 8}, r"rank 4 by '\*\*.q_proj' and of rank 8 by"),
    ]:
        with pytest.raises(GraphparError, match=message):
            gp.lora(base(), patterns)
    for option, value in [("alpha", float("nan")), ("alpha", "x"), ("dropout", 1.5)]:
        with pytest.raises(GraphparError, match=rf"{option} of adapters is {value!r}; it is a number of at least 0"):
            gp.lora(base(), {"lm_head": 2}, **{option: value})  # type: ignore[arg-type]
    twice = gp.lora(base(), {"lm_head": 2})
    with pytest.raises(GraphparError, match=r"'lm_head' has an adapter already"):
        gp.lora(twice, {"lm_head": 2})
    attention = nn.TransformerEncoderLayer(8, 2)
    with pytest.raises(GraphparError, match=r"reads its weight without calling it"):
        gp.lora(attention, {"self_attn.out_proj": 2})


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def test_adapters_that_nothing_calls_are_told() -> None:
    program = gp.export(gp.lora(Skips(), {"*": 2}), (torch.ones(2, 4),), loss_fn=lambda o: o.sum())
    assert [line for line in program.warnings if "The adapters of idle are never used" in line]
    assert [adapter.layer for adapter in program.adapters] == ["used", "idle"]


def test_adapters_of_a_checkpoint_without_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def saved(name: str, model: nn.Module) -> str:
        program = gp.export(model, (torch.ones(2, 4),), loss_fn=lambda o: o.sum())
        gp.partition(program, gp.plan(program)).save(tmp_path / name)
        save_file(model.state_dict(), tmp_path / f"{name}.safetensors")
        conversion.convert(tmp_path / f"{name}.safetensors", tmp_path / f"{name}-ckpt", tmp_path / name)
        return str(tmp_path / f"{name}-ckpt")

    def refused(*words: str) -> str:
        assert main(["checkpoint", *words, "-o", str(tmp_path / "nothing")]) == 2
        assert not (tmp_path / "nothing").exists()
        return capsys.readouterr().err

    torch.manual_seed(3)
    model = gp.lora(Skips(), {"used": 2}, alpha=6)
    with torch.no_grad():
        model.used.lora_B.weight.normal_()  # type: ignore[union-attr]
    checkpoint = saved("adapted", model)
    assert main(["checkpoint", "adapters", checkpoint, "-o", str(tmp_path / "peft")]) == 0
    found = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    names = {key: f"base_model.model.used.{key}.weight" for key in ("lora_A", "lora_B")}
    assert found.keys() == set(names.values())
    assert all(torch.equal(found[name], model.get_parameter(f"used.{key}.weight")) for key, name in names.items())
    assert main(["checkpoint", "merge", checkpoint, "--merged", "-o", str(tmp_path / "merged.safetensors")]) == 0
    plain = Skips()
    plain.load_state_dict(load_file(tmp_path / "merged.safetensors"))
    x = torch.randn(5, 4)
    assert relative_error(model(x), plain(x)) <= ALLOWED["output"]
    capsys.readouterr()

    bare = saved("bare", Skips())
    for words in (["adapters"], ["merge", "--merged"], ["export", "--merged"]):
        assert "has no adapters; the program that saved it has none" in refused(words[0], bare, *words[1:])
    conversion.convert(tmp_path / "adapted.safetensors", tmp_path / "alone", None)
    assert "has no plan.json, which describes its adapters; convert it with --to" in refused(
        "adapters", str(tmp_path / "alone")
    )
    other = saved("other", gp.lora(Skips(), {"used": 3}))
    assert "values of other shapes" in refused("convert", other, "--to", str(tmp_path / "adapted"))
    assert "it has no value for used.lora_A.weight" in refused("convert", bare, "--to", str(tmp_path / "adapted"))


class ByHand(nn.Module):
    """An adapter of one's own, which gates what it adds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4), requires_grad=False)
        self.lora_A, self.lora_B, self.gate = nn.Linear(4, 2), nn.Linear(2, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.gate(x).sigmoid() * self.lora_B(self.lora_A(x))


def test_adapters_of_ones_own_are_ordinary_layers() -> None:
    program = gp.export(ByHand(), (torch.ones(2, 4),), loss_fn=lambda o: o.sum())
    assert program.adapters == () and not program.warnings


def test_dtypes_that_values_of_a_checkpoint_may_be_read_in() -> None:
    half, full = torch.bfloat16, torch.float32
    assert may_become(full, full, False) and may_become(half, full, False) and may_become(full, half, True)
    assert not may_become(full, half, False) and not may_become(torch.int64, half, True)


class TiedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.other = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False), nn.Linear(4, 4)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.other(self.other(self.embed(ids))))


def test_weights_that_something_else_reads_are_not_merged() -> None:
    program = gp.export(
        gp.lora(TiedHead(), {"head": 2, "other": 2}), (torch.ones(2, 3).long(),), loss_fn=lambda o: o.sum()
    )
    assert {adapter.layer: adapter.shared for adapter in program.adapters} == {"head": True, "other": False}
