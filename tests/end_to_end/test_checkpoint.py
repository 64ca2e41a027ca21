"""Checkpoints: saved under any plan, read under any other; a kill at any moment leaves the last whole one; bad ones are refused."""

from __future__ import annotations

import itertools
import json
import math
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import graphpar as gp
from graphpar.cli.main import main
from graphpar.runtime import LaunchError, RuntimeProgramError
from graphpar.runtime.checkpoints import conversion, tensor_files
from graphpar.runtime.checkpoints import folders as checkpoint_folders
from graphpar.runtime.checkpoints.tensor_chunks import boxes_of, flat_boxes
from graphpar.runtime.layout import Shard, local_shard
from tests.ranks import checkpoint_script as fixture
from tests.tools.rank_pool import RankPool
from tests.tools.samples import sample
from tests.tools.whole_values import whole_values

_PIPELINE = {"schedule": "1F1B", "microbatch_size": 2}
_QKV_BY_DIM_1 = {"layers.*.qkv.weight": "S(1)@dp_shard"}
_BY_DIM_1 = {"shard_plan": {**_QKV_BY_DIM_1, "layers.*.down.weight": "S(1)@dp_shard"}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "1 device": {"mesh": {"pp": 1}},
    "dp2 zero 1": {"mesh": {"dp_shard": 2}, "zero": 1},
    "dp2 zero 1 longest": {"mesh": {"dp_shard": 2}, "zero": 1, "zero1_by": "longest"},
    "dp2 zero 1 flat": {"mesh": {"dp_shard": 2}, "zero": 1, "zero1_by": "flat"},
    "dp2 zero 2": {"mesh": {"dp_shard": 2}, "zero": 2},
    "dp2 zero 3": {"mesh": {"dp_shard": 2}, "zero": 3},
    "tp2": {"mesh": {"tp": 2}},
    "pp2": {"mesh": {"pp": 2}, **_PIPELINE},
    "tp2 x pp2": {"mesh": {"tp": 2, "pp": 2}, **_PIPELINE},
    "dp2 zero 3 by dim 1": {"mesh": {"dp_shard": 2}, "zero": 3, **_BY_DIM_1},
    "dp2 x tp2 x pp2": {"mesh": {"dp_shard": 2, "tp": 2, "pp": 2}, **_PIPELINE, "shard_plan": _QKV_BY_DIM_1},
}
MORE: dict[str, dict[str, Any]] = {
    "dp2 x dp2 zero 1 flat": {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "zero": 1, "zero1_by": "flat"},
    "dp2 x tp2 zero 1 flat": {"mesh": {"dp_shard": 2, "tp": 2}, "zero": 1, "zero1_by": "flat"},
    "cp2 x dp2": {"mesh": {"cp": 2, "dp_replicate": 2}},
    "dp2 x tp2 zero 3": {"mesh": {"dp_shard": 2, "tp": 2}, "zero": 3},
    "cp2 zero 3": {"mesh": {"cp": 2}, "zero": 3},
    "dp2 x cp2 zero 3": {"mesh": {"dp_shard": 2, "cp": 2}, "zero": 3},
    "dp2 x cp2 zero 1 flat": {"mesh": {"dp_shard": 2, "cp": 2}, "zero": 1, "zero1_by": "flat"},
    "pp2, V": {"mesh": {"pp": 2}, "schedule": "ZBVZeroBubble", "microbatch_size": 2},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "1 device": LAYOUTS["1 device"],
    "ep2": {"mesh": {"ep": 2}},
    "dp2 x ep2": {"mesh": {"dp_shard": 2, "ep": 2}},
    "dp_expert2": {"mesh": {"dp_expert": 2}},
    "dp2 x dp_expert2": {"mesh": {"dp_shard": 2, "dp_expert": 2}},
    "pp2 x ep2": {"mesh": {"pp": 2, "ep": 2}, **_PIPELINE},
}
SAVED_AT, ENDS_AT = 2, 5
TOLERANCE = 2e-5


