"""Custom operators and custom autograd functions: their backward is kept, on any mesh, and the emitted folder brings them along."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphpar as gp
from graphpar.cli.main import main
from graphpar.codegen import sources
from graphpar.ir.program import operator_name
from graphpar.operators.prove import context_of
from graphpar.operators.rules import REGISTERED, placements
from graphpar.runtime.records import unpacked
from graphpar.verification import verify_all

THREE = 3.0
SCALE = math.sqrt(4.0)


def _thrice(gradient: Tensor) -> Tensor:
    return gradient * THREE


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _thrice(gradient)


tripled = Tripled.apply


class Mixed(torch.autograd.Function):
    """Two inputs, two results and a number; its backward is nobody's derivative."""

    @staticmethod
    def forward(
        x: Tensor, gate: Tensor, scale: float, bounds: tuple[int, int], none: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(bounds, tuple) and none is None
        return x * gate.sigmoid() * scale, (gate * SCALE).clamp(*bounds)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.scale = inputs[2]

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor | None, ...]:
        x, _ = ctx.saved_tensors
        assert ctx.needs_input_grad == (True, True, False, False, False)
        return first * ctx.scale * 5, second * x.cos() + first, None, None, None


class Chosen(torch.autograd.Function):
    """A view of its operand, and a float that carries no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        noted = x.sign()
        ctx.mark_non_differentiable(noted)
        return x.view_as(x), noted

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, noted: Tensor | None) -> Tensor | None:
        return None if gradient is None else 2 * gradient


class Clipped(torch.autograd.Function):
    """A backward that is not linear in the gradient: no rank may see a summand of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.sign() * 0.01


class Net(nn.Module):
    def __init__(self, middle: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(16, 32)
        self.gate = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.head = nn.Linear(16, 8)
        self.middle = [middle]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.middle[0](self.up(x), self.gate(x))
        return self.head(F.relu(self.down(hidden)))


def _mixed(x: Tensor, gate: Tensor) -> Tensor:
    first, second = Mixed.apply(x, gate, 0.5, (-1, 1), None)
    return first + second


def _chosen(x: Tensor, gate: Tensor) -> Tensor:
    value, sign = Chosen.apply(x)
    return value * gate + sign * gate


MIDDLES = {
    "tripled": lambda x, gate: Tripled.apply(x) * gate,
    "bound": lambda x, gate: tripled(x) * gate,
    "mixed": _mixed,
    "chosen": _chosen,
    "clipped": lambda x, gate: Clipped.apply(x) * gate,
}
MESHES = [{"pp": 2}, {"tp": 2}, {"pp": 2, "tp": 2}]


def _program(middle: Any) -> Any:
    return gp.export(Net(middle), (torch.randn(8, 16),), loss_fn=F.mse_loss, targets=(torch.randn(8, 8),))


def _parts(middle: Any, mesh: dict[str, int], **pins: Any) -> gp.Parts:
    program = _program(middle)
    if mesh.get("pp", 1) > 1:
        pins = {"split": ["down"]} | pins
    return gp.partition(program, gp.plan(program, mesh=mesh, **pins))


@pytest.fixture(scope="module", autouse=True)
def not_importable() -> Iterator[None]:
    """This file as one that only its own process has, wherever the tests are run from."""
    found = sources._found_elsewhere
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "_found_elsewhere", lambda name: "" if name == __name__.split(".")[0] else found(name))
        yield


# ---- custom autograd functions ---------------------------------------------------------------------------------


@pytest.mark.costly
@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", MIDDLES)
def test_a_function_keeps_its_backward(name: str, mesh: dict[str, int]) -> None:
    (result,) = verify_all([_parts(MIDDLES[name], mesh)], 2)
    assert result.ok, (result.max_error, result.problems)


@pytest.mark.costly
def test_emitted_code_applies_the_class_as_the_user_wrote_it() -> None:
    parts = _parts(MIDDLES["mixed"], {"tp": 2})
    assert re.search(r"Mixed\.apply\([^)]*\).*0\.5, \(-1, 1\),\s+None", parts.files["stage_0.py"], re.DOTALL)
    assert "from .operators import Mixed" in parts.files["stage_0.py"]
    assert "SCALE = 2.0" in parts.files["operators.py"]  # computed in the user's file: here as it was
    assert "graphpar_functions" not in "".join(text for name, text in parts.files.items() if name.endswith(".py"))
    assert "def _thrice" in _parts(MIDDLES["tripled"], {"tp": 2}).files["operators.py"]
    assert gp.check(parts).problems == []


