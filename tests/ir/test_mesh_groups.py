"""The groups of a mesh: of its axes, and of the names that other libraries have for several of them."""

from __future__ import annotations

import itertools

import pytest

from graphpar.errors import GraphparError
from graphpar.runtime.axes import AXES, GROUPS
from graphpar.runtime.mesh import Mesh

MESH = Mesh(dp_replicate=2, dp_shard=2, cp=2)


def test_named_groups_have_the_ranks_of_their_axes() -> None:
    assert [len(MESH.groups(name)[0]) for name in ("batch", "loss", "fsdp", "efsdp", "expert")] == [4, 8, 4, 4, 1]
    assert MESH.groups("fsdp") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert Mesh(pp=2, ep=2, dp_shard=2).groups("expert") == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    "mesh",
    [MESH, Mesh(dp_replicate=2, ep=2, tp=2), Mesh(dp_shard=2, dp_expert=2, tp=2), Mesh(pp=2, cp=2, ep=2)],
    ids=str,
)
def test_every_rank_is_in_one_group_of_each_name(mesh: Mesh) -> None:
    for name in (*AXES, *GROUPS):
        assert sorted(itertools.chain.from_iterable(mesh.groups(name))) == list(range(8))


def test_ranks_with_the_same_experts_are_those_of_the_other_axes() -> None:
    """Experts over ep=2 beside replicas and stages, of 8 ranks."""
    mesh = Mesh(pp=2, dp_replicate=2, ep=2)

    assert mesh.groups("ep") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert mesh.groups("dp_replicate") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert mesh.groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert mesh.groups("expert") == mesh.groups("ep")
    assert mesh.groups("expert_data") == mesh.groups("dp_replicate")


def test_a_degree_of_experts_that_does_not_divide_the_devices_is_told_with_both_numbers() -> None:
    with pytest.raises(GraphparError, match=r"8 devices don't divide by the mesh's ep=3; take a multiple of 3 devices"):
        Mesh.resolve({"ep": 3}, 8)


def test_an_unknown_name_is_an_error_that_lists_those_that_there_are() -> None:
    with pytest.raises(
        GraphparError, match=r"There is no group 'fsd'; there are pp, .*expert_data\. Did you mean 'fsdp'"
    ):
        MESH.groups("fsd")
