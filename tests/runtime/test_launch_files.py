"""The files that start an emitted program on several nodes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import graphpar as gp
from graphpar.codegen.scripts import launch_files
from graphpar.runtime.launching import elastic
from tests.tools.programs import example
from tests.tools.rank_pool import RankPool


def _plan(**pins: Any) -> gp.Plan:
    return gp.plan(example("gpt"), **pins)


@pytest.mark.parametrize(
    ("cluster", "mesh", "nodes", "devices"),
    [
        ("2x8xH100", {"tp": 8, "dp_shard": 2}, 2, 8),
        ("2x8xH100", {"tp": 4}, 1, 4),  # a part of the cluster
        ("3x4xA100-SXM-80GB", {"pp": 2, "tp": 3}, 3, 2),  # 6 ranks don't fill nodes of 4
        ("8xCPU", {"dp_replicate": 8}, 1, 8),
        ("72xGB200", {"tp": 8, "dp_shard": 9}, 18, 4),  # one NVLink domain of hosts of 4
    ],
)
def test_they_fill_the_nodes_of_the_cluster(cluster: str, mesh: dict[str, int], nodes: int, devices: int) -> None:
    from dataclasses import replace

    plan = replace(_plan(devices=2, mesh={"dp_replicate": 2}), mesh=gp.Mesh(**mesh), cluster=gp.Cluster.parse(cluster))
    files = launch_files("MyModel", plan)
    job = yaml.safe_load(files["launch.yaml"])
    pods = job["spec"]["pytorchReplicaSpecs"]
    container = pods["Master"]["template"]["spec"]["containers"][0]

    assert f"nodes=${{NODES:-{nodes}}} devices=${{DEVICES:-{devices}}}" in files["launch.sh"]
    assert f"#SBATCH --nodes={nodes}\n" in files["launch.sbatch"]
    assert sum(pod["replicas"] for pod in pods.values()) == nodes
    assert job["metadata"]["name"] == "my-model"
    gpus = {} if "CPU" in cluster else {"nvidia.com/gpu": devices}
    assert container.get("resources", {}).get("limits", {}) == gpus
    assert ("--gpus-per-node" in files["launch.sbatch"]) == bool(gpus)
    for name in ("launch.sh", "launch.sbatch"):
        subprocess.run(["bash", "-n"], input=files[name], text=True, check=True)


@pytest.mark.parametrize("name", ["a\nrm -rf x", "a\r\u2028\x85b", "$(touch x)`touch x`'\"", "x: {y: 1}\n---\nz"])
def test_no_name_leaves_its_comment(name: str) -> None:
    from dataclasses import replace

    cluster = gp.Cluster.parse("2x8xH100")
    strange = replace(cluster, device=replace(cluster.device, name=name))
    plan = replace(_plan(devices=2, mesh={"dp_replicate": 2}), mesh=gp.Mesh(dp_replicate=16))
    usual, found = (launch_files(named, replace(plan, cluster=on)) for named, on in (("a", cluster), (name, strange)))

    for file, text in found.items():
        lines, before = (
            [
                line
                for line in each.splitlines()
                if not line.startswith(("# ", "  name: ")) and "job" not in line.lower()
            ]
            for each in (text, usual[file])
        )
        assert lines == before
        assert not set("$`'\"") & set("".join(line for line in text.splitlines() if line.startswith("# Train")))
    job = yaml.safe_load(found["launch.yaml"])["metadata"]["name"]
    assert set(job) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


@pytest.fixture(autouse=True)
def _torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts find the torchrun beside this Python."""
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parts = gp.partition(example("gpt"), _plan(mesh={"pp": 2}))
    model = parts.program.source.model
    module = model if isinstance(model, torch.nn.Module) else model()
    return parts.save(tmp_path_factory.mktemp("launch") / "out", weights=module.state_dict())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.costly
def test_two_nodes_meet(program: Path, tmp_path: Path, pool: RankPool) -> None:
    """Two nodes are two torchruns on this machine; their losses are those of one node."""
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    pool.torchrun(program / "train.py", ["--steps", "3", "--json", str(one)], nproc=2, timeout_s=240)
    nodes = {"NODES": "2", "DEVICES": "1", "HEAD": "127.0.0.1", "PORT": str(_free_port()), "JOB": str(os.getpid())}
    started = [
        subprocess.Popen(
            [program / "launch.sh", "--steps", "3", "--json", str(two)],
            env={**os.environ, **nodes},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for _ in range(2)
    ]
    try:
        printed = [node.communicate(timeout=240)[0] for node in started]
    finally:
        for node in started:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
    assert [node.returncode for node in started] == [0, 0], printed
    losses = [[step["loss"] for step in json.loads(file.read_text())] for file in (one, two)]
    assert len(losses[0]) == 3 and losses[0] == losses[1]


@pytest.mark.costly
def test_one_node_meets_where_no_other_machine_reaches_it(program: Path, tmp_path: Path) -> None:
    """The script says where torchrun and the backends listen; the losses are printed as ever."""
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os\n"
        "def note():\n"
        "    if 'RANK' in os.environ:\n"
        f"        with open({str(tmp_path / 'seen')!r}, 'a') as file:\n"
        "            names = 'MASTER_ADDR', 'TORCHELASTIC_USE_AGENT_STORE', 'GLOO_SOCKET_IFNAME'\n"
        "            print(*map(os.environ.get, names), file=file)\n"
        "atexit.register(note)\n"
    )
    search = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    losses = tmp_path / "losses.json"
    ended = subprocess.run(
        [program / "launch.sh", "--steps", "2", "--json", losses.name],  # a path of the folder it is started in
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if "IFNAME" not in name}
        | {"PYTHONPATH": search},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert len(json.loads(losses.read_text())) == 2
    assert (tmp_path / "seen").read_text().splitlines() == ["localhost False lo"] * 2