class Bench:
    """Programs of the layouts, compiled when they are first asked for, and launches of jobs."""

    def __init__(self, root: Path, pool: RankPool) -> None:
        self.root, self.pool = root, pool
        self.programs: dict[str, gp.Program] = {}

    def program(self, kind: str) -> gp.Program:
        if kind not in self.programs:
            batch, model = fixture.batch_of(kind, -1), fixture.build(kind)
            self.programs[kind] = gp.export(model, (batch["ids"],), loss_fn=fixture.loss_fn, targets=(batch["labels"],))
            weights = {name: value.clone() for name, value in model.state_dict().items()}
            save_file(weights, self.root / f"{kind}.safetensors")
        return self.programs[kind]

    def folder(self, kind: str, layout: str) -> Path:
        out, program = self.root / kind / layout, self.program(kind)
        if not out.exists():
            gp.partition(program, gp.plan(program, **_asked(layout))).save(out)
        return out

    def ranks(self, layout: str) -> int:
        return math.prod(_asked(layout)["mesh"].values())

    def run(self, kind: str, layout: str, *jobs: dict[str, Any]) -> list[dict[str, Any]]:
        """Run jobs one after the other on the ranks of a layout; return what they report."""
        common = {
            "kind": kind,
            "program": str(self.folder(kind, layout)),
            "weights": str(self.root / f"{kind}.safetensors"),
        }
        reports = [self.root / f"report_{number}.json" for number in range(len(jobs))]
        for report in reports:
            report.unlink(missing_ok=True)
        listed = [{**common, "report": str(report), **job} for report, job in zip(reports, jobs)]
        file = self.root / "jobs.json"
        file.write_text(json.dumps(listed, default=str))
        killed = any("killed" in job for job in jobs)
        self.pool.torchrun(Path(fixture.__file__), [str(file)], nproc=self.ranks(layout), timeout_s=300, killed=killed)
        return [json.loads(report.read_text()) for report in reports]


