"""Run the reference: the unpartitioned model on the batches of the steps, eagerly, in one process.

    batch 0, 1, ..  ──► loss, gradients, a step of SGD with momentum
    the last batch  ──► again without a step between, so that gradients accumulate; clipped to half of their norm; a step

The results of each step are written to files at once: the gradients of one step fit into memory, those of several may not.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from graphpar.errors import GraphparError
from graphpar.frontend.signature import named_outputs, of_tokens, own_loss
from graphpar.ir.plan import Plan
from graphpar.ir.precision import Precision
from graphpar.ir.program import Input, ModelSource, is_plain
from graphpar.ir.source import user_line
from graphpar.runtime.debugging.fp64 import doubled, in_double
from graphpar.runtime.manifest import Manifest, ModelOutputInterface
from graphpar.runtime.option_kinds import GENERATE, TRAIN
from graphpar.runtime.stages.dropout import KERNEL, sample_keys, step_key
from graphpar.runtime.stages.model_outputs import join
from graphpar.runtime.state.optimizers import made_by
from graphpar.verification.batches import VARIATIONS, Variation, constant_inputs, step_batches
from graphpar.verification.policy import LARGEST_SCALE, Policy
from graphpar.verification.reference_results import LEARNING_RATE, MOMENTUM, Accumulated, Reference, Stepping
from graphpar.verification.rounded_products import RoundedProducts
from graphpar.verification.substituted import Substituted, own_regions
from graphpar.verification.tolerances import least_precise

SEED = 0


@dataclass(frozen=True)
class _Setting:
    """A model and how to run it, shared by all attempts at a reference."""

    source: ModelSource
    plan: Plan
    inputs: tuple[Input, ...]
    steps: int
    microbatched: bool
    leaves: list[Any]
    spec: TreeSpec
    layouts: Sequence[Sequence[int]] = ()  # of dropouts, as of :class:`Substituted`
    shown: torch.dtype | None = None  # in float64: the dtype that the model itself has
    stepping: Stepping | None = None
    forward: Callable[..., Any] | None = (
        None  # of the model and a batch by name, in place of the model's own call and loss
    )
    evaluates: bool = False  # whether the program can
    offered: tuple[ModelOutputInterface, ...] = ()  # what it gives then, besides the loss
    rounded: Mapping[str, Sequence[str]] = field(default_factory=dict)  # the weights of products in 8 bits
    linear: Callable[..., Tensor] = F.linear
    generating: Manifest | None = None  # what generates between steps of the program
    evaluated_layouts: Sequence[Sequence[int]] | None = None  # of evaluation, where the model is another program then
    decided: list[list[bool]] | None = (
        None  # where the program has one branch of each: what the conditions were in the first step
    )

    @property
    def examples(self) -> list[tuple[Input, Tensor]]:
        """The inputs with the tensors of the example."""
        described = [entry for entry in self.inputs if entry.role != "sample_keys"]
        return list(zip(described, (leaf for leaf in self.leaves if isinstance(leaf, Tensor)), strict=True))

    def arguments(self, batch: Mapping[str, Tensor]) -> tuple[Any, Any, Any]:
        """Return args, kwargs and targets with the batch's tensors in place of the example's."""
        feed = iter([batch[entry.name].clone() for entry, _ in self.examples])
        return tree_unflatten([next(feed) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves], self.spec)  # type: ignore[no-any-return]

    @property
    def parts(self) -> int:
        """Into how many losses the batch is divided, of which the mean is taken."""
        return self.plan.mesh.replicas if self.plan.dp_mean else 1

    def rows(self, batch: Mapping[str, Tensor], part: int) -> dict[str, Tensor]:
        """Select the rows that one of the ``parts`` has."""
        dims = {entry.name: entry.batch_dim for entry in self.inputs}
        return {
            name: value if (dim := dims[name]) is None or self.parts == 1 else value.chunk(self.parts, dim)[part]
            for name, value in batch.items()
        }

    @contextmanager
    def as_planned(self, step: int, part: int = 0, evaluates: bool = False) -> Iterator[Substituted]:
        """Run inside with the emitted program's random numbers, and its BatchNorm statistics where microbatches have their own."""
        random = any(entry.role == "sample_keys" for entry in self.inputs)
        rows = self.plan.global_batch // self.parts
        keys = sample_keys(SEED, step, self.plan.global_batch)[part * rows :][:rows] if random else None
        pieces = self.plan.microbatches if self.microbatched else 1
        wide = nullcontext() if self.shown is None else in_double(self.shown)
        exact = self.plan.dropout != KERNEL
        apart = self.evaluated_layouts if evaluates else None
        layouts, skips = (self.layouts, evaluates) if apart is None else (apart, False)
        substituted = Substituted(
            keys, layouts, pieces, self.plan.mesh.replicas, exact, step_key(SEED, step), skips, self.linear
        )
        with wide, own_regions(substituted), substituted:
            yield substituted
        if self.decided is not None:
            self.decided.append(substituted.decided)
            if substituted.decided != self.decided[0]:
                raise GraphparError(f"In step {step} the model takes another branch than for its example inputs.")


