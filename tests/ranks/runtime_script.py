"""A small tied transformer, and emitted folders for it written by hand, as the compiler would write them.

    TiedTransformer: tokens + positions -> 4 blocks, each scaled by one gain -> ln_f -> lm_head (tied to wte)
                     -> masked cross-entropy
    emit(folder, ...): the same model as 1, 2 or 4 stages

As a script (under torchrun) it drives one program through everything that the worker does not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, WIDTH, LENGTH, BLOCKS = 32, 16, 6, 4
BATCH, MICROBATCHES = 8, 4
IGNORED = -100
GAINED_TWICE = 2
"""This block's stage uses ``gain`` twice, with other parameters between: torch cannot split its backward."""

BLOCKS_PY = '''"""Block classes of TiedTransformer."""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """h.0 to h.3."""

    def __init__(self):
        super().__init__()
        self.ln = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.proj = nn.Linear(16, 16)
        self.register_buffer("causal", torch.empty(6, 6, dtype=torch.bool), persistent=False)
        self.register_buffer("calls", torch.empty((), dtype=torch.int64))

    def forward(self, hidden_states, keep):
        self.calls.add_(1)
        q, k, v = self.qkv(self.ln(hidden_states)).chunk(3, dim=-1)
        mask = self.causal & keep[:, None, :]
        return hidden_states + self.proj(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
'''

TRAIN_PY = '''"""Train TiedTransformer on 2 devices: 2 pipeline stages, 1F1B, 4 microbatches of 2 examples.

    torchrun --nproc-per-node 2 out/train.py --steps 100 --lr 1e-3 --save trained.safetensors

    rank 0   stage 0   wte, wpe, h.0-1
    rank 1   stage 1   h.2-3, ln_f, lm_head (tied to wte)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from graphpar.runtime import Pipeline, start

PROGRAM = Path(__file__).parent


def batches(seed: int, path: Path | None) -> Iterator[dict[str, Tensor]]:
    """Random batches, to be replaced by your data. Every rank must yield the same whole batch of 8 examples."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield load_file(path) if path else {
            "input_ids": torch.randint(0, 32, (8, 6), generator=generator),
            "target": torch.randint(0, 32, (8, 6), generator=generator),
        }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train TiedTransformer on 2 devices.")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weights", type=Path, help="safetensors file or folder (default: the program's own)")
    parser.add_argument("--batch", type=Path, help="safetensors file with one batch, used for every step")
    parser.add_argument("--save", type=Path, help="where to write the trained weights")
    parser.add_argument("--json", type=Path, help="where to write the loss and the gradient norm of every step")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that a rank waits for another")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    with start(args.timeout) as ranks:
        pipeline = Pipeline(PROGRAM, ranks.device, seed=args.seed)
        pipeline.load_weights(args.weights)
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=args.lr)
        history: list[dict[str, float]] = []
        for step, batch in zip(range(args.steps), batches(args.seed, args.batch)):
            loss = pipeline.step(batch, step=step)  # every .grad is now the single-device gradient
            norm = pipeline.clip_grad_norm_(args.clip)
            optimizer.step()
            pipeline.zero_grad()
            if loss is not None and pipeline.reports:  # one rank of the last stage
                history.append({"loss": loss.item(), "gradient_norm": norm.item()})
                print(f"step {step:4}   loss {loss:.6f}   gradient norm {norm:.4f}", flush=True)
        if args.json and pipeline.reports:
            args.json.write_text(json.dumps(history))
        if args.save:
            pipeline.save_weights(args.save)


if __name__ == "__main__":
    main()
'''


