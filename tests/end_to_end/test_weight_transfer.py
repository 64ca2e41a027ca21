"""Weights that are sent from a program to another while both run: equal to those saved and read, and no byte more than must move."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

import graphpar as gp
from graphpar.runtime import Peers
from graphpar.runtime.checkpoints import weight_transfer
from graphpar.runtime.errors import RuntimeProgramError
from tests.end_to_end.test_checkpoint import EXPERTS, LAYOUTS, MORE
from tests.models.engine_layouts import Sizes, engine_parameters
from tests.ranks import checkpoint_script as fixture
from tests.ranks import resharding_script
from tests.tools.rank_pool import RankPool
from tests.tools.samples import sample

STEPS = 2
GIVEN: dict[str, dict[str, Any]] = {
    "tp4": {"mesh": {"tp": 4}},
    "dp2 x tp2": {"mesh": {"dp_replicate": 2, "tp": 2}},
    "pp4": {"mesh": {"pp": 4}, "microbatch_size": 2},
    "pp2 x tp2": {"mesh": {"pp": 2, "tp": 2}, "microbatch_size": 2},
}
SENT = {
    "dp2 x tp2 x": MORE["dp2 x tp2 zero 3"],
    "zero 3": {"mesh": {"dp_shard": 4}, "zero": 3},
    "zero 1": {"mesh": {"dp_shard": 4}, "zero": 1},
    "zero 1 flat": MORE["dp2 x dp2 zero 1 flat"],
    "tp2 x pp2": LAYOUTS["tp2 x pp2"],
    "interleaved": {"mesh": {"pp": 2, "tp": 2}, "schedule": "Interleaved1F1B", "microbatch_size": 2},
}


class Programs:
    """Programs of the layouts, saved when they are first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.exported: dict[tuple[str, str, str], gp.Program] = {}

    def weights(self, kind: str) -> Path:
        file = self.root / f"{kind}.safetensors"
        if not file.exists():
            save_file({name: value.clone() for name, value in fixture.build(kind).state_dict().items()}, file)
        return file

    def folder(self, kind: str, mode: str, dtype: str, layout: dict[str, Any]) -> Path:
        key = kind, mode, dtype
        if key not in self.exported:
            batch = fixture.batch_of(kind, 0)
            model, trains = fixture.build(kind), mode != "infer"
            if mode == "adapters":
                model = gp.lora(model, {"layers.*.qkv": 2, "layers.*.down": 3}, alpha=8)
            loss = {"loss_fn": fixture.loss_fn, "targets": (batch["labels"],)} if trains else {}
            self.exported[key] = gp.export(
                model, (batch["ids"],), mode="train" if trains else "infer", dtype=dtype, **loss
            )
        program = self.exported[key]
        out = self.root / f"{len(list(self.root.iterdir()))}"
        gp.partition(program, gp.plan(program, **layout)).save(out)
        return out


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    return Programs(tmp_path_factory.mktemp("transfer"))


def moved_within(
    pool: RankPool, programs: Programs, out: Path, kind: str, train: Path, *targets: Path, **more: Any
) -> list[dict[str, Any]]:
    out.mkdir(exist_ok=True)
    job = {
        "kind": kind, "train": str(train), "targets": list(map(str, targets)), "weights": str(programs.weights(kind)),
        "out": str(out), "steps": STEPS, "report": str(out / "report.json"), **more,
    }  # fmt: skip
    (out / "job.json").write_text(json.dumps(job))
    pool.torchrun(Path(resharding_script.__file__), [str(out / "job.json")], nproc=4, timeout_s=300)
    found: list[dict[str, Any]] = json.loads((out / "report.json").read_text())
    return found


def assert_equal(received: dict[str, Tensor], sent: dict[str, Tensor], where: str) -> None:
    assert received.keys() == sent.keys(), where
    for name, value in received.items():
        assert torch.equal(value, sent[name].to(value.dtype)), (where, name)


@pytest.mark.slow
@pytest.mark.parametrize("source", sample(list(SENT), 2))
def test_generating_programs_have_what_training_ones_sent(
    source: str, pool: RankPool, programs: Programs, tmp_path: Path
) -> None:
    kind = "17"
    train = programs.folder(kind, "train", "fp32", SENT[source])
    targets = [(name, dtype) for name in GIVEN for dtype in ("fp32", "bf16")]
    folders = [programs.folder(kind, "infer", dtype, GIVEN[name]) for name, dtype in targets]
    found = moved_within(pool, programs, tmp_path, kind, train, *folders)
    sent = load_file(tmp_path / "sent.safetensors")
    assert not torch.equal(sent["tokens.weight"], load_file(programs.weights(kind))["tokens.weight"])
    for number, (target, each) in enumerate(zip(targets, found)):
        assert each.get("version") == STEPS, (source, target, each)
        assert each["moved"] == each["least"], (source, target)
        assert_equal(load_file(tmp_path / f"{number}.safetensors"), sent, f"{source} to {target}")


