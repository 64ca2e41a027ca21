"""Seconds of collectives: what was measured, laws that every price keeps, and where the groups of a mesh lie."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

import graphpar as gp
from graphpar.cost_models import collectives
from graphpar.cost_models.collectives import KINDS, Group, Network
from graphpar.hardware.cluster import Cluster, Pod
from graphpar.hardware.devices import DEVICES, Link
from graphpar.operators.transitions import collective_cost
from graphpar.runtime.axes import AXES
from graphpar.runtime.layout import coordinates
from graphpar.runtime.mesh import Mesh

FAST, SLOW = Link(1e-6, 100e9), Link(5e-6, 10e9)
SPINE = Link(9e-6, 2.5e9)
ONE = Group(1, 1, 1)


def cluster(nodes: int, devices_per_node: int, intra: Link = FAST, inter: Link = SLOW) -> Cluster:
    return Cluster(nodes, devices_per_node, DEVICES["H100-SXM-80GB"], intra, inter)


@st.composite
def pods(draw: st.DrawFn, link: Callable[[st.DrawFn], Link] = lambda _: SPINE) -> tuple[Pod, ...]:
    """None, pods, or pods in pods of several of them."""
    nodes = itertools.accumulate(draw(st.lists(st.integers(2, 3), max_size=2)), lambda one, two: one * two)
    return tuple(Pod(count, link(draw), draw(st.booleans()) and not place) for place, count in enumerate(nodes))


def network(text: str, between_s: float | None = None) -> Network:
    made = Cluster.parse(text)
    return Network(
        made if between_s is None else replace(made, inter_node=replace(made.inter_node, latency_s=between_s))
    )


# ---- measured --------------------------------------------------------------------------------------------------

MIB, GIB = 2**20, 2**30
CURVES = {
    "8 H200": ("8xH200", None, "all-reduce", {
        1: 39.93, 2: 64.53, 4: 107.16, 8: 155.53, 16: 219.89, 32: 275.84, 64: 346.51, 128: 401.93, 256: 436.15, 512: 450.29,
        1024: 463.58, 2048: 469.17, 4096: 473.1, 8192: 477.45, 16384: 482.26,
    }),
    "8 B200": ("8xB200", None, "all-reduce", {
        1: 36.06, 4: 76.48, 16: 254.96, 64: 400.6, 256: 646.11, 1024: 723.34, 4096: 740.64, 16384: 845.67,
    }),
    "32 B200, EFA": ("4x8xB200", 85e-6, "all-reduce", {
        1: 5.37, 4: 18.9, 16: 64.43, 64: 156.74, 256: 229.09, 1024: 361.99, 4096: 377.34, 16384: 381.8,
    }),
    "16 H100, InfiniBand": ("2x8xH100", None, "all-reduce", {1: 22.3, 10: 124.92, 100: 304.03, 1000: 434.99}),
    "16 A100, RoCE": ("2x8xA100-40GB", None, "all-reduce", {
        1: 22.97, 2: 39.64, 4: 61.93, 8: 90.25, 16: 111.29, 32: 139.08, 64: 153.13, 128: 163.2, 256: 165.42, 512: 156.41,
        1024: 219.12, 2048: 220.16, 4096: 235.63, 8192: 237.94,
    }),
    "16 B200, RoCE": ("2x8xB200", None, "all-gather", {
        1: 15.41, 2: 23.28, 4: 41.77, 8: 72.9, 16: 111.99, 32: 206.09, 64: 266.37, 128: 302.72, 256: 338.77, 512: 356.34,
        1024: 363.8, 2048: 370.8, 4096: 374.33, 8192: 376.4,
    }),
    "16 H200, RoCE": ("2x8xH200", None, "all-gather", {
        1: 18.98, 2: 28.77, 4: 54.8, 8: 90.8, 16: 135.5, 32: 175.6, 64: 230.87, 128: 256.74, 256: 288.14, 512: 319.41,
        1024: 320.98, 2048: 322.98,
    }),
}  # fmt: skip
"""Cluster, latency between nodes where it is not the usual one, collective; MiB of the tensor and GB/s of bus bandwidth, which is what a
ring's device would send a second. 8 H200, 8 B200 and 32 B200: stas00/ml-engineering, network/README.md and network/benchmarks/README.md;
16 H100: drmysore/nebius-h100-16gpu-benchmark; 16 A100: oracle-quickstart/oci-hpc-oke; 16 B200: esaaren/torch-distributed-training-gke;
16 H200: maci0/gke-inference-from-scratch. EFA has a latency of its own, which 16 H100 with EFA confirm."""
WORST = {
    "8 H200": 0.1, "8 B200": 0.42, "32 B200, EFA": 0.17, "16 H100, InfiniBand": 0.2, "16 A100, RoCE": 0.21, "16 B200, RoCE": 0.19,
    "16 H200, RoCE": 0.46,
}  # fmt: skip


def ring_share(kind: str, count: int) -> float:
    """Of the bytes of a tensor, what a ring's device sends."""
    return {"all-reduce": 2 * (count - 1) / count, "send": 1.0}.get(kind, (count - 1) / count)


