"""Time of a generated token: emitted programs against transformers' ``generate``, and against a tensor-parallel loop by hand.

    python -m benchmarks.generation [--json] [--rounds 5]

    one process      against LlamaForCausalLM.generate, greedy, with its cache
    tensor           on two gloo processes against the same model written for them: column- and row-parallel weights, a static cache,
                     two all-reduces a layer

Both sides of a row hold the same weights, live in the same processes (one thread each) and generate in turn; each round is a prompt of 64
tokens for 4 sequences and 64 new ones. "cpu" compares processor time. That both give the same tokens shows that they do the same work.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import graphpar as gp
from graphpar.runtime import Pipeline, start
from graphpar.runtime.launching.launch import torchrun

ROWS, PROMPT, NEW = 4, 64, 64
CONFIG = LlamaConfig(
    vocab_size=2048,
    hidden_size=512,
    intermediate_size=1376,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=PROMPT + NEW,
    eos_token_id=None,
)
Generate = Callable[[list[list[int]]], list[list[int]]]


class ByHand:
    """The Llama of ``CONFIG`` for one of several ranks, with a static cache."""

    def __init__(self, weights: dict[str, Tensor], group: dist.ProcessGroup) -> None:
        self.group, self.size, rank = group, group.size(), group.rank()
        self.heads = CONFIG.num_attention_heads // self.size
        self.groups = (CONFIG.num_key_value_heads or self.heads) // self.size
        self.width = CONFIG.hidden_size // CONFIG.num_attention_heads
        self.whole = {name: value for name, value in weights.items() if "_proj" not in name}
        columns = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
        self.own = {
            name: value.chunk(self.size, 0 if any(column in name for column in columns) else 1)[rank].contiguous()
            for name, value in weights.items()
            if "_proj" in name
        }
        self.head = weights["lm_head.weight"].chunk(self.size, 0)[rank].contiguous()
        inverse = 1.0 / 10000.0 ** (torch.arange(0, self.width, 2).float() / self.width)
        angles = torch.cat([torch.outer(torch.arange(PROMPT + NEW).float(), inverse)] * 2, -1)
        self.cos, self.sin = angles.cos(), angles.sin()
        shape = ROWS, self.groups, PROMPT + NEW, self.width
        self.cache = [(torch.empty(shape), torch.empty(shape)) for _ in range(CONFIG.num_hidden_layers)]

    def _turned(self, x: Tensor, place: slice) -> Tensor:
        half = x.size(-1) // 2
        return x * self.cos[place] + torch.cat([-x[..., half:], x[..., :half]], -1) * self.sin[place]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.size(-1),), self.whole[f"{name}.weight"], CONFIG.rms_norm_eps)

    def forward(self, tokens: Tensor, position: int) -> Tensor:
        """Return the logits of the last position: tokens [b, n] -> [b, vocabulary]."""
        rows, steps = tokens.shape
        place = slice(position, position + steps)
        x = F.embedding(tokens, self.whole["model.embed_tokens.weight"])
        for number, (keys, values) in enumerate(self.cache):
            name = f"model.layers.{number}"
            y = self._norm(x, f"{name}.input_layernorm")
            q, k, v = (F.linear(y, self.own[f"{name}.self_attn.{each}_proj.weight"]) for each in "qkv")
            q, k, v = (each.view(rows, steps, -1, self.width).transpose(1, 2) for each in (q, k, v))
            keys[:, :, place], values[:, :, place] = self._turned(k, place), v
            q, until = self._turned(q, place), position + steps
            y = F.scaled_dot_product_attention(
                q, keys[:, :, :until], values[:, :, :until], is_causal=steps > 1, enable_gqa=True
            )
            y = F.linear(y.transpose(1, 2).flatten(2), self.own[f"{name}.self_attn.o_proj.weight"])
            dist.all_reduce(y, group=self.group)
            x = x + y
            y = self._norm(x, f"{name}.post_attention_layernorm")
            gate, up = (F.linear(y, self.own[f"{name}.mlp.{each}_proj.weight"]) for each in ("gate", "up"))
            y = F.linear(F.silu(gate) * up, self.own[f"{name}.mlp.down_proj.weight"])
            dist.all_reduce(y, group=self.group)
            x = x + y
        part = F.linear(self._norm(x[:, -1], "model.norm"), self.head)
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part, group=self.group)
        return torch.cat(parts, -1)

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        """Return the likeliest tokens after prompts of one length."""
        tokens, position, found = torch.tensor(prompts), 0, []
        for _ in range(NEW):
            logits = self.forward(tokens, position)
            position += tokens.size(1)
            tokens = logits.argmax(-1, keepdim=True)
            found.append(tokens)
        made: list[list[int]] = torch.cat(found, 1).tolist()
        return made


def measure(sides: Sequence[Generate], rounds: int) -> dict[str, object]:
    """Generate on both sides in turn; return the middle times, the middle ratios, and whether the tokens are the same."""
    prompts = torch.randint(CONFIG.vocab_size, (ROWS, PROMPT), generator=torch.Generator().manual_seed(0)).tolist()
    walls: list[list[float]] = [[], []]
    cpus: list[list[float]] = [[], []]
    tokens = [side(prompts) for side in sides]
    for _ in range(rounds):
        for place, side in enumerate(sides):
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            side(prompts)
            dist.barrier()
            walls[place].append(time.perf_counter() - wall)
            cpus[place].append(time.process_time() - cpu)
    ratios, cpu_ratios = ([b / a for a, b in zip(*times)] for times in (walls, cpus))
    return {
        "by_hand_s": statistics.median(walls[0]),
        "emitted_s": statistics.median(walls[1]),
        "ratio": statistics.median(ratios),
        "cpu_ratio": statistics.median(cpu_ratios),
        "tokens_per_second": ROWS * NEW / statistics.median(walls[1]),
        "same_tokens": tokens[0] == tokens[1],
    }


def rank_main(folder: str, rounds: str) -> None:
    """Measure on this rank."""
    torch.set_num_threads(1)
    root = Path(folder)
    with start(600) as ranks, torch.no_grad(), Pipeline(root / "program", ranks.device) as pipeline:
        weights = load_file(root / "weights.safetensors")
        pipeline.load_weights(root / "weights.safetensors")
        if dist.get_world_size() == 1:
            model = LlamaForCausalLM(CONFIG).eval()
            model.load_state_dict(weights)

            def by_hand(prompts: list[list[int]]) -> list[list[int]]:
                made = model.generate(torch.tensor(prompts), max_new_tokens=NEW, do_sample=False, pad_token_id=0)  # type: ignore[operator]
                found: list[list[int]] = made[:, PROMPT:].tolist()
                return found
        else:
            group = dist.group.WORLD
            assert group is not None
            by_hand = ByHand(weights, group).generate
        found = measure([by_hand, lambda prompts: pipeline.generate(prompts, NEW)], int(rounds))
        if ranks.rank == 0:
            (root / "result.json").write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.generation", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each (default: 5)")
    options = parser.parse_args()
    torch.manual_seed(0)
    model: nn.Module = LlamaForCausalLM(CONFIG)
    ids = {"input_ids": torch.zeros(ROWS, PROMPT + NEW, dtype=torch.long)}
    program = gp.export(model, kwargs=ids, mode="generate")
    rows = {}
    for name, ranks in (("one process", 1), ("tensor", 2)):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            gp.partition(program, gp.plan(program, mesh={"tp": ranks} if ranks > 1 else {})).save(root / "program")
            save_file(
                {key: value.clone() for key, value in model.state_dict().items()}, str(root / "weights.safetensors")
            )
            torchrun(Path(__file__), ["--rank", folder, str(options.rounds)], nproc=ranks, timeout_s=900)
            rows[name] = json.loads((root / "result.json").read_text())
    if options.json:
        print(json.dumps(rows))
        return
    print(
        f"Llama of {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {ROWS} sequences, {PROMPT} + {NEW} tokens"
    )
    for name, row in rows.items():
        times = f"by hand {row['by_hand_s']:.2f} s, emitted {row['emitted_s']:.2f} s"
        print(f"{name:12} {times}, ratio {row['ratio']:.3f}, cpu {row['cpu_ratio']:.3f}")
        print(
            f"{'':12} {row['tokens_per_second']:.0f} tokens a second, {'the same' if row['same_tokens'] else 'OTHERS'} by hand"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(*sys.argv[2:])
    else:
        main()
