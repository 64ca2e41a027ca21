"""A small model of two blocks with a tied table, and emitted folders for it on any pp x dp_replicate x tp, by hand.

    table -> block 0 (hidden 7: cut unevenly) -> block 1 (gated: fused and cut by parts) -> out (tied to table) -> loss

On tp the residual stream is I. ``norm`` is stored as R (its gradient is partial), ``extra`` too, and only the first
tp rank uses it; ``up`` and ``down`` are cut; the bias of ``down`` is I. ``shift`` is frozen, ``scale`` a constant.
As a script (under torchrun) it drives one program through what the worker does not.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from graphpar import emitted

ROWS, LENGTH, WIDTH, VOCAB = 8, 3, 6, 9
IGNORED = -100
SHARDED = {
    "block.0.up.weight": "S(0)",
    "block.0.up.bias": "S(0)",
    "block.0.down.weight": "S(1)",
    "block.0.scale": "S(0)",
    "block.1.up.weight": "S(0:8)",
    "block.1.up.bias": "S(0:8)",
    "block.1.down.weight": "S(1)",
    "block.1.scale": "S(0)",
}
PARTIAL = [f"block.{i}.{name}" for i in range(2) for name in ("norm", "extra")]

BLOCKS_PY = '''"""The two blocks."""

import torch
from torch import nn
from torch.nn import functional as F

from .collectives import all_reduce, rank, sum_gradient


class Block(nn.Module):
    def __init__(self, hidden, fused):
        super().__init__()
        self.fused = fused
        self.norm = nn.Parameter(torch.empty(6))
        self.up = nn.Linear(6, hidden * (2 if fused else 1))
        self.down = nn.Linear(hidden, 6)
        self.extra = nn.Parameter(torch.empty(6))
        self.shift = nn.Parameter(torch.empty(6), requires_grad=False)
        self.register_buffer("scale", torch.empty(hidden), persistent=False)

    def forward(self, h):
        x = sum_gradient(h, "tp") * self.norm
        x = F.linear(x, self.up.weight, self.up.bias)
        x = x.chunk(2, -1)[0].tanh() * x.chunk(2, -1)[1] if self.fused else x.tanh()
        y = F.linear(x * self.scale, self.down.weight)
        if rank("tp") == 0:
            y = y + self.extra
        return h + all_reduce(y, "tp") + self.down.bias + self.shift
'''


class Block(nn.Module):
    """One block of the reference; the emitted one is in ``BLOCKS_PY``."""

    def __init__(self, hidden: int, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.norm = nn.Parameter(torch.randn(WIDTH))
        self.up = nn.Linear(WIDTH, hidden * (2 if fused else 1))
        self.down = nn.Linear(hidden, WIDTH)
        self.extra = nn.Parameter(torch.randn(WIDTH))
        self.shift = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.register_buffer("scale", torch.randn(hidden), persistent=False)

    def forward(self, h: Tensor) -> Tensor:
        x = self.up(h * self.norm)
        x = x.chunk(2, -1)[0].tanh() * x.chunk(2, -1)[1] if self.fused else x.tanh()
        return h + F.linear(x * self.scale, self.down.weight, self.down.bias) + self.extra + self.shift


class Model(nn.Module):
    """The single-device reference."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.block = nn.ModuleList([Block(7, False), Block(8, True)])
        self.out = nn.Linear(WIDTH, VOCAB, bias=False)
        self.out.weight = self.table.weight

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        h = self.table(ids)
        for block in self.block:
            h = block(h)
        return F.cross_entropy(self.out(h).flatten(0, 1), target.flatten(), ignore_index=IGNORED)


def reference() -> Model:
    """The model with its initial weights, the same in every process."""
    torch.manual_seed(3)
    return Model()


