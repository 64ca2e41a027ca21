"""Regions, in-place writes and clutter go out of the program; what it computes, and the buffers it leaves, stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import graphpar as gp
from graphpar.ir.program import Program, operator_name
from graphpar.passes.normalize.functional import is_inplace
from tests.tools.equality import Case, assert_exact, assert_same, eager, near, run

Function = Callable[["Layered", Tensor], Tensor]

_draw = torch.Generator().manual_seed(2)
X, T = torch.randn(4, 6, 8, generator=_draw), torch.randn(4, 6, 8, generator=_draw)


class Layered(nn.Module):
    """A function between two linear layers, so that its values have a past and a future."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self, torch.tanh(self.first(x))))


def case(function: Function) -> Case:
    return Case(Layered(function), (X,), {}, F.mse_loss, (T,))


# ---- in-place operators ----------------------------------------------------------------------------------------
# Each writes to ``h``, a value of its own ([batch, 6, 8]), and returns what it left.


def _indexed(h: Tensor) -> Tensor:
    h[:, torch.tensor([0, 2])] = h[:, [1, 3]] * 2
    h[:, :, torch.tensor([1])] = 0.5
    return h


def _stale(h: Tensor) -> Tensor:
    before, view = h[:, 0] * 2, h[:, 0]
    h.mul_(3.0)
    return h + view[:, None] + before[:, None]


def _two_views(h: Tensor) -> Tensor:
    rows, turned = h.view(-1, 8), h.transpose(1, 2)
    turned[:, 0] = 1.0
    return h + rows.view_as(h)


def _read_between(h: Tensor) -> Tensor:
    view = h[:, 1:][..., ::2]
    first = view * 2
    h.mul_(3.0)
    second = view * 5
    h[:, 2] = 0.5
    return h + (first + second + view * 7).sum((1, 2))[:, None, None]


def _copied(h: Tensor) -> Tensor:
    flat = h.transpose(1, 2).reshape(h.size(0), -1)  # a copy, although reshape often is a view
    flat.add_(1.0)
    return h + flat.view(h.size(0), 8, 6).transpose(1, 2)


def _dtypes(h: Tensor) -> Tensor:
    whole = torch.zeros(h.shape[:2], dtype=torch.int64)
    whole[:, 1] = 2.7
    half = h.bfloat16()
    half.mul_(torch.ones(8) * 1.3)
    return h * (whole.add_(1))[..., None] + half.float() * 0.0


def _shifted(h: Tensor) -> Tensor:
    moved = h.new_zeros(h.shape)
    moved[:, 1:] = h[:, :-1]
    moved[:, 0] = 1.0
    return moved.masked_fill_(moved > 0.9, 0.0)


def _booleans(h: Tensor) -> Tensor:
    mask = h > 0
    mask |= h < -0.5
    mask &= h < 2
    return h * mask


def _scattered(h: Tensor) -> Tensor:
    chosen = torch.zeros_like(h)
    chosen.scatter_(2, h.argmax(-1, keepdim=True), 1.0)
    return h * chosen


def _filled(h: Tensor) -> Tensor:
    sums = torch.empty_like(h)
    sums.fill_(3.0)
    sums.zero_()
    sums += h
    whole = torch.empty(8).fill_(torch.tensor(3))
    return sums * whole + torch.empty(8).fill_(h.size(1))


def _no_drop(h: Tensor) -> Tensor:
    same = F.dropout(h, 0.0)  # the very tensor
    same.add_(1.0)
    return h


def _turned(h: Tensor) -> Tensor:
    other, first = h, h[:, 0]
    h.transpose_(1, 2)
    h[:, 3].mul_(2)
    h.unsqueeze_(1).swapaxes_(2, 3)
    other.add_(1)
    return h.squeeze_(1) + first[:, None]


def _turned_view(h: Tensor) -> Tensor:
    view = h[:, 1:]
    view.swapdims_(1, 2)
    half = view[:, ::2]
    half.unsqueeze_(0).squeeze_()
    half.mul_(3)
    view[:, 0].fill_(0.25)
    return h


def _cut_off(h: Tensor) -> Tensor:
    other = h * 2
    other.detach_()
    return h + other