def run_reference(
    source: ModelSource,
    plan: Plan,
    inputs: Sequence[Input],
    steps: int,
    *,
    microbatched: bool = False,
    counted: Collection[str] = (),
    layouts: Sequence[Sequence[int]] = (),
    forward: Callable[..., Any] | None = None,
    stepping: Stepping | None = None,
    evaluates: bool = False,
    offered: Sequence[ModelOutputInterface] = (),
    evaluated_layouts: Sequence[Sequence[int]] | None = None,
    branches: bool = False,
    lengths: Sequence[int] = (),
    rounded: Mapping[str, Sequence[str]] | None = None,
    generating: Manifest | None = None,
) -> Reference:
    """Train the unpartitioned model for ``steps`` steps of SGD with momentum on global batches of the plan's size.

    Args:
        microbatched: BatchNorm takes the statistics of each microbatch (what ``allow_batch_coupling`` accepts).
        counted: names of the inputs that the loss denominators depend on.
        layouts: where each dropout of the program has the batch, in the order of their calls.
        forward: called with the model and a batch by name, for the loss (or the outputs of inference), in place of the model and
            its loss function.
        stepping: of the model file, whose optimizer then makes as many steps with the same gradients.
        evaluates: compute a loss in evaluation, too, and what is ``offered`` of the model's outputs.
        evaluated_layouts: ``layouts`` of evaluation, where the program has other operators then.
        lengths: of the sequences of each of ``steps`` + 1 batches, where they vary.
        rounded: the weights of products in 8 bits, and how they are divided.
        generating: what generates between steps; the logits of the last step's tokens are computed, too.
        branches: the program has one branch of each condition on values: batches for which the model takes another are left out.
    """
    leaves, spec = tree_flatten((tuple(source.args), dict(source.kwargs), tuple(source.targets)))
    setting = _Setting(
        source,
        plan,
        tuple(inputs),
        steps,
        microbatched,
        leaves,
        spec,
        layouts,
        stepping=stepping,
        forward=forward,
        evaluates=evaluates,
        offered=tuple(offered),
        rounded=rounded or {},
        generating=generating,
        evaluated_layouts=evaluated_layouts,
        decided=[] if branches else None,
    )
    for variation in VARIATIONS:
        last = variation is VARIATIONS[-1]
        rows = inputs[0].shape[0] if plan.mode == GENERATE else plan.global_batch
        batches = step_batches(setting.examples, rows, steps + 1, variation, counted, SEED, lengths)
        try:
            reference = _run(setting, batches)
        except Exception as error:  # the model refuses values that the example does not have
            if last:
                raise (_alone(setting, batches[0]) or error) from error
            continue
        if reference.finite or last:
            break
    reference.data = _variation_text(variation, batches, setting.inputs)
    return reference


