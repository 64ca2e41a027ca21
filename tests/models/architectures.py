"""Public architectures as tiny configurations: four layers of width 32, without dropout."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphpar as gp

_ROWS, _TOKENS, _WORDS = 8, 12, 64
_COMMON: dict[str, Any] = {
    "vocab_size": _WORDS, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 32, "attn_implementation": "eager", "use_cache": False, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 2,
}  # fmt: skip
_GROUPED = {"num_key_value_heads": 2}
_HEADS = {**_GROUPED, "head_dim": 8}
_GPT2 = {"n_layer": 4, "n_head": 4, "n_embd": 32, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "type_vocab_size": 2}
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "topk_group": 1,
}  # fmt: skip
_SEQ2SEQ = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "dropout": 0.0, "decoder_start_token_id": 0,
}  # fmt: skip
_IMAGES = {"num_channels": 3, "image_size": 32, "num_labels": 5}

# name -> (model class, configuration class, options beyond the common ones; None takes a common one away)
_TEXT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {}),
    "opt": ("OPTForCausalLM", "OPTConfig", {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "opt_dropout": ("OPTForCausalLM", "OPTConfig", {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.1}),
    "falcon": ("FalconForCausalLM", "FalconConfig", {"ffn_hidden_size": 64}),
    "falcon_alibi": ("FalconForCausalLM", "FalconConfig", {"ffn_hidden_size": 64, "alibi": True}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _GROUPED),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _HEADS),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {
        **_HEADS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    }),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", {
        **_GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 32,
    }),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {
        **_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4,
    }),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", _GROUPED),
    "nemotron": ("NemotronForCausalLM", "NemotronConfig", _HEADS),
    "mpt": ("MptForCausalLM", "MptConfig", {"d_model": 32, "n_heads": 4, "n_layers": 4, "expansion_ratio": 2, "max_seq_len": 32}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", _HEADS),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**_HEADS, "sliding_window": 4}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**_HEADS, "sliding_window": 4}),
    "phi": ("PhiForCausalLM", "PhiConfig", {}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_GROUPED, "sliding_window": 4}),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {**_GPT2, "rotary_dim": 4}),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", _GROUPED),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", _GROUPED),
    "cohere": ("CohereForCausalLM", "CohereConfig", _GROUPED),
    "granite": ("GraniteForCausalLM", "GraniteConfig", _GROUPED),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", {**_GROUPED, "residual_dropout": 0.0, "embedding_dropout": 0.0}),
    "glm": ("GlmForCausalLM", "GlmConfig", _HEADS),
    "deepseek_v2": ("DeepseekV2ForCausalLM", "DeepseekV2Config", {**_LATENT, "n_group": 1, "topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {**_LATENT, "n_group": 2}),
    "mamba": ("MambaForCausalLM", "MambaConfig", {"state_size": 4, "expand": 2}),
    "mamba2": ("Mamba2ForCausalLM", "Mamba2Config", {"state_size": 4, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 4}),
    "xglm": ("XGLMForCausalLM", "XGLMConfig", {"d_model": 32, "ffn_dim": 64, "num_layers": 4, "attention_heads": 4, "dropout": 0.0}),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", {**_GPT2, "n_positions": 32}),
    "gpt_neo": ("GPTNeoForCausalLM", "GPTNeoConfig", {
        "num_layers": 4, "num_heads": 4, "window_size": 4, "attention_types": [[["global", "local"], 2]],
        "resid_dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0,
    }),
    "xlnet": ("XLNetLMHeadModel", "XLNetConfig", {
        "d_model": 32, "n_layer": 4, "n_head": 4, "d_inner": 64, "dropout": 0.0, "max_position_embeddings": None,
    }),
    "rwkv": ("RwkvForCausalLM", "RwkvConfig", {"attention_hidden_size": 32, "context_length": 32}),
    "bert": ("BertForMaskedLM", "BertConfig", _BERT),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", {**_BERT, "embedding_size": 16}),
    "distilbert": ("DistilBertForMaskedLM", "DistilBertConfig", {
        "dim": 32, "n_layers": 4, "n_heads": 4, "hidden_dim": 64, "dropout": 0.0, "attention_dropout": 0.0,
    }),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", _BERT),
    "electra": ("ElectraForMaskedLM", "ElectraConfig", _BERT),
    "deberta": ("DebertaForMaskedLM", "DebertaConfig", _BERT),
    "deberta_v2": ("DebertaV2ForMaskedLM", "DebertaV2Config", _BERT),
    "bert_dropout": ("BertForMaskedLM", "BertConfig", {}),
    "mpnet": ("MPNetForMaskedLM", "MPNetConfig", _BERT),
    "modernbert": ("ModernBertForMaskedLM", "ModernBertConfig", {"cls_token_id": 3, "sep_token_id": 4}),
    "bloom": ("BloomForCausalLM", "BloomConfig", {"n_layer": 4, "n_head": 4, "hidden_dropout": 0.0}),
}  # fmt: skip
_VISION: dict[str, tuple[str, str, dict[str, Any]]] = {
    "convnext": ("ConvNextForImageClassification", "ConvNextConfig", {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 2, 1]}),
    "swin": ("SwinForImageClassification", "SwinConfig", {
        "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
        "drop_path_rate": 0.0,
    }),
    "vit": ("ViTForImageClassification", "ViTConfig", {
        "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64, "patch_size": 8,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }),
    "resnet": ("ResNetForImageClassification", "ResNetConfig", {
        "embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2], "layer_type": "basic",
    }),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Config", {
        "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "mlp_ratio": 2, "patch_size": 8,
    }),
}  # fmt: skip
ALL = [*_TEXT, *_VISION, "bart", "t5", "whisper", "clip"]
# Those that can't be split into stages and microbatches, and the words that say why.
REFUSED_ARCHITECTURES = {
    "clip": "matmul mixes examples",
    "resnet": "batch_norm mixes examples",
}
ARCHITECTURES = [name for name in ALL if name not in REFUSED_ARCHITECTURES]

_Example = tuple[Callable[[], nn.Module], dict[str, Tensor], Callable[..., Tensor] | None, tuple[Tensor, ...]]


def _words() -> Tensor:
    return torch.randint(3, _WORDS, (_ROWS, _TOKENS), generator=torch.Generator().manual_seed(0))


def _next_word(output: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _class(output: Any, label: Tensor) -> Tensor:
    return F.cross_entropy(output.logits, label)


def _built(model: str, config: str, options: dict[str, Any]) -> Callable[[], nn.Module]:
    import transformers

    described = getattr(transformers, config)(**{key: item for key, item in options.items() if item is not None})
    return lambda: getattr(transformers, model)(described)  # type: ignore[no-any-return]


def _example(name: str) -> _Example:
    if name in _TEXT:
        model, config, options = _TEXT[name]
        return _built(model, config, _COMMON | options), {"input_ids": _words()}, _next_word, (_words(),)
    if name in _VISION:
        model, config, options = _VISION[name]
        image = torch.randn(_ROWS, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        return _built(model, config, _IMAGES | options), {"pixel_values": image}, _class, (torch.arange(_ROWS) % 5,)
    if name == "bart":
        made = _built("BartForConditionalGeneration", "BartConfig", _COMMON | _SEQ2SEQ | {"forced_eos_token_id": None})
        return made, {"input_ids": _words(), "decoder_input_ids": _words()}, _next_word, (_words(),)
    if name == "t5":
        sizes = {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        }
        made = _built("T5ForConditionalGeneration", "T5Config", {**_COMMON, **sizes, "feed_forward_proj": "gated-gelu"})
        return made, {"input_ids": _words(), "decoder_input_ids": _words()}, _next_word, (_words(),)
    if name == "whisper":
        audio = {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32}
        made = _built("WhisperForConditionalGeneration", "WhisperConfig", _COMMON | _SEQ2SEQ | audio)
        sound = torch.randn(_ROWS, 8, 32, generator=torch.Generator().manual_seed(0))
        return made, {"input_features": sound, "decoder_input_ids": _words()}, _next_word, (_words(),)
    assert name == "clip"
    shared = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    text = {**shared, "vocab_size": _WORDS, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 1}
    vision = {**shared, "image_size": 16, "patch_size": 8}
    made = _built("CLIPModel", "CLIPConfig", {"text_config": text, "vision_config": vision, "projection_dim": 16})
    pixels = torch.randn(_ROWS, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    return made, {"input_ids": _words(), "pixel_values": pixels}, lambda output: _contrastive(output), ()


def _contrastive(output: Any) -> Tensor:
    logits: Tensor = output.logits_per_text
    return F.cross_entropy(logits, torch.arange(logits.shape[0]))


def build(name: str) -> nn.Module:
    """Make the model."""
    return _example(name)[0]()


@functools.cache
def program_of(name: str, **options: Any) -> gp.Program:
    """``name``, traced with its loss; once in a test session."""
    from tests.tools.programs import exported_once  # not where ranks import this file: it imports the compiler

    model, kwargs, loss_fn, targets = _example(name)
    return exported_once(("architecture", name), model, kwargs, loss_fn, targets, **options)


@functools.cache
def architecture(name: str) -> gp.Parts:
    """``name`` in two stages."""
    program = program_of(name)
    return gp.partition(program, gp.plan(program, mesh={"pp": 2}, schedule="1F1B"))
