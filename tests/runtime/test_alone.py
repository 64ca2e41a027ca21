"""One process without torchrun: what fails there ends the block, and a notebook goes on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from transformers import BatchEncoding

import graphpar as gp
from graphpar.runtime import Pipeline, distributed, start
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.launching import launch
from graphpar.runtime.training.data import load


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [(RuntimeProgramError("no such weight"), 2, "error: no such weight"), (ValueError("odd"), 1, "ValueError: odd")],
)
def test_what_fails_leaves_the_process(
    error: Exception, status: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left, start():
        raise error
    assert left.value.code == status and said in capfd.readouterr().err
    assert not dist.is_initialized()
    with start() as ranks:
        assert ranks.world_size == 1


@dataclass
class Pair:
    ids: Tensor
    labels: Tensor


class Two(NamedTuple):
    ids: Tensor
    labels: Tensor


class Labelled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(11, 4), nn.Linear(4, 12)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.words(ids))
        return logits


def plain(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return plain(logits[:, :-1], labels[:, 1:])


@pytest.mark.costly
@pytest.mark.parametrize("loss_fn", [plain, shifted])
def test_batches_that_do_not_fit_are_named(loss_fn: Any, tmp_path: Path) -> None:
    ids, labels = torch.randint(11, (2, 4, 6))
    program = gp.export(Labelled, (ids,), loss_fn=loss_fn, targets=(labels,), evaluates=True)
    gp.partition(program, gp.plan(program)).save(tmp_path / "out", weights=Labelled().state_dict())
    with start() as ranks, Pipeline(tmp_path / "out", ranks.device) as pipeline:
        pipeline.load_weights()
        pipeline.step({"ids": ids, "labels": labels.masked_fill(labels == 3, -1)})
        for wrong in (12, -7):
            said = rf"labels has label {wrong}; the loss knows 12 \(0 to 11, and -1, which is ignored\)"
            if loss_fn is shifted:
                said = f"a loss got the label {wrong}, which is not one of its classes; labels of the batch has it"
            with pytest.raises(RuntimeProgramError, match=said):
                pipeline.step({"ids": ids, "labels": labels.index_fill(1, torch.tensor(3), wrong)})
        for given in (ids, "ids", [ids.tolist()] * 2):
            with pytest.raises(RuntimeProgramError, match=r'by name, \{"ids": ..., "labels": ...\}|has 4 values'):
                pipeline.step(given)
        with pytest.raises(
            RuntimeProgramError, match="has 3 values, but the program has 2 inputs, in this order: ids, labels"
        ):
            pipeline.step((ids, labels, labels))
        expected = pipeline.eval({"ids": ids, "labels": labels})
        pair = Pair(ids, labels)
        for given in (
            (ids, labels),
            [ids, labels],
            [(ids, labels)],
            pair,
            [pair],
            Two(ids, labels),
            BatchEncoding(vars(pair)),
        ):
            assert pipeline.eval(given) == expected
        assert set(pipeline.eval({"ids": ids, "labels": labels}) or {}) == {"loss"}


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(
        self, x: Tensor, *, context: dict[str, Any], levels: list[Tensor], steps: int, gate: Any = None
    ) -> Tensor:
        y: Tensor = self.linear(x) + context["shift"]["by"] / steps + sum(levels)
        return y if gate is None else y * gate


def test_arguments_are_given_as_the_model_takes_them(tmp_path: Path) -> None:
    def batch(seed: int) -> dict[str, Any]:
        x, by, one, other = torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(seed))
        return {"x": x, "context": {"shift": {"by": by}}, "levels": [one, other], "steps": 2, "gate": None}

    def squares(found: Tensor, of: dict[str, Tensor]) -> Tensor:
        return (found - of["y"]).square().mean()

    target = {"of": {"y": torch.zeros(8, 4)}}
    program = gp.export(Nested, (), batch(0), loss_fn=squares, targets=(target["of"],), evaluates=True)
    model = Nested()
    gp.partition(program, gp.plan(program)).save(tmp_path / "out", weights=model.state_dict())
    with start() as ranks, Pipeline(tmp_path / "out", ranks.device) as pipeline:
        pipeline.load_weights()
        whole = batch(1)
        flat = {
            "x": whole["x"], "context_shift_by": whole["context"]["shift"]["by"], "levels_0": whole["levels"][0],
            "levels_1": whole["levels"][1], "of_y": target["of"]["y"],
        }  # fmt: skip
        true = squares(model(**whole), target["of"])
        for given in ({**whole, **target}, flat, [{**whole, **target}]):
            torch.testing.assert_close(pipeline.step(given), true)
            torch.testing.assert_close((pipeline.eval(given) or {})["loss"], true)
        rows = [
            {
                "x": whole["x"][row], "context": {"shift": {"by": whole["context"]["shift"]["by"][row]}},
                "levels": [level[row] for level in whole["levels"]], "steps": 2, "of": {"y": torch.zeros(4)},
            }
            for row in range(8)
        ]  # fmt: skip
        (loaded,) = load(pipeline, lambda: rows, once=True)  # type: ignore[arg-type,return-value]
        torch.testing.assert_close(pipeline.step(loaded), true)
        lists = [{**row, "x": row["x"].tolist(), "text": "of a dataset"} for row in rows]
        pairs = [tuple(flat[name][row].tolist() for name in flat) for row in range(8)]
        for given in (lists, pairs):
            (loaded,) = load(pipeline, lambda given=given: given, once=True)  # type: ignore[misc]
            torch.testing.assert_close(pipeline.step(loaded), true)
        for other in ({"steps": 3}, {"gate": 1.0}, {"gate": torch.ones(8, 4)}):
            ((name, _),) = other.items()
            with pytest.raises(
                RuntimeProgramError, match=f"was compiled with {name}={whole[name]}, which is part of the program"
            ):
                pipeline.step({**whole, **target, **other})
        with pytest.raises(RuntimeProgramError, match="no input 'levels_2'"):
            pipeline.step({**whole, **target, "levels": [*whole["levels"], whole["x"]]})


# ---- whose error it is -----------------------------------------------------------------------------------------------

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:12448."


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("the database timed out waiting; connection reset by peer"), False),
        (RuntimeError(f"my loader said: {GLOO}"), False),
        (ValueError(GLOO), False),
        (RuntimeError(GLOO), True),
        (
            RuntimeError(
                "[/x/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation"
            ),
            True,
        ),
        (dist.DistBackendError("NCCL error: remote process exited or there was a network error"), True),
        (dist.DistNetworkError("failed to recv, got 0 bytes"), True),
        (dist.DistStoreError("wait timeout after 300000ms"), True),
        (dist.DistBackendError("NCCL error: invalid usage"), False),
    ],
)
def test_a_rank_that_lost_a_peer_is_told_by_who_raises(error: Exception, lost: bool) -> None:
    assert distributed.lost_peer(error) == lost


def test_the_rank_that_left_is_named(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    store = HashStore()
    store.set(f"{distributed.LEFT}1", "")
    with pytest.raises(SystemExit), start():
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
        monkeypatch.setattr(dist, "get_world_size", lambda: 3)
        raise RuntimeError(GLOO)
    assert (
        "rank 1 ended without an error while this rank waits for it: it left its loop early" in capfd.readouterr().err
    )
    monkeypatch.undo()
    monkeypatch.setattr(distributed, "note_left", lambda: store.set("noted", ""))
    with start():
        pass
    assert store.check(["noted"])


def test_the_rank_that_ended_without_a_word_is_named(tmp_path: Path) -> None:
    failures = [launch._Failure(rank, "gone", "", 1, True, False, "closed by peer", False) for rank in (0, 2)]
    printed = launch._Printed(tmp_path, None, None)

    error = launch._error(failures, 3, True, 10.0, 1, "", printed)

    assert (
        error.rank == 1
        and "ended without an error while rank 0 waits for it" in str(error)
        and "closed by peer" in str(error)
    )
    own = launch._Failure(2, "mine", "trace", 2, False, False, "", False)
    assert launch._error([own, *failures], 3, True, 10.0, 1, "", printed).rank == 2
