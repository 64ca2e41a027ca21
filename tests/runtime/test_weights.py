"""How weights are written and read: one whole tensor in memory at a time, the bytes that a rank needs, page-locked memory of exact size."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from graphpar.runtime.checkpoints.weights import Unread, WeightFile, write_whole
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.layout import Shard, local_shard
from graphpar.runtime.state import host
from graphpar.runtime.state.host import copied_out, copy_in, host_memory, pretended

GPU = torch.device("cuda", 0)


def unread(values: dict[str, Tensor], read: Callable[[Tensor], Tensor] = lambda value: value) -> dict[str, Unread]:
    return {
        name: Unread(tuple(value.shape), value.dtype, lambda value=value: read(value))  # type: ignore[misc]
        for name, value in values.items()
    }


def test_a_file_that_is_written_in_a_stream_is_the_one_that_safetensors_writes(tmp_path: Path) -> None:
    values = {
        "wide": torch.arange(4, dtype=torch.int64),
        "b.weight": torch.randn(3, 5),
        "a.weight": torch.randn(5, 3).t(),
        'naïve "name"': torch.randn(7).bfloat16(),
        "scale": torch.tensor(2.5),
        "none": torch.zeros(0, 4),
        "eight": torch.randn(3).to(torch.float8_e4m3fn),
        "mask": torch.tensor([True, False, True]),
    }
    assert write_whole(unread(values), tmp_path / "new" / "streamed.safetensors", ()) == len(values)
    save_file({name: value.contiguous() for name, value in values.items()}, tmp_path / "saved", {"format": "pt"})
    assert (tmp_path / "new" / "streamed.safetensors").read_bytes() == (tmp_path / "saved").read_bytes()


def test_one_whole_tensor_is_in_memory_at_a_time_and_a_tie_has_all_of_its_names(tmp_path: Path) -> None:
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def read(value: Tensor) -> Tensor:
        nonlocal most
        made = value.clone()
        alive.append(weakref.ref(made))
        most = max(most, sum(each() is not None for each in alive))
        return made

    values = {str(number): torch.randn(4) for number in range(6)}
    assert write_whole(unread(values, read), tmp_path / "w", [("3", "head")]) == 7
    assert most <= 2  # the next is read before Python forgets the last
    found = load_file(tmp_path / "w")
    assert torch.equal(found["head"], values["3"])


def test_nothing_stays_of_a_file_that_could_not_be_written(tmp_path: Path) -> None:
    def full(_: Tensor) -> Tensor:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_whole(unread({"a": torch.ones(2)}, full), tmp_path / "w", ())
    assert list(tmp_path.iterdir()) == []


def mapped_pages() -> int:
    """Bytes of mapped files that are in this process's memory."""
    return int(Path("/proc/self/statm").read_text().split()[2]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="counted by Linux")
def test_a_rank_reads_its_shard_alone(tmp_path: Path) -> None:
    whole = torch.zeros(8192, 2048)  # 64 MiB
    save_file({"w": whole}, tmp_path / "w.safetensors")
    with WeightFile(tmp_path / "w.safetensors") as file:
        before = mapped_pages()
        target = torch.ones(1024, 2048)
        copy_in(target, local_shard(file["w"], {"tp": Shard(0)}, {"tp": 8}, {"tp": 3}))
        read = mapped_pages() - before
    assert not target.any()
    assert whole.nbytes // 8 <= read < whole.nbytes // 4


@pytest.mark.parametrize("shape", [(), (0, 3), (1, 5), (7,), (9, 4), (3, 2, 50)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_come_to_a_device_in_pieces(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "STAGED", 48)
    host._staging.cache_clear()
    values = torch.randn(math.prod(shape)).view(shape)
    views = [values, values.mT.contiguous().mT] if len(shape) > 1 else [values]
    with pretended():
        for view in views:
            target = torch.full(shape, 9, dtype=dtype)
            copy_in(target, view)
            assert torch.equal(target, values.to(dtype))
    host._staging.cache_clear()


def test_what_is_copied_out_is_in_one_block_which_is_used_again() -> None:
    values = [torch.randn(3, 5), torch.randn(7).bfloat16(), torch.tensor(4), torch.zeros(0), torch.randn(4, 6)[:, 1:3]]
    copies, memory = copied_out(values)
    assert all(torch.equal(copy, value) and copy.dtype == value.dtype for copy, value in zip(copies, values))
    assert memory.nbytes == 64 * 4  # each begins at a line of the cache
    again, same = copied_out([value + 1 for value in values], memory)
    assert same is memory
    assert torch.equal(again[0], values[0] + 1)
    assert copied_out(values[:2], memory)[1] is not memory


def test_page_locked_memory_has_the_bytes_that_were_asked_for_and_is_unlocked_with_its_last_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    locked: dict[int, int] = {}

    def register(address: int, nbytes: int, flags: int) -> int:
        locked[address] = nbytes
        return 0

    cuda = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=locked.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    nbytes = 2**20 + 4096  # torch's allocator would take 2 MiB
    memory = host_memory(nbytes, GPU)
    view = memory[64:128].view(torch.float32)
    assert list(locked.values()) == [nbytes] == [memory.nbytes]
    del memory
    gc.collect()
    view.fill_(3.0)
    assert locked
    del view
    gc.collect()
    assert not locked


def test_memory_that_can_not_be_locked_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2))
    with pytest.raises(
        RuntimeProgramError, match=r"0.00 GiB of the host's memory can't be page-locked \(CUDA error 2\)"
    ):
        host_memory(4096, GPU)