def _as_it_was(h: Tensor) -> Tensor:
    ones = torch.zeros(8).resize_(8)
    ones.add_(1).resize_as_(h[0, 0].detach())
    return h * ones


def _diagonals(h: Tensor) -> Tensor:
    weights = torch.ones(8, 8)
    weights.fill_diagonal_(0.5)[1].mul_(2)
    return h @ weights.t_().triu_()


def _out_turned(h: Tensor) -> Tensor:
    made = torch.empty_like(h)
    torch.mul(h.detach(), 2, out=made)
    made.transpose_(1, 2)
    return made.transpose(1, 2) + h


def _bits(h: Tensor) -> Tensor:
    return h + h.view(torch.int32).view(torch.float32) * 2  # no gradient passes through the integers


INPLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "add_": lambda h: h.add_(1),
    "relu": lambda h: F.relu(h, inplace=True),
    "slices": lambda h: (h[:, ::2].copy_(h[:, 1::2] * 2), h)[1],
    "indices": _indexed,
    "mask": lambda h: (h.masked_fill_(h > 0.3, 0.0), h)[1],
    "view of a view": lambda h: (h[:, 1:].transpose(1, 2)[:, 2].add_(3.0), h)[1],
    "permuted": lambda h: (h.permute(2, 0, 1)[3].zero_(), h)[1],
    "moved": lambda h: (h.movedim(2, 1)[:, 3].zero_(), h)[1],
    "narrowed": lambda h: (h.narrow(1, 1, 2).fill_(2.0), h)[1],
    "squeezed": lambda h: (h.unsqueeze(1).squeeze(1).mul_(2), h)[1],
    "a chain": lambda h: h.add_(1).mul_(2).view(h.size(0), -1).sub_(1).view(h.shape),
    "overlapping rows": lambda h: (h[:, 1:].copy_(h[:, :-1].clone()), h)[1],
    "index_add": lambda h: h.index_add_(1, torch.tensor([1, 2]), h[:, :2] * 2),
    "stale view": _stale,
    "two views": _two_views,
    "read between two writes": _read_between,
    "copy, not view": _copied,
    "dtypes": _dtypes,
    "shifted": _shifted,
    "booleans": _booleans,
    "scattered": _scattered,
    "filled": _filled,
    "dropout of nothing": _no_drop,
    "bits": _bits,
    "turned": _turned,
    "turned view": _turned_view,
    "one matrix turned": lambda h: (h[0].t_(), h)[1],
    "every other": lambda h: (h[:, ::2].mul_(2), h)[1],
    "cut off": _cut_off,
    "as it was": _as_it_was,
    "diagonals": _diagonals,
    "out, turned": _out_turned,
    "powers": lambda h: h.abs_().add_(1).pow_(2).polygamma_(1),
}


@pytest.mark.parametrize("name", INPLACE)
@pytest.mark.sampled(1 / 3)
def test_inplace_writes(name: str) -> None:
    program = assert_exact(case(lambda _, h: INPLACE[name](h * 1)), [1, 3])

    assert not any(is_inplace(node) for node in program.graph.nodes)


