"""Tensors of other engines: what the rules make of a model's equals the engines' layouts, written down here once more."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from graphpar.runtime import EngineTensors, RuntimeProgramError
from graphpar.runtime.checkpoints.engine_layouts import FOLDER, distinct, left_over, read_mapping, targets
from tests.models.engine_layouts import Sizes, engine_parameters, llama, mixture
from tests.tools.samples import sample

LLAMA = Sizes(heads=4, kv_heads=2, width=16, head=4, hidden=12, words=99)


def fill(engine: EngineTensors, weights: Mapping[str, Tensor]) -> None:
    """Copy the boxes that an engine's rank needs, and nothing else."""
    offered = {name: (name, value.shape) for name, value in weights.items()}
    entries = engine.entries(offered)
    for tensor in (tensor for entry in entries.values() for tensor in entry.tensors):
        tensor.zero_()
    for name, entry in entries.items():
        for box in entry.boxes:
            view = weights[name]
            for dim, (begin, size) in enumerate(zip(box.offsets, box.values.shape)):
                view = view.narrow(dim, begin, size)
            box.values.copy_(view)


def dirty(expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.full_like(value, 7.0) for name, value in expected.items()}


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_each_rank_of_a_dense_model(tp: int, tied: bool) -> None:
    weights = llama(LLAMA, tied)
    for rank in range(tp):
        expected = engine_parameters(weights, LLAMA, tp=(rank, tp))
        assert ("lm_head.weight" in expected) != tied
        found = dirty(expected)
        fill(EngineTensors("fused", found, tp=(rank, tp), kv_heads=LLAMA.kv_heads), weights)
        for name, value in expected.items():
            assert torch.equal(found[name], value), (name, rank)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_model_with_one_tensor_of_queries_keys_and_values(tp: int) -> None:
    weights, fused = llama(LLAMA, False), dict[str, Tensor]()
    for name, value in weights.items():
        parts = [name.replace(".q_proj.", f".{kind}_proj.") for kind in "qkv"]
        if ".q_proj." in name:
            fused[name.replace(".q_proj.", ".qkv_proj.")] = torch.cat([weights[each] for each in parts])
        elif ".k_proj." not in name and ".v_proj." not in name:
            fused[name] = value
    assert len(fused) < len(weights)
    for rank in range(tp):
        expected = engine_parameters(weights, LLAMA, tp=(rank, tp))
        found = dirty(expected)
        fill(EngineTensors("fused", found, tp=(rank, tp), heads=LLAMA.heads, kv_heads=LLAMA.kv_heads), fused)
        for name, value in expected.items():
            assert torch.equal(found[name], value), (name, rank)
        with pytest.raises(
            RuntimeProgramError, match=r"divides \{path\}.qkv_proj.\{kind\} by heads: give EngineTensors heads="
        ):
            fill(EngineTensors("fused", found, tp=(rank, tp), kv_heads=LLAMA.kv_heads), fused)


@pytest.mark.parametrize("names", sample(["stacked", "w", "proj"], 1))
@pytest.mark.parametrize("tp, ep", [(1, 1), (2, 1), (4, 1), (2, 2), (1, 3)])
def test_each_rank_of_a_mixture(names: str, tp: int, ep: int) -> None:
    sizes = Sizes(heads=4, kv_heads=2, width=16, head=4, hidden=12, words=64, experts=4)
    weights = mixture(sizes, names)
    for rank in range(tp):
        for own in range(ep):
            expected = engine_parameters(weights, sizes, tp=(rank, tp), ep=(own, ep))
            found = dirty(expected)
            moe = (0, 1) if ep > 1 else None
            fill(EngineTensors("fused", found, tp=(rank, tp), kv_heads=2, ep=(own, ep), moe_tp=moe), weights)
            for name, value in expected.items():
                assert torch.equal(found[name], value), (name, rank, own)