def errors(name: str) -> list[float]:
    text, between_s, kind, curve = CURVES[name]
    prices = network(text, between_s)
    size = prices.cluster.size
    group = prices.group(range(size))
    taken = {mib: ring_share(kind, size) * mib * MIB / (rate * 1e9) for mib, rate in curve.items()}
    return [prices.seconds(kind, mib * MIB, group) / seconds - 1 for mib, seconds in taken.items()]


@pytest.mark.parametrize("name", CURVES)
def test_collectives_take_what_was_measured(name: str) -> None:
    found = [abs(error) for error in errors(name)]
    assert median(found) < 0.19 and max(found) < WORST[name], found


def test_the_docstring_says_how_well() -> None:
    found = [abs(error) for name in CURVES for error in errors(name)]
    said = re.search(
        r"Against (\d+) .*?(\d+) % in the median,\s(\d+) % at the 90th percentile\sand (\d+) % at worst",
        collectives.__doc__,
        re.S,
    )
    assert said is not None
    ninth = sorted(found)[round(0.9 * len(found)) - 1]
    assert [int(number) for number in said.groups()] == [
        len(found),
        *(round(100 * e) for e in (median(found), ninth, max(found))),
    ]


@pytest.mark.parametrize(
    ("text", "count", "kind", "nbytes", "rate"),
    [
        ("8xA100", 8, "all-reduce", 16 * GIB, 234.89),
        ("8xH200", 8, "all-gather", 16 * GIB, 361.4),
        ("8xH200", 8, "reduce-scatter", 16 * GIB, 362.9),
        ("8xH200", 2, "send", 16 * GIB, 396.4),
        ("2x8xH100", 16, "all-reduce", 2 * GIB, 444.25),  # an issue of NVIDIA/nccl, NVLSTree
        ("2x8xH100", 16, "all-reduce", 8 * GIB, 467.28),  # SkyPilot's example for Nebius
        ("4xGB300", 4, "all-reduce", 16 * GIB, 685.19),  # and the next three: Oracle's GPU quick starts
        ("8xGB300", 8, "all-reduce", 16 * GIB, 841.63),
        ("64xGB300", 64, "all-reduce", 16 * GIB, 930.48),
        ("64xGB300", 64, "all-to-all", 64 * 16 * GIB, 64 * 666.92),
        ("72xGB200", 72, "all-reduce", 8 * GIB, 834.57),  # coreweave/nccl-tests, pull request 43
        ("8xMI300X", 8, "all-reduce", 4 * GIB, 312.9),
        ("8xMI300X", 2, "all-reduce", 4 * GIB, 47.7),
        *(
            ("8xH200", n, "all-reduce", 8 * GIB, rate)
            for n, rate in zip(range(4, 9), (363.3, 414.2, 435.6, 460.0, 473.1))
        ),
        *(
            ("8xB200", n, "all-reduce", 8 * GIB, rate)
            for n, rate in zip(range(4, 9), (673.2, 677.8, 778.2, 811.2, 838.0))
        ),
    ],
)
def test_large_messages_take_what_was_measured(text: str, count: int, kind: str, nbytes: int, rate: float) -> None:
    prices = network(text)
    seconds = prices.seconds(kind, nbytes, prices.group(range(count)))
    assert seconds == pytest.approx(ring_share(kind, count) * nbytes / (rate * 1e9), rel=0.12)


def test_rings_over_many_nodes_lose_what_was_measured() -> None:
    """Reduce-scatters of H100 nodes, NVIDIA/nccl, issue 1229; the size is not given there, 8 GiB is what its neighbour 1211 asks of."""
    prices = network("128x8xH100")
    for nodes, rate in zip((4, 8, 16, 32, 64, 128), (360, 345, 320, 300, 280, 260)):
        seconds = prices.seconds("reduce-scatter", 8 * GIB, prices.group(range(8 * nodes)))
        assert seconds == pytest.approx(ring_share("reduce-scatter", 8 * nodes) * 8 * GIB / (rate * 1e9), rel=0.1)