REFUSED: dict[str, tuple[Function, str]] = {
    "detached": (lambda _, h: (h.detach().mul_(2), h)[1], "detached tensor"),
    "parameter": (
        lambda model, h: (model.first.weight.detach().clamp_(-1, 1), h)[1],
        "writes the parameter 'first.weight'",
    ),
    "longest rows": (
        lambda model, h: (
            h + F.embedding(torch.zeros_like(h[..., 0]).long(), model.first.weight, max_norm=1.0).sum(-1, True)
        ),
        "embedding of 'first.weight' has max_norm",
    ),
    "out of another size": (
        lambda _, h: torch.sign(h.detach(), out=torch.empty(0)) + h,
        "aten.sign.out writes to out=",
    ),
    "bits": (lambda _, h: ((h * 1).view(torch.int32).add_(1), h)[1], "view made by 'view'"),
    "another size": (lambda _, h: (torch.zeros(8).resize_(4), h)[1], "resize_.*changes the number of elements"),
    "other memory": (lambda _, h: (torch.zeros(8).set_(torch.zeros(3)), h)[1], "set_.*shows? other memory"),
    "lists": (lambda _, h: (torch._foreach_mul_([h * 1, h * 2], 2), h)[1], "_foreach_mul_.*writes a list"),
    "wrapped": (lambda _, h: h + torch.ones(9, 8).fill_diagonal_(2.0, wrap=True)[8], "fill_diagonal_.*wraps around"),
    "truths over numbers": (lambda _, h: (h * 1).logical_and_(h), "logical_and_.*as if nothing were written"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_writes_that_would_lose_their_meaning_are_refused(name: str) -> None:
    function, why = REFUSED[name]

    with pytest.raises(gp.GraphparError, match=why) as caught:
        case(function).export()
    assert "test_normalize.py:" in str(caught.value)


VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda v: v.transpose(0, -1) if v.ndim > 1 else v,
    lambda v: v[..., 1:] if v.size(-1) > 1 else v,
    lambda v: v.select(-1, 0) if v.ndim > 1 else v,
    lambda v: v.unsqueeze(0),
    lambda v: v[..., ::2],
    lambda v: v.reshape(-1),
    lambda v: v.flatten(0, 1) if v.ndim > 1 else v,
    lambda v: v.movedim(0, -1),
]
WRITES: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda v, other: v.add_(0.5),
    lambda v, other: v.mul_(0.5),
    lambda v, other: v.copy_(other.sum() * 0.01 + torch.zeros_like(v)),
    lambda v, other: v.fill_(0.3),
    lambda v, other: v.masked_fill_(v.detach() > 0.2, 0.1),
]


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 5),
            st.lists(st.sampled_from(range(len(VIEWS))), max_size=3),
            st.sampled_from(range(len(WRITES))),
        ),
        min_size=1,
        max_size=5,
    )
)
@pytest.mark.costly
def test_random_programs_of_views_and_writes(steps: list[tuple[int, list[int], int]]) -> None:
    def function(_: Layered, h: Tensor) -> Tensor:
        base = h.clone()  # not the batch's business here: the batch is an outer loop that nothing below touches
        tensors = [base[0], base[0]]
        for start, views, write in steps:
            view = tensors[start % len(tensors)]
            for index in views:
                view = VIEWS[index](view)
            tensors.append(WRITES[write](view, tensors[0]))
            tensors.append(view)
        return base + sum(tensor.sum() for tensor in tensors)

    found: dict[str, Program] = {}
    example = case(function)
    example.export(after_pass=lambda row, program: found.setdefault(row.name, program))

    expected = eager(example)
    for name in ("functionalize", "simplify"):
        assert_same(run(found[name], example), expected, what=f"after {name}")


