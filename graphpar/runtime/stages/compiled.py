"""``torch.compile`` of a program's blocks.

    block.forward ──torch.compile──► the same numbers from fused kernels; what FSDP2, ZeRO-1 and pipelines do around it stays as it is

    checkpoint(block.forward) ──torch.compile──► the same, keeping the same results: of blocks that keep those of single operators

A block is compiled whole, with the collectives in it, and once for all its instances. Where torch can't follow it, as into a user's own
operator without a fake kernel, it is refused: parts of a block between which Python runs gain little, and nobody would see why.

    keep_mask(shape, p, keys)   ──►  graphpar::keep_mask     opaque: its whole numbers wrap around, which inductor's bounds don't know
    random_bits(shape, keys)    ──►  graphpar::random_bits   the same
    grouped_mm in fp32          ──►  shapes of its results; torch 2.13 has them for bf16 alone
"""

from __future__ import annotations

import functools
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from inspect import isfunction, unwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._triton import has_triton
from torch.utils.checkpoint import checkpoint

from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.manifest import Manifest
from graphpar.runtime.option_kinds import COMPILED, GENERATE, listed_lengths
from graphpar.runtime.schedule_records import SCHEDULES
from graphpar.runtime.stages.compiled_rest import with_parts
from graphpar.runtime.stages.dropout import KERNEL
from graphpar.runtime.torch_versions import COMPILES_COLLECTIVES, COMPILES_REPETITIONS


def backend_of(program: Manifest, compile: bool | str | None, device: torch.device) -> str | None:
    """Return the backend that compiles blocks on this device; None: they run as they are.

    Args:
        compile: None: as the plan has it, on the kind of device that it is for, unless they can't be compiled, which is warned of.

    Raises:
        RuntimeProgramError: they can't be compiled, as is asked for.
    """
    asked = compile is not None
    if compile is None:
        compile = program.compile and program.device_kind in (None, device.type) and program.mode != GENERATE
    backend = ("inductor" if compile else None) if isinstance(compile, bool) else compile
    if backend is None:
        return None
    _keep_beside(program.folder)
    _allow_graphs(2 * len(listed_lengths(program.seq)) if program.seq else 0)
    if (reason := _unable(program, backend, device)) is None:
        return backend
    if asked:
        raise RuntimeProgramError(reason)
    if int(os.environ.get("RANK", "0")) == 0:
        warnings.warn(f"blocks are not compiled, as the plan has it: {reason}", stacklevel=2)
    return None


def splits_backwards(schedule: str, cells: Iterable[str | None]) -> bool:
    """Whether a schedule, whose table has ``cells``, if any, runs the two halves of a backward apart."""
    known = SCHEDULES.get(schedule)
    return (known is not None and known.splits_backward) or any("W" in cell for cell in cells if cell)


def obstacle(schedule: str, cells: Iterable[str | None], dropout: str | None, offload: Collection[str]) -> str | None:
    """Say why blocks can't be compiled under a schedule, whose table has ``cells``, if any, with this ``dropout`` and what they ``offload``
    to the host."""
    if splits_backwards(schedule, cells):
        return (
            f"the schedule {schedule} splits backwards in two, which compiled blocks run as one; compile the model with another "
            "schedule, such as 1F1B, or leave compile out"
        )
    if dropout == KERNEL:
        return (
            "dropout=kernel seeds torch's generator before each attention, which compiled blocks can't do; compile the model without "
            "dropout=kernel, or leave compile out"
        )
    if "activations" in offload:
        return "offload=activations with compiled blocks is not supported yet; leave one of them out"
    return None


def _keep_beside(folder: Path) -> None:
    """Keep what inductor compiles in a folder beside the program, for other ranks and the next start, where that can be written and the
    user has not set another place. Inductor's call of the C++ compiler takes no path that a shell would not take as it is."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    if (
        os.environ.get(_CACHE, usual := default_cache_dir()) == usual
        and os.access(folder, os.W_OK)
        and shlex.quote(str(folder)) == str(folder)
    ):
        os.environ[_CACHE] = str(folder / COMPILED)


def _allow_graphs(most: int) -> None:
    """Let torch make so many graphs of a block: one for each length of a list, in training and in evaluation."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, most)


