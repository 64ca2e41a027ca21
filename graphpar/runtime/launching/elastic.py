"""Training that goes on when nodes are lost or come back: a rank runs the program that was planned for as many ranks as there are.

    torchrun --nnodes 3:4 -m graphpar.runtime.launching.elastic OUT OPTIONS
        WORLD_SIZE ──► OUT, or OUT-3dev, planned by rank 0 where it is not there ──► its train.py, from the last checkpoint

Each change of the nodes starts the ranks again. The disk that holds OUT and the checkpoints is shared by all nodes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from graphpar.runtime import distributed
from graphpar.runtime.checkpoints.folders import started
from graphpar.runtime.distributed import USER_ERROR, StopSignal
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.launching.process_supervisor import descendants
from graphpar.runtime.plan_record import read_object

ORIGIN = "resumed.json"
"""The file of a resumed program that says of which program, by a hash, it goes on with the training."""
MISSED_S = 15.0
"""How long a rank whose training was asked to end on another node waits to be ended by torchrun, before it asks to be started again."""
LOST_S = 60.0
"""After how long without a sign of rank 0 it is taken for lost."""
LOOKING_S, WATCHING_S = 0.2, 1.0
STARTS = 5
"""How many times in a row the ranks of one program are started from the same step before training ends."""
TORCHRUN = os.getppid()
SAID_S = 3.0
"""How long a rank that lost another one waits for that to say that training is to end."""


def resumed_folder(out: Path, devices: int) -> Path:
    """Return where the program of ``out`` is planned for other ``devices``: beside it, ``NAME-3dev``."""
    return out.with_name(f"{re.sub(r'-[0-9]+dev$', '', out.resolve().name)}-{devices}dev")


def origin_of(out: Path) -> str:
    """Return a hash of a program: of its plan and of its Python files, which users edit and add to."""
    found = hashlib.sha256()
    for file in (out / "plan.json", *sorted(out.glob("*.py"))):
        found.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()


def is_resumed(folder: Path, out: Path, devices: int) -> bool:
    """Whether ``folder`` holds a program that was made for so many devices to go on with the training of ``out`` as that is now."""
    try:
        found = read_object(folder / ORIGIN)
        return (found.get("origin"), found.get("devices")) == (origin_of(out), devices)
    except (OSError, RuntimeProgramError):
        return False


def ranks_of(program: Path) -> int:
    """Return on how many ranks a program runs."""
    size = 1
    for degree in read_object(program / "plan.json")["mesh"].values():
        size *= int(degree)
    return size


def main(arguments: Sequence[str]) -> None:
    """Run this rank's part of the program for as many ranks as there are; ``arguments``: OUT, and options of its ``train.py``."""
    out, given = Path(arguments[0]), arguments[1:]
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    program = out if ranks == ranks_of(out) else resumed_folder(out, ranks)
    if rank == 0:
        _remove_notes(program)
    if program != out:
        if (out / "weights").is_dir() and not any(each.partition("=")[0] == "--weights" for each in given):
            given = [*given, "--weights", str(out / "weights")]  # which may be others than the model file's
        if rank == 0:
            threading.Thread(target=_say_alive, args=(_note(program, "alive"),), daemon=True).start()
            if not is_resumed(program, out, ranks):
                _plan(out, program, ranks)
        _await(lambda: is_resumed(program, out, ranks), program)
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        threading.Thread(target=_end_with_others, args=(_note(program, "failed"),), daemon=True).start()
    _note_start(program, None)
    used = ranks_of(program)
    if rank >= used:
        _await(_note(program, "ended").is_file, program)
        return
    os.environ["WORLD_SIZE"] = str(used)
    distributed.before_exit = partial(_note_failure, program)
    distributed.after_resume = partial(_note_start, program)
    sys.argv = [str(program / "train.py"), *given]
    sys.path.insert(0, str(program))  # as Python does for a script
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except BaseException as error:  # before the ranks have met, or from outside of their block
        code = error.code if isinstance(error, SystemExit) else 1
        if code == USER_ERROR:  # train.py refuses its options, as it would at any start
            _note(program, "failed").touch()
            _end_torchrun()
        elif code:
            _note_failure(program, f"{type(error).__name__}: {error}", False)
        if code:
            raise
    if StopSignal.ended:
        _await_end()
    elif rank == 0 and used < ranks:
        _note(program, "ended").touch()


def _plan(out: Path, program: Path, ranks: int) -> None:
    """Plan for so many ranks, in a process that has nothing of torchrun's environment."""
    print(f"planning for {ranks} rank{'s' if ranks > 1 else ''} in {program}", flush=True)
    command = [sys.executable, "-m", "graphpar", "resume", str(out), "--devices", str(ranks), "--no-run"]
    usual = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        and not name.startswith(("LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_"))
    }
    planned = subprocess.Popen([*command, "-o", str(program)], env=usual, stdout=subprocess.DEVNULL)
    before = signal.signal(signal.SIGTERM, lambda *_: _end_with(planned.pid))
    if planned.wait():  # it has said why
        _note(program, "failed").touch()
    signal.signal(signal.SIGTERM, before)


