"""Which examples a rank loads, what is read from texts and token files, and that training goes on with the same batches."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

import graphpar as gp
from graphpar.codegen.token_inputs import TokenInputs, token_inputs
from graphpar.runtime import RuntimeProgramError, TokenDataset, first_batches, pad
from graphpar.runtime.training.data import Rows
from tests.tools.programs import example


def _rows(examples: int, batch: int, replica: int, replicas: int, first: int = 0, seed: int = 0) -> Rows:
    own = batch // replicas
    return Rows(examples, batch, slice(replica * own, (replica + 1) * own), seed=seed, first=first)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 30), st.integers(0, 9), st.integers(0, 5))
def test_replicas_have_the_rows_of_the_same_batches_from_any_one_on(
    own: int, replicas: int, more: int, first: int, seed: int
) -> None:
    batch = own * replicas
    examples = batch + more
    count = 2 * (examples // batch) + 1  # more than two epochs

    def taken(replica: int, of: int, first: int = 0) -> list[list[int]]:
        return list(itertools.islice(_rows(examples, batch, replica, of, first, seed), count))

    whole = taken(0, 1)
    parts = [taken(replica, replicas) for replica in range(replicas)]
    assert [list(itertools.chain(*rows)) for rows in zip(*parts)] == whole
    assert taken(0, 1, first)[: max(0, count - first)] == whole[first:]
    for epoch in range(2):
        begin = epoch * (examples // batch)
        seen = list(itertools.chain(*whole[begin : begin + examples // batch]))
        assert len(set(seen)) == len(seen) == examples // batch * batch and set(seen) <= set(range(examples))


def test_epochs_are_shuffled_and_one_pass_is_not() -> None:
    rows = list(itertools.islice(_rows(12, 12, 0, 1), 2))
    assert rows[0] != rows[1] and rows[0] != list(range(12))
    assert list(Rows(7, 2, slice(1, 2), once=True)) == [[1], [3], [5]]


def _dataset(path: Path, length: int = 4, vocabulary: int = 300, **options: object) -> TokenDataset:
    given: dict[str, object] = {"ids": "ids", "labels": "labels", **options}
    return TokenDataset(path, length=length, vocabulary=vocabulary, **given)  # type: ignore[arg-type]


def _examples(data: TokenDataset) -> list[dict[str, list[int]]]:
    return [{name: value.tolist() for name, value in data[index].items()} for index in range(len(data))]


def test_labels_are_the_next_tokens_and_what_is_left_is_padded(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(range(11)))
    first, second = [0, 1, 2, 3], [4, 5, 6, 7]

    assert _examples(_dataset(file)) == [{"ids": first, "labels": [1, 2, 3, 4]}]
    assert _examples(_dataset(file, held_out=True)) == [{"ids": second, "labels": [5, 6, 7, 8]}]
    assert _examples(_dataset(file, padded=True))[1] == {"ids": second, "labels": [5, 6, 7, 8]}
    assert _examples(_dataset(file, padded=True, held_out=True)) == [
        {"ids": [8, 9, 10, 0], "labels": [9, 10, -100, -100]}
    ]
    assert _examples(_dataset(file, ahead=0)) == [{"ids": first, "labels": first}]
    assert _examples(_dataset(file, labels=None)) == [{"ids": first}]
    assert _dataset(file, dtype=torch.int32)[0]["ids"].dtype is torch.int32


@pytest.mark.parametrize("kind", ["uint16.bin", "uint32.bin", "npy", "safetensors"])
def test_token_files(kind: str, tmp_path: Path) -> None:
    tokens = np.arange(200, 241)
    path = tmp_path / f"some.{kind.rpartition('.')[2]}"
    if kind.endswith("bin"):
        tokens.astype(kind.partition(".")[0]).tofile(path)
    elif kind == "npy":
        np.save(path, tokens)
    else:
        save_file({"tokens": torch.from_numpy(tokens)}, path)
    data = _dataset(path, vocabulary=70_000 if "32" in kind else 300)

    assert len(data) == 9
    assert data[8]["ids"].tolist() == [232, 233, 234, 235] and data[8]["labels"].tolist() == [233, 234, 235, 236]
    assert _examples(pickle.loads(pickle.dumps(data))) == _examples(data)
    assert len(pickle.dumps(data)) < 2000


def test_a_folder_with_files_for_validation(tmp_path: Path) -> None:
    """As nanoGPT lays it out: the text beside its tokens is left alone."""
    (tmp_path / "input.txt").write_text("some text")
    np.arange(20, dtype=np.uint16).tofile(tmp_path / "train.bin")
    np.arange(30, 39, dtype=np.uint16).tofile(tmp_path / "val.bin")

    assert [row["ids"][0] for row in _examples(_dataset(tmp_path))] == [0, 4, 8, 12]
    assert [row["ids"][0] for row in _examples(_dataset(tmp_path, held_out=True))] == [30, 34]


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    text, empty, table, wide, folder = (
        tmp_path / name for name in ("text", "empty", "table.npy", "wide.bin", "folder")
    )
    text.write_bytes(b"abcdef")
    empty.touch()
    folder.mkdir()
    np.save(table, np.zeros((2, 2)))
    np.arange(1, 50, dtype=np.uint32).tofile(wide)

    for path, message, options in (
        (tmp_path / "gone", "there is no file .*gone; give --data", {}),
        (folder, r"folder has no token files \(.bin, .npy, .safetensors\) and no .txt files", {}),
        (empty, "empty is empty", {}),
        (text, "text has 6 tokens, too few for a sequence of 8", {"length": 8}),
        (text, "the model knows only 100 tokens, not 256", {"vocabulary": 100}),
        (table, r"table.npy has float64 of shape \[2, 2\], not a row of token ids", {}),
        (wide, "wide.bin can't be read: it seems to have tokens of 32 bits; a vocabulary of 300 has 16", {}),
    ):
        with pytest.raises(RuntimeProgramError, match=message):
            _dataset(path, **options)
    np.arange(298, 310, dtype=np.uint16).tofile(wide)
    with pytest.raises(RuntimeProgramError, match=r"wide.bin has token 302 between 0 and 5; the model knows 300"):
        _dataset(wide)[0]


def test_more_evaluation_than_is_held_out_is_refused() -> None:
    assert len(first_batches(iter([{}] * 3), 2)) == 2
    with pytest.raises(RuntimeProgramError, match=r"--eval-batches is 4, .* held out fill only 3"):
        first_batches(iter([{}] * 3), 4)


def _found(name: str) -> tuple[object, ...] | str:
    found = token_inputs(example(name))
    if isinstance(found, str):
        return found
    assert isinstance(found, TokenInputs) and found.labels is not None
    return found.ids.name, found.labels.name, found.length, found.vocabulary, found.ahead, found.padded


def test_what_a_model_compares_with_the_next_token() -> None:
    """Hugging Face's models shift the labels themselves."""
    assert _found("gpt") == ("ids", "labels", 16, 211, 1, True)
    assert _found("gpt2_tiny") == ("input_ids", "labels", 16, 211, 0, True)
    assert _found("llama") == "it can't fill attention_mask and labels from a text"
    assert _found("resnet") == "no input is a batch of token ids"
    assert _found("t5") == "it can't fill labels from a text"


