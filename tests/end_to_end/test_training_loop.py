"""What a training loop asks of a program: its own rows, evaluation, and the optimizer of the model file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import graphpar as gp
from graphpar.codegen.optimizer_file import optimizer_file
from graphpar.errors import GraphparError
from graphpar.frontend.modelfile import ModelFile, example_batch, load_model_file
from graphpar.runtime import load_manifest
from tests.models import training_loop_model as source
from tests.ranks import training_loop_script as fixture
from tests.tools.rank_pool import RankPool

FILE = Path(source.__file__)
MESHES: list[tuple[dict[str, int], int]] = [
    ({"pp": 2}, 0),
    ({"dp_shard": 2}, 1),
    ({"dp_shard": 2}, 3),
    ({"dp_replicate": 2}, 0),
]


@pytest.fixture(scope="module")
def file() -> ModelFile:
    return load_model_file(FILE)


@pytest.mark.costly
@pytest.mark.parametrize(("mesh", "zero"), [MESHES[0], *(pytest.param(*m, marks=pytest.mark.slow) for m in MESHES[1:])])
def test_a_rank_needs_its_own_rows_and_evaluates_and_steps_as_the_model_file_says(
    mesh: dict[str, int], zero: int, file: ModelFile, tmp_path: Path, pool: RankPool
) -> None:
    model = source.Net()
    for name, buffer in model.named_buffers():
        if name.endswith(("mean", "var")):
            buffer.add_(0.5)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    exported = gp.export(model, kwargs=file.kwargs, loss_fn=file.loss_fn, targets=file.targets, evaluates=True)
    options = {"zero": zero} if zero else {}
    program = gp.partition(exported, gp.plan(exported, mesh=mesh, **options), optimizer=FILE).save(tmp_path / "out")
    batch = example_batch(file, load_manifest(program).inputs)
    save_file(batch, tmp_path / "batch.safetensors")
    arguments = [program, tmp_path / "weights.safetensors", tmp_path / "batch.safetensors", tmp_path]
    pool.torchrun(Path(fixture.__file__), [str(each) for each in arguments], nproc=2, timeout_s=120)
    ranks = [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(2)]

    inputs, targets = batch.values()
    with torch.no_grad():
        expected = source.loss_fn(model.eval()(inputs), targets).item()
    last = ranks[1:] if "pp" in mesh else ranks
    assert [rank["eval"]["loss"] for rank in last] == pytest.approx([expected] * len(last), rel=1e-6)
    rows = [[0, 8], [0, 8]] if "pp" in mesh else [[0, 4], [4, 8]]
    assert [rank["rows"] for rank in ranks] == rows
    assert {name for rank in ranks for name in rank["names"]} == set(batch)
    assert ranks[0]["losses"] == ranks[1]["losses"]
    for rank in ranks:
        assert rank["untouched"]
        assert rank["lr"] == pytest.approx(1e-2)
        assert "none of this program's parameters" in rank["refused"]
        for name, decay in rank["decay"].items():
            assert decay == (source.DECAY if name.endswith("weight") else 0.0), name
    assert {name for rank in ranks for name in rank["decay"]} == {name for name, _ in model.named_parameters()}


class AlwaysOn(torch.nn.Module):
    """One operator that does in evaluation what only training asks for, or (``kind`` off) what both ask for."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear, self.norm = kind, torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        functional, hidden = torch.nn.functional, self.linear(x)
        heads = hidden.view(-1, 2, 2, 2)
        if self.kind == "dropout":
            return functional.dropout(hidden, 0.5)
        if self.kind == "attention":
            return functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5).flatten(1)
        if self.kind == "norm":
            return functional.batch_norm(hidden, self.norm.running_mean, self.norm.running_var, training=True)
        dropout_p = 0.5 if self.training else 0.0
        return functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=dropout_p).flatten(1)


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["dropout", "attention", "norm"])
def test_what_is_on_in_evaluation_is_another_program_there_or_refused(kind: str) -> None:
    given = {"loss_fn": source.loss_fn, "targets": (torch.zeros(4, dtype=torch.int64),)}
    program = gp.export(AlwaysOn(kind), (torch.zeros(4, 8),), **given, evaluates=True)
    assert (program.evaluated is None) == (kind == "norm")
    assert program.no_eval is None or "always on (test_training_loop.py:" in program.no_eval
    with pytest.raises(GraphparError, match=r"can't be compiled for inference: .* always on"):
        gp.export(AlwaysOn(kind), (torch.zeros(4, 8),), mode="infer")