def _unable(program: Manifest, backend: str, device: torch.device) -> str | None:
    """Say why the blocks of ``program`` can't be compiled here."""
    backends = torch._dynamo.list_backends(None)  # type: ignore[no-untyped-call, arg-type]
    if backend not in backends:
        return f"torch.compile has no backend {backend!r}; there are {', '.join(backends)}"
    if not COMPILES_COLLECTIVES and (program.folder / "collectives.py").is_file():
        return f"torch {torch.__version__} loses collectives in blocks that it compiles; use torch 2.13 or later, or run with --no-compile"
    cells = (cell for row in (program.actions or {}).values() for cell in row)
    reason = obstacle(program.schedule, cells, program.dropout, program.offload)
    if reason is None and backend == "inductor" and device.type == "cuda" and not has_triton():
        return "torch.compile needs triton on GPUs; install it, or run with --no-compile"
    if reason is None and backend == "inductor" and device.type == "cpu":
        from torch._inductor import cpp_builder

        try:
            cpp_builder.get_cpp_compiler()
        except Exception as error:
            return f"torch.compile needs a C++ compiler on the CPU ({error}); install one, or run with --no-compile"
    return reason


def compile_blocks(stage: nn.Module, package: str, backend: str, partly: Collection[str] = ()) -> None:
    """Compile the forwards of the blocks of ``stage``, what it computes between them, and the functions that it calls elsewhere; before
    FSDP2 shards them.

    Blocks ``partly``, which keep results of single operators and compute others again, are left to :func:`compile_repetitions`. What
    stands between blocks runs as it is where torch can't trace it.

    Of a loss in chunks its function is compiled: chunks compute their gradients in the forward, which torch can't trace.
    """
    torch._dynamo.config.skip_nnmodule_hook_guards = False  # else blocks share the graph of one that has other hooks
    know_grouped_products()
    streams = sys.modules.get(f"{package}.random_streams")
    if streams is not None:
        hide_draws(streams)
    left = {stage.get_submodule(path) for path in partly}
    repeated, names = list(blocks(stage, package)), _names(stage, package)
    for module in repeated:
        if module not in left and "in_chunks" not in module.forward.__code__.co_names:
            module.forward = _whole(module, backend)  # type: ignore[method-assign]
    apart = {*repeated} | {names[name] for name in _APART if name in names}
    options, called = _overlapping(_emitted(stage, package), backend), set[str]()
    for name, method in _methods(stage, package):
        rest = with_parts(method, stage, apart, lambda part: _tried(part, backend, options))
        setattr(stage, name, functools.partial(rest, stage))
        called.update(rest.__code__.co_names)
    for name, function in _functions(stage, package).items():
        if name in called:  # and not in a part alone
            names[name] = _tried(function, backend)


def leave_functions(stage: nn.Module, package: str) -> None:
    """Let ``stage`` call its functions as they are, where another program of this process has compiled them."""
    for name, function in _functions(stage, package).items():
        _names(stage, package)[name] = function


def _functions(stage: nn.Module, package: str) -> dict[str, Callable[..., Any]]:
    """Return the emitted functions of its operators that ``stage`` calls outside of blocks, as they are, by name."""
    used = {name for _, method in _methods(stage, package) for name in method.__code__.co_names}
    own = _names(stage, package)
    found = {name: unwrap(value) for name, value in own.items() if name in used and isfunction(value)}
    return {name: function for name, function in found.items() if function.__module__ == f"{package}.blocks"}


def _methods(stage: nn.Module, package: str) -> list[tuple[str, Callable[..., Any]]]:
    """The emitted methods of ``stage``, by name: its forward, and others for evaluation and other lengths."""
    found = vars(_emitted(stage, package)).items()
    return [(name, method) for name, method in found if isfunction(method) and name != "__init__"]


def _emitted(stage: nn.Module, package: str) -> type:
    """The emitted class of ``stage``, of which FSDP2 makes one of its own."""
    return next(kind for kind in type(stage).__mro__ if kind.__module__.startswith(f"{package}."))


def _names(stage: nn.Module, package: str) -> dict[str, Any]:
    """The names in the emitted file of ``stage``."""
    return vars(sys.modules[_emitted(stage, package).__module__])


def _tried(function: Callable[..., Any], backend: str, options: dict[str, Any] | None = None) -> Callable[..., Any]:
    """Compile a function as one graph; where that can't be, it runs as it is."""
    compiled, able = _limited(torch.compile(function, fullgraph=True, backend=backend, options=options), function), True

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal able
        if able:
            try:
                return compiled(*args, **kwargs)
            except torch._dynamo.exc.TorchDynamoException as error:
                able = False
                warnings.warn(f"{function.__name__} is not compiled: {error}", stacklevel=2)
        return function(*args, **kwargs)

    return run


