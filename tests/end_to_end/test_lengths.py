"""One program for a range of lengths: batches of other lengths train as an eager loop does, whatever the mesh."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import graphpar as gp
from graphpar.verification import verify_all
from tests.models import architectures
from tests.ranks import lengths_script as script
from tests.tools.parity import LR, MOMENTUM, Block
from tests.tools.rank_pool import RankPool

WORDS, WIDTH, ROWS, IGNORED = 48, 32, 8, -1
LEAST, MOST = 5, 32
LENGTHS = (32, 5, 17, 24, 11)


class NanoGPT(nn.Module):
    """As nanoGPT has it: learned positions up to the length of the input, a tied head, and labels of -1 that are ignored."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(MOST, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        t = idx.size(1)
        x = self.wte(idx) + self.wpe(torch.arange(0, t, dtype=torch.long, device=idx.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=IGNORED)


class ChunkBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        t = x.size(1)
        if t <= 16:
            return super().forward(x)
        return super().forward(x.unflatten(1, (4, t // 4)).flatten(0, 1)).unflatten(0, (-1, 4)).flatten(1, 2)


class InChunks(NanoGPT):
    """Attends in chunks where the sequence is long, with a table that depends on its length: another program at each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ChunkBlock() for _ in range(2))

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        t = idx.size(1)
        table = torch.tensor([[math.sin((1 + i) * (1 + j) / t) for j in range(WIDTH)] for i in range(t)])
        x = self.wte(idx) + self.wpe(torch.arange(0, t, dtype=torch.long, device=idx.device)) + table
        if t > 8:
            x = x + x.unflatten(1, (4, t // 4)).cumsum(2).flatten(1, 2) / t
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=IGNORED)


def batch_of(number: int, length: int, rows: int = ROWS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    idx, targets = (torch.randint(WORDS, (rows, length), generator=generator) for _ in range(2))
    return {"idx": idx, "targets": targets.masked_fill(torch.rand(rows, length, generator=generator) < 0.2, IGNORED)}


@dataclass(frozen=True)
class Subject:
    """A model, what it is compiled for, and the lengths of the batches that it is tried with: of steps, an evaluation, and one too many."""

    model: type[NanoGPT] = NanoGPT
    seq: str = f"{LEAST}..{MOST}"
    lengths: tuple[int, ...] = LENGTHS
    evaluated: int = 13
    refused: str = f"33 positions; the program takes {LEAST} to {MOST}"
    several: tuple[tuple[int, int], tuple[int, int]] = ((9, 14), (6, 13))  # of one step: of replicas, of batches

    def exported(self) -> gp.Program:
        batch = batch_of(0, 20)
        return gp.export(self.model(), (batch["idx"], batch["targets"]), seq=self.seq, evaluates=True)


RANGE = Subject()
APART = Subject(
    InChunks, "8,16,32", (32, 8, 16, 8, 32), 16, "33 positions; the program takes 8 to 32", ((8, 16), (32, 8))
)
PADDED = Subject(seq="8,20,32", lengths=(32, 5, 17, 20, 11), refused="33 positions; the program takes 2 to 32")


@dataclass(frozen=True)
class Case:
    mesh: Mapping[str, int]
    pins: Mapping[str, Any]
    multiple: int = 1
    several: bool = False  # of one step: replicas, or batches, have other lengths
    compile: str | bool = False


def eager(subject: Subject, steps: list[list[dict[str, Tensor]]]) -> tuple[list[float], NanoGPT]:
    """Train on one device; a step's mean is that over the labels of all of its batches."""
    model = subject.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    losses = []
    for batches in steps:
        optimizer.zero_grad()
        count = sum(int((batch["targets"] != IGNORED).sum()) for batch in batches)
        shares = [model(**batch)[1] * (batch["targets"] != IGNORED).sum() / count for batch in batches]
        loss = torch.stack(shares).sum()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses, model


def check(pool: RankPool, cases: list[Case], root: Path, subject: Subject = RANGE) -> None:
    program = subject.exported()
    jobs: dict[int, list[dict[str, Any]]] = {}
    steps = {False: [[batch_of(n, length)] for n, length in enumerate(subject.lengths)]}
    of_replicas, of_batches = subject.several
    steps[True] = [
        *steps[False][:2],
        [batch_of(7 + n, length, ROWS // 2) for n, length in enumerate(of_replicas)],
        [batch_of(9, length) for length in of_batches],
    ]
    evaluated = batch_of(20, subject.evaluated)
    save_file(evaluated, root / "evaluated")
    save_file(batch_of(0, MOST + 1), root / "long")

    def saved(name: str, batch: dict[str, Tensor]) -> str:
        save_file(batch, root / name)
        return str(root / name)

    files: dict[bool, list[list[Any]]] = {
        several: [
            [saved(f"{several}_{n}_{i}", each) for i, each in enumerate(batches)] for n, batches in enumerate(found)
        ]
        for several, found in steps.items()
    }
    files[True][2] = [files[True][2]]  # one a replica
    folders = []
    for number, case in enumerate(cases):
        plan = gp.plan(program, mesh=dict(case.mesh), **case.pins)
        parts = gp.partition(program, plan)
        assert json.loads(parts.files["plan.json"])["interface"].get("multiple", 1) == case.multiple
        folder = parts.save(root / f"program_{number}")
        save_file(
            {name: v.clone() for name, v in subject.model().state_dict().items() if name != "head.weight"},
            folder / "initial.safetensors",
        )
        job = {
            "program": str(folder),
            "steps": files[case.several],
            "refused": str(root / "long"),
            "compile": case.compile,
        }
        jobs.setdefault(math.prod(case.mesh.values()), []).append(job | {"evaluated": [str(root / "evaluated")]})
        folders.append(folder)
    for devices, listed in jobs.items():
        (root / f"jobs_{devices}.json").write_text(json.dumps(listed))
        pool.torchrun(Path(script.__file__), [str(root / f"jobs_{devices}.json")], nproc=devices, timeout_s=600)
    expected = {several: eager(subject, found) for several, found in steps.items()}
    for case, folder in zip(cases, folders):
        losses, model = expected[case.several]
        found = json.loads((folder / "trained.json").read_text())
        assert found["losses"] == pytest.approx(losses, rel=2e-5), case
        assert subject.refused in found["refused"], found["refused"]
        parameters = load_file(folder / "trained.safetensors")
        for name, parameter in model.named_parameters():
            assert float((parameters[name] - parameter).abs().max() / parameter.abs().max()) < 2e-5, (case, name)
        outputs = load_file(f"{root}/evaluated.outputs_{folder.name}")
        for name, value in outputs.items():
            torch.testing.assert_close(value, model(**evaluated)[name == "loss"].detach(), rtol=1e-4, atol=1e-5)
        assert len(outputs) == (1 if "loss_chunk" in case.pins else 2)


@pytest.mark.costly
def test_five_lengths_in_one_run(pool: RankPool, tmp_path: Path) -> None:
    cases = [
        Case({"pp": 2}, {"microbatch_size": 2}),
        Case({"tp": 2}, {"sp": True}, multiple=2),
        Case({"cp": 2}, {}, multiple=2),
        Case({"dp_shard": 2}, {"zero": 3}, several=True),
        Case({"tp": 2}, {"sp": False, "loss_chunk": 16, "recompute": "full"}),
    ]
    check(pool, cases, tmp_path)


@pytest.mark.costly
def test_lists_of_lengths(pool: RankPool, tmp_path: Path) -> None:
    cases = [
        Case({"pp": 2}, {"microbatch_size": 2}),
        Case({"tp": 2}, {"recompute": "full"}),
        Case({"dp_shard": 2}, {"zero": 3}, several=True),
        Case({"dp_replicate": 2}, {"compile": True}, several=True, compile="aot_eager"),
    ]
    check(pool, cases, tmp_path, APART)
    (tmp_path / "padded").mkdir()
    check(pool, [Case({"tp": 2}, {"sp": True}, multiple=2)], tmp_path / "padded", PADDED)


@pytest.mark.slow
def test_lists_on_more_meshes(pool: RankPool, tmp_path: Path) -> None:
    zbv = {"schedule": "ZBVZeroBubble", "split": ["layers.0", "layers.1", "norm"], "microbatch_size": 2}
    cases = [
        Case({"pp": 2}, zbv),
        Case({"cp": 2}, {}),
        Case({"dp_shard": 2, "tp": 2}, {"zero": 3}, several=True),
        Case({"dp_shard": 2}, {"zero": 1, "recompute": "selective"}, several=True),
    ]
    check(pool, cases, tmp_path, APART)


@pytest.mark.costly
def test_a_list_is_checked_at_each_length(tmp_path: Path) -> None:
    program = APART.exported()
    parts = gp.partition(program, gp.plan(program, mesh={"tp": 2}))
    assert gp.check(parts).ok
    folder = parts.save(tmp_path / "program")
    blocks = folder / "blocks.py"
    text = blocks.read_text()
    place = text.index("def at_8(")
    assert "sum_invariant(" in text[place:] or "all_reduce" in text[place:], text
    at = text.index("all_reduce(", place)
    blocks.write_text(text[:at] + "(lambda x, axis: x)(" + text[at + len("all_reduce(") :])
    assert not gp.check(folder).ok


class ReadsMore(NanoGPT):
    def __init__(self) -> None:
        super().__init__()
        self.far = nn.Linear(WIDTH, WIDTH)

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(idx)
        logits = self.head(self.far(x) if idx.size(1) > 16 else x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


class Mixes(NanoGPT):
    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(idx)
        logits = self.head(x - x.mean(0) if idx.size(1) <= 8 else x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


class DividesOtherwise(NanoGPT):
    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits, _ = super().forward(idx, targets)
        summed = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return logits, summed / ((targets != IGNORED).sum() * torch.tensor(1.0 + idx.size(1) / 3))


class Turns(NanoGPT):
    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(idx)
        for layer in self.layers if idx.size(1) > 8 else [self.layers[1], self.layers[0]]:
            x = layer(x)
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (ReadsMore, "other parameters or buffers are read.*far"),
        (Mixes, "mixes examples of a batch"),
        (DividesOtherwise, "What the loss divides by"),
        (Turns, "in another order"),
    ],
)
def test_what_a_list_can_not_have_is_refused(model: type[NanoGPT], why: str) -> None:
    program = Subject(model, "8,32").exported()
    with pytest.raises(gp.GraphparError, match=why):
        gp.partition(program, gp.plan(program, mesh={"dp_shard": 2}))


@pytest.mark.costly
def test_lists_are_named_where_they_help() -> None:
    with pytest.raises(gp.GraphparError, match="list the lengths, as in seq 128,512"):
        program = Subject(InChunks).exported()
        gp.partition(program, gp.plan(program, mesh={"tp": 2}))
    with pytest.raises(gp.GraphparError, match="at least two lengths"):
        gp.export(NanoGPT(), seq="20")


@pytest.mark.slow
def test_more_meshes_and_compiled_blocks(pool: RankPool, tmp_path: Path) -> None:
    cases = [
        Case({"pp": 2}, {"compile": True, "microbatch_size": 2}, compile="aot_eager"),
        Case(
            {"pp": 2}, {"schedule": "Interleaved1F1B", "split": ["layers.0", "layers.1", "norm"], "microbatch_size": 2}
        ),
        Case({"pp": 2, "tp": 2}, {"sp": True, "microbatch_size": 2}, multiple=2),
        Case({"pp": 2, "cp": 2}, {"microbatch_size": 2}, multiple=2),
        Case({"dp_replicate": 2, "pp": 2}, {"microbatch_size": 2}, several=True),
        Case({"dp_shard": 2, "cp": 2}, {"zero": 3}, multiple=2, several=True),
    ]
    check(pool, cases, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2"])
def test_public_architectures(name: str) -> None:
    ids = torch.randint(3, 64, (8, 12))
    program = gp.export(architectures.build(name), (), {"input_ids": ids, "labels": ids.clone()}, seq="5..24")
    meshes: list[dict[str, Any]] = [{"pp": 2}, {"tp": 2}, {"dp_shard": 2}, {"cp": 2}]
    plans = [gp.plan(program, mesh=mesh, **({"sp": True} if "tp" in mesh else {})) for mesh in meshes]
    for mesh, outcome in zip(meshes, verify_all([gp.partition(program, plan) for plan in plans])):
        assert outcome.ok, (mesh, outcome)
