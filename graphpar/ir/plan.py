"""``Plan``: every decision, in one serialisable record. Plan and Program determine the output byte for byte."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphpar.display import as_page, as_text
from graphpar.errors import GraphparError
from graphpar.hardware.cluster import Cluster
from graphpar.ir.mesh import Mesh
from graphpar.ir.precision import Precision, check_dtype
from graphpar.ir.recomputation import Recompute
from graphpar.ir.sharding import Sharding
from graphpar.ir.split_points import SplitAt, SplitPoint
from graphpar.runtime.axes import DROPOUTS, REPLICAS, ZERO1_BY
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.layout import R, Shard, Type
from graphpar.runtime.plan_record import PROGRAM_FIELDS, VERSION, PlanRecord, Record, StageRecord, read_object
from graphpar.text import plural, seconds_text

if TYPE_CHECKING:
    from graphpar.cost_models.estimates import Alone, Estimate
    from graphpar.passes.planning.candidates import SearchResult
    from graphpar.passes.sharding.shard import Sharded


@dataclass(frozen=True)
class Plan:
    """What graphpar decided.

    Attributes:
        split_points: where stages begin, after the first.
        dtype, param_dtype: of the computation, and of the parameters as they are stored and stepped; see :class:`Precision`.
        reduce_dtype: in which gradients are summed over replicas; None: that of each parameter.
        actions: the schedule's table, one tuple of cells for each rank, where torch's class of the schedule does not run it: the user's
            own, and with sharded state.
        reshard: when gathered parameters are freed, see :func:`~graphpar.passes.planning.sharded_state.check_reshard`.
        fully_sharded: the parameters of which each rank of dp_shard and cp stores a shard (ZeRO 2 and 3).
        prefetch, prefetch_distance: when ZeRO-3 gathers parameters ahead of a backward (of :data:`PREFETCH`; None where it has no gather
            of its own), and of how many units.
        recompute: which blocks run their forward again in the backward, see :mod:`graphpar.passes.planning.recomputation`.
        overlap_tp: whether collectives of tp run in pieces beside the products that need them, see :mod:`graphpar.emitted.ring_products`.
        offload: what lives in the memory of the host, of :data:`~graphpar.runtime.axes.OFFLOADS`, in that order.
        compile: whether ``torch.compile`` is to compile the blocks: schedule and recomputation allow it, and it is priced so. What is
            emitted is the same.
        dropout: how attention draws its dropout, of :data:`~graphpar.runtime.axes.DROPOUTS`.
        dp_mean: whether the loss is the mean of the replicas' own losses, as DDP has it, and not that of the global batch.
        sharding: how every operator is sharded.
        cluster: the hardware that it was decided for; None where only a mesh is known.
        predicted: time and memory of a step on ``cluster``. This and the following are not part of the plan's data.
        found: the other plans that the search saw.
        alone: the same step on one device.
        sharded: the program of one rank, as the search made it.
    """

    model: str
    mode: str
    mesh: Mesh
    schedule: str
    global_batch: int
    microbatch_size: int
    split_points: tuple[SplitAt, ...]
    stages: tuple[StageRecord, ...]
    dtype: str = "fp32"
    param_dtype: str = "fp32"
    reduce_dtype: str | None = None
    actions: tuple[tuple[str, ...], ...] | None = None
    zero: int = 0
    zero1_by: str = ZERO1_BY[0]
    reshard: str | int = "default"
    fully_sharded: frozenset[str] = frozenset()
    prefetch: str | None = None
    prefetch_distance: int = 0
    recompute: Recompute = "none"
    overlap_tp: bool = False
    offload: tuple[str, ...] = ()
    compile: bool = False
    allow_batch_coupling: bool = False
    dp_mean: bool = False
    dropout: str = DROPOUTS[0]
    sharding: Sharding = field(default_factory=Sharding)
    cluster: Cluster | None = None
    warnings: tuple[str, ...] = field(default=(), compare=False)
    predicted: Estimate | None = field(default=None, compare=False, repr=False)
    found: SearchResult | None = field(default=None, compare=False, repr=False)
    alone: Alone | None = field(default=None, compare=False, repr=False)
    sharded: Sharded | None = field(default=None, compare=False, repr=False)

    @property
    def precision(self) -> Precision:
        """The dtypes that the program was traced for."""
        return Precision(self.dtype, self.param_dtype)

    @property
    def microbatches(self) -> int:
        """How many microbatches each rank runs in a step."""
        return self.global_batch // (self.microbatch_size * self.mesh.replicas)

    def parameters(self) -> dict[str, dict[str, str]]:
        """Return the types of stored parameters by name, on every axis of several ranks but pp. Not listed: R on replicas, I elsewhere."""
        return {name: {axis: str(kind) for axis, kind in spec.items()} for name, spec in self._types().items()}

    def _types(self) -> dict[str, dict[str, Type]]:
        replicated: dict[str, Type] = {axis: R for axis in REPLICAS if self.mesh.degrees()[axis] > 1}
        types = {name: {**replicated, **spec} for name, spec in self.sharding.parameters.items()}
        for name in self.fully_sharded:
            types[name] = {**types.get(name, replicated), "dp_shard": Shard(0)}
        return dict(sorted(types.items()))

    @property
    def stages_per_rank(self) -> int:
        """How many stages each pp rank holds."""
        return len(self.stages) // self.mesh.pp

    def to_json(self) -> dict[str, Any]:
        """Convert to plain data; :meth:`from_json` is its inverse."""
        actions = None if self.actions is None else tuple(tuple(cell or None for cell in row) for row in self.actions)
        record = PlanRecord(
            self.mode,
            self.mesh.degrees(),
            self.schedule,
            self.microbatches,
            self.microbatch_size,
            self.global_batch,
            self.stages,
            self._types(),
            actions,
        )
        return {
            **record.to_json(),
            "model": self.model,
            "dtype": self.dtype,
            "param_dtype": self.param_dtype,
            "reduce_dtype": self.reduce_dtype,
            "cluster": None if self.cluster is None else self.cluster.to_json(),
            "zero": self.zero,
            "zero1_by": self.zero1_by,
            "reshard": self.reshard,
            "prefetch": self.prefetch,
            "prefetch_distance": self.prefetch_distance,
            "recompute": self.recompute if isinstance(self.recompute, str) else dict(self.recompute),
            "overlap_tp": self.overlap_tp,
            "offload": list(self.offload),
            "compile": self.compile,
            "allow_batch_coupling": self.allow_batch_coupling,
            "dp_mean": self.dp_mean,
            "dropout": self.dropout,
            "split": [{"path": point.path, "where": point.where.value} for point in self.split_points],
            "sharding": self.sharding.to_json(),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any], where: str = "This plan") -> Plan:
        """Read the dictionary that :meth:`to_json` returned; ``where`` names it in errors.

        Raises:
            GraphparError: it is no such dictionary, is of another version, or lacks a field.
        """
        if not isinstance(data, Mapping):
            what = "text: parse it with json.loads first" if isinstance(data, str) else f"a {type(data).__name__}"
            raise GraphparError(f"Plan.from_json takes the dictionary that plan.to_json() returns, and got {what}.")
        try:
            plan = Record(dict(data), where)
            if data.get("version") == VERSION:
                plan.only(FIELDS)
            record = PlanRecord.read(plan)
            cluster = plan.optional("cluster", dict, None)
            read = Plan(
                model=plan.get("model", str),
                mode=record.mode,
                **_dtypes(plan, record.mode),
                mesh=Mesh(**record.mesh),
                schedule=record.schedule,
                global_batch=record.global_batch,
                microbatch_size=record.microbatch_size,
                split_points=tuple(_split_point(entry) for entry in plan.records("split")),
                stages=record.stages,
                actions=None
                if record.actions is None
                else tuple(tuple(cell or "" for cell in row) for row in record.actions),
                zero=plan.optional("zero", int, 0),
                zero1_by=plan.optional("zero1_by", str, ZERO1_BY[0]),
                reshard=plan.optional("reshard", (str, int), "default"),
                fully_sharded=frozenset(
                    name for name, spec in record.parameters.items() if isinstance(spec.get("dp_shard"), Shard)
                ),
                prefetch=plan.optional("prefetch", str, None),
                prefetch_distance=plan.optional("prefetch_distance", int, 0),
                recompute=plan.optional("recompute", (str, dict), "none"),
                overlap_tp=plan.optional("overlap_tp", bool, False),
                offload=plan.strings("offload"),
                compile=plan.optional("compile", bool, False),
                allow_batch_coupling=plan.optional("allow_batch_coupling", bool, False),
                dp_mean=plan.optional("dp_mean", bool, False),
                dropout=plan.optional("dropout", str, DROPOUTS[0]),
                sharding=Sharding.from_json(plan.record("sharding"), record.parameters)
                if plan.has("sharding")
                else Sharding(),
                cluster=None if cluster is None else _cluster(cluster, where),
            )
            _check_same(read, record)
            return read
        except RuntimeProgramError as error:
            raise GraphparError(f"{error}".removesuffix(".") + ".") from error

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read ``plan.json``, or that of a folder.

        Raises:
            GraphparError: there is none, or it is not a plan.
        """
        file = Path(path)
        if file.is_dir():
            file = file / "plan.json"
        if not file.exists():
            raise GraphparError(f"There is no plan at {file}.")
        try:
            return Plan.from_json(read_object(file), str(file))
        except ValueError as error:
            raise GraphparError(f"{error}" if str(file) in str(error) else f"{file}: {error}") from error

    def __repr__(self) -> str:
        degrees = ", ".join(f"{axis}={degree}" for axis, degree in self.mesh.degrees().items() if degree > 1)
        degrees = degrees or "1 device"
        step = ""
        if self.predicted is not None:
            step = f", {seconds_text(self.predicted.step_time_s)} a step on {self.predicted.cluster}"
        batches = f"{plural(self.microbatches, 'microbatch', 'microbatches')} of {self.microbatch_size}"
        return f"Plan({self.model}, {self.mode}, {degrees}, {self.schedule}, {batches}{step})"

    def _repr_html_(self) -> str:
        return as_page(self)

    def __str__(self) -> str:
        return as_text(self)


