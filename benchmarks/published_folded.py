"""Context and expert parallelism as the frameworks run them, priced as replicas that exchange something more.

    Row ──its sequence and its experts divided──► units of a rank ──with the exchanges of cp and ep──► Exchanging(mesh: cp and ep in dp)

Ranks of cp and ep hold the dense weights whole and sum their gradients, as replicas do, so the mesh counts them among
those. What they exchange besides is work of a unit:

    cp    a ring: each of cp steps attends to one part of the keys while the next part arrives, the gradients of keys and values going
          round with them in the backward. Parts of the sequence are paired so that causal attention is as long on every rank. Or keys
          and values are gathered, and their gradients reduce-scattered
    ep    two all-to-alls of the rows of tokens forward, and two backward; each expert sees an even share. Where tokens are sent once,
          a rank sends as many rows as a token's experts are on ranks, and over links between nodes as many as they are on other nodes

Gradients of experts are summed over dp / ep ranks only; their bytes are right, the number of ranks that sum them is taken to be dp.
"""

from __future__ import annotations

import math
from dataclasses import replace

from benchmarks.published_models import Shape
from benchmarks.published_programs import Parts
from benchmarks.published_rows import UNSTATED, Row, Unpriced
from graphpar.cost_models.collectives import Group
from graphpar.cost_models.compute import Compute, PhaseSeconds
from graphpar.cost_models.pipeline_units import Unit, UnitClass
from graphpar.cost_models.pricing import Pricing
from graphpar.cost_models.unit_prices import UnitPrices
from graphpar.cost_models.work import Attention, Collective, Phase, Product, Traffic, Work
from graphpar.cost_models.work import Row as WorkRow
from graphpar.operators.contractions import Size
from graphpar.runtime.mesh import Mesh

ITEM = 2
"""Bytes of an element of what is exchanged, whatever products compute in."""
EXPERT_PRODUCTS = 2
"""Of an expert, each way: into its feed-forward part and out of it."""


