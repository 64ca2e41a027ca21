"""Devices and links: figures of the vendors and published measurements, with sources, in one table.

    name or alias ──device_named──► Device: flop/s by dtype, memory, bandwidth, links ──► graphpar.hardware.cluster.Cluster

Figures are peaks; the shares of them that programs reach (``matrix_efficiency`` and its like) are separate.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from graphpar.errors import GraphparError, near_match

DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8")
"""Of the last, products in 8 bits with a scale for each 32 values, devices without the units have no rate."""
KINDS = ("cuda", "cpu")
"""As torch names them."""
PYTHON_S = ("hooks_s", "policy_s", "fsdp_hooks_s", "fsdp_gather_s", "fsdp_reduce_s")
"""Figures of :class:`Device`: seconds of Python in the host besides operators."""
HOST_S = ("launch_s", "dispatch_s", "action_s", *PYTHON_S)
"""All that are seconds of something of the host, or of the space between kernels."""
_Figure = TypeVar("_Figure")


def check_number(name: str, value: Any, *, whole: bool = False, zero: bool = False) -> None:
    """Check that ``value`` is a positive number (or zero, where that is meaningful).

    Raises:
        GraphparError: it is not; the message names the field.
    """
    kinds = int if whole else int | float
    fits = isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
    if not fits or value < 0 or (value == 0 and not zero):
        required = f"a {'whole ' if whole else ''}number {'of at least' if zero else 'above'} 0"
        raise GraphparError(f"{name} is {value!r}; it must be {required}.")


def check_share(name: str, value: Any) -> None:
    """Check that ``value`` is above 0 and at most 1.

    Raises:
        GraphparError: it is not; the message names the field.
    """
    check_number(name, value)
    if value > 1:
        raise GraphparError(f"{name} is {value}; it is a share of the peak, at most 1.")


@dataclass(frozen=True)
class Link:
    """The connection between devices.

    Attributes:
        latency_s: seconds a message.
        bytes_per_s: of one device, in one direction, to all its neighbours together.
        pair_bytes_per_s: of one device to one neighbour, where each pair has a separate wire and there is no switch.
        efficiency: the share of ``bytes_per_s`` that rings reach with large messages.
        in_switch: the share that reductions inside the switch reach; None: the switch does not reduce.
        send_latency_s: seconds a point-to-point message, where these were measured: they reach all of ``bytes_per_s``.
    """

    latency_s: float
    bytes_per_s: float
    pair_bytes_per_s: float | None = None
    efficiency: float = 0.8
    in_switch: float | None = None
    send_latency_s: float | None = None

    def __post_init__(self) -> None:
        check_number("latency_s", self.latency_s, zero=True)
        check_number("bytes_per_s", self.bytes_per_s)
        if self.pair_bytes_per_s is not None:
            check_number("pair_bytes_per_s", self.pair_bytes_per_s)
        check_share("efficiency", self.efficiency)
        if self.in_switch is not None:
            check_share("in_switch", self.in_switch)
        if self.send_latency_s is not None:
            check_number("send_latency_s", self.send_latency_s, zero=True)

    def times(self, factor: float) -> Link:
        """Return the link with ``factor`` times the bandwidth."""
        pair = None if self.pair_bytes_per_s is None else self.pair_bytes_per_s * factor
        return replace(self, bytes_per_s=self.bytes_per_s * factor, pair_bytes_per_s=pair)

    def among(self, devices: int) -> Link:
        """Return the link for a group of ``devices``: without a switch, the group can't use wires to other devices."""
        if self.pair_bytes_per_s is None:
            return self
        rate = min(self.bytes_per_s, self.pair_bytes_per_s * max(1, devices - 1))
        return replace(self, bytes_per_s=rate, pair_bytes_per_s=None)


COMMUNICATOR_BYTES = 512 * 2**20
"""What NCCL takes for a group of ranks: 544 to 688 MB on A100 (NVIDIA/nccl issue 964), 512 MiB with torch 2.11 (issue 2363)."""