# ---- laws ------------------------------------------------------------------------------------------------------

SHARES = st.floats(0.3, 1.0)


@st.composite
def links(draw: st.DrawFn) -> Link:
    rate = draw(st.floats(1e8, 1e12))
    pair = draw(st.none() | st.floats(rate / 8, rate))
    efficiency = draw(SHARES)
    in_switch = None if pair else draw(st.none() | st.floats(0.2, efficiency))
    return Link(draw(st.floats(0, 1e-3)), rate, pair, efficiency, in_switch)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    made = cluster(draw(st.integers(1, 6)), draw(st.integers(1, 9)), draw(links()), draw(links()))
    return replace(made, pods=draw(pods(lambda draw: draw(links()))))


@st.composite
def settings_of(draw: st.DrawFn) -> tuple[Cluster, list[int]]:
    made = draw(clusters())
    return made, draw(st.lists(st.integers(0, made.size - 1), min_size=1, unique=True))


BYTES = st.floats(0, 1e11)
KIND = st.sampled_from(KINDS)


def seconds(made: Cluster, ranks: list[int], kind: str, nbytes: float) -> float:
    prices = Network(made)
    return prices.seconds(kind, nbytes, prices.group(ranks))


@given(settings_of(), KIND, BYTES, st.floats(1, 100), st.sampled_from(["intra_node", "inter_node", "pods"]))
def test_a_better_link_never_costs(
    setting: tuple[Cluster, list[int]], kind: str, nbytes: float, times: float, name: str
) -> None:
    made, ranks = setting
    before = seconds(made, ranks, kind, nbytes)
    for better in (lambda link: link.times(times), lambda link: replace(link, latency_s=link.latency_s / times)):
        value = getattr(made, name)
        found = tuple(replace(pod, link=better(pod.link)) for pod in value) if name == "pods" else better(value)
        assert seconds(replace(made, **{name: found}), ranks, kind, nbytes) <= before * (1 + 1e-9)


@given(settings_of(), KIND, BYTES, BYTES)
def test_more_bytes_are_never_cheaper(setting: tuple[Cluster, list[int]], kind: str, one: float, other: float) -> None:
    less, more = (seconds(*setting, kind, nbytes) for nbytes in sorted((one, other)))
    assert less <= more
    instant = 0.0 in (setting[0].intra_node.latency_s, *(level.link.latency_s for level in setting[0].levels))
    assert less > 0 or len(setting[1]) == 1 or instant


@given(clusters(), KIND, BYTES)
def test_one_rank_sends_nothing(made: Cluster, kind: str, nbytes: float) -> None:
    assert (
        Network(made).seconds(kind, nbytes, Network(made).group([made.size - 1]))
        == 0
        == Network(made).seconds(kind, nbytes, ONE)
    )


@pytest.mark.costly
@given(settings_of(), BYTES)
def test_an_all_reduce_is_no_dearer_than_its_halves(setting: tuple[Cluster, list[int]], nbytes: float) -> None:
    whole, scattered, gathered = (
        seconds(*setting, kind, nbytes) for kind in ("all-reduce", "reduce-scatter", "all-gather")
    )
    assert whole <= (scattered + gathered) * (1 + 1e-9)


@given(settings_of(), BYTES)
def test_an_all_reduce_is_dearer_than_half_of_it(setting: tuple[Cluster, list[int]], nbytes: float) -> None:
    """Over nodes where latency does not count: an all-reduce has trees, and a reduce-scatter has none, as in NCCL."""
    made, ranks = setting
    if made.nodes > 1:
        made = replace(
            made,
            intra_node=replace(made.intra_node, latency_s=0),
            inter_node=replace(made.inter_node, latency_s=0),
            pods=tuple(replace(pod, link=replace(pod.link, latency_s=0)) for pod in made.pods),
        )
    assert seconds(made, ranks, "all-reduce", nbytes) >= seconds(made, ranks, "reduce-scatter", nbytes) * (1 - 1e-9)


