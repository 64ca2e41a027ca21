"""``verify``: the emitted program against the unpartitioned model, on the same global batch.

    model, batch ──► reference: eager, one process ──► losses, gradients, parameters, buffers ─┐
    out/         ──► every rank, gloo processes    ──► the same, pieces joined, every replica  ┴─ compare

SGD with momentum, because Adam hides a gradient that is off by a factor. Everything is compared relative to the largest
magnitude of the reference tensor (or to 1e-3 of the model's largest, for tensors that are zero but for rounding).
"""

from __future__ import annotations

import copy
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from graphpar.api import DTYPES, Parts
from graphpar.capture import default_dtype, named_outputs, own_loss
from graphpar.emitted import random_streams
from graphpar.errors import GraphparError
from graphpar.modelfile import find_model_file, load_model_file
from graphpar.plans import Plan
from graphpar.program import Input, ModelSource
from graphpar.runtime.manifest import Manifest, load_manifest
from graphpar.runtime.random_streams import sample_keys
from graphpar.runtime.worker import JobResult, run_jobs
from graphpar.written import Written, same

# Largest relative error allowed, by the dtype that the model computes in.
TOLERANCES: dict[torch.dtype, dict[str, float]] = {
    torch.float64: {"loss": 1e-10, "gradient": 1e-10, "parameter": 1e-10, "buffer": 1e-10, "output": 1e-10},
    torch.float32: {"loss": 1e-5, "gradient": 1e-5, "parameter": 1e-5, "buffer": 1e-5, "output": 1e-5},
    torch.float16: {"loss": 5e-3, "gradient": 2e-2, "parameter": 5e-3, "buffer": 5e-3, "output": 5e-3},
    torch.bfloat16: {"loss": 2e-2, "gradient": 1e-1, "parameter": 2e-2, "buffer": 2e-2, "output": 2e-2},
}
LEARNING_RATE, MOMENTUM, SEED = 0.05, 0.9, 0
_FLOOR = 1e-3


@dataclass
class Reference:
    """What the unpartitioned model did on the batch."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]  # a step
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    ties: list[tuple[str, ...]]
    dtype: torch.dtype
    persistent: frozenset[str]  # names of buffers in the state_dict
    initial: dict[str, Tensor]  # parameters and all buffers before the first step
    batch: dict[str, Tensor]
    outputs: dict[str, Tensor]  # of an inference program
    learning_rate: float = LEARNING_RATE


@dataclass
class Verification:
    """The comparison's result; ``ok`` says whether all of it is within ``tolerance``."""

    devices: int
    steps: int
    reference_losses: list[float]
    parallel_losses: list[float]
    max_error: dict[str, float]
    worst: dict[str, str]
    tolerance: dict[str, float]
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        within = all(self.max_error[kind] <= self.tolerance[kind] for kind in self.max_error)
        return within and not self.problems

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "devices": self.devices,
            "steps": self.steps,
            "loss": {"reference": self.reference_losses, "parallel": self.parallel_losses},
            "max_error": {kind: _finite(error) for kind, error in self.max_error.items()},
            "worst": self.worst,
            "tolerance": self.tolerance,
            "problems": self.problems,
        }


def _finite(error: float) -> float | str:
    return error if math.isfinite(error) else str(error)


# ---- the entry points ------------------------------------------------------------------------------------------


def verify_parts(parts: Parts | str | Path, steps: int = 3, *, timeout_s: float = 900.0) -> Verification:
    """Verify one program: in memory, or emitted to a folder."""
    (result,) = verify_all([parts], steps, timeout_s=timeout_s)
    return result


def verify_all(
    programs: Sequence[Parts | str | Path],
    steps: int = 3,
    *,
    references: Sequence[Reference | None] | None = None,
    timeout_s: float = 900.0,
) -> list[Verification]:
    """Verify several programs, those of one world size in one launch. ``references`` saves running the same model again."""
    if steps < 1:
        raise GraphparError(f"--steps is {steps}; at least one step is needed to compare anything.")
    with tempfile.TemporaryDirectory(prefix="graphpar-verify-") as scratch:
        prepared = []
        for index, program in enumerate(programs):
            job = Path(scratch) / f"job_{index}"
            job.mkdir()
            prepared.append((job, *_prepare(program, job, steps, references[index] if references else None)))
        results: dict[Path, JobResult] = {}
        for size in sorted({plan.mesh.size for _, plan, _ in prepared}):
            jobs = [job for job, plan, _ in prepared if plan.mesh.size == size]
            results.update(zip(jobs, run_jobs(jobs, size, timeout_s)))
        outcomes = []
        for job, plan, expected in prepared:
            ran = results[job].error is None
            manifest = load_manifest(json.loads((job / "job.json").read_text())["program"]) if ran else None
            outcomes.append(compare(expected, results[job], plan, steps, manifest))
        return outcomes