@dataclass(frozen=True)
class Device:
    """One accelerator (or one process on a CPU), and how it is usually connected.

    Attributes:
        flops: peak flop/s of dense products, by dtype of the operands.
        memory_bytes: what a program can get, which is less than the vendor's figure.
        memory_bytes_per_s: peak bandwidth of that memory.
        launch_s: seconds that an operator costs however small it is.
        matrix_efficiency: the share of ``flops`` that large products reach.
        half_reduction: the length of a product's reduction at which starting and ending a tile takes as long as computing it.
        operand_bytes_per_s: of a core that packs what it multiplies before it does: at what rate. None: products are as
            long as the longer of their flops and their bytes.
        compute_units: streaming multiprocessors (compute units), which take the tiles of a product in waves; None: no waves.
        attention_efficiency: the shares of ``flops`` that fused attention reaches forward and backward.
        memory_efficiency: the share of ``memory_bytes_per_s`` that elementwise operators reach.
        function_efficiency: the share that norms, softmaxes and activations reach, where it is less (on CPUs); None: the same.
        dispatch_s: seconds of the host for each operator; devices wait for it where their operators are shorter.
        intra_node: the link to devices of the same node.
        inter_node: the usual link to other nodes: the node's adapters divided by its devices.
        devices_per_node: how many devices ``intra_node`` usually connects; None: any number.
        devices_per_host: how many of them one host runs; None: all.
        hooks_s: seconds of the host for each operator of a block that runs again: of the hooks of ``torch.utils.checkpoint``.
        policy_s: seconds of the host for each operator of a block that keeps some results, in its forward and again: each passes
            through Python, which asks whether its result is kept.
        fsdp_hooks_s, fsdp_gather_s, fsdp_reduce_s: seconds of the host for each unit of sharded state: of FSDP2's hooks in a forward or a
            backward, and of starting and ending a gather of its parameters or a reduction of its gradients.
        action_s: of a CPU: seconds that each action of a pipeline's schedule costs besides its operators.
        host_link: the link to the memory of its host, which each device has for itself; None: not known, or the device is the host.
        fresh_bytes_per_s: of a CPU: at what rate the system zeroes the pages of new memory, where what is freed goes back to the system;
            None: it does not.
        cores: of a CPU: how many of a node's devices compute at once, while more of them take turns; None: all do.
        communicator_bytes: of a GPU's memory that its communication library takes for each group of ranks; None: what NCCL takes.
        sources: where each group of figures is from.
    """

    name: str
    kind: str
    flops: Mapping[str, float] = field(hash=False)
    memory_bytes: int
    memory_bytes_per_s: float
    launch_s: float
    matrix_efficiency: float
    intra_node: Link
    inter_node: Link
    devices_per_node: int | None = None
    host_link: Link | None = None
    half_reduction: float = 0.0
    operand_bytes_per_s: float | None = None
    compute_units: int | None = None
    attention_efficiency: tuple[float, float] = (0.5, 0.4)
    memory_efficiency: float = 0.8
    function_efficiency: float | None = None
    dispatch_s: float = 0.0
    hooks_s: float = 0.0
    policy_s: float = 0.0
    fsdp_hooks_s: float = 0.0
    fsdp_gather_s: float = 0.0
    fsdp_reduce_s: float = 0.0
    action_s: float = 0.0
    cores: int | None = None
    fresh_bytes_per_s: float | None = None
    communicator_bytes: int | None = None
    devices_per_host: int | None = None
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise GraphparError(f"name is {self.name!r}; it must be the device's name.")
        if self.kind == "gpu":
            object.__setattr__(self, "kind", "cuda")
        if self.kind not in KINDS:
            raise GraphparError(f"kind is {self.kind!r}; it must be {' or '.join(KINDS)}.")
        if not isinstance(self.flops, Mapping) or not self.flops:
            raise GraphparError(f"flops is {self.flops!r}; it must give flop/s for one of {', '.join(DTYPES)} or more.")
        for dtype, rate in self.flops.items():
            if dtype not in DTYPES:
                hint = near_match(dtype, DTYPES)
                raise GraphparError(f"flops has {dtype!r}; the dtypes are {', '.join(DTYPES)}.{hint}")
            check_number(f"flops.{dtype}", rate)
        check_number("memory_bytes", self.memory_bytes, whole=True)
        check_number("memory_bytes_per_s", self.memory_bytes_per_s)
        for name in ("half_reduction", *HOST_S):
            check_number(name, getattr(self, name), zero=True)
        if self.operand_bytes_per_s is not None:
            check_number("operand_bytes_per_s", self.operand_bytes_per_s)
        if self.fresh_bytes_per_s is not None:
            check_number("fresh_bytes_per_s", self.fresh_bytes_per_s)
        if self.compute_units is not None:
            check_number("compute_units", self.compute_units, whole=True)
        if not isinstance(self.attention_efficiency, list | tuple) or len(self.attention_efficiency) != 2:
            raise GraphparError(
                f"attention_efficiency is {self.attention_efficiency!r}; it must be two shares, forward and backward."
            )
        object.__setattr__(self, "attention_efficiency", tuple(self.attention_efficiency))
        shares = {"matrix_efficiency": self.matrix_efficiency, "memory_efficiency": self.memory_efficiency}
        if self.function_efficiency is not None:
            shares["function_efficiency"] = self.function_efficiency
        shares |= {f"attention_efficiency[{place}]": share for place, share in enumerate(self.attention_efficiency)}
        for name, share in shares.items():
            check_share(name, share)
        for name in ("devices_per_node", "devices_per_host", "cores"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), whole=True)
        if self.communicator_bytes is None:
            object.__setattr__(self, "communicator_bytes", COMMUNICATOR_BYTES if self.kind == "cuda" else 0)
        check_number("communicator_bytes", self.communicator_bytes, whole=True, zero=True)

    def peak(self, dtype: str) -> float:
        """Return flop/s of dense products of ``dtype``; a 16-bit dtype (or tf32) that the device has no units for runs
        at fp32's rate, as 8 bits do on CPUs.

        Raises:
            GraphparError: there is no such rate.
        """
        falls_back = dtype in ("tf32", "bf16", "fp16") or (dtype == "fp8" and self.kind == "cpu")
        for name in (dtype, "fp32") if falls_back else (dtype,):
            if name in self.flops:
                return self.flops[name]
        raise GraphparError(
            f"{self.name} has no rate for {dtype}; it has {', '.join(self.flops)}. Take one of these, or give it in flops."
        )

    @property
    def faster_in_bf16(self) -> bool:
        """Whether it is a GPU with units for bf16."""
        return self.kind == "cuda" and self.flops.get("bf16", 0.0) > self.flops.get("fp32", 0.0)