@pytest.mark.costly
def test_a_job_whose_time_is_nearly_up_saves(program: Path, tmp_path: Path) -> None:
    """Slurm's part is played by a job step that passes a signal on to all of its processes, as srun does."""
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho localhost\n")
    (tmp_path / "srun").write_text(
        f"#!{sys.executable}\n"
        "import os, signal, subprocess, sys\n"
        "from graphpar.runtime.launching.process_supervisor import descendants\n"
        "step = subprocess.Popen(sys.argv[2:])\n"
        "def pass_on(number, frame):\n"
        f"    open({str(tmp_path / 'passed')!r}, 'a').write('TERM\\n')\n"
        "    for pid in descendants(os.getpid()):\n"
        "        os.kill(pid, number)\n"
        "signal.signal(signal.SIGTERM, pass_on)\n"
        "sys.exit(step.wait())\n"
    )
    for command in ("scontrol", "srun"):
        (tmp_path / command).chmod(0o755)
    variables = {"SLURM_JOB_NODELIST": "node", "SLURM_JOB_ID": str(os.getpid()), "SLURM_SUBMIT_DIR": str(program)}
    variables |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "GRAPHPAR_DELAY": "after_loss:100"}
    job = subprocess.Popen(
        ["bash", program / "launch.sbatch", "--steps", "10000", "--checkpoint", str(tmp_path / "ck")],
        env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert job.stdout is not None
        begun = next(line for line in job.stdout if line.startswith("step    1 "))
        job.send_signal(signal.SIGTERM)
        job.send_signal(signal.SIGTERM)
        printed = begun + job.communicate(timeout=120)[0]
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert int((tmp_path / "ck" / "latest").read_text()) >= 2, printed
    assert (tmp_path / "passed").read_text() == "TERM\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--min-nodes", "1", "--max-nodes", "2"], "--min-nodes needs HEAD, the same on all nodes, and --checkpoint"),
        (["--min-nodes", "3", "--checkpoint", "ck"], "--min-nodes 3 --max-nodes 1 must be whole numbers above 0"),
        (["--max-nodes"], "--min-nodes  --max-nodes none must be whole numbers above 0"),
        (["--steps", "3", "--min-nodes", "1"], "--min-nodes A --max-nodes B come before all other options"),
        (["--min-nodes=1"], "come before all other options, without ="),
        (["--min-nodes", "1", "--checkpoint", "ck"], "HEAD=missing/meet can't be written; it must be a new file"),
    ],
)
def test_what_is_wrong_with_bounds_of_nodes_is_said(program: Path, arguments: list[str], message: str) -> None:
    ended = subprocess.run(
        [program / "launch.sh", *arguments],
        env={**os.environ, "HEAD": "missing/meet"},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert ended.returncode == 2 and message in ended.stderr


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NODES": "3"}, "the program runs on 2 ranks; NODES=3 times DEVICES=2 is 6"),
        ({"DEVICES": "two"}, "NODES=1 and DEVICES=two must be whole numbers above 0"),
        ({"NODES": "0"}, "NODES=0 and DEVICES=2 must be whole numbers above 0"),
        ({"NODES": "2", "DEVICES": "1"}, "set HEAD to the name or address of one node"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(program: Path, variables: dict[str, str], message: str) -> None:
    ended = subprocess.run(
        [program / "launch.sh"], env={**os.environ, **variables}, capture_output=True, text=True, timeout=60
    )

    assert ended.returncode == 2 and message in ended.stderr
    assert ended.stderr.startswith("launch.sh: ") and len(ended.stderr.splitlines()) == 1


def test_launches_of_one_folder_have_files_of_their_own(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the name of the job that their ranks are told: it has the file or the port at which nodes meet."""
    fake = tmp_path / "python3"
    fake.write_text('#!/bin/sh\necho "$@"\n')
    fake.chmod(0o755)
    jobs = []
    for head, port in ((f"{tmp_path}/a b", "1"), (f"{tmp_path}/a", "1"), ("node0", "1"), ("node0", "2")):
        environment = {"HEAD": head, "PORT": port, "JOB": "j", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        command = [program / "launch.sh", "--min-nodes", "1", "--max-nodes", "2", "--checkpoint", "ck"]
        ended = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=60)
        jobs.append(ended.stdout.partition("--rdzv-id ")[2].partition(" --rdzv-backend")[0])
    assert jobs == ["j-a b", "j-a", "j-1", "j-2"]
    notes = []
    monkeypatch.setenv("MASTER_PORT", "7")
    for job, port in (("j-a", "5"), ("j-a-b", "5"), ("j-a", "7")):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
        notes.append(elastic._note(tmp_path / "out", "failed", port))
        notes[-1].touch()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "j-a")
    elastic._remove_notes(tmp_path / "out")
    assert [each.exists() for each in notes] == [False, True, True]


@pytest.mark.slow
def test_nodes_of_a_job_that_has_ended_are_told_so(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise SystemExit(1)\n")
    command = [sys.executable, "-m", "graphpar.runtime.launching.nodes", "--nnodes", "1:2", "--max-restarts", "0"]
    command += ["--rdzv-id", "j", "--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file,last_call_timeout=1"]
    command += ["--rdzv-endpoint", str(tmp_path / "head"), str(tmp_path / "fails.py")]
    first, second = (subprocess.run(command, capture_output=True, text=True, timeout=60) for _ in range(2))
    assert first.returncode == 1
    assert second.returncode == 2 and len(second.stderr.splitlines()) == 1
    assert f"the job j that nodes met for at {tmp_path}/head has ended" in second.stderr
