"""The emitted text: what an engineer would own, the same bytes every time, and code that torch.compile takes whole."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn

import graphpar as gp
from graphpar import emitted
from graphpar.codegen.formatting import commented, describe_shape, describe_types
from graphpar.operators.transitions import TABLE
from graphpar.report.report import report_data
from tests.tools.programs import SMALL, example, example_file


def _parts(name: str, devices: int = 2, **pins: object) -> gp.Parts:
    program = example(name)
    return gp.partition(program, gp.plan(program, mesh={"pp": devices}, allow_batch_coupling=True, **pins))  # type: ignore[arg-type]


def _sources(parts: gp.Parts) -> dict[str, str]:
    return {name: text for name, text in parts.files.items() if name.endswith(".py")}


@pytest.fixture
def package(tmp_path: Path) -> Iterator[ModuleType]:
    """Imports an emitted folder as a package with a known name."""

    def load(parts: gp.Parts) -> ModuleType:
        folder = parts.save(tmp_path / "out")
        spec = importlib.util.spec_from_file_location(
            "emitted_under_test", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["emitted_under_test"] = module
        spec.loader.exec_module(module)
        return module

    yield load  # type: ignore[misc]
    for name in [name for name in sys.modules if name.startswith("emitted_under_test")]:
        del sys.modules[name]


class _Normed(nn.Module):
    """A BatchNorm of the root's and others in blocks, and a counter that is no BatchNorm's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x).square().mean()


def test_a_stage_in_evaluation_counts_no_batches(package) -> None:  # type: ignore[no-untyped-def]
    """And takes the running statistics, as the model does."""
    model = _Normed()
    x = torch.randn(6, 4)
    program = gp.export(model, (x,))
    parts = gp.partition(program, gp.plan(program, 1, microbatch_size=6))
    package(parts)
    stage = importlib.import_module("emitted_under_test.stage_0").Stage0()
    stage.load_state_dict(model.state_dict())

    for training in (True, False, False, True):
        expected, found = model.train(training)(x), stage.train(training)(x=x, rows=torch.tensor(6))
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(dict(stage.named_buffers()), dict(model.named_buffers()))
    assert int(stage.norm.num_batches_tracked) == 2 and int(stage.calls) == 4


