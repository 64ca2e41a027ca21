"""What a source's rows do not say themselves: the program that was run, and the links of its cluster.

    row ──its source──► Habits: framework, kernels, dtypes, overlap, GB/s between nodes      each a fact, with where it is from

No number here is fitted to a time. Facts are from the notes of the rows and from the frameworks' code of the time;
where those say nothing, a comment says what of the rows a fact was inferred from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Habits:
    """How the runs of a source were made.

    Attributes:
        attention: of :data:`benchmarks.published_models.ATTENTIONS`.
        attention_rates: the rate of its fused attention over that of FlashAttention-2, by a part of the device's name: the first
            FlashAttention has a half (arXiv 2307.08691, abstract), later kernels on Hopper 1.6 (arXiv 2407.08608, abstract).
        dropout: of the scores (where they are there), of what a block adds, and of the embedding.
        biases: of the products of a block.
        loss: of :data:`benchmarks.published_kernels.LOSSES`.
        tied: the head is the embedding's weight.
        vocab: where the row has none.
        fused: elementwise chains are one kernel each.
        fuses_sums: products add gradients of weights to their sums over microbatches; else another kernel does.
        deepspeed: its optimizers step, with copies of gradients of their own (runtime/bf16_optimizer.py, runtime/zero/stage_1_and_2.py).
        gradient_bytes: of an element in which gradients are summed; None: 2 with fp16, 4 with bf16, as Megatron-LM and
            DeepSpeed do.
        sum_bytes: of an element in which gradients are summed over replicas; None: as they are accumulated.
        sums_whole: with ZeRO 1 gradients are all-reduced, not reduce-scattered.
        broadcasts: with ZeRO 1 each rank owns whole parameters, and broadcasts them.
        moved_bytes: of memory, for each element of a gradient once a step, besides its sum and the optimizer.
        stops_early: full recomputation of a block ends before what saves nothing for its backward, such as its last product: torch's
            without reentrance, from torch 2.1 on (torch/utils/checkpoint.py, set_checkpoint_early_stop); else the whole block runs again.
        overlap_gradients: their sums run beside the backward.
        prefetch: divided parameters are gathered ahead.
        wait_for_sends: a stage waits until what it sends has arrived.
        splits_messages: between stages each rank of tp sends a part, where their results are the same.
        sends_once: a token is sent to a rank of ep once for all its experts there, and to a node once.
        overlap_tp: collectives of tp are divided into as many chunks as there are ranks, of which all but the first are hidden; with
            products that are not ``merged`` but the sums of the gradients of their input, which several products add up to
            (torch/_inductor/fx_passes/micro_pipeline_tp.py looks for one before a reduce-scatter).
        loops_experts: the host issues the products of one expert after the other, each with what it takes for an operator.
        overlaps_ep: all-to-alls of tokens run beside products of another microbatch.
        split_entries: stages are equal runs of the list of embedding, blocks, last norm and head, of which the first are one longer;
            else blocks are divided evenly, see :func:`benchmarks.published_prices.starts`.
        upcast_norm: norms that are plain operators are on copies in 32 bits.
        recomputes_ends: full recomputation is of embedding and head too; else of blocks alone.
        fused_casts: kernels of norms and activations write 8 bits for the products after them; else they are cast on their own.
        rounds_up: stages have as many blocks as the even share rounded up, and the last has the rest.
        merged: one product makes q, k and v, and one the gate and the feed-forward part.
        keeps_shards: of the sequence, for the products of gradients of weights, and gathers them again beside the product before.
        joined: the gradient of what enters column-parallel products is summed beside those of their weights.
        cast_bytes: of memory, for each element of an operand that is cast to 8 bits in a kernel of its own.
        fp32_shards: what ZeRO 3 divides are fp32 parameters, which are cast when they are gathered; else 16-bit ones and main copies.
        compiles_loss_from: the year from which on compiled models have compiled losses.
        divided_loss_bytes: that a loss divided over tp needs for an element of a rank's logits, at its peak.
        held_logits: how many microbatches' logits a stage's buffers hold beside what autograd keeps.
        gathers_keys: ranks of cp gather keys and values; else these go round a ring.
        repeats_keys: keys and values are repeated for each head that shares them before they are gathered.
        node_gbps: GB/s between nodes of one whole node in one direction, where it is not the device's usual.
        per_node: devices of a node, by a part of the hardware's name.
        prints: of its memory: what is ``allocated``, what the allocator has ``reserved``, or what the ``device`` has in use; None
            where the source does not say, which is compared with what is reserved.
        bf16_from: the date of the notes from which on rows that do not say their precision are in bf16; before it they are in fp16.
    """

    attention: str = "flash"
    attention_rates: Mapping[str, float] = field(default_factory=dict)
    dropout: float = 0.0
    biases: bool = False
    loss: str = "plain"
    tied: bool = False
    vocab: int = 51200
    fused: bool = True
    fuses_sums: bool = True
    deepspeed: bool = False
    gradient_bytes: int | None = None
    sum_bytes: int | None = None
    sums_whole: bool = False
    broadcasts: bool = False
    moved_bytes: int = 0
    stops_early: bool = False
    overlap_gradients: bool = True
    prefetch: bool = True
    wait_for_sends: bool = False
    splits_messages: bool = False
    sends_once: bool = False
    overlap_tp: bool = False
    loops_experts: bool = False
    overlaps_ep: bool = False
    split_entries: bool = False
    rounds_up: bool = False
    upcast_norm: bool = False
    recomputes_ends: bool = False
    fused_casts: bool = False
    merged: bool = True
    keeps_shards: bool = False
    joined: bool = False
    cast_bytes: int = 0
    fp32_shards: bool = False
    compiles_loss_from: int | None = None
    divided_loss_bytes: int = 0
    held_logits: int = 0
    gathers_keys: bool = False
    repeats_keys: bool = False
    node_gbps: float | None = None
    per_node: Mapping[str, int] | None = None
    prints: str | None = None
    bf16_from: str | None = None


_MEGATRON = Habits(  # Megatron-LM of 2020 to 2022: fused softmax, bias + GELU, bias + dropout + add; gradients and messages are waited for
    attention="softmax", dropout=0.1, biases=True, tied=True, loss="megatron", overlap_gradients=False, wait_for_sends=True,
    keeps_shards=True, splits_messages=True,  # arXiv 2104.04473, section 4.1; DeepSpeed's pipelines do the same
    fuses_sums=False,  # hooks add (model/distributed.py), and in DeepSpeed autograd or BF16_Optimizer does
)  # fmt: skip
# its column-parallel layers sum the input's gradient beside the product of the weight's from the end of 2021 on (apex's
# ColumnParallelLinearWithAsyncAllreduce, pull request 1183), and so with sequences sharded (core/tensor_parallel/layers.py); the forks of
# DeepSpeed leave that off (deepspeedai/Megatron-DeepSpeed, issue 447)
_MEGATRON_2022 = replace(
    _MEGATRON, joined=True, fuses_sums=True
)  # the second from apex's fused_weight_gradient_mlp_cuda
_MEGATRON_DEEPSPEED = replace(
    _MEGATRON, prefetch=False, deepspeed=True
)  # the same model code; parameters are gathered after the optimizer
FIRST_FLASH = {"": 0.5}
_LATER_KERNELS = {"H100": 1.6, "B200": 1.6, "B300": 1.6, "GB": 1.6}
# Megatron Core with Transformer Engine: cuDNN's attention, fp32 main gradients
# Transformer Engine's GroupedLinear loops over experts in Python (pytorch/module/grouped_linear.py), and its products are single calls
_CORE = Habits(attention_rates=_LATER_KERNELS, loss="megatron", keeps_shards=True, joined=True, loops_experts=True)
_FSDP = Habits(fused=False)

# A framework of its own, later published as Aleph-Alpha/scaling, whose files under src/scaling say all of this. No kernel for RMSNorm
# (but where a row says so), SwiGLU and rotary. core/nn/linear/column_parallel_linear.py, transformer/model/losses/cross_entropy.py: ranks
# of tp gather logits, whose loss is torch's in fp32. core/nn/parallel_module/pipeline_partitioning.py, topology_config.py: stages are
# uniform runs of layers, with embedding, last norm and head among them. communicator.py: sends are waited for.
# parallel_module.py: results of two microbatches stay in buffers after their backwards. core/optimizer/
# optimizer.py, allreduce.py, parameter_group.py: gradients of 16 bits are, after the last backward, copied to flat buckets (4 bytes an
# element), divided (4), cast (6), all-reduced whole in fp32 though ZeRO shards the state, cast back (6), copied back (4), scaled (4) and
# normed (2); parameters are all-gathered into a flat buffer, and copied (4). parallel_module.py checkpoints every layer, with the embedding
# and the head among them, and activation_checkpointing.py repeats it whole. Norms without a kernel are taken to be on copies in 32 bits,
# as in Llama's own code: inferred from runs with and without the kernel, in time and in what fits (core/nn/norm/rms_norm.py of 2024
# casts after the product).
_SCALING = Habits(
    fused=False, merged=False, loss="gathered", gradient_bytes=2, sum_bytes=4, sums_whole=True, moved_bytes=34, overlap_gradients=False,
    prefetch=False,
    wait_for_sends=True, split_entries=True, held_logits=2, upcast_norm=True, recomputes_ends=True,
)  # fmt: skip

SOURCES: Mapping[str, Habits] = {
    "megatron_sc21": _MEGATRON,
    "megatron_readme2020": _MEGATRON,
    # 18 bytes a parameter in its table of memory: 2 + 4 (gradient) + 12
    "korthikanti": replace(_MEGATRON_2022, gradient_bytes=4),
    # 800 Gb/s InfiniBand a node
    "vtrain_single": replace(_MEGATRON_DEEPSPEED, node_gbps=100),
    "vtrain_multi": replace(_MEGATRON_DEEPSPEED, node_gbps=100),
    # four 100 Gb/s Omni-Path a node; BLOOM trains without dropout. By its chronicles-prequel.md ("Rebalancing layers") runs were in fp16
    # until an optimizer for BF16 that sums gradients in fp32 was there, and memory was read with nvidia-smi
    "bigscience_tr11": replace(_MEGATRON_DEEPSPEED, dropout=0.0, node_gbps=50, prints="device", bf16_from="02-28"),
    # a fork of Megatron-LM of 2023, by default without flash attention. Its scripts have a SentencePiece tokenizer, and the sizes that the
    # paper prints (14.6 and 28.3 billion) are those of 32,000 tokens; 51,200 would be 14.7 and 28.4
    "zero_bubble": replace(_MEGATRON_2022, vocab=32000),
    "hagemann_layouts": _SCALING,
    "megascale": replace(_CORE, biases=True, tied=True, overlap_gradients=False),
    "megatron_readme_h100": replace(_CORE, biases=True, tied=True, overlap_tp=True),
    # cross_entropy_fusion_impl is "te", one kernel that reads logits and one that writes their gradient in their place
    "megatron_bridge": replace(_CORE, overlap_tp=True, loss="kernel"),
    # of March 2024, before the later kernels for Hopper (July 2024)
    # 8 bits of 2024 have scales of steps before (Transformer Engine's DelayedScaling), so that a kernel can write them
    "nemo_longseq": replace(_CORE, overlap_tp=True, attention_rates={}, fused_casts=True),
    "nemo_2407": replace(_CORE, biases=True, tied=True, overlap_tp=True, fused_casts=True),
    "mlperf_gpt3": replace(_CORE, biases=True, tied=True, dropout=0.1, overlap_tp=True, fused_casts=True),
    # GPT-2's vocabulary padded; what overlaps, its options say
    "megatron_ci": replace(_CORE, biases=True, vocab=50304, dropout=0.1, overlap_gradients=False, prints="allocated"),
    # four 100 Gb/s RoCE a node (doc/en/train_performance.md). internlm/solver/optimizer/hybrid_zero_optim.py: a parameter is of one rank;
    # its gradient is all-reduced (reduce_rank is None), and the rank broadcasts what it updated, beside the forward (the configurations'
    # overlap_sync_param)
    "internevo": Habits(gradient_bytes=2, sums_whole=True, broadcasts=True, node_gbps=50, prints="device"),
    # attn_impl is triton unless named (its scripts/train/benchmarking/submit_benchmarks.py): a kernel of the first FlashAttention
    # Its sweep.sh names images of torch 2.0.1 and of a nightly of 2.1 (27 August 2023). That tables with gradients in 32 bits are of the
    # second, which stops recomputation early, was inferred from their rows: those that recompute took less than 4/3 of others
    "llm_foundry": replace(_FSDP, tied=True, loss="kernel", attention_rates=FIRST_FLASH, stops_early=True),
    # its context_parallel_rotate_method is allgather unless named; FSDP2's shards are fp32 (parallelize_llama.py: MixedPrecisionPolicy).
    # train.py of 2024: "compiling loss function causes CUDA errors, turning off for now"; components/loss.py of 2025 compiles it.
    # torch/distributed/tensor/parallel/loss.py: log-softmax, its gradient, and two more of 4 bytes each.
    # models/llama/model.py of 2024 calls repeat_kv before attention; norm_type is rmsnorm in train_configs/llama3_8b.toml of 2024.
    # torchao casts in a kernel that reads 2 bytes and writes 1, largest values come with what was before
    "torchtitan": Habits(
        fused=False,
        stops_early=True,
        upcast_norm=True,
        gathers_keys=True,
        repeats_keys=True,
        prints="reserved",
        merged=False,
        fp32_shards=True,
        compiles_loss_from=2025,
        cast_bytes=3,
        divided_loss_bytes=16,
    ),
    # 2 Tb/s RoCE a node
    "fsdp_paper": replace(_FSDP, attention="softmax", biases=True, dropout=0.1, node_gbps=250),
    "colossalai": Habits(),
    "alpa_readme": Habits(attention="softmax", biases=True, tied=True, overlap_gradients=False),
    "primus_pp": Habits(),
}


def with_recipe(habits: Habits, model: str, device: str, container: str, drops: bool) -> Habits:
    """How a recipe of Megatron-Bridge exchanges tokens, from scripts/performance/configs of the time of its ``container`` (year and month).

    Those of 2025 have ``enable_deepep=False``; later ones DeepEP or HybridEP, but for Qwen3-235B outside of NVL72, whose dispatcher is
    ``alltoall``. ``moe_a2a_overlap`` is for DeepSeek-V3 in 8 bits, with graphs of a whole iteration on NVL72. The recipe of DeepSeek-V3 has
    the layout of its stages (``map_pp_vp_to_layout``). Hosts don't issue the products of experts where a graph has them, or tokens are
    dropped (``drops``) to a fixed number: the second is inferred from runs of one model with and without.
    """
    plain = container < "26" or (model.startswith("Qwen3-235B") and not device.startswith("GB"))
    since = {"GB300": "26.06", "GB200": "26.06", "B200": "26.04.01"}.get(device.partition("-")[0])
    overlaps = model.startswith("DeepSeek-V3") and since is not None and container >= since
    loops = not drops and not (overlaps and device.startswith("GB"))
    rounds = model.startswith("DeepSeek-V3")
    return replace(habits, sends_once=not plain, overlaps_ep=overlaps, loops_experts=loops, rounds_up=rounds)


UNDESCRIBED = _CORE
"""Of a source of which nothing is known: its runs are priced as Megatron Core's, and scored apart."""


def held_out(source: str) -> bool:
    """Whether nothing was fitted to the source, which its name alone decides: each name has one chance in three."""
    return int(hashlib.sha256(source.encode()).hexdigest(), 16) % 3 == 0