# ---- buffers ---------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Buffers written every way: in place, under no_grad, through a view, by assignment; one inside another module."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.steps = self.steps + 1
            return x * self.steps

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.inner = nn.Linear(8, 8), Counting.Inner()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("table", torch.zeros(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        h = self.linear(self.inner(x))
        with torch.no_grad():
            self.average.mul_(0.9).add_(h.mean((0, 1)), alpha=0.1)
            self.table[1] = self.average * 2
        return h + self.average + self.table[1] * self.calls


def test_written_buffers_keep_their_values_and_order() -> None:
    example = Case(Counting(), (X,), {}, F.mse_loss, (T,))
    programs: list[Program] = []
    last = example.export(after_pass=lambda _, program: programs.append(program))

    expected = eager(example)
    for program in programs:
        found = run(program, example)
        assert_same(found, expected)
        for name, value in expected.buffers.items():
            near(found.buffers[name], value, 1e-6, name)
    assert any("'average' once a microbatch" in line for line in map(str, last.couplings))
    assert set(last.steady) == {"calls", "inner.steps"}


class _Read(nn.Module):
    """Reads a buffer by ``read`` before it is written, and again after."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.read = nn.Linear(8, 8), read
        self.register_buffer("average", torch.arange(1.0, 9.0))

    def forward(self, x: Tensor) -> Tensor:
        before = self.read(self.average)
        self.average.mul_(torch.arange(8.0))
        return self.linear(x) * before * self.read(self.average)


def _into_new(value: Tensor) -> Tensor:
    made = torch.zeros(8)
    made[:] = value
    return made


def _into_rows(value: Tensor) -> Tensor:
    made = torch.zeros(2, 8)
    made[:, :] = value
    return made.sum(0)


READS: dict[str, Callable[[Tensor], Tensor]] = {
    "plus nothing": lambda value: value + 0,
    "times one": lambda value: value * 1,
    "by one": lambda value: value / 1,
    "cast": lambda value: value.to(torch.float32, copy=True),
    "joined": lambda value: torch.cat([value]),
    "joined with nothing": lambda value: torch.cat([torch.empty(0), value]),
    "written into": _into_new,
    "written into rows": _into_rows,
    "copied into": lambda value: torch.zeros(8).copy_(value),
    "twice": lambda value: value * 2,
    "repeated": lambda value: value.repeat(1),
    "true": lambda value: ((value > 7) & torch.ones(8, dtype=torch.bool)).float() + 1,
}


@pytest.mark.parametrize("name", READS)
def test_what_was_read_of_a_buffer_before_a_write_is_the_old_value(name: str) -> None:
    example = Case(_Read(READS[name]), (X,), {}, F.mse_loss, (T,))
    assert_same(run(example.export(), example), eager(example))


class _ReadBetween(_Read):
    """A view of the buffer is read before, between and after two writes."""

    def forward(self, x: Tensor) -> Tensor:
        view = self.average[2:].view(2, 3)
        first = view * 2
        self.average.mul_(torch.arange(8.0))
        second = view * 3
        self.average[3] = 0.25
        return self.linear(x) * (first + second + view * 5).sum()


def test_a_view_of_a_buffer_shows_each_write() -> None:
    example = Case(_ReadBetween(lambda value: value), (X,), {}, F.mse_loss, (T,))
    program, expected = example.export(), eager(example)
    found = run(program, example)
    assert_same(found, expected)
    near(found.buffers["average"], expected.buffers["average"], 1e-6, "average")


class _Normed(_Read):
    """The mean of squares is that of the buffer before the write, what it divides the one after."""

    def forward(self, x: Tensor) -> Tensor:
        squares = self.average.pow(2).mean(-1, keepdim=True)
        self.average.mul_(torch.arange(8.0))
        return self.linear(x) * (self.average * torch.rsqrt(squares + 1e-3))


def test_a_norm_of_two_values_of_a_buffer_is_no_norm() -> None:
    example = Case(_Normed(torch.clone), (X,), {}, F.mse_loss, (T,))
    program = example.export()
    assert not program.idioms
    assert_same(run(program, example), eager(example))


# ---- regions ---------------------------------------------------------------------------------------------------


def _nested(model: Layered, h: Tensor) -> Tensor:
    with torch.no_grad():
        scale = h.mean(-1, keepdim=True)
        with torch.enable_grad():
            kept = h * scale
        double = h * 2
    return h - scale + kept + double


def _parameters_inside(model: Layered, h: Tensor) -> Tensor:
    with torch.no_grad():
        norm, other = model.first.weight.norm(), model.second(h)
    return h / norm + other


def _itself(model: Layered, h: Tensor) -> Tensor:
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        same = h.float()  # h itself, whose gradient must survive
        other = model.first(same)
    return same + other


def _autocast(model: Layered, h: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        a = model.first(h)
        assert a.dtype == torch.bfloat16
        mixed = torch.cat([a, h], -1)[..., :8]
        attended = F.scaled_dot_product_attention(a[:, None], a[:, None], a[:, None])[:, 0]
        with torch.autocast("cpu", enabled=False):
            exact = model.first(a.float())
        normal = F.layer_norm(a, (8,))
    return mixed.float() + attended.float() + exact + normal.float()


REGIONS: dict[str, tuple[Function, float]] = {
    "no_grad": (lambda _, h: h - torch.no_grad()(lambda: h.mean(-1, keepdim=True))(), 1e-5),
    "nested": (_nested, 1e-5),
    "parameters inside": (_parameters_inside, 1e-5),
    "the same tensor": (_itself, 1e-5),
    "autocast": (_autocast, 2e-2),
    "casts by hand": (
        lambda _, h: (h.float() * torch.rsqrt(h.float().pow(2).mean(-1, keepdim=True) + 1e-5)).to(h.dtype),
        1e-5,
    ),
}


@pytest.mark.costly
@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.sampled(1 / 3)
def test_regions(name: str) -> None:
    function, tolerance = REGIONS[name]

    program = assert_exact(case(function), [1, 3], tolerance=tolerance)

    assert not any(isinstance(node.target, torch._ops.HigherOrderOperator) for node in program.graph.nodes)


def _mixed(model: Layered, h: Tensor) -> Tensor:
    return torch.cat([h, model.first.weight.expand(h.shape[0], 8, 8)], 1)[:, :6]


def _outside(model: Layered, h: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        exact = model.first(h.float())
        with torch.autocast("cpu", torch.bfloat16):
            return exact + model.second(exact)


UNDER_AUTOCAST: dict[str, Function] = {
    "split": lambda _, h: torch.mul(*h.split(4, -1)).repeat(1, 1, 2),
    "var_mean": lambda _, h: h - torch.var_mean(h, -1, keepdim=True)[1],
    "layer_norm": lambda _, h: F.layer_norm(h, (8,)),
    "softmax": lambda model, h: (h @ model.first.weight).softmax(-1) @ model.first.weight,
    "promoted": _mixed,
    "computed in fp32": lambda _, h: h * F.mse_loss(h, h.float() * 0.9, reduction="none"),
    "attention": lambda _, h: F.scaled_dot_product_attention(h[:, None], h[:, None].float(), h[:, None])[:, 0],
    "einsum": lambda model, h: torch.einsum("bsd,ed->bse", h, model.first.weight),
    "doubles": lambda model, h: (h.double() @ model.first.weight.double()).float(),
    "fft": lambda _, h: h * torch.fft.rfft(h.float()).abs()[..., :1],
    "switched off and on": _outside,
}


@pytest.mark.parametrize("name", UNDER_AUTOCAST)
@pytest.mark.sampled(1 / 3)
def test_autocast_computes_in_the_dtypes_of_torch(name: str) -> None:
    def function(model: Layered, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model.second(UNDER_AUTOCAST[name](model, model.first(h))).float()

    example = case(function)
    expected, found = eager(example), run(example.export(), example)

    near(found.loss, expected.loss, 1e-7, "loss")  # an operator in another dtype is off by 1e-3
    assert_same(found, expected, 1e-2)


class _Named(nn.Module):
    """Two layers under autocast, the second with the first one's weight as well."""

    def __init__(self, autocast: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(3))
        self.autocast, self.embed, self.head = autocast, nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast), torch.set_grad_enabled(True):
            x = self.embed(x)
            for layer in self.layers:
                x = layer(x)
            return self.head(x).float()


@pytest.mark.costly
def test_modules_keep_their_operators_and_names_in_regions() -> None:
    without, program = (
        gp.export(_Named(autocast), (X,), loss_fn=F.mse_loss, targets=(T,)) for autocast in (False, True)
    )

    blocks = {name: block.instances for name, block in program.blocks.items()}
    assert blocks == {"TransformerEncoderLayer": ["layers.0", "layers.1", "layers.2"]}
    assert sorted(_attributes(program)) == sorted(_attributes(without))


def _attributes(program: Program) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "get_attr"]


