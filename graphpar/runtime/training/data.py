"""Which examples of a dataset make each global batch, and which of them a rank loads.

    dataset, seed ──shuffled by epoch──► global batches 0, 1, 2, ... ──rows of this replica──► DataLoader ──► this rank's inputs

The batches depend on the dataset, the seed and the size of a global batch alone, so training goes on with the same ones under any plan.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from graphpar.runtime.distributed import agreed, gather_objects
from graphpar.runtime.errors import AgreedError, RuntimeProgramError
from graphpar.runtime.training.collate import Collate, Collator
from graphpar.runtime.training.streams import Stream

if TYPE_CHECKING:
    from graphpar.runtime.pipeline import Pipeline

IGNORED = -100
"""The label that ``cross_entropy`` ignores."""
HELD_OUT = 10
"""One of so many examples is held out, where no file is."""


class Rows(Sampler[list[int]]):
    """The examples of one replica in each global batch, from batch ``first`` on.

    Args:
        examples: of the dataset. Each epoch has them in another order; those that are left over by its last whole batch are dropped.
        batch: examples of a global batch.
        rows: those of this replica in each.
        once: go through the dataset once and in order, rather than in epochs without end.
    """

    def __init__(
        self, examples: int, batch: int, rows: slice, *, seed: int = 0, first: int = 0, once: bool = False
    ) -> None:
        self._examples = examples
        self._batch = batch
        self._rows = rows
        self._seed = seed
        self._first = first
        self._once = once

    def __iter__(self) -> Iterator[list[int]]:
        batches = self._examples // self._batch
        epoch, begun = divmod(self._first, batches)
        while not (self._once and epoch):
            order = self._order(epoch)
            for batch in range(begun, batches):
                yield order[batch * self._batch : (batch + 1) * self._batch][self._rows].tolist()
            epoch, begun = epoch + 1, 0

    def _order(self, epoch: int) -> Tensor:
        if self._once:
            return torch.arange(self._examples)
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        return torch.randperm(self._examples, generator=generator)


def load(
    pipeline: Pipeline,
    dataset: Callable[[], Dataset[Any] | Iterable[Any]],
    *,
    seed: int = 0,
    first: int = 0,
    workers: int = 0,
    once: bool = False,
    collate_fn: Collate | None = None,
) -> Iterator[dict[str, Tensor]]:
    """Yield what this rank needs of each global batch, from batch ``first`` on; a collective call.

    Args:
        dataset: makes a map-style dataset, the same on every rank. Its items are one example's inputs and targets: dicts by name,
            dataclasses, or tuples in the order of the inputs. Inputs that have no rows are taken from the first of a batch, so they
            must be the same in all examples. Or an iterable of such items, or a DataLoader of global batches: a :class:`Stream`.
        seed: of the order of the examples.
        workers: processes of this rank that load examples.
        once: go through the dataset once and in order, rather than in epochs without end, each in another order.
        collate_fn: makes this rank's rows of a batch of their examples; what it draws at random depends on the seed and the batch.

    Raises:
        RuntimeProgramError: the dataset is smaller than a batch or not the same everywhere; later, that an example doesn't fit the program.
    """
    part, program = pipeline.data, pipeline.program
    with agreed():
        examples: Any = dataset()
        collate = Collator(program, part.names, collate_fn, seed)
        indexed = hasattr(examples, "__len__") and hasattr(examples, "__getitem__")
        if isinstance(examples, IterableDataset | DataLoader) or not indexed:
            if not hasattr(examples, "__iter__"):
                raise RuntimeProgramError(
                    f"dataset() returned a {type(examples).__name__}; it must have a length and items by index, or be iterable"
                )
            if workers:
                raise RuntimeProgramError(
                    "--workers loads examples by their index, which an iterable dataset has not: leave it out, or return a DataLoader "
                    "of global batches that has workers of its own"
                )
            if collate_fn is not None and isinstance(examples, DataLoader):
                raise RuntimeProgramError(
                    "a DataLoader that dataset() returns joins its examples itself: give it the collate_fn"
                )
            return Stream(examples, collate, program.global_batch, part.rows, first, once)
        if len(examples) < program.global_batch:
            source = f" of {', '.join(map(str, examples.files))}" if isinstance(examples, TokenDataset) else ""
            number = f"{len(examples)} example{'s' if len(examples) != 1 else ''}{' that are held out' if once else ''}"
            raise RuntimeProgramError(
                f"the dataset{source} has {number}, too few for a batch of {program.global_batch}"
            )
    for rank, count in enumerate(gather_objects(len(examples))):
        if count != len(examples):
            raise AgreedError(
                f"the dataset has {len(examples)} examples on rank {pipeline.rank}, but {count} on rank {rank}"
            )
    rows = Rows(len(examples), program.global_batch, part.rows, seed=seed, first=first, once=once)
    if not part.names:  # the stages of this rank only compute with what others send
        return ({} for _ in rows)
    loader = DataLoader(
        _Numbered(examples),
        batch_sampler=([(number, index) for index in own] for number, own in enumerate(rows, first)),
        num_workers=workers,
        collate_fn=collate.of_numbered,
        pin_memory=pipeline.device.type == "cuda",
        worker_init_fn=_outlast_a_stop,
    )
    return _with_plain_errors(loader)


def _outlast_a_stop(worker: int) -> None:
    """Let a worker end by its rank's SIGTERM alone, not by one that Slurm sends to every process: the rank takes another step."""
    if not hasattr(signal, "sigwaitinfo"):
        return
    rank = os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank:
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def first_batches(batches: Iterator[dict[str, Tensor]], number: int) -> list[dict[str, Tensor]]:
    """Return so many held-out batches.

    Raises:
        AgreedError: there are fewer.
    """
    found = list(itertools.islice(batches, number))
    if len(found) < number:
        raise AgreedError(f"--eval-batches is {number}, but the examples that are held out fill only {len(found)}")
    return found