def _prepare(program: Parts | str | Path, job: Path, steps: int, known: Reference | None) -> tuple[Plan, Reference]:
    """Writes the job's files; returns the plan and the reference."""
    if isinstance(program, Parts):
        folder, plan, source, inputs = program.folder, program.plan, program.program.source, program.program.inputs
        coupled = bool(program.program.couplings)
    else:
        folder = Path(program)
        plan = Plan.load(folder)
        source = _source_of_folder(folder, plan)
        inputs, coupled = _inputs_of_folder(folder), plan.allow_batch_coupling
    if source is None:
        raise GraphparError(
            "This program does not know its model; compile it from a model file, or verify gp.partition's result."
        )
    expected = known or run_reference(source, plan, inputs, steps, microbatched=coupled and _pieces(plan) > 1)
    # Every name of a tie with a copy of its own: the program must keep them equal by itself.
    save_file(
        {name: value.contiguous().clone() for name, value in expected.initial.items()}, job / "weights.safetensors"
    )
    save_file({name: value.contiguous() for name, value in expected.batch.items()}, job / "batch.safetensors")
    record = {
        "program": str(folder.resolve()),
        "steps": steps,
        "optimizer": {"lr": expected.learning_rate, "momentum": MOMENTUM},
        "seed": SEED,
        "weights": str(job / "weights.safetensors"),
        "batch": str(job / "batch.safetensors"),
    }
    (job / "job.json").write_text(json.dumps(record))
    return plan, expected


def _source_of_folder(folder: Path, plan: Plan) -> ModelSource:
    record = json.loads((folder / "plan.json").read_text())
    if not record.get("model_file"):
        raise GraphparError(
            f"{folder} was not compiled from a model file; verify it from Python with gp.verify(parts)."
        )
    file = load_model_file(find_model_file(folder, record["model_file"]))
    return ModelSource(file.model, file.args, file.kwargs, file.loss_fn, file.targets, plan.dtype)


def _inputs_of_folder(folder: Path) -> tuple[Input, ...]:
    interface = json.loads((folder / "plan.json").read_text())["interface"]
    return tuple(
        Input(entry["name"], tuple(entry["shape"]), getattr(torch, entry["dtype"]), entry["batch_dim"], entry["role"])
        for entry in interface["inputs"]
    )


# ---- the reference ---------------------------------------------------------------------------------------------


