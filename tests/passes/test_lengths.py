"""Programs of several lengths are one, or the operator that differs is named."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphpar as gp
from graphpar.passes.lengths import tried
from graphpar.runtime.layout import Shard
from graphpar.runtime.manifest import load_manifest

IDS = torch.randint(16, (4, 12))


class Model(nn.Module):
    """Embedding, a causal layer and a head; ``kind`` says what it does with its length."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.positions = nn.Embedding(16, 8), nn.Embedding(64, 8)
        self.norm, self.qkv, self.head = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        x = self.embed(ids) + self.positions(torch.arange(length))
        if self.kind == "branch" and length > 20:
            x = x.relu()
        if self.kind == "scale":
            x = x * length**-0.5
        if self.kind == "window":
            x = F.pad(x, (0, 0, 0, -length % 8))[:, :length].cos()
        if self.kind == "pairs":
            x = x + x[:, : length // 2 * 2].mean(1, keepdim=True)
        if self.kind == "fours":
            x = x + x[:, : length - length % 4].mean(1, keepdim=True)
        if self.kind == "half":
            x = x + x[:, : length // 2].mean(1, keepdim=True)
        if self.kind == "square":
            x = x * (length * length)
        q, k, v = self.qkv(self.norm(x)).view(*ids.shape, 3, 1, 8).permute(2, 0, 3, 1, 4)
        logits: Tensor = self.head(F.scaled_dot_product_attention(q, k, v, is_causal=True).view(*ids.shape, 8))
        return logits


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def partitioned(kind: str = "", seq: str = "6..24", **pins: object) -> gp.Parts:
    program = gp.export(Model(kind), (IDS,), loss_fn=loss_fn, targets=(IDS,), seq=seq)
    return gp.partition(program, gp.plan(program, **pins))  # type: ignore[arg-type]


def test_sizes_are_those_of_inputs_and_the_plan_is_of_the_longest() -> None:
    parts = partitioned(mesh={"cp": 2})
    text = "".join(text for name, text in parts.files.items() if name.startswith(("stage", "blocks")))
    assert "torch.arange(ids.size(1)" in text
    assert "ids [b, s]" in text and "[b, s/2]" in text
    assert "24" not in "".join(line for line in text.splitlines() if "Linear" not in line and "weight" not in line)
    assert parts.plan.seq == (6, 24)
    assert gp.Plan.from_json(parts.plan.to_json()).seq == (6, 24)
    assert ("Lengths", "6 to 24 positions, priced at 24; padded to multiples of 2") in [
        tuple(line) for line in _facts(parts)
    ]


def _facts(parts: gp.Parts) -> list[tuple[str, str]]:
    from graphpar.report.report import _facts

    return _facts(parts.report)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("branch", r"(?s)program is another one at other lengths: .*test_lengths.py:\d+"),
        ("scale", r"mul \(.*test_lengths.py:\d+\): it takes the number 0.4\d+ at 6, .*, 0.2\d+ at 24"),
        ("window", r"test_lengths.py:\d+"),
    ],
)
def test_what_differs_is_named(kind: str, message: str) -> None:
    with pytest.raises(gp.GraphparError, match=message):
        partitioned(kind)


@pytest.mark.parametrize(
    ("kind", "seq"),
    [("pairs", "9..25"), ("pairs", "8..10"), ("fours", "9..25"), ("half", "8..10"), ("square", "8..10")],
)
def test_ends_that_leave_the_same_rest_hide_nothing(kind: str, seq: str) -> None:
    with pytest.raises(gp.GraphparError, match=r"(?s)another one at other lengths: .*test_lengths.py:\d+"):
        partitioned(kind, seq)


@pytest.mark.parametrize(("least", "most"), [(8, 32), (9, 25), (128, 4096), (1000, 2000), (7, 67), (16, 20), (8, 10)])
def test_lengths_that_are_tried_leave_different_rests(least: int, most: int) -> None:
    for multiple in (1, 2):
        lengths = [length // multiple for length in tried(least, most, multiple)]
        assert lengths[:2] == [most // multiple, -(-least // multiple)]
        assert len(lengths) == 3 or lengths[0] - lengths[1] == 1
        if lengths[0] - lengths[1] > 2:
            assert all(len({length % number for length in lengths}) > 1 for number in (2, 3, 4))


def test_a_range_is_no_longer_than_a_table_of_positions() -> None:
    partitioned(seq="6..64")
    with pytest.raises(gp.GraphparError, match=r"embedding \(positions.*looks up position 64 .*, but its table has 64"):
        partitioned(seq="6..65")


class Flat(Model):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).flatten(0, 1)


def test_outputs_of_several_rows_in_one_dim_are_offered_where_nothing_is_padded() -> None:
    program = gp.export(
        Flat(), (IDS,), loss_fn=lambda x, y: F.cross_entropy(x, y.flatten()), targets=(IDS,), seq="6..24"
    )
    offered = {}
    for mesh in ("pp=1", "cp=2"):
        parts = gp.partition(program, gp.plan(program, mesh=mesh))
        offered[mesh] = [output.name for output in load_manifest(parts.folder).model_outputs]
    assert offered == {"pp=1": ["output"], "cp=2": []}


def test_ranges_that_can_not_be() -> None:
    with pytest.raises(gp.GraphparError, match=r"seq is '24'; it must be a range of lengths"):
        partitioned(seq="24")
    with pytest.raises(gp.GraphparError, match="a range begins at 2 or more and ends above that"):
        partitioned(seq="9..9")
    with pytest.raises(gp.GraphparError, match=r"lengths are multiples of 2, but the longest is 23; take 22"):
        partitioned(seq="6..23", mesh={"cp": 2})
    with pytest.raises(gp.GraphparError, match="no example input has one"):
        gp.export(nn.Linear(2, 2), (torch.ones(4),), seq="6..24", mode="infer")
    program = gp.export(Model(), (IDS,), loss_fn=loss_fn, targets=(IDS,), seq="6..24")
    with pytest.raises(gp.GraphparError, match=r"seq is 6..12, but the program was exported for 6..24"):
        gp.plan(program, seq="6..12")


class Sliced(Model):
    """Its table of positions is a parameter, of which the longest sequence reads all."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(12, 8))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embed(ids) + self.table[: ids.shape[1]])
        return self.head(x + F.gelu(self.qkv(x))[..., :8])


def test_tables_are_stored_as_all_lengths_of_a_list_can_read_them() -> None:
    program = gp.export(Sliced(), (IDS,), loss_fn=loss_fn, targets=(IDS,), seq="4,8,12")
    plan = gp.plan(program, mesh={"tp": 2})
    assert plan.sharding.parameters["table"]["tp"] != Shard(0)
    assert gp.check(gp.partition(program, plan)).ok
