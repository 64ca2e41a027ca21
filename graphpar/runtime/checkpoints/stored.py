"""What a rank's part of a program holds: given its first values, loaded and saved, by itself or as a checkpoint.

initialise, load_weights ──► parameters and buffers of this rank's stages ──► state_dict, save_weights
save_checkpoint, with the optimizer's state, the seed and the steps done ──► load_checkpoint, resume, under any plan
save_snapshot, the same into the memory of nodes ──► resume
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from graphpar.runtime import distributed
from graphpar.runtime.checkpoints import checkpoint
from graphpar.runtime.checkpoints.adapters import Adapters
from graphpar.runtime.checkpoints.engine_layouts import EngineTensors
from graphpar.runtime.checkpoints.folders import MEMORY, is_in
from graphpar.runtime.checkpoints.saved_state import State
from graphpar.runtime.checkpoints.snapshots import Snapshots, has_left
from graphpar.runtime.checkpoints.weight_transfer import Channel, Peers, Transfer, all_ranks, engine_tensors, transfer
from graphpar.runtime.checkpoints.weights import Unread, fill_all, held_names, load_all, no_weights, write_whole
from graphpar.runtime.distributed import agreed, gather_objects
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.groups import Groups
from graphpar.runtime.manifest import Manifest
from graphpar.runtime.records import DTYPES
from graphpar.runtime.stages.batches import Feed
from graphpar.runtime.stages.initialise import initial_values, model_of
from graphpar.runtime.stages.loss_scale import LossScale
from graphpar.runtime.state.gradients import Gradients
from graphpar.runtime.state.own_optimizers import Optimizers
from graphpar.runtime.state.parameters import Replicated
from graphpar.runtime.state.replicas import check_replicas

WEIGHTS = Path("weights") / "model.safetensors"


class Stored:
    """The values of this rank's stages. :class:`~graphpar.runtime.pipeline.Pipeline` gives it what it stores, and runs it."""

    program: Manifest
    groups: Groups
    stages: Sequence[nn.Module]
    device: torch.device
    seed: int
    steps_done: int
    weights_version: int | None
    has_last_stage: bool
    _feed: Feed
    _gradients: Gradients
    _optimizers: Optimizers
    _parameters: Replicated
    _saver: checkpoint.Saver
    _scale: LossScale
    _snapshots: Snapshots | None = None

    @property
    def reports(self) -> bool:
        """Whether this is the one rank that should print the loss: the first of those that hold the last stage."""
        others = (index for axis, index in self.groups.place.items() if axis != "pp")
        return self.has_last_stage and not any(others)

    # Weights

    def initialise(self, build: Callable[[], nn.Module] | None = None) -> None:
        """Give this rank's parameters and buffers the values that the model has when it is built on one device with this seed.

        No rank has the whole model in memory, or draws the weights of other stages; those of its own it draws with the ranks of an
        axis: see :func:`~graphpar.runtime.stages.initialise.initial_values`. A collective call.

        Args:
            build: makes the model; by default the ``model`` of the model file that the program was compiled from.

        Raises:
            RuntimeProgramError: the program doesn't know its model file, or ``build`` makes another model.
        """
        self._check_unmerged("initialise")
        self.synchronize()
        with agreed():
            names, group = held_names(self.stages, self.program), self.groups.largest()
            values = initial_values(build or model_of(self.program), self.seed, names, group, self.device)
            fill_all(self.stages, values, self.program, self.groups.place, self._parameters.put)
            self._parameters.written()
        self.weights_version = 0
        with agreed():
            check_replicas(self.stages, self.program, self.groups, self._parameters.pieces)

    def load_weights(self, path: str | Path | None = None, *, strict: bool = True) -> None:
        """Load parameters and persistent buffers from a safetensors file or a folder of shards.

        By default from the program's own ``weights/model.safetensors``, or where it has none as :meth:`initialise` makes them.
        A file of the base model, which has no adapters, leaves these as they begin.
        The file has whole tensors; each rank takes its shard. A collective call: all ranks fail if one does. ``strict=False``
        ignores what no stage takes.

        Raises:
            RuntimeProgramError: the file is not there, names or shapes do not fit, or ranks that should hold the
                same values loaded different ones.
        """
        self._check_unmerged("load_weights")
        has_own = path is not None or any(gather_objects((self.program.folder / WEIGHTS).exists()))
        if not has_own and self.program.model_file is not None:
            self.initialise()
            return
        source = self.program.folder / WEIGHTS if path is None else Path(path)
        with agreed():
            if path is None and not source.exists():
                raise RuntimeProgramError(no_weights(self.program))
        self.synchronize()
        put, draw = self._parameters.put, lambda: self.adapters.draw(self.seed)
        load_all(self.stages, source, self.program, self.groups, put, draw, strict=strict)
        self._parameters.written()
        self.weights_version = 0
        with agreed():
            check_replicas(self.stages, self.program, self.groups, self._parameters.pieces)

    def save_weights(self, path: str | Path) -> None:
        """Write the whole model's parameters and persistent buffers into one safetensors file; a collective call.

        Each rank writes its shards beside ``path``, on a disk that all machines share; rank 0 joins them, one tensor at a time.
        The keys are those of the user's model, so ``model.load_state_dict(load_file(path))`` works.
        """
        self._check_unmerged("save_weights")
        self._save_whole(Path(path), lambda stored: write_whole(stored, path, self.program.ties), None)

    def _save_whole(
        self, path: Path, join: Callable[[Mapping[str, Unread]], object], names: Collection[str] | None
    ) -> None:
        checkpoint.save_whole(self._saver, self._state(None), path, join, names)

    def send_weights(
        self, to: Stored | Peers | EngineTensors, *, version: int | None = None, strict: bool = True
    ) -> Transfer:
        """Give another program of this model this one's weights; a collective call of both.

        Each process receives what it needs and does not have, in the narrower dtype of the two, and nobody has a whole tensor. Of adapters
        that the other program does not have, the products are added to the weights that are sent.

        Args:
            to: a pipeline of the same processes, or tensors of another engine in them; or the ranks of another launch, which call
                :meth:`receive_weights`, or :meth:`Peers.receive` with tensors of an engine.
            version: a number that the receiver keeps as ``weights_version``; by default the steps that this pipeline has done.
            strict: False: leave out what the other program does not have, such as the head of a value.

        Raises:
            RuntimeProgramError: in all processes: the programs are of different models, or a trained parameter would be rounded.
        """
        number = self.steps_done if version is None else version
        may = functools.partial(self._check_unmerged, "send_weights")
        if isinstance(to, Peers):
            to.check(sends=True)
            return transfer(to.channel, self._state(None), None, number, strict, may=may)
        if isinstance(to, EngineTensors):
            return transfer(all_ranks(self.device), self._state(None), to, number, strict, may=may)
        may()
        return to._receive(all_ranks(self.device), self._state(None), number, strict)

    def weights_for(
        self,
        mapping: str | Path = "hf",
        *,
        ranks: Collection[int] | None = None,
        dtype: torch.dtype | str | None = None,
        bucket_bytes: int = 2**30,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield undivided tensors with the names that another engine loads, of weights with the products of adapters added.

        A collective call between two steps: every rank iterates to the end. On ranks that receive nothing, nothing is yielded.

        Args:
            mapping: a mapping file, or the name of one that graphpar has: "hf" (the model's names), "hf_mixtral", "hf_qwen_moe".
            ranks: which receive the tensors; by default all.
            dtype: of floating-point tensors, such as "bf16" or ``torch.bfloat16``; by default as they are stored.
            bucket_bytes: how much of the model a rank has at a time, or one tensor where that is larger.

        Raises:
            RuntimeProgramError: in all processes: the mapping can't be read, or leaves out a tensor of the model; or an argument is wrong.
        """
        self._check_unmerged("weights_for")
        dtype = DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise RuntimeProgramError(
                f"weights_for: dtype is {dtype!r}, not {', '.join(DTYPES)}, or one of torch's floating-point dtypes"
            )
        if not isinstance(ranks, Collection | None):
            raise RuntimeProgramError(f"weights_for: ranks is {ranks!r}, not a list of ranks, such as [0]")
        return engine_tensors(all_ranks(self.device), self._state(None), mapping, ranks, dtype, bucket_bytes)

    def receive_weights(self, peers: Peers) -> Transfer:
        """Take the weights that another launch sends with :meth:`send_weights`; a collective call of both.

        Should it fail on the way, this pipeline has weights of two steps, and runs no forward before others were received or loaded.
        """
        peers.check(sends=False)
        return self._receive(peers.channel, None, 0, True)

    def _receive(self, channel: Channel, sender: State | None, version: int, strict: bool) -> Transfer:
        state, before = self._state(None), self.weights_version
        self.weights_version = None
        try:
            found = transfer(
                channel, sender, state, version, strict, may=functools.partial(self._check_unmerged, "receive_weights")
            )
        except RuntimeProgramError:  # before anything was sent
            self.weights_version = before
            raise
        self.weights_version = found.version
        return found

    def _check_weights(self) -> None:
        if self.weights_version is None:
            raise RuntimeProgramError(
                "weights were on their way when their sender failed, so this pipeline has some of two steps; receive or load them again"
            )

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's parameters and persistent buffers (its shards of them), by the user's names.

        At ZeRO level 1 a collective call: see :meth:`synchronize`. Main values that ranks store in pieces are gathered.
        """
        self.synchronize()
        own = {name: value for stage in self.stages for name, value in stage.state_dict().items()}
        return own | self._parameters.values()

    def synchronize(self) -> None:
        """Wait until the parameters of this rank have the values that other ranks' optimizers gave them (ZeRO level 1).

        A collective call there: values may still have to be sent. Elsewhere there is nothing to wait for.
        """
        self._parameters.settle()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that this rank updates, with the names that the model's ``named_parameters()`` gives them.

        Each copy that stages share has the first name of its tie. At ZeRO level 1 these are the rank's own (or 1-D slices of parameters).
        Where none is trained, an empty parameter that is follows, since optimizers want one.
        """
        return self._optimizers.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that this rank updates, as an optimizer takes them."""
        return (parameter for _, parameter in self.named_parameters())

    @functools.cached_property
    def adapters(self) -> Adapters:
        """The model's low-rank adapters: to save, load and merge them."""
        return Adapters(self._parameters, self._save_whole)

    def _check_unmerged(self, what: str) -> None:
        if self.program.adapters:
            self.adapters.check_apart(what)

    # Checkpoints

    def save_checkpoint(
        self,
        path: str | Path,
        optimizer: Optimizer | None = None,
        *,
        step: int,
        data: Mapping[str, Any] | None = None,
        keep: int | None = None,
        best: bool = False,
        wait: bool = True,
    ) -> None:
        """Save weights, optimizer state and ``step`` between two steps, for programs of any plan; a collective call.

        Each rank writes a part. The folder ``path`` appears when it is whole; then the file ``latest`` beside it names it.

        Args:
            path: a folder beside other checkpoints, such as ``ckpt/100``, on a disk that all machines share.
            optimizer: that of this rank.
            step: number of the last step that was taken.
            data: position in the data, or whatever else is to be kept as JSON: that of rank 0.
            keep: remove all but this many of the last checkpoints, and the best.
            best: let the file ``best`` beside it name it: ``load_checkpoint("ckpt/best")`` loads it.
            wait: False: copy what is saved and write it while training goes on. An error is then raised by the next call that saves
                or loads, or by ``close``.

        Raises:
            RuntimeProgramError: it can't be saved, gradients are yet to be reduced, or ranks that update the same parameters have made
                them different.
        """
        self._saver.wait()
        state, progress = self._to_save("save_checkpoint", optimizer)
        time = checkpoint.save(
            self._saver, state, progress, path, step=step, data=data, keep=keep, best=best, wait=wait
        )
        if self._snapshots is not None and self._snapshots.checkpoints == Path(path).absolute().parent:
            self._snapshots.saved(time)

    def save_snapshot(
        self,
        path: str | Path,
        optimizer: Optimizer | None = None,
        *,
        step: int,
        data: Mapping[str, Any] | None = None,
        memory: str | Path = MEMORY,
    ) -> None:
        """Keep what :meth:`save_checkpoint` saves in the memory of this node and the next one, for :meth:`resume`; a collective call.

        It returns when a copy is made, which is written and sent while training goes on. The last two are kept.

        Args:
            path: the folder of checkpoints. A snapshot is taken up as long as the latest of them is.
            memory: a folder in the memory of each node, which outlives the ranks.

        Raises:
            RuntimeProgramError: a node has too little memory, or the snapshot before could not be kept; or as :meth:`save_checkpoint`.
        """
        state, progress = self._to_save("save_snapshot", optimizer)
        self._in_memory(path, memory).save(state, progress, step=step, data=data)

    def drop_snapshots(self, path: str | Path | None = None, memory: str | Path = MEMORY) -> None:
        """Remove the snapshots of this model that :meth:`save_snapshot` has kept: training has ended. A collective call.

        Args:
            path, memory: the folder of checkpoints, and that of a node's memory, where an earlier start may have left some.
        """
        if self._snapshots is None and path is not None and all(gather_objects(has_left(Path(path), Path(memory)))):
            self._in_memory(path, memory)
        if self._snapshots is not None:
            self._snapshots.drop(checkpoint.whole_shapes(self._state(None)))
            self._snapshots = None

    def _in_memory(self, path: str | Path, memory: str | Path) -> Snapshots:
        places = Path(path).absolute(), Path(memory).absolute()
        if self._snapshots is None:
            self._saver.wait()
            self._snapshots = Snapshots(*places, self._saver, self.device)
        if (self._snapshots.checkpoints, self._snapshots.memory) != places:
            raise RuntimeProgramError(
                f"snapshots go to {self._snapshots.memory}, with the checkpoints in {self._snapshots.checkpoints}: call drop_snapshots() "
                "before others are kept"
            )
        return self._snapshots

    def _to_save(self, what: str, optimizer: Optimizer | None) -> tuple[State, checkpoint.Progress]:
        """Return what a checkpoint has, between two steps."""
        self._check_unmerged(what)
        self._optimizers.check_goes_on(optimizer)
        with agreed():
            self._gradients.check_reduced(what)
        self._gradients.check_copies()
        schedule = self._optimizers.schedule_of(optimizer)
        return self._state(optimizer), checkpoint.Progress(self.seed, self.steps_done, self._scale, schedule)

    def load_checkpoint(self, path: str | Path, optimizer: Optimizer | None = None) -> checkpoint.Checkpoint:
        """Load what a program of this model has saved, under any plan and from any number of ranks; a collective call.

        The seed, the count of steps and the loss scale become those of the checkpoint, too.

        Args:
            path: a checkpoint, a folder of checkpoints (the latest), or the file in it that names the best (``ckpt/best``).
            optimizer: that of this rank, of the same kind; its hyperparameters become those of the checkpoint. Without one the
                weights alone are loaded.

        Raises:
            RuntimeProgramError: there is no checkpoint, it is damaged, or it does not fit the program or the optimizer: the message
                lists tensors that are missing, unexpected or of other shapes. Then nothing is changed.
        """
        loaded = self._load(lambda held: checkpoint.on_disk(path, held), optimizer)
        assert loaded is not None
        return loaded

    def _load(
        self, find: Callable[[checkpoint.Shapes], checkpoint.Source | None], optimizer: Optimizer | None
    ) -> checkpoint.Checkpoint | None:
        self._check_unmerged("load_checkpoint")
        self._saver.wait()
        self._optimizers.check_goes_on(optimizer)
        found = checkpoint.load(self._state(optimizer), find)
        if found is None:
            return None
        loaded, progress = found
        if self.program.scales_loss and progress.scale.value != 1.0:
            self._scale.take(progress.scale)
        self.seed = self._feed.seed = progress.seed
        self.steps_done = progress.steps_done
        self.weights_version = loaded.step
        if optimizer is not None and progress.schedule is not None:
            self._optimizers.loaded(optimizer, progress.schedule, loaded.step)
        return loaded

    def resume(
        self, path: str | Path, optimizer: Optimizer | None = None, *, memory: str | Path | None = None
    ) -> checkpoint.Checkpoint | None:
        """Load the latest checkpoint of a folder as :meth:`load_checkpoint`, or nothing where no rank sees one; a collective call.

        Args:
            memory: where :meth:`save_snapshot` has kept snapshots, of which the newest is loaded instead that was taken after this
                checkpoint.
        """
        requested, loaded = self._settings(optimizer), None
        self._optimizers.check_goes_on(optimizer)  # rather than at the first save
        if memory is not None:
            snapshots = self._in_memory(path, memory)
            loaded = self._load(snapshots.newest, optimizer)
            for note in dict.fromkeys(snapshots.notes) if self.reports else ():
                print(note, flush=True)
            if self.reports and loaded is not None:
                print(f"training goes on from the snapshot of step {loaded.step} in {memory}", flush=True)
        if loaded is None and any(gather_objects(is_in(path))):
            loaded = self.load_checkpoint(path, optimizer)
            if self.reports:
                print(f"training goes on from the checkpoint {loaded.path}", flush=True)
        for name, value in self._settings(optimizer).items() if self.reports and loaded is not None else ():
            if value != requested[name]:
                print(f"{name}: {value}, that of the checkpoint, not {requested[name]}", flush=True)
        distributed.after_resume(loaded.step if loaded is not None else 0)
        return loaded

    def _settings(self, optimizer: Optimizer | None) -> dict[str, object]:
        """What a checkpoint replaces of what was asked for, by name."""
        return {"seed": self.seed, "learning rate": self._optimizers.rates(optimizer)}

    def _state(self, optimizer: Optimizer | None) -> State:
        self.synchronize()
        with agreed():
            return self._optimizers.state(optimizer)
