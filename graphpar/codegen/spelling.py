"""How each operator is spelled in Python: one row an operator.

A row gives an :class:`Expression` from the operator's arguments, already printed. Operators without a row are spelled
by rule: ``F.name``, ``torch.name``, ``torch.linalg.name`` or a method, whichever takes the same arguments; else
``torch.ops.namespace.name``.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from graphpar.emitted import collectives
from graphpar.ir.program import operator_name, value_of
from graphpar.operators.functions import OPERATORS, FunctionOperator

ATOM, UNARY, POWER, PRODUCT, SUM, SHIFT, AND, XOR, OR, COMPARE, LOWEST = 100, 80, 85, 70, 60, 55, 50, 48, 46, 40, 0


@dataclass(frozen=True)
class Expression:
    """Python text and how tightly it binds, so that parentheses stand only where they must."""

    text: str
    level: int = ATOM

    def at(self, level: int) -> str:
        return self.text if self.level >= level else f"({self.text})"


Printed = Callable[[Any], Expression]


def spell(node: fx.Node, shown: Printed, anchor: str) -> Expression:
    """The Python expression of a ``call_function`` node. ``anchor`` is an expression whose ``.device`` factories use."""
    name = operator_name(node)
    if getattr(node.target, "__module__", None) == collectives.__name__:
        return _collective(node, shown)  # type: ignore[return-value]
    row = _ROWS.get(name)
    if row is not None:
        spelled = row(node, shown)
        if spelled is not None:
            return spelled
    if name in _INFIX and len(node.args) == 2 and not node.kwargs:
        symbol, level = _INFIX[name]
        left, right = (shown(argument) for argument in node.args)
        # Python chains comparisons: (a < b) == c needs its parentheses.
        return Expression(f"{left.at(level + (level == COMPARE))} {symbol} {right.at(level + 1)}", level)
    return _by_rule(node, name, shown, anchor)


_INFIX: dict[str, tuple[str, int]] = {
    "add": ("+", SUM), "sub": ("-", SUM), "mul": ("*", PRODUCT), "div": ("/", PRODUCT), "true_divide": ("/", PRODUCT),
    "truediv": ("/", PRODUCT), "__lshift__": ("<<", SHIFT), "__rshift__": (">>", SHIFT), "bitwise_left_shift": ("<<", SHIFT),
    "bitwise_right_shift": (">>", SHIFT),
    "floordiv": ("//", PRODUCT), "floor_divide": ("//", PRODUCT), "remainder": ("%", PRODUCT), "mod": ("%", PRODUCT),
    "matmul": ("@", PRODUCT), "mm": ("@", PRODUCT), "bmm": ("@", PRODUCT), "__and__": ("&", AND), "__or__": ("|", OR),
    "__xor__": ("^", XOR), "bitwise_and": ("&", AND), "bitwise_or": ("|", OR), "eq": ("==", COMPARE), "ne": ("!=", COMPARE),
    "lt": ("<", COMPARE), "le": ("<=", COMPARE), "gt": (">", COMPARE), "ge": (">=", COMPARE),
}  # fmt: skip

_FACTORIES = {
    "arange",
    "zeros",
    "ones",
    "full",
    "empty",
    "scalar_tensor",
    "linspace",
    "eye",
    "tril_indices",
    "triu_indices",
}
# Argument names of F's functions where they differ in order or name from ATen's.
_METHODS = {
    "view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "expand", "expand_as", "contiguous", "to", "flatten",
    "unflatten", "chunk", "split", "unbind", "narrow", "select", "repeat", "repeat_interleave", "masked_fill", "sum", "mean", "amax",
    "amin", "max", "min", "argmax", "argmin", "topk", "sort", "argsort", "cumsum", "softmax", "log_softmax", "float", "detach",
    "clone", "type_as", "view_as", "pow", "sqrt", "rsqrt", "exp", "log", "tanh", "sigmoid", "abs", "sin", "cos", "clamp", "any", "all",
    "gather", "index_select", "diff", "new_ones", "new_zeros", "new_full", "histc", "square", "t", "logical_not", "bitwise_not", "bool",
    "index_put", "var", "std", "norm", "select_scatter", "slice_scatter", "scatter", "scatter_add", "tril", "triu", "erf", "round",
    "movedim", "swapaxes", "swapdims", "flip", "roll", "cumprod", "prod", "logsumexp", "unfold", "rot90", "tile",
}  # fmt: skip


_ATTRIBUTES = {"mT": "mT", "mH": "mH", "numpy_T": "T", "matrix_H": "H", "real": "real", "imag": "imag"}
_RENAMED = {
    "log_sigmoid": "F.logsigmoid", "im2col": "F.unfold", "col2im": "F.fold", "sym_float": "float", "sym_int": "int",
    "adaptive_max_pool2d": "F.adaptive_max_pool2d_with_indices", "adaptive_max_pool3d": "F.adaptive_max_pool3d_with_indices",
}  # fmt: skip
_FAMILIES = {"linalg_": "torch.linalg.", "fft_": "torch.fft.", "special_": "torch.special."}


def literal(value: Any) -> str:
    """A Python literal, as one would type it."""
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 2**62:
        return "None"  # the end of a slice that goes to the end
    if isinstance(value, float):
        if math.isinf(value):
            return 'float("inf")' if value > 0 else 'float("-inf")'
        if math.isnan(value):
            return 'float("nan")'
        if value == torch.finfo(torch.float32).min:
            return "torch.finfo(torch.float32).min"
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, torch.memory_format):
        return str(value)
    return repr(value)


def _call(function: str, arguments: list[str], options: Mapping[str, str]) -> Expression:
    return Expression(f"{function}({', '.join([*arguments, *(f'{key}={text}' for key, text in options.items())])})")


def _by_rule(node: fx.Node, name: str, shown: Printed, anchor: str) -> Expression:
    arguments = [shown(argument) for argument in node.args]
    texts = [argument.text for argument in arguments]
    options = {key: shown(item).text for key, item in node.kwargs.items()}
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        module = getattr(target, "__module__", "")
        prefix = "F." if module == "torch.nn.functional" or getattr(F, name, None) is target else ""
        return _call(_RENAMED.get(name, f"{prefix}{name}"), texts, options)
    if target in OPERATORS:
        return _function(OPERATORS[target], node, shown)
    if target.namespace != "aten":
        name = target._schema.name.partition("::")[2]
        return _call(f"torch.ops.{target.namespace}.{name}", texts, options)
    if name in _FACTORIES:
        options["device"] = f"{anchor}.device"
        return _call("torch.tensor" if name == "scalar_tensor" else f"torch.{name}", texts, options)
    own = isinstance(node.args[0], fx.Node) if node.args else False
    if own and name in _ATTRIBUTES:
        return Expression(f"{arguments[0].at(ATOM)}.{_ATTRIBUTES[name]}")
    if own and name in _METHODS and hasattr(Tensor, name):
        return _method(arguments[0], name, texts[1:], options)
    if name in _RENAMED:
        return _call(_RENAMED[name], texts, options)
    for function, path in _functions(name):
        fitting = _fitting(function, node, shown)
        if fitting is not None:
            return _call(path, *fitting)
    if own and callable(getattr(Tensor, name, None)):
        return _method(arguments[0], name, texts[1:], options)
    return _call(f"torch.ops.aten.{name}.{target._overloadname}", texts, options)


def _function(operator: FunctionOperator, node: fx.Node, shown: Printed) -> Expression:
    """``Scaled.apply(x, 2.0)``"""
    arguments = [shown(argument).text for argument in operator.given(node.args)]
    call = _call(f"{operator.function.__qualname__}.apply", arguments, {})
    return Expression(f"{call.text}[0]") if operator.alone else call


def _functions(name: str) -> list[tuple[Any, str]]:
    """torch's public functions called like the operator, with their paths."""
    found = [(getattr(F, name, None), f"F.{name}"), (getattr(torch, name, None), f"torch.{name}")]
    for family, path in _FAMILIES.items():
        if name.startswith(family):
            short = name.removeprefix(family)
            found.append((getattr(getattr(torch, family.rstrip("_")), short, None), f"{path}{short}"))
    return [(function, path) for function, path in found if callable(function)]


