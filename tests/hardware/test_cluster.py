"""Clusters and devices: what a text or a file means, which link an axis crosses, and that plans know it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import graphpar as gp
from graphpar.cost_models.flops import dominant_dtype
from graphpar.cost_models.sharding import ShardingCosts
from graphpar.hardware.cluster import HEADROOM, Cluster, Pod
from graphpar.hardware.devices import DEVICES, Device, Link, device_named, figures_of
from graphpar.passes.compilation import priced
from graphpar.report.report import report_data
from graphpar.runtime.mesh import Mesh
from tests.docs.test_docs import ALL

FAST, SLOW = Link(1e-6, 100e9), Link(5e-6, 10e9)


def cluster(nodes: int, devices_per_node: int, intra: Link = FAST, inter: Link = SLOW) -> Cluster:
    return Cluster(nodes, devices_per_node, DEVICES["H100-SXM-80GB"], intra, inter)


def written(folder: Path, text: str) -> Path:
    file = folder / "own.toml"
    file.write_text(text)
    return file


# ---- the table of devices --------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES.values(), ids=list(DEVICES))
def test_figures_of_a_device_are_plausible_and_have_sources(device: Device) -> None:
    assert {"flops", "memory", "links", "efficiency", "latency", "launch"} <= set(device.sources)
    assert device.flops["fp32"] <= device.peak("bf16") <= 40 * device.flops["fp32"]
    assert device.flops.get("fp8", device.peak("bf16")) >= device.peak("bf16")
    assert device.kind == "cpu" or 1e9 < device.inter_node.bytes_per_s < device.intra_node.bytes_per_s < 1e12
    printed = re.search(r"(\d+)GB", device.name)
    assert printed is None or 0.85 < device.memory_bytes / (int(printed[1]) * 2**30) < 0.99


@pytest.mark.parametrize(
    ("device", "said"),
    [
        (DEVICES["CPU"], "measured figures"),
        (DEVICES["A100-SXM-80GB"], "published figures; launch assumed"),
        (DEVICES["V100-SXM2-16GB"], "published figures; efficiency, launch assumed"),
        (replace(DEVICES["A100-SXM-80GB"], launch_s=1.0), "user-defined figures"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_where_figures_are_from_is_said(device: Device, said: str) -> None:
    assert figures_of(device) == said


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("H100-SXM-80GB", "H100-SXM-80GB"),
        ("h100_sxm_80gb", "H100-SXM-80GB"),
        ("H100SXM80GB", "H100-SXM-80GB"),
        ("H100", "H100-SXM-80GB"),
        ("A100", "A100-SXM-80GB"),
        ("A100-80", "A100-SXM-80GB"),
        ("A100-40GB", "A100-SXM-40GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM-40GB"),
        ("V100", "V100-SXM2-16GB"),
        ("V100-SXM-32GB", "V100-SXM2-32GB"),
        ("a800", "A800-80GB"),
        ("gb200", "GB200-NVL72"),
        ("AMD MI300X", "MI300X-192GB"),
        ("cpu", "CPU"),
    ],
)
def test_a_device_has_aliases(name: str, meant: str) -> None:
    assert device_named(name).name == meant


def test_an_unknown_device_is_told_the_likeliest_first() -> None:
    with pytest.raises(gp.GraphparError, match=r"There is no device 'H10'; known are H100-SXM-80GB, ") as caught:
        device_named("H10")
    assert all(name in str(caught.value) for name in DEVICES)


def test_clocks_go_with_the_cube_root_of_the_power() -> None:
    capped, whole = device_named("H100-96GB-HBM2e-500W"), device_named("H100-SXM-80GB")
    share = (500 / 700) ** (1 / 3)
    assert capped.matrix_efficiency == pytest.approx(share * whole.matrix_efficiency)
    assert capped.attention_efficiency == pytest.approx([share * each for each in whole.attention_efficiency])


def test_a_dtype_without_units_runs_at_the_rate_of_fp32() -> None:
    assert device_named("V100").peak("bf16") == device_named("V100").flops["fp32"] < device_named("V100").peak("fp16")
    with pytest.raises(gp.GraphparError, match="A100-SXM-80GB has no rate for fp8; it has fp32"):
        device_named("A100").peak("fp8")


# ---- clusters as text ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nodes", "per_node", "device"),
    [
        ("8xH100-SXM-80GB", 1, 8, "H100-SXM-80GB"),
        ("16x8xA100-SXM-80GB", 16, 8, "A100-SXM-80GB"),
        ("2xCPU", 1, 2, "CPU"),
        ("H100", 1, 1, "H100-SXM-80GB"),
        ("16xh100", 2, 8, "H100-SXM-80GB"),
        ("1x16xA100", 1, 16, "A100-SXM-80GB"),
        ("72xGB200", 1, 72, "GB200-NVL72"),
        ("300xCPU", 1, 300, "CPU"),
    ],
)
def test_a_cluster_is_parsed(text: str, nodes: int, per_node: int, device: str) -> None:
    parsed = Cluster.parse(text)
    assert (parsed.nodes, parsed.devices_per_node, parsed.device.name) == (nodes, per_node, device)
    assert parsed.size == nodes * per_node
    assert (parsed.intra_node, parsed.inter_node) == (parsed.device.intra_node, parsed.device.inter_node)


@given(st.integers(1, 40), st.integers(1, 20), st.sampled_from(list(DEVICES)))
def test_text_and_json_are_inverses_of_parsing(nodes: int, per_node: int, device: str) -> None:
    made = Cluster.of(DEVICES[device], nodes, per_node)
    assert Cluster.parse(str(made)) == made
    assert Cluster.from_json(json.loads(json.dumps(made.to_json()))) == made


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "write devices x kind"),
        ("8x", "write devices x kind"),
        ("-2xH100", "write devices x kind"),
        ("0xCPU", "Cluster '0xCPU': devices_per_node is 0"),
        ("0x8xH100", "nodes is 0"),
        ("12xH100", "a node has 8 of H100-SXM-80GB, so 12 fill no whole number of nodes"),
        ("8xH10", "There is no device 'H10'"),
        ("2x2x2xH100", "write devices x kind"),
        ("x" * 5000, "There is no device 'xxx"),
        ("nowhere.toml", "There is no cluster file nowhere.toml"),
    ],
)
def test_a_text_that_means_no_cluster(text: str, expected: str) -> None:
    with pytest.raises(gp.GraphparError) as caught:
        Cluster.parse(text)
    assert expected in str(caught.value)


# ---- clusters as files -----------------------------------------------------------------------------------------

NAMED = 'nodes = 2\ndevices_per_node = 4\ndevice = "A100"\n'
OWN = """
nodes = 1
devices_per_node = 2
intra_node = { latency_s = 1e-5, bytes_per_s = 25e9 }
[device]
name = "RTX"
kind = "gpu"
flops = { fp32 = 80e12, bf16 = 160e12 }
memory_bytes = 24e9
memory_bytes_per_s = 1e12
launch_s = 4e-6
matrix_efficiency = 0.7
"""


def test_a_file_with_a_known_device(tmp_path: Path) -> None:
    assert Cluster.parse(written(tmp_path, NAMED)) == Cluster.parse("2x4xA100")
    slower = Cluster.parse(str(written(tmp_path, NAMED + "[inter_node]\nbytes_per_s = 3e9\n")))
    assert slower.inter_node == replace(device_named("A100").inter_node, bytes_per_s=3e9)
    assert slower.intra_node == device_named("A100").intra_node
    assert Cluster.from_json(slower.to_json()) == slower


def test_another_bandwidth_is_another_wire(tmp_path: Path) -> None:
    """A switch that adds and wires between pairs are not taken over from the device's usual link; a switch can be named."""
    usual = device_named("H100").intra_node
    for device in ("H100", "MI300X"):
        pcie = Cluster.parse(written(tmp_path, NAMED.replace("A100", device) + "[intra_node]\nbytes_per_s = 31e9\n"))
        assert (pcie.intra_node.in_switch, pcie.intra_node.pair_bytes_per_s) == (None, None)
        assert Cluster.from_json(json.loads(json.dumps(pcie.to_json()))) == pcie
    later = Cluster.parse(written(tmp_path, NAMED.replace("A100", "H100") + "[intra_node]\nlatency_s = 1e-5\n"))
    assert later.intra_node == replace(usual, latency_s=1e-5) and usual.in_switch is not None
    named = Cluster.parse(written(tmp_path, NAMED + "[intra_node]\nbytes_per_s = 31e9\nin_switch = 0.5\n"))
    assert named.intra_node == replace(device_named("A100").intra_node, bytes_per_s=31e9, in_switch=0.5)


