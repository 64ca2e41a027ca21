"""What a pipeline does where its program generates: by itself, or between steps of training by another on the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, overload

import torch
from torch import Tensor

from graphpar.runtime.checkpoints.stored import Stored
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.generation.between_steps import BetweenSteps
from graphpar.runtime.generation.generator import Answer, Generator
from graphpar.runtime.option_kinds import GENERATE, TRAIN, TRAIN_GENERATE
from graphpar.runtime.stages.batches import agree_on_batches, own_rows
from graphpar.runtime.stages.branches import Branches
from graphpar.runtime.stages.own_stages import OwnStages


class Generates(Stored):
    """Generation by the stages of this rank. :class:`~graphpar.runtime.pipeline.Pipeline` gives it what it runs."""

    _own: OwnStages
    _branches: Branches
    _generator: Generator | None
    between: BetweenSteps | None

    @overload
    def generate(
        self,
        prompts: Sequence[Sequence[int]] | Tensor,
        max_new_tokens: int | None = None,
        *,
        attention_mask: Tensor | None = None,
        seed: int | None = None,
        show: Callable[[int, int], None] | None = None,
        logprobs: Literal[False] = False,
        **choice: Any,
    ) -> list[list[int]]: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Sequence[int]] | Tensor,
        max_new_tokens: int | None = None,
        *,
        attention_mask: Tensor | None = None,
        seed: int | None = None,
        show: Callable[[int, int], None] | None = None,
        logprobs: Literal[True],
        **choice: Any,
    ) -> list[Answer]: ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]] | Tensor,
        max_new_tokens: int | None = None,
        *,
        attention_mask: Tensor | None = None,
        seed: int | None = None,
        show: Callable[[int, int], None] | None = None,
        logprobs: bool = False,
        **choice: Any,
    ) -> list[list[int]] | list[Answer]:
        """Continue prompts, and return the new tokens of each on every rank; a collective call of a program that generates. In one for
        training as well it is called between steps, with the weights as they are then.

        Args:
            prompts: token ids of any lengths, the same on all ranks.
            max_new_tokens: for each; by default that of the model's generation config, or what the cache has room for.
            attention_mask: [prompts, positions], where ``prompts`` is a tensor with padding on either side.
            seed: of tokens that are drawn: the same tokens for the same seed, under any plan. By default the pipeline's.
            show: called with the number of a prompt and each new token of it.
            logprobs: return with the new tokens of each prompt the log-probabilities that the model itself gives them, without temperature
                and the like.
            choice: ``do_sample``, ``temperature``, ``top_k``, ``top_p``, ``repetition_penalty``, ``eos_token_id`` (one or several), as in
                transformers; by default those of the model's generation config.

        Raises:
            RuntimeProgramError: on all ranks: the program is for something else, or a prompt does not fit.
        """
        with self._generating("generate") as generator:
            given = self.seed if seed is None else seed
            answers = generator.answers(prompts, max_new_tokens, attention_mask, given, show, choice)
        return answers if logprobs else [answer.tokens for answer in answers]

    @property
    def cache_bytes(self) -> int:
        """The bytes of keys and values that this rank kept of as many sequences as the program computes at once, when it last generated."""
        return self._generates("cache_bytes").cache_bytes

    def logits(self, tokens: Tensor) -> Tensor | None:
        """Compute the logits of as many sequences as the program generates at a time, window after window; a collective call.

        Args:
            tokens: [sequences, n], the same on all ranks, of the length of the example.

        Returns:
            [sequences, n, vocabulary] on the ranks of the last stage, else ``None``.

        Raises:
            RuntimeProgramError: on all ranks: the tokens do not fit the program, or ranks were given different ones.
        """
        with self._generating("logits") as generator:
            program, name, replica = generator.program, generator.tokens, generator.groups.replica
            agree_on_batches(program, [(program, {name: tokens})], [name], replica, self.steps_done)
            own = own_rows(program, name, tokens, replica).to(self.device)
            found = generator.logits({name: own})
        return None if found is None else next(iter(found.values()))

    def _generates(self, what: str) -> Generator:
        found = self._generator if self.between is None else self.between.generator
        if found is None:
            also = f", or {TRAIN_GENERATE} to generate between steps" if self.program.mode == TRAIN else ""
            raise RuntimeProgramError(
                f"{what} needs a program for it, but this one is for {self.program.mode}: compile the model with --mode {GENERATE}{also}"
            )
        return found

    @contextmanager
    def _generating(self, what: str) -> Iterator[Generator]:
        """Have what generates compute with this pipeline's weights; a collective call."""
        generator = self._generates(what)
        self._check_weights()
        self.synchronize()
        with torch.no_grad(), ExitStack() as stack:
            if self.between is not None:
                stack.enter_context(self.between.weights())
            for casts in (self._own if self.between is None else self.between.own).casts:
                stack.enter_context(casts.step())
            yield generator
        self._branches.check()
