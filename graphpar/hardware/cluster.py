"""``Cluster``: the hardware that a plan is for: equal devices in nodes, nodes in pods, these in larger pods, with a link at each level.

    "2x8xH100-SXM-80GB" or a file ──parse──► Cluster ──graphpar.cost_models.collectives.Network──► seconds of collectives

Ranks fill the nodes in order, and nodes the pods, so the inner axes of a mesh stay inside a node, and then a pod, where they fit. A link's
bandwidth is that of one device: between nodes, the adapters of a node divided by its devices; between pods, its share of what leaves a pod.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
import tomllib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from graphpar.errors import GraphparError, near_match
from graphpar.hardware import this_machine
from graphpar.hardware.devices import DEVICES, HOST_S, Device, Link, check_number, device_named
from graphpar.hardware.mixed_devices import best_device, best_link

_TEXT = re.compile(r"(?:(?P<first>\d+)x)?(?:(?P<second>\d+)x)?(?P<device>[a-z][\w -]*)", re.IGNORECASE)
_FILE = re.compile(r"(?:(?P<first>\d+)x)?(?:(?P<second>\d+)x)?(?P<file>.+\.(?:json|toml))", re.IGNORECASE)
_PROFILE = ("graphpar", "machine", "disturbed", "error", "measured")
"""Fields of a profile of ``graphpar calibrate`` besides those of a cluster."""
_LINKS = ("intra_node", "inter_node")
_LEAST_FIGURE = 1e5
"""No device has fewer bytes, bytes a second or flop/s: a smaller figure of a file is in another unit."""
_WIRES = ("pair_bytes_per_s", "in_switch", "send_latency_s")
HEADROOM = 0.05
"""The share of a GPU's memory that plans leave free: by about as much predictions of published runs' memory are off (docs/planning.md)."""
_Record = TypeVar("_Record", Device, Link, "Pod")


@dataclass(frozen=True)
class Pod:
    """``nodes`` that the link one level further in connects, and the ``link`` of their devices to those of other pods.

    ``rails``: each switch inside connects the devices of one place in their nodes; those of different places meet outside only.
    """

    nodes: int
    link: Link
    rails: bool = False

    def __post_init__(self) -> None:
        check_number("nodes", self.nodes, whole=True)
        if not isinstance(self.rails, bool):
            raise GraphparError(f"rails is {self.rails!r}; it must be true or false.")


class Level(NamedTuple):
    """Parts of a cluster of ``devices`` each, their name, and the link between them; ``rails``: as of a pod."""

    name: str
    devices: int
    link: Link
    rails: bool = False


@dataclass(frozen=True)
class Cluster:
    """``nodes`` of ``devices_per_node`` devices each. Figures are peaks; cost models take shares of them.

    Attributes:
        host_memory_bytes: what a host has for what its devices offload; None: not known.
        headroom: the share of a device's memory that plans leave free; None: nothing is said, and a request takes what is usual.
        pods: from the inside out; nodes that are in none are all connected by ``inter_node``.
        devices_per_host: how many devices of a node one host runs; None: as many as is usual for the device.
        groups: of devices of several kinds, in the order of ranks. Then other figures are the best of each, which bound what groups do:
            what they are priced with is in ``kinds``.
    """

    nodes: int
    devices_per_node: int
    device: Device
    intra_node: Link
    inter_node: Link
    host_memory_bytes: int | None = None
    headroom: float | None = None
    pods: tuple[Pod, ...] = ()
    devices_per_host: int | None = None
    groups: tuple[Cluster, ...] = ()

    def __post_init__(self) -> None:
        check_number("nodes", self.nodes, whole=True)
        check_number("devices_per_node", self.devices_per_node, whole=True)
        if self.host_memory_bytes is not None:
            check_number("host_memory_bytes", self.host_memory_bytes, whole=True)
        if self.headroom is not None:
            check_number("headroom", self.headroom, zero=True)
            if self.headroom >= 1:
                raise GraphparError(f"headroom is {self.headroom}; it must be below 1.")
        for inner, outer in itertools.pairwise(self.pods):
            if outer.nodes % inner.nodes or outer.nodes == inner.nodes:
                raise GraphparError(
                    f"pods of {outer.nodes} nodes don't consist of pods of {inner.nodes}; list them from the inside out."
                )
            if outer.rails:
                raise GraphparError("rails are of the innermost pods alone.")
        if self.devices_per_host is not None:
            check_number("devices_per_host", self.devices_per_host, whole=True)
            if self.devices_per_node > self.devices_per_host and self.devices_per_node % self.devices_per_host:
                raise GraphparError(
                    f"devices_per_host is {self.devices_per_host}, which does not divide devices_per_node, {self.devices_per_node}."
                )

    def with_headroom(self, share: float | None = None) -> Cluster:
        """Return it with what plans leave free: ``share``, else its own, else :data:`HEADROOM` of GPUs."""
        own = self.headroom if self.headroom is not None or self.device.kind == "cpu" else HEADROOM
        return replace(self, headroom=own if share is None else share)

    @property
    def room_bytes(self) -> int:
        """What a plan may take of a device's memory."""
        return int(self.device.memory_bytes * (1 - (self.headroom or 0.0)))

    @property
    def size(self) -> int:
        """The number of devices."""
        return self.nodes * self.devices_per_node

    @property
    def kinds(self) -> tuple[Cluster, ...]:
        """The cluster as it would be of the devices of each group alone."""
        if not self.groups:
            return (self,)
        links = [
            {name: getattr(each, name) for name in ("device", *_LINKS, "host_memory_bytes")} for each in self.groups
        ]
        return tuple(replace(self, **given, groups=()) for given in links)

    def kinds_of_stages(self, stages: int, ranks: int) -> tuple[int, ...] | None:
        """Return of which of ``kinds`` the devices of each of so many stages of ``ranks`` are; None where some stage has two."""
        if not self.groups:
            return (0,) * stages if stages * ranks <= self.size else None
        ends = list(itertools.accumulate(each.size for each in self.groups))
        places = [
            (bisect_right(ends, stage * ranks), bisect_right(ends, (stage + 1) * ranks - 1)) for stage in range(stages)
        ]
        return tuple(first for first, _ in places) if all(first == last for first, last in places) else None

    @property
    def host_devices(self) -> int:
        """How many devices share a host: its memory, its cores, and what starts their ranks."""
        usual = self.devices_per_host or self.device.devices_per_host or self.devices_per_node
        return min(usual, self.devices_per_node)

    @property
    def levels(self) -> tuple[Level, ...]:
        """The parts that collectives leave, from the inside out: nodes, and the pods around them."""
        found = [Level("nodes", self.devices_per_node, self.inter_node)]
        for pod in self.pods:
            name = f"pods of {pod.nodes}" if len(found) > 1 else "leaf switches" if pod.rails else "pods"
            found.append(Level(name, pod.nodes * self.devices_per_node, pod.link, pod.rails))
        return tuple(found)

    @staticmethod
    def parse(source: str | Path) -> Cluster:
        """Read ``8xH100-SXM-80GB`` (devices), ``16x8xA100-SXM-80GB`` (nodes x devices), ``H100`` (one), or a file: TOML, or
        a profile.

        More devices than a node usually has are full nodes: ``16xH100`` is ``2x8xH100``. ``4xprofile.json`` is one node with
        four of the file's devices, ``2x4xcluster.toml`` two such nodes. ``8xH100+16xA100`` has groups of two kinds.

        Raises:
            GraphparError: the text or the file describes no cluster; the message names the field.
        """
        file, there = Path(source), False
        with contextlib.suppress(OSError):  # a name longer than those of files
            there = file.is_file()
        if isinstance(source, Path) or there:
            return _from_file(file)
        if "+" in source:
            return Cluster.mixed([Cluster.parse(part.strip()) for part in source.split("+")])
        if named := _FILE.fullmatch(source.strip()):
            counts = [int(named[place]) for place in ("first", "second") if named[place]]
            return _from_file(Path(named["file"]), counts)
        found = _TEXT.fullmatch(source.strip())
        meant = _otherwise(source)
        if found is None or meant is not None:
            raise GraphparError(
                f"Cluster {source!r}: write devices x kind, such as 2xCPU or 8xH100, nodes x devices x kind, such as 2x8xH100, or name "
                f"a TOML file.{'' if meant is None else f' Did you mean {meant!r}?'}"
            )
        try:
            device = device_named(found["device"])
            if found["second"] is not None:
                return Cluster.of(device, int(found["first"]), int(found["second"]))
            return Cluster.of(device, *_filled(device, int(found["first"] or 1)))
        except GraphparError as error:
            raise GraphparError(f"Cluster {source!r}: {error}") from None

    @staticmethod
    def of(device: Device, nodes: int, devices_per_node: int) -> Cluster:
        """Make a cluster of ``device`` with its usual links, and no pods."""
        return Cluster(nodes, devices_per_node, device, device.intra_node, device.inter_node)

    @staticmethod
    def mixed(groups: Sequence[Cluster]) -> Cluster:
        """Make a cluster of groups of devices of several kinds, in the order of ranks.

        Raises:
            GraphparError: their nodes have different numbers of devices, or they are GPUs and CPUs.
        """
        per_node = {each.devices_per_node for each in groups}
        if len(groups) < 2 or any(each.groups or each.pods or each.devices_per_host for each in groups):
            raise GraphparError("groups are two or more, without groups, pods or hosts of their own.")
        if any(each.headroom is not None for each in groups):
            raise GraphparError("headroom is of all groups; leave it out of each, and give it next to groups.")
        if len(per_node) > 1:
            raise GraphparError(
                f"nodes of all groups must have as many devices; they have {', '.join(map(str, sorted(per_node)))}."
            )
        hosts = [each.host_memory_bytes for each in groups]
        return Cluster(
            sum(each.nodes for each in groups),
            per_node.pop(),
            best_device([each.device for each in groups]),
            best_link([each.intra_node for each in groups]),
            best_link([each.inter_node for each in groups]),
            min((each for each in hosts if each is not None), default=None),
            groups=tuple(groups),
        )

    def with_network(self, times: float) -> Cluster:
        """Return it with ``times`` the bandwidth between nodes, or in the node where there is one."""
        name = "inter_node" if self.nodes > 1 else "intra_node"

        def faster(each: Cluster) -> Cluster:
            pods = tuple(replace(pod, link=pod.link.times(times)) for pod in each.pods)
            return replace(each, **{name: getattr(each, name).times(times)}, pods=pods)

        return replace(faster(self), groups=tuple(map(faster, self.groups)))

    def grown(self, times: int) -> Cluster:
        """Multiply the number of devices: full nodes first, where the device has a usual number, then more nodes."""
        usual = self.device.devices_per_node
        if self.nodes == 1 and (usual is None or self.devices_per_node * times <= usual):
            return replace(self, devices_per_node=self.devices_per_node * times)
        return replace(self, nodes=self.nodes * times)

    @staticmethod
    def of_this_machine(devices: int) -> Cluster:
        """Make a cluster of ``devices`` of this machine's kind: the GPU that torch sees, where the table has it, else
        processes on the CPU, with figures that were measured here where they are kept."""
        import torch

        if torch.cuda.is_available():
            with contextlib.suppress(GraphparError):
                device = device_named(torch.cuda.get_device_name())
                return Cluster.of(device, *_filled(device, devices))
        kept = this_machine.profile_path()
        if kept is not None and kept.is_file():
            with contextlib.suppress(GraphparError):  # of another version: it is measured again
                return _from_file(kept, [devices])
        return Cluster.of(DEVICES["CPU"], 1, devices)

    def __str__(self) -> str:
        """Write it as :meth:`parse` reads it, for a known device with its usual links."""
        if self.groups:
            return "+".join(map(str, self.groups))
        count = f"{self.devices_per_node}x" if self.size > 1 else ""
        usual = self.device.devices_per_node
        explicit = self.nodes > 1 or (usual is not None and self.devices_per_node > usual)
        return f"{f'{self.nodes}x' if explicit else ''}{count}{self.device.name}"

    def __repr__(self) -> str:
        if self.groups:
            return f"Cluster({str(self)!r})"
        known = DEVICES.get(self.device.name)
        usual = known == self.device and self == replace(
            Cluster.of(known, self.nodes, self.devices_per_node), headroom=self.headroom
        )
        return f"Cluster({str(self)!r}{'' if usual else ', with its own figures'})"

    # ---- as data ----

    def to_json(self) -> dict[str, Any]:
        """Convert to plain data with every figure, so that later changes of the device table don't matter."""
        links = {name: _figures(getattr(self, name)) for name in _LINKS}
        device = _figures(self.device)
        for name in _LINKS:
            if device[name] == links[name]:
                del device[name]
        host = {} if self.host_memory_bytes is None else {"host_memory_bytes": self.host_memory_bytes}
        free = {} if self.headroom is None else {"headroom": self.headroom}
        if self.groups:
            kind = {"kind": self.device.kind}  # for what reads no more of a plan
            return {"device": kind, "groups": [each.to_json() for each in self.groups], **free}
        pods = [{"nodes": pod.nodes, "rails": pod.rails} | _figures(pod.link) for pod in self.pods]
        return {
            "nodes": self.nodes,
            "devices_per_node": self.devices_per_node,
            "device": device,
            **links,
            **host,
            **free,
            **({"pods": pods} if pods else {}),
            **({} if self.devices_per_host is None else {"devices_per_host": self.devices_per_host}),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Cluster:
        """Read what :meth:`to_json` returns; also the content of a TOML file.

        ``device`` may be a name. Links that are left out are the device's, and the other way round for a device with its own
        figures; a cluster of one node needs no ``inter_node``. Figures of a pod that are left out are those of the link inside it.

        Raises:
            GraphparError: a field is missing, unknown or out of range; the message names it.
        """
        if "groups" in data:
            _check_fields(data, {"device", "groups", "headroom"}, {"groups"})
            if not isinstance(data["groups"], list) or not all(isinstance(each, Mapping) for each in data["groups"]):
                raise GraphparError(
                    "groups must be a list of tables with nodes, devices_per_node and device, in the order of ranks."
                )
            made = Cluster.mixed([_named(f"groups[{place}]", each) for place, each in enumerate(data["groups"])])
            kind = {"kind": made.device.kind}
            if data.get("device", kind) != kind:
                raise GraphparError("groups have devices of their own; leave the field 'device' out.")
            return replace(made, headroom=data.get("headroom"))
        _check_fields(data, {field.name for field in fields(Cluster)}, {"nodes", "devices_per_node", "device"})
        device = _device(data)
        links = {name: _link(data.get(name, {}), name, getattr(device, name)) for name in _LINKS}
        host = _whole(data.get("host_memory_bytes"))
        return Cluster(
            data["nodes"], data["devices_per_node"], device, links["intra_node"], links["inter_node"], host, data.get("headroom"),
            _pods(data.get("pods", []), links["inter_node"]), data.get("devices_per_host"),
        )  # fmt: skip


def _otherwise(text: str) -> str | None:
    """Guess what another spelling of a cluster means: ``h100x8``, ``8 H100``, ``8*h100``, ``H100:8`` are all ``8xH100``."""
    if _TEXT.fullmatch(text.strip()) and not re.search(r"x\s*\d+\s*$", text):
        return None
    kinds: list[str] = []
    counts: list[str] = []
    for part in re.split(r"[x×*:,\s]+", re.sub(r"^(\d+)(?=[a-wyz])", r"\1x", text.strip().lower())):
        (counts if part.isdigit() else kinds).append(part)
    if not 1 <= len(counts) <= 2:
        return None
    try:
        return "x".join([*(str(int(count)) for count in counts), device_named("-".join(kinds)).name])
    except GraphparError:
        return None


def _filled(device: Device, count: int) -> tuple[int, int]:
    """Return the number of nodes, and devices a node, for ``count`` devices.

    Raises:
        GraphparError: they fill no whole number of nodes.
    """
    usual = device.devices_per_node
    if usual is None or count <= usual:
        return 1, count
    if count % usual:
        raise GraphparError(
            f"a node has {usual} of {device.name}, so {count} fill no whole number of nodes; write nodes x devices x kind, such as "
            f"{math.ceil(count / usual)}x{usual}x{device.name}."
        )
    return count // usual, usual


# ---- reading ---------------------------------------------------------------------------------------------------


def _from_file(file: Path, counts: Sequence[int] = ()) -> Cluster:
    """Read a file; ``counts`` (devices, or nodes and devices) replace those in it."""
    if not file.is_file():
        siblings = [entry.name for entry in file.parent.glob(f"*{file.suffix}") if entry.is_file()]
        raise GraphparError(f"There is no cluster file {file}.{near_match(file.name, siblings)}")
    counted = dict(zip(("devices_per_node", "nodes"), [*reversed(counts), 1] if counts else []))
    try:
        given = _read_fields(file)
        if counted and "groups" in given:
            raise GraphparError("a number before it is not for groups, whose nodes and devices are in the file.")
        found = Cluster.from_json(given | counted)
        for each in found.groups or (found,):
            _check_units(each)
        return found
    except GraphparError as error:
        raise GraphparError(f"{file}: {error}") from None


def _named(where: str, data: Mapping[str, Any]) -> Cluster:
    """Read a cluster of a file; messages say ``where`` in it."""
    try:
        return Cluster.from_json(data)
    except GraphparError as error:
        raise GraphparError(f"{where}: {error}") from None


def _check_units(cluster: Cluster) -> None:
    """Check that figures are in the units of their fields, and not in GB/s or microseconds.

    Raises:
        GraphparError: no hardware of today has such a figure; the message names the field and its unit.
    """
    device = cluster.device
    links = {name: getattr(cluster, name) for name in _LINKS}
    links |= {f"pods[{place}]": pod.link for place, pod in enumerate(cluster.pods)}
    rates = {f"{name}.bytes_per_s": link.bytes_per_s for name, link in links.items()}
    rates["device.memory_bytes_per_s"] = device.memory_bytes_per_s
    bytes_ = {"device.memory_bytes": device.memory_bytes, "host_memory_bytes": cluster.host_memory_bytes}
    flops = {f"device.flops.{dtype}": rate for dtype, rate in device.flops.items()}
    for figures, unit in (
        (rates, "bytes a second: 25e9 are 25 GB/s"),
        (bytes_, "bytes: 80e9 are 80 GB"),
        (flops, "flop/s: 312e12 are 312 Tflop/s"),
    ):
        for name, value in figures.items():
            if value is not None and value < _LEAST_FIGURE:
                raise GraphparError(f"{name} is {value:g}; it is in {unit}.")
    seconds = {f"{name}.latency_s": link.latency_s for name, link in links.items()}
    for name, value in (seconds | {f"device.{name}": getattr(device, name) for name in HOST_S}).items():
        if value >= 1:
            raise GraphparError(f"{name} is {value:g}; it is in seconds: 14e-6 are 14 microseconds.")


def _read_fields(file: Path) -> dict[str, Any]:
    kind = "JSON" if file.suffix.lower() == ".json" else "TOML"
    try:
        data = (json if kind == "JSON" else tomllib).loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise GraphparError(f"it is not valid {kind}: {error}.") from None
    if not isinstance(data, dict):
        raise GraphparError("it must be an object with nodes, devices_per_node and device.")
    return {name: value for name, value in data.items() if kind == "TOML" or name not in _PROFILE}


def _device(data: Mapping[str, Any]) -> Device:
    """Return the device of a cluster: a name of the table, or figures, whose links may be those of the cluster."""
    given = data["device"]
    if isinstance(given, str):
        return device_named(given)
    if not isinstance(given, Mapping):
        raise GraphparError(
            f"device is {given!r}; it must be a name such as {next(iter(DEVICES))}, or a table of figures."
        )
    figures = dict(given)
    if "memory_bytes" in given:
        figures["memory_bytes"] = _whole(given["memory_bytes"])
    if "host_link" in given:
        figures["host_link"] = _link(given["host_link"], "device.host_link")
    for name in _LINKS:
        link = given.get(name, data.get(name))
        if link is None and name == "inter_node" and data["nodes"] == 1:
            link = data.get("intra_node", given.get("intra_node"))  # unused: there is one node
        if link is not None:
            figures[name] = _link(link, f"device.{name}" if name in given else name)
    return _record(Device, figures, "device")


def _pods(data: Any, inside: Link) -> tuple[Pod, ...]:
    """Return the pods of a file, whose figures are those of a link and of a :class:`Pod`; ``inside``: the link between nodes."""
    if not isinstance(data, list) or not all(isinstance(each, Mapping) for each in data):
        raise GraphparError(
            f"pods is {data!r}; it must be a list of tables with nodes and bytes_per_s, the innermost first."
        )
    found: list[Pod] = []
    for number, given in enumerate(data):
        where, figures = f"pods[{number}]", dict(given)
        if "nodes" not in given:
            raise GraphparError(f"{where}: the field 'nodes' is missing.")
        own = {name: figures.pop(name) for name in ("nodes", "rails") if name in given}
        inside = _link(figures, where, inside)
        found.append(_record(Pod, own | {"link": inside}, where))
    return tuple(found)


def _whole(value: Any) -> Any:
    """Return a float that is a whole number as one: 80e9 is to people."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _link(data: Any, where: str, usual: Link | None = None) -> Link:
    """Return a link; figures that are left out are those of ``usual``, except the wires' where another bandwidth is given."""
    if not isinstance(data, Mapping):
        raise GraphparError(f"{where} is {data!r}; it must be a table with latency_s and bytes_per_s.")
    known = _figures(usual) if usual is not None else {}
    if "bytes_per_s" in data:
        known = {name: figure for name, figure in known.items() if name not in _WIRES}
    return _record(Link, known | dict(data), where)


def _record(kind: type[_Record], data: Mapping[str, Any], where: str) -> _Record:
    known = {field.name for field in fields(kind)} - {"sources"}
    optional = {field.name for field in fields(kind) if field.default is not MISSING}
    try:
        _check_fields(data, known, known - optional)
        return kind(**data)
    except GraphparError as error:
        raise GraphparError(f"{where}: {error}") from None


def _check_fields(data: Mapping[str, Any], known: set[str], required: set[str]) -> None:
    for name in data:
        if name not in known:
            raise GraphparError(
                f"there is no field {name!r}; the fields are {', '.join(sorted(known))}.{near_match(name, sorted(known))}"
            )
    for name in sorted(required - set(data)):
        raise GraphparError(f"the field {name!r} is missing.")


def _figures(record: Device | Link) -> dict[str, Any]:
    """Return the fields of a record except its sources and those that are None."""
    values = {field.name: getattr(record, field.name) for field in fields(record) if field.name != "sources"}
    plain = {name: _figures(value) if isinstance(value, Link) else value for name, value in values.items()}
    return {name: _plain(value) for name, value in plain.items() if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value
