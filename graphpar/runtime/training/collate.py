"""How examples become the batch of a replica: stacked by input, or by a function of the user's, checked against the program."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from graphpar.runtime.errors import RuntimeProgramError, near_match
from graphpar.runtime.manifest import InputInterface, Manifest
from graphpar.runtime.stages.batches import by_name, flattened, is_numbers
from graphpar.runtime.stages.initialise import other_generators
from graphpar.runtime.stages.lengths import dims_of, lengthened

Collate = Callable[[list[Any]], Any]
"""Makes a batch of a list of examples."""


@contextmanager
def _drawing(*place: object) -> Iterator[None]:
    """Let the generators of torch (on the CPU), Python and NumPy draw what depends on ``place`` alone, and be what they were after."""
    number = int.from_bytes(hashlib.blake2b(repr(place).encode(), digest_size=4).digest(), "big")
    kept, others = torch.get_rng_state(), other_generators()
    try:
        torch.default_generator.manual_seed(number)
        random.seed(number)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(number)
        yield
    finally:
        torch.set_rng_state(kept)
        for _, restore in others.values():
            restore()


class Collator:
    """Joins the inputs ``names`` of examples, by the user's function where there is one."""

    def __init__(self, program: Manifest, names: Sequence[str], function: Collate | None, seed: int) -> None:
        self._program, self._function, self._seed = program, function, seed
        self._inputs = [program.input(name) for name in names]

    def of_numbered(self, examples: Sequence[tuple[int, Any]]) -> dict[str, Tensor]:
        """Join examples that come with the number of their batch."""
        return self(examples[0][0], [example for _, example in examples])

    def __call__(self, place: object, examples: list[Any]) -> dict[str, Tensor]:
        """Join the examples of one replica; ``place``: of the batch, on which random numbers depend."""
        if self._function is None:
            return self._joined(examples)
        with _drawing(self._seed, place):
            return self.of_batch(self._function(examples))

    def of_batch(self, batch: Any) -> dict[str, Tensor]:
        """Take the inputs of a batch that somebody else has joined."""
        given = self._flattened(batch)
        known = [spec.name for spec in self._program.inputs]
        for name in given:
            if name not in known:
                raise RuntimeProgramError(f"the program has no input {name!r}.{near_match(name, known)}")
        missing = [spec.name for spec in self._inputs if spec.name not in given]
        if missing:
            raise RuntimeProgramError(f"a batch of the dataset has no {', '.join(missing)}; it has {', '.join(given)}")
        return {spec.name: torch.as_tensor(given[spec.name]) for spec in self._inputs}

    def _flattened(self, given: Any) -> Mapping[str, Any]:
        named = by_name(self._program, given)
        if named is None:
            raise RuntimeProgramError(
                f"the dataset has a {type(given).__name__}; examples and batches are dicts, dataclasses or tuples"
            )
        tensors = {name: torch.as_tensor(value) if is_numbers(value) else value for name, value in named.items()}
        return flattened(self._program, tensors)

    def _joined(self, given: Sequence[Any]) -> dict[str, Tensor]:
        joined, examples = {}, [self._flattened(example) for example in given]
        for spec in self._inputs:
            shape = [size for dim, size in enumerate(spec.shape) if dim != spec.batch_dim]
            varying = [dim - (spec.batch_dim is not None and dim > spec.batch_dim) for dim in dims_of(spec)]
            values = []
            for example in examples if spec.batch_dim is not None else examples[:1]:
                if spec.name not in example:
                    raise RuntimeProgramError(
                        f"an example of the dataset has no {spec.name}; it has {', '.join(example)}"
                    )
                values.append(value := torch.as_tensor(example[spec.name]))
                if not _fits(value.shape, shape, varying):
                    raise RuntimeProgramError(
                        f"{spec.name} of an example has shape {list(value.shape)}; the program expects {shape}"
                    )
            values = self._of_one_length(spec, values, varying)
            joined[spec.name] = values[0] if spec.batch_dim is None else torch.stack(values, spec.batch_dim)
        return joined

    def _of_one_length(self, spec: InputInterface, values: list[Tensor], dims: Sequence[int]) -> list[Tensor]:
        """Pad what examples have of an input to the longest of them."""
        longest = max((value.shape[dim] for value in values for dim in dims), default=0)
        if all(value.shape[dim] == longest for value in values for dim in dims):
            return values
        if self._program.unpadded is not None:
            raise RuntimeProgramError(
                f"{spec.name} has examples of several lengths, and padding them to one would change results: {self._program.unpadded}; "
                "give a collate_fn that joins examples"
            )
        return [lengthened(value, dims, longest - value.shape[dims[0]], spec.fill) for value in values]


def _fits(found: Sequence[int], expected: Sequence[int], varying: Sequence[int]) -> bool:
    """Whether an example has the shape that is expected, but for the dims that vary."""
    pairs = enumerate(zip(found, expected))
    return len(found) == len(expected) and all(size == want or dim in varying for dim, (size, want) in pairs)
