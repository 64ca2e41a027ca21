"""The Python API: export, plan, estimate, partition, verify, check.

program = export(model, args, kwargs, loss_fn, targets)     trace and normalize
plan    = plan(program, cluster, mesh=..., schedule=...)    decide
seconds = estimate(program, plan).step_time_s               predict
parts   = partition(program, plan)                          the emitted package, in memory
parts.save("out/");  verify(parts);  check(parts)
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from graphpar.capture import ModelLike, capture
from graphpar.cluster import Cluster
from graphpar.codegen.package import emit_package, import_stage
from graphpar.cost_models.estimates import Estimate
from graphpar.cost_models.execution import Execution
from graphpar.errors import GraphparError
from graphpar.mesh import Mesh
from graphpar.passes.choose import Pins, choose
from graphpar.passes.given import check_model, given_plan
from graphpar.passes.planner import FREE_AXES, SHOWN
from graphpar.passes.planning import estimate_plan, search_plan
from graphpar.passes.shard import shard
from graphpar.passes.split import Stage, positions_of, split
from graphpar.passes.table import Pass, run_passes
from graphpar.plans import Plan, cuts_of
from graphpar.program import Program

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export(
    model: ModelLike,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    loss_fn: Callable[..., Any] | None = None,
    targets: Sequence[Any] = (),
    batch_dims: Mapping[str, int | None] | None = None,
    *,
    mode: str | None = None,
    dtype: str | None = None,
    after_pass: Callable[[Pass, Program], None] | None = None,
) -> Program:
    """Trace a single-device model into a :class:`Program`.

    Args:
        model: an ``nn.Module``, or a function without arguments that returns one (built under fake tensors: no memory).
        args, kwargs: example inputs of the global batch (any size); they show shapes and dtypes.
        loss_fn: ``loss_fn(output, *targets) -> scalar``. Without it the model's own scalar output or ``loss`` is used;
            with neither, the program is for inference.
        targets: example targets for ``loss_fn``.
        batch_dims: ``{input name: dim or None}`` for inputs whose batch is not on dim 0.
        mode: "train" or "infer"; sets the modules' mode. By default they stay as they are built.
        dtype: "fp32", "bf16" or "fp16": the default dtype while a factory builds the model.
        after_pass: called with each pass and the program after it.

    Raises:
        GraphparError: the model can't be traced, or a trace would lose part of its meaning.
    """
    if dtype is not None and dtype not in DTYPES:
        raise GraphparError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}.")
    raw = capture(
        model,
        args,
        kwargs,
        loss_fn=loss_fn,
        targets=targets,
        batch_dims=batch_dims,
        mode=mode,
        dtype=DTYPES[dtype] if dtype else None,
    )
    program, _ = run_passes(raw, after=after_pass)
    if raw.retrace is not None:
        retrace, source = raw.retrace, program.source

        def at_size(size: int) -> Program:
            again = run_passes(retrace(size))[0]
            again.source = source
            return again

        program.retrace = at_size
    return program


def plan(
    program: Program,
    cluster: Cluster | int | None = None,
    *,
    devices: int | None = None,
    global_batch: int | None = None,
    mesh: Mapping[str, int] | None = None,
    schedule: str | None = None,
    microbatch_size: int | None = None,
    split: Sequence[str | Mapping[str, str]] | Mapping[str, Any] | Callable[[Program], Sequence[str]] | None = None,
    stages: Sequence[Sequence[str]] | None = None,
    layers_per_stage: int | None = None,
    edge_layers: tuple[int, int] | None = None,
    table: str | None = None,
    shard_plan: Mapping[str, Any] | None = None,
    allow_batch_coupling: bool = False,
    dtype: str = "fp32",
    top: int = SHOWN,
) -> Plan:
    """Decide how to run ``program`` on ``cluster``; what is given is taken as it is.

    Args:
        cluster: the hardware, or how many devices of this machine's kind. The axes pp, dp_replicate and tp that ``mesh`` leaves out are
            searched, and so are the schedule and the microbatch size: the fastest plan that fits is taken.
        devices: how many devices, by name.
        global_batch: rows of the whole batch; by default that of the example inputs.
        mesh: degrees of axes, e.g. ``{"pp": 4}``. Without a cluster or a number of devices, the other axes are 1 and the schedule and
            the microbatches are the usual ones.
        split: split points, e.g. ``["layers.4"]``, ``[{"layers.3": "end"}]`` or ``{"layers.3": SplitPoint.END}``; ``["layers.*"]``
            spreads the layers evenly; a function of the program returns such a list. Without any, ``pipe_split()`` calls in the
            model's forward count, else stages are searched (with a mesh alone, balanced by flops).
        stages: instead of split points, the modules of each stage.
        layers_per_stage, edge_layers: instead, how many layers a stage has, and how many layers the parts before and after
            them count as.
        table: a schedule of one's own as CSV text, one row a rank: ``0F0,0F1,0B0,0B1``.
        shard_plan: how parameters, inputs and outputs of modules lie, by pattern; see :mod:`graphpar.annotations`.
        allow_batch_coupling: accept operators that mix examples (BatchNorm takes each microbatch's statistics).
        top: how many of the plans that were not taken are kept in ``plan.found``.
    """
    count = _device_count(cluster, devices)
    if count is None and not mesh:
        count = 1
    pins = Pins(
        schedule=schedule,
        microbatch_size=microbatch_size,
        global_batch=global_batch,
        cuts=None if split is None else cuts_of(split(program) if callable(split) else split),
        stages=None if stages is None else tuple(tuple(paths) for paths in stages),
        table=table,
        allow_batch_coupling=allow_batch_coupling,
        dtype=dtype,
        layers_per_stage=layers_per_stage,
        edge_layers=edge_layers,
        shard_plan=shard_plan,
        cluster=cluster if isinstance(cluster, Cluster) else None,
    )
    given = Mesh.pinned(mesh, count)
    if table is not None and "pp" not in given:
        given["pp"] = len(table.strip().splitlines())
    alone = not given and not isinstance(cluster, Cluster) and count == 1
    complete = bool(given) and count in (None, math.prod(given.values()))
    if table is not None or alone or complete or set(FREE_AXES) <= set(given):
        chosen = choose(program, Mesh.resolve(given, count), pins)
        return chosen if pins.cluster is None else replace(chosen, predicted=estimate_plan(program, chosen, pins.cluster))
    assert count is not None  # without it the mesh is complete
    hardware = cluster if isinstance(cluster, Cluster) else Cluster.of_this_machine(count)
    return search_plan(program, hardware, given, pins, top)


def _device_count(cluster: Cluster | int | None, devices: int | None) -> int | None:
    """How many devices both say; None where neither does."""
    count = cluster.size if isinstance(cluster, Cluster) else cluster
    if count is not None and devices is not None and count != devices:
        what = f"the cluster {cluster} has" if isinstance(cluster, Cluster) else "the second argument says"
        raise GraphparError(f"devices is {devices}, but {what} {count}; leave one of them out.")
    return devices if count is None else count


@dataclass
class Parts:
    """A partitioned program: its plan, its stages, the text of the emitted package, and the data of its report."""

    program: Program
    plan: Plan
    stages: list[Stage]
    files: dict[str, str]
    constants: dict[str, Tensor]
    report: dict[str, Any]
    model_file: str | None = None
    _folder: Any = field(default=None, repr=False)

    def save(self, folder: str | Path, weights: Mapping[str, Tensor] | None = None) -> Path:
        """Write the package to ``folder`` (made new, replaced as a whole); ``weights`` by state_dict name go with it."""
        from safetensors.torch import save_file

        target = Path(folder)
        if target.exists() and any(target.iterdir()) and not (target / "plan.json").exists():
            raise GraphparError(
                f"{target} exists and holds something else than a graphpar program; choose another folder."
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            for name, text in self.files.items():
                (scratch / name).write_text(text)
            if self.constants:
                save_file(
                    {name: value.contiguous() for name, value in self.constants.items()},
                    scratch / "constants.safetensors",
                )
            if weights is not None:
                (scratch / "weights").mkdir()
                save_file(untied(weights), scratch / "weights" / "model.safetensors")
            if target.exists():
                shutil.rmtree(target)
            scratch.rename(target)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        target.chmod(0o755)
        return target

    @cached_property
    def folder(self) -> Path:
        """The package on disk, in a temporary folder that goes away with this object."""
        self._folder = tempfile.TemporaryDirectory(prefix="graphpar-")
        return self.save(Path(self._folder.name) / "out")

    def stage(self, rank: int) -> nn.Module | list[nn.Module]:
        """The emitted stage module of pp rank ``rank`` on the meta device (a list where the rank holds several)."""
        indices = [stage.index for stage in self.plan.stages if stage.rank == rank]
        if not indices:
            raise GraphparError(f"There is no rank {rank}; the plan has ranks 0 to {self.plan.mesh.pp - 1}.")
        modules = [import_stage(self.folder, index) for index in indices]
        return modules[0] if len(modules) == 1 else modules


def untied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tied tensors under their first name only: a safetensors file holds no shared memory."""
    seen: set[tuple[int, Any, tuple[int, ...]]] = set()
    kept: dict[str, Tensor] = {}
    for name, value in weights.items():
        key = (value.untyped_storage().data_ptr(), value.storage_offset(), tuple(value.shape))
        if key in seen and value.numel():
            continue
        seen.add(key)
        kept[name] = value.detach().contiguous().clone()
    return kept


def partition(program: Program, plan: Plan, *, model_file: str | None = None) -> Parts:
    """Split ``program`` as ``plan`` says and print the stage modules."""
    check_model(program, plan)
    sized = shard(program.at_batch(plan.microbatch_size), plan.sharding)
    stages = split(sized, positions_of(sized, plan.cuts))
    package = emit_package(sized, plan, stages, model_file)
    return Parts(sized, plan, stages, package.files, package.constants, package.report, model_file)


def estimate(program: Program, plan: Plan, cluster: Cluster | None = None, execution: Execution | None = None) -> Estimate:
    """What a training step (or a batch of inference) of ``plan`` takes: seconds, communication, memory.

    Args:
        cluster: by default the plan's own, or else as many devices of this machine's kind.
        execution: how the program is run, where it is not as graphpar emits it: fused kernels, optimizer, overlap.

    Raises:
        GraphparError: the plan is for another program, contradicts itself, or is for another number of devices.
    """
    hardware = cluster or plan.cluster or Cluster.of_this_machine(plan.mesh.size)
    return estimate_plan(program, given_plan(program, plan), hardware, execution)


def verify(parts: Parts | str | Path, steps: int = 3, **options: Any) -> Any:
    """Run the emitted program on local processes against the unpartitioned model. See :mod:`graphpar.verification`."""
    from graphpar.verification import verify_parts

    return verify_parts(parts, steps=steps, **options)


def check(parts: Parts | str | Path) -> Any:
    """Check the types of the emitted program in this process, at its world size. See :mod:`graphpar.type_check`."""
    from graphpar.type_check import check_folder

    return check_folder(parts.folder if isinstance(parts, Parts) else parts)