def _fitting(function: Any, node: fx.Node, shown: Printed) -> tuple[list[str], dict[str, str]] | None:
    """The node's arguments as ``function`` takes them; None where it takes other ones.

    Functions written in C++ take the operator's own. Those written in Python may differ in order, have further options
    that change the meaning (``stft(center=True)``), or return something else (``adaptive_max_pool2d``: no indices).
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return [shown(item).text for item in node.args], {key: shown(item).text for key, item in node.kwargs.items()}
    given, names = _given(node), list(parameters)
    schema = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    kinds = {parameter.kind for parameter in parameters.values()}
    further = [
        p.default
        for p in parameters.values()
        if p.name not in (*schema, "input", "_stacklevel") and p.kind is not p.VAR_POSITIONAL
    ]
    if inspect.Parameter.VAR_KEYWORD in kinds or any(default not in (None, False) for default in further):
        return None
    arguments: list[str] = []
    options: dict[str, str] = {}
    spread = inspect.Parameter.VAR_POSITIONAL in kinds  # torch.einsum(equation, *tensors)
    aligned = True
    for position, name in enumerate(schema):
        if name not in given:
            aligned = False
            continue
        item = literal(_REDUCTIONS[given[name]]) if name == "reduction" else shown(given[name]).text
        own = parameters[names[position]] if position < len(names) else None
        same = (
            own is not None
            and own.kind is not own.KEYWORD_ONLY
            and own.name in (name, "input" if name == "self" else name)
        )
        if spread and (name not in names or parameters[name].kind is inspect.Parameter.VAR_POSITIONAL):
            parts = given[name] if isinstance(given[name], list | tuple) else [given[name]]
            arguments += [shown(part).text for part in parts]
        elif aligned and same:
            arguments.append(item)
        elif name in names:
            options[name] = item
        else:
            return None
    return arguments, options


def _method(owner: Expression, name: str, arguments: list[str], options: Mapping[str, str]) -> Expression:
    return _call(f"{owner.at(ATOM)}.{name}", arguments, options)


def _given(node: fx.Node) -> dict[str, Any]:
    """The operator's arguments by their schema names; those left at their defaults are absent."""
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema.arguments
    given = {argument.name: item for argument, item in zip(schema, node.args)} | dict(node.kwargs)
    defaults = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return {key: item for key, item in given.items() if key not in defaults or not _same(item, defaults[key])}