@pytest.mark.costly
def test_a_pipeline_gives_a_tensor_parallel_program_its_weights(
    pool: RankPool, programs: Programs, tmp_path: Path
) -> None:
    train = programs.folder("17", "train", "fp32", LAYOUTS["tp2 x pp2"])
    given = programs.folder("17", "infer", "bf16", GIVEN["tp4"])
    (found,) = moved_within(pool, programs, tmp_path, "17", train, given, checkpoint=True)
    assert "error" not in found, found
    sent = load_file(tmp_path / "sent.safetensors")
    assert_equal(load_file(tmp_path / "0.safetensors"), sent, "")
    assert_equal(load_file(tmp_path / "0_loaded.safetensors"), sent, "loaded, and rounded alike")
    # Rows of 4 ranks: a rank of stage 0 has half of layer 0, so of its quarter nothing moves, or all of it.
    assert 0 < found["moved"] == found["least"] < 4 * 2 * sum(map(Tensor.numel, sent.values()))


@pytest.mark.slow
def test_experts_move(pool: RankPool, programs: Programs, tmp_path: Path) -> None:
    train = programs.folder("moe", "train", "fp32", EXPERTS["dp2 x dp_expert2"])
    targets = [programs.folder("moe", "infer", "fp32", {"mesh": mesh}) for mesh in ({"ep": 4}, {"ep": 2, "tp": 2})]
    found = moved_within(pool, programs, tmp_path, "moe", train, *targets)
    sent = load_file(tmp_path / "sent.safetensors")
    for number, each in enumerate(found):
        assert each["moved"] == each["least"]
        assert_equal(load_file(tmp_path / f"{number}.safetensors"), sent, str(number))


@pytest.mark.costly
@pytest.mark.parametrize(
    "dtype, layout",
    [
        ("fp32", {"mesh": {"dp_shard": 2, "tp": 2}, "zero": 3}),
        ("bf16", {"mesh": {"dp_shard": 2, "tp": 2}, "zero": 1, "zero1_by": "flat"}),  # main values in pieces
    ],
)
def test_adapters_are_added_to_what_the_base_model_receives(
    dtype: str, layout: dict[str, Any], pool: RankPool, programs: Programs, tmp_path: Path
) -> None:
    train = programs.folder("17", "adapters", dtype, layout)
    targets = [
        programs.folder("17", "infer", "bf16", GIVEN["tp4"]),
        programs.folder("17", "adapters", "fp32", {"mesh": {"tp": 2, "pp": 2}, "microbatch_size": 2}),
    ]
    files = {"mapping": "hf", "dtype": "float32", "ranks": [1], "bucket_bytes": 2_000}
    found = moved_within(pool, programs, tmp_path, "17", train, *targets, engines=[files])
    merged, sent = (load_file(tmp_path / f"{name}.safetensors") for name in ("merged", "sent"))
    changed = [
        name
        for name, value in load_file(programs.weights("17")).items()
        if not torch.equal(value.to(merged[name].dtype), merged[name])
    ]
    assert changed and all(name.endswith(("qkv.weight", "down.weight")) for name in changed)
    assert all(each["moved"] == each["least"] for each in found)
    assert_equal(load_file(tmp_path / "0.safetensors"), merged, "merged")
    assert_equal(load_file(tmp_path / "1.safetensors"), sent, "with adapters")
    own = {name: value for name, value in merged.items() if name != "head.weight"}  # the same as that of tokens
    assert_equal(load_file(tmp_path / "engine_0_1.safetensors"), own, "for an engine")


@pytest.mark.costly
def test_other_models_and_trained_parameters_in_fewer_bits_are_refused(
    pool: RankPool, programs: Programs, tmp_path: Path
) -> None:
    train = programs.folder("17", "train", "fp32", LAYOUTS["tp2 x pp2"])
    other = programs.folder("18", "infer", "fp32", GIVEN["tp4"])
    (found,) = moved_within(pool, programs, tmp_path, "17", train, other)
    assert found["error"] == "tokens.weight is [17, 12] where it is sent, and [18, 12] where it is received"
    assert found["version"] == 0


