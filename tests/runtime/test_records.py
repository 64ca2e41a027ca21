"""What is written in plan.json is read as it was: records by the types of their fields, and names of equal layers, which stand once."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.layout import R, Shard
from graphpar.runtime.manifest import (
    Counts,
    InputInterface,
    Interface,
    OutputInterface,
    StageInterface,
    TensorInterface,
    packed_record,
)
from graphpar.runtime.plan_record import Adapter
from graphpar.runtime.records import Record, packed, packed_names, read, unpacked, unpacked_names, written
from graphpar.text import json_text

_PARTS = st.sampled_from(["layers", "0", "1", "2", "3", "10", "01", "q", "{0-2}", "a{b}", "}"])
NAMES = st.lists(_PARTS, min_size=1, max_size=4).map(".".join)


@given(st.dictionaries(NAMES, st.sampled_from([{"tp": "R"}, {"tp": "S(0)"}]), max_size=12))
@example({"layers.{0-2}.q": {}, "layers.0.q": {}, "layers.1.q": {}})
def test_values_are_what_they_were(values: dict[str, dict[str, str]]) -> None:
    assert unpacked(json.loads(json.dumps(packed(values)))) == values


@given(st.lists(NAMES, max_size=16))
@example(["a.0.q", "a.0.k", "a.1.q", "a.1.k", "a.2.q"])
def test_names_are_what_they_were_in_their_order(names: list[str]) -> None:
    assert unpacked_names(json.loads(json.dumps(packed_names(names)))) == tuple(names)


def test_equal_layers_stand_once() -> None:
    values = {f"layers.{layer}.{name}": kind for layer in range(12) for name, kind in (("q", 1), ("k", 2))}
    assert packed(values | {"layers.4.q": 3, "norm": 4}) == {
        "layers.{0-3}.q": 1, "layers.4.q": 3, "layers.{5-11}.q": 1, "layers.{0-11}.k": 2, "norm": 4,
    }  # fmt: skip
    assert packed_names(["table", *values, "norm"]) == ["table", {"layers.{0-11}": [".q", ".k"]}, "norm"]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda each: st.lists(each) | st.dictionaries(st.text(), each),
        max_leaves=60,
    )
)
def test_text_of_json_is_read_as_it_was(value: object) -> None:
    text = json_text(value, width=30)
    assert json.loads(text) == value


SENT = TensorInterface("hidden", (2, 8), torch.bfloat16, True, {"tp": Shard(1), "dp_shard": R}, (0, 1))
INTERFACE = Interface(
    inputs=(InputInterface(name="ids", shape=(4, 8), dtype=torch.int64, batch_dim=0, role="input", below=99),),
    counts=Counts(("rows_2",), ("ids",)),
    stages=(StageInterface(class_name="Stage0", file="stage_0.py", receives=(), sends=(SENT,), recomputes=True),),
    outputs=(OutputInterface(name="loss", shape=(), dtype=torch.float32),),
    steady=("mean",),
    shapes={f"layers.{layer}.q.{{k}}": (8, 8) for layer in range(12)},
    gather_dtype=torch.bfloat16,
    casts={"layers.0.q": torch.float16},
    owners={"layers.0.q": 1, "layers.1.q": 1},
    ties=(("a", "b"),),
    streams=((0, 1, 1),),
    plain={"scale": 0.5, "names": ["x"], "nothing": None},
    adapters=(Adapter("q", "q.weight", "q.a", "q.b", 4, 8.0, 2.0, stacked=True),),
    coupled="a norm",
    parameters=tuple(f"layers.{layer}.{name}" for layer in range(12) for name in "qk"),
)


def _in_file(interface: Interface) -> dict[str, Any]:
    record = packed_record({"parameters": {}, "interface": written(interface)})
    found: dict[str, Any] = json.loads(json.dumps(record))["interface"]
    return found


def test_a_record_is_read_as_it_was_written() -> None:
    values = _in_file(INTERFACE)
    assert read(Interface, Record(values, "plan.json")) == INTERFACE
    assert values["gather_dtype"] == "bf16" and values["inputs"][0]["dtype"] == "int64"
    assert len(values["shapes"]) == 1 and len(values["parameters"]) == 1
    assert "no_eval" not in values and values["stages"][0]["class"] == "Stage0" and "index" not in values["stages"][0]
    assert read(Interface, Record({**values, "steady": None, "casts": None}, "")).casts == {}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("ties",), "a", "plan.json: the field 'ties' is \"a\"; it must be a list"),
        (("ties", 0, 1), 3, r"the field 'ties\[0\]\[1\]' is 3; it must be a text"),
        (
            ("inputs", 0, "shape", 0),
            True,
            r"plan.json, inputs\[0\]: the field 'shape\[0\]' is true; it must be a whole number",
        ),
        (("inputs", 0, "dtype"), "int65", r"inputs\[0\]: dtype is 'int65', not a torch dtype"),
        (("gather_dtype",), "int8", "gather_dtype is 'int8', not one of fp32, bf16, fp16"),
        (("stages", 0, "sends", 0, "types", "tp"), "Q", "types of types"),
        (("stages", 0, "sends", 0, "types", "pt"), "R", "no mesh axis 'pt'"),
        (("owners", "layers.{0-1}.q"), 1.5, r"the field 'owners.layers.0.q' is 1.5; it must be a whole number"),
        (("stages", 0, "class"), None, "the field 'class' is null; it must be a text"),
    ],
)
def test_a_wrong_value_is_named(path: tuple[Any, ...], value: Any, message: str) -> None:
    values = _in_file(INTERFACE)
    inner: Any = values
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(RuntimeProgramError, match=message):
        read(Interface, Record(values, "plan.json"))
