"""All the ways to say where stages begin give the stages that they say."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint, pipe_split

import graphpar as gp
from graphpar.annotations.patterns import ModelNames
from graphpar.passes.planning.recomputation import recomputed_blocks
from tests.tools.programs import example


class _Layer(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.linear1, self.linear2 = nn.LayerNorm(8), nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear2(self.linear1(self.norm(x)).relu())


class _Layers(nn.Module):
    def __init__(self, count: int, marks: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([_Layer() for _ in range(count)])
        self.head = nn.Linear(8, 11)
        self.marks = marks

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for index, layer in enumerate(self.layers):
            if index in self.marks:
                pipe_split()
            x = layer(x)
        return self.head(x).mean()


@functools.cache
def _program(count: int, marks: tuple[int, ...] = ()) -> gp.Program:
    return gp.export(_Layers(count, marks), (torch.zeros(8, 4, dtype=torch.int64),))


def _layers(plan: gp.Plan) -> list[list[str]]:
    return [[name for name in stage.modules if name.startswith("layers")] for stage in plan.stages]


def test_seven_layers_by_pattern() -> None:
    plan = gp.plan(_program(7), mesh={"pp": 2}, split=["layers.*"])

    assert [len(layers) for layers in _layers(plan)] == [4, 3]
    assert plan.stages[0].modules[0] == "embed" and plan.stages[1].modules[-1] == "head"


@pytest.mark.costly
def test_beginning_of_the_next_is_the_end_of_the_last() -> None:
    program = _program(4)

    plans = [
        gp.plan(program, mesh={"pp": 2}, split=["layers.2"]),
        gp.plan(program, mesh={"pp": 2}, split=[{"layers.1": "end"}]),
        gp.plan(program, mesh={"pp": 2}, split={"layers.1": SplitPoint.END}),
        gp.plan(program, mesh={"pp": 2}, split=lambda _: ["layers.2"]),
        gp.plan(program, mesh={"pp": 2}, stages=[["embed", "layers.0", "layers.1"], ["layers.2", "layers.3", "head"]]),
    ]
    sources = []
    for plan in plans:
        files = gp.partition(program, plan).files
        sources.append({name: text for name, text in files.items() if name.startswith(("blocks", "stage"))})

    assert all(source == sources[0] for source in sources)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("widths", "starts"),
    [
        ((16,) * 8, {2: [4], 3: [3, 6], 4: [2, 4, 6]}),
        ((16, 16, 16, 64, 16, 16, 16, 16), {2: [4], 3: [3, 4], 4: [3, 4, 5]}),
        ((64, 16, 16, 16, 16, 16, 16, 16), {2: [3], 3: [1, 5], 4: [1, 2, 5]}),
    ],
    ids=["equal", "a large one", "a large first one"],
)
def test_eight_layers_by_flops(widths: tuple[int, ...], starts: dict[int, list[int]]) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(_Layer(width) for width in widths)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.mean()

    program = gp.export(Wide(), (torch.randn(8, 8),))
    for stages, expected in starts.items():
        plan = gp.plan(program, mesh={"pp": stages})
        assert [point.path for point in plan.split_points] == [f"layers.{start}" for start in expected]


def test_a_backward_counts_where_it_runs() -> None:
    """Of eight equal layers the first four are frozen: a third of the flops of the others."""

    class Frozen(_Layers):
        def __init__(self) -> None:
            super().__init__(8)
            for module in (self.embed, *self.layers[:4]):
                module.requires_grad_(False)

    plan = gp.plan(gp.export(Frozen(), (torch.zeros(8, 4, dtype=torch.int64),)), mesh={"pp": 2})

    assert [point.path for point in plan.split_points] == ["layers.5"]


def test_a_name_is_not_the_beginning_of_another() -> None:
    program = _program(12)

    plan = gp.plan(
        program,
        mesh={"pp": 2, "tp": 2},
        split=["layers.10"],
        recompute={"layers.1": "full"},
        shard_plan={"layers.1": "replicate"},
    )

    assert [len(layers) for layers in _layers(plan)] == [10, 2]
    assert recomputed_blocks(program, {"layers.1": "full"}) == {"layers.1": "full"}
    names = ModelNames({f"layers.{i}": "Layer" for i in range(12)}, {f"layers.{i}.weight": (8, 8) for i in range(12)})
    assert names.below("layers.1") == ["layers.1.weight"]


@pytest.mark.costly
def test_the_end_of_a_layer_among_twelve() -> None:
    program = _program(12)
    for last in (0, 1, 9, 10):
        plan = gp.plan(program, mesh={"pp": 2}, split=[{f"layers.{last}": "end"}])
        assert [len(layers) for layers in _layers(plan)] == [last + 1, 11 - last]


def test_stages_begin_where_buffers_let_them() -> None:
    class Kept(nn.Module):
        """A running mean that is read by the first layer, and written again after the third."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
            self.register_buffer("kept", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            self.kept.mul_(0.9).add_(x.detach().mean(0))
            first, second, third, last = self.layers
            x = third(second(first(x * self.kept)))
            self.kept.add_(x.detach().mean(0))
            return last(x).mean()

    program = gp.export(Kept(), (torch.randn(8, 8),))

    with pytest.raises(gp.GraphparError, match="Buffer 'kept' is written"):
        gp.plan(program, mesh={"pp": 2}, split=["layers.2"])
    assert [point.path for point in gp.plan(program, mesh={"pp": 2}).split_points] == ["layers.3"]


def test_marks_in_the_forward() -> None:
    marked = _program(4, marks=(1,))

    assert _layers(gp.plan(marked, mesh={"pp": 2})) == [["layers.0"], ["layers.1", "layers.2", "layers.3"]]
    # What the user says goes before what the model says.
    assert _layers(gp.plan(marked, mesh={"pp": 2}, split=["layers.3"]))[1] == ["layers.3"]


@pytest.mark.costly
def test_by_layers_with_weighted_ends() -> None:
    assert [len(layers) for layers in _layers(gp.plan(_program(3), mesh={"pp": 2}, edge_layers=(2, 2)))] == [2, 1]
    by_two = gp.plan(_program(6), mesh={"pp": 2}, layers_per_stage=2, schedule="Interleaved1F1B")
    assert [len(layers) for layers in _layers(by_two)] == [1, 2, 2, 1]


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"split": ["layres.2"]}, r"names no module. Did you mean 'layers"),
        ({"split": ["layers.2.linear1"]}, r"inside the block 'layers.2'"),
        ({"split": ["layrs.*"]}, r"matches no module"),
        ({"split": ["embed"]}, r"Stage 0 would be empty"),
        ({"split": [{"head": "end"}]}, r"Stage 1 would be empty"),
        ({"split": ["layers.2", {"layers.1": "end"}]}, r"the same place"),
        ({"stages": [["embed", "layers.0"], ["layers.2", "layers.3", "head"]]}, r"'layers.1' is in no stage"),
        ({"stages": [["embed", "layers"], ["layers", "head"]]}, r"'layers' is in stages 0 and 1"),
        ({"stages": [["embed"], ["layers"], ["hed"]]}, r"lists 'hed', which is not a module"),
        ({"stages": [["head", "embed"], ["layers"]]}, r"runs after modules of stage 1"),
        ({"split": ["layers.1"], "stages": [["embed"], ["layers", "head"]]}, r"not both"),
        ({"layers_per_stage": 1}, r"exactly 1 stage a rank"),
        ({"layers_per_stage": 2}, r"at 2 a stage are 3 stages, which pp=2 ranks can't hold evenly; 3 layers a stage would be 2\.$"),
        ({"edge_layers": (9, 1)}, r"more than the"),
        ({"split": ["layers.1", "layers.2"]}, r"can't hold evenly"),
        ({"schedule": "1F1B", "layers_per_stage": 2, "edge_layers": (2, 2)}, r"1F1B"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(pins: dict[str, object], message: str) -> None:
    with pytest.raises(gp.GraphparError, match=message):
        gp.plan(_program(4), mesh={"pp": 2}, **pins)  # type: ignore[arg-type]


def test_more_stages_than_layers() -> None:
    with pytest.raises(
        gp.GraphparError, match=r"has only 4 blocks, and with what is before and after them at most \d stages"
    ):
        gp.plan(_program(4), mesh={"pp": 16}, global_batch=64)
    with pytest.raises(gp.GraphparError, match="only 2 layers"):
        gp.plan(_program(2), mesh={"pp": 8}, edge_layers=(1, 1))


@pytest.mark.costly
def test_compiling_twice_changes_nothing_in_the_model() -> None:
    model = _Layers(2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    forward = model.forward

    for _ in range(2):
        program = gp.export(model, (torch.zeros(8, 4, dtype=torch.int64),))
        gp.partition(program, gp.plan(program, mesh={"pp": 2}))

    assert model.forward == forward and "forward" not in vars(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_plan_alone_gives_the_same_bytes() -> None:
    program = example("gpt")
    plan = gp.plan(program, mesh={"pp": 2}, schedule="ZBVZeroBubble")
    again = gp.Plan.from_json(plan.to_json())

    assert again == plan
    assert gp.partition(program, again).files == gp.partition(program, plan).files


def test_a_table_that_does_not_divide_the_rows_names_them() -> None:
    table = "0F0,0F1,0F2,0B0,0B1,0B2\n"
    with pytest.raises(
        gp.GraphparError, match=r"3 microbatches, which don't divide the 4 rows of a replica \(a global batch of 8\)"
    ):
        gp.plan(_program(4), mesh={"dp_replicate": 2}, table=table)
    with pytest.raises(gp.GraphparError, match="3 microbatches, which don't divide the 8 rows of the global batch"):
        gp.plan(_program(4), mesh={"pp": 1}, table=table)


def test_a_module_begins_with_what_its_weight_is_computed_from() -> None:
    """A stage that began at its own operator would be without what is before it, and the one before it empty."""
    model = nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)), nn.Linear(8, 8))
    program = gp.export(model, (torch.randn(4, 8),), loss_fn=lambda output: output.square().mean())
    stages = gp.partition(program, gp.plan(program, mesh={"pp": 2})).compilation.emitted[1]
    assert [stage.modules for stage in stages] == [("0.parametrizations.weight", "0"), ("1",)]
