"""train.py on a text: the same losses under every plan, though each rank loads its own rows, and when training goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import graphpar as gp
from graphpar.runtime.errors import LaunchError
from tests.tools.rank_pool import RankPool

TEXT = Path(__file__).parents[2] / "examples" / "texts" / "paradise_lost.txt"
PLANS: Mapping[str, tuple[int, Mapping[str, int], Mapping[str, object]]] = {
    "one": (1, {}, {}),
    "dp": (2, {"dp_replicate": 2}, {}),
    "pp": (2, {"pp": 2}, {"schedule": "1F1B", "microbatch_size": 2}),
    "dp_tp": (4, {"dp_replicate": 2, "tp": 2}, {}),
}
MODEL = """
from tests.end_to_end.test_data import Letters
from tests.end_to_end.test_data import loss_fn
import torch
model = Letters
example_inputs, example_targets = (torch.zeros(8, 16, dtype=torch.int64),), torch.zeros(8, 16, dtype=torch.int64)
"""


class Letters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letter = nn.Embedding(256, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))
        self.head = nn.Linear(16, 256)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.letter(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None])


def loss_fn(logits: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def _saved(folder: Path, plan: str, length: int = 16, rows: int = 8) -> Path:
    _, mesh, options = PLANS[plan]
    example = torch.zeros(rows, length, dtype=torch.int64)
    program = gp.export(Letters, (example,), loss_fn=loss_fn, targets=(example,))
    (folder / "model.py").write_text(MODEL)
    parts = gp.partition(program, gp.plan(program, mesh=mesh, **options), model_file=str(folder / "model.py"))  # type: ignore[arg-type]
    return parts.save(folder / f"{plan}_{length}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for plan in PLANS:
        _saved(folder, plan)
    return folder


def _losses(folder: Path, plan: str, pool: RankPool, *options: str) -> list[float]:
    history = folder / "history.json"
    history.unlink(missing_ok=True)
    given = [*options, "--json", str(history)]
    pool.torchrun(folder / f"{plan}_16" / "train.py", given, nproc=PLANS[plan][0], timeout_s=120)
    return [record["loss"] for record in json.loads(history.read_text())]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[float]:
    """Of an eager loop that takes the whole batches from the text itself."""
    torch.manual_seed(0)
    model = Letters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.tensor(list(TEXT.read_bytes()))
    count = -(-(len(tokens) - 1) // 16)  # the last one is padded, and held out
    count -= count // 10
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    losses = []
    for step in range(6):
        starts = order[step * 8 : step * 8 + 8] * 16
        rows = torch.stack([tokens[start : start + 17] for start in starts])
        loss = loss_fn(model(rows[:, :-1]), rows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.costly
@pytest.mark.parametrize("plan", ["dp", "pp", pytest.param("dp_tp", marks=pytest.mark.slow)])
def test_every_rank_loads_its_rows_of_the_same_batches(
    plan: str, folder: Path, expected: list[float], pool: RankPool
) -> None:
    losses = _losses(folder, plan, pool, "--steps", "3", "--data", str(TEXT), "--lr", "1e-2", "--workers", "1")
    assert losses == pytest.approx(expected[:3], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["one", "dp", "pp"])
def test_another_plan_goes_on_with_the_next_batches(
    plan: str, folder: Path, expected: list[float], pool: RankPool, tmp_path: Path
) -> None:
    options = ["--data", str(TEXT), "--lr", "1e-2", "--checkpoint", str(tmp_path / "ck")]
    before = _losses(folder, "dp", pool, "--steps", "3", *options)
    after = _losses(folder, plan, pool, "--steps", "6", *options)
    assert before + after == pytest.approx(expected, rel=1e-5)


@pytest.mark.costly
def test_a_text_that_is_missing_ends_all_ranks_with_one_sentence(folder: Path, pool: RankPool) -> None:
    with pytest.raises(LaunchError, match=r"there is no file .*gone\.txt; give --data one that exists$"):
        _losses(folder, "dp", pool, "--data", "gone.txt")


@pytest.mark.costly
def test_tokens_that_the_model_does_not_know_end_all_ranks_with_one_sentence(
    folder: Path, pool: RankPool, tmp_path: Path
) -> None:
    """A rank that has a part of the table would compute with zeros."""
    rows = torch.randint(256, (8, 16), generator=torch.Generator().manual_seed(0))
    rows[3, 5] = 256
    save_file({"ids": rows, "following": rows.clone()}, tmp_path / "batch.safetensors")
    for plan in ("one", "dp_tp"):
        with pytest.raises(
            LaunchError, match=r"input \w+ has (token|label) 256; the (model|loss) knows 256 \(0 to 255"
        ):
            _losses(folder, plan, pool, "--batch", str(tmp_path / "batch.safetensors"))


@pytest.mark.costly
def test_another_length_is_another_program_for_the_same_weights(
    folder: Path, expected: list[float], pool: RankPool, tmp_path: Path
) -> None:
    """Trained with 16 tokens, and then with 8, from the same checkpoint."""
    longer, shorter = folder / "one_16", _saved(folder, "dp", length=8)
    history = tmp_path / "history.json"
    options = ["--data", str(TEXT), "--lr", "1e-2", "--checkpoint", str(tmp_path / "ck"), "--json", str(history)]
    pool.torchrun(longer / "train.py", ["--steps", "2", *options], nproc=1, timeout_s=120)
    pool.torchrun(shorter / "train.py", ["--steps", "3", *options], nproc=2, timeout_s=120)
    (record,) = json.loads(history.read_text())
    assert record["loss"] == pytest.approx(expected[2], rel=0.05)  # of other excerpts


STREAMS = '''
import random
from functools import partial

from torch.utils.data import IterableDataset

from graphpar.runtime import batches as of_dataset


class Lines(IterableDataset):
    """Pairs without names, which begin anew with an epoch."""

    def __iter__(self):
        text = open(TEXT, "rb").read()
        for at in range(0, 16 * 20, 16):
            piece = torch.tensor(list(text[at : at + 17]))
            yield piece[:-1], piece[1:]


class Counted(Lines):
    """Knows where it is."""

    at = 0

    def __iter__(self):
        for pair in list(Lines.__iter__(self))[self.at :]:
            self.at += 1
            yield pair
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def masked(examples):
    ids, following = map(torch.stack, zip(*examples))
    return ids, following.masked_fill(torch.rand(following.shape) < random.random(), -100)

'''


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["Lines", "Counted"])
def test_a_stream_goes_on_with_its_next_batch(kind: str, folder: Path, pool: RankPool, tmp_path: Path) -> None:
    """In the middle of its second epoch; also under another plan, and with a function of random numbers that joins examples."""
    given = "Training(pipeline, optimizer, ranks, args, dataset)"
    history = tmp_path / "history.json"

    def losses(plan: str, collated: bool, *options: object) -> list[float]:
        text = (folder / f"{plan}_16" / "train.py").read_text()
        own = f"lambda args, seed, held_out: {kind}()"
        joined = ", partial(of_dataset, collate_fn=masked)" if collated else ""
        text = text.replace(given, f"{given[:-8]}{own}{joined})")
        text = text.replace("PROGRAM = ", f"{STREAMS.replace('TEXT', repr(str(TEXT)))}\nPROGRAM = ", 1)
        script = folder / f"{plan}_16" / f"{kind}_{collated}.py"
        script.write_text(text)
        arguments = [str(each) for each in (*options, "--lr", 1e-2, "--json", history)]
        pool.torchrun(script, arguments, nproc=PLANS[plan][0], timeout_s=120)
        return [record["loss"] for record in json.loads(history.read_text())]

    whole = losses("pp", kind == "Lines", "--steps", 5)
    first = losses("pp", kind == "Lines", "--steps", 3, "--checkpoint", tmp_path / "same")
    then = losses("pp", kind == "Lines", "--steps", 5, "--checkpoint", tmp_path / "same")
    assert first + then == whole and len(then) == 2
    if kind == "Counted":
        first = losses("dp", False, "--steps", 3, "--checkpoint", tmp_path / "other")
        then = losses("pp", False, "--steps", 5, "--checkpoint", tmp_path / "other")
        assert first + then == pytest.approx(whole, rel=1e-5)
        with pytest.raises(LaunchError, match="--workers loads examples by their index"):
            losses("pp", False, "--workers", 1)