class _Weighted(nn.Module):
    """Weights of examples that come from inputs alone, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        weight = (x.sin().mean(1) / 25).exp().cos()
        return self.layer(x) * nn.functional.dropout(weight, 0.25, self.training).cos()[:, None]


def test_what_depends_on_the_mode_is_no_function(package) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    model, x = _Weighted(), torch.randn(6, 4)
    program = gp.export(model, (x,), loss_fn=lambda output: output.sum())
    parts = gp.partition(program, gp.plan(program, mesh={}, microbatch_size=6))
    assert any("def make_" in text for text in parts.files.values())
    package(parts)
    stage = importlib.import_module("emitted_under_test.stage_0").Stage0()
    stage.load_state_dict(model.state_dict())
    keys = torch.arange(6)
    assert not torch.equal(stage(x=x, sample_keys=keys), stage(x=x, sample_keys=keys + 1))
    torch.testing.assert_close(stage.eval()(x=x, sample_keys=keys), model.eval()(x).sum())


class _OfOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        (first,) = x[:, :1].unbind(1)
        return self.layer(x) * first[:, None]


def test_a_list_of_one_is_unpacked() -> None:
    program = gp.export(_OfOne(), (torch.randn(6, 4),), loss_fn=lambda output: output.sum())
    text = gp.partition(program, gp.plan(program, mesh={}, microbatch_size=6)).files["stage_0.py"]
    assert re.search(r"^ +\(\w+,\) = x\[:, :1\]\.unbind\(1\)$", text, re.MULTILINE), text


def test_files_of_the_library_have_lines_of_120_characters_at_most() -> None:
    for file in Path(emitted.__file__).parent.glob("*.py"):
        assert max(map(len, file.read_text().splitlines()), default=0) <= 120, file


@pytest.mark.costly
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.sampled(1 / 3)
def test_text_is_the_same_every_time_and_imports_torch_alone(name: str) -> None:
    first, second = _parts(name), _parts(name)

    assert first.files == second.files
    for file, text in _sources(first).items():
        assert max(map(len, text.splitlines()), default=0) <= 120, file
        assert not file.startswith(("blocks", "stage_")) or "torch.ops.aten" not in text, (
            file
        )  # as one writes it oneself
        modules = {
            alias.name.split(".")[0]
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Import)
            for alias in node.names
        } | {
            (node.module or "").split(".")[0]
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.ImportFrom) and node.level == 0
        }
        allowed = (
            {"torch", "math", "collections", "functools", "typing", "__future__"}
            if file != "train.py"
            else {
                "torch",
                "argparse",
                "itertools",
                "json",
                "time",
                "pathlib",
                "collections",
                "safetensors",
                "graphpar",
                "__future__",
            }
        )
        assert modules <= allowed, (file, modules)


@pytest.mark.costly
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.sampled(1 / 3)
def test_stage_keys_are_the_models_keys(name: str) -> None:
    model = example_file(name).model
    built = model if isinstance(model, nn.Module) else model()
    parts = _parts(name, 2)

    stages = [parts.stage(rank) for rank in range(2)]

    assert all(isinstance(stage, nn.Module) for stage in stages)
    keys = [set(stage.state_dict()) for stage in stages]  # type: ignore[union-attr]
    assert keys[0] | keys[1] == set(built.state_dict())
    buffers = {name for name, _ in built.named_buffers()}
    shared = {name for group in example(name).ties for name in group}
    assert (keys[0] & keys[1]) <= buffers | shared
    for stage in stages:
        for key, value in stage.state_dict().items():  # type: ignore[union-attr]
            assert value.shape == built.state_dict()[key].shape


@pytest.mark.costly
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.sampled(1 / 3)
def test_no_baked_batch_size_and_no_numeric_ids(name: str) -> None:
    """A program with another batch size prints the same modules; names carry no counters from the trace."""
    program = example(name)
    sources = _sources(
        gp.partition(
            program, gp.plan(program, mesh={"pp": 2}, global_batch=8, allow_batch_coupling=True, schedule="GPipe")
        )
    )
    wider = _sources(
        gp.partition(
            program, gp.plan(program, mesh={"pp": 2}, global_batch=24, allow_batch_coupling=True, schedule="GPipe")
        )
    )

    for file in sources:
        if file != "train.py":
            assert sources[file] == wider[file]
    names = set(
        re.findall(
            r"\b[a-z_]+_(\d{2,})\b", "\n".join(t for f, t in sources.items() if f.startswith(("blocks", "stage")))
        )
    )
    assert not names


@pytest.mark.slow
def test_as_many_lines_for_48_layers_as_for_12() -> None:
    def lines(layers: int) -> int:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            n_layer=layers, n_embd=32, n_head=2, vocab_size=50, n_positions=8, use_cache=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        ids = torch.zeros(4, 8, dtype=torch.int64)
        program = gp.export(lambda: GPT2LMHeadModel(config), kwargs={"input_ids": ids, "labels": ids.clone()})
        parts = gp.partition(program, gp.plan(program, mesh={"pp": 2}))
        return sum(len(text.splitlines()) for text in _sources(parts).values())

    assert abs(lines(48) - lines(12)) <= 4


@pytest.mark.costly
@pytest.mark.parametrize("name", ["gpt2_tiny", "llama", "gpt_dropout"])
@pytest.mark.sampled(1 / 2)
def test_torch_compile_takes_each_block_whole_and_once(name: str, package) -> None:  # type: ignore[no-untyped-def]
    parts = _parts(name, 1)
    module = package(parts)
    program = parts.program
    blocks = importlib.import_module(f"{module.__name__}.blocks")
    for block_name, block in program.blocks.items():
        torch._dynamo.reset()
        torch.manual_seed(0)
        instances = [_filled(getattr(blocks, block_name)()) for _ in range(2)]
        inputs = [_like(node.meta["val"], 2) for node in block.graph.nodes if node.op == "placeholder"]
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        for instance in instances:
            compiled = torch.compile(instance.forward, fullgraph=True, backend=counter)
            torch.testing.assert_close(compiled(*inputs), instance(*inputs))
        assert counter.frame_count <= 2


@pytest.mark.costly
@pytest.mark.parametrize("name", ["gpt2_tiny", "llama"])
@pytest.mark.sampled(1 / 2)
def test_compiled_blocks_take_any_number_of_examples(name: str, package) -> None:  # type: ignore[no-untyped-def]
    parts = _parts(name, 1)
    blocks = importlib.import_module(f"{package(parts).__name__}.blocks")
    for block_name, block in parts.program.blocks.items():
        torch._dynamo.reset()
        module = _filled(getattr(blocks, block_name)())
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(module.forward, fullgraph=True, backend=counter)
        values = [node.meta["val"] for node in block.graph.nodes if node.op == "placeholder"]
        for batch in (2, 3, 5):
            inputs = [_like(value, batch) for value in values]
            for value, given in zip(values, inputs):
                for dim in (dim for dim, size in enumerate(value.shape) if not isinstance(size, int)):
                    torch._dynamo.mark_dynamic(given, dim)
            torch.testing.assert_close(compiled(*inputs), module(*inputs))
        assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2_tiny", "llama"])
@pytest.mark.sampled(1 / 2)
def test_inductor_compiles_each_block_whole(name: str, package) -> None:  # type: ignore[no-untyped-def]
    parts = _parts(name, 1)
    blocks = importlib.import_module(f"{package(parts).__name__}.blocks")
    for block_name, block in parts.program.blocks.items():
        torch._dynamo.reset()
        module = _filled(getattr(blocks, block_name)())
        inputs = [_like(node.meta["val"], 2) for node in block.graph.nodes if node.op == "placeholder"]
        compiled = torch.compile(module, fullgraph=True)
        expected = module(*inputs)
        torch.testing.assert_close(compiled(*inputs), expected, rtol=1e-4, atol=1e-5)
        compiled(*inputs).sum().backward()
        gradients = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
        module.zero_grad()
        module(*inputs).sum().backward()
        for found, parameter in zip(gradients, module.parameters()):
            torch.testing.assert_close(found, parameter.grad, rtol=1e-3, atol=1e-4)


def _filled(module: nn.Module) -> nn.Module:
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.is_floating_point():
            nn.init.normal_(tensor, std=0.1)
    return module


def _like(value: Tensor, batch: int) -> Tensor:
    shape = [int(size) if isinstance(size, int) else batch for size in value.shape]
    if value.dtype is torch.bool:
        return torch.ones(shape, dtype=torch.bool)
    if value.is_floating_point():
        return torch.randn(shape, dtype=value.dtype)
    return (
        torch.arange(batch, dtype=value.dtype).reshape(shape)
        if shape == [batch]
        else torch.zeros(shape, dtype=value.dtype)
    )


def test_nothing_is_left_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = _parts("head_first")
    parts.save(tmp_path / "out")
    before = {path.name: path.read_text() for path in (tmp_path / "out").glob("*.py")}

    parts.files["train.py"] = None  # type: ignore[assignment]  # writing it fails
    with pytest.raises(TypeError):
        parts.save(tmp_path / "out")

    assert {path.name: path.read_text() for path in (tmp_path / "out").glob("*.py")} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_with_other_things_in_it_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")

    with pytest.raises(gp.GraphparError, match="holds something other"):
        _parts("head_first").save(tmp_path)


def _sequential(width: int = 8) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(6)), nn.Linear(width, 3))


@pytest.mark.costly
def test_a_model_whose_own_children_are_numbered() -> None:
    """The root is no ModuleDict; and its argument keeps its name ``input``, though that hides a builtin."""
    program = gp.export(
        _sequential(), (torch.randn(4, 8),), loss_fn=nn.functional.cross_entropy, targets=(torch.arange(4) % 3,)
    )
    parts = gp.partition(program, gp.plan(program, mesh={"pp": 2}, microbatch_size=1))
    assert "def forward(self, *, input: Tensor)" in parts.files["stage_0.py"]
    assert {name.partition(".")[0] for name in parts.stage(1).state_dict()} < {"0", "1", "2", "3", "4", "5", "6"}
    assert gp.verify(parts, steps=2).ok


def test_an_input_whose_name_the_emitted_code_needs_is_refused() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, torch: Tensor) -> Tensor:
            return self.linear(torch)

    program = gp.export(Named(), (torch.randn(4, 4),))
    with pytest.raises(gp.GraphparError, match="input is named 'torch'"):
        gp.partition(program, gp.plan(program, 1))


# ---- what the text says of a program that is cut ---------------------------------------------------------------


@functools.cache
def _sharding(name: str, **degrees: int) -> gp.Parts:
    program = example(name)
    return gp.partition(program, gp.plan(program, mesh=degrees))


_CALL = re.compile(rf"(?<![\w.])({'|'.join(row.function for row in TABLE if row.function)})\(")


@pytest.mark.costly
@pytest.mark.parametrize("name", ["llama", "gpt_dropout"])
def test_every_transition_with_room_says_what_it_does(name: str) -> None:
    """A comment behind a call of a collective names the types that the function turns into each other."""
    kinds = {row.function: (row.source, row.target) for row in TABLE}
    noted = missed = 0
    for file, text in _sources(_sharding(name, tp=2)).items():
        if not file.startswith(("blocks", "stage")):
            continue
        assert max(map(len, text.splitlines())) <= 120
        for line in text.splitlines():
            code, _, comment = line.partition("  # ")
            called = _CALL.findall(code)
            found = re.findall(r"(\w)\S* -> (\w)", comment) if called else []
            assert not called or not comment or found == [kinds[function] for function in called], line
            noted, missed = noted + bool(found), missed + (bool(called) and not comment and len(line) < 100)
    assert noted > 2 and not missed


@pytest.mark.costly
@pytest.mark.parametrize(("mesh", "variable"), [({"ep": 2}, "ends"), ({"dp_expert": 2}, "exchange")])
def test_experts_have_names_that_a_reader_knows(mesh: dict[str, int], variable: str) -> None:
    """Parts of a gate are called as the gate calls them, and a comment on expert rows names a variable of the code."""
    program = example("mixtral")
    text = gp.partition(program, gp.plan(program, mesh=mesh)).files["blocks.py"]
    assert re.search(r"^ +gate, up = \w+\.chunk\(2, -1\)$", text, re.MULTILINE) and "swiglu(gate, up)" in text
    assert "getitem" not in text
    assert set(re.findall(r"\bE\((\w+)\)", text)) == {variable}
    assert re.search(rf"^ +{variable} = ", text, re.MULTILINE)


@pytest.mark.parametrize("name", ["llama", "gpt_dropout"])
def test_init_says_how_parameters_lie(name: str) -> None:
    """Each parameter's comment says what the plan does."""
    parts = _sharding(name, tp=2)
    comments = {}
    for line in "\n".join(_sources(parts).values()).splitlines():
        match = re.match(r" +self\.(\S+) = .*?  # (.*\b[RS]\b.*@tp.*)", line)
        if match:
            comments[re.sub(r"\W+", ".", match[1]).strip(".")] = match[2]
    block = next(iter(parts.program.blocks.values()))
    prefix = f"{block.instances[0]}."
    seen = 0
    for fqn, spec in parts.plan.parameters().items():
        owner, _, leaf = fqn.removeprefix(prefix).rpartition(".")
        if not fqn.startswith(prefix) or owner not in comments:
            assert not fqn.startswith(prefix) or spec["tp"] == "I"
            continue
        own = [part for part in comments[owner].split("; ") if re.match(rf"[\w, ]*\b{leaf}\b", part)]
        assert len(own) == (spec["tp"] != "I") and all(f" {spec['tp']}@tp" in part for part in own), (fqn, own)
        whole = list(example(name).parameters[fqn].shape)
        assert all(part.endswith(f"of {whole}") == (spec["tp"][0] == "S") for part in own)
        assert all(part.endswith("summed once a step") == (spec["tp"] == "R") for part in own)
        seen += 1
    assert seen > 4