def run_reference(
    source: ModelSource, plan: Plan, inputs: Sequence[Input], steps: int, *, microbatched: bool = False
) -> Reference:
    """Train the unpartitioned model for ``steps`` steps of SGD with momentum on the plan's global batch.

    ``microbatched``: BatchNorm takes the statistics of each microbatch (what ``allow_batch_coupling`` accepts).
    """
    torch.manual_seed(SEED)
    with default_dtype(DTYPES.get(source.dtype or "fp32")):
        model = copy.deepcopy(source.model) if isinstance(source.model, nn.Module) else source.model()
    if source.mode is not None:
        model.train(source.mode == "train")
    leaves, spec = tree_flatten((tuple(source.args), dict(source.kwargs), tuple(source.targets)))
    described = iter([entry for entry in inputs if entry.role != "sample_keys"])
    batch: dict[str, Tensor] = {}
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            entry = next(described)
            leaves[position] = batch[entry.name] = _resized(leaf, entry.batch_dim, plan.global_batch)
    args, kwargs, targets = tree_unflatten(leaves, spec)
    named = dict(model.named_parameters(remove_duplicate=False))
    owners: dict[int, list[str]] = {}
    for name, parameter in named.items():
        owners.setdefault(id(parameter), []).append(name)
    reference = Reference(
        losses=[],
        gradients=[],
        parameters={},
        buffers={},
        ties=[tuple(names) for names in owners.values() if len(names) > 1],
        dtype=_computing_dtype(model),
        persistent=frozenset(model.state_dict()) - frozenset(named),
        initial=_copied(named) | _copied(dict(model.named_buffers(remove_duplicate=False))),
        batch=batch,
        outputs={},
    )
    if plan.mode == "infer":
        with _as_planned(plan, inputs, 0, microbatched), torch.no_grad():
            reference.outputs = dict(named_outputs(model(*args, **kwargs)))
        return reference
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    for step in range(steps):
        with _as_planned(plan, inputs, step, microbatched) as watched:
            output = model(*args, **kwargs)
            loss = source.loss_fn(output, *targets) if source.loss_fn is not None else own_loss(output)
        assert isinstance(loss, Tensor), named_outputs(output)
        loss.backward()
        if microbatched:
            _count_microbatches(model, plan.microbatches)
        reference.dtype = _least_precise([reference.dtype, *watched.dtypes])
        reference.losses.append(float(loss.detach()))
        reference.gradients.append({n: p.grad.detach().clone() for n, p in named.items() if p.grad is not None})
        if step == 0:
            reference.learning_rate = optimizer.param_groups[0]["lr"] = _stable_rate(reference.gradients[0].values())
        optimizer.step()
        optimizer.zero_grad()
    reference.parameters = _copied(named)
    reference.buffers = _copied(dict(model.named_buffers(remove_duplicate=False)))
    return reference


def _pieces(plan: Plan) -> int:
    """Into how many microbatches the global batch is cut, on all replicas together."""
    return plan.global_batch // plan.microbatch_size


def _stable_rate(gradients: Iterable[Tensor]) -> float:
    """A learning rate with which a loss of any scale stays where it is smooth: rounding must not be amplified by divergence."""
    squares = sum(float(gradient.double().square().sum()) for gradient in gradients)
    norm = math.sqrt(squares) if math.isfinite(squares) else 1.0
    return LEARNING_RATE / max(1.0, norm)


def _count_microbatches(model: nn.Module, microbatches: int) -> None:
    """BatchNorm counts the batches that it has seen: a microbatch is one."""
    for module in model.modules():
        counter = getattr(module, "num_batches_tracked", None)
        if module.training and isinstance(counter, Tensor):
            counter += microbatches - 1


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    copies: dict[int, Tensor] = {}
    return {name: copies.setdefault(id(value), value.detach().clone()) for name, value in tensors.items()}


def _resized(value: Tensor, batch_dim: int | None, rows: int) -> Tensor:
    """``value`` with ``rows`` rows: its own, repeated in order where there are more."""
    if batch_dim is None or value.shape[batch_dim] == rows:
        return value.clone()
    return value.index_select(batch_dim, torch.arange(rows) % value.shape[batch_dim])


def _computing_dtype(model: nn.Module) -> torch.dtype:
    """The least precise floating dtype of the parameters."""
    found = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return _least_precise(found or {torch.float32})