def shape_here(row: Row) -> Shape:
    """Return the model as a rank of cp and ep has it: its part of the sequence, and its experts.

    Raises:
        Unpriced: parts are uneven, or what is divided over cp or ep is not known.
    """
    shape, (cp, ep, tp) = row.shape, (row.degrees[axis] for axis in ("cp", "ep", "tp"))
    if cp > 1:
        if shape.seq % cp:
            raise Unpriced(f"a sequence of {shape.seq} is no multiple of cp={cp}")
        if shape.latent is not None or shape.attention != "flash":
            raise Unpriced(f"cp={cp}: there is a price for rings of fused attention with its own keys alone")
        shape = replace(shape, seq=shape.seq // cp)
    if ep > 1:
        if shape.experts is None or shape.experts.count % ep:
            raise Unpriced(f"ep={ep} does not divide {shape.experts.count if shape.experts else 0} experts")
        if tp > 1:
            raise Unpriced(f"ep={ep} with tp={tp}: what tp divides of an expert is not printed")
        if row.replicas * cp % ep:
            raise Unpriced(f"ep={ep} is no part of {row.replicas * cp} replicas")
        shape = replace(shape, experts=replace(shape.experts, here=shape.experts.count // ep))
    return shape


def exchanging(row: Row, shape: Shape, made: Parts) -> Parts:
    """Add what cp and ep exchange to the units of ``shape``, a rank's."""
    if row.degrees["cp"] == row.degrees["ep"] == 1 and shape.experts is None:
        return made
    return Parts(
        made.first, made.dense and _block(row, shape, made.dense, False), made.other and _block(row, shape, made.other, True), made.last
    )  # fmt: skip


def _block(row: Row, shape: Shape, unit: Unit, experts: bool) -> Unit:
    cp, ep = row.degrees["cp"], row.degrees["ep"]
    exchanged: dict[WorkRow, int] = dict(_keys_and_values(row, shape)) if cp > 1 else {}
    if ep > 1 and experts and shape.experts is not None:
        tokens = Size(float(ep * shape.seq * shape.experts.topk * shape.hidden * ITEM), 1)
        exchanged |= _dispatch(tokens, unit, row.habits.overlaps_ep)
    kind = unit.kind
    again = {_over_all_keys(each, cp): times for each, times in kind.again.work.rows.items()}
    if cp > 1 and row.habits.gathers_keys:
        exchanged |= _merged_parts(row, shape)
    if any(isinstance(each, Attention) for each in again):  # blocks run again whole
        again |= {each: times for each, times in exchanged.items() if each.phase is Phase.FORWARD}
    own = Work({_over_all_keys(each, cp): times for each, times in kind.work.rows.items()} | exchanged)
    if experts and shape.experts is not None and row.habits.loops_experts:
        calls = EXPERT_PRODUCTS * ((shape.experts.here or shape.experts.count) - 1)
        own = own + Work({Traffic(phase, Size(0.0)): calls for phase in Phase})
    repeated = replace(kind.again, work=Work(again))
    return replace(unit, kind=UnitClass(own, kind.sends, lambda: kind.memory, repeated))


def _merged_parts(row: Row, shape: Shape) -> dict[WorkRow, int]:
    """Attention to gathered keys, part by part, as torch computes it (_SDPAMerger in torch/distributed/tensor/experimental/_attention.py).

    Each part but the first is cast to 32 bits (6 bytes an element) and joined with those before (12 + 8 + 12); in the backward its
    gradients of q, k and v are cast (6) and added (12). Half of the parts are of half of the queries.
    """
    elements = 0.75 * (row.degrees["cp"] - 1) * shape.heads / row.degrees["tp"] * shape.head_dim * shape.seq
    moved = {Phase.FORWARD: 38, Phase.INPUT: 54}
    return {Traffic(phase, Size(nbytes * elements, 1)): 1 for phase, nbytes in moved.items()}


def _dispatch(tokens: Size, unit: Unit, beside: bool) -> dict[WorkRow, int]:
    """Two all-to-alls each way; ``beside``: half of the unit's products and attention of another microbatch, of the other way, run beside
    each (megatron.core's combined 1F1B, where blocks of a forward alternate with those of a backward)."""
    ways = (Phase.FORWARD, Phase.INPUT)
    if not beside:
        return {Collective(phase, "ep", "all-to-all", tokens): 2 for phase in ways}
    rows = [
        row for row, times in unit.kind.work.rows.items() for _ in range(times) if isinstance(row, Product | Attention)
    ]
    parts = [[row for row in rows if (row.phase is Phase.FORWARD) == forward] for forward in (False, True)]
    return {
        Collective(phase, "ep", "all-to-all", tokens, tuple(part[half::2])): 1
        for phase, part in zip(ways, parts)
        for half in (0, 1)
    }


def _over_all_keys(each: WorkRow, cp: int) -> WorkRow:
    return each._replace(keys=cp * each.keys) if isinstance(each, Attention) else each


def _keys_and_values(row: Row, shape: Shape) -> dict[WorkRow, int]:
    of_keys = shape.heads if row.habits.repeats_keys else shape.kv_heads
    cp, heads = row.degrees["cp"], max(1, of_keys // row.degrees["tp"])
    own = Size(2.0 * heads * shape.head_dim * shape.seq * ITEM, 1)
    if row.habits.gathers_keys:
        whole = float(cp) * own
        return {
            Collective(Phase.FORWARD, "cp", "all-gather", whole): 1,
            Collective(Phase.INPUT, "cp", "all-gather", whole): 1,
            Collective(Phase.INPUT, "cp", "reduce-scatter", whole): 1,
        }
    return {
        Collective(Phase.FORWARD, "cp", "send", own): cp - 1,
        Collective(Phase.INPUT, "cp", "send", 2.0 * own): cp - 1,
    }


def mesh_of(row: Row) -> Mesh:
    """Return the mesh of a row, with the ranks of cp and ep among its replicas."""
    replicas = row.replicas * row.degrees["cp"]
    return Mesh(pp=row.degrees["pp"], dp_replicate=replicas // row.shards, dp_shard=row.shards, tp=row.degrees["tp"])


def own_copies_bytes(row: Row, elements: int) -> int:
    """Return the bytes of 16-bit copies in the price that a rank with ``elements`` of parameters has no shards of."""
    return elements * ITEM // row.shards if row.habits.fp32_shards and row.zero == 3 else 0


def held_logits_bytes(row: Row) -> int:
    """Return the bytes of logits that the last stage's buffers hold."""
    return row.habits.held_logits * row.microbatch_size * row.shape.seq * row.shape.vocab * ITEM


def own_gradients_bytes(row: Row, elements: int, running: int) -> int:
    """Return the bytes of gradients that a rank with ``elements`` of parameters has beside those in the price with DeepSpeed's optimizers.

    In bf16 these are what the sums in fp32 are made of; in fp16 the rank's share as a flat tensor and in fp32, at the end of a step, when
    ``running`` bytes of the backward are free.
    """
    if not row.habits.deepspeed or UNSTATED in row.assumed:
        return 0
    return ITEM * elements if row.dtype == "bf16" else max(0, (ITEM + 4) * elements // row.shards - running)


def own_state_bytes(row: Row, blocks: int) -> int:
    """Return the bytes of main copies and optimizer state that a rank with ``blocks`` blocks of experts has beyond the price, where
    these are sharded over the dp / ep ranks with the same experts, not over dp."""
    experts, ep = row.shape.experts, row.degrees["ep"]
    if ep == 1 or not row.zero or experts is None:
        return 0
    elements = experts.count // ep * (3 if row.shape.gated else 2) * experts.ffn * row.shape.hidden
    return round(blocks * elements * 12 * (ep - 1) / row.shards)


class Exchanging(Pricing):
    """Prices of units that exchange something over cp and ep, whose ranks are among the replicas of the mesh."""

    def of_row(self, row: Row) -> Exchanging:
        """Return these prices with the groups of a row's cp and ep."""
        self.of_units = _ExchangingUnits(self, row)
        return self


class _ExchangingUnits(UnitPrices):
    """Seconds of the units of ``pricing``, with the groups of a row's cp and ep."""

    def __init__(self, pricing: Pricing, row: Row) -> None:
        known = pricing.of_units
        super().__init__(known.compute, known.network, known.groups, known.overlap_tp)
        replicas, sizes = row.replicas * row.degrees["cp"], {"cp": row.degrees["cp"], "ep": row.degrees["ep"]}
        self._exchanges: dict[str, Group] = {}
        for axis, size in sizes.items():
            if size > 1:
                mesh = Mesh(pp=row.degrees["pp"], dp_shard=replicas // size, tp=row.degrees["tp"], **{axis: size})
                self._exchanges[axis] = self.network.group_of_axes(mesh, [axis])
        self._experts = row.shape.experts if row.habits.sends_once else None
        self._steps = sizes["cp"]
        self._sums_first = row.habits.overlap_tp and not row.habits.merged
        # Heads compute in 16 bits where blocks do in 8, in Megatron-LM as in torchtitan.
        self._head = pricing.units[-1].kind if pricing.dtype == "fp8" else None
        self._of_head = Compute(self.compute.device, "bf16")
        self._attention = {
            each.phase: each for unit in pricing.units for each in unit.kind.work.rows if isinstance(each, Attention)
        }

    def phases(self, kind: UnitClass, rows: int) -> tuple[PhaseSeconds, PhaseSeconds, PhaseSeconds]:
        """Return the seconds of the phases of a unit."""
        return self._of_head.seconds(kind.work, rows) if kind is self._head else super().phases(kind, rows)

    def sent_s(self, row: Collective, rows: int) -> float:
        """Return the seconds of one collective."""
        if row.axis not in self._exchanges:
            return super().sent_s(row, rows)
        return self._exchange_s(row.kind, row.nbytes.at(rows), self._exchanges[row.axis])

    def exposed_s(self, row: Collective, rows: int, apart: bool = False) -> float:
        """Return those that are not hidden: a ring's send by attention to a part of the keys, others by what the row has beside them."""
        if row.axis not in self._exchanges:
            waits = self._sums_first and not row.beside and row.phase is Phase.INPUT and row.kind == "reduce-scatter"
            return self.sent_s(row, rows) if waits else super().exposed_s(row, rows, apart)
        seconds = self.sent_s(row, rows)
        if row.beside:
            seconds = max(0.0, seconds - sum(self.compute.alone_s(each, rows) for each in row.beside))
        if row.kind == "send":
            work = Work({self._attention[row.phase]: 1})
            seconds = max(0.0, seconds - self.compute.seconds(work, rows)[row.phase].attention / self._steps)
        return seconds

    def _exchange_s(self, kind: str, nbytes: float, group: Group) -> float:
        """Return the seconds of a collective; of an all-to-all of tokens the longer of what crosses nodes and what does not."""
        if kind != "all-to-all" or self._experts is None:
            return self.network.seconds(kind, nbytes, group)
        count, topk = self._experts.count, self._experts.topk
        here = min(group.per_node, group.size)
        to_ranks = places(group.size, count, topk) / topk
        within = self.network.seconds(kind, nbytes * to_ranks * here / group.size, Group(here, 1, here))
        if group.nodes == 1:
            return within
        others = (group.nodes - 1) / group.nodes  # of a token's rows, and of the places of its experts
        to_nodes = places(group.nodes, count, topk) * others / (topk * (1 - here / group.size))
        return max(within, self.network.seconds(kind, nbytes * to_nodes, group))


def places(count: int, experts: int, topk: int) -> float:
    """Return on how many of ``count`` places, which hold equal parts of ``experts``, a token's ``topk`` are in the mean."""
    missed = math.comb(experts - experts // count, topk) / math.comb(experts, topk)
    return count * (1 - missed)