def test_docstrings_say_how_values_and_weights_lie() -> None:
    parts = _sharding("llama", tp=2, pp=2)
    documented = {
        node.name: " ".join((ast.get_docstring(node) or "").split())
        for text in _sources(parts).values()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
    }
    (sent,) = parts.stages[0].sends[:1]
    lying = describe_types(sent.node)
    assert "@tp" in lying
    assert f"{describe_shape(sent.node)} {lying}" in documented["Stage0"].partition("->")[2]
    assert f"hidden_states {describe_shape(sent.node)} {lying}" in documented["Stage1"]
    cut = documented["LlamaDecoderLayer"].partition("Sharded: ")[2].split("; ")
    spec = parts.plan.parameters()["model.layers.0.self_attn.q_proj.weight"]["tp"]
    assert any("q" in re.split(r",? ", group) and group.endswith(f"{spec}@tp") for group in cut)


def test_a_comment_without_room_stands_above() -> None:
    long = f"self.x = nn.Linear({'1' * 90}, 1)"
    assert commented("self.x = 1", "    ", "short", 20) == ["    self.x = 1        # short"]
    assert commented(long, "    ", "weight S(0)@tp") == ["    # weight S(0)@tp", f"    {long}"]
    assert len(commented(f"f({', '.join(['argument'] * 20)})", "    ", "why")) > 2