class Block(nn.Module):
    """One block of the reference; the emitted one is in ``BLOCKS_PY``."""

    def __init__(self) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("causal", torch.ones(LENGTH, LENGTH).tril().bool(), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, hidden_states: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.qkv(self.ln(hidden_states)).chunk(3, dim=-1)
        mask = self.causal & keep[:, None, :]
        return hidden_states + self.proj(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


class TiedTransformer(nn.Module):
    """The single-device reference."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, WIDTH)
        self.wpe = nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.gain = nn.Parameter(torch.ones(WIDTH) + 0.1 * torch.randn(WIDTH))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, input_ids: Tensor, target: Tensor | None, sample_keys: Tensor) -> Tensor:
        keep = input_ids != 0
        hidden_states = self.wte(input_ids) + self.wpe(torch.arange(LENGTH))
        hidden_states = hidden_states * ((sample_keys >> 17) & 3).float()[:, None, None]
        for i, block in enumerate(self.h):
            hidden_states = block(hidden_states * self.gain, keep)
            if i == GAINED_TWICE:
                hidden_states = hidden_states + self.gain
        logits: Tensor = self.lm_head(self.ln_f(hidden_states))
        if target is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED)


def reference() -> TiedTransformer:
    """The model with its initial weights, the same in every process."""
    torch.manual_seed(0)
    return TiedTransformer()


def batch() -> dict[str, Tensor]:
    """A global batch whose microbatches have very different numbers of valid labels (one has none)."""
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(1, VOCAB, (BATCH, LENGTH), generator=generator)
    input_ids[3, 4:] = 0
    target = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)
    target[0, 1:] = IGNORED
    target[2:4] = IGNORED
    return {"input_ids": input_ids, "target": target}


def _stage_py(index: int, stages: int, fail: bool, infer: bool) -> str:
    first, last = index == 0, index == stages - 1
    per = BLOCKS // stages
    blocks = [str(i) for i in range(index * per, (index + 1) * per)]
    init = [f"self.h = nn.ModuleDict({{{', '.join(f'{chr(34)}{i}{chr(34)}: Block()' for i in blocks)}}})"]
    body = ['raise FloatingPointError("the bearings are too hot")'] if fail else []
    received = [] if first else ["hidden_states", "keep"]
    named = []
    if first:
        named = ["input_ids", "sample_keys"]
        init += ["self.wte = nn.Embedding(32, 16)", "self.wpe = nn.Embedding(6, 16)"]
        body += [
            "keep = input_ids != 0",
            "hidden_states = self.wte(input_ids) + self.wpe(torch.arange(6, device=input_ids.device))",
            "hidden_states = hidden_states * ((sample_keys >> 17) & 3).float()[:, None, None]",
        ]
    init += ["self.gain = nn.Parameter(torch.empty(16))"]
    for i in blocks:
        body += [f'hidden_states = self.h["{i}"](hidden_states * self.gain, keep)']
        body += ["hidden_states = hidden_states + self.gain"] if i == str(GAINED_TWICE) else []
    counts = ""
    if last:
        named += [] if infer else ["target", "valid_labels"]
        init += ["self.ln_f = nn.LayerNorm(16)", "self.lm_head = nn.Linear(16, 32, bias=False)"]
        init += ["self.lm_head.weight = self.wte.weight"] if first else []
        body += ["logits = self.lm_head(self.ln_f(hidden_states))"]
        body += (
            ["return logits"]
            if infer
            else [
                "total = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100, reduction='sum')",
                "return total / valid_labels",
            ]
        )
        counts = "" if infer else "\n\ndef global_counts(target):\n    return ((target != -100).sum(),)\n"
    else:
        body += ["return hidden_states, keep"]
    signature = ", ".join(["self", *received, *(["*", *named] if named else [])])
    return (
        "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n\nfrom .blocks import Block\n\n\n"
        f"class Stage{index}(nn.Module):\n    def __init__(self):\n        super().__init__()\n        "
        + "\n        ".join(init)
        + f"\n\n    def forward({signature}):\n        "
        + "\n        ".join(body)
        + "\n"
        + counts
    )


def _interface(stages: int) -> dict[str, Any]:
    rows = BATCH // MICROBATCHES
    boundary = [
        {"name": "hidden_states", "shape": [rows, LENGTH, WIDTH], "dtype": "float32", "requires_grad": True},
        {"name": "keep", "shape": [rows, LENGTH], "dtype": "bool", "requires_grad": False},
    ]
    ids = {"shape": [BATCH, LENGTH], "dtype": "int64", "batch_dim": 0}
    keys = {"shape": [BATCH], "dtype": "int64", "batch_dim": 0, "role": "sample_keys"}
    return {
        "inputs": [
            {"name": "input_ids", "role": "input", **ids},
            {"name": "target", "role": "target", **ids},
            {"name": "sample_keys", **keys},
        ],
        "counts": {"names": ["valid_labels"], "inputs": ["target"]},
        "stages": [
            {
                "class": f"Stage{i}",
                "file": f"stage_{i}.py",
                "inputs": (["input_ids", "sample_keys"] if i == 0 else []) + (["target"] if i == stages - 1 else []),
                "counts": ["valid_labels"] if i == stages - 1 else [],
                "receives": boundary if i else [],
                "sends": boundary if i < stages - 1 else [],
            }
            for i in range(stages)
        ],
        "outputs": [{"name": "loss", "shape": [], "dtype": "float32", "batch_dim": None}],
        "ties": [["wte.weight", "lm_head.weight"]],
    }


def _without_loss(interface: dict[str, Any]) -> dict[str, Any]:
    interface["inputs"] = [spec for spec in interface["inputs"] if spec["role"] != "target"]
    interface["counts"] = {"names": [], "inputs": []}
    interface["stages"][-1].update(inputs=[], counts=[])
    logits = {"name": "logits", "shape": [BATCH, LENGTH, VOCAB], "dtype": "float32", "batch_dim": 0}
    return {**interface, "outputs": [logits]}


def emit(
    folder: Path,
    *,
    stages: int,
    ranks: list[int],
    schedule: str = "1F1B",
    actions: dict[str, list[str | None]] | None = None,
    fail_in: int | None = None,
    infer: bool = False,
    replicas: int = 1,
) -> Path:
    """Write the emitted folder of the tied transformer cut into ``stages`` stages at these pp coordinates."""
    folder.mkdir(parents=True)
    plan = {
        "version": 2,
        "parameters": {},
        "mesh": {"pp": max(ranks) + 1, "dp_replicate": replicas, "dp_shard": 1, "cp": 1, "ep": 1, "tp": 1},
        "schedule": schedule,
        "microbatches": MICROBATCHES // replicas,
        "microbatch_size": BATCH // MICROBATCHES,
        "global_batch": BATCH,
        "mode": "infer" if infer else "train",
        "actions": actions,
        "stages": [{"index": i, "rank": rank, "modules": []} for i, rank in enumerate(ranks)],
        "interface": _without_loss(_interface(stages)) if infer else _interface(stages),
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "__init__.py").write_text("")
    (folder / "blocks.py").write_text(BLOCKS_PY)
    (folder / "train.py").write_text(TRAIN_PY)
    for i in range(stages):
        (folder / f"stage_{i}.py").write_text(_stage_py(i, stages, fail_in == i, infer))
    causal = torch.ones(LENGTH, LENGTH).tril().bool()
    save_file({f"h.{i}.causal": causal.clone() for i in range(BLOCKS)}, str(folder / "constants.safetensors"))
    (folder / "weights").mkdir()
    state = {name: value.clone() for name, value in reference().state_dict().items() if name != "lm_head.weight"}
    save_file(state, str(folder / "weights" / "model.safetensors"))
    return folder


def make_job(folder: Path, program: Path, batch: dict[str, Tensor], steps: int, optimizer: dict[str, float]) -> Path:
    """A job of the runtime's worker: ``steps`` steps on the same batch."""
    folder.mkdir(parents=True)
    save_file(batch, str(folder / "batch.safetensors"))
    values = {
        "program": str(program),
        "steps": steps,
        "optimizer": optimizer,
        "seed": 7,
        "weights": str(program / "weights" / "model.safetensors"),
        "batches": [str(folder / "batch.safetensors")] * steps,
    }
    (folder / "job.json").write_text(json.dumps(values))
    return folder


@contextmanager
def without_messages() -> Iterator[None]:
    """Refuse what makes a communicator for a pair of ranks, and what waits with a timeout until rank 0 has written a file."""

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("ranks send no weights to each other, and no barrier waits for the one that writes")

    names = ("send", "recv", "isend", "irecv", "batch_isend_irecv", "barrier", "monitored_barrier")
    before = {name: getattr(dist, name) for name in names}
    for name in names:
        setattr(dist, name, refused)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


def drive(program: str, inference: str, out: Path) -> None:
    """Two accumulated steps, clipping, evaluation, saving, inference, and a batch that only rank 1 gets wrong."""
    from graphpar.runtime import AgreedError, Pipeline, start

    with start(60) as ranks:
        pipeline = Pipeline(program, ranks.device)
        pipeline.load_weights()
        seen: dict[str, Any] = {}
        wrong = batch()
        wrong["target"][5, 0] += ranks.rank
        uneven = {name: value[: 7 if ranks.rank else 8] for name, value in batch().items()}
        for name, given in (("wrong", wrong), ("uneven", uneven)):
            try:
                pipeline.step(given)
            except AgreedError as error:
                seen[name] = str(error)
        seen["eval"] = {k: float(v) for k, v in (pipeline.infer(batch(), step=0) or {}).items()}
        losses = [pipeline.step(batch(), step=0, broadcast_loss=True) for _ in range(2)]
        seen["losses"] = [float(loss) for loss in losses if loss is not None]
        seen["norm"] = float(pipeline.clip_grad_norm_(0.5))
        seen["clipped"] = float(pipeline.clip_grad_norm_(100.0))
        grads = {name: p.grad.sum().item() for name, p in pipeline.named_parameters() if p.grad is not None}
        seen["grads"] = grads
        with without_messages():
            pipeline.save_weights(out / "saved.safetensors")
        seen["whole"] = pipeline.whole_backward_stages
        pipeline.close()
        reader = Pipeline(inference, ranks.device)
        reader.load_weights(out / "saved.safetensors")
        outputs = reader.infer({"input_ids": batch()["input_ids"]}, step=0)
        if outputs is not None and reader.reports:
            save_file(outputs, str(out / "outputs.safetensors"))
        (out / f"drive_{ranks.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    drive(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