def _check_same(plan: Plan, record: PlanRecord) -> None:
    """Check what a plan's record says of it besides its decisions.

    Raises:
        GraphparError: it is not what follows from these.
    """
    ranks = plan.microbatch_size * plan.mesh.replicas
    if ranks > 0 and plan.global_batch % ranks == 0 and record.microbatches != plan.microbatches:
        replicas = f" on each of {plan.mesh.replicas} replicas" if plan.mesh.replicas > 1 else ""
        raise GraphparError(
            f"The plan contradicts itself: microbatches is {record.microbatches}, but a global batch of {plan.global_batch} in "
            f"microbatches of {plan.microbatch_size}{replicas} gives {plan.microbatches}."
        )
    types = plan._types()
    replicated: dict[str, Type] = {axis: R for axis in REPLICAS if plan.mesh.degrees()[axis] > 1}
    for name, stored in record.parameters.items():
        follows = types.get(name, replicated)
        if stored != follows:
            raise GraphparError(
                f"The plan contradicts itself: {name} is stored as {_spec_text(stored)}, but on the axes of its mesh and sharding "
                f"that is {_spec_text(follows)}."
            )


def _spec_text(spec: Mapping[str, Type]) -> str:
    return ", ".join(f"{kind}@{axis}" for axis, kind in spec.items()) or "nothing"