def test_a_file_with_a_device_of_ones_own(tmp_path: Path) -> None:
    own = Cluster.parse(written(tmp_path, OWN))
    assert own.device.flops == {"fp32": 80e12, "bf16": 160e12} and own.device.memory_bytes == 24 * 10**9
    assert own.intra_node == own.device.intra_node == Link(1e-5, 25e9)
    assert str(own) == "2xRTX"
    assert Cluster.from_json(json.loads(json.dumps(own.to_json()))) == own


@pytest.mark.parametrize(
    ("text", "old", "new", "expected"),
    [
        (NAMED, "nodes = 2\n", "", "the field 'nodes' is missing"),
        (NAMED, "nodes = 2\n", "node = 2\n", "there is no field 'node'"),
        (NAMED, "devices_per_node", "device_per_node", "Did you mean 'devices_per_node'"),
        (NAMED, "nodes = 2", "nodes = 2.5", "nodes is 2.5; it must be a whole number above 0"),
        (NAMED, "nodes = 2", 'nodes = "2"', "nodes is '2'"),
        (NAMED, "nodes = 2", "nodes = true", "nodes is True"),
        (NAMED, "= 4", "= -4", "devices_per_node is -4"),
        (NAMED, '"A100"', '"A10"', "There is no device 'A10'; known are A100-SXM-80GB"),
        (NAMED, '"A100"', "3", "device is 3; it must be a name"),
        (NAMED, '"A100"\n', '"A100"\nintra_node = 3\n', "intra_node is 3; it must be a table"),
        (NAMED, '"A100"\n', '"A100"\ninter_node = { bytes_per_s = 0 }\n', "inter_node: bytes_per_s is 0"),
        (
            NAMED,
            '"A100"\n',
            '"A100"\ninter_node = { bytes_per_s = -1e9 }\n',
            "inter_node: bytes_per_s is -1000000000.0",
        ),
        (NAMED, '"A100"\n', '"A100"\ninter_node = { latency_s = nan }\n', "inter_node: latency_s is nan"),
        (
            NAMED,
            '"A100"\n',
            '"A100"\ninter_node = { byte_per_s = 1e9 }\n',
            "inter_node: there is no field 'byte_per_s'",
        ),
        (
            NAMED,
            '"A100"\n',
            '"A100"\nintra_node = { in_switch = 1.5 }\n',
            "intra_node: in_switch is 1.5; it is a share",
        ),
        (
            NAMED,
            '"A100"\n',
            '"A100"\ninter_node = { efficiency = 0 }\n',
            "inter_node: efficiency is 0; it must be a number above 0",
        ),
        (NAMED, "nodes = 2", "nodes = ", "is not valid TOML"),
        (
            OWN,
            "intra_node = { latency_s = 1e-5, bytes_per_s = 25e9 }\n",
            "",
            "device: the field 'inter_node' is missing",
        ),
        (OWN, "latency_s = 1e-5, ", "", "intra_node: the field 'latency_s' is missing"),
        (OWN, "nodes = 1", "nodes = 2", "device: the field 'inter_node' is missing"),
        (OWN, 'kind = "gpu"', 'kind = "tpu"', "device: kind is 'tpu'; it must be cuda or cpu"),
        (OWN, "24e9", "24.5", "device: memory_bytes is 24.5"),
        (OWN, "24e9", "24", "device.memory_bytes is 24; it is in bytes: 80e9 are 80 GB"),
        (OWN, "160e12", "160", "device.flops.bf16 is 160; it is in flop/s"),
        (OWN, "bytes_per_s = 25e9", "bytes_per_s = 25", "intra_node.bytes_per_s is 25; it is in bytes a second"),
        (
            NAMED,
            '"A100"\n',
            '"A100"\ninter_node = { latency_s = 14 }\n',
            "inter_node.latency_s is 14; it is in seconds",
        ),
        (NAMED, '"A100"\n', '"A100"\nhost_memory_bytes = 1024\n', "host_memory_bytes is 1024; it is in bytes"),
        (
            OWN,
            "matrix_efficiency = 0.7",
            "matrix_efficiency = 0.7\nattention_efficiency = 0.5",
            "attention_efficiency is 0.5; it must be two shares",
        ),
        (
            OWN,
            "fp32 = ",
            "fp31 = ",
            "device: flops has 'fp31'; the dtypes are fp32, tf32, bf16, fp16, fp8, mxfp8. Did you mean 'fp32'",
        ),
        (OWN, "160e12", "0", "device: flops.bf16 is 0"),
        (OWN, "matrix_efficiency = 0.7", "matrix_efficiency = 70", "matrix_efficiency is 70; it is a share"),
        (OWN, "memory_bytes_per_s", "memory_byte_per_s", "Did you mean 'memory_bytes_per_s'"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(text: str, old: str, new: str, expected: str, tmp_path: Path) -> None:
    assert text.count(old) == 1 or old == "nodes = 2\n"
    file = written(tmp_path, text.replace(old, new, 1))
    with pytest.raises(gp.GraphparError) as caught:
        Cluster.parse(file)
    assert expected in str(caught.value)
    assert " it?" not in str(caught.value) and str(caught.value).startswith(str(file))


PODS = NAMED + "[[pods]]\nnodes = 2\nrails = true\nbytes_per_s = 6e9\n[[pods]]\nnodes = 4\nlatency_s = 3e-5\n"


def test_a_file_with_pods(tmp_path: Path) -> None:
    """Figures of a pod that are left out are those of the link inside it."""
    made = Cluster.parse(written(tmp_path, PODS))
    inside = device_named("A100").inter_node
    first = replace(inside, bytes_per_s=6e9)
    assert made.pods == (Pod(2, first, True), Pod(4, replace(first, latency_s=3e-5)))
    assert [(level.name, level.devices) for level in made.levels] == [
        ("nodes", 4),
        ("leaf switches", 8),
        ("pods of 4", 16),
    ]
    assert Cluster.from_json(json.loads(json.dumps(made.to_json()))) == made
    assert Cluster.parse(f"8x4x{written(tmp_path, PODS)}").pods == made.pods
    assert repr(made) == "Cluster('2x4xA100-SXM-80GB', with its own figures)"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("nodes = 2\nrails", "rails", "pods[0]: the field 'nodes' is missing"),
        ("nodes = 4", "nodes = 0", "pods[1]: nodes is 0; it must be a whole number above 0"),
        ("nodes = 4", "nodes = 5", "pods of 5 nodes don't consist of pods of 2; list them from the inside out"),
        ("nodes = 4", "nodes = 2", "pods of 2 nodes don't consist of pods of 2"),
        ("rails = true", "rails = 1", "pods[0]: rails is 1; it must be true or false"),
        ("latency_s", "rails = true\nlatency_s", "rails are of the innermost pods alone"),
        ("latency_s", "latencys", "pods[1]: there is no field 'latencys'; the fields are"),
        (PODS, NAMED + "pods = 3", "pods is 3; it must be a list of tables with nodes and bytes_per_s"),
        (PODS, NAMED + "devices_per_host = 3", "devices_per_host is 3, which does not divide devices_per_node, 4"),
    ],
)
def test_what_is_wrong_in_pods_is_named(old: str, new: str, expected: str, tmp_path: Path) -> None:
    assert PODS.count(old) == 1
    with pytest.raises(gp.GraphparError) as caught:
        Cluster.parse(written(tmp_path, PODS.replace(old, new)))
    assert expected in str(caught.value)


def test_a_node_of_several_hosts(tmp_path: Path) -> None:
    """The 72 devices of an NVLink domain share links, and four of them a host."""
    rack, file = Cluster.parse("72xGB200"), written(tmp_path, NAMED + "devices_per_host = 2\n")
    assert (rack.devices_per_node, rack.host_devices, Cluster.parse("2xGB200").host_devices) == (72, 4, 2)
    assert Cluster.parse("8xH100").host_devices == 8
    halves = Cluster.parse(file)
    assert halves.host_devices == 2 and Cluster.from_json(halves.to_json()) == halves


def test_the_cluster_file_that_is_shown_is_one(tmp_path: Path) -> None:
    (shown,) = [block for block in ALL if block.kind == "file" and block.argument == "cluster.toml"]
    own = Cluster.parse(written(tmp_path, shown.text))
    assert (own.nodes, own.devices_per_node, own.device.name) == (2, 2, "A100-SXM-40GB")
    assert own.inter_node.bytes_per_s < own.device.inter_node.bytes_per_s
    (shown,) = [block for block in ALL if block.kind == "file" and block.argument == "pods.toml"]
    made = Cluster.parse(written(tmp_path, shown.text))
    assert [level.link.bytes_per_s for level in made.levels] == [50e9, 12.5e9, 6.25e9]
    (shown,) = [block for block in ALL if block.kind == "file" and block.argument == "groups.toml"]
    file = written(tmp_path, shown.text)
    assert Cluster.parse(file) == Cluster.parse("8xH100+16xA100")
    with pytest.raises(gp.GraphparError, match="a number before it is not for groups"):
        Cluster.parse(f"4x{file}")


# ---- prices and plans ------------------------------------------------------------------------------------------


def test_costs_are_shares_of_the_clusters_peaks() -> None:
    h100 = device_named("H100")
    costs = ShardingCosts.of(Cluster.parse("2x8xH100"), Mesh(dp_replicate=2, tp=8), "bf16")
    assert costs.flops_per_s == h100.flops["bf16"] * h100.matrix_efficiency
    assert costs.memory_bytes_per_s == h100.memory_bytes_per_s * h100.memory_efficiency
    assert set(costs.links) == {"dp_replicate", "tp"}
    assert costs.transition_rate("tp") == h100.intra_node.bytes_per_s * h100.intra_node.efficiency
    assert costs.transition_rate("dp_replicate") == h100.inter_node.bytes_per_s * h100.inter_node.efficiency
    assert costs.operator_s(0, 0) == h100.launch_s


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.down(torch.relu(self.up(x)))).pow(2).mean()