def _same(item: Any, default: Any) -> bool:
    if isinstance(item, fx.Node) or isinstance(default, Tensor):
        return False
    if isinstance(item, list | tuple) and isinstance(default, list | tuple | int):
        wanted = [default] * len(item) if isinstance(default, int) else list(default)
        return list(item) == wanted or (len(wanted) == 1 and list(item) == wanted * len(item))
    return bool(item == default) and isinstance(item, bool) == isinstance(default, bool)


def _functional(
    function: str, positional: list[str], keywords: list[str], renamed: Mapping[str, str] | None = None
) -> Any:
    """``F.function`` with ATen's arguments: some by position (up to the first one absent), the others by keyword."""

    def row(node: fx.Node, shown: Printed) -> Expression:
        given = _given(node)
        arguments: list[str] = []
        options: dict[str, str] = {}
        positions = list(positional)
        while positions and positions[0] in given:
            arguments.append(shown(given[positions.pop(0)]).text)
        for name in [*positions, *keywords]:
            if name in given:
                options[(renamed or {}).get(name, name)] = shown(given[name]).text
        return _call(function, arguments, options)

    return row


_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}


def _loss(function: str, positional: list[str], keywords: list[str]) -> Any:
    """Losses: ATen's number for the reduction is F's word."""

    def row(node: fx.Node, shown: Printed) -> Expression:
        given = _given(node)
        names = {"self": "self", "input": "input"}
        arguments = [shown(given[name]).text for name in positional if name in given and name in (*names, "target")]
        options = {name: shown(given[name]).text for name in keywords if name in given}
        if given.get("reduction", 1) != 1:
            options["reduction"] = literal(_REDUCTIONS[given["reduction"]])
        return _call(function, arguments, options)

    return row


