"""torch's pipeline schedules, by name or from a table of actions, placed as the plan says.

GPipe, 1F1B                                     one stage a rank
Interleaved1F1B, LoopedBFS, InterleavedZeroBubble   stage i on rank i mod pp
ZBVZeroBubble, DualPipeV                        two stages a rank, stage i on ranks 0 .. pp-1, pp-1 .. 0
"actions" in the plan                           any placement; with state that is sharded, these also gather and reduce
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    _Action,
    _add_send_recv,
    _ComputationType,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.manifest import Manifest
from graphpar.runtime.schedule_records import SCHEDULES
from graphpar.runtime.stages.modules import KEYWORD, StageAdapter
from graphpar.runtime.state.fully_sharded import add_up, begin_microbatch, free, gather, reduce_gradients
from graphpar.runtime.torch_versions import Boundaries

Schedule = Any
"""A torch schedule; its classes share ``step`` but no public base."""


LossFunction = Callable[[Tensor, Tensor], Tensor]


def build_schedule(program: Manifest, stages: list[PipelineStage], loss_fn: LossFunction) -> Schedule:
    """Build the plan's schedule over this rank's stages; ``loss_fn`` takes what the last one returns, and a target.

    Raises:
        RuntimeProgramError: torch knows no such schedule, refuses it for this plan, or places stages elsewhere.
    """
    try:
        build = _from_actions if program.actions else _by_name
        schedule = build(program, stages, loss_fn)
    except (ValueError, AssertionError) as error:
        if isinstance(error, RuntimeProgramError):
            raise
        raise RuntimeProgramError(f"the schedule {program.schedule} cannot run this plan: {error}") from error
    _check_placement(program, schedule)
    schedule._kwargs_chunk_spec = _chunk_specs(program, stages)
    return schedule


def _by_name(program: Manifest, stages: list[PipelineStage], loss_fn: LossFunction) -> Schedule:
    names = [row.name for row in SCHEDULES.values() if row.torch_class is not None]
    canonical = {name.lower(): name for name in names}.get(program.schedule.lower())
    if canonical is None:
        raise RuntimeProgramError(f"there is no schedule {program.schedule!r}; there are {', '.join(names)}")
    kind: Callable[..., Schedule] = get_schedule_class(canonical)
    if not issubclass(get_schedule_class(canonical), PipelineScheduleSingle):
        return kind(stages, program.microbatches, loss_fn=loss_fn, scale_grads=False)
    if len(stages) != 1:
        raise RuntimeProgramError(f"{canonical} runs one stage a rank; the plan places {len(stages)} on a rank")
    return kind(stages[0], program.microbatches, loss_fn=loss_fn, scale_grads=False)


def _from_actions(program: Manifest, stages: list[PipelineStage], loss_fn: LossFunction) -> Schedule:
    schedule = _PipelineScheduleRuntime(stages, program.microbatches, loss_fn=loss_fn, scale_grads=False)
    check_actions(program)
    rows = _action_rows(program)
    schedule._prepare_schedule_with_comms(
        {rank: [cell for cell in row if cell is None or not _is_of_state(cell)] for rank, row in rows.items()}
    )
    if program.fully_sharded:  # torch has put its own actions on state where it likes them
        schedule.pipeline_order_with_comms = _add_send_recv(
            {rank: [cell for cell in row if cell is not None] for rank, row in rows.items()},
            stage_to_rank=schedule.stage_index_to_group_rank.__getitem__,
            num_stages=len(program.stages),
        )
        _act_on_state(schedule, stages)
    return schedule


def _action_rows(program: Manifest) -> dict[int, list[_Action | None]]:
    actions = program.actions or {}
    return {rank: [_Action.from_str(text) if text else None for text in row] for rank, row in actions.items()}


def check_actions(program: Manifest) -> None:
    """Check that the plan's table, if it has one, loses no gradient and computes with gathered parameters.

    Raises:
        RuntimeProgramError: it does not; the plan was edited.
    """
    cells = [cell for row in _action_rows(program).values() for cell in row if cell is not None]
    if cells:
        _check_gradients(program, cells)
        _check_gathers(program, cells)


_LAST = ("FULL_BACKWARD", "BACKWARD_WEIGHT")
_ONCE = {("FORWARD",): "forwards", ("FULL_BACKWARD", "BACKWARD_INPUT"): "backwards", _LAST: "weight gradients"}


def _check_gradients(program: Manifest, cells: list[_Action]) -> None:
    """Check that the table loses no gradient: each stage runs every microbatch once in each direction and, where state is sharded,
    reduces once, after its last backward.

    Raises:
        RuntimeProgramError: it does not; the plan was edited.
    """
    whole = list(range(program.microbatches))
    for stage in range(len(program.stages)):
        own = [each for cell in cells for each in cell.sub_actions or (cell,) if each.stage_index == stage]
        kinds = [each.computation_type.name for each in own]
        for names, what in _ONCE.items():
            found = sorted(each.microbatch_index or 0 for each, kind in zip(own, kinds) if kind in names)
            if program.mode == "train" and found != whole:
                raise RuntimeProgramError(
                    f"plan.json's actions have {what} of stage {stage} for the microbatches {found}; they must be {whole}"
                )
        last = max((place for place, kind in enumerate(kinds) if kind in _LAST), default=-1)
        reduces = [place for place, kind in enumerate(kinds) if kind == "REDUCE_GRAD"]
        if program.fully_sharded and (len(reduces) != 1 or reduces[0] < last):
            raise RuntimeProgramError(
                f"plan.json's actions have {len(reduces)} x {stage}REDUCE_GRAD; it must be there once, after the last backward of "
                f"stage {stage}, since gradients would be lost"
            )


def _check_gathers(program: Manifest, cells: list[_Action]) -> None:
    """Check that each stage computes between its ``UNSHARD`` and its ``RESHARD``, where the table has them.

    Raises:
        RuntimeProgramError: it does not; the plan was edited.
    """
    gathered: set[int] = set()
    for cell in cells if program.gathers_by_table else ():
        for each in cell.sub_actions or (cell,):
            kind, stage = each.computation_type.name, each.stage_index
            if kind in ("UNSHARD", "RESHARD"):
                if (stage in gathered) != (kind == "RESHARD"):
                    what = "not gathered" if kind == "RESHARD" else "gathered already"
                    raise RuntimeProgramError(f"plan.json's actions have {each}, but stage {stage} is {what} then")
                (gathered.add if kind == "UNSHARD" else gathered.discard)(stage)
            elif stage not in gathered:
                raise RuntimeProgramError(
                    f"plan.json's actions have {each} where stage {stage} is not gathered; {stage}UNSHARD must come before it, and "
                    f"{stage}RESHARD after it"
                )
    if gathered:
        raise RuntimeProgramError(
            f"plan.json's actions have no {min(gathered)}RESHARD after stage {min(gathered)} was gathered"
        )


def _is_of_state(cell: _Action) -> bool:
    return cell.microbatch_index is None and cell.sub_actions is None


def _act_on_state(schedule: Schedule, stages: list[PipelineStage]) -> None:
    """Let the actions on state do what they say, where torch would do nothing: our stages are no FSDP modules."""
    own = {stage.stage_index: stage for stage in stages if isinstance(stage, ShardedStage)}
    for kind, act in (
        (_ComputationType.UNSHARD, lambda stage: gather(stage.emitted)),
        (_ComputationType.RESHARD, lambda stage: free(stage.emitted)),
        (_ComputationType.REDUCE_GRAD, lambda stage: reduce_gradients(stage.emitted) if stage.reduces else None),
    ):
        schedule.register_custom_function(kind, lambda action, _, act=act: act(own[action.stage_index]))


class Stage(Boundaries, PipelineStage):
    """torch's stage, with two changes.

    Its split backward may return gradients that can't be sent, or give one tensor to two parameters. And its buffers for what is received,
    one for each microbatch of a step and direction, have memory only from when a message is awaited to when it is taken: an activation
    then lives until its backward, a gradient as long as its backward runs.
    """

    def _prepare_forward_infra(self, *args: Any, **options: Any) -> Any:
        made = super()._prepare_forward_infra(*args, **options)
        for received in self.args_recv_info.values():
            _take_memory(received)
        return made

    def _create_grad_recv_info(self, *args: Any, **options: Any) -> Any:
        made = super()._create_grad_recv_info(*args, **options)
        _take_memory(made)
        return made

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Begin to receive what enters the stage."""
        _give_memory(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        """Begin to receive the gradients of what left the stage."""
        _give_memory(self.grad_recv_info.get(bwd_chunk_id, ()))
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Take the gradients of what left the stage from the next one, on this rank; torch writes zeros where there are none."""
        _give_memory(self.grad_recv_info[mb_index])
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        found = super()._retrieve_recv_activations(fwd_chunk_id)
        _take_memory(self.args_recv_info[fwd_chunk_id])
        return found

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        found = super()._retrieve_recv_grads(bwd_chunk_id)
        _take_memory(self.grad_recv_info[bwd_chunk_id])
        return found

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Run a backward, or a half of it; torch calls this for each."""
        new = [parameter for parameter in self.submod.parameters() if parameter.grad is None]
        received, groups = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        for parameter in new if backward_type == "weight" else ():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()  # later microbatches are added in place
        return tuple(each.contiguous() if isinstance(each, Tensor) else each for each in received), groups


def _take_memory(infos: Iterable[Any]) -> None:
    """Let one element stand for each message, with its sizes and dtype."""
    for info in infos:
        if isinstance(buffer := getattr(info, "buffer", None), Tensor):
            info.buffer = buffer.new_empty(()).expand(buffer.shape).requires_grad_(buffer.requires_grad)


def _give_memory(infos: Iterable[Any]) -> None:
    """Give memory to the messages that are about to arrive."""
    for info in infos:
        if isinstance(buffer := getattr(info, "buffer", None), Tensor):
            info.buffer = buffer.new_empty(buffer.shape).requires_grad_(buffer.requires_grad)


class ShardedStage(Stage):
    """A stage whose state is sharded over dp_shard."""

    @property
    def emitted(self) -> nn.Module:
        """The stage as it is in the emitted program."""
        return cast(StageAdapter, self.submod).stage

    def begin(self, *, reduces: bool) -> None:
        """Begin a step; ``reduces``: whether its gradients are reduced at its end."""
        self.reduces = reduces
        begin_microbatch(self.emitted, reduces=False, frees=True)

    def backward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Run a backward, or a half of it; torch calls this for each."""
        found = super().backward_maybe_with_nosync(*args, **kwargs)
        add_up(self.emitted)
        return found


def _check_placement(program: Manifest, schedule: Schedule) -> None:
    planned = {stage.index: stage.rank for stage in program.stages}
    default = {index: index for index in planned}
    placed: dict[int, int] = getattr(schedule, "stage_index_to_group_rank", default)
    if placed != planned:
        raise RuntimeProgramError(
            f"the schedule {program.schedule} places stages on ranks {[placed[i] for i in sorted(placed)]}; "
            f"the plan places them on {[planned[i] for i in sorted(planned)]}"
        )


def _chunk_specs(program: Manifest, stages: list[PipelineStage]) -> dict[str, Any]:
    """Say along which dim torch splits each keyword input into microbatches."""
    specs: dict[str, Any] = {}
    for name in keyword_names(program, [stage.stage_index for stage in stages]):
        dim = None if name in program.count_names else program.input(name).batch_dim
        specs[KEYWORD + name] = _Replicate() if dim is None else TensorChunkSpec(dim)
    return specs


def keyword_names(program: Manifest, stage_indices: list[int]) -> list[str]:
    """List the inputs and counts that any of these stages names, each once, in the order of the program."""
    stages = [each for i in stage_indices for each in (program.stages[i], program.stages[i].in_evaluation)]
    used = {name for stage in stages for name in stage.inputs + stage.counts}
    return [spec.name for spec in program.inputs if spec.name in used] + [
        name for name in program.count_names if name in used
    ]


def microbatch(program: Manifest, values: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    """Select microbatch ``index`` of the inputs ``values``, which have a replica's rows."""
    parts: dict[str, Tensor] = {}
    for name, value in values.items():
        dim = program.input(name).batch_dim
        parts[name] = value if dim is None else torch.tensor_split(value, program.microbatches, dim)[index]
    return parts