def _dtypes(plan: Record, mode: str) -> dict[str, Any]:
    given = {name: plan.optional(name, (str, type(None)), None) for name in ("dtype", "param_dtype", "reduce_dtype")}
    for name, value in given.items():
        check_dtype(f"{plan.where}: {name}", value)
    precision = Precision.of(given["dtype"], None, given["param_dtype"]).resolved(mode)
    return {"dtype": precision.dtype, "param_dtype": precision.param_dtype, "reduce_dtype": given["reduce_dtype"]}


def _cluster(data: Mapping[str, Any], where: str) -> Cluster:
    try:
        return Cluster.from_json(data)
    except GraphparError as error:
        raise GraphparError(f"{where}, cluster: {error}") from None


def _split_point(entry: Record) -> SplitAt:
    where = entry.get("where", str)
    if where not in [point.value for point in SplitPoint]:
        raise GraphparError(f"{entry.where}: where is {where!r}; it must be 'beginning' or 'end'.")
    return SplitAt(entry.get("path", str), SplitPoint(where))


_SMALLEST = Plan("", "train", Mesh(), "GPipe", 1, 1, (), ())
FIELDS = (*_SMALLEST.to_json(), *PROGRAM_FIELDS, "report")
"""The fields of ``plan.json``: those of a plan, what an emitted program has besides, and a report that is no longer read."""
