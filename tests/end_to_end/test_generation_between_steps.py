"""A program that trains and generates learns from its own samples as an eager loop does, on any ranks, with one set of weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import graphpar as gp
from examples import grpo
from graphpar.errors import GraphparError
from graphpar.passes.planning import read_elsewhere
from graphpar.runtime import Pipeline, start
from graphpar.runtime.errors import RuntimeProgramError
from graphpar.runtime.generation.prompts import Request, Sampling, check_alike
from graphpar.runtime.layout import Shard
from graphpar.verification.type_check import check_folder
from tests.models import actor_critic, architectures, dropout_sampler
from tests.ranks import between_steps_script
from tests.tools.rank_pool import RankPool

SCRIPT = Path(between_steps_script.__file__)


def parts_of(module: Any, asked: dict[str, Any], **options: Any) -> gp.Parts:
    some = grpo.batch_of(grpo.prompts_of(0), *[[[0] * grpo.LENGTH] * (grpo.PROMPTS * grpo.GROUP)] * 2)
    if module is actor_critic:
        some = actor_critic.batch_of(*[[[0] * actor_critic.NEW] * len(actor_critic.PROMPTS)] * 2)
    tokens, *targets = some.values()
    program = gp.export(
        module.model, (tokens,), loss_fn=module.loss_fn, targets=tuple(targets), mode="train,generate", **options
    )
    return gp.partition(program, gp.plan(program, **asked), optimizer=grpo.__file__ if module is grpo else None)


def eager(steps: int) -> list[tuple[float, float]]:
    """What the example does, with the model itself: all tokens again for each new one."""
    model, found = grpo.model(), []
    optimizer = grpo.optimizer(model.parameters())
    for step in range(steps):
        prompts = grpo.prompts_of(step)
        sequences, logprobs = [list(prompt) for prompt in prompts], [[] for _ in prompts]  # type: ignore[var-annotated]
        for _ in range(grpo.LENGTH):
            with torch.no_grad():
                logits = model(torch.tensor(sequences))["logits"][:, -1]
            tokens = Sampling(do_sample=True, seed=step).tokens(logits, sequences, range(len(prompts)))
            chosen = logits.log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
            for sequence, own, token, logprob in zip(sequences, logprobs, tokens.tolist(), chosen.tolist()):
                sequence.append(token)
                own.append(logprob)
        answers = [sequence[-grpo.LENGTH :] for sequence in sequences]
        batch = grpo.batch_of(prompts, answers, logprobs)
        targets = (batch[name] for name in ("chosen", "sampled", "advantage", "mask"))
        loss = grpo.loss_fn(model(batch["tokens"]), *targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append((grpo.rewards_of(prompts, answers).mean().item(), loss.item()))
    return found


def check(cases: dict[str, dict[str, Any]], ranks: int, steps: int, folder: Path, pool: RankPool) -> None:
    for name, asked in cases.items():
        parts_of(grpo, asked).save(folder / name, weights=grpo.model().state_dict())
    pool.torchrun(SCRIPT, [str(folder), str(steps), *cases], nproc=ranks, timeout_s=300)
    expected = eager(steps)
    for name in cases:
        for rank in range(ranks):
            found = json.loads((folder / f"{name}-rank_{rank}.json").read_text())
            assert [reward for reward, _ in found] == [reward for reward, _ in expected], (name, rank)
            losses = [loss for _, loss in found]
            assert losses == pytest.approx([loss for _, loss in expected], abs=1e-5), (name, rank)


def test_on_one_rank(pool: RankPool, tmp_path: Path) -> None:
    check({"one": {"mesh": {"pp": 1}}}, 1, 4, tmp_path, pool)


@pytest.mark.costly
def test_on_two_ranks(pool: RankPool, tmp_path: Path) -> None:
    cases = {"pp": {"mesh": {"pp": 2}}, "tp": {"mesh": {"tp": 2}}, "zero 3": {"mesh": {"dp_shard": 2}}}
    check(cases, 2, 4, tmp_path, pool)


@pytest.mark.slow
def test_on_four_ranks(pool: RankPool, tmp_path: Path) -> None:
    cases = {
        "pp x tp": {"mesh": {"pp": 2, "tp": 2}},
        "pp x zero 3": {"mesh": {"pp": 2, "dp_shard": 2}, "zero": 3},
        "zero 1": {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "zero": 1},
        "cp": {"mesh": {"dp_replicate": 2, "cp": 2}},
        "zero bubble": {"mesh": {"pp": 2, "dp_replicate": 2}, "schedule": "ZBVZeroBubble"},
        "interleaved": {"mesh": {"pp": 2, "dp_replicate": 2}, "schedule": "Interleaved1F1B"},
    }
    check(cases, 4, 6, tmp_path, pool)


@pytest.mark.slow
def test_training_with_dropout_goes_on_under_other_meshes(pool: RankPool, tmp_path: Path) -> None:
    tokens, labels = dropout_sampler.batch_of(dropout_sampler.prompts_of(0), []).values()
    program = gp.export(
        dropout_sampler.model, (tokens,), loss_fn=dropout_sampler.loss_fn, targets=(labels,), mode="train,generate"
    )
    asked: dict[str, dict[str, Any]] = {
        "drops tp": {"mesh": {"tp": 2}},
        "drops zero 3": {"mesh": {"dp_shard": 2}, "zero": 3},
        "drops pp": {"mesh": {"pp": 2}},
    }
    for name, options in asked.items():
        parts = gp.partition(program, gp.plan(program, **options), optimizer=dropout_sampler.__file__)
        parts.save(tmp_path / name, weights=dropout_sampler.model().state_dict())
    pool.torchrun(SCRIPT, [str(tmp_path), "2", *asked], nproc=2, timeout_s=300)
    found = [each for name in asked for each in json.loads((tmp_path / f"{name}-rank_0.json").read_text())]
    expected = list(dropout_sampler.eager(program.stream_layouts, 6))
    assert [tokens for *_, tokens in found] == [tokens for *_, tokens in expected]
    for (loss, norm, _), (own_loss, own_norm, _) in zip(found, expected, strict=True):
        assert (loss, norm) == pytest.approx((own_loss, own_norm), abs=1e-5)


@pytest.mark.slow
def test_the_reward_rises(pool: RankPool, tmp_path: Path) -> None:
    parts_of(grpo, {"mesh": {"pp": 2}}).save(tmp_path / "long", weights=grpo.model().state_dict())
    pool.torchrun(SCRIPT, [str(tmp_path), "100", "long"], nproc=2, timeout_s=400)
    rewards = [reward for reward, _ in json.loads((tmp_path / "long-rank_0.json").read_text())]

    assert sum(rewards[:10]) / 10 < 0.3, rewards
    assert sum(rewards[-10:]) / 10 > 0.55, rewards


@pytest.mark.costly
def test_log_probabilities_are_those_of_a_step(pool: RankPool, tmp_path: Path) -> None:
    """Those of evaluation are equal bit for bit, those of sampling but for rounding."""
    state = actor_critic.model().state_dict()
    cases: dict[str, tuple[dict[str, Any], str, float]] = {
        "gap pp": ({"mesh": {"pp": 2}}, "fp32", 1e-5),
        "gap zero 3": ({"mesh": {"dp_shard": 2}}, "fp32", 1e-5),
        "gap bf16": ({"mesh": {"pp": 2}}, "bf16", 5e-2),
    }
    for name, (asked, dtype, _) in cases.items():
        parts_of(actor_critic, asked, dtype=dtype, evaluates=True).save(tmp_path / name, weights=state)
    pool.torchrun(SCRIPT, [str(tmp_path), "0", *cases], nproc=2, timeout_s=300)
    for name, (_, _, allowed) in cases.items():
        found = json.loads((tmp_path / f"{name}-rank_1.json").read_text())
        assert found["step before"] == found["step after"] == 0.0, (name, found)
        assert max(found["sampled before"], found["sampled after"]) < allowed, (name, found)


@pytest.mark.costly
def test_types_of_both_programs_are_checked(tmp_path: Path) -> None:
    folder = parts_of(grpo, {"mesh": {"pp": 2, "tp": 2}}).save(tmp_path / "out")
    assert check_folder(folder).ok
    stage = folder / "generate" / "stage_1.py"
    assert "all_reduce" in (text := stage.read_text() + (folder / "generate" / "blocks.py").read_text())
    blocks = folder / "generate" / "blocks.py"
    blocks.write_text(blocks.read_text().replace("all_reduce(", "all_gather(", 1))

    problems = check_folder(folder).problems
    assert problems and all(problem.startswith("generate/") for problem in problems), (problems, text)


@pytest.mark.costly
def test_verify_finds_a_fault_in_generation(tmp_path: Path) -> None:
    parts = parts_of(grpo, {"mesh": {"pp": 2}})
    assert (honest := gp.verify(parts, steps=1)).ok, honest
    stage = parts.folder / "generate" / "stage_1.py"
    text = stage.read_text()

    for fault in (FAULT, STALE):
        stage.write_text(text + fault)
        wrong = gp.verify(parts, steps=1)
        assert not wrong.ok and wrong.worst["output"] == "logits", wrong
        assert "in generation" in str(wrong.first_difference), wrong


FAULT = """