def _note(program: Path, what: str, port: str | None = None) -> Path:
    """Return the file by which rank 0 tells the others something; each start of the ranks has a port, and so files, of its own."""
    job, port = os.environ.get("TORCHELASTIC_RUN_ID", ""), port or os.environ["MASTER_PORT"]
    return program.with_name(f".{program.name}.{what}-{re.sub(r'[^A-Za-z0-9-]', '_', job)}-{port}")


def _remove_notes(program: Path) -> None:
    """Remove what was told at earlier starts of this launch; files of another job may begin with the same name."""
    for what in ("alive", "ended", "failed"):
        for old in program.parent.glob(_note(program, what, "*").name):
            port = old.name.rpartition("-")[2]
            if port != os.environ["MASTER_PORT"] and old == _note(program, what, port):
                old.unlink(missing_ok=True)


def _say_alive(note: Path) -> None:
    while True:
        note.touch()
        time.sleep(1)


def _await(done: Callable[[], bool], program: Path) -> None:
    """Wait for rank 0. Where it can't plan, no other start helps, so torchrun is ended on all nodes; where it is lost, the ranks are
    started again."""
    alive, failed = _note(program, "alive"), _note(program, "failed")
    seen, since = 0, time.monotonic()
    while not done():
        if failed.exists():
            _end_torchrun()
            raise SystemExit(USER_ERROR)
        if (now := alive.stat().st_mtime_ns if alive.exists() else 0) != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > LOST_S:
            raise SystemExit(1)
        time.sleep(LOOKING_S)


class _Begun:
    """From which step this start of the ranks goes on; None until that is known."""

    step: int | None = None


def _note_start(program: Path, step: int | None) -> None:
    """Count the starts from one step: ranks that are killed, or end without an error, are started again only as long as that may help."""
    _Begun.step = step
    if int(os.environ["RANK"]):
        return
    noted, launch = _note(program, "starts", "last"), f"{socket.gethostname()} {TORCHRUN} {started(TORCHRUN)}"
    before: dict[str, Any] = {}
    with contextlib.suppress(OSError, RuntimeProgramError):
        before = read_object(noted)
    if before.get("launch") != launch:
        before = {"step": 0, "count": 0}
    if step is None:
        step, count = before["step"], before["count"] + 1
    else:
        count = before["count"] if step <= before["step"] else 1
    noted.write_text(json.dumps({"launch": launch, "step": step, "count": count}), encoding="utf-8")
    if count > STARTS:
        _end_all(program, f"{STARTS} times ranks were started from step {step} and did not come to a later one")
        raise SystemExit(USER_ERROR)


def _note_failure(program: Path, error: str, lost: bool) -> None:
    """Let torchrun start the ranks again, as long as that may help: an error that comes a second time after a start from the same step
    ends it on all nodes."""
    failed = _note(program, "failed")
    if lost:
        deadline = time.monotonic() + SAID_S
        while not failed.exists() and time.monotonic() < deadline:
            time.sleep(LOOKING_S)
    elif not failed.exists():
        noted, own = _note(program, "error", "last"), os.environ["MASTER_PORT"]
        now = f"{_Begun.step}\n{re.sub('[0-9]+', '', error)}"  # numbers such as ranks and addresses differ
        start, _, before = noted.read_text(encoding="utf-8").partition("\n") if noted.is_file() else ("", "", "")
        if start == own:  # another rank has noted its own
            return
        if before == now:
            _end_all(program, "the same error came twice after a start from the same step")
            return
        noted.write_text(f"{own}\n{now}", encoding="utf-8")
    if failed.exists():
        _end_torchrun()


def _end_all(program: Path, why: str) -> None:
    """End training on all nodes."""
    _note(program, "failed").touch()
    print(f"{why}, so training ends on all nodes", file=sys.stderr, flush=True)
    _end_torchrun()


def _end_torchrun() -> None:
    """End it on this node; this process goes on until it has said why."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.getppid() == TORCHRUN:  # it may have been killed
        os.kill(TORCHRUN, signal.SIGTERM)


def _end_with_others(failed: Path) -> None:
    """End torchrun on this node, too, where a rank of another one has found that training is to end."""
    while not failed.exists():
        time.sleep(WATCHING_S)
    if os.getppid() == TORCHRUN:
        os.kill(TORCHRUN, signal.SIGTERM)


def _end_with(planner: int) -> None:
    """End this process and what it has started."""
    for pid in [*descendants(planner), planner]:
        os.kill(pid, signal.SIGTERM)
    os._exit(1)


def _await_end() -> None:
    """Wait to be ended with the others, where training ended to be started again; a rank that was itself told to is already."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if not StopSignal.noted:
        time.sleep(MISSED_S)
        raise SystemExit(1)  # the node that was told to end has left: torchrun starts the others again


if __name__ == "__main__":
    main(sys.argv[1:])