@given(clusters(), BYTES)
def test_no_price_is_below_what_the_wires_carry(made: Cluster, nbytes: float) -> None:
    """All ranks: a node and a pod send and get the rest of the tensor with all their links out, and a device does with its link."""
    size = made.size
    assert seconds(made, list(range(size)), "all-gather", nbytes) >= nbytes * (
        size - 1
    ) / size / made.intra_node.bytes_per_s * (made.devices_per_node > 1) * (1 - 1e-9)
    for level in made.levels:
        leaving = nbytes * (size - level.devices) / size
        for kind in ("all-reduce", "all-gather", "reduce-scatter"):
            times = 2 if kind == "all-reduce" else 1
            least = times * leaving / (level.devices * level.link.bytes_per_s)
            assert seconds(made, list(range(size)), kind, nbytes) >= least * (1 - 1e-9)


def test_a_ring_sends_what_the_transitions_say() -> None:
    """A ring with a message that is large for its latency, and no switch that adds: the bytes of ``collective_cost`` over the link."""
    made = cluster(1, 8, Link(0.0, 100e9, efficiency=1.0))
    for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all"):
        for count in (2, 5, 8):
            assert seconds(made, list(range(count)), kind, 1e9) == pytest.approx(
                collective_cost(kind, 1e9, count).bytes_sent / 100e9
            )


# ---- over nodes ------------------------------------------------------------------------------------------------


def test_a_group_has_the_adapters_of_its_members() -> None:
    prices = network("4x8xA100")
    narrow = prices.seconds("all-gather", 8 * GIB, prices.group(range(0, 32, 8)))
    wide = prices.seconds("all-gather", 8 * GIB, prices.group(range(32)))
    a100 = DEVICES["A100-SXM-80GB"]
    rate = a100.inter_node.bytes_per_s * a100.inter_node.efficiency
    assert narrow == pytest.approx(8 * GIB * 3 / 4 / rate, rel=0.01)
    assert wide == pytest.approx(8 * GIB * 31 / 32 / (8 * rate), rel=0.03)


def test_the_links_inside_bound_a_ring_that_crosses() -> None:
    pcie = Network(cluster(2, 4, Link(1e-6, 5e9, efficiency=1.0), replace(SLOW, efficiency=1.0)))
    assert pcie.ring(pcie.group([0, 4])).bytes_per_s == 10e9
    assert pcie.ring(pcie.group([0, 1, 4, 5])).bytes_per_s == 5e9
    assert pcie.ring(pcie.group([0, 1, 4])).bytes_per_s == 5e9


def test_a_node_with_few_members_slows_all() -> None:
    prices = Network(cluster(2, 8))
    assert prices.group([0, 1, 2, 8]) == Group(4, 2, 3, 1)
    assert prices.ring(prices.group([0, 1, 2, 8])).bytes_per_s == SLOW.bytes_per_s * SLOW.efficiency
    assert Group(4, 2, 2) == Group(4, 2, 2, 2)


def test_wires_between_pairs_add_up_over_a_group() -> None:
    mi300x = network("2x8xMI300X")
    share = mi300x.cluster.intra_node.efficiency
    rates = [mi300x.ring(mi300x.group(range(count))).bytes_per_s for count in (2, 4, 8)]
    assert rates == [64e9 * share, 192e9 * share, 448e9 * share]
    assert mi300x.ring(mi300x.group_of_axes(Mesh(tp=2, dp_replicate=8), ["tp"])).bytes_per_s == 64e9 * share
    assert mi300x.seconds("send", GIB, mi300x.group([0, 7])) == pytest.approx(GIB / 64e9, rel=0.4)


def test_a_tree_over_many_nodes_is_sooner_than_a_ring() -> None:
    prices = network("128x8xH100")
    group = prices.group(range(1024))
    assert prices.seconds("all-reduce", 1e6, group) < prices.seconds("all-gather", 1e6, group) / 5
    large = 2 * 1023 / 1024 * 100e9 / prices.ring(group).bytes_per_s
    assert prices.seconds("all-reduce", 100e9, group) == pytest.approx(large, rel=0.05)


# ---- over pods -------------------------------------------------------------------------------------------------


def in_pods(nodes: int, per_node: int, *around: Pod) -> Network:
    """Links that reach all of their bandwidth, from 100 GB/s in a node to 10 GB/s between nodes."""
    inside, between = (replace(link, efficiency=1.0, latency_s=0.0) for link in (FAST, SLOW))
    return Network(replace(cluster(nodes, per_node, inside, between), pods=around))


def spine(rate: float) -> Link:
    return Link(0.0, rate, efficiency=1.0)