def _asked(layout: str) -> dict[str, Any]:
    return {**MORE, **EXPERTS, **LAYOUTS}[layout]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, pool: RankPool) -> Bench:
    return Bench(tmp_path_factory.mktemp("checkpoints"), pool)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, as torch reads them by itself."""
    file = folder.parent / f"{folder.name}.pt"
    dcp_to_torch_save(folder, file)
    found = torch.load(file)
    file.unlink()
    flat = {f"model.{name}": value for name, value in found["model"].items()}
    for name, state in found.get("optimizer", {"state": {}})["state"].items():
        flat |= {f"optimizer.{name}.{key}": value for key, value in state.items()}
    return flat


def reference(kind: str, steps: int) -> dict[str, torch.Tensor]:
    """What an eager loop has after some steps, with tied weights once."""
    _, parameters, state = fixture.eager(kind, steps)
    flat = {
        f"model.{name}": value
        for name, value in parameters.items()
        if not name.endswith("head.weight") or kind == "moe"
    }
    for name, values in state.items():
        flat |= {f"optimizer.{name}.{key}": value for key, value in values.items()}
    return flat


def error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], value) for name, value in expected.items())


def converted(bench: Bench, kind: str, sources: Sequence[str], targets: Sequence[str]) -> None:
    """Save under each source, go on under each target: what is loaded is what was saved, and training ends as on one device."""
    root = bench.root / "saved" / kind
    losses = fixture.eager(kind, ENDS_AT)[0]
    for source in sources:
        first = {"steps": (0, SAVED_AT), "save": root / source}
        straight = {"steps": (0, ENDS_AT), "save": root / "straight" / source}
        bench.run(kind, source, first, *([straight] if source in targets else []))
        assert error(tensors(root / source), reference(kind, SAVED_AT)) < TOLERANCE, source
    for target in targets:
        jobs = [
            {
                "load": root / source,
                "copy": root / "copied" / target / source,
                "steps": (SAVED_AT, ENDS_AT),
                "save": root / "ended" / target / source,
            }
            for source in sources
        ]
        for source, report in zip(sources, bench.run(kind, target, *jobs)):
            where = f"{kind}: {source} -> {target}"
            assert "error" not in report, (where, report)
            assert (report["step"], report["data"]) == (SAVED_AT, {"rows": SAVED_AT * fixture.ROWS}), where
            assert equal(tensors(root / "copied" / target / source), tensors(root / source)), where
            assert report["losses"] == pytest.approx(losses[SAVED_AT:], rel=1e-5), where
            ended = tensors(root / "ended" / target / source)
            assert error(ended, reference(kind, ENDS_AT)) < TOLERANCE, where
            if source == target:
                assert equal(ended, tensors(root / "straight" / source)), f"{where} is not equal to the bit"


# ---- any plan --------------------------------------------------------------------------------------------------------


@pytest.mark.costly
def test_a_few_plans_go_on_from_each_other(bench: Bench) -> None:
    seed = random.randrange(1_000_000)
    print(f"seed {seed}")  # pytest shows it where the test fails
    drawn = random.Random(seed)
    source, target = drawn.sample([name for name in LAYOUTS if name != "dp2 x tp2 x pp2"], 2)
    converted(bench, drawn.choice(("17", "127", "128")), [source], [source, target])


@pytest.mark.costly
def test_shards_of_another_dim_go_on_as_others(bench: Bench) -> None:
    converted(bench, "17", ["dp2 zero 3 by dim 1"], ["dp2 zero 3", "dp2 zero 3 by dim 1"])


@pytest.mark.slow
@pytest.mark.parametrize("words", sample(["17", "127", "128"], 1))
def test_every_plan_goes_on_from_every_other(words: str, bench: Bench) -> None:
    converted(bench, words, list(LAYOUTS), list(LAYOUTS))


@pytest.mark.slow
def test_more_plans_go_on_from_some(bench: Bench) -> None:
    converted(bench, "17", [*MORE, "1 device"], [*MORE, "tp2"])


@pytest.mark.slow
def test_experts_go_on_under_every_plan(bench: Bench) -> None:
    converted(bench, "moe", list(EXPERTS), list(EXPERTS))


@pytest.mark.slow
def test_optimizers_of_other_kinds(bench: Bench) -> None:
    root, kinds = bench.root / "optimizers", ["SGD", "RMSprop", "Adagrad", "NAdam", "ASGD", "Adafactor"]
    first = [{"optimizer": kind, "steps": (0, 2), "save": root / kind} for kind in kinds]
    further = [
        {"optimizer": kind, "load": root / kind, "copy": root / f"{kind} again", "steps": (2, 3)} for kind in kinds
    ]

    straight = bench.run("17", "tp2", *[{**job, "steps": (0, 3)} for job in first[:-1]])
    saved = bench.run("17", "tp2", *first)
    resumed = bench.run("17", "dp2 zero 1 flat", *further[:-1])

    assert "the step of Adafactor needs whole parameters, and this rank stores parts" in saved[-1]["error"]
    for kind, was, now in zip(kinds, straight, resumed):
        assert "error" not in now, (kind, now)
        assert now["losses"] == pytest.approx(was["losses"][2:], rel=1e-4), kind
        assert equal(tensors(root / f"{kind} again"), tensors(root / kind)), kind


def chain(bench: Bench, layouts: Sequence[str]) -> None:
    """Each plan takes one step and hands over to the next; `latest` says where."""
    root, losses = bench.root / "chain" / str(len(layouts)), []
    shutil.rmtree(root, ignore_errors=True)
    for step, layout in enumerate(layouts):
        job = {"steps": (step, step + 1), "save": root / str(step + 1), "keep": 2, "seed": 5 if step == 0 else 0}
        (report,) = bench.run("17", layout, job if step == 0 else {**job, "load": root})
        losses += report["losses"]
        assert step == 0 or (report["step"], report["seed"]) == (step, 5)
    assert losses == pytest.approx(fixture.eager("17", len(layouts))[0], rel=1e-5)
    assert error(tensors(checkpoint_folders.find(root)), reference("17", len(layouts))) < TOLERANCE
    assert [each.name for each in checkpoint_folders.whole_checkpoints(root)] == [
        str(len(layouts) - 1),
        str(len(layouts)),
    ]


@pytest.mark.slow
def test_a_chain_of_five_plans_ends_where_one_ends(bench: Bench) -> None:
    chain(bench, ["1 device", "dp2 zero 1 flat", "tp2 x pp2", "dp2 zero 3", "pp2"])


# ---- safetensors -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(bench: Bench) -> Path:
    """A checkpoint of two ranks after two steps."""
    folder = bench.root / "one" / "2"
    bench.run("17", "tp2", {"steps": (0, SAVED_AT), "save": folder})
    return folder


def _loads(path: Path) -> dict[str, torch.Tensor]:
    model = fixture.build("17")
    model.load_state_dict(load_file(path))
    return dict(model.state_dict())


def test_merge_export_and_convert(
    bench: Bench, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = fixture.eager("17", SAVED_AT)[1]
    command = ["checkpoint", "export", str(saved), "--to", "hf", "-o", str(tmp_path / "hf"), "--max-shard-size", "4KB"]

    assert main(["checkpoint", "merge", str(saved), "-o", str(tmp_path / "merged.safetensors")]) == 0
    assert main(command) == 0
    program = bench.folder("17", "dp2 zero 3")
    assert (
        main(["checkpoint", "convert", str(tmp_path / "hf"), "--to", str(program), "-o", str(tmp_path / "from/0")]) == 0
    )
    assert main(["checkpoint", "merge", str(tmp_path / "from"), "-o", str(tmp_path / "again.safetensors")]) == 0
    assert main(["checkpoint", "convert", str(saved), "--to", str(program), "-o", str(tmp_path / "copy")]) == 0
    capsys.readouterr()
    assert main(["checkpoint", "inspect", str(saved), "--json"]) == 0

    merged = _loads(tmp_path / "merged.safetensors")
    assert error(merged, expected) < TOLERANCE
    assert equal(_loads(tmp_path / "again.safetensors"), merged)
    assert equal(tensors(tmp_path / "copy"), tensors(saved))
    index = json.loads((tmp_path / "hf" / conversion.INDEX).read_text())
    assert "head.weight" not in index["weight_map"] and "tokens.weight" in index["weight_map"]
    assert len(set(index["weight_map"].values())) > 1
    assert index["metadata"]["total_size"] == sum(v.nbytes for n, v in merged.items() if n != "head.weight")
    (found,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert (found["step"], found["mesh"]["tp"], found["optimizer"]) == (SAVED_AT, 2, "AdamW")
    assert found["model"]["elements"] == sum(value.numel() for name, value in merged.items() if name != "head.weight")


@pytest.mark.slow
def test_a_program_starts_from_exported_weights(bench: Bench, saved: Path, tmp_path: Path) -> None:
    conversion.export(saved, tmp_path / "hf", 4000)
    conversion.convert(tmp_path / "hf", tmp_path / "converted", None)

    for layout in ("dp2 zero 1 flat", "pp2"):
        jobs = [
            {"weights": tmp_path / "hf", "steps": (0, 1), "save": tmp_path / layout / "a"},
            {"load": tmp_path / "converted", "weights_only": True, "copy": tmp_path / layout / "b"},
        ]
        reports = bench.run("17", layout, *jobs)
        assert not any("error" in report for report in reports), reports
        assert reports[0]["losses"] != fixture.eager("17", 1)[0]
        assert whole_values(tmp_path / layout / "b").keys() == whole_values(saved).keys()
        assert equal(whole_values(tmp_path / layout / "b"), whole_values(saved))


# ---- while others go on, and when it is killed -----------------------------------------------------------------------


@pytest.mark.costly
def test_it_is_written_while_training_goes_on(bench: Bench) -> None:
    root = bench.root / "asynchronous"
    (root.parent / "file").write_text("no folder")
    fails = {"steps": (0, 2), "folder": root.parent / "file" / "x", "wait": False}

    _, failed = bench.run("17", "dp2 zero 1", {"steps": (0, 4), "folder": root, "wait": False, "keep": 2}, fails)

    assert [each.name for each in checkpoint_folders.whole_checkpoints(root)] == ["3", "4"]
    assert sorted(path.name for path in root.iterdir()) == ["3", "4", "latest"]
    assert error(tensors(checkpoint_folders.find(root)), reference("17", 4)) < TOLERANCE
    assert "file" in failed["error"] and len(failed["losses"]) == 1  # a folder that can't be made is said at once


def killed(bench: Bench, moments: Iterator[float], wait: bool) -> None:
    """Kill ranks that save after every step, again and again; each time the last whole checkpoint is read, and gone on from."""
    root, begin = bench.root / f"killed_{wait}", 0
    shutil.rmtree(root, ignore_errors=True)
    for number, moment in enumerate(moments):
        job = {"steps": (begin, begin + 200), "folder": root, "wait": wait, "keep": 3, "killed_after": moment}
        job |= {"load": root} if begin else {}
        with pytest.raises(LaunchError):
            bench.run("17", "dp2 zero 3", {**job, "killed": [[0, 1], [1], [0]][number % 3]})
        last = checkpoint_folders.find(root)
        begin = int(last.name)
        assert checkpoint_folders.read_record(last)["step"] == begin
        assert error(tensors(last), reference("17", begin)) < 1e-3, moment
    (report,) = bench.run(
        "17", "1 device", {"load": root, "steps": (begin, begin + 2), "save": root / "end", "keep": 1}
    )
    assert report["losses"] == pytest.approx(fixture.eager("17", begin + 2)[0][begin:], rel=1e-4)
    assert sorted(path.name for path in root.iterdir()) == ["end", "latest"]


@pytest.mark.costly
def test_a_kill_leaves_the_last_whole_checkpoint(bench: Bench) -> None:
    killed(bench, iter([random.uniform(0.05, 0.3)]), wait=True)


@pytest.mark.slow
@pytest.mark.parametrize("wait", [True, False])
def test_kills_at_many_moments_leave_the_last_whole_checkpoint(wait: bool, bench: Bench) -> None:
    killed(bench, (random.uniform(0.0, 0.3) for _ in range(10)), wait)


def test_a_kill_between_any_two_changes_of_a_folder(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was the last call that changed a name or a file, what is found is whole."""
    root = tmp_path / "ckpt"
    record = checkpoint_folders.read_record(saved)

    def save(name: str, time: float) -> None:
        part = checkpoint_folders.begin(root / name, record["model"])
        for file in (*saved.glob("*.distcp"), saved / ".metadata", saved / "tensors.json"):
            shutil.copy(file, part.folder)
        part.finish({**record, "time": time}, b"{}", 1)

    class Killed(BaseException):
        pass

    left = 0

    def counted(call: Any) -> Any:
        def counting(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return call(*arguments, **options)

        return counting

    save("1", 1.0)
    for owner, name in (
        (Path, "rename"), (Path, "replace"), (Path, "mkdir"), (checkpoint_folders, "_write_synced"), (checkpoint_folders, "_sync"),
        (shutil, "rmtree")
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    moments, when = 0, 2.0
    for name in ("2", "2", "1"):  # a new one, one in the place of itself, one in the place of an old one
        for left in itertools.count():
            allowed, when = left, when + 1
            try:
                save(name, when)
            except Killed:
                left = 10**6
                assert tensor_files.read_tensors(checkpoint_folders.find(root)) is not None, allowed
                moments += 1
                left = allowed
                continue
            left = 10**6
            break
    assert moments > 15


def flip(file: Path, place: float) -> None:
    content = bytearray(file.read_bytes())
    content[int(place * len(content))] ^= 0x10
    file.write_bytes(content)


@pytest.mark.costly
def test_no_flipped_bit_is_loaded(saved: Path, tmp_path: Path) -> None:
    values, refused = whole_values(saved), 0
    for seed in range(60):
        changed = Path(shutil.copytree(saved, tmp_path / str(seed)))
        draw = random.Random(seed)
        flip(draw.choice(sorted(changed.glob("*.distcp"))), draw.random())
        try:
            torch.testing.assert_close(whole_values(changed), values, rtol=0, atol=0)
        except RuntimeProgramError as error:
            assert "is damaged" in str(error)
            refused += 1
    assert refused > 5  # the others are in the optimizer's state, or between the values


# ---- what does not fit -----------------------------------------------------------------------------------------------


@pytest.mark.costly
def test_what_does_not_fit_is_refused_with_names(bench: Bench, saved: Path, tmp_path: Path) -> None:
    def damaged(name: str) -> Path:
        return Path(shutil.copytree(saved, tmp_path / name))

    (damaged("missing") / "__1_0.distcp").unlink()
    (damaged("short") / "__0_0.distcp").write_bytes(b"short")
    (damaged("metadata") / ".metadata").write_bytes(b"nothing")
    (damaged("plan") / "plan.json").write_text("{}")
    (damaged("no_metadata") / ".metadata").unlink()
    flip(damaged("flipped") / "__0_0.distcp", 0.5)
    (damaged("record") / "checkpoint.json").write_text("{}")
    (damaged("text") / "checkpoint.json").write_text("{")
    values = whole_values(saved)
    for name, change in {
        "lacks": {"norm.weight": None},
        "more": {"norm.wieght": torch.ones(12), "norm.weight": None},
        "shapes": {"norm.weight": torch.ones(13), "layers.0.up.bias": torch.ones(20, dtype=torch.float64)},
    }.items():
        (tmp_path / name).mkdir()
        changed = {key: value for key, value in {**values, **change}.items() if value is not None}
        save_file(changed, tmp_path / name / "model.safetensors")
        conversion.convert(tmp_path / name, tmp_path / f"{name}_checkpoint", None)
    expected = {
        "missing": "__1_0.distcp is missing",
        "short": "__0_0.distcp has 5 bytes",
        "metadata": ".metadata does not match its checksum",
        "plan": "plan.json does not match its checksum",
        "no_metadata": ".metadata is missing",
        "flipped": "__0_0.distcp does not match its checksum",
        "record": "it lacks format, step",
        "text": "checkpoint.json",
        "nothing": "is neither a checkpoint",
        "lacks_checkpoint": "it has no value for norm.weight",
        "more_checkpoint": "it has no value for norm.weight; it has values that the program does not take: norm.wieght. "
        "Did you mean 'norm.wieght'?",
        "shapes_checkpoint": "layers.0.up.bias (expected [20] float32, found [20] float64), "
        "model.norm.weight (expected [12] float32, found [13] float32)",
    }
    jobs = [{"load": tmp_path / name, "weights_only": "_" in name} for name in expected]
    jobs += [
        {"load": saved, "optimizer": "SGD"},
        {"load": tmp_path / "kept", "weights_only": True},
        {"load": tmp_path / "lacks_checkpoint"},
        {"save": tmp_path, "steps": (0, 1)},
        {"save": tmp_path / "new", "keep": 0, "steps": (0, 1)},
        {"save": tmp_path / "latest", "steps": (0, 1)},
    ]
    conversion.convert(saved, tmp_path / "kept", None)

    reports = bench.run("17", "tp2", *jobs)

    for (name, text), report in zip(expected.items(), reports):
        assert text.split("'")[0] in report.get("error", ""), (name, report)
    said = [report.get("error", "") for report in reports[len(expected) :]]
    assert "has the state of AdamW, but the optimizer is SGD" in said[0]
    assert said[1] == ""
    assert "no value for norm.weight" in said[2]
    assert "exists and is not a checkpoint" in said[3]
    assert "keep is 0" in said[4]
    assert "is not a name for a checkpoint" in said[5]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["merge", "ckpt"], "Say where to write"),
        (["inspect", "ckpt", "-o", "x"], "--out is for merge and export and adapters and convert"),
        (["export", "ckpt", "--to", "onnx", "-o", "x"], "export writes hf"),
        (["inspect", "ckpt"], "ckpt is neither a checkpoint"),
        (["convert", "ckpt", "-o", "x"], "ckpt is neither a checkpoint"),
        (["export", "ckpt", "--max-shard-size", "5 apples", "-o", "x"], "'5 apples' is not a size"),
        (["inspekt", "ckpt"], "Did you mean 'inspect'"),
    ],
)
def test_wrong_usage_is_2(
    arguments: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)

    assert main(["checkpoint", *arguments]) == 2

    assert expected in capsys.readouterr().err