def test_a_definition_of_its_own_names_its_own_modules() -> None:
    """Comments of a variant, whose graph was made of another instance, name modules as the block's do."""
    program = example("head_first")
    pins = {"body.3.up.weight": "S(1)@tp", "body.3.down": "replicate"}
    parts = gp.partition(program, gp.plan(program, mesh={"tp": 2}, shard_plan=pins))
    first, _, second = parts.files["blocks.py"].partition("class Block_2(")
    shown = [set(re.findall(r"^ +# ([\w.]+)", text, re.MULTILINE)) for text in (first, second)]
    assert shown[0] <= {"up", "down"} and shown[1] <= {"up", "down"} and shown[1]
    rows = report_data(parts.compilation)["sharding"]["scopes"]
    assert {row["label"] for row in rows[0]["rows"] + rows[1]["rows"]} <= {"up", "down", "up, down", "the block itself"}


@pytest.mark.costly
def test_loops_over_units_hide_no_name_of_their_function() -> None:
    """The blocks of the resnet are in lists named ``stages``."""
    program = example("resnet")
    text = gp.partition(program, gp.plan(program, mesh={"dp_shard": 2}, zero=3)).files["stage_0.py"]
    assert "in stage.stages" in text and "for stage in stage." not in text


def test_a_block_with_two_results_ends_no_loop() -> None:
    """The second block computes something for the third, too, which has one more argument than the others."""

    class Block(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.norm, self.linear, self.number = nn.LayerNorm(8), nn.Linear(8, 8), number

        def forward(self, x: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor | None]:
            scale = self.linear(self.norm(x)).sigmoid()
            return x + scale * (scale if given is None else given), scale if self.number == 1 else given

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(number) for number in range(4))

        def forward(self, x: Tensor) -> Tensor:
            given = None
            for block in self.blocks:
                x, given = block(x, given)
            return x

    model, x = Model(), torch.randn(4, 8)
    program = gp.export(model, (x,), mode="infer")
    stage = gp.partition(program, gp.plan(program, 1)).stage(rank=0)
    stage.load_state_dict(model.state_dict(), assign=True)
    torch.testing.assert_close(stage(x=x), model(x))


def test_each_parameter_needs_a_gradient_as_in_the_model() -> None:
    """A module with one frozen and one trained parameter, in a block and alone; and one beside its submodules."""

    class Scaled(nn.Sequential):
        def __init__(self, *layers: nn.Module) -> None:
            super().__init__(*layers)
            self.shift, self.scale = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.scale + self.shift)

    model = Scaled(*(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(3)), nn.Linear(4, 2))
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.bias.requires_grad_(isinstance(module, nn.Linear))
            module.weight.requires_grad_(not module.bias.requires_grad)
    program = gp.export(model, (torch.randn(4, 4),), loss_fn=lambda output: output.square().mean())
    stage = gp.partition(program, gp.plan(program, 1)).stage(rank=0)

    expected = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert {name: parameter.requires_grad for name, parameter in stage.named_parameters()} == expected