def test_a_ring_has_what_all_its_members_may_send_out_of_a_pod() -> None:
    """Pods of 4 nodes of 2, with a quarter of the rate outside: what 8 devices have there is what 2 have between nodes."""
    prices = in_pods(8, 2, Pod(4, spine(2.5e9)))
    everyone, one_of_a_node, one_of_a_pod = (prices.group(range(0, 16, step)) for step in (1, 2, 8))
    assert [group.pods for group in (everyone, one_of_a_node, one_of_a_pod)] == [((2, 8),), ((2, 4),), ((2, 1),)]
    assert [prices.ring(group).bytes_per_s for group in (everyone, one_of_a_node, one_of_a_pod)] == [20e9, 10e9, 2.5e9]
    assert prices.seconds("all-gather", 8e9, everyone) == pytest.approx(8e9 * 15 / 16 / 20e9)
    assert prices.seconds("all-gather", 8e9, one_of_a_pod) == pytest.approx(8e9 / 2 / 2.5e9)


def test_pairs_share_what_leaves_a_pod() -> None:
    prices = in_pods(8, 2, Pod(4, spine(2.5e9)))
    inside, across = prices.group([0, 2]), prices.group([0, 8])
    assert (inside.pods, across.pods) == ((), ((2, 1),))
    assert prices.seconds("send", 1e9, inside) == pytest.approx(0.1)
    assert prices.seconds("send", 1e9, across) == pytest.approx(0.4)
    wide = in_pods(8, 2, Pod(4, spine(50e9)))  # a device's adapter is the slower then
    assert wide.seconds("send", 1e9, wide.group([0, 8])) == pytest.approx(0.1)
    # Half of what each of 16 ranks sends is for the other pod, 14 of 16 parts for other nodes.
    everyone = prices.group(range(16))
    assert prices.seconds("all-to-all", 16e9, everyone) == pytest.approx(1e9 * 8 / 16 / 2.5e9)
    flat = in_pods(8, 2)
    assert flat.seconds("all-to-all", 16e9, flat.group(range(16))) == pytest.approx(1e9 * 14 / 16 / 10e9)


def test_messages_have_the_latency_of_the_level_that_they_cross() -> None:
    near, far, farther = 5e-6, 9e-6, 2e-5
    slow = replace(cluster(8, 1), pods=(Pod(2, Link(far, 10e9)), Pod(4, Link(farther, 10e9))))
    prices = Network(slow)
    everyone = prices.group(range(8))
    assert everyone.crossed == ((8, 1), (4, 2), (2, 4))
    # Around the ring, of its 7 steps 7 leave nodes, 4 of them pods, 2 of them larger pods.
    assert prices.ring(everyone).latency_s == pytest.approx((3 * near + 2 * far + 2 * farther) / 7)
    assert prices.seconds("send", 0.0, prices.group([0, 1])) == near
    assert prices.seconds("send", 0.0, prices.group([0, 2])) == far
    assert prices.seconds("send", 0.0, prices.group([0, 4])) == farther
    # A tree of three levels, up and down, with a chain of one in each node.
    assert prices.seconds("all-reduce", 0.0, everyone) == pytest.approx(FAST.latency_s + 2 * (near + far + farther))


def test_other_places_of_a_rail_meet_outside_of_the_pod() -> None:
    rails, switched = (in_pods(4, 4, Pod(4, spine(2.5e9), rails)) for rails in (True, False))
    for same in ([0, 4, 8], range(16), [0, 1, 4, 5]):
        assert rails.group(same).pods == ()
    for other, pods_of in (([0, 5], (2, 1)), ([0, 1, 5, 6], (2, 2))):
        assert rails.group(other).pods == (pods_of,) and switched.group(other).pods == ()
        assert rails.seconds("send", 1e9, rails.group(other)) == pytest.approx(0.4)
    assert rails.boundary(Mesh(pp=4, tp=4)).pods == () and rails.boundary(Mesh(pp=8, tp=2)).pods == ((2, 1),)
    assert rails.group_of_axes(Mesh(dp_replicate=4, tp=4), ["dp_replicate"]).pods == ()
    assert rails.group_of_axes(Mesh(dp_replicate=5, tp=3), ["dp_replicate"]).pods != ()


# ---- groups of axes --------------------------------------------------------------------------------------------

MESHES = st.tuples(
    *(st.sampled_from([1, 2, 3, 4]) if axis in ("pp", "cp", "tp") else st.sampled_from([1, 2]) for axis in AXES)
)


def groups_of(mesh: Mesh, axes: tuple[str, ...]) -> list[list[int]]:
    """Groups of axes: the ranks whose other coordinates agree."""
    degrees = mesh.degrees()
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.size):
        place = coordinates(rank, degrees)
        found.setdefault(tuple(place[other] for other in AXES if other not in axes), []).append(rank)
    return list(found.values())