def test_autocast_of_another_device_is_warned_of() -> None:
    def function(_: Layered, h: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return h * 2

    assert any("torch.autocast('cuda') (test_normalize.py:" in line for line in case(function).export().warnings)


@pytest.mark.costly
def test_what_autocast_does_inside_of_a_recurrent_layer_is_refused_with_its_place() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRU(8, 8, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.cell(x)[0].float()

    with pytest.raises(gp.GraphparError, match=r"Autocast computes aten.gru.input \(cell, test_normalize.py:\d+\)"):
        gp.export(Recurrent(), (X,), loss_fn=F.mse_loss, targets=(T,))


@pytest.mark.costly
def test_control_flow_is_refused_with_its_place() -> None:
    def branches(_: Layered, h: Tensor) -> Tensor:
        return torch.cond(h.sum() > 0, lambda v: v * 2, lambda v: v * 3, (h,))

    with pytest.raises(gp.GraphparError, match=r"control-flow region 'cond' \(test_normalize.py:\d+\)"):
        case(branches).export()


# ---- clutter ---------------------------------------------------------------------------------------------------


def test_what_nobody_would_write_goes_out() -> None:
    def cluttered(_: Layered, h: Tensor) -> Tensor:
        unused = h * 7  # noqa: F841
        h = F.dropout(h.to(h.dtype).contiguous()[:, :], 0.0) * 1 + 0
        return torch.cat([torch.tensor([]), h.view(h.shape)], 1).expand(-1, -1, 8)

    program = assert_exact(case(cluttered), [1, 3])

    names = [operator_name(node) for node in program.graph.nodes if node.op == "call_function"]
    assert names[:3] == ["linear", "tanh", "linear"], names
    assert not program.constants


@pytest.mark.parametrize(
    ("index", "left"),
    [
        (lambda x, b, n: x[b[:, None, None], n], 0),
        (lambda x, b, n: x[b[:, None, None], n].add_(1), 0),
        (lambda x, b, n: x[b[:, None], n.flip(0)], 1),
        (lambda x, b, n: x[b[:, None], n[1:]], 1),
        (lambda x, b, n: x[b, :][:, n], 2),
        (lambda x, b, n: x[b[None, :], n[:, None]].transpose(0, 1), 1),
    ],
)
def test_an_index_of_all_is_the_tensor_itself(index: Callable[..., Tensor], left: int) -> None:
    def indexed(_: Layered, h: Tensor) -> Tensor:
        picked = index(h.sum(1), torch.arange(h.size(0)), torch.arange(8))
        shown = torch.ones((), dtype=torch.bool) & (h > 0) & h.new_ones(8, dtype=torch.bool)
        return h.where(shown, h * 2) + h * picked.flatten(1).sum(1).view(-1, 1, 1)

    program = assert_exact(case(indexed), [1, 3])

    names = [operator_name(node) for node in program.graph.nodes if node.op == "call_function"]
    assert sum(name in ("index", "index_select") for name in names) == left, names
    assert not any(name in ("bitwise_and", "__and__", "ones", "new_ones") for name in names), names


class _Filled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) + torch.full((4,), 0.1) * torch.linspace(0, 1, 4) + torch.arange(4)).sum()