def _alone(setting: _Setting, batch: dict[str, Tensor]) -> GraphparError | None:
    """Return the error for a model that fails by itself, without anything of graphpar around it; None where it doesn't."""
    if setting.forward is not None:  # whose errors are its own
        return None
    model = _built(setting.source)
    with _borrowed(model):
        _set_mode(setting, model)
        trains = setting.plan.mode == TRAIN
        try:
            if trains:
                loss = _loss(setting, Policy(model, Precision()), batch)
            else:
                args, kwargs, _ = setting.arguments(batch)
                model(*args, **kwargs)
            if trains and loss.requires_grad:
                loss.backward()
        except Exception as error:
            place = user_line(error)
            what = (str(error).splitlines() or [""])[0]
            return GraphparError(
                f"There is nothing to compare with: the model itself fails {'to train ' if trains else ''}on one device"
                f"{f' ({place})' if place else ''}, {type(error).__name__}: {what}"
            )
    return None


def _variation_text(variation: Variation, batches: Sequence[dict[str, Tensor]], inputs: Sequence[Input]) -> str:
    same = constant_inputs(batches, inputs) if variation.rows else []
    return variation.description + (f"; {', '.join(same)} can't be varied" if same else "")


def _run(setting: _Setting, batches: list[dict[str, Tensor]], double: bool = False) -> Reference:
    """Run the model on ``batches``, from its initial weights."""
    model = _built(setting.source)
    with _borrowed(model):
        return _trained(setting, model, batches, double)


def _trained(setting: _Setting, model: nn.Module, batches: list[dict[str, Tensor]], double: bool) -> Reference:
    _set_mode(setting, model)
    again = partial(_run, setting, batches, True)
    precision = setting.plan.precision
    if double:
        setting = replace(setting, shown=precision.cast_to or _usual_dtype(model))
        model.double()
        batches = [{name: doubled(value) for name, value in batch.items()} for batch in batches]
    policy = Policy(model, Precision() if double else precision)
    setting = replace(setting, linear=RoundedProducts(policy.own, setting.rounded, setting.plan.mesh.degrees()))
    named = policy.named
    buffers = _buffers(model)
    reference = Reference(
        losses=[],
        ties=_ties(named | buffers),
        dtype=least_precise(parameter.dtype for parameter in model.parameters()),
        persistent=frozenset(model.state_dict()) & frozenset(buffers),
        batches=batches,
        again=again,
        policy_dtype=None if double else precision.cast_to,
    )
    reference.keep(reference.weights, named | {name: buffers[name] for name in reference.persistent if name in buffers})
    reference.begun = reference.keep(reference.folder / "begun.safetensors", _constants(model) | buffers)
    for step, batch in enumerate(batches):
        reference.keep(reference.batch_file(step), batch)
    if setting.plan.mode != TRAIN:
        _infer(setting, policy, reference)
    else:
        _train(setting, policy, reference)
    if double:
        reference.dtype = reference.loss_dtype = torch.float64
    reference.parameters = reference.keep(reference.folder / "parameters.safetensors", named)
    buffers = _buffers(model)
    reference.buffers = reference.keep(reference.folder / "buffers.safetensors", buffers)
    if setting.evaluates:
        _evaluate(setting, policy, reference)
    if setting.generating is not None:
        _generate(setting, setting.generating, policy, reference)
    if setting.stepping is not None:
        with in_double() if double else nullcontext():
            _step_own(setting.stepping, policy, reference)
        reference.stepped = reference.keep(reference.folder / "stepped.safetensors", named)
    return reference


def _set_mode(setting: _Setting, model: nn.Module) -> None:
    """Put what trains in the mode that its ``train()`` gives; what is for inference stays as it was built, unless a mode was given."""
    if setting.plan.mode == TRAIN or setting.source.mode is not None:
        model.train(setting.plan.mode == TRAIN)


