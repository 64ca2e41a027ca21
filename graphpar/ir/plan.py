"""``Plan``: every decision, in one serialisable record. Plan and Program determine the output byte for byte."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from graphpar.errors import GraphparError
from graphpar.hardware.cluster import Cluster
from graphpar.ir.precision import Precision
from graphpar.ir.sharding import Sharding
from graphpar.ir.split_points import SplitAt, SplitPoint
from graphpar.runtime.axes import REPLICAS
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.layout import R, Shard, Type
from graphpar.runtime.mesh import Mesh
from graphpar.runtime.options import Decisions, decided
from graphpar.runtime.plan_record import PROGRAM_FIELDS, VERSION, PlanRecord, StageRecord, read_object
from graphpar.runtime.records import Record
from graphpar.text import as_page, as_text, plural


@dataclass(frozen=True, kw_only=True)
class Plan(Decisions):
    """What graphpar decided: all :class:`~graphpar.runtime.options.Decisions`, and what follows.

    Attributes:
        split_points: where stages begin, after the first.
        actions: the schedule's table, one tuple of cells for each rank, where torch's class of the schedule does not run it: the user's
            own, and with sharded state.
        fully_sharded: the parameters of which each rank of dp_shard and cp stores a shard (ZeRO 2 and 3), with the dim that is divided.
        sharding: how every operator is sharded.
        cluster: the hardware that it was decided for; None where only a mesh is known.
    """

    model: str
    mode: str
    mesh: Mesh
    split_points: tuple[SplitAt, ...]
    stages: tuple[StageRecord, ...]
    actions: tuple[tuple[str, ...], ...] | None = None
    fully_sharded: Mapping[str, int] = field(default_factory=dict)
    sharding: Sharding = field(default_factory=Sharding)
    cluster: Cluster | None = None

    @property
    def precision(self) -> Precision:
        """The dtypes that the program was traced for."""
        return Precision(
            self.dtype,
            self.param_dtype,
            self.output_dtype or "",
            tuple(self.keep_fp32 or ()),
            tuple(self.fp8 or ()),
            self.fp8_recipe or "",
        )

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
        for name, dim in self.fully_sharded.items():
            types[name] = {**types.get(name, replicated), "dp_shard": Shard(dim)}
        return dict(sorted(types.items()))

    @property
    def stages_per_rank(self) -> int:
        """How many stages each pp rank holds."""
        return len(self.stages) // self.mesh.pp

    def to_json(self) -> dict[str, Any]:
        """Convert to plain data; :meth:`from_json` is its inverse."""
        actions = None if self.actions is None else tuple(tuple(cell or None for cell in row) for row in self.actions)
        record = PlanRecord(self.mode, self.mesh, self.microbatches, self.stages, self._types(), actions, decided(self))
        return {
            **record.to_json(),
            "model": self.model,
            "cluster": None if self.cluster is None else self.cluster.to_json(),
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
            raise GraphparError(f"Plan.from_json takes the dictionary that plan.to_json() returns, but got {what}.")
        try:
            plan = Record(dict(data), where)
            if data.get("version") == VERSION:
                plan.only(FIELDS)
            record = PlanRecord.read(plan)
            cluster = plan.optional("cluster", dict, None)
            read = Plan(
                model=plan.get("model", str),
                mode=record.mode,
                mesh=record.mesh,
                split_points=tuple(
                    _split_point(entry) for entry in (plan.records("split") if plan.has("split") else ())
                ),
                stages=record.stages,
                actions=None
                if record.actions is None
                else tuple(tuple(cell or "" for cell in row) for row in record.actions),
                fully_sharded={
                    name: kind.dim
                    for name, spec in record.parameters.items()
                    if isinstance(kind := spec.get("dp_shard"), Shard)
                },
                sharding=replace(
                    Sharding.from_json(plan.record("sharding"), record.parameters)
                    if plan.has("sharding")
                    else Sharding(),
                    expert_room=record.decisions["expert_room"],
                ),
                cluster=None if cluster is None else _cluster(cluster, where),
                **record.decisions,
            )
            _check_same(read, record)
            return read
        except RuntimeProgramError as error:
            text = str(error)
            raise GraphparError(text if text.endswith((".", "?")) else f"{text}.") from error

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
        batches = f"{plural(self.microbatches, 'microbatch', 'microbatches')} of {self.microbatch_size}"
        return f"Plan({self.model}, {self.mode}, {degrees}, {self.schedule}, {batches})"

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


_SMALLEST = Plan(model="", mode="train", mesh=Mesh(), global_batch=1, microbatch_size=1, split_points=(), stages=())
FIELDS = (*_SMALLEST.to_json(), *PROGRAM_FIELDS, "report")
"""The fields of ``plan.json``: those of a plan, what an emitted program has besides, and a report that is no longer read."""
