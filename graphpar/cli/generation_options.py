"""The options of ``graphpar run`` for programs that generate, checked before a process starts.

options ──script_arguments──► those of generate.py ──► ranks
   └─────checked, with the program's folder─────► error: one sentence
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphpar.cli.arguments import Parser, count
from graphpar.errors import GraphparError
from graphpar.runtime.arguments import input_file, positive, token_ids, whole

if TYPE_CHECKING:
    from graphpar.runtime.manifest import Manifest

_CHOICE = {
    "temperature": (positive, "of the distribution that tokens are drawn from"),
    "top-k": (whole, "draw from the so many likeliest tokens; 0: from all"),
    "top-p": (positive, "draw from the likeliest tokens that have this share together"),
    "repetition-penalty": (positive, "what makes tokens that a text has already less likely, above 1"),
    "seed": (whole, "of what is drawn (default: 0)"),
}
TOKENIZER = "tokenizer.json"


def add_options(parser: Parser) -> None:
    """Add the options."""
    texts = parser.add_argument_group("of a program for generation (--mode generate)")
    texts.add_argument(
        "--prompt", action="append", metavar="TEXT", help="a text to continue; may be given several times"
    )
    texts.add_argument("--tokens", action="append", type=token_ids, metavar="IDS", help="the same as token ids: 15,3,8")
    texts.add_argument(
        "--tokenizer", type=input_file, metavar="FILE",
        help="tokenizer.json for --prompt (default: that beside the model file)",
    )  # fmt: skip
    texts.add_argument("--max-new-tokens", type=count, metavar="N", help="tokens to add to each prompt")
    texts.add_argument("--sample", action=argparse.BooleanOptionalAction, help="draw tokens, or take the likeliest")
    for name, (kind, text) in _CHOICE.items():
        texts.add_argument(f"--{name}", type=kind, metavar="X", help=text)
    weights = texts.add_mutually_exclusive_group()
    weights.add_argument(
        "--weights", type=input_file, metavar="FILE", help="safetensors file or folder (default: weights/ in OUT)"
    )
    weights.add_argument(
        "--checkpoint", type=input_file, metavar="FOLDER",
        help="take the weights of a checkpoint of training, under any plan",
    )  # fmt: skip


def given(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options that were given, by the name of their flag."""
    names = ("prompt", "tokens", "tokenizer", "max-new-tokens", "sample", *_CHOICE, "weights", "checkpoint")
    values = {name: getattr(options, name.replace("-", "_")) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def checked(asked: dict[str, Any], folder: Path, program: Manifest) -> dict[str, Any]:
    """Return what is asked for, with the tokenizer that is used.

    Raises:
        GraphparError, RuntimeProgramError: it does not fit the program, so that the ranks would refuse it.
    """
    from graphpar.runtime.prompts import requested
    from graphpar.runtime.texts import text_file

    if not asked.get("prompt") and not asked.get("tokens"):
        raise GraphparError("There is nothing to continue: give --prompt TEXT or --tokens IDS.")
    prompts: list[list[int]] = []
    if asked.get("prompt"):
        if "tokenizer" not in asked:
            asked = {**asked, "tokenizer": _tokenizer(folder, program)}
        texts = text_file(asked["tokenizer"])
        prompts = [texts.encode(prompt) for prompt in asked["prompt"]]
    choice = {name.replace("-", "_"): asked.get(name) for name in _CHOICE if name != "seed"}
    choice["do_sample"] = asked.get("sample")
    prompts += asked.get("tokens", ())
    requested(program, prompts, asked.get("max-new-tokens"), None, asked.get("seed", 0), choice)
    _check_weights(asked, folder, program)
    return asked


def _check_weights(asked: dict[str, Any], folder: Path, program: Manifest) -> None:
    """Check that the weights that are named are those of the model: names and shapes, no values."""
    if "weights" not in asked and "checkpoint" not in asked:
        return
    from graphpar.codegen.package import import_stage
    from graphpar.runtime.checkpoint import check_fits
    from graphpar.runtime.weights import check_file

    stages = [import_stage(folder, stage.index) for stage in program.stages]
    if "weights" in asked:
        check_file(asked["weights"], stages, program)
    else:
        check_fits(asked["checkpoint"], stages, program)


def script_arguments(asked: dict[str, Any]) -> list[str]:
    """Return the options as ``generate.py`` takes them."""
    found: list[str] = []
    for name, value in asked.items():
        if name == "sample":
            found.append("--sample" if value else "--no-sample")
        elif name == "tokens":
            found += [f"--tokens={','.join(map(str, ids))}" for ids in value]
        else:
            found += [f"--{name}={each}" for each in (value if isinstance(value, list) else [value])]
    return found


def _tokenizer(folder: Path, program: Manifest) -> Path:
    """Return the tokenizer beside the program or the model file."""
    from graphpar.frontend.modelfile import find_model_file

    places: Sequence[Path] = [folder]
    if program.model_file:
        places = [folder, Path(find_model_file(folder, program.model_file)).parent]
    found = next((place / TOKENIZER for place in places if (place / TOKENIZER).is_file()), None)
    if found is None:
        raise GraphparError(
            f"--prompt needs a tokenizer: there is no {TOKENIZER} in {' or '.join(map(str, places))}. Name one with --tokenizer, or "
            "give token ids with --tokens."
        )
    return found
