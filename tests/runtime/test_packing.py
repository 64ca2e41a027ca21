"""Documents packed into rows: which are where, with which labels and positions."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphpar.runtime import PackedDataset, RuntimeProgramError
from graphpar.runtime.training.packing import OPEN, packed

END = 9


def _file(tmp_path: Path, *documents: list[int]) -> Path:
    path = tmp_path / "tokens.npy"
    np.save(path, np.array([token for document in documents for token in document], dtype=np.int32))
    return path


def _dataset(path: Path, **options: Any) -> PackedDataset:
    given = {"length": 8, "vocabulary": 10, "end": END, "ids": "ids", "labels": "labels", "positions": "positions"}
    return PackedDataset(path, **{**given, **options})


@given(st.lists(st.integers(1, 12), max_size=300))
def test_rows_have_each_document_once_and_no_more_than_fits(lengths: list[int]) -> None:
    rows = packed(lengths, 12)
    assert sorted(place for row in rows for place in row) == list(range(len(lengths)))
    assert all(sum(lengths[place] for place in row) <= 12 for row in rows)
    if len(rows) <= OPEN:  # first fit
        assert sum(2 * sum(lengths[place] for place in row) <= 12 for row in rows) <= 1


def test_positions_start_again_and_labels_stay_in_their_document(tmp_path: Path) -> None:
    data = _dataset(_file(tmp_path, [1, 2, END], [3, END], [1, END], [4, 5, 6, 7, END]))
    assert data.filled == 7 / 8 and len(data) == 1  # the last document is held out
    for row in (data[index] for index in range(len(data))):
        ids, labels, positions = (row[name].tolist() for name in ("ids", "labels", "positions"))
        assert len(ids) == len(labels) == len(positions) == 8
        for place, label in enumerate(labels):
            if label != -100:
                assert ids[place + 1] == label and positions[place + 1] == positions[place] + 1
        assert all(labels[place] == -100 for place, token in enumerate(ids) if token == END)


def test_labels_of_a_model_that_shifts_them_itself(tmp_path: Path) -> None:
    row = _dataset(_file(tmp_path, [1, 2, END], [3, 4, END], [5, END]), ahead=0)[0]
    begins = row["positions"] == 0
    real = torch.arange(8) < 6
    assert (row["labels"][begins & real] == -100).all() and (
        row["labels"][~begins & real] == row["ids"][~begins & real]
    ).all()


def test_rows_follow_the_seed_and_survive_a_worker(tmp_path: Path) -> None:
    path = _file(tmp_path, *([token % 9] * (token % 5) + [END] for token in range(40)))
    one, same, other = _dataset(path), _dataset(path), _dataset(path, seed=1)
    ids = [[row["ids"].tolist() for row in (data[i] for i in range(len(data)))] for data in (one, same, other)]
    assert ids[0] == ids[1] != ids[2]
    assert pickle.loads(pickle.dumps(one))[0]["ids"].tolist() == ids[0][0]
    held = _dataset(path, held_out=True)
    assert 0 < sum(int((row["labels"] != -100).sum()) for row in (held[i] for i in range(len(held)))) < 20


def test_a_long_document_is_cut_into_rows(tmp_path: Path) -> None:
    data = _dataset(_file(tmp_path, [*range(1, 9)] * 2 + [1, END], [2, END]))
    assert sorted(len(set(data[i]["ids"].tolist())) for i in range(len(data)))[-1] == 8
    assert sum(int((data[i]["labels"] != -100).sum()) for i in range(len(data))) == 7 + 7 + 1


def test_what_is_no_token_is_said(tmp_path: Path) -> None:
    with pytest.raises(RuntimeProgramError, match="end=10 is no token: the model knows 10"):
        _dataset(_file(tmp_path, [1, END]), end=10)
    with pytest.raises(RuntimeProgramError, match="has token 12"):
        _dataset(_file(tmp_path, [12, END], [1, END]))[0]