def _constants(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that modules hold beside parameters and buffers."""
    return {
        f"{path}.{name}" if path else name: value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and is_plain(value)
    }


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a program may have: not those that are sparse or nested."""
    return {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if is_plain(buffer)}


def _built(source: ModelSource) -> nn.Module:
    torch.manual_seed(SEED)
    model: nn.Module = source.model if isinstance(source.model, nn.Module) else source.model()
    state = model.state_dict().items()
    empty = next((name for name, tensor in state if isinstance(tensor, Tensor) and tensor.is_meta), None)
    if empty is not None:
        raise GraphparError(
            f"There is nothing to compare with: {empty} is on the device meta, so it has no values. verify trains the model itself; "
            'give a function that builds it on the CPU (without torch.device("meta")).'
        )
    return model


@contextmanager
def _borrowed(model: nn.Module) -> Iterator[None]:
    """Use the user's own model inside, since a loss may read its parameters too, and restore it afterwards."""
    kept = []
    for module in model.modules():
        registries = {"_parameters": dict(module._parameters), "_buffers": dict(module._buffers)}
        registries |= {name: copy.copy(hooks) for name, hooks in vars(module).items() if name.startswith("_forward")}
        kept.append((module, module.__dict__ | registries))
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values()
    values = [(tensor, tensor.data, tensor.detach().clone(), tensor.grad) for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.grad = None
        yield
    finally:
        for module, attributes in kept:
            module.__dict__.clear()
            module.__dict__.update(attributes)
        for tensor, data, value, gradient in values:
            tensor.data = data
            data.copy_(value)
            tensor.grad = gradient


def _infer(setting: _Setting, policy: Policy, reference: Reference) -> None:
    policy.begin()
    for step, batch in enumerate(reference.batches[: setting.steps]):
        args, kwargs, _ = setting.arguments(batch)
        with setting.as_planned(step), torch.no_grad(), policy.losses():
            args, kwargs = policy.inputs((args, kwargs))
            given = (
                policy.model(*args, **kwargs) if setting.forward is None else setting.forward(policy.model, dict(batch))
            )
            if policy.precision.output_dtype:
                given = policy.outputs(given)
            outputs = dict(named_outputs(given))
        reference.finite &= all(bool(value.isfinite().all()) for value in outputs.values())
        reference.outputs.append(reference.keep(reference.folder / f"outputs_{step}.safetensors", outputs))


def _train(setting: _Setting, policy: Policy, reference: Reference) -> None:
    named = policy.named
    trained = [parameter for parameter in policy.parameters if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE, momentum=MOMENTUM) if trained else None
    if setting.plan.dtype == "fp16" and setting.shown is None:
        _find_scale(setting, policy, reference, trained)
    for step in range(setting.steps):
        loss = _backward(setting, policy, reference, step)
        squares = sum(_squares(trained))
        reference.finite &= math.isfinite(loss) and math.isfinite(squares)
        reference.losses.append(loss)
        reference.norms.append(math.sqrt(squares) if math.isfinite(squares) else math.inf)
        reference.gradients.append(_gradients(named, reference, step))
        if step == 0:
            reference.learning_rate = _stable_rate(squares)
        if step == setting.steps - 1:
            loss = _backward(setting, policy, reference, step + 1)
            reference.accumulated = _clipped(loss, policy, reference)
        if optimizer is not None:
            optimizer.param_groups[0]["lr"] = reference.learning_rate
            optimizer.step()
            optimizer.zero_grad()


def _step_own(stepping: Stepping, policy: Policy, reference: Reference) -> None:
    """Step the model file's own optimizer and schedule with the gradients of the steps before, whose order is that of the model.

    Raises:
        GraphparError: one of them fails.
    """
    first: dict[int, str] = {}
    for name, parameter in policy.named.items():
        first.setdefault(id(parameter), name)
    pairs = [(name, policy.named[name]) for name in first.values()]
    try:
        made = torch.optim.AdamW(pairs, lr=1e-3) if stepping.optimizer is None else made_by(stepping.optimizer, pairs)
        schedule = None if stepping.lr_schedule is None else stepping.lr_schedule(made)
        for gradients in reference.gradients:
            for name, parameter in pairs:
                parameter.grad = gradients.get(name)
            made.step()
            if schedule is not None:
                schedule.step()
    except Exception as error:
        raise GraphparError(
            f"The optimizer or lr_schedule of the model file fails on one device: {type(error).__name__}: {error}"
        ) from error


def _find_scale(setting: _Setting, policy: Policy, reference: Reference, trained: Sequence[nn.Parameter]) -> None:
    """Scale the loss as far as the first gradients stay finite, with room for those of later steps."""
    kept = {name: buffer.clone() for name, buffer in policy.model.named_buffers()}
    policy.scale = LARGEST_SCALE
    while policy.scale > 1:
        _backward(setting, policy, reference, 0)
        finite = all(math.isfinite(square) for square in _squares(trained))
        for parameter in trained:
            parameter.grad = None
        if finite:
            break
        policy.scale /= 2
    for name, buffer in policy.model.named_buffers():
        buffer.copy_(kept[name])
    policy.scale = reference.loss_scale = max(1.0, policy.scale / 4)


def _backward(setting: _Setting, policy: Policy, reference: Reference, step: int) -> float:
    """Add the gradients of batch ``step``, and return its loss."""
    return sum(_backward_of_part(setting, policy, reference, step, part) for part in range(setting.parts))


def _backward_of_part(setting: _Setting, policy: Policy, reference: Reference, step: int, part: int) -> float:
    model = policy.model
    policy.begin()
    rows = setting.rows(reference.batches[step], part)
    counted = _counters(model) if setting.microbatched else []
    with setting.as_planned(step, part) as watched:
        loss = _loss(setting, policy, rows)
        loss = loss / setting.parts if setting.parts > 1 else loss
    with nullcontext() if setting.shown is None else in_double(setting.shown):  # a custom backward may name dtypes
        if loss.requires_grad:
            policy.backward(loss)
    for parameter in policy.parameters:  # a sparse one can't be clipped or written
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
    for counter, before in counted:  # microbatches, not batches
        counter += (counter - before) * (setting.plan.microbatches - 1)
    reference.dtype = least_precise([reference.dtype, *watched.dtypes])
    if step == 0:
        reference.loss_dtype = loss.dtype
        position = {identity: number for number, identity in enumerate(watched.used)}
        reference.order = {name: position[id(own)] for name, own in policy.own.items() if id(own) in position}
    return float(loss.detach())


def _evaluate(setting: _Setting, policy: Policy, reference: Reference) -> None:
    """Run the last step's batch in evaluation, as the mean of its parts."""
    modes = {module: module.training for module in policy.model.modules()}
    policy.model.eval()
    step = setting.steps + 1  # after so many batches, the accumulated one among them
    alone = replace(setting, microbatched=False, decided=None)
    losses, found = [], list[dict[str, Tensor]]()
    for part in range(setting.parts):
        policy.begin()
        rows = setting.rows(reference.batches[setting.steps - 1], part)
        with alone.as_planned(step, part, evaluates=True), torch.no_grad():
            loss, output = _loss_and_output(setting, policy, rows)
        losses.append(loss / setting.parts)
        found.append(dict(named_outputs(output, loss)))
    for module, mode in modes.items():
        module.training = mode
    reference.evaluated = float(sum(losses))
    outputs = {
        spec.name: join(
            spec.name,
            [part[spec.name] / (setting.parts if spec.adds else 1) for part in found],
            spec.batch_dim,
            spec.adds,
        )
        for spec in setting.offered
        if setting.forward is None
    }
    reference.evaluated_outputs = reference.keep(reference.folder / "evaluated.safetensors", outputs)


def _generate(setting: _Setting, program: Manifest, policy: Policy, reference: Reference) -> None:
    """Compute the logits of the first of the last step's tokens, as many as the program takes at a time, with the parameters after it."""
    modes = {module: module.training for module in policy.model.modules()}
    policy.model.eval()
    policy.begin()
    (tokens,), (logits,) = program.inputs, program.outputs
    source, _ = of_tokens(replace(setting.source, mode=GENERATE), policy.model, None)
    given = {**source.kwargs, tokens.name: reference.batches[setting.steps - 1][tokens.name][: tokens.shape[0]]}
    alone = replace(setting, microbatched=False, decided=None)
    with alone.as_planned(setting.steps + 1, evaluates=True), torch.no_grad(), policy.losses():
        _, given = policy.inputs(((), given))
        made = policy.model(**given)
        found = dict(named_outputs(policy.outputs(made) if policy.precision.output_dtype else made))[logits.name]
    for module, mode in modes.items():
        module.training = mode
    reference.generated = reference.keep(reference.folder / "generated.safetensors", {logits.name: found})


def _loss(setting: _Setting, policy: Policy, rows: Mapping[str, Tensor]) -> Tensor:
    """The loss of these rows, as the model and its loss function compute it, or the user's own reference."""
    return _loss_and_output(setting, policy, rows)[0]


def _loss_and_output(setting: _Setting, policy: Policy, rows: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
    if setting.forward is not None:
        return _given_loss(setting.forward, policy, rows), None
    args, kwargs, targets = setting.arguments(rows)
    args, kwargs = policy.inputs((args, kwargs))
    with policy.losses():
        output = policy.outputs(policy.model(*args, **kwargs))
    with policy.losses(in_loss_fn=True):
        loss = setting.source.loss_fn(output, *targets) if setting.source.loss_fn is not None else own_loss(output)
    assert isinstance(loss, Tensor), named_outputs(output)
    return loss, output


def _given_loss(forward: Callable[..., Any], policy: Policy, rows: Mapping[str, Tensor]) -> Tensor:
    """The loss of these rows, as the user's own reference computes it with the model.

    Raises:
        GraphparError: it returns no scalar tensor.
    """
    with policy.losses():
        loss = forward(policy.model, {name: value.clone() for name, value in rows.items()})
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise GraphparError(f"The reference must return the loss of the batch, a scalar tensor; it returned {what}.")
    return loss


def _clipped(loss: float, policy: Policy, reference: Reference) -> Accumulated:
    """Clip the accumulated gradients to half of their norm."""
    squares = sum(_squares(policy.parameters))
    norm = math.sqrt(squares) if math.isfinite(squares) else 0.0
    max_norm = norm / 2 or 1.0
    found = torch.nn.utils.clip_grad_norm_(policy.parameters, max_norm)
    return Accumulated(loss, float(found), max_norm, _gradients(policy.named, reference, "accumulated"))


def _squares(parameters: Iterable[nn.Parameter]) -> list[float]:
    """Return the sum of each gradient's squares."""
    return [float(each.grad.double().square().sum()) for each in parameters if each.grad is not None]


def _stable_rate(squares: float) -> float:
    """Return a learning rate small enough for a loss of any scale: training that diverges would amplify rounding.

    Args:
        squares: the sum of the gradients' squares.
    """
    norm = math.sqrt(squares) if math.isfinite(squares) else 1.0
    return LEARNING_RATE / max(1.0, norm)


def _counters(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return BatchNorm's counters of batches, each with what it is now."""
    found = (getattr(module, "num_batches_tracked", None) for module in model.modules())
    return [(counter, counter.clone()) for counter in found if isinstance(counter, Tensor)]


def _ties(named: Mapping[str, Tensor]) -> list[tuple[str, ...]]:
    owners: dict[int, list[str]] = {}
    for name, parameter in named.items():
        owners.setdefault(id(parameter), []).append(name)
    return [tuple(names) for names in owners.values() if len(names) > 1]


def _gradients(named: Mapping[str, nn.Parameter], reference: Reference, step: int | str) -> Mapping[str, Tensor]:
    gradients = {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}
    return reference.keep(reference.folder / f"gradients_{step}.safetensors", gradients)


def _usual_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of most floating parameters."""
    counts = Counter(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    return max(counts, key=counts.__getitem__, default=torch.float32)