@given(MESHES, st.integers(1, 12), st.sets(st.sampled_from(AXES)), KIND, BYTES, pods())
def test_axes_have_the_worst_of_their_groups(
    degrees: tuple[int, ...], per_node: int, axes: set[str], kind: str, nbytes: float, around: tuple[Pod, ...]
) -> None:
    mesh = Mesh(**{**dict(zip(AXES, degrees)), "dp_shard": 1})
    prices = Network(replace(cluster(-(-mesh.size // per_node), per_node), pods=around))
    groups = [prices.group(ranks) for ranks in groups_of(mesh, tuple(axes))]
    worst = prices.group_of_axes(mesh, sorted(axes))
    assert {group.size for group in groups} == {worst.size}
    assert worst.nodes == max(group.nodes for group in groups)
    assert worst.per_node == max(group.per_node for group in groups)
    assert worst.fewest == min(group.fewest for group in groups)
    assert len(worst.pods) == max(len(group.pods) for group in groups)
    dearest = max(prices.seconds(kind, nbytes, group) for group in groups)
    assert prices.seconds(kind, nbytes, worst) >= dearest * (1 - 1e-9)
    if len(set(groups)) == 1:
        assert worst == groups[0]


@given(MESHES, st.integers(1, 12), pods())
def test_the_boundary_is_the_worst_pair_of_neighbours(
    degrees: tuple[int, ...], per_node: int, around: tuple[Pod, ...]
) -> None:
    mesh = Mesh(**{**dict(zip(AXES, degrees)), "dp_shard": 1})
    prices = Network(replace(cluster(-(-mesh.size // per_node), per_node), pods=around))
    stride = mesh.size // mesh.pp
    pairs = [prices.group([rank, rank + stride]) for rank in range(mesh.size - stride)]
    assert prices.boundary(mesh) == max(pairs, key=lambda pair: (pair.nodes, len(pair.pods)), default=ONE)


@given(MESHES, st.integers(1, 12))
def test_an_inner_axis_stays_inside_where_degrees_fill_nodes(degrees: tuple[int, ...], per_node: int) -> None:
    """With as many devices a node as the inner axes have, those stay inside, and the axes around them cross."""
    mesh = Mesh(**{**dict(zip(AXES, degrees)), "dp_shard": 1})
    sizes = list(itertools.accumulate(reversed(list(mesh.degrees().values())), lambda one, two: one * two))
    for inner, size in enumerate(sizes):
        prices = Network(cluster(mesh.size // size, size))
        for place, axis in enumerate(reversed(AXES)):
            degree = mesh.degrees()[axis]
            assert prices.group_of_axes(mesh, [axis]) == (
                Group(degree, degree, 1) if place > inner else Group(degree, 1, degree)
            )


def test_a_mesh_of_many_devices() -> None:
    prices = network("2048x8xH100")
    mesh = Mesh(pp=16, dp_replicate=128, tp=8)
    assert prices.group_of_axes(mesh, ["tp"]) == Group(8, 1, 8)
    assert prices.group_of_axes(mesh, ["dp_replicate"]) == Group(128, 128, 1)
    assert prices.group_of_axes(mesh, ["dp_replicate", "tp"]) == Group(1024, 128, 8)
    assert prices.boundary(mesh) == Group(2, 2, 1)


def test_what_is_not_there() -> None:
    prices = Network(cluster(1, 8))
    with pytest.raises(gp.GraphparError, match="Ranks 7 to 8: the cluster 8xH100-SXM-80GB has ranks 0 to 7"):
        prices.group([7, 8])
    with pytest.raises(gp.GraphparError, match="No ranks"):
        prices.group([])
    with pytest.raises(gp.GraphparError, match="The mesh has 16 devices, but the cluster 8xH100-SXM-80GB has 8"):
        prices.group_of_axes(Mesh(tp=16), ["tp"])
    with pytest.raises(gp.GraphparError, match="The mesh has 16 devices"):
        prices.boundary(Mesh(pp=16))
    with pytest.raises(gp.GraphparError, match="There is no mesh axis 'dp'"):
        prices.group_of_axes(Mesh(tp=8), ["dp"])
    with pytest.raises(gp.GraphparError, match=r"There is no collective 'all_reduce'.*Did you mean 'all-reduce'"):
        prices.seconds("all_reduce", 1.0, Group(2, 1, 2))
