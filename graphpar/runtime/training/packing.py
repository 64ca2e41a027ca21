"""Documents packed into sequences of one length, so that few positions are padding.

    tokens  a a a E b E c c c c E ...  ──documents that end with E──► shuffled, each into the first open row with room ──► rows

A row has whole documents. Its positions start again with each, and no label is the first token of another document.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.training.data import IGNORED, TokenFiles, pad

OPEN = 64
"""How many rows may have room at once: the fullest is closed for another."""


class PackedDataset(Dataset[dict[str, Tensor]]):
    """A language model's examples: rows of ``length`` tokens, of whole documents that fit into them.

    A document longer than a row is cut into rows of its own, and a rest that is packed like another document. The rows depend on the
    files, the length and the seed alone, so that every plan trains on the same batches.

    Args:
        path: as :class:`TokenDataset` takes it; documents go to the end of a file where nothing ends them before.
        end: the token with which each document ends.
        ids, labels, positions: the names of the program's inputs; ``positions`` start again with each document, and are None where the
            model sees documents by their ends.
        ahead: 1 where the label of a position is the next token, 0 where the model itself compares with the next one.
        seed: of the order in which documents are packed.
        held_out: as in :class:`TokenDataset`.

    Attributes:
        filled: the share of positions that are no padding.

    Raises:
        RuntimeProgramError: there are no such files, they are too short, or have other tokens.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        length: int,
        vocabulary: int,
        end: int,
        ids: str,
        labels: str | None = None,
        positions: str | None = None,
        ahead: int = 1,
        seed: int = 0,
        held_out: bool = False,
    ) -> None:
        if not 0 <= end < vocabulary:
            raise RuntimeProgramError(f"end={end} is no token: the model knows {vocabulary}, from 0 on")
        self._length, self._names, self._ahead = length, (ids, labels, positions), ahead
        self._source = TokenFiles(path, vocabulary, held_out)
        spans = [
            (file, *span) for file, tokens in enumerate(self._source.tokens) for span in _documents(tokens, end, length)
        ]
        spans = [spans[place] for place in self._source.kept(len(spans), held_out)]
        if not spans:
            raise RuntimeProgramError(f"{path} has no documents{' that are held out' if held_out else ''}")
        spans = [spans[place] for place in np.random.default_rng(seed).permutation(len(spans)).tolist()]
        self._rows = [[spans[place] for place in row] for row in packed([count for *_, count in spans], length)]
        self.filled = sum(count for *_, count in spans) / (length * len(self._rows))

    @property
    def files(self) -> list[Path]:
        """The files that it reads."""
        return self._source.files

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids, labels, positions = self._names
        documents = [self._source.read(*span) for span in self._rows[index]]
        targets = [pad(each[self._ahead :], len(each)) for each in documents]
        if not self._ahead:  # the first of a document is compared with what the document before gives
            targets = [each.index_fill(0, torch.tensor([0]), IGNORED) for each in targets]
        rest = self._length - sum(map(len, documents))
        counted = [torch.arange(len(each)) for each in documents] + [torch.arange(rest)]
        made = {ids: pad(torch.cat(documents), self._length, 0)}
        made |= {} if labels is None else {labels: pad(torch.cat(targets), self._length)}
        return made | ({} if positions is None else {positions: torch.cat(counted)})


def _documents(tokens: Any, end: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield the first token and the number of tokens of each document of a file, or of each part of it that is at most a row."""
    ends = (np.flatnonzero(np.asarray(tokens) == end) + 1).tolist()
    for begin, stop in itertools.pairwise(dict.fromkeys([0, *ends, len(tokens)])):
        for first in range(begin, stop, length):
            yield first, min(length, stop - first)


def packed(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Put each of ``lengths`` into the first open row of ``room`` that it fits in, in order; return what each row has, by place."""
    rows: list[list[int]] = []
    open_rows: list[list[int]] = []  # room, and number of the row
    for place, length in enumerate(lengths):
        fitting = next((each for each in open_rows if each[0] >= length), None)
        if fitting is None:
            if len(open_rows) == OPEN:
                open_rows.remove(min(open_rows))
            fitting = [room, len(rows)]
            open_rows.append(fitting)
            rows.append([])
        fitting[0] -= length
        rows[fitting[1]].append(place)
    return rows
