"""Loops over experts, spelled as people spell them: the program is the eager model's, in microbatches too, and for any choice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphpar as gp
from graphpar.passes.sharding.expert_modules import expert_modules
from graphpar.verification import reference_for, verify_all
from tests.tools.equality import Case, assert_exact, assert_same, eager, run
from tests.tools.samples import drawn

WIDTH, EXPERTS, TOP = 16, 4, 2
Mix = Callable[["Mixture", Tensor], Tensor]


class Mixture(nn.Module):
    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.mix, self.router = mix, nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.SiLU(), nn.Linear(32, WIDTH)) for _ in range(EXPERTS)
        )

    def routed(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = self.router(rows).topk(TOP)
        return weights.softmax(-1), chosen

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self, x)


class Model(nn.Module):
    def __init__(self, mix: Mix) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Mixture(mix) for _ in range(2))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return F.mse_loss(x, target)


def of_rows(mix: Callable[[Mixture, Tensor, Tensor, Tensor, Tensor], Tensor]) -> Mix:
    """A mixture of rows [tokens, width] with the weights and indices of their experts, that adds to zeros."""

    def wrapped(self: Mixture, x: Tensor) -> Tensor:
        rows = x.view(-1, WIDTH)
        return mix(self, rows, *self.routed(rows), torch.zeros_like(rows)).view(x.shape)

    return wrapped


@of_rows
def mistral(self: Mixture, rows: Tensor, weights: Tensor, chosen: Tensor, y: Tensor) -> Tensor:
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(chosen == e)
        y[token] += weights[token, slot, None] * expert(rows[token])
    return y


@of_rows
def litgpt(self: Mixture, rows: Tensor, weights: Tensor, chosen: Tensor, y: Tensor) -> Tensor:
    masks = (chosen.unsqueeze(-1) == torch.arange(EXPERTS, device=rows.device)).permute(2, 0, 1)
    for mask, expert in zip(masks, self.experts):
        token, slot = torch.where(mask)
        y[token] += weights[token, slot, None] * expert(rows[token])
    return y


@of_rows
def columns(self: Mixture, rows: Tensor, weights: Tensor, chosen: Tensor, y: Tensor) -> Tensor:
    for e, expert in enumerate(self.experts):
        at = (chosen == e).nonzero()
        y = y.index_add(0, at[:, 0], expert(rows[at[:, 0]]) * weights[at[:, 0], at[:, 1]].unsqueeze(1))
    return y


@of_rows
def pairs(self: Mixture, rows: Tensor, weights: Tensor, chosen: Tensor, y: Tensor) -> Tensor:
    """Positions of flat pairs of a token and a slot, as in loops that were written for a sort."""
    flat = chosen.view(-1)
    for e, expert in enumerate(self.experts):
        pair = (flat == e).nonzero()[:, 0]
        token = pair // TOP if e else torch.div(pair, TOP, rounding_mode="floor")
        weight = weights.view(-1)[pair] if e % 2 else weights[token, pair % TOP]
        y.index_add_(0, token, expert(rows[token]) * weight[:, None])
    return y


@of_rows
def accumulated(self: Mixture, rows: Tensor, weights: Tensor, chosen: Tensor, y: Tensor) -> Tensor:
    for e, expert in enumerate(self.experts):
        token, slot = (chosen == e).nonzero(as_tuple=True)
        y.index_put_((token,), expert(rows.index_select(0, token)) * weights[token, slot, None], accumulate=True)
    return y


@of_rows
def scattered(self: Mixture, rows: Tensor, weights: Tensor, chosen: Tensor, y: Tensor) -> Tensor:
    for e, expert in enumerate(self.experts):
        token, slot = (chosen == e).nonzero(as_tuple=True)
        own = expert(torch.gather(rows, 0, token[:, None].expand(-1, WIDTH))) * weights[token, slot, None]
        y.scatter_add_(0, token.unsqueeze(-1).expand_as(own), own)
    return y


def sequences(self: Mixture, x: Tensor) -> Tensor:
    weights, chosen = self.routed(x)
    y = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        row, token, slot = torch.where(chosen == e)
        y[row, token] += weights[row, token, slot, None] * expert(x[row, token])
    return y


@of_rows
def switch(self: Mixture, rows: Tensor, weights: Tensor, chosen: Tensor, y: Tensor) -> Tensor:
    gates, route = self.router(rows).softmax(-1).max(-1)
    lists = [torch.eq(route, e).nonzero(as_tuple=True)[0] for e in range(EXPERTS)]
    made = [expert(rows[each, :]) for each, expert in zip(lists, self.experts)]
    for each, own in zip(lists, made):
        y[each, :] = own
    return y.mul(gates.view(-1, 1))


def masked(self: Mixture, x: Tensor) -> Tensor:
    scores = self.router(x)
    top, chosen = scores.topk(TOP, dim=-1)
    gates = torch.full_like(scores, float("-inf")).scatter(-1, chosen, top).softmax(-1).view(-1, EXPERTS)
    y, rows = torch.zeros_like(x), x.view(-1, WIDTH)
    for e, expert in enumerate(self.experts):
        mask = (chosen == e).any(dim=-1)
        y[mask] += expert(rows[mask.view(-1)]) * gates[mask.view(-1), e].unsqueeze(1)
    return y


@of_rows
def once(self: Mixture, rows: Tensor, weights: Tensor, chosen: Tensor, y: Tensor) -> Tensor:
    for e, expert in enumerate(self.experts):
        mask = chosen == e
        token = torch.where(mask.any(1))[0]
        y[token] = y[token] + (weights * mask).sum(-1)[token].unsqueeze(-1) * expert(rows[token])
    return y


@of_rows
def bent(self: Mixture, rows: Tensor, weights: Tensor, chosen: Tensor, y: Tensor) -> Tensor:
    """What is written is no multiple of the weight, and no sum."""
    y = rows.clone()
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(chosen == e)
        y[token] = y[token] * 0.5 + torch.tanh(expert(y[token]) * weights[token, slot, None])
    return y


@of_rows
def first_choice(self: Mixture, rows: Tensor, weights: Tensor, chosen: Tensor, y: Tensor) -> Tensor:
    gates = self.router(rows).softmax(-1)
    chosen = gates.argmax(-1)
    for e, expert in enumerate(self.experts):
        token = (chosen == e).nonzero().view(-1)
        y[token] = expert(rows[token]) * gates[token, e : e + 1]
    return y


def dispatched(self: Mixture, x: Tensor) -> Tensor:
    """Buffers of two tokens an expert and sequence; the others are left out."""
    gates, chosen = self.router(x).softmax(-1).max(-1)
    mask = F.one_hot(chosen, EXPERTS).to(x.dtype)
    place = (mask.cumsum(1) - 1) * mask
    mask = mask * (place < 2)
    slots = F.one_hot(place.sum(-1).long().clamp(max=1), 2)
    combine = (gates * mask.sum(-1))[..., None, None] * mask[..., None] * slots[..., None, :]
    buffers = torch.einsum("bnd,bnec->ebcd", x, combine.bool().to(x.dtype))
    made = torch.stack([expert(buffer) for expert, buffer in zip(self.experts, buffers)])
    return torch.einsum("ebcd,bnec->bnd", made, combine)


@of_rows
def twice(self: Mixture, rows: Tensor, weights: Tensor, chosen: Tensor, y: Tensor) -> Tensor:
    """Both slots of some tokens send them to one expert."""
    chosen = torch.where(chosen == 1, 2, chosen)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(chosen == e)
        y.index_add_(0, token, weights[token, slot, None] * expert(rows[token]))
    return y


LOOPS: dict[str, Mix] = {
    "mistral": mistral, "litgpt": litgpt, "columns": columns, "pairs": pairs, "accumulated": accumulated, "scattered": scattered,
    "sequences": sequences, "switch": switch, "masked": masked, "once": once, "bent": bent, "first choice": first_choice,
    "twice": twice, "dispatched": dispatched,
}  # fmt: skip
X, T = (torch.randn(4, 6, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))


def case(mix: Mix) -> Case:
    return Case(Model(mix), (), {"x": X, "target": T})


@pytest.mark.costly
@pytest.mark.parametrize("name", drawn(list(LOOPS), 4, 6))
def test_loops_are_those_of_eager(name: str) -> None:
    program = assert_exact(case(LOOPS[name]), [1, 3], [1] * 4)

    graphs = [program.graph, *(block.graph for block in program.blocks.values())]
    names = {str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_function"}
    assert not any("nonzero" in each or "index" in each for each in names)
    assert name == "bent" or {"experts": EXPERTS} in [expert_modules(graph) for graph in graphs]


@pytest.mark.costly
@pytest.mark.parametrize("chosen", [0, EXPERTS - 1])
def test_all_tokens_may_choose_the_same_experts(chosen: int) -> None:
    """The example chose others; two of the four experts get none."""
    example = case(mistral)
    program = example.export()
    for layer in example.model.modules():
        if not isinstance(layer, Mixture):
            continue
        layer.router.weight.data[:] = -1
        layer.router.weight.data[[chosen, 1]] = 1
    uneven = Case(example.model, (), {"x": X.abs(), "target": T})

    assert_same(run(program, uneven), eager(uneven))
    assert_same(run(program, uneven, [1, 3]), eager(uneven))


@of_rows
def overwritten(self: Mixture, rows: Tensor, weights: Tensor, chosen: Tensor, y: Tensor) -> Tensor:
    """Which of two rows of a token is left, nobody knows."""
    chosen = torch.where(chosen == 1, 2, chosen)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(chosen == e)
        y[token] += weights[token, slot, None] * expert(rows[token])
    return y


@of_rows
def cut(self: Mixture, rows: Tensor, weights: Tensor, chosen: Tensor, y: Tensor) -> Tensor:
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(chosen == e)
        y[token[:3]] += weights[token[:3], slot[:3], None] * expert(rows[token[:3]])
    return y


@pytest.mark.costly
@pytest.mark.parametrize(("mix", "line"), [(overwritten, "token, slot"), (cut, "token, slot")])
def test_what_can_not_be_followed_says_what_to_write(mix: Mix, line: str) -> None:
    with pytest.raises(gp.GraphparError, match=r"layers.0.*test_mixture_loops.py:\d+.*index_add_"):
        case(mix).export()


MESHES = ({"pp": 2}, {"tp": 2}, {"dp_replicate": 2}, {"dp_shard": 2}, {"ep": 2})


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.sampled(1 / 4)
def test_programs_are_the_model(name: str) -> None:
    program = case(LOOPS[name]).export()
    meshes = MESHES[:-1] if name == "bent" else MESHES  # it is no sum over experts, which ep could divide
    made = [gp.partition(program, gp.plan(program, mesh=mesh)) for mesh in meshes]
    made.append(gp.partition(program, gp.plan(program, mesh={"dp_shard": 2}, recompute="full")))

    for parts, outcome in zip(made, verify_all(made, 3, timeout_s=300)):
        assert outcome.ok, (parts.plan.mesh, outcome.problems, outcome.max_error, outcome.worst)


FAULTS = {
    "unchosen rows add something": ("mul.view_as(add), 0)", "mul.view_as(add), 1e-3)"),
    "a slot is left out": (".sum([1]), 0.5)", ".amax(1) * 0.9, 0.5)"),
    "rows of one slot are not chosen": ("any_value = eq.any(1)", "any_value = eq.all(1)"),
}


@pytest.mark.costly
def test_planted_faults_are_found(tmp_path: Path) -> None:
    program = case(mistral).export()
    parts = gp.partition(program, gp.plan(program, mesh={"dp_shard": 2}))
    folders = []
    for number, (before, after) in enumerate(FAULTS.values()):
        folders.append(parts.save(tmp_path / str(number)))
        (path,) = (each for each in folders[-1].glob("*.py") if before in each.read_text())
        path.write_text(path.read_text().replace(before, after))

    outcomes = verify_all(folders, references=[reference_for(parts)] * len(folders), timeout_s=300)

    assert [name for name, outcome in zip(FAULTS, outcomes) if outcome.ok] == []


# ---- conditions on chosen rows --------------------------------------------------------------------------------------


@of_rows
def skipped(self: Mixture, rows: Tensor, weights: Tensor, chosen: Tensor, y: Tensor) -> Tensor:
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(chosen == e)
        if token.numel() == 0:
            continue
        y = y + torch.zeros_like(y).index_add(0, token, weights[token, slot, None] * expert(rows[token]))
    return y


@of_rows
def asked(self: Mixture, rows: Tensor, weights: Tensor, chosen: Tensor, y: Tensor) -> Tensor:
    for e, expert in enumerate(self.experts):
        own = chosen == e
        mask = own.any(-1)
        if mask.any():
            y[mask] += (weights * own).sum(-1)[mask].unsqueeze(-1) * expert(rows[mask])
    return y


@of_rows
def without(self: Mixture, rows: Tensor, weights: Tensor, chosen: Tensor, y: Tensor) -> Tensor:
    for e, expert in enumerate(self.experts):
        token, slot = (chosen == e).nonzero(as_tuple=True)
        if not token.numel():
            continue
        y.index_add_(0, token, weights[token, slot, None] * expert(rows[token]))
    return y


@pytest.mark.costly
@pytest.mark.parametrize("mix", [skipped, asked, without])
def test_experts_without_tokens_may_be_left_out(mix: Mix) -> None:
    example = case(mix)
    program = example.export()
    for layer in example.model.modules():
        if isinstance(layer, Mixture):
            layer.router.weight.data[2:] = 0.0
            layer.router.weight.data[:2] = 1.0

    assert_same(run(program, example, [1, 3]), eager(example))


@of_rows
def counted(self: Mixture, rows: Tensor, weights: Tensor, chosen: Tensor, y: Tensor) -> Tensor:
    penalty = rows.new_zeros(())
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(chosen == e)
        if token.numel() == 0:
            continue
        y.index_add_(0, token, weights[token, slot, None] * expert(rows[token]))
        penalty = penalty + self.router.weight[e].sum()
    return y + penalty


@of_rows
def shifted(self: Mixture, rows: Tensor, weights: Tensor, chosen: Tensor, y: Tensor) -> Tensor:
    for e, expert in enumerate(self.experts):
        mask = (chosen == e).any(-1)
        if mask.any():
            y[mask] += expert(rows[mask])
            y = y + 0.1
    return y


@of_rows
def others(self: Mixture, rows: Tensor, weights: Tensor, chosen: Tensor, y: Tensor) -> Tensor:
    """What is written are rows of another mask."""
    for e, expert in enumerate(self.experts):
        mask, other = (chosen == e).any(-1), (chosen == (e + 1) % EXPERTS).any(-1)
        if mask.any():
            y[other] += expert(rows[other])
    return y


@pytest.mark.parametrize("mix", [counted, shifted, others])
def test_what_experts_without_tokens_would_add_is_not_left_out(mix: Mix) -> None:
    with pytest.raises(
        gp.GraphparError, match=r"where a mask chooses no rows, .*test_mixture_loops.py:\d+\).*adds nothing then"
    ):
        case(mix).export()
