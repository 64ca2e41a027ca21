"""One small model, built and given its weights in every way that loaders have."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn


class Scaled(nn.Module):
    """A layer and a norm with weights, and a table that no weights file holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("table", torch.arange(4.0) * 2, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)) * self.table


FILES = "weights.pt", "weights.safetensors", "old.pt", "table.pt", "table.safetensors"


def save_files(folder: Path) -> None:
    """Write what the loaders below read."""
    torch.manual_seed(1)
    model = Scaled()
    model.norm.running_mean.add_(3)
    state = model.state_dict()
    torch.save(state, folder / "weights.pt")
    torch.save(state, folder / "old.pt", _use_new_zipfile_serialization=False)
    safetensors.torch.save_file(state, folder / "weights.safetensors")
    torch.save({"table": model.table + 1}, folder / "table.pt")
    safetensors.torch.save_file({"table": model.table + 1}, folder / "table.safetensors")


def _on_meta() -> Scaled:
    with torch.device("meta"):
        return Scaled()


def _with_table(table: Tensor) -> Scaled:
    model = Scaled()
    model.table = table
    return model


def _loaded(state: dict[str, Tensor], *, assign: bool = False) -> Scaled:
    model = Scaled()
    model.load_state_dict(state, assign=assign)
    return model


def _emptied(folder: Path, write: Callable[[Scaled], object]) -> Scaled:
    model = _on_meta().to_empty(device="cpu")
    model.load_state_dict(torch.load(folder / "weights.pt"))
    write(model)
    return model


def _meta_assigned(folder: Path) -> Scaled:
    model = _on_meta()
    model.load_state_dict(torch.load(folder / "weights.pt", mmap=True), assign=True)
    model.table = torch.arange(4.0) * 2
    return model


def _opened(folder: Path) -> Scaled:
    with safetensors.safe_open(folder / "weights.safetensors", "pt") as file:
        return _loaded({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118


def _into(folder: Path) -> Scaled:
    model = Scaled()
    safetensors.torch.load_model(model, folder / "weights.safetensors")
    return model


def _changed(folder: Path) -> Scaled:
    state = torch.load(folder / "weights.pt")
    state["layer.weight"].mul_(0.5)
    state["layer.bias"][1] = 7
    model = _loaded(state)
    table = torch.load(folder / "table.pt")["table"]
    table += 1
    model.table = table
    return model


def _table_of(values: dict[str, Tensor]) -> Scaled:
    values["table"].mul_(3)
    return _with_table(values["table"])


def _drawn_apart() -> Scaled:
    own = torch.Generator().manual_seed(3)
    torch.randn(4, generator=own)
    return _with_table(torch.randn(4, generator=own))


_OWN = torch.Generator().manual_seed(5)
torch.randn(3, generator=_OWN)
_CONSTANT = torch.arange(4.0)


def _drawn_on() -> Scaled:
    state = _OWN.get_state()
    model = _with_table(torch.randn(4, generator=_OWN))
    _OWN.set_state(state)
    return model


def _seeded_inside() -> Scaled:
    model = Scaled()
    torch.manual_seed(7)
    torch.randn(3)
    model.table = torch.randn(4)
    return model


def _of_a_weight() -> Scaled:
    model = Scaled()
    model.table = model.layer.weight[0].detach().clone()
    return model


def _data_assigned() -> Scaled:
    model = Scaled()
    model.table.data = torch.ones(4)
    return model


def _padded(folder: Path) -> Scaled:
    model = _on_meta()
    model.load_state_dict(torch.load(folder / "weights.pt"), assign=True)
    model.table = torch.arange(4.0)
    model.layer.bias.data = nn.functional.pad(model.layer.bias.data[:3], (0, 1))
    return model


def _transposed() -> Scaled:
    table = torch.arange(4.0).view(2, 2)
    table.t_()
    return _with_table(table.reshape(4))


def _piecewise() -> Scaled:
    table = torch.empty(4)
    table[:2], table[2:] = 1, 2
    return _with_table(table)


def _unlike(value: Tensor) -> Scaled:
    return _with_table(torch.full((4,), 2.0 if bool((value > 1).any()) else 1.0))


def _chosen() -> Scaled:
    values = torch.arange(8.0)
    return _with_table(values[values > 3])


def _from_a_stream(folder: Path) -> Scaled:
    return _loaded(torch.load(io.BytesIO((folder / "weights.pt").read_bytes())))


LOADERS: dict[str, Callable[[Path], Scaled]] = {
    "torch.load": lambda folder: _loaded(torch.load(folder / "weights.pt")),
    "mapped": lambda folder: _loaded(torch.load(folder / "weights.pt", mmap=True)),
    "assigned": lambda folder: _loaded(torch.load(folder / "weights.pt"), assign=True),
    "an old file": lambda folder: _loaded(torch.load(folder / "old.pt", weights_only=False)),
    "a stream": _from_a_stream,
    "load_file": lambda folder: _loaded(safetensors.torch.load_file(folder / "weights.safetensors")),
    "load": lambda folder: _loaded(safetensors.torch.load((folder / "weights.safetensors").read_bytes())),
    "load_model": _into,
    "safe_open": _opened,
    "on meta, then assigned": _meta_assigned,
    "to_empty": lambda folder: _emptied(folder, lambda model: model.table.copy_(torch.arange(4.0) * 2)),
    "to_empty, then new": lambda folder: _emptied(folder, lambda model: setattr(model, "table", torch.arange(4.0))),
    "changed after loading": _changed,
    "a table of torch.load": lambda folder: _table_of(torch.load(folder / "table.pt")),
    "a table of load_file": lambda folder: _table_of(safetensors.torch.load_file(folder / "table.safetensors")),
    "a copy": lambda folder: copy.deepcopy(_loaded(torch.load(folder / "weights.pt"))),
    "skip_init": lambda folder: _with_table(nn.init.ones_(nn.utils.skip_init(nn.Linear, 4, 1).weight.detach()[0])),
    "from numpy": lambda folder: _with_table(torch.from_numpy(np.arange(4, dtype="f")).mul_(2)),
    "asarray": lambda folder: _with_table(torch.asarray(np.linspace(0, 1, 4), dtype=torch.float32)),
    "FloatTensor": lambda folder: _with_table(torch.FloatTensor(np.ones(4))),
    "frombuffer": lambda folder: _with_table(torch.frombuffer(bytearray(b"\0\0\x80\x3f" * 4), dtype=torch.float32)),
    "through numpy": lambda folder: _with_table(torch.from_numpy(torch.linspace(0, 3, 4).numpy() * 2)),
    "through a list": lambda folder: _with_table(torch.tensor([2 * x for x in torch.linspace(0, 3, 4).tolist()])),
    "of the file's own": lambda folder: _with_table(_CONSTANT.add(1)),
    "as a condition": lambda folder: _unlike(torch.arange(4)),
    "of unknown size": lambda folder: _chosen(),
    "piece by piece": lambda folder: _piecewise(),
    "transposed": lambda folder: _transposed(),
    "by .data": lambda folder: _data_assigned(),
    "loaded, then by .data": _padded,
    "of a weight": lambda folder: _of_a_weight(),
    "drawn": lambda folder: _with_table(torch.randn(4)),
    "drawn apart": lambda folder: _drawn_apart(),
    "drawn on": lambda folder: _drawn_on(),
    "drawn after a seed": lambda folder: _seeded_inside(),
}  # fmt: skip