def _interpolate(mode: str, *, antialias: bool = False) -> Any:
    """``F.interpolate`` to a size, or by factors."""

    def row(node: fx.Node, shown: Printed) -> Expression | None:
        given = _given(node)
        if node.target._overloadname != "vec":  # type: ignore[union-attr]
            return None
        options = {}
        if given.get("output_size") is not None:
            options["size"] = shown(given["output_size"]).text
        else:
            factors = given["scale_factors"]
            options["scale_factor"] = shown(factors[0] if len(set(factors)) == 1 else factors).text
        if mode != "nearest":
            options["mode"] = literal(mode)
        if given.get("align_corners"):
            options["align_corners"] = "True"
        if antialias:
            options["antialias"] = "True"
        return _call("F.interpolate", [shown(given["input"]).text], options)

    return row


def _slice(node: fx.Node, shown: Printed) -> Expression | None:
    given = _given(node)
    source = node.args[0]
    value = value_of(source)  # type: ignore[arg-type]
    dim, start, end, step = (given.get(key) for key in ("dim", "start", "end", "step"))
    position = int(dim or 0)
    position = position if position >= 0 else position + value.ndim
    text = f"{'' if start in (None, 0) else shown(start).text}:"
    if end is not None and not (isinstance(end, int) and end >= 2**62):
        text += shown(end).text
    if step not in (None, 1):
        text += f":{shown(step).text}"
    index = f"..., {text}" if position > 1 and position == value.ndim - 1 else ", ".join([":"] * position + [text])
    return Expression(f"{shown(source).at(ATOM)}[{index}]")


def _select(node: fx.Node, shown: Printed) -> Expression | None:
    source, dim, index = node.args
    value = value_of(source)  # type: ignore[arg-type]
    assert isinstance(dim, int)
    position = dim % value.ndim
    return Expression(f"{shown(source).at(ATOM)}[{', '.join([':'] * position + [shown(index).text])}]")


def _index(node: fx.Node, shown: Printed) -> Expression | None:
    source, indices = node.args
    assert isinstance(indices, list | tuple)
    parts = [":" if index is None else shown(index).text for index in indices]
    return Expression(f"{shown(source).at(ATOM)}[{', '.join(parts)}]")


def _getitem(node: fx.Node, shown: Printed) -> Expression | None:
    return Expression(f"{shown(node.args[0]).at(ATOM)}[{shown(node.args[1]).text}]")


def _size(node: fx.Node, shown: Printed) -> Expression | None:
    return Expression(f"{shown(node.args[0]).at(ATOM)}.size({node.args[1]})")


def _view(node: fx.Node, shown: Printed) -> Expression | None:
    """``flatten`` and ``unflatten`` where that is all a view does: no size of batch or sequence is spelled out."""
    source = node.args[0]
    before, after = value_of(source), value_of(node)  # type: ignore[arg-type]
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return None
    old, new = [str(size) for size in before.shape], [str(size) for size in after.shape]
    ahead = 0
    while ahead < min(len(old), len(new)) and old[ahead] == new[ahead]:
        ahead += 1
    behind = 0
    while behind < min(len(old), len(new)) - ahead and old[-1 - behind] == new[-1 - behind]:
        behind += 1
    if behind and len(old) == ahead + behind < len(new):  # a dim of size 1 came in: take it with its neighbour
        behind -= 1
    merged, made = old[ahead : len(old) - behind], new[ahead : len(new) - behind]
    owner = shown(source).at(ATOM)
    if len(made) == 1 and len(merged) > 1:
        last = len(old) - behind - 1
        end = -1 - behind if behind else None
        suffix = "" if not ahead and end is None else f"{ahead}" if end is None else f"{ahead}, {last}"
        return Expression(f"{owner}.flatten({suffix})")
    if len(merged) == 1 and len(made) > 1:
        sizes = [size if size.isdigit() else "-1" for size in made]
        if sizes.count("-1") <= 1:
            dim = ahead if behind else -1
            return Expression(f"{owner}.unflatten({dim}, ({', '.join(sizes)}))")
    return None


def _to(node: fx.Node, shown: Printed) -> Expression | None:
    dtype = node.args[1] if len(node.args) > 1 else node.kwargs.get("dtype")
    short = {
        torch.float32: "float",
        torch.bool: "bool",
        torch.int64: "long",
        torch.bfloat16: "bfloat16",
        torch.float16: "half",
    }
    if len(node.args) == 2 and not node.kwargs and dtype in short:
        return Expression(f"{shown(node.args[0]).at(ATOM)}.{short[dtype]}()")  # type: ignore[index]
    return None