_forward = Stage1.forward
Stage1.forward = lambda self, hidden, **inputs: _forward(self, hidden.flip(-1), **inputs)
"""
"""Emitted code that computes with something else than it received."""
STALE = """

_forward = Stage1.forward


def forward(self, hidden, **inputs):
    self.first = getattr(self, "first", self.policy.head.weight.detach().clone())
    self.policy.head.weight = nn.Parameter(self.first)
    return _forward(self, hidden, **inputs)


Stage1.forward = forward
"""
"""Emitted code that computes with a weight of the first call."""


class Counting(grpo.GPT):
    """Training counts its steps in a buffer that is not saved, by which the logits are scaled; every forward counts in another."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.register_buffer("steps", torch.zeros(()), persistent=False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            self.steps.add_(1)
        self.calls.add_(1)
        logits: Tensor = super().forward(tokens) * (1 + self.steps)
        return logits


class Annealed(Counting):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.calls


def likelihood(logits: Tensor, chosen: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), chosen.flatten())


def test_buffers_are_as_training_left_them(tmp_path: Path) -> None:
    ids = torch.arange(4 * grpo.POSITIONS).view(4, -1) % grpo.DIGITS
    program = gp.export(Counting, (ids,), loss_fn=likelihood, targets=(ids,), mode="train,generate")
    model = Counting()
    folder = gp.partition(program, gp.plan(program)).save(tmp_path / "out", weights=model.state_dict())
    with start() as ranks, Pipeline(folder, ranks.device) as pipeline:
        pipeline.load_weights()
        buffers = dict(pipeline.stages[0].named_buffers())
        for step in range(3):
            model.eval()
            with torch.no_grad():
                logits = model(ids)
            torch.testing.assert_close(pipeline.logits(ids), logits)
            pipeline.generate(ids[:, :3].tolist(), 3)
            assert buffers["calls"] == buffers["steps"] == step
            pipeline.step({"tokens": ids, "chosen": ids})
            model.train()
            model(ids)


