"""Names of equal layers stand once in plan.json, and are what they were when it is read."""

from __future__ import annotations

import json

from hypothesis import example, given
from hypothesis import strategies as st

from graphpar.runtime.name_runs import packed, packed_names, unpacked, unpacked_names
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