def _tensordot(node: fx.Node, shown: Printed) -> Expression | None:
    first, second, *dims = (shown(argument).text for argument in node.args)
    return _call("torch.tensordot", [first, second], {"dims": f"({', '.join(dims)})"})


def _neg(node: fx.Node, shown: Printed) -> Expression | None:
    return Expression(f"-{shown(node.args[0]).at(UNARY)}", UNARY)


def _invert(node: fx.Node, shown: Printed) -> Expression | None:
    return Expression(f"~{shown(node.args[0]).at(UNARY)}", UNARY)


def _power(node: fx.Node, shown: Printed) -> Expression | None:
    if isinstance(node.args[0], fx.Node) and isinstance(node.args[1], int | float):
        exponent = node.args[1]
        number = (
            int(exponent) if float(exponent).is_integer() and value_of(node.args[0]).is_floating_point() else exponent
        )
        return Expression(f"{shown(node.args[0]).at(ATOM)}.pow({number!r})")
    return None


def _embedding(node: fx.Node, shown: Printed) -> Expression | None:
    given = _given(node)
    options = {}
    if given.get("padding_idx", -1) != -1:
        options["padding_idx"] = shown(given["padding_idx"]).text
    return _call("F.embedding", [shown(given["indices"]).text, shown(given["weight"]).text], options)


def _batch_norm(node: fx.Node, shown: Printed) -> Expression | None:
    given = dict(zip(["x", "weight", "bias", "mean", "var", "training", "momentum", "eps"], node.args))
    options = {"training": "self.training" if given["training"] else "False"}
    if given["training"]:
        options["momentum"] = shown(given["momentum"]).text
    options["eps"] = shown(given["eps"]).text
    arguments = [shown(given[key]).text for key in ("x", "mean", "var", "weight", "bias")]
    return _call("F.batch_norm", arguments, options)


def _own_dropout(function: str) -> Any:
    def row(node: fx.Node, shown: Printed) -> Expression | None:
        if isinstance(node.target, torch._ops.OpOverload):
            return None
        arguments = [shown(argument).text for argument in node.args]
        options = {key: shown(item).text for key, item in node.kwargs.items() if key not in ("training", "cut")}
        if function != "dropout_attention":
            if len(arguments) > 4:
                arguments, options["training"] = arguments[:4], "self.training"
            if arguments[3] == "0":
                del arguments[3]
        options["training"] = "self.training"
        if "cut" in node.kwargs:
            options["cut"] = _cut_dims(node.kwargs["cut"])
        return _call(function, arguments, options)

    return row


def _cut_dims(cuts: Any) -> str:
    """Which dims of a tensor are a rank's piece: ``[(1, rank("tp"), size("tp"))]``."""
    shown = [
        f'({dim}, rank("{axis}"), size("{axis}"){f", {literal(tuple(parts))}" if parts else ""})'
        for dim, axis, parts in cuts
    ]
    return f"[{', '.join(shown)}]"


def _collective(node: fx.Node, shown: Printed) -> Expression | None:
    """A transition: ``all_gather(hidden, "tp", dim=1)``."""
    arguments = [f'"{item}"' if isinstance(item, str) else shown(item).text for item in node.args]
    options = {
        key: f'"{item}"' if isinstance(item, str) else shown(item).text
        for key, item in node.kwargs.items()
        if item is not None and item != ()
    }
    if "training" in options:
        options["training"] = "self.training"
    return _call(operator_name(node), arguments, options)


def _layer_norm(node: fx.Node, shown: Printed) -> Expression | None:
    given = _given(node)
    shape = tuple(given["normalized_shape"])
    arguments = [shown(given["input"]).text, literal(shape)]
    for name in ("weight", "bias"):
        arguments.append(shown(given[name]).text if given.get(name) is not None else "None")
    return _call("F.layer_norm", arguments, {"eps": shown(given["eps"]).text} if "eps" in given else {})