def test_logits_of_tokens_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Replicas would have gathered rows of unequal number, and waited for each other."""
    ids = torch.zeros(4, grpo.POSITIONS, dtype=torch.long)
    program = gp.export(grpo.GPT, (ids,), loss_fn=likelihood, targets=(ids,), mode="train,generate")
    folder = gp.partition(program, gp.plan(program)).save(tmp_path / "out", weights=grpo.GPT().state_dict())
    with start() as ranks, Pipeline(folder, ranks.device) as pipeline:
        pipeline.load_weights()
        for tokens, what in (
            (ids[:3], r"expects 4 \(4 sequences at a time\)"),
            (ids[:, 1:], "has shape"),
            (ids + 99, "token 99"),
            (ids / 2, "float32"),
        ):
            with pytest.raises(RuntimeProgramError, match=what):
                pipeline.logits(tokens)


class Scaled(grpo.GPT):
    """Its table is in no checkpoint, so both programs have a file of constants."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((grpo.DIGITS + 1,), 2.0), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = super().forward(tokens) * self.scale
        return logits


def test_constants_are_beside_an_own_optimizer(tmp_path: Path) -> None:
    ids = torch.zeros(4, grpo.POSITIONS, dtype=torch.long)
    program = gp.export(Scaled, (ids,), loss_fn=likelihood, targets=(ids,), mode="train,generate")
    folder = gp.partition(program, gp.plan(program), optimizer=grpo.__file__).save(tmp_path / "out")
    assert all((folder / place / "constants.safetensors").is_file() for place in ("", "generate"))