# ---- the table -------------------------------------------------------------------------------------------------

_SPEC = "stas00/ml-engineering compute/accelerator/README.md"
_NETWORK = "stas00/ml-engineering network/README.md, network/benchmarks/README.md"
_VENDOR = "vendor's data sheet, from memory"
_ASSUMED = "assumed"
_MEASURED = f"best large bf16 product over peak, {_SPEC}"
_LATENCIES = (
    "inside: smallest all-reduces of 8 H200 over ring steps, same place; between: two nodes of A100, H100, B200"
)

_GPU_LAUNCH = 5e-6  # assumed: a small kernel with the gap before it
_GPU_DISPATCH = 1e-5  # assumed: what eager PyTorch does on the host for an operator, forward or backward
# Processor time on the CPU of the table, by the cases of cost_models/measure.py; assumed for the hosts of GPUs.
_PYTHON: dict[str, Any] = {
    "hooks_s": 1.65e-5, "policy_s": 1.55e-5, "fsdp_hooks_s": 1.7e-4, "fsdp_gather_s": 3.2e-4, "fsdp_reduce_s": 2.6e-4,
}  # fmt: skip
_COMPUTE_UNITS = {"V100": 80, "A100": 108, "A800": 108, "H": 132, "B": 148, "GB": 152, "MI300X": 304, "L40S": 142}