def _limited(compiled: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``compiled``, in whose place ``function`` runs for what would be one graph too many."""
    warned = False

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal warned
        try:
            return compiled(*args, **kwargs)
        except torch._dynamo.exc.FailOnRecompileLimitHit:
            if not warned:
                warned = True
                limit = torch._dynamo.config.recompile_limit
                warnings.warn(
                    f"{function.__qualname__} has {limit} graphs, and runs uncompiled where it would need another one; hooks that change "
                    "what they read are the usual reason. torch._dynamo.config.recompile_limit is the limit",
                    stacklevel=2,
                )
        return function(*args, **kwargs)

    return run


def compile_repetitions(stage: nn.Module, backend: str, partly: Collection[str]) -> None:
    """Compile blocks with what they run again, once the emitted ``recompute_units`` has said what: the compiler keeps the same results.
    Blocks of a class that keep the same are one graph.

    Left as they are: blocks that gather again, those that write buffers, which run on copies again, and those in which rows travel, whose
    products by expert get operands in a layout that they refuse from inductor.
    """
    made: dict[Any, Callable[..., Any]] = {}
    for path in partly if COMPILES_REPETITIONS else ():
        module = stage.get_submodule(path)
        contexts: Any = getattr(module.forward, "keywords", {}).get("context_fn")
        keeps, _, writes = getattr(contexts, "args", None) or (None, None, ())
        if keeps is not None and not writes and not _rows_travel(type(module)):
            key = type(module), getattr(keeps, "func", keeps), repr(getattr(keeps, "args", ()))
            if key not in made:
                made[key] = _repeating(type(module), functools.partial(contexts.func, keeps, None, ()), backend)
            module.forward = functools.partial(made[key], module)  # type: ignore[method-assign]


def _repeating(kind: type[nn.Module], contexts: Callable[[], Any], backend: str) -> Callable[..., Any]:
    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(
            kind.forward, module, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs
        )

    compiles: Any = torch.compile  # whose types don't know the option
    options = _overlapping(kind, backend)
    compiled = compiles(run, fullgraph=True, backend=backend, isolate_recompiles=True, options=options)
    return _said(_limited(compiled, run), kind)


def _whole(module: nn.Module, backend: str) -> Callable[..., Any]:
    """Compile the forward of ``module`` as one graph; it is compiled when it is first called.

    Raises:
        RuntimeProgramError: (the function that is returned) it can't be.
    """
    compiled = torch.compile(
        module.forward, fullgraph=True, backend=backend, options=_overlapping(type(module), backend)
    )
    return _said(_limited(compiled, module.forward), type(module))


def _overlapping(kind: type[nn.Module], backend: str) -> dict[str, Any] | None:
    """Return what keeps products between the start of a collective and its wait, where a program has collectives: left alone, inductor
    waits at once in the backward."""
    sends = any(f"{each.__module__.rpartition('.')[0]}.collectives" in sys.modules for each in kind.__mro__)
    if backend != "inductor" or not sends:
        return None
    passes = _KEEPING_ORDER if _rows_travel(kind) else _AS_SOON_AS_CAN_BE
    return {**_OVERLAP, "reorder_for_compute_comm_overlap_passes": list(passes)}


def _rows_travel(kind: type[nn.Module]) -> bool:
    """Whether blocks of a file have rows on their way to experts while something else runs."""
    names = (vars(sys.modules[each.__module__]) for each in kind.__mro__)  # FSDP2 makes classes of its own
    return any("start_send" in each or "start_return" in each for each in names)


def _said(compiled: Callable[..., Any], kind: type[nn.Module]) -> Callable[..., Any]:
    """Return ``compiled``, whose errors are sentences."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except torch._dynamo.exc.Unsupported as error:
            raise RuntimeProgramError(
                f"torch.compile can't compile {kind.__name__} as one graph; run with --no-compile, or change the code that it "
                f"can't trace (a custom operator needs torch.library.register_fake): {error}"
            ) from error
        except torch._dynamo.exc.TorchDynamoException as error:
            raise RuntimeProgramError(
                f"torch.compile failed on {kind.__name__}; run with --no-compile: {error}"
            ) from error

    return forward


def blocks(module: nn.Module, package: str) -> Iterator[nn.Module]:
    """Yield the outermost modules in ``module`` of classes that the emitted ``blocks.py`` has."""
    for child in module.children():
        if any(
            kind.__module__ == f"{package}.blocks" for kind in type(child).__mro__
        ):  # FSDP2 makes classes of its own
            yield child
        else:
            yield from blocks(child, package)


_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_OVERLAP = {"reorder_for_locality": False, "reorder_for_peak_memory": False, "reorder_for_compute_comm_overlap": True}
"""Options of inductor."""
_KEEPING_ORDER = ("sink_waits_iterative", "reorder_communication_preserving_peak_memory")
"""Its passes that move collectives and waits alone: products that stand between the two stay there."""
_AS_SOON_AS_CAN_BE = ("sink_waits", "raise_comms")
"""Those by which collectives begin as soon, and are waited for as late, as they can be."""
_APART = ("keep_output", "in_chunks")
"""Emitted functions that no graph has: one keeps what it is given, the other computes gradients in the forward."""
ShardedDim = tuple[int, int, int] | tuple[int, int, int, tuple[int, ...]]
_PLAIN: dict[tuple[str, str], Callable[..., Tensor]] = {}
"""The emitted ``keep_mask`` and ``random_bits`` of each ``random_streams``, by the module's and its own name."""


@torch.library.custom_op("graphpar::keep_mask", mutates_args=())
def _keep_mask(
    streams: str, shape: Sequence[int], p: float, keys: Tensor, batch_dim: int, sharded: Sequence[int]
) -> Tensor:
    return _PLAIN[streams, "keep_mask"](list(shape), p, keys, batch_dim, list(_dims_from_numbers(sharded)))


@_keep_mask.register_fake
def _(streams: str, shape: Sequence[int], p: float, keys: Tensor, batch_dim: int, sharded: Sequence[int]) -> Tensor:
    return keys.new_empty(shape, dtype=torch.bool)


@torch.library.custom_op("graphpar::random_bits", mutates_args=())
def _random_bits(
    streams: str, shape: Sequence[int], keys: Tensor, batch_dim: int | None, sharded: Sequence[int]
) -> Tensor:
    return _PLAIN[streams, "random_bits"](list(shape), keys, batch_dim, list(_dims_from_numbers(sharded)))


@_random_bits.register_fake
def _(streams: str, shape: Sequence[int], keys: Tensor, batch_dim: int | None, sharded: Sequence[int]) -> Tensor:
    return keys.new_empty(shape)


def hide_draws(streams: ModuleType) -> None:
    """Make the emitted ``random_streams`` draw masks and bits in operators of their own, which compute as before."""
    name = streams.__name__

    def keep_mask(
        shape: list[int], p: float, keys: Tensor, batch_dim: int, sharded: Sequence[ShardedDim] = ()
    ) -> Tensor:
        mask: Tensor = _keep_mask(name, shape, p, keys, batch_dim, _dims_as_numbers(sharded))
        return mask

    def random_bits(
        shape: list[int], keys: Tensor, batch_dim: int | None, sharded: Sequence[ShardedDim] = ()
    ) -> Tensor:
        bits: Tensor = _random_bits(name, shape, keys, batch_dim, _dims_as_numbers(sharded))
        return bits

    for hidden in (keep_mask, random_bits):
        plain = getattr(streams, hidden.__name__, None)
        if plain is not None and plain.__module__ != __name__:
            _PLAIN[name, hidden.__name__] = plain
            setattr(streams, hidden.__name__, hidden)


def _dims_as_numbers(sharded: Sequence[ShardedDim]) -> list[int]:
    """Sharded dims as an operator takes them: dim, rank, ranks, number of parts, parts."""
    numbers: list[int] = []
    for dim, rank, ranks, *runs in sharded:
        parts = runs[0] if runs else ()
        numbers += [dim, rank, ranks, len(parts), *parts]
    return numbers


def _dims_from_numbers(numbers: Sequence[int]) -> Iterator[ShardedDim]:
    at = 0
    while at < len(numbers):
        dim, rank, ranks, count = numbers[at : at + 4]
        at += 4 + count
        yield (dim, rank, ranks, tuple(numbers[at - count : at])) if count else (dim, rank, ranks)


def know_grouped_products() -> None:
    """Tell torch the shapes of ``grouped_mm`` in every dtype that it multiplies; it refuses all but bf16 where it traces."""
    from torch._meta_registrations import _create_grouped_mm_output_tensor, meta_grouped_mm

    def shaped(
        rows: Tensor,
        weights: Tensor,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        if rows.dtype is torch.bfloat16:
            known: Tensor = meta_grouped_mm(rows, weights, offs, bias, out_dtype)
            return known
        made: Tensor = _create_grouped_mm_output_tensor(rows, weights, offs, out_dtype)
        return made

    torch.library.register_fake("aten::_grouped_mm", shaped, allow_override=True)