class _Numbered(Dataset[Any]):
    """The examples of a dataset, each with the number of its batch."""

    def __init__(self, examples: Any) -> None:
        self._examples = examples

    def __getitem__(self, place: tuple[int, int]) -> tuple[int, Any]:
        return place[0], self._examples[place[1]]


def _with_plain_errors(loader: DataLoader[Any]) -> Iterator[dict[str, Tensor]]:
    """What is raised in a worker comes with the text of its traceback."""
    try:
        yield from loader
    except RuntimeProgramError as error:
        raise RuntimeProgramError(
            str(error).strip().splitlines()[-1].partition("RuntimeProgramError: ")[2] or str(error)
        ) from None


# ---- text ------------------------------------------------------------------------------------------------------------


class TokenFiles:
    """Files of tokens, mapped into memory.

    Attributes:
        files: those of the path that are held out, or all others; ``tokens``: of each.
        apart: whether what is held out is files of its own, those of a folder whose names begin with ``val``.

    Raises:
        RuntimeProgramError: there are no such files, or they have other tokens.
    """

    def __init__(self, path: str | Path, vocabulary: int, held_out: bool) -> None:
        self._vocabulary = vocabulary
        files = _files(Path(path))
        apart = [file for file in files if file.stem.startswith("val")] if len(files) > 1 else []
        self.apart = bool(apart)
        self.files = [file for file in files if (file in apart) is held_out] if apart else files
        self.tokens = [_tokens(file, vocabulary) for file in self.files]

    def kept(self, count: int, held_out: bool) -> range:
        """Return which of so many examples, in order, are those that are held out, or the others."""
        kept = count - max(1, count // HELD_OUT) if not self.apart and count > 1 else count
        return range(kept, count) if held_out and not self.apart else range(kept)

    def read(self, file: int, begin: int, count: int) -> Tensor:
        """Read at most so many tokens of a file, as int64."""
        values = np.asarray(self.tokens[file][begin : begin + count]).astype(np.int64)
        if (largest := int(values.max())) >= self._vocabulary or int(values.min()) < 0:
            raise RuntimeProgramError(
                f"{self.files[file]} has token {largest if largest >= self._vocabulary else int(values.min())} between {begin} and "
                f"{begin + len(values)}; the model knows {self._vocabulary}"
            )
        return torch.from_numpy(values)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "tokens": None}  # a memory map would be copied to a worker that is not a fork

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, tokens=[_tokens(file, state["_vocabulary"]) for file in state["files"]])