def test_files_of_mixtures_have_a_tensor_for_each_matrix() -> None:
    sizes = Sizes(heads=4, kv_heads=2, width=16, head=4, hidden=12, words=64, experts=4)
    stacked = {name: value.shape for name, value in mixture(sizes, "stacked").items()}
    for mapping, names in (("hf_mixtral", "w"), ("hf_qwen_moe", "proj")):
        made = targets(read_mapping(mapping), stacked)
        assert not left_over(made, stacked)
        wanted = mixture(sizes, names)
        found = {name: torch.full_like(value, 7.0) for name, value in wanted.items()}
        assert {name for name, _ in distinct(made)} == set(wanted)
        fill(EngineTensors(mapping, found), mixture(sizes, "stacked"))
        for name, value in wanted.items():
            assert torch.equal(found[name], value), name


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    weights = llama(LLAMA, False)
    offered = {name: (name, value.shape) for name, value in weights.items()}
    found = engine_parameters(weights, LLAMA, tp=(0, 4))
    with pytest.raises(RuntimeProgramError, match=r"qkv_proj.weight is \[12, 16\] on this rank .* and \[8, 16\] by"):
        EngineTensors("fused", found, tp=(0, 4)).entries(offered)  # without the heads of keys and values
    whole = {"model.embed_tokens.weight": torch.zeros(128, 16)}  # as if it were not divided
    with pytest.raises(RuntimeProgramError, match=r"embed_tokens.weight is \[128, 16\]"):
        EngineTensors("fused", whole, tp=(0, 2)).entries(offered)
    with pytest.raises(RuntimeProgramError, match=r"makes no k_scale of what is sent"):
        EngineTensors("fused", {"k_scale": torch.zeros(1)}).entries(offered)
    one = torch.zeros(128, 16)
    with pytest.raises(
        RuntimeProgramError, match=r"model.embed_tokens.weight and lm_head.weight are one tensor in the engine"
    ):
        EngineTensors("fused", {"model.embed_tokens.weight": one, "lm_head.weight": one}).entries(offered)
    tied = {name: (name.replace("lm_head", "model.embed_tokens"), value.shape) for name, value in weights.items()}
    assert EngineTensors("fused", {"model.embed_tokens.weight": one, "lm_head.weight": one}).entries(tied)
    with pytest.raises(RuntimeProgramError, match=r"norm.weight have 8 bits"):
        EngineTensors("fused", {"model.norm.weight": torch.zeros(16, dtype=torch.float8_e4m3fn)})
    square = {"h.0.attn.c_proj.weight": torch.zeros(4, 4)}  # vLLM transposes it
    with pytest.raises(RuntimeProgramError, match=r"makes no h.0.attn.c_proj.weight of what is sent"):
        EngineTensors("fused", square).entries({name: (name, value.shape) for name, value in square.items()})
    with pytest.raises(RuntimeProgramError, match="6 ranks can't share 4 heads"):
        EngineTensors("fused", {}, tp=(0, 6), kv_heads=4)
    for axis in ("tp", "ep", "moe_tp"):
        for wrong in ((4, 4), 2, (1,), None if axis != "moe_tp" else "2"):
            with pytest.raises(RuntimeProgramError, match=f"{axis} is \\(rank, ranks\\), counted from 0"):
                EngineTensors("fused", {}, **{axis: wrong})  # type: ignore[arg-type]
    with pytest.raises(RuntimeProgramError, match="there is no mapping fuse: name a TOML file, or one of fused, hf"):
        read_mapping("fuse")
    for text, said in {
        "[[tensor]]\nname = ['a']": "the field 'of' is missing",
        "[[tensor]]\nname = ['{b}']\nof = [{ tensor = 'a' }]": "each placeholder",
        "[[tensor]]\nname = ['a']\nof = [{ tensor = 'a', over = { 0 = 'pp' } }]": "pp is no axis; there are tp, kv, ep",
        "[[tensor]]\nname = ['a']\nof = [{ tensor = 'a', part = [2, 2] }]": "which, of how many",
        "tensor =": "is no TOML file",
    }.items():
        (tmp_path / "own.toml").write_text(text)
        with pytest.raises(RuntimeProgramError, match=said):
            read_mapping(tmp_path / "own.toml")
    assert sorted(file.stem for file in FOLDER.iterdir()) == ["fused", "hf", "hf_mixtral", "hf_qwen_moe"]