@pytest.mark.costly
def test_weights_around_a_function_are_cut() -> None:
    for middle in MIDDLES.values():
        parameters = gp.plan(_program(middle), mesh={"tp": 2}).sharding.parameters
        assert {str(parameters[f"{weight}.weight"]["tp"]) for weight in ("up", "gate")} == {"S(0)"}


@pytest.mark.costly
def test_a_class_of_an_installed_module_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "graphpar_installed.py").write_text(_INSTALLED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.syspath_prepend(str(tmp_path))
    import graphpar_installed  # type: ignore[import-not-found]

    parts = _parts(lambda x, gate: graphpar_installed.halved(graphpar_installed.Doubled.apply(x)) + gate, {"pp": 2})

    text = parts.files["operators.py"]
    assert "from graphpar_installed import Doubled" in text and "import graphpar_installed" in text
    assert "class Doubled" not in text
    assert gp.verify(parts, 1).ok


_INSTALLED = """
import torch
from torch import Tensor


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


@torch.library.custom_op("graphpar_installed::halved", mutates_args=())
def halved(x: Tensor) -> Tensor:
    return x / 2


halved.register_fake(torch.empty_like)
halved.register_autograd(lambda ctx, gradient: gradient * 7)
"""


class Weighted(nn.Module):
    """The function is applied to a weight: each microbatch, and each replica, has a part of its gradient."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.a, self.function = nn.Linear(16, 8), [function]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.function[0](self.a.weight))


def weighted(function: Any) -> Any:
    torch.manual_seed(0)
    example = (torch.randn(8, 16),)
    return gp.export(Weighted(function), example, loss_fn=F.mse_loss, targets=(torch.randn(8, 8),))


@pytest.mark.costly
def test_a_backward_that_is_not_linear_sees_no_part_of_a_gradient() -> None:
    assert gp.plan(weighted(Tripled.apply), 1, microbatch_size=2).microbatches == 4
    with pytest.raises(gp.GraphparError, match="not linear in the gradient"):
        gp.plan(weighted(Clipped.apply), 1, microbatch_size=2)
    whole = weighted(Clipped.apply)
    assert gp.verify(gp.partition(whole, gp.plan(whole, mesh={"tp": 2})), 1).ok


class Halving(Tripled):
    """Has the forward of another class, and a backward of its own."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient / 2


class Through(Tripled):
    """Its forward calls that of another class."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return Tripled.forward(ctx, x) + 1


@pytest.mark.parametrize("function", [Halving.apply, Through.apply])
def test_a_class_that_inherits_keeps_its_own_backward_where_its_method_was_bound_before(function: Any) -> None:
    program = weighted(function)
    assert str(program).count("Halving" if function == Halving.apply else "Through") >= 1
    assert gp.verify(gp.partition(program, gp.plan(program, mesh={"dp_replicate": 2})), 1).ok


def test_gradients_are_tried_where_a_fork_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on every machine with a GPU, once the process has computed a gradient."""
    here, gradients = os.getpid(), torch.autograd.grad

    def grad(*args: Any, **options: Any) -> Any:
        if os.getpid() != here:
            raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing")
        return gradients(*args, **options)

    monkeypatch.setattr(torch.autograd, "grad", grad)
    monkeypatch.setattr("graphpar.operators.discover._FOUND", {})
    with pytest.raises(gp.GraphparError, match="not linear in the gradient"):
        gp.plan(weighted(Clipped.apply), 1, microbatch_size=2)


# ---- refusals --------------------------------------------------------------------------------------------------


class _Random(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Writing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Calling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Any) -> Tensor:
        made: Tensor = function(x)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


TABLE = torch.ones(32)


class _Reading(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + TABLE

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _local() -> Any:
    class Local(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    return Local


@pytest.mark.parametrize(
    "middle, words",
    [
        (lambda x, gate: _Random.apply(x) + gate, "_Random draws random numbers"),
        (lambda x, gate: _Writing.apply(x + 1) + gate, "_Writing writes its argument in place"),
        (lambda x, gate: _Calling.apply(x, torch.sin) + gate, "_Calling is given a .* as its argument 1"),
        (lambda x, gate: _Reading.apply(x) + gate, "_Reading uses the global TABLE of .*, a Tensor"),
        (lambda x, gate: _local().apply(x) + gate, "Local is defined inside a function"),
        (
            lambda x, gate: torch.vmap(Mixed.apply, (0, 0, None, None, None))(x, gate, 0.5, (0, 1), None)[0],
            "torch.vmap",
        ),
    ],
)
def test_what_can_not_be_kept_is_refused(middle: Any, words: str) -> None:
    with pytest.raises(gp.GraphparError, match=f"(?s)custom autograd.Function .*{words}"):
        _program(middle)


def test_an_operator_that_nobody_else_can_define_is_refused() -> None:
    @torch.library.custom_op("graphpar_custom::local", mutates_args=())
    def local(x: Tensor) -> Tensor:
        return x * 2

    local.register_fake(torch.empty_like)
    local.register_autograd(lambda ctx, gradient: gradient)
    with pytest.raises(
        gp.GraphparError, match=r"graphpar_custom::local is defined inside a function.*importable|installed"
    ):
        _parts(lambda x, gate: local(x) + gate, {"pp": 2})


# ---- registered rules ------------------------------------------------------------------------------------------


def test_a_function_takes_a_registered_rule() -> None:
    gp.register_rule(f"{__name__}.Tripled", "rows* columns -> rows* columns")
    try:
        program = _program(MIDDLES["tripled"])
        node = next(node for node in program.graph.nodes if operator_name(node) == "Tripled.apply")
        cuts = {str(p) for p in placements(node, context_of(2, offered=False)) if p.divides}
        assert cuts == {"S(1) -> S(1)"}
    finally:
        REGISTERED.clear()


def test_an_operator_that_has_the_name_of_one_of_torch_has_no_rule_of_torch() -> None:
    assert "torch.ops.graphpar_custom.relu(" in _parts(lambda x, gate: relu(x) + gate, {"pp": 2}).files["stage_0.py"]


@torch.library.custom_op("graphpar_custom::relu", mutates_args=())
def relu(x: Tensor) -> Tensor:
    return x.flip(1)


@relu.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


relu.register_autograd(lambda ctx, gradient: 3 * gradient.flip(1))


# ---- operators of a model file ---------------------------------------------------------------------------------

_MODEL = """
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from beside import helped

GAIN = 2.0


def _gained(x: Tensor) -> Tensor:
    return x * GAIN


@torch.library.custom_op("graphpar_model::gained", mutates_args=())
def gained(x: Tensor, weight: Tensor) -> Tensor:
    '''Each row is
    a row's.'''
    return _gained(x).softmax(-1) * weight


@gained.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(x)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, gradient):
    x, weight = ctx.saved_tensors
    return 3 * helped(gradient) * weight, gradient * x


torch.library.register_autograd("graphpar_model::gained", _backward, setup_context=_setup)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(64, 256), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(gained(self.up(x), self.gate(x)))


def model() -> nn.Module:
    return nn.Sequential(*[Block() for _ in range(4)])


example_inputs = (torch.randn(8, 16, 64),)
example_targets = torch.randn(8, 16, 64)
loss_fn = F.mse_loss
"""


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "beside.py").write_text(
        "from torch import Tensor\n\ndef helped(x: Tensor) -> Tensor:\n    return x.sin()\n"
    )
    file = tmp_path / "model" / "gained_model.py"
    file.write_text(_MODEL)
    return file


def _fresh(*arguments: str, cwd: Path) -> str:
    """What a new process prints."""
    command = [sys.executable, "-m", "graphpar.cli.main", *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.costly
@pytest.mark.parametrize(
    ("mesh", "fresh"),
    [
        *(pytest.param(mesh, True, marks=pytest.mark.slow) for mesh in ("tp=2", "pp=2,tp=2", "pp=2")),
        ("pp=2", False),
    ],
)
def test_an_operator_of_a_model_file_runs_where_nobody_imports_the_file(
    model_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], mesh: str, fresh: bool
) -> None:
    """``fresh``: verified by a new process and torchrun; else by this one, whose ranks never imported the file either."""
    out = tmp_path / "out"
    assert main(["compile", str(model_file), "--mesh", mesh, "-o", str(out)]) == 0
    report = capsys.readouterr().out
    plan = json.loads((out / "plan.json").read_text())

    if "tp" in mesh:  # an operator that nobody wrote a rule for
        assert "graphpar_model::gained: its rule was found by running it" in report
        stored = unpacked(plan["parameters"])
        kinds = {name: stored[f"0.{name}.weight"]["tp"] for name in ("up", "gate", "down")}
        assert "S" in kinds["down"] or "S" in kinds["up"], kinds
    verify = ["verify", str(out), "--steps", "2", "--json"]
    if fresh:
        assert json.loads(_fresh(*verify, cwd=tmp_path))["ok"]
    else:
        assert main(verify) == 0 and json.loads(capsys.readouterr().out)["ok"]
    text = (out / "operators.py").read_text()
    assert 'if not hasattr(torch.ops.graphpar_model, "gained"):' in text
    assert "def helped" in text and "class Block" not in text
    alone = [sys.executable, "-c", "import out.blocks, torch; print(torch.ops.graphpar_model.gained)"]
    assert subprocess.run(alone, cwd=tmp_path, capture_output=True, timeout=100).returncode == 0
