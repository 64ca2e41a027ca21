"""Calibration: that a fit finds the figures that times were made with, what a case does, and profiles as clusters."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import graphpar as gp
from graphpar.cli import calibrate_command
from graphpar.cli.main import main
from graphpar.cost_models import calibrate as calibration
from graphpar.cost_models import measure as measuring
from graphpar.cost_models.calibrate import Profile, calibrate, profile_of
from graphpar.cost_models.compute import Compute
from graphpar.cost_models.contention import Watch
from graphpar.cost_models.fit_device import (
    Error,
    fit_actions,
    fit_device,
    fit_link,
    kind_of,
    least_squares,
    priced,
    sent,
    work_of,
)
from graphpar.cost_models.measure import STAGES, Case, Row, Small, cases, seconds
from graphpar.emitted.recomputation import checkpointed
from graphpar.hardware import this_machine
from graphpar.hardware.cluster import Cluster
from graphpar.hardware.devices import DEVICES, Device, Link, device_named
from graphpar.runtime import start
from graphpar.runtime.errors import LaunchError
from graphpar.schedules.registry import action_table
from graphpar.schedules.simulation import Transfers, simulate
from tests.tools.rank_pool import RankPool

CPU = torch.device("cpu")
SHIPPED = Path(__file__).parents[2] / "benchmarks" / "data" / "cpu_profile.json"
ALL_CASES = tuple(cases(CPU, quick=False))


def times(device: Device, of: Sequence[Case] = ALL_CASES, processes: int = 2) -> list[Row]:
    """What ``device`` would take by the model that is fitted."""
    computed = [
        Row(case.what, case.shape, case.dtype, processes, 1.0)
        for case in of
        if kind_of_case(case) not in ("operator", "pages")
    ]
    small = [Row("operator", (20,), "fp32", processes, device.launch_s)]
    return small + [replace(row, seconds=value) for row, value in zip(computed, priced(device, computed))]


def kind_of_case(case: Case) -> str:
    return kind_of(Row(case.what, case.shape, case.dtype, 1, 1.0))


def rows_of(data: dict[str, Any]) -> list[Row]:
    return [Row(**{**row, "shape": tuple(row["shape"])}) for row in data["measured"]]


# ---- fits ------------------------------------------------------------------------------------------------------


@pytest.mark.costly
@pytest.mark.parametrize(
    ("matrix", "operands", "memory", "launch", "forward", "backward"),
    [(0.9, 2e10, 0.3, 2e-6, 0.3, 0.4), (0.4, 5e9, 0.8, 1e-7, 0.6, 0.5), (1.0, 1e11, 0.2, 1e-5, 0.1, 0.7)],
)
def test_a_fit_finds_the_figures_that_times_were_made_with(
    matrix: float, operands: float, memory: float, launch: float, forward: float, backward: float
) -> None:
    true = replace(
        DEVICES["CPU"],
        flops={"fp32": 5e11},
        memory_bytes_per_s=4e10,
        matrix_efficiency=matrix,
        operand_bytes_per_s=operands,
        memory_efficiency=memory,
        function_efficiency=memory / 2,
        launch_s=launch,
        attention_efficiency=(forward * matrix, backward * matrix),
    )
    found, errors = fit_device(DEVICES["CPU"], times(true))
    assert found.launch_s == pytest.approx(launch)
    assert found.memory_bytes_per_s * found.memory_efficiency == pytest.approx(4e10 * memory, rel=0.01)
    assert found.function_efficiency == pytest.approx(found.memory_efficiency / 2, rel=0.01)
    assert found.flops["fp32"] * found.matrix_efficiency == pytest.approx(5e11 * matrix, rel=0.01)
    assert found.operand_bytes_per_s == pytest.approx(operands, rel=0.05)
    for place, share in enumerate((forward, backward)):
        assert found.flops["fp32"] * found.attention_efficiency[place] == pytest.approx(5e11 * share * matrix, rel=0.01)
    assert all(error.worst < 0.02 for error in errors.values())


@pytest.mark.parametrize(("fresh", "expected"), [(0.03, 2**26 / 0.027), (0.004, None), (0.003, None)])
def test_new_pages_cost_what_writing_them_again_does_not(fresh: float, expected: float | None) -> None:
    rows = [Row("pages", (2**26,), "fp32", 2, fresh), Row("pages, again", (2**26,), "fp32", 2, 0.003)]
    found, _ = fit_device(DEVICES["CPU"], times(DEVICES["CPU"]) + rows)
    assert found.fresh_bytes_per_s == (expected and pytest.approx(expected))
    rate = Compute(replace(DEVICES["CPU"], fresh_bytes_per_s=1e9), "fp32")
    size = np.array([2.0**25 - 4, 2.0**25])
    assert list(rate.fresh_s(size)) == [0.0, 2**25 / 1e9]
    assert not Compute(DEVICES["A100-SXM-80GB"], "bf16").fresh_s(size).any()


@pytest.mark.costly
def test_a_known_device_keeps_its_peaks_and_is_fitted_by_shares() -> None:
    true = replace(
        DEVICES["A100-SXM-80GB"], matrix_efficiency=0.7, memory_efficiency=0.6, half_reduction=100.0, dispatch_s=0.0
    )
    shapes = [case for case in cases(CPU, quick=False) if kind_of_case(case) != "operator"]
    large = [replace(case, shape=tuple(16 * size for size in case.shape), dtype="bf16") for case in shapes]
    found, _ = fit_device(replace(true, matrix_efficiency=0.1, half_reduction=1.0), times(true, large), true)
    assert found.flops == {"bf16": true.flops["bf16"]}
    assert found.memory_bytes_per_s == true.memory_bytes_per_s
    assert found.matrix_efficiency == pytest.approx(0.7, rel=0.02)
    assert found.half_reduction == pytest.approx(100.0, rel=0.1) and found.operand_bytes_per_s is None
    assert found.memory_efficiency == pytest.approx(0.6, rel=0.02)


@pytest.mark.costly
def test_rows_that_only_the_host_bounds_say_nothing_about_a_gpu() -> None:
    true = replace(DEVICES["A100-SXM-80GB"], dispatch_s=5e-6)
    rows = [
        row if row.what.startswith("operator") else replace(row, seconds=max(row.seconds, 5e-6)) for row in times(true)
    ]
    rows = [replace(row, seconds=5e-6) if row.what.startswith("operator") else row for row in rows]
    rows.append(Row("operator, replayed", (4,), "fp32", 2, true.launch_s))
    found, _ = fit_device(true, rows, true)
    assert (found.launch_s, found.dispatch_s) == (true.launch_s, 5e-6)
    assert found.matrix_efficiency == pytest.approx(true.matrix_efficiency, rel=0.05)


def test_operators_that_run_again_tell_what_the_python_around_them_costs() -> None:
    forward, both = 2e-6 * Small.FORWARD, 3e-6 * (Small.FORWARD + Small.BACKWARD)
    again = (both + forward) / Small.DISPATCHED + 1e-5
    small = {
        "operator, forward": 2e-6,
        "operator": 3e-6,
        "operator, run again": again,
        "operator, watched": again + 8e-6,
    }
    rows = [row for row in times(DEVICES["CPU"]) if row.what != "operator"]
    rows += [Row(what, (20,), "fp32", 2, value) for what, value in small.items()]
    found, _ = fit_device(DEVICES["CPU"], rows)
    assert found.hooks_s == pytest.approx(1e-5) and found.policy_s == pytest.approx(4e-6)


def test_sharded_units_tell_what_python_costs_for_each() -> None:
    alone = (Small.FORWARD + Small.BACKWARD) * DEVICES["CPU"].launch_s
    taken = {"hooks": 2e-4, "gathered": 7e-4, "reduced": 8e-4}
    rows = [Row(f"sharded unit, {what}", (20,), "fp32", 2, alone + value) for what, value in taken.items()]
    found, _ = fit_device(DEVICES["CPU"], times(DEVICES["CPU"]) + rows)
    assert found.fsdp_hooks_s == pytest.approx(1e-4)
    assert found.fsdp_gather_s == pytest.approx(2.5e-4) and found.fsdp_reduce_s == pytest.approx(1e-4)


def test_a_small_block_has_as_many_operators_as_its_times_are_divided_by() -> None:
    seen: list[str] = []

    def keeps(name: str, number: int) -> bool:
        seen.append(name)
        return False

    checkpointed(Small().forward, keeps)(torch.randn(1, 4, Small.WIDTH))
    assert len(seen) == Small.DISPATCHED


@pytest.mark.costly
def test_one_bad_shape_does_not_spoil_the_others() -> None:
    rows = times(DEVICES["CPU"])
    bad = next(index for index, row in enumerate(rows) if row.what == "product" and math.prod(row.shape) > 1e6)
    spoiled = [*rows[:bad], replace(rows[bad], seconds=5 * rows[bad].seconds), *rows[bad + 1 :]]
    clean, _ = fit_device(DEVICES["CPU"], rows)
    found, errors = fit_device(DEVICES["CPU"], spoiled)
    assert found.flops["fp32"] * found.matrix_efficiency == pytest.approx(
        clean.flops["fp32"] * clean.matrix_efficiency, rel=0.04
    )
    assert errors["product"].worst > 3
    assert errors["product"].worst_row == "product {}x{}x{} fp32".format(*rows[bad].shape)


@pytest.mark.parametrize(("latency", "share", "processes"), [(1e-4, 0.5, 2), (5e-6, 0.8, 4), (1e-3, 0.2, 8)])
def test_a_fit_finds_the_link(latency: float, share: float, processes: int) -> None:
    true = Link(latency, 2e9, efficiency=share, send_latency_s=latency / 3)
    kinds = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "transfer")
    rows = [Row(what, (4**power,), "fp32", processes, 1.0) for what in kinds for power in range(5, 16)]
    rows = [replace(row, seconds=value) for row, value in zip(rows, sent(DEVICES["CPU"], true, rows))]
    found, errors = fit_link(DEVICES["CPU"], rows)
    assert found.latency_s == pytest.approx(latency, rel=0.02)
    assert found.send_latency_s == pytest.approx(latency / 3, rel=0.05)
    assert found.bytes_per_s * found.efficiency == pytest.approx(2e9 * share, rel=0.1)
    assert set(errors) == {"collective", "transfer"}


@pytest.mark.parametrize("action", [0.0, 2e-4, 3e-3])
def test_a_short_pipeline_tells_what_an_action_costs(action: float) -> None:
    link, shape = Link(1e-4, 1e9), (8, 16, 64)
    (transfer,) = sent(DEVICES["CPU"], link, [Row("transfer", (4 * 16 * 64,), "fp32", 2, 1.0)])
    costs, crossings = ([1e-3 + action] * 4, [2e-3 + action] * 4), [transfer] * 3
    table = action_table("Interleaved1F1B", 2, STAGES, 8)
    step = simulate(table, *costs, transfers=Transfers(crossings, crossings, sender_waits=True)).makespan
    seconds = {"pipeline": step, "pipeline, forward": 1e-3, "pipeline, both ways": 3e-3}
    rows = {what: Row(what, shape, "fp32", 2, value) for what, value in seconds.items()}
    assert fit_actions(DEVICES["CPU"], link, rows) == pytest.approx(action, abs=1e-8)


def test_a_device_is_not_fitted_without_products() -> None:
    rows = [row for row in times(DEVICES["CPU"]) if kind_of(row) != "product"]
    with pytest.raises(gp.GraphparError, match="no rows of kind 'product' among the"):
        fit_device(DEVICES["CPU"], rows)


def test_errors_are_of_the_measured_times() -> None:
    rows = [Row("add", (1, 4), "fp32", 1, 2.0), Row("add", (1, 8), "fp32", 1, 2.0), Row("add", (1, 9), "fp32", 1, 2.0)]
    error = Error.of(rows, [1.0, 2.0, 2.2])
    assert (error.rows, error.worst, error.worst_row) == (3, pytest.approx(1.0), "add 1x4 fp32")
    assert error.median == pytest.approx(0.1)


def test_least_squares_of_a_curve() -> None:
    import numpy as np

    x = np.linspace(0, 3, 20)
    found = least_squares(lambda p: p[0] * np.exp(p[1] * x) - 2 * np.exp(-1.5 * x), np.array([1.0, 0.0]))
    assert list(found) == pytest.approx([2.0, -1.5])


# ---- cases -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", list(cases(CPU, quick=True)), ids=lambda case: f"{case.what} {case.shape}")
@pytest.mark.sampled(1 / 3)
def test_a_case_does_the_work_that_it_is_fitted_as(case: Case) -> None:
    call = case.make()
    with FlopCounterMode(display=False) as counter:
        result = call()
    if kind_of_case(case) == "operator":
        return
    if kind_of_case(case) == "product":
        assert counter.get_total_flops() == work_of(Row(case.what, case.shape, case.dtype, 1, 1.0)).flops(1)
        return
    results = result if isinstance(result, tuple) else (result,)
    assert {tuple(each.shape) for each in results} == {case.shape}


def test_seconds_are_those_of_one_call() -> None:
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1

    taken = seconds(call, CPU, 0.01)
    assert calls > 1000  # some samples of about SAMPLE_S, each of many calls
    assert taken < 1e-4


def test_a_time_is_that_of_one_operator_and_a_mean_over_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    elements = {case.shape: math.prod(case.shape) for case in ALL_CASES if kind_of_case(case) == "traffic"}
    repeated = {(case.what, case.shape) for case in ALL_CASES if case.places == measuring.PLACES > 1}
    assert repeated == {
        (what, shape)
        for what in ("add", "mul", "gelu", "gelu, backward", "layer_norm", "layer_norm, backward")
        for shape, number in elements.items()
        if number >= measuring.LARGE
    }
    assert {case.places for case in ALL_CASES if (case.what, case.shape) not in repeated} == {1}
    allocated: list[int] = []

    def make() -> Any:
        allocated.append(len(allocated))
        return lambda: 1.0 + len(allocated)

    monkeypatch.setattr(measuring, "cases", lambda *_: [Case("gelu", (8, 2), "fp32", make, times=10, places=4)])
    monkeypatch.setattr(measuring, "seconds", lambda call, *_: call())
    with start() as ranks:
        rows = measuring.measure(measuring.Request(), ranks, Watch(ranks, 0.0))
    assert len(allocated) == 4
    (row,) = rows
    assert row.seconds == pytest.approx((2.0 + 3.0 + 4.0 + 5.0) / 4 / 10)
    assert row == Row("gelu", (8, 2), "fp32", 1, row.seconds)


# ---- profiles --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def profile(pool: RankPool) -> Profile:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "torchrun", pool.torchrun)
        return calibrate("cpu", 2, quick=True, patience_s=0.0)


@pytest.mark.costly
def test_a_profile_is_a_cluster_of_as_many_devices_as_took_part(profile: Profile, tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    file.write_text(json.dumps(profile.to_json()))
    assert Cluster.parse(str(file)) == profile.cluster == Cluster.parse(file)
    assert (profile.cluster.nodes, profile.cluster.devices_per_node) == (1, 2)
    four = Cluster.parse(f"4x{file}")
    assert (four.nodes, four.devices_per_node, four.device) == (1, 4, profile.cluster.device)


@pytest.mark.costly
def test_a_profile_has_rows_of_every_kind_and_their_errors(profile: Profile) -> None:
    assert {kind_of(row) for row in profile.rows} == {
        "operator", "pages", "product", "traffic", "attention", "collective", "transfer", "pipeline", "sharded unit",
    }  # fmt: skip
    assert all(row.seconds > 0 for row in profile.rows)
    assert set(profile.errors) == {"product", "traffic", "attention", "collective", "transfer"}
    assert profile.cluster.device.cores == profile.machine["cores"] // profile.machine["threads"]


def test_more_ranks_than_cores_take_turns_and_are_not_measured_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def measured(request: Any, kind: str, processes: int) -> list[Row]:
        asked.append((request.at_once, processes))
        return times(DEVICES["CPU"], processes=max(request.at_once))

    monkeypatch.setattr(calibration, "_measured", lambda *given: (measured(*given), 0.0))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    profile = calibrate("cpu", 4)
    assert asked == [((1, 3), 4)]
    assert (profile.cluster.device.cores, profile.cluster.size) == (3, 4)


@pytest.mark.costly
def test_the_shipped_row_of_a_cpu_fits_its_shipped_measurement() -> None:
    data = json.loads(SHIPPED.read_text())
    fitted = profile_of(rows_of(data), DEVICES["CPU"], data["devices_per_node"], data["machine"])
    shipped, most = DEVICES["CPU"], data["devices_per_node"]
    assert data["machine"]["name"] in shipped.sources["flops"]
    assert shipped.launch_s == pytest.approx(fitted.cluster.device.launch_s, rel=0.05)
    for kind, error in fitted.errors.items():
        rows = [row for row in fitted.rows if kind_of(row) == kind and row.processes == most]
        networked = kind in ("collective", "transfer")
        prices = sent(shipped, shipped.intra_node, rows) if networked else priced(shipped, rows)
        assert Error.of(rows, prices).median < 1.3 * error.median + 0.05, kind


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"),
        ("NVIDIA H200", "H200-SXM-141GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM-40GB"),
    ],
)
def test_a_gpu_is_known_by_the_name_that_its_driver_gives(name: str, meant: str) -> None:
    assert calibration._known(replace(DEVICES["H100-SXM-80GB"], name=name)) == device_named(meant)


def test_a_gpu_of_another_form_is_not_taken_for_a_known_one() -> None:
    assert calibration._known(replace(DEVICES["H100-SXM-80GB"], name="NVIDIA H100 PCIe")) is None


# ---- the command -----------------------------------------------------------------------------------------------


@pytest.mark.costly
@pytest.mark.parametrize("measured", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["again", "measured"])
def test_the_command_writes_a_profile_that_plans_can_use(
    profile: Profile,
    measured: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Slow: with a measurement of its own, by torchrun; else of the rows that one process of the profile measured."""
    out = tmp_path / "here.json"
    arguments = ["calibrate", "--quick", "--patience", "0", "--processes", "1", "--force", "-o", str(out)]
    if not measured:
        alone = [row for row in profile.rows if row.processes == 1]
        monkeypatch.setattr(calibration, "_measured", lambda *_: (alone, 0.0))
    assert main([*arguments, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed.pop("out") == str(out)
    assert printed == json.loads(out.read_text())
    assert Cluster.parse(f"2x{out}").size == 2
    profile = calibration.profile_of(rows_of(printed), DEVICES["CPU"], 1, printed["machine"])
    monkeypatch.setattr(calibration, "calibrate", lambda *_, **__: profile)
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "fit of product:" in text
    assert "products fp32, under 1 Gflop" in text


@pytest.mark.costly
@pytest.mark.parametrize(
    ("factor", "rows", "disturbed", "doubt"),
    [
        (400.0, 1, 0.0, "the fit of product is off by "),
        (12.0, 18, 0.0, "the fit of product is off by "),
        (1.0, 0, 0.4, "others used more than 12% of the cores during 40% of the measurements; 10% may be"),
        (1.0, 0, 0.05, None),
        (3.0, 4, 0.0, None),
    ],
    ids=["one time", "half of the times", "others", "others a little", "some times a little"],
)
def test_a_profile_that_the_measurements_contradict_is_not_written(
    factor: float, rows: int, disturbed: float, doubt: str | None,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    shipped = json.loads(SHIPPED.read_text())
    found = rows_of(shipped)
    products = [place for place, row in enumerate(found) if row.processes == 2 and kind_of(row) == "product"]
    for place in products[: 2 * rows : 2]:
        found[place] = replace(found[place], seconds=factor * found[place].seconds)
    monkeypatch.setattr(calibration, "_measured", lambda *_: (found, disturbed))
    out = tmp_path / "here.json"
    assert main(["calibrate", "--processes", "2", "-o", str(out), "--json"]) == (0 if doubt is None else 1)
    printed = json.loads(capsys.readouterr().out)
    assert out.exists() is (doubt is None)
    if doubt is None:
        return
    assert printed["out"] is None
    assert printed["refused"] and all(text.startswith(doubt) for text in printed["refused"])
    assert main(["calibrate", "--processes", "2", "-o", str(out)]) == 1
    text = capsys.readouterr().out
    assert "NOT WRITTEN" in text and "--force" in text and not out.exists()
    assert main(["calibrate", "--processes", "2", "-o", str(out), "--force"]) == 0
    assert Cluster.parse(str(out)).size == 2 and json.loads(out.read_text())["disturbed"] == disturbed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "here.toml"], "a profile is JSON; name it here.json"),
        (["-o", "nowhere/here.json"], "the folder nowhere does not exist"),
        (["--processes", "0"], "--processes: it is 0; it must be at least 1"),
        pytest.param(
            ["--device", "cuda"], "torch finds no GPU here; use --device cpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)  # fmt: skip
def test_what_can_not_be_measured_is_said_at_once(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "here.json: it is not valid JSON"),
        ("[1]", "it must be an object with nodes, devices_per_node and device"),
        ('{"nodes": 1, "devices_per_node": 2}', "the field 'device' is missing"),
        ('{"nodes": 1, "devices_per_node": 2, "device": "CPU", "measure": []}', "there is no field 'measure'"),
    ],
)
def test_a_profile_that_is_none_is_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    file.write_text(text)
    with pytest.raises(gp.GraphparError, match=r"here\.json: ") as caught:
        Cluster.parse(f"2x{file}")
    assert message in str(caught.value)