_COMMON = {"heads": 4, "kv_heads": 2, "width": 32, "head": 8, "biases": False}
SIZES: dict[str, dict[str, Any]] = {
    "llama": {**_COMMON, "hidden": 48, "words": 70},
    "moe": {**_COMMON, "hidden": 64, "words": 64, "experts": 4, "layers": 4},
}


@pytest.mark.costly
@pytest.mark.parametrize(
    "kind, layout",
    sample(
        [
            ("llama", LAYOUTS["tp2 x pp2"]),
            ("llama", {"mesh": {"dp_shard": 2, "tp": 2}, "zero": 3}),
            ("moe", EXPERTS["dp2 x ep2"]),
            ("moe", EXPERTS["dp2 x dp_expert2"]),
        ],
        2,
    ),
)
def test_other_engines_have_what_was_sent(
    kind: str, layout: dict[str, Any], pool: RankPool, programs: Programs, tmp_path: Path
) -> None:
    train = programs.folder(kind, "train", "fp32", layout)
    mapping = "hf" if kind == "llama" else "hf_mixtral"
    files = {"mapping": mapping, "dtype": "bfloat16", "ranks": [0, 2], "bucket_bytes": 10_000}
    engines = [*({"tp": tp, "sizes": SIZES[kind]} for tp in (1, 2, 4)), files]
    moved_within(pool, programs, tmp_path, kind, train, engines=engines)
    whole = load_file(tmp_path / "sent.safetensors")
    weights = {name.removeprefix("model."): value for name, value in whole.items()}
    for number, tp in enumerate((1, 2, 4)):
        for rank in range(4):
            expected = engine_parameters(weights, Sizes(**SIZES[kind]), (rank % tp, tp))
            found = load_file(tmp_path / f"engine_{number}_{rank}.safetensors")
            assert_equal(found, expected, f"rank {rank} of tp {tp}")
    assert [len(load_file(tmp_path / f"engine_3_{rank}.safetensors")) for rank in (1, 3)] == [0, 0]
    for rank in (0, 2):
        found = load_file(tmp_path / f"engine_3_{rank}.safetensors")
        expected = {name: value for name, value in weights.items() if name != "lm_head.weight" or kind == "moe"}
        if kind == "moe":  # as transformers writes its files
            model = fixture.build(kind).model
            model.load_state_dict(weights)
            model.save_pretrained(tmp_path / "hf")
            expected = load_file(tmp_path / "hf" / "model.safetensors")
        assert_equal(found, expected, "files")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def two_groups(
    programs: Programs, out: Path, senders: int, train: Path, receivers: int, given: Path, **job: Any
) -> list[dict[str, Any]]:
    """Return the jobs of ranks that train, and of others that receive."""
    kind = job.get("kind", "17")
    common = {
        "kind": kind, "weights": str(programs.weights(kind)), "out": str(out), "steps": STEPS,
        "address": f"127.0.0.1:{free_port()}", **job,
    }  # fmt: skip
    return [
        {**common, "count": count, "sends": sends, "program": str(program), "report": str(out / f"report_{sends}.json")}
        for sends, program, count in ((True, train, senders), (False, given, receivers))
    ]


def two_launches(out: Path, jobs: list[dict[str, Any]]) -> None:
    """Start a launch for each of two groups."""
    running = []
    for job in jobs:
        file = out / f"job_{job['sends']}.json"
        file.write_text(json.dumps(job))
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(job["count"]), "--master-port",
            str(free_port()), "--module", resharding_script.__name__, str(file),
        ]  # fmt: skip
        with (out / f"log_{job['sends']}.txt").open("w") as log:
            running.append(subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=log, stderr=log))
    try:
        for each in running:
            each.wait(180)
    finally:
        for each in running:
            each.kill()


def one_launch(pool: RankPool, out: Path, jobs: list[dict[str, Any]]) -> None:
    """Start a launch whose first ranks are one group and whose others are another."""
    (out / "job.json").write_text(json.dumps({"groups": jobs}))
    count = sum(job["count"] for job in jobs)
    pool.torchrun(Path(resharding_script.__file__), [str(out / "job.json")], nproc=count, timeout_s=180)