def batch() -> dict[str, Tensor]:
    """A global batch whose rows have different numbers of valid labels."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    target = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    target[0, 1:] = target[5] = IGNORED
    return {"ids": ids, "target": target}


def _stage_py(index: int, stages: int, tp: int) -> str:
    first, last = index == 0, index == stages - 1
    hidden = [(-(-7 // tp), False), (8 // tp, True)]
    held = [0, 1] if stages == 1 else [index]
    blocks = ", ".join(f'"{i}": Block({hidden[i][0]}, {hidden[i][1]})' for i in held)
    init, body = [f"self.block = nn.ModuleDict({{{blocks}}})"], []
    if first:
        init.append("self.table = nn.Embedding(9, 6)")
        body.append("h = self.table(ids)")
    body += [f'h = self.block["{i}"](h)' for i in held]
    if last:
        init.append("self.out = nn.Linear(6, 9, bias=False)")
        init += ["self.out.weight = self.table.weight"] if first else []
        body.append("logits = self.out(h).flatten(0, 1)")
        body.append(
            "return F.cross_entropy(logits, target.flatten(), ignore_index=-100, reduction='sum') / valid_labels"
        )
    else:
        body.append("return h")
    named = (["ids"] if first else []) + (["target", "valid_labels"] if last else [])
    signature = ", ".join(["self", *([] if first else ["h"]), "*", *named])
    counts = "\n\ndef global_counts(target):\n    return ((target != -100).sum(),)\n" if last else ""
    return (
        "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n\nfrom .blocks import Block\n\n\n"
        f"class Stage{index}(nn.Module):\n    def __init__(self):\n        super().__init__()\n        "
        + "\n        ".join(init)
        + f"\n\n    def forward({signature}):\n        "
        + "\n        ".join(body)
        + "\n"
        + counts
    )


def emit(folder: Path, *, pp: int = 1, dp: int = 1, tp: int = 1, microbatches: int = 2) -> Path:
    """Write the emitted folder of the model on this mesh, with its initial weights."""
    folder.mkdir(parents=True)
    rows = ROWS // microbatches // dp
    boundary = [{"name": "h", "shape": [rows, LENGTH, WIDTH], "dtype": "float32", "requires_grad": True}]
    given = {"shape": [ROWS, LENGTH], "dtype": "int64", "batch_dim": 0}
    model = reference()
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    replicated = {"dp_replicate": "R"} if dp > 1 else {}
    types = {name: {**replicated, "tp": kind} for name, kind in SHARDED.items()}
    types |= {name: {**replicated, "tp": "R"} for name in PARTIAL}
    stages: list[dict[str, Any]] = [
        {
            "class": f"Stage{i}",
            "file": f"stage_{i}.py",
            "inputs": (["ids"] if i == 0 else []) + (["target"] if i == pp - 1 else []),
            "counts": ["valid_labels"] if i == pp - 1 else [],
            "receives": boundary if i else [],
            "sends": boundary if i < pp - 1 else [],
        }
        for i in range(pp)
    ]
    plan = {
        "version": 2,
        "mesh": {"pp": pp, "dp_replicate": dp, "dp_shard": 1, "cp": 1, "ep": 1, "tp": tp},
        "schedule": "1F1B",
        "microbatches": microbatches,
        "microbatch_size": rows,
        "global_batch": ROWS,
        "mode": "train",
        "actions": None,
        "stages": [{"index": i, "rank": i, "modules": []} for i in range(pp)],
        "parameters": types if tp > 1 else {},
        "interface": {
            "inputs": [{"name": "ids", "role": "input", **given}, {"name": "target", "role": "target", **given}],
            "counts": {"names": ["valid_labels"], "inputs": ["target"]},
            "stages": stages,
            "outputs": [{"name": "loss", "shape": [], "dtype": "float32", "batch_dim": None}],
            "shapes": {name: list(tensors[name].shape) for name in SHARDED} if tp > 1 else {},
            "ties": [["table.weight", "out.weight"]],
        },
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "__init__.py").write_text("")
    (folder / "blocks.py").write_text(BLOCKS_PY)
    shutil.copy(Path(emitted.__file__).parent / "collectives.py", folder)
    for i in range(pp):
        (folder / f"stage_{i}.py").write_text(_stage_py(i, pp, tp))
    save_file({name: b.clone() for name, b in model.named_buffers()}, str(folder / "constants.safetensors"))
    (folder / "weights").mkdir()
    save_file({k: v.clone() for k, v in model.state_dict().items()}, str(folder / "weights" / "model.safetensors"))
    return folder


def drive(program: Path, out: Path) -> None:
    """Another weight file on rank 1, two accumulated steps, clipping, saving, loading what was saved."""
    from graphpar.runtime import AgreedError, Pipeline, start
    from graphpar.runtime.distributed import gather_tensors

    with start(60) as ranks:
        own_rows = [torch.tensor([ranks.rank + 1j]), torch.empty(0, 3)]
        gathered = [gather_tensors(each, dist.group.WORLD) for each in own_rows]
        assert [rows.item() for rows in gathered[0]] == [rank + 1j for rank in range(dist.get_world_size())]
        assert [rows.shape for rows in gathered[1]] == [(0, 3)] * dist.get_world_size()
        pipeline = Pipeline(program, ranks.device)
        seen: dict[str, Any] = {"reports": pipeline.reports}
        own = program / "weights" / "model.safetensors"
        changed = load_file(own)
        held = dict(pipeline.named_parameters())
        names = ["block.1.down.bias"] if "block.1.down.bias" in held else ["table.weight", "out.weight"]
        for name in names:  # all of a tie
            changed[name] = changed[name].clone()
            changed[name].view(-1)[4] += 1e-3
        save_file(changed, str(out / f"changed_{ranks.rank}.safetensors"))
        try:
            pipeline.load_weights(out / f"changed_{ranks.rank}.safetensors" if ranks.rank == 1 else own)
        except AgreedError as error:
            seen["mismatch"] = str(error)
        pipeline.load_weights()
        losses = [pipeline.step(batch(), broadcast_loss=True) for _ in range(2)]
        seen["losses"] = [float(loss) for loss in losses if loss is not None]
        seen["eval"] = {name: float(value) for name, value in (pipeline.infer(batch()) or {}).items()}
        seen["norm"] = float(pipeline.clip_grad_norm_(0.25))
        seen["clipped"] = float(pipeline.clip_grad_norm_(100.0))
        with torch.no_grad():
            for parameter in pipeline.parameters():
                if parameter.grad is not None:
                    parameter -= parameter.grad
        pipeline.save_weights(out / "saved.safetensors")
        before = {name: value.clone() for name, value in pipeline.state_dict().items()}
        pipeline.load_weights(out / "saved.safetensors")
        seen["round trip"] = all(torch.equal(before[name], value) for name, value in pipeline.state_dict().items())
        pipeline.close()
        (out / f"drive_{ranks.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    drive(Path(sys.argv[1]), Path(sys.argv[2]))