# ---- the profile of this machine that is kept ------------------------------------------------------------------

TWO_LINEAR = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
example_inputs = (torch.ones(4, 8),)
"""


def compiles(tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[dict[str, Any], str]:
    """Compile a small model; what it prints as JSON, and on standard error."""
    (tmp_path / "model.py").write_text(TWO_LINEAR)
    assert main(["compile", str(tmp_path / "model.py"), "--devices", "2", "--no-emit", "--json", *options]) == 0
    printed = capsys.readouterr()
    return json.loads(printed.out), printed.err


def measured_here(disturbed: float) -> Profile:
    device = replace(DEVICES["CPU"], name="CPU of this test", flops={"fp32": 7e10})
    cluster = Cluster.of(device, 1, 2)
    return Profile(cluster, calibration.machine("cpu"), (), {}, disturbed)


def test_the_first_compile_measures_this_machine_and_later_ones_take_what_it_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(this_machine.VARIABLE, str(tmp_path / "cache"))
    asked: list[Any] = []
    monkeypatch.setattr(
        calibrate_command, "calibrate", lambda *given, **more: asked.append(given) or measured_here(0.0)
    )
    compiles(tmp_path, capsys, "--cluster", "2xCPU")
    assert not asked  # it is for another machine
    for _ in range(2):
        found, _ = compiles(tmp_path, capsys)
        assert found["predicted"]["cluster"] == "2xCPU of this test" and len(asked) == 1
    assert Cluster.of_this_machine(3).devices_per_node == 3
    monkeypatch.setenv("OMP_NUM_THREADS", str(1 + this_machine.threads()))
    assert Cluster.of_this_machine(3).device == DEVICES["CPU"]  # ranks with other threads have other times


@pytest.mark.parametrize("fault", ["others", "launch", "version"])
def test_what_is_not_measured_well_is_not_kept(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(this_machine.VARIABLE, str(tmp_path / "cache"))
    kept = this_machine.profile_path()
    assert kept is not None

    def measured(*given: Any, **more: Any) -> Profile:
        if fault == "launch":
            raise LaunchError("no process could be started")
        return measured_here(0.5 if fault == "others" else 0.0)

    monkeypatch.setattr(calibrate_command, "calibrate", measured)
    if fault == "version":  # what another version wrote is measured again
        kept.parent.mkdir(parents=True)
        kept.write_text('{"nodes": 1}')
    found, said = compiles(tmp_path, capsys)
    assert (found["predicted"]["cluster"] == "2xCPU") == (fault != "version") == (not kept.exists())
    why = {"others": "others used more than", "launch": "no process could be started"}.get(fault)
    assert why is None or (why in said and "could not be measured" in said)


def test_where_a_profile_cannot_be_kept_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(calibrate_command, "calibrate", lambda *given, **more: pytest.fail("measured"))
    places = ["file/cache", "cache"]
    monkeypatch.setenv(this_machine.VARIABLE, str(tmp_path / places[1]))
    kept = this_machine.profile_path()
    assert kept is not None
    kept.mkdir(parents=True)  # the profile itself can't be written
    for place in places:
        monkeypatch.setenv(this_machine.VARIABLE, str(tmp_path / place))
        found, said = compiles(tmp_path, capsys)
        assert found["predicted"]["cluster"] == "2xCPU"
        assert "its profile can't be kept" in said and str(tmp_path / place) in said
        assert f"Name a folder that can be written in {this_machine.VARIABLE}" in said


def test_without_a_cache_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate_command, "calibrate", lambda *given, **more: pytest.fail("measured"))
    found, _ = compiles(tmp_path, capsys)
    assert found["predicted"]["cluster"] == "2xCPU"