class TokenDataset(Dataset[dict[str, Tensor]]):
    """A language model's examples: sequences of ``length`` tokens, cut from files one after the other.

    A file is a text, whose bytes are the tokens, or has token ids: ``.npy``, ``.safetensors`` (one tensor), or ``.bin`` as nanoGPT writes
    it, of 16 bits where the vocabulary has at most 65,536 tokens, else of 32. Files are mapped into memory, not read. Of a folder, the
    token files are taken, or if it has none, ``*.txt``. The last piece of a file, if it is shorter, is padded with tokens 0 whose labels
    are ignored, which changes nothing under causal attention.

    Args:
        vocabulary: how many tokens the model knows.
        dtype: of the tokens that the model takes.
        ids, labels: the names of the program's inputs; ``labels`` is None for inference.
        ahead: 1 where the label of a position is the next token, 0 where the model itself compares with the next one.
        padded: whether the loss ignores labels of -100; else shorter pieces are dropped.
        held_out: the files of the folder that begin with ``val``, or if there are none, the last tenth of the examples; else all others.

    Raises:
        RuntimeProgramError: there are no such files, they are too short, or have other tokens.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        length: int,
        vocabulary: int,
        ids: str,
        labels: str | None = None,
        ahead: int = 1,
        padded: bool = False,
        dtype: torch.dtype = torch.int64,
        held_out: bool = False,
    ) -> None:
        self._length, self._dtype = length, dtype
        self._ids, self._labels, self._ahead = ids, labels, ahead if labels is not None else 0
        self._source = TokenFiles(path, vocabulary, held_out)
        self._pieces: list[int] = []  # of each file
        for tokens in self._source.tokens:
            whole = max(0, (len(tokens) - self._ahead) // length)
            self._pieces.append(whole + (padded and labels is not None and len(tokens) - whole * length > 1))
        if not (pieces := sum(self._pieces)):
            sizes = sum(map(len, self._source.tokens))
            raise RuntimeProgramError(f"{path} has {sizes} tokens, too few for a sequence of {length}")
        self._range = self._source.kept(pieces, held_out)

    @property
    def files(self) -> list[Path]:
        """The files that it reads."""
        return self._source.files

    def __len__(self) -> int:
        return len(self._range)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        file, piece = 0, self._range[index]
        while piece >= self._pieces[file]:
            file, piece = file + 1, piece - self._pieces[file]
        tokens = self._source.read(file, piece * self._length, self._length + self._ahead)
        labels = {} if self._labels is None else {self._labels: pad(tokens[self._ahead :], self._length)}
        return {**labels, self._ids: pad(tokens[: self._length], self._length, 0).to(self._dtype)}


def pad(values: Tensor, length: int, filler: int = IGNORED) -> Tensor:
    """Lengthen a sequence to ``length`` with ``filler`` at its end.

    Token ids with any token, labels with -100, which ``cross_entropy`` ignores: under causal attention nothing else changes.
    """
    return torch.nn.functional.pad(values, (0, length - len(values)), value=filler)


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise RuntimeProgramError(f"there is no file {path}; give --data one that exists")
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.iterdir() if file.suffix in _READERS) or sorted(path.glob("*.txt"))
    if not found:
        raise RuntimeProgramError(f"{path} has no token files ({', '.join(_READERS)}) and no .txt files")
    return found


def _tokens(file: Path, vocabulary: int) -> Any:
    """Map a file's tokens into memory."""
    if file.stat().st_size == 0:
        raise RuntimeProgramError(f"{file} is empty")
    if file.suffix not in _READERS and vocabulary < 256:
        raise RuntimeProgramError(
            f"{file} is a text, whose bytes would be the tokens, but the model knows only {vocabulary} tokens, not 256"
        )
    try:
        tokens = _READERS.get(file.suffix, _bytes)(file, vocabulary)
    except Exception as error:
        raise RuntimeProgramError(f"{file} can't be read: {error}") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise RuntimeProgramError(f"{file} has {tokens.dtype} of shape {list(tokens.shape)}, not a row of token ids")
    return tokens


def _bytes(file: Path, vocabulary: int) -> Any:
    tokens = np.memmap(file, np.uint8, "r")
    if file.suffix not in ("", ".txt") and not tokens[:4096].all():
        raise ValueError(f"it has zero bytes, so it is not a text (.txt), nor one of {', '.join(_READERS)}")
    return tokens


def _bin(file: Path, vocabulary: int) -> Any:
    tokens: Any = np.memmap(file, np.uint16 if vocabulary <= 2**16 else np.uint32, "r")
    if tokens.dtype == np.uint16 and len(tokens) > 1 and not tokens[1:4096:2].any():
        raise ValueError(f"it seems to have tokens of 32 bits; a vocabulary of {vocabulary} has 16")
    return tokens


def _npy(file: Path, vocabulary: int) -> Any:
    return np.load(file, mmap_mode="r")


def _safetensors(file: Path, vocabulary: int) -> Any:
    (tokens,) = load_file(file).values()
    return tokens.numpy()


_READERS: dict[str, Callable[[Path, int], Any]] = {".bin": _bin, ".npy": _npy, ".safetensors": _safetensors}