def test_attention_whose_dropout_is_its_last_argument_evaluates() -> None:
    given = {"loss_fn": source.loss_fn, "targets": (torch.zeros(4, dtype=torch.int64),)}
    program = gp.export(AlwaysOn("off"), (torch.zeros(4, 8),), **given, evaluates=True)
    assert program.no_eval is None and program.evaluated is None
    gp.export(AlwaysOn("off"), (torch.zeros(4, 8),), mode="infer")


def test_optimizer_py_has_what_the_factory_uses_and_no_more() -> None:
    text = optimizer_file(FILE)
    assert text is not None
    made: dict[str, object] = {}
    exec(compile(text, "optimizer.py", "exec"), made)
    assert {"optimizer", "lr_schedule", "DECAY", "WARM_UP"} <= made.keys()
    assert not {"Net", "Block", "model", "loss_fn", "example_inputs"} & made.keys()


def test_optimizer_py_has_what_it_needs_of_files_beside_the_model(tmp_path: Path) -> None:
    (tmp_path / "rates.py").write_text("import math\nRATE, OTHER = math.e, 1\n\ndef unused():\n    raise missing\n")
    (tmp_path / "kinds").mkdir()
    (tmp_path / "kinds" / "__init__.py").write_text("")
    (tmp_path / "kinds" / "sgd.py").write_text(
        "from __future__ import annotations\nimport torch\nfrom rates import RATE as LR\n\n"
        "class Own(torch.optim.SGD):\n    def __init__(self, params: Params):\n        super().__init__(params, lr=LR)\n"
    )
    (tmp_path / "model.py").write_text(
        "import rates\nfrom kinds.sgd import Own as Kind\n\ndef optimizer(named):\n    return Kind([p for _, p in named])\n"
    )
    text = optimizer_file(tmp_path / "model.py")
    assert text is not None and "unused" not in text and "import rates" not in text
    made: dict[str, Any] = {}
    exec(compile(text, "optimizer.py", "exec"), made)
    optimizer = made["optimizer"]([("a", torch.zeros(1, requires_grad=True))])
    assert optimizer.param_groups[0]["lr"] == math.e
    (tmp_path / "model.py").write_text("import rates\n\ndef optimizer(named):\n    return rates.OTHER\n")
    with pytest.raises(
        GraphparError, match=r"'import rates' \(model.py:1\), a file next to it.* from rates import NAME"
    ):
        optimizer_file(tmp_path / "model.py")


def test_what_a_model_file_defines_after_an_import_of_all_names_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "base.py").write_text(
        "import torch\nRATE = 0.5\nSCALE = 3\n\ndef optimizer(named):\n    return missing\n\ndef lr_schedule(made):\n    return made\n"
    )
    own = "def optimizer(named):\n    return torch.optim.SGD([p for _, p in named], lr=RATE * SCALE)\n"
    (tmp_path / "model.py").write_text(f"from base import *\nRATE = 0.25\n\n{own}")
    text = optimizer_file(tmp_path / "model.py")
    made: dict[str, Any] = {}
    exec(compile(text or "", "optimizer.py", "exec"), made)
    assert made["optimizer"]([("a", torch.zeros(1, requires_grad=True))]).param_groups[0]["lr"] == 0.75
    assert made["lr_schedule"](1) == 1
    for other in (f"RATE = 0.25\nfrom base import *\n\n{own}", f"from base import *\nRATE = RATE / 2\n\n{own}"):
        (tmp_path / "model.py").write_text(other)
        with pytest.raises(GraphparError, match=r"needs RATE of .* and another RATE"):
            optimizer_file(tmp_path / "model.py")


def test_a_file_without_an_optimizer_is_refused(tmp_path: Path) -> None:
    model, batch = source.Net(), torch.zeros(4, 8)
    program = gp.export(model, (batch,), loss_fn=lambda output: output.sum())
    plan = gp.plan(program)
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(GraphparError, match=r"empty.py defines neither optimizer nor lr_schedule"):
        gp.partition(program, plan, optimizer=tmp_path / "empty.py")
    with pytest.raises(GraphparError, match=r"There is no file .*none.py"):
        gp.partition(program, plan, optimizer=tmp_path / "none.py")