def _least_precise(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    return max((dtype for dtype in dtypes if dtype in TOLERANCES), key=lambda dtype: torch.finfo(dtype).eps)


@contextmanager
def _as_planned(plan: Plan, inputs: Sequence[Input], step: int, microbatched: bool) -> Iterator[_Substituted]:
    """The eager model with the emitted program's dropout masks, and its BatchNorm statistics where those were accepted."""
    random = any(entry.role == "sample_keys" for entry in inputs)
    keys = sample_keys(SEED, step, plan.global_batch) if random else None
    dims = {entry.batch_dim for entry in inputs if entry.batch_dim is not None}
    with _Substituted(keys, _pieces(plan) if microbatched else 1, plan.global_batch, dims) as substituted:
        yield substituted


class _Substituted(TorchFunctionMode):
    """Replaces dropout and BatchNorm calls of the eager model, in execution order.

    ``dtypes``: those of the differentiable values that the model computes (autocast's are not its parameters').
    """

    def __init__(self, keys: Tensor | None, microbatches: int, batch: int, batch_dims: set[int]) -> None:
        super().__init__()
        self.keys, self.microbatches, self.batch, self.batch_dims = keys, microbatches, batch, batch_dims
        self.calls = 0
        self.dtypes: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self._called(func, args, kwargs or {})
        if isinstance(result, Tensor) and result.is_floating_point() and result.requires_grad:
            self.dtypes.add(result.dtype)
        return result

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.keys is not None:
            if func is F.dropout:
                return self._dropout(*args, **kwargs)
            if func in (F.dropout1d, F.dropout2d, F.dropout3d):
                return self._dropout(*args, **kwargs, drop=random_streams.channel_dropout)
            if func is torch.dropout:
                return self._dropout(args[0], args[1], args[2])
            if func is F.scaled_dot_product_attention:
                return self._attention(*args, **kwargs)
        if func is F.batch_norm and self.microbatches > 1:
            return self._batch_norm(*args, **kwargs)
        return func(*args, **kwargs)

    def _stream(self) -> Tensor:
        assert self.keys is not None
        self.calls += 1
        return random_streams.stream(self.keys, self.calls - 1)

    def _dropout(
        self,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        *,
        drop: Callable[..., Tensor] = random_streams.dropout,
    ) -> Tensor:
        if not training or p == 0.0:
            return input
        dim = self._batch_dim(input)
        keys = self._stream()
        if input.shape[dim] != self.batch:  # the batch and something inner in one dim
            keys = keys.repeat_interleave(input.shape[dim] // self.batch)
        result = drop(input, p, keys, dim)
        return input.copy_(result) if inplace and not input.requires_grad else result

    def _batch_dim(self, value: Tensor) -> int:
        """The dim of ``value`` that holds the batch: of the model's batch size, or a multiple of it."""
        exact = [dim for dim, size in enumerate(value.shape) if size == self.batch]
        usual = [dim for dim in exact if dim in self.batch_dims]
        if usual or exact:
            return (usual or exact)[0]
        return next(dim for dim, size in enumerate(value.shape) if size % self.batch == 0)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if dropout_p == 0.0:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        return random_streams.dropout_attention(
            query, key, value, self._stream(), attn_mask, dropout_p, is_causal, scale, enable_gqa
        )

    def _batch_norm(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        training = kwargs.get("training", args[4] if len(args) > 4 else False)
        if not training:
            return F.batch_norm(input, *args, **kwargs)
        return torch.cat([F.batch_norm(part, *args, **kwargs) for part in input.chunk(self.microbatches)])


# ---- the comparison --------------------------------------------------------------------------------------------


def compare(
    reference: Reference, result: JobResult, plan: Plan, steps: int, program: Manifest | None = None
) -> Verification:
    """Every loss, gradient, parameter and buffer of the parallel run against the reference, and copies with each other.

    Args:
        program: says how tensors are cut; without it none is.
    """
    kinds = ["output"] if plan.mode == "infer" else ["loss", "gradient", "parameter", "buffer"]
    tolerance = {kind: TOLERANCES[reference.dtype][kind] for kind in kinds}
    outcome = Verification(
        plan.mesh.size, steps, reference.losses, list(result.losses), dict.fromkeys(tolerance, 0.0), {}, dict(tolerance)
    )
    if result.error is not None:
        outcome.problems.append(result.error)
        outcome.max_error[kinds[0]] = math.inf
        return outcome
    written = Written(
        [result.tensors(rank) for rank in range(plan.mesh.size)], plan.mesh.degrees(), program, outcome.problems
    )
    if plan.mode == "infer":
        for name, expected in reference.outputs.items():
            outputs = [written.ranks[rank][f"output/{name}"] for rank in written.holders(f"output/{name}")]
            _compare_tensor(outcome, "output", name, expected, outputs, 0.0)
        return outcome
    for losses in result.rank_losses or (result.losses,):
        _compare_losses(outcome, losses)

    def compared(kind: str, key: str, name: str, expected: Tensor, largest: float) -> list[tuple[int, Tensor]]:
        copies = written.copies(kind, key, name, expected.shape)
        if copies or not written.holders(key):  # else what is wrong with them has been said
            _compare_tensor(outcome, kind, name, expected, [copy for _, copy in copies], largest)
        return copies

    for step, gradients in enumerate(reference.gradients):
        largest = max((float(g.abs().max()) for g in gradients.values() if g.numel()), default=0.0)
        for name, expected in gradients.items():
            compared("gradient", f"grad/{step}/{name}", name, expected, largest)
            without = set(written.holders(f"param/{name}")) - set(written.holders(f"grad/{step}/{name}"))
            if without and written.holders(f"grad/{step}/{name}"):
                outcome.problems.append(f"gradient {name}: has no gradient on rank {min(without)}")
    largest = max((float(p.abs().max()) for p in reference.parameters.values() if p.numel()), default=0.0)
    parameters = {
        name: compared("parameter", f"param/{name}", name, expected, largest)
        for name, expected in reference.parameters.items()
    }
    for name, expected in reference.buffers.items():
        if written.holders(f"buffer/{name}") or name in reference.persistent:
            compared("buffer", f"buffer/{name}", name, expected, 0.0)
    _compare_copies(outcome, reference, parameters)
    return outcome


def _compare_losses(outcome: Verification, losses: Sequence[float]) -> None:
    if len(losses) != len(outcome.reference_losses):
        outcome.problems.append(f"{len(losses)} losses instead of {len(outcome.reference_losses)}")
    for expected, found in zip(outcome.reference_losses, losses):
        error = abs(expected - found) / max(abs(expected), 1e-12)
        if math.isnan(expected) and math.isnan(found):
            error = 0.0
        outcome.max_error["loss"] = max(outcome.max_error["loss"], math.inf if math.isnan(error) else error)


def _compare_tensor(
    outcome: Verification,
    kind: str,
    name: str,
    expected: Tensor,
    found: Sequence[Tensor],
    largest: float,
) -> None:
    """The worst of all copies counts."""
    if not found:
        what = "has no gradient" if kind == "gradient" else "is missing"
        outcome.problems.append(f"{kind} {name}: {what} in the parallel program")
        return
    for value in found:
        if value.shape != expected.shape:
            outcome.problems.append(f"{kind} {name}: shape {tuple(value.shape)} instead of {tuple(expected.shape)}")
            continue
        error = _relative(expected, value, largest)
        if error > outcome.max_error[kind] or kind not in outcome.worst:
            outcome.worst[kind] = name
        outcome.max_error[kind] = max(outcome.max_error[kind], error)


def _relative(expected: Tensor, found: Tensor, largest: float) -> float:
    if not expected.numel():
        return 0.0
    first, second = expected.double(), found.double()
    difference = (first - second).abs()
    difference[(first == second) | (first.isnan() & second.isnan())] = 0.0
    scale = max(float(first.abs().nan_to_num(0.0, 0.0, 0.0).max()), _FLOOR * largest)
    worst = float(difference.max())
    if math.isnan(worst):
        return math.inf
    return worst / scale if scale > 0.0 else worst


def _compare_copies(
    outcome: Verification, reference: Reference, parameters: Mapping[str, Sequence[tuple[int, Tensor]]]
) -> None:
    """All copies of one parameter, under whatever name and on whatever rank, must be equal to the bit."""
    reported: set[str] = set()
    for group in [*reference.ties, *((name,) for name in parameters)]:
        copies = [copy for name in group for copy in parameters[name]]
        for rank, value in copies[1:]:
            first, expected = copies[0]
            if value.shape == expected.shape and not same(expected, value) and not reported.issuperset(group):
                reported.update(group)
                drift = float((expected.double() - value.double()).abs().max())
                what = f"tied parameter {' = '.join(group)}" if len(group) > 1 else f"parameter {group[0]}"
                outcome.problems.append(f"{what}: its copies on ranks {first} and {rank} differ by {drift:.3g}")
                break


def reference_for(parts: Parts, steps: int = 3) -> Reference:
    """The reference of ``parts``' model, to be shared by several plans of the same global batch."""
    assert parts.program.source is not None
    coupled = bool(parts.program.couplings) and _pieces(parts.plan) > 1
    return run_reference(parts.program.source, parts.plan, parts.program.inputs, steps, microbatched=coupled)


__all__ = [
    "TOLERANCES",
    "Reference",
    "Verification",
    "compare",
    "reference_for",
    "run_reference",
    "verify_all",
    "verify_parts",
]