class _Reached(NamedTuple):
    """The efficiencies of a generation in training programs, as in :class:`Device`, and their source."""

    matrix: float
    half: float
    memory: float
    attention: tuple[float, float]
    source: str


_FIT = "benchmarks/fit_devices.py on published step times of sources that are not held out"
_PAPER = "attention: figures 5 to 7 of FlashAttention-2 (arXiv 2307.08691)"
_REACHED = {
    "A": _Reached(
        0.787, 162.0, 0.535, (0.66, 0.60),
        f"{_FIT}: vtrain_single, llm_foundry, zero_bubble, korthikanti; {_PAPER}",
    ),
    "H": _Reached(
        0.576, 115.0, 0.81, (0.40, 0.32), f"{_FIT}: llm_foundry, megatron_bridge, nemo_2407, nemo_longseq; {_PAPER}",
    ),
    "B": (_BLACKWELL := _Reached(
        0.55, 115.0, 0.81, (0.35, 0.28),
        f"products: {_FIT}: megatron_bridge, whose step times are of clocks that fall under load; all else: as H100, attention assumed",
    )),
    "GB": _BLACKWELL,
}  # fmt: skip
_CAPPED = "power grows as the clock times the square of the voltage, which grows as the clock: clocks as the cube root of the power"
_UNKNOWN = _Reached(0.8, 150.0, 0.7, (0.5, 0.4), "assumed")
_RING = 0.8  # assumed where nobody measured
_RINGS = {"A": 0.78, "H800": 0.8, "H": 0.82, "B": 0.76, "GB": 0.76, "MI300X": 0.7}
"""The efficiency of rings inside a node: all-reduces of 8 A100, 8 H200, 4 B200 and 4 GB300, 8 MI300X; 160 of 200 GB/s on
H800 (DeepSeek-V3)."""
_IN_SWITCH = {"H": 0.69, "B": 0.6, "GB": 0.6}
"""The efficiency of reductions inside the switch, from the third NVSwitch on: 4 to 8 H200 have 363, 414, 436, 460 and 473
GB/s of bus bandwidth with 8 GiB, which is 2 (n-1) / (n+1) times 0.67 of 450 for n of 5 and more; 8 B200 have 838
GB/s."""
_ADAPTERS = (
    0.95  # what rings reach between nodes: 382 (32 B200), 376 (16 B200), 357 (8 GB300) GB/s where adapters have 400
)
_INSIDE_S = 2.7e-6  # 57 KB at 1.44 GB/s over 15 steps
_BETWEEN_S = 14e-6  # InfiniBand and RoCE: NVIDIA/nccl src/graph/tuning.cc, and all-reduces and all-gathers of 1 to 16 MiB on two nodes


_HOST_GBPS = {"V100": 15.75, "A": 31.5, "L40S": 31.5, "GB": 225, "H": 63, "B": 63, "MI300X": 63}
"""GB/s between a device and its host in one direction, by prefix: PCIe 3, 4 and 5 with 16 lanes of 8, 16 and 32 GT/s, of which 128 bits in
130 are data; Grace has 450 GB/s of NVLink-C2C for two devices."""
_HOST_SOURCE = f"PCI Express base specifications 3.0 to 5.0; which of them, and NVLink-C2C: {_VENDOR}; that 0.8 are reached: assumed"
_HOST_S = 1e-5  # assumed: to start a copy


USABLE = 0.97
"""The share of a device's memory that a program's tensors can have: the rest is of the driver, page tables, the context, and buffers
of the communication library."""


def usable(vendor_gb: float, unit: int = 2**30) -> int:
    """Return the bytes that a program can use of ``vendor_gb``, which are GiB on most data sheets."""
    return int(USABLE * vendor_gb * unit)