def reported(out: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return what the two groups have reported; nothing for senders that have ended."""
    sent, received = out / "report_True.json", out / "report_False.json"
    assert received.exists(), "\n".join(log.read_text() for log in out.glob("log_*.txt"))
    return json.loads(sent.read_text()) if sent.exists() else [], json.loads(received.read_text())


@pytest.mark.costly
@pytest.mark.parametrize("launches", sample([1, 2], 1))
def test_ranks_that_train_send_to_others(launches: int, pool: RankPool, programs: Programs, tmp_path: Path) -> None:
    train = programs.folder("17", "train", "fp32", LAYOUTS["tp2"])
    given = programs.folder("17", "infer", "fp32", {"mesh": {"pp": 2}, "microbatch_size": 2})
    jobs = two_groups(programs, tmp_path, 2, train, 2, given)
    one_launch(pool, tmp_path, jobs) if launches == 1 else two_launches(tmp_path, jobs)
    sent, received = reported(tmp_path)
    assert [each["version"] for each in received] == [1, 2]
    whole = load_file(tmp_path / "sent_1.safetensors")
    tied = whole["tokens.weight"].nbytes  # both stages have it
    assert sent == received and all(
        each["moved"]
        == each["least"]
        == tied + sum(value.nbytes for name, value in whole.items() if name != "head.weight")
        for each in sent
    )
    for step in range(STEPS):
        files = (load_file(tmp_path / f"{name}_{step}.safetensors") for name in ("received", "sent"))
        assert_equal(*files, f"step {step}")


@pytest.mark.costly
def test_ranks_that_train_send_to_those_of_another_engine(pool: RankPool, programs: Programs, tmp_path: Path) -> None:
    train, sent_to = programs.folder("llama", "train", "fp32", {"mesh": {"pp": 1}}), tmp_path / "sent.safetensors"
    jobs = two_groups(
        programs, tmp_path, 1, train, 4, train, kind="llama", sizes=SIZES["llama"], sent=str(sent_to)
    )  # fmt: skip
    one_launch(pool, tmp_path, jobs)
    sent, received = reported(tmp_path)
    assert sent == received and sent[1] == {"version": 1}
    assert "qkv_proj.weight is [24, 32] on this rank of the engine, and [16, 32] by the mapping" in sent[0]["error"]
    weights = {name.removeprefix("model."): value for name, value in load_file(sent_to).items()}
    for rank in range(4):
        found = load_file(f"{sent_to}.{rank}")
        assert_equal(found, engine_parameters(weights, Sizes(**SIZES["llama"]), (rank, 4)), f"rank {rank}")


def test_a_launch_says_for_which_other_one_it_waits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"127.0.0.1:{free_port()}"
    for wrong, why in {"10.0.0.1:99999": "is no address", address: "have no process group yet"}.items():
        with pytest.raises(RuntimeProgramError, match=why):
            Peers(wrong, sends=False)
    monkeypatch.setattr(weight_transfer, "QUIET_S", 0.3)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    with pytest.raises(
        RuntimeProgramError, match=f"the launch that sends weights has not come to {address} within 1 s"
    ):
        Peers(address, sends=False, timeout_s=1)
    said = f"waiting for the launch that sends weights to come to {address}, 0 s so far\n"
    assert capsys.readouterr().err.count(said) == 1
    with socket.create_server(("", 0)) as taken, pytest.raises(RuntimeProgramError, match="is in use on this machine"):
        Peers(f"127.0.0.1:{taken.getsockname()[1]}", sends=True, timeout_s=1)
    with weight_transfer._waiting("another"):
        pass
    assert not capsys.readouterr().err


@pytest.mark.costly
def test_what_one_launch_refuses_the_other_hears(pool: RankPool, programs: Programs, tmp_path: Path) -> None:
    """Merged adapters are refused, and sent with their products once they are apart."""
    train = programs.folder("17", "adapters", "fp32", LAYOUTS["tp2"])
    given = programs.folder("17", "infer", "fp32", {"mesh": {"pp": 2}, "microbatch_size": 2})
    one_launch(pool, tmp_path, two_groups(programs, tmp_path, 2, train, 2, given, merged=True))
    sent, received = reported(tmp_path)
    assert sent == received and "unmerge()" in sent[0]["error"] and sent[0]["version"] == 0
    assert [each["version"] for each in received[1:]] == [1, 2]


@pytest.mark.slow
def test_weights_of_a_sender_that_ends_are_not_computed_with(programs: Programs, tmp_path: Path) -> None:
    train = programs.folder("17", "train", "fp32", LAYOUTS["tp2"])
    given = programs.folder("17", "infer", "fp32", {"mesh": {"tp": 2}})
    two_launches(tmp_path, two_groups(programs, tmp_path, 2, train, 2, given, dies=True))
    _, received = reported(tmp_path)
    assert received[0]["version"] == 1
    assert received[1]["version"] is None and "weights were on their way" in received[1]["refused"]