@pytest.fixture(scope="module")
def program() -> gp.Program:
    return gp.export(Mlp(), (torch.randn(8, 64),))


def test_the_dtype_of_most_flops_is_priced() -> None:
    class Mixed(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    inputs = (torch.randn(8, 64),)
    assert dominant_dtype(gp.export(Mlp(), inputs)) == "fp32"
    assert dominant_dtype(gp.export(Mixed(), inputs)) == "bf16"
    assert dominant_dtype(gp.export(Mlp().half(), (inputs[0].half(),))) == "fp16"


def test_the_flops_of_layers_that_repeat_count() -> None:
    class Layer(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.relu(self.up(x)))

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = nn.Sequential(Layer(), Layer()), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                x = self.layers(x)
            return self.head(x.float()).square().mean()

    program = gp.export(Layers(), (torch.randn(8, 64),))
    assert program.blocks and dominant_dtype(program) == "bf16"


def test_a_plan_knows_its_cluster(program: gp.Program) -> None:
    made = Cluster.parse("2xH100")
    plan = gp.plan(program, made, mesh={"tp": 2})
    assert plan.cluster == replace(made, headroom=HEADROOM)
    assert gp.Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    older = {name: value for name, value in plan.to_json().items() if name != "cluster"}
    assert gp.Plan.from_json(older) == replace(plan, cluster=None)
    assert "2xH100-SXM-80GB" in str(plan)


def test_the_search_pays_the_clusters_prices(program: gp.Program) -> None:
    """The same cuts over a link that is a hundred times slower cost more; compute on the same device costs the same."""
    near, far = Cluster.parse("1x2xH100"), Cluster.parse("2x1xH100")
    cheap, dear = (
        gp.plan(program, made, mesh={"tp": 2}, shard_plan={"up": "colwise", "down": "rowwise"}).sharding.cost
        for made in (near, replace(far, inter_node=Link(1e-4, 1e9)))
    )
    assert dear["transitions"] > 10 * cheap["transitions"] > 0
    assert dear["compute"] == pytest.approx(cheap["compute"])


def test_the_report_shows_the_prices_of_its_cluster(program: gp.Program) -> None:
    plan = gp.plan(program, Cluster.parse("2x1xA100"), mesh={"tp": 2}, shard_plan={"up": "colwise", "down": "rowwise"})
    parts = gp.partition(program, plan)
    near, far = (report_data(priced(parts.compilation, Cluster.parse(cluster))) for cluster in ("1x2xA100", "2x1xA100"))
    assert plan.microbatches == 1 and far["sharding"]["transitions_s"] > near["sharding"]["transitions_s"]
    for data in (near, far):
        assert data["sharding"]["transitions_s"] == pytest.approx(data["predicted"]["parts_s"]["tp"])


def test_without_a_cluster_nothing_changes(program: gp.Program) -> None:
    by_count, by_name = gp.plan(program, 2, mesh={"tp": 2}), gp.plan(program, devices=2, mesh={"tp": 2})
    assert by_count == by_name and by_count.cluster is None


def test_a_mesh_or_a_count_that_is_not_the_clusters(program: gp.Program) -> None:
    made = Cluster.parse("4xCPU")
    with pytest.raises(gp.GraphparError, match=r"Invalid mesh: .* = 2 != 4 devices.*Leave out pp"):
        gp.plan(program, made, mesh={"pp": 1, "dp_replicate": 1, "tp": 2})
    for degree in (8, 3):
        with pytest.raises(
            gp.GraphparError, match=f"4 devices don't divide by the mesh's tp={degree}; take a multiple of {degree}"
        ):
            gp.plan(program, made, mesh={"tp": degree})
    with pytest.raises(gp.GraphparError, match="devices is 2, but the cluster 4xCPU has 4"):
        gp.plan(program, made, devices=2)
    with pytest.raises(gp.GraphparError, match="devices is 2, but the second argument says 4"):
        gp.plan(program, 4, devices=2)


def test_a_gpu_with_a_rate_for_bf16_alone_computes_in_it() -> None:
    device = replace(device_named("H100"), flops={"bf16": 1e15})
    assert device.faster_in_bf16 and not replace(device, flops={"fp32": 1e15}).faster_in_bf16


def test_a_folder_is_no_cluster_file(tmp_path: Path) -> None:
    (tmp_path / "here.toml").mkdir()
    for missing in (tmp_path / "here.toml", tmp_path / "none" / "here.toml"):
        with pytest.raises(gp.GraphparError, match=r"There is no cluster file .*here.toml\.$"):
            Cluster.parse(missing)