def _gpu(
    name: str,
    teraflops: Mapping[str, float],
    memory: int,
    memory_tbps: float,
    inside: float,
    between: float,
    sources: Mapping[str, str],
    efficiency: float | None = None,
    pair: float | None = None,
    per_node: int = 8,
    power: float = 1.0,
    per_host: int | None = None,
) -> Device:
    """Make a row from 1e12 flop/s, bytes, TB/s, and GB/s of one device in one direction inside a node and between nodes.

    ``efficiency``: that of large products, where it is known and no training program was fitted. ``power``: what it may
    take, over what those take that were fitted, which limits its clocks.
    """
    reached = _of_kind(_REACHED, name) or _UNKNOWN
    clock = power ** (1 / 3)
    return Device(
        name,
        "cuda",
        {dtype: rate * 1e12 for dtype, rate in teraflops.items()},
        memory,
        memory_tbps * 1e12,
        _GPU_LAUNCH,
        clock * (efficiency or reached.matrix),
        Link(
            _INSIDE_S,
            inside * 1e9,
            None if pair is None else pair * 1e9,
            _of_kind(_RINGS, name) or _RING,
            _of_kind(_IN_SWITCH, name),
        ),
        Link(_BETWEEN_S, between * 1e9, efficiency=_ADAPTERS),
        per_node,
        Link(_HOST_S, (_of_kind(_HOST_GBPS, name) or 15.75) * 1e9),
        half_reduction=reached.half,
        compute_units=_of_kind(_COMPUTE_UNITS, name),
        attention_efficiency=(clock * reached.attention[0], clock * reached.attention[1]),
        memory_efficiency=reached.memory,
        dispatch_s=_GPU_DISPATCH,
        **_PYTHON,
        devices_per_host=per_host,
        sources={
            "efficiency": _MEASURED if efficiency else reached.source,
            "latency": _LATENCIES,
            "launch": _ASSUMED,
            "host": _HOST_SOURCE,
            **sources,
        },
    )


def _of_kind(figures: Mapping[str, _Figure], name: str) -> _Figure | None:
    """Return the figure of the first prefix of ``name`` that has one."""
    return next((figure for prefix, figure in figures.items() if name.startswith(prefix)), None)