def test_a_buffer_that_evaluation_writes_and_reads_is_refused() -> None:
    ids = torch.zeros(4, grpo.POSITIONS, dtype=torch.long)
    with pytest.raises(GraphparError, match=r"writes the buffer 'calls'.* and computes with it"):
        gp.export(Annealed, (ids,), mode="generate")


@pytest.mark.parametrize(
    ("argument", "other"),
    [
        ("prompts", Request([[2]], [3], Sampling(), frozenset())),
        ("max_new_tokens", Request([[1]], [4], Sampling(), frozenset())),
        ("do_sample", Request([[1]], [3], Sampling(do_sample=True), frozenset())),
        ("eos_token_id", Request([[1]], [3], Sampling(), frozenset([5]))),
    ],
)
def test_ranks_that_ask_for_different_tokens_are_told(argument: str, other: Request) -> None:
    own = Request([[1]], [3], Sampling(), frozenset())
    check_alike([own.digests, Request([[1]], [3], Sampling(seed=9), frozenset()).digests])
    with pytest.raises(RuntimeProgramError, match=f"ranks 0 and 2 generate with different {argument};"):
        check_alike([own.digests, own.digests, other.digests])


def test_what_can_not_generate_is_refused() -> None:
    ids = torch.zeros(4, 8, dtype=torch.long)
    with pytest.raises(GraphparError, match="returns no loss; give loss_fn"):
        gp.export(grpo.GPT, (ids[:, : grpo.POSITIONS],), mode="train,generate")
    mixtral = architectures.program_of("mixtral").source
    assert mixtral is not None
    program = gp.export(
        mixtral.model, kwargs=mixtral.kwargs, loss_fn=mixtral.loss_fn, targets=mixtral.targets, mode="train,generate"
    )
    with pytest.raises(GraphparError, match="mesh dp_expert=2 is for training"):
        gp.partition(program, gp.plan(program, mesh={"dp_expert": 2}))


class Positions(grpo.GPT):
    """Its table of positions is a parameter, which training alone on tp divides with the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = torch.nn.Parameter(torch.zeros(grpo.POSITIONS, grpo.WIDTH))  # type: ignore[assignment]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions[: tokens.size(1)]  # type: ignore[index]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@pytest.mark.costly
@pytest.mark.parametrize("sp", [True, False])
def test_training_stores_what_generation_can_read(sp: bool) -> None:
    tokens = torch.zeros(8, grpo.POSITIONS, dtype=torch.long)
    program = gp.export(Positions, (tokens,), loss_fn=likelihood, targets=(tokens,), mode="train,generate")
    plan = gp.plan(program, mesh="tp=2", sp=sp)
    parts = gp.partition(program, plan)
    assert plan.sharding.parameters["positions"]["tp"] != Shard(0)
    assert gp.check(parts).ok
    with pytest.raises(GraphparError, match="the model can't generate"):
        gp.partition(program, gp.plan(program, mesh="tp=2", shard_plan={"positions": "S(0)@tp"}))


@pytest.mark.costly
def test_a_mesh_that_can_not_generate_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(problem: object, pins: object) -> None:
        raise GraphparError("no placement")

    monkeypatch.setattr(read_elsewhere, "possible", none)
    tokens = torch.zeros(8, grpo.POSITIONS, dtype=torch.long)
    program = gp.export(Positions, (tokens,), loss_fn=likelihood, targets=(tokens,), mode="train,generate")
    assert gp.plan(program, devices=2).mesh.tp == 1
    with pytest.raises(GraphparError, match="can't generate on tp=2: no placement"):
        gp.plan(program, mesh="tp=2")