def _weighted(y: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(y.flatten(0, 1), labels.flatten(), torch.linspace(1, 2, 11))


def _of_each_half(y: Tensor, labels: Tensor) -> Tensor:
    """The mean over small labels and that over large ones."""
    losses = functional.cross_entropy(y.flatten(0, 1), labels.flatten(), reduction="none")
    halves = functional.one_hot(labels.flatten().clamp(min=0) // 6, 2).float()
    return ((losses @ halves) / halves.sum(0).clamp(min=1)).sum()


def _of_each_class(y: Tensor, labels: Tensor) -> Tensor:
    """None of them is ignored: ``one_hot`` takes no -100."""
    return functional.cross_entropy(y.flatten(0, 1), labels.flatten()) / functional.one_hot(labels, 11).sum().sqrt()


@pytest.mark.parametrize("loss_fn", [_weighted, _of_each_half, _of_each_class])
def test_a_loss_that_divides_by_something_else_says_nothing_of_the_next_token(loss_fn: Callable[..., Tensor]) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(11, 8), torch.nn.Linear(8, 11))
    ids = torch.randint(11, (4, 5))
    program = gp.export(model, (ids,), loss_fn=loss_fn, targets=(ids,))
    assert token_inputs(program) == "the loss doesn't say whether labels are the next tokens"


def test_padding_changes_nothing_but_the_length() -> None:
    values: Tensor = torch.tensor([5, 6])
    assert pad(values, 4).tolist() == [5, 6, -100, -100]
    assert pad(values, 2, 0).tolist() == [5, 6]


def test_a_binary_file_is_not_taken_for_a_text(tmp_path: Path) -> None:
    (tmp_path / "data.parquet").write_bytes(b"PAR1\x00\x01" * 100)
    with pytest.raises(RuntimeProgramError, match="it has zero bytes, so it is not a text"):
        TokenDataset(tmp_path / "data.parquet", length=8, vocabulary=256, ids="ids")