_AMPERE = {"fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312}
_HOPPER = {"fp32": 67, "tf32": 494.5, "bf16": 989, "fp16": 989, "fp8": 1979}
_BLACKWELL_SXM = {"fp32": 80, "tf32": 1125, "bf16": 2250, "fp16": 2250, "fp8": 4500, "mxfp8": 4500}
_BLACKWELL_NVL72 = {"fp32": 80, "tf32": 1250, "bf16": 2500, "fp16": 2500, "fp8": 5000, "mxfp8": 5000}
_BLACKWELL_SOURCE = f"{_SPEC}; fp32, tf32, fp16: {_VENDOR}; mxfp8: as fp8"
_AS_A100, _AS_H100 = "as A100-SXM-80GB, the same chip", "as H100-SXM-80GB, the same chip"
_SPEC_SOURCES = {"flops": _SPEC, "memory": _SPEC, "links": _NETWORK}
_NVL72_SOURCES = {
    **_SPEC_SOURCES,
    "flops": _BLACKWELL_SOURCE,
    "links": f"inside: {_NETWORK}; between: {_VENDOR}; the 72 devices of an NVLink domain count as a node, whose hosts have 4 each",
}
_VOLTA_SOURCES = {
    "flops": f"fp16: bigscience experiments/gpt2.md; fp32: {_VENDOR}",
    "memory": _VENDOR,
    "links": f"inside: {_NETWORK}; between: from memory, four EDR adapters (12.5 GB/s) for eight devices; rented nodes have less",
    "efficiency": _ASSUMED,
}

_CALIBRATED = (
    "graphpar calibrate on two cores of an AMD EPYC (family 26, model 2), a process and a thread on each, gloo between them: "
    "benchmarks/data/cpu_profile.json; between nodes assumed to be as inside"
)
_GLOO = Link(3.79e-4, 3.73e9, efficiency=0.269, send_latency_s=5.75e-5)
"""Between processes of one machine that compute between messages: its latency is that of waking each other."""

_ROWS = (
    _gpu("V100-SXM2-16GB", {"fp32": 15.7, "fp16": 125}, usable(16), 0.9, 150, 6.25, _VOLTA_SOURCES),
    _gpu("V100-SXM2-32GB", {"fp32": 15.7, "fp16": 125}, usable(32), 0.9, 150, 6.25, _VOLTA_SOURCES),
    _gpu(
        "A100-SXM-80GB", _AMPERE, usable(80), 2.0, 300, 25,
        {**_SPEC_SOURCES, "links": f"{_NETWORK}; between: eight 200 Gb/s adapters a node, text of Korthikanti et al."},
    ),
    _gpu(
        "A100-SXM-40GB", _AMPERE, usable(40), 1.555, 300, 25,
        {
            "flops": _SPEC,
            "memory": f"size: {_SPEC}; bandwidth: {_VENDOR}",
            "links": f"inside: {_NETWORK}; between: as A100-SXM-80GB",
        },
    ),
    _gpu(
        "A800-80GB", _AMPERE, usable(80), 2.0, 200, 25,
        {
            **dict.fromkeys(("flops", "memory"), _AS_A100),
            "links": f"inside: {_VENDOR}; between: as A100-SXM-80GB",
        },
    ),
    _gpu(
        "H100-SXM-80GB", _HOPPER, usable(80), 3.35, 450, 50,
        {**_SPEC_SOURCES, "links": f"{_NETWORK}; both also in the report of Nemotron-4 15B"},
    ),
    _gpu(
        "H100-96GB-HBM2e-500W", _HOPPER, usable(96), 2.4, 450, 50,
        {
            "flops": _AS_H100,
            "efficiency": f"{_REACHED['H'].source}; and {_CAPPED}",
            "memory": "pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md",
            "links": "as H100-SXM-80GB; between also there",
        },
        power=500 / 700,
    ),
    _gpu(
        "H800-SXM-80GB", _HOPPER, usable(80), 3.35, 200, 50,
        {
            **dict.fromkeys(("flops", "memory"), _AS_H100),
            "links": f"inside: {_VENDOR} (the report of DeepSeek-V3: 160 GB/s usable); between: as H100-SXM-80GB",
        },
    ),
    _gpu(
        "H200-SXM-141GB", _HOPPER, usable(141), 4.8, 450, 50,
        {**_SPEC_SOURCES, "flops": f"{_SPEC}; fp32: {_AS_H100}"},
    ),
    _gpu(
        "B200-SXM-180GB", _BLACKWELL_SXM, usable(180), 8.0, 900, 50,
        {**_SPEC_SOURCES, "flops": f"{_SPEC}; mxfp8: as fp8"},
    ),
    _gpu(
        "GB200-NVL72", _BLACKWELL_NVL72, usable(186), 8.0, 900, 50,
        _NVL72_SOURCES,
        per_node=72,
        per_host=4,
    ),
    _gpu(
        "GB300-NVL72", _BLACKWELL_NVL72, usable(288, 10**9), 8.0, 900, 100,
        {
            **_NVL72_SOURCES,
            "memory": f"{_SPEC}; taken as decimal GB, as B300-SXM-288GB",
            "efficiency": f"{_BLACKWELL.source}; and {_CAPPED}",
        },
        per_node=72,
        per_host=4,
        power=1400 / 1200,  # of GB300 and GB200, vendor's data sheets, from memory
    ),
    _gpu(
        "B300-SXM-288GB", {**_BLACKWELL_SXM, "fp32": 75}, usable(288, 10**9), 8.0, 900, 100,
        {
            "flops": _BLACKWELL_SOURCE,
            "memory": f"{_SPEC}; taken as decimal GB, as systems of this device report no more",
            "links": f"inside: {_SPEC}; between: {_VENDOR}",
        },
    ),
    _gpu(
        "MI300X-192GB", {"fp32": 163.4, "tf32": 653.7, "bf16": 1300, "fp16": 1300, "fp8": 2610}, usable(192), 5.3, 448, 50,
        {**_SPEC_SOURCES, "flops": f"{_SPEC}; fp32: {_VENDOR}", "links": f"inside: {_NETWORK}; between: {_VENDOR}"}, 0.514, pair=64,
    ),
    _gpu(
        "L40S-48GB", {"fp32": 91.6, "tf32": 183, "bf16": 362, "fp16": 362, "fp8": 733}, usable(48 * 15 / 16), 0.86, 31, 6.25,
        {
            "flops": _SPEC,
            "memory": f"{_SPEC}; a sixteenth less for error correction, which GDDR6 keeps in the memory itself",
            "links": f"inside: PCIe 4 x16, {_NETWORK}; between: 400 Gb/s for eight devices, {_VENDOR}",
            "efficiency": _ASSUMED,
        },
    ),
    Device(
        "CPU", "cpu", {"fp32": 1.058e11}, 12 * 2**30, 3.64e10, 5.26e-6, 1.0, _GLOO, _GLOO, None,
        operand_bytes_per_s=1.67e10, attention_efficiency=(0.38, 0.395), memory_efficiency=1.0, function_efficiency=0.551,
        **_PYTHON, action_s=4.1e-4, fresh_bytes_per_s=2.5e9,
        sources={
            **dict.fromkeys(("flops", "memory", "links", "efficiency", "latency", "launch"), _CALIBRATED),
            "memory": f"{_CALIBRATED}; new pages: a later run of the same command, which that file lacks",
        },
    ),
)  # fmt: skip

DEVICES: Mapping[str, Device] = {row.name: row for row in _ROWS}
"""The known devices by name. An alias that fits several means the first: ``A100`` has 80 GB, ``V100`` has 16 GB."""


def _words(name: str) -> list[str]:
    """Return ``NVIDIA A100-SXM4-80GB`` as ``[a100, sxm, 80gb]``."""
    words = re.split(r"[\s_-]+", name.lower())
    return [re.sub(r"^sxm\d$", "sxm", word) for word in words if word not in ("", "nvidia", "amd")]


def _key(words: Iterable[str]) -> str:
    return "".join(words).removesuffix("gb")


def _aliases() -> dict[str, str]:
    """Return the keys of names, whole and without form factor, memory size, or both."""
    found: dict[str, str] = {}
    for name in DEVICES:
        first, *rest = _words(name)
        for dropped in ([], *([word] for word in rest), rest):
            found.setdefault(_key([first, *(word for word in rest if word not in dropped)]), name)
    return found


_ALIASES = _aliases()


def device_named(name: str) -> Device:
    """Find a device of the table by name: in any case, with any hyphens, also without form factor or memory size.

    Raises:
        GraphparError: there is no such device; the message lists the known ones, the most similar first.
    """
    key = _key(_words(name))
    if key in _ALIASES:
        return DEVICES[_ALIASES[key]]
    close = [_ALIASES[match] for match in difflib.get_close_matches(key, _ALIASES, n=len(_ALIASES), cutoff=0.5)]
    known = dict.fromkeys([*close, *DEVICES])
    raise GraphparError(
        f"There is no device {name!r}; known are {', '.join(known)}, or give its figures in a TOML file."
    )


def figures_of(device: Device) -> str:
    """Say where the figures of a device are from: ``published figures; launch assumed``, or its own where the table has
    others."""
    known = DEVICES.get(device.name)
    if known != device:
        return "user-defined figures"
    groups: dict[str, list[str]] = {}
    for group, source in known.sources.items():
        origin = "assumed" if source.startswith(_ASSUMED) else "published"
        origin = "measured" if source.startswith("graphpar calibrate") else origin
        groups.setdefault(origin, []).append(group)
    main = max(groups, key=lambda origin: len(groups[origin]), default="assumed")
    others = [f"{', '.join(names)} {origin}" for origin, names in groups.items() if origin != main]
    return "; ".join([f"{main} figures", *others])