def test_factories_keep_the_dtype_of_the_trace() -> None:
    """Where the program runs, the default may be another."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        program = gp.export(_Filled(), (torch.zeros(2, 4),))
    finally:
        torch.set_default_dtype(previous)
    made = {operator_name(node): node.kwargs.get("dtype") for node in program.graph.nodes}
    assert made["full"] == made["linspace"] == torch.float64 and made["arange"] is None


class _OfDefaultDtype(nn.Module):
    """Floating numbers that are made of sizes, of whole numbers and of masks take the default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h = self.cell(x, torch.zeros(x.shape[0], 4))
        share = (lengths / 3).unsqueeze(1) + torch.where(lengths > 2, 0.1, 0.3).unsqueeze(1)
        return (h * share * (torch.arange(4) / 7)).square().mean()


def test_what_takes_the_default_dtype_says_so() -> None:
    lengths = torch.tensor([1, 2, 3, 4])
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        case = Case(_OfDefaultDtype(), (torch.randn(4, 4), lengths))
        expected, program = eager(case), case.export()
    finally:
        torch.set_default_dtype(before)
    assert_same(run(program, case), expected, 1e-14)


class Widths(nn.Module):
    """Two layers of each width, in modules whose names are no names of Python's."""

    def __init__(self) -> None:
        super().__init__()

        class Layer(nn.Module):
            def __init__(self, width: int) -> None:
                super().__init__()
                self.first, self.second = nn.Linear(8, width), nn.Linear(width, 8)

            def forward(self, x: Tensor) -> Tensor:
                return x + self.second(self.first(x).tanh())

        self.stages = nn.ModuleDict({f"stage-{width}": nn.Sequential(Layer(width), Layer(width)) for width in (16, 24)})

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages.values():
            x = stage(x)
        return x.square().mean()


def test_classes_of_layers_are_names_of_python() -> None:
    program = gp.export(Widths(), (torch.randn(4, 8),))

    assert sorted(program.blocks) == ["LayerStage16", "LayerStage24"]
