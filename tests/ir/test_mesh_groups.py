"""The groups of a mesh: of its axes, and of the names that other libraries have for several of them."""

from __future__ import annotations

import itertools

import pytest

from graphpar.errors import GraphparError
from graphpar.ir.mesh import Mesh
from graphpar.runtime.axes import AXES, GROUPS

MESH = Mesh(dp_replicate=2, dp_shard=2, cp=2)


def test_named_groups_have_the_ranks_of_their_axes() -> None:
    assert [len(MESH.groups(name)[0]) for name in ("batch", "loss", "fsdp", "expert")] == [4, 8, 4, 1]
    assert MESH.groups("fsdp") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert Mesh(pp=2, ep=2, dp_shard=2).groups("expert") == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_every_rank_is_in_one_group_of_each_name() -> None:
    for name in (*AXES, *GROUPS):
        assert sorted(itertools.chain.from_iterable(MESH.groups(name))) == list(range(8))


def test_an_unknown_name_is_an_error_that_lists_those_that_there_are() -> None:
    with pytest.raises(GraphparError, match=r"There is no group 'fsd'; there are pp, .*expert\. Did you mean 'fsdp'"):
        MESH.groups("fsd")