# ---- boxes -----------------------------------------------------------------------------------------------------------


def test_boxes_are_where_shards_are() -> None:
    whole = torch.arange(12 * 7).view(12, 7)
    degrees = {"tp": 2, "dp_shard": 3}
    for spec in (
        {"tp": Shard(0, (4, 2)), "dp_shard": Shard(0)},
        {"tp": Shard(1), "dp_shard": Shard(0)},
        {"tp": Shard(0, (12,))},
        {"dp_shard": Shard(1)},
        {},
    ):
        covered = torch.zeros_like(whole)
        for tp, shard in itertools.product(range(2), range(3)):
            place = {"tp": tp, "dp_shard": shard}
            part = local_shard(whole, spec, degrees, place).contiguous()
            for begin, end in ((0, None), (5, 17), (6, part.numel())):
                boxes = boxes_of(part, whole.shape, spec, degrees, place) if end is None else boxes_of(
                    part.flatten()[begin:end], whole.shape, spec, degrees, place, of=part.shape, start=begin
                )  # fmt: skip
                for box in boxes:
                    at = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.values.shape))
                    assert torch.equal(whole[at], box.values)
                    covered[at] += end is None
        assert (covered > 0).all()


def test_runs_of_elements_are_few_boxes() -> None:
    shape, whole = (3, 4, 5), torch.arange(60)
    for begin, end in itertools.combinations(range(61), 2):
        boxes = list(flat_boxes(shape, begin, end))
        assert len(boxes) <= 5
        found = [whole.view(shape)[tuple(slice(o, o + s) for o, s in zip(*box))].flatten() for box in boxes]
        assert torch.equal(torch.cat(found), whole[begin:end])


def test_a_checkpoint_is_found(saved: Path, tmp_path: Path) -> None:
    assert checkpoint_folders.find(saved) == checkpoint_folders.find(saved.parent) == saved
    with pytest.raises(RuntimeProgramError, match=r"is neither a checkpoint nor a folder of checkpoints"):
        checkpoint_folders.find(tmp_path)