_CLASS_LOSS = ["weight", "ignore_index", "label_smoothing"]
_ROWS: dict[str, Callable[[fx.Node, Printed], Expression | None]] = {
    "slice": _slice,
    "select": _select,
    "index": _index,
    "getitem": _getitem,
    "sym_size": _size,
    "view": _view,
    "reshape": _view,
    "_unsafe_view": _view,
    "to": _to,
    "tensordot": _tensordot,
    "neg": _neg,
    "bitwise_not": _invert,
    "__invert__": _invert,
    "pow": _power,
    "embedding": _embedding,
    "batch_norm": _batch_norm,
    "layer_norm": _layer_norm,
    "dropout": _own_dropout("dropout"),
    "channel_dropout": _own_dropout("channel_dropout"),
    "dropout_attention": _own_dropout("dropout_attention"),
    "linear": _functional("F.linear", ["input", "weight", "bias"], []),
    "rms_norm": _functional("F.rms_norm", ["input", "normalized_shape", "weight"], ["eps"]),
    "group_norm": _functional("F.group_norm", ["input", "num_groups", "weight", "bias"], ["eps"]),
    "gelu": _functional("F.gelu", ["self"], ["approximate"]),
    "silu": _functional("F.silu", ["self"], []),
    "relu": _functional("F.relu", ["self"], []),
    "leaky_relu": _functional("F.leaky_relu", ["self"], ["negative_slope"]),
    "conv1d": _functional("F.conv1d", ["input", "weight", "bias"], ["stride", "padding", "dilation", "groups"]),
    "conv2d": _functional("F.conv2d", ["input", "weight", "bias"], ["stride", "padding", "dilation", "groups"]),
    "conv3d": _functional("F.conv3d", ["input", "weight", "bias"], ["stride", "padding", "dilation", "groups"]),
    **{
        f"max_pool{dims}d": _functional(
            f"F.max_pool{dims}d", ["self", "kernel_size"], ["stride", "padding", "dilation", "ceil_mode"]
        )
        for dims in (1, 2, 3)
    },
    "instance_norm": _functional(
        "F.instance_norm", ["input", "running_mean", "running_var", "weight", "bias"], ["use_input_stats", "momentum", "eps"]
    ),
    "avg_pool2d": _functional(
        "F.avg_pool2d", ["self", "kernel_size"], ["stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"]
    ),
    "adaptive_avg_pool2d": _functional("F.adaptive_avg_pool2d", ["self", "output_size"], []),
    **{f"upsample_nearest{dims}d": _interpolate("nearest") for dims in (1, 2, 3)},
    **{f"_upsample_nearest_exact{dims}d": _interpolate("nearest-exact") for dims in (1, 2, 3)},
    "upsample_linear1d": _interpolate("linear"),
    "upsample_bilinear2d": _interpolate("bilinear"),
    "upsample_bicubic2d": _interpolate("bicubic"),
    "upsample_trilinear3d": _interpolate("trilinear"),
    "_upsample_bilinear2d_aa": _interpolate("bilinear", antialias=True),
    "_upsample_bicubic2d_aa": _interpolate("bicubic", antialias=True),
    "pad": _functional("F.pad", ["self", "pad"], ["mode", "value"]),
    "softmax": _functional("F.softmax", ["self"], ["dim", "dtype"]),
    "log_softmax": _functional("F.log_softmax", ["self"], ["dim", "dtype"]),
    "one_hot": _functional("F.one_hot", ["self", "num_classes"], []),
    "scaled_dot_product_attention": _functional(
        "F.scaled_dot_product_attention", ["query", "key", "value"], ["attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    ),
    "cross_entropy_loss": _loss("F.cross_entropy", ["self", "target"], _CLASS_LOSS),
    "nll_loss": _loss("F.nll_loss", ["self", "target"], _CLASS_LOSS),
    "nll_loss_nd": _loss("F.nll_loss", ["self", "target"], _CLASS_LOSS),
    "mse_loss": _loss("F.mse_loss", ["self", "target"], []),
    "l1_loss": _loss("F.l1_loss", ["self", "target"], []),
    "smooth_l1_loss": _loss("F.smooth_l1_loss", ["self", "target"], ["beta"]),
    "huber_loss": _loss("F.huber_loss", ["self", "target"], ["delta"]),
    "kl_div": _loss("F.kl_div", ["self", "target"], ["log_target"]),
    "binary_cross_entropy": _loss("F.binary_cross_entropy", ["self", "target"], ["weight"]),
    "binary_cross_entropy_with_logits": _loss("F.binary_cross_entropy_with_logits", ["self", "target"], ["weight", "pos_weight"]),
}  # fmt: skip
