"""Models of public packages at toy sizes, as their documentation builds them: by name, what makes model, inputs and loss.

None of the packages is a dependency: a model whose package is not installed is left out. Names begin with the package's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

B = 4
"""Rows of an example batch."""


@dataclass
class Case:
    """A model, the arguments of its forward, and what its loss is; ``loss_fn`` None: the model returns it."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss_fn: Callable[..., Any] | None = None
    targets: tuple[Any, ...] = ()


MODELS: dict[str, Callable[[], Case]] = {}


def _named(name: str) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    def keep(make: Callable[[], Case]) -> Callable[[], Case]:
        MODELS[name] = make
        return make

    return keep


def _real(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(1))


def _ids(high: int, *sizes: int) -> Tensor:
    return torch.randint(0, high, sizes, generator=torch.Generator().manual_seed(2))


def _label(output: Any, labels: Tensor) -> Tensor:
    logits = output if isinstance(output, Tensor) else output[0] if isinstance(output, tuple | list) else output["out"]
    return F.cross_entropy(logits, labels)


def _squares(output: Any) -> Tensor:
    found = output if isinstance(output, Tensor) else getattr(output, "sample", None)
    found = output[0] if found is None else found
    return found.float().square().mean()


def _tokens(output: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


def _image(model: nn.Module, size: int, classes: int = 5, channels: int = 3) -> Case:
    return Case(model, (_real(B, channels, size, size),), {}, _label, (_ids(classes, B),))


# ---- timm ----------------------------------------------------------------------------------------------------------


def _timm(name: str, size: int = 64, **options: Any) -> Callable[[], Case]:
    def make() -> Case:
        import timm

        return _image(timm.create_model(name, num_classes=5, **options), size)

    return make


_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 4}
MODELS |= {
    "timm vit": _timm("vit_tiny_patch16_224", 32, **_VIT),
    "timm vit, drop path": _timm("vit_tiny_patch16_224", 32, **_VIT, drop_path_rate=0.2),
    "timm deit, distilled": _timm("deit_tiny_distilled_patch16_224", 32, **_VIT),
    "timm swin": _timm(
        "swin_tiny_patch4_window7_224",
        32,
        img_size=32,
        patch_size=2,
        window_size=4,
        embed_dim=16,
        depths=(2, 2),
        num_heads=(2, 4),
    ),
    "timm convnext": _timm("convnext_tiny", 64, depths=(1, 1, 1, 1), dims=(16, 16, 32, 32)),
    "timm cait": _timm("cait_xxs24_224", 32, **_VIT),
    "timm beit": _timm("beit_base_patch16_224", 32, **_VIT),
    "timm eva02": _timm("eva02_tiny_patch14_224", 32, **_VIT),
    "timm xcit": _timm("xcit_nano_12_p16_224", 32, img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4),
    "timm resnet": _timm("test_resnet", 64),
    "timm efficientnet": _timm("test_efficientnet", 64),
    "timm byobnet": _timm("test_byobnet", 64),
    "timm mambaout": _timm("test_mambaout", 64),
    "timm maxvit": _timm("test_maxvit", 64, img_size=64),
    "timm nfnet": _timm("test_nfnet", 64),
    "timm mobilenet v3": _timm("mobilenetv3_small_050", 64),
    "timm regnet": _timm("regnetx_002", 64),
}


@_named("timm mixer")
def _mixer() -> Case:
    from timm.models.mlp_mixer import MlpMixer

    return _image(MlpMixer(num_classes=5, img_size=32, patch_size=8, num_blocks=4, embed_dim=32), 32)


@_named("timm metaformer")
def _metaformer() -> Case:
    from timm.models.metaformer import MetaFormer

    return _image(MetaFormer(num_classes=5, depths=(1, 1), dims=(16, 32)), 64)


# ---- torchvision ---------------------------------------------------------------------------------------------------


def _torchvision(path: str, size: int = 64, **options: Any) -> Callable[[], Case]:
    def make() -> Case:
        import torchvision

        return _image(getattr(torchvision.models, path)(num_classes=5, **options), size)

    return make


MODELS |= {
    "torchvision resnet18": _torchvision("resnet18"),
    "torchvision mobilenet v2": _torchvision("mobilenet_v2", width_mult=0.25),
    "torchvision shufflenet v2": _torchvision("shufflenet_v2_x0_5"),
    "torchvision squeezenet": _torchvision("squeezenet1_1"),
    "torchvision densenet": _torchvision("DenseNet", growth_rate=8, block_config=(2, 2), num_init_features=16),
    "torchvision vit": _torchvision(
        "VisionTransformer", 32, image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64
    ),
    "torchvision swin": _torchvision(
        "SwinTransformer", 32, patch_size=[2, 2], embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4],
        stochastic_depth_prob=0.1,
    ),
}  # fmt: skip

# ---- diffusers -----------------------------------------------------------------------------------------------------


@_named("diffusers UNet2D")
def _unet2d() -> Case:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(16, 32), norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8,
    )  # fmt: skip
    return Case(model, (_real(B, 3, 16, 16), _ids(1000, B)), {}, _squares)


@_named("diffusers UNet2DCondition")
def _unet2d_condition() -> Case:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=16, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(16, 32), norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16, attention_head_dim=8,
    )  # fmt: skip
    return Case(model, (_real(B, 4, 16, 16), _ids(1000, B), _real(B, 6, 16)), {}, _squares)


@_named("diffusers SD3")
def _sd3() -> Case:
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4, joint_attention_dim=16,
        caption_projection_dim=32, pooled_projection_dim=16, out_channels=4, pos_embed_max_size=8,
    )  # fmt: skip
    given = {
        "hidden_states": _real(B, 4, 8, 8),
        "encoder_hidden_states": _real(B, 6, 16),
        "pooled_projections": _real(B, 16),
    }
    return Case(model, (), {**given, "timestep": _ids(1000, B)}, _squares)


@_named("diffusers DiT")
def _dit() -> Case:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2, norm_num_groups=4, sample_size=8,
        patch_size=2, num_embeds_ada_norm=10,
    )  # fmt: skip
    return Case(model, (_real(B, 4, 8, 8),), {"timestep": _ids(1000, B), "class_labels": _ids(10, B)}, _squares)


@_named("diffusers PixArt")
def _pixart() -> Case:
    from diffusers import PixArtTransformer2DModel

    model = PixArtTransformer2DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2, cross_attention_dim=32, sample_size=8,
        patch_size=2, caption_channels=16, use_additional_conditions=False,
    )  # fmt: skip
    given = {"encoder_hidden_states": _real(B, 6, 16), "timestep": _ids(1000, B)}
    return Case(model, (_real(B, 4, 8, 8),), given, _squares)


@_named("diffusers AutoencoderKL")
def _autoencoder() -> Case:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=(16, 32), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8, latent_channels=4,
    )  # fmt: skip
    return Case(model, (_real(B, 3, 16, 16),), {"sample_posterior": True}, _squares)


# ---- x-transformers ------------------------------------------------------------------------------------------------


def _decoder(wrapped: bool = False, **options: Any) -> Callable[[], Case]:
    def make() -> Case:
        from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

        net = TransformerWrapper(
            num_tokens=96, max_seq_len=32, attn_layers=Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **options)
        )
        if wrapped:
            return Case(AutoregressiveWrapper(net), (_ids(96, B, 17),))
        return Case(net, (_ids(96, B, 16),), {}, _tokens, (_ids(96, B, 16),))

    return make


MODELS |= {
    "x-transformers decoder, its loss": _decoder(True),
    "x-transformers rotary, GLU, grouped heads": _decoder(
        rotary_pos_emb=True, ff_glu=True, ff_swish=True, attn_kv_heads=2
    ),
    "x-transformers ALiBi, talking heads": _decoder(
        alibi_pos_bias=True, alibi_num_heads=2, attn_pre_talking_heads=True, attn_post_talking_heads=True
    ),
    "x-transformers T5 bias, RMSNorm": _decoder(rel_pos_bias=True, use_rmsnorm=True),
    "x-transformers sandwich, layer dropout": _decoder(sandwich_norm=True, layer_dropout=0.2),
    "x-transformers flash, qk norm": _decoder(attn_flash=True, attn_qk_norm=True),
}


@_named("x-transformers encoder-decoder")
def _x_encoder_decoder() -> Case:
    from x_transformers import XTransformer

    model = XTransformer(
        dim=32, enc_num_tokens=96, enc_depth=2, enc_heads=4, enc_max_seq_len=16, dec_num_tokens=96, dec_depth=2, dec_heads=4,
        dec_max_seq_len=16, enc_attn_dim_head=8, dec_attn_dim_head=8,
    )  # fmt: skip
    return Case(model, (_ids(96, B, 16), _ids(96, B, 16)))


# ---- vit-pytorch ---------------------------------------------------------------------------------------------------


def _lucid(module: str, kind: str, size: int = 32, **options: Any) -> Callable[[], Case]:
    def make() -> Case:
        import importlib

        return _image(getattr(importlib.import_module(f"vit_pytorch.{module}"), kind)(num_classes=5, **options), size)

    return make


_LUCID = {"image_size": 32, "patch_size": 8, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 64}
MODELS |= {
    "vit-pytorch ViT": _lucid("vit", "ViT", **_LUCID, dropout=0.1, emb_dropout=0.1),
    "vit-pytorch SimpleViT": _lucid("simple_vit", "SimpleViT", **_LUCID),
    "vit-pytorch DeepViT": _lucid("deepvit", "DeepViT", **_LUCID),
    "vit-pytorch CaiT": _lucid("cait", "CaiT", **_LUCID, cls_depth=1, layer_dropout=0.05),
    "vit-pytorch CvT": _lucid(
        "cvt", "CvT", 32, s1_emb_dim=16, s2_emb_dim=16, s3_emb_dim=32, s1_depth=1, s2_depth=1, s3_depth=1
    ),
    "vit-pytorch small datasets": _lucid("vit_for_small_dataset", "ViT", **_LUCID),
    "vit-pytorch register tokens": _lucid("simple_vit_with_register_tokens", "SimpleViT", **_LUCID),
}


def _masked(kind: str, **options: Any) -> Callable[[], Case]:
    def make() -> Case:
        import importlib

        from vit_pytorch import ViT

        encoder = ViT(num_classes=5, **_LUCID)
        if encoder.pos_embedding.ndim == 2:  # which its own wrappers take with a dim for the batch
            encoder.pos_embedding = nn.Parameter(encoder.pos_embedding.detach()[None])
        wrapper = getattr(importlib.import_module(f"vit_pytorch.{kind.lower()}"), kind)
        return Case(wrapper(encoder=encoder, masking_ratio=0.5, **options), (_real(B, 3, 32, 32),))

    return make


MODELS |= {
    "vit-pytorch MAE": _masked("MAE", decoder_dim=32, decoder_depth=1),
    "vit-pytorch SimMIM": _masked("SimMIM"),
}


# ---- litgpt --------------------------------------------------------------------------------------------------------


def _litgpt(**options: Any) -> Callable[[], Case]:
    def make() -> Case:
        from litgpt import GPT, Config

        config = Config(block_size=32, vocab_size=96, padded_vocab_size=96, n_layer=2, n_embd=32, n_head=4, **options)
        return Case(GPT(config), (_ids(96, B, 16),), {}, _tokens, (_ids(96, B, 16),))

    return make


_LLAMA = {
    "n_query_groups": 2, "rotary_percentage": 1.0, "parallel_residual": False, "bias": False, "norm_class_name": "RMSNorm",
    "intermediate_size": 64,
}  # fmt: skip
MODELS |= {
    "litgpt pythia": _litgpt(),
    "litgpt llama": _litgpt(**_LLAMA, mlp_class_name="LLaMAMLP"),
    "litgpt gemma": _litgpt(**_LLAMA, mlp_class_name="GemmaMLP", scale_embeddings=True, sliding_window_size=8),
    "litgpt mixtral": _litgpt(**_LLAMA, mlp_class_name="LLaMAMoE", n_expert=4, n_expert_per_token=2),
}

# ---- others --------------------------------------------------------------------------------------------------------


@_named("open_clip CLIP")
def _clip() -> Case:
    from open_clip import CLIP
    from open_clip.loss import ClipLoss
    from open_clip.model import CLIPTextCfg, CLIPVisionCfg

    vision = CLIPVisionCfg(layers=2, width=32, head_width=8, patch_size=8, image_size=32)
    text = CLIPTextCfg(context_length=16, vocab_size=96, width=32, heads=4, layers=2)
    loss = ClipLoss()
    return Case(
        CLIP(32, vision, text, output_dict=True),
        (_real(B, 3, 32, 32), _ids(95, B, 16)),
        {},
        lambda out: loss(out["image_features"], out["text_features"], out["logit_scale"]),
    )


def _segmentation(kind: str, **options: Any) -> Callable[[], Case]:
    def make() -> Case:
        import segmentation_models_pytorch as smp

        model = getattr(smp, kind)(encoder_name="resnet18", encoder_weights=None, classes=3, **options)
        return Case(model, (_real(B, 3, 64, 64),), {}, F.cross_entropy, (_ids(3, B, 64, 64),))

    return make


MODELS |= {
    "segmentation_models Unet": _segmentation("Unet"),
    "segmentation_models FPN": _segmentation("FPN"),
    "segmentation_models DeepLabV3+": _segmentation("DeepLabV3Plus"),
    "segmentation_models PSPNet": _segmentation("PSPNet"),
}


class _Dense(nn.Module):
    """Two layers on dense graphs of nodes [b, n, features], then a label for each graph."""

    def __init__(self, kind: str) -> None:
        import torch_geometric.nn as geometric

        super().__init__()
        layer = getattr(geometric, kind)
        if kind == "DenseGINConv":
            parts = [layer(nn.Sequential(nn.Linear(a, 16), nn.ReLU(), nn.Linear(16, 16))) for a in (8, 16)]
        else:
            parts = [layer(8, 16), layer(16, 16)]
        self.first, self.second, self.head = *parts, nn.Linear(16, 5)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        h = self.first(x, adjacency).relu()
        made: Tensor = self.head(self.second(h, adjacency).relu().mean(1))
        return made


def _graphs(kind: str) -> Callable[[], Case]:
    def make() -> Case:
        adjacency = (_real(B, 12, 12) > 0.5).float()
        return Case(_Dense(kind), (_real(B, 12, 8), adjacency), {}, _label, (_ids(5, B),))

    return make


MODELS |= {
    f"torch_geometric {kind}": _graphs(kind)
    for kind in ("DenseGCNConv", "DenseSAGEConv", "DenseGINConv", "DenseGraphConv")
}


@_named("denoising-diffusion images")
def _ddpm() -> Case:
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet

    net = Unet(dim=16, dim_mults=(1, 2), flash_attn=False, attn_dim_head=8, attn_heads=2)
    return Case(GaussianDiffusion(net, image_size=16, timesteps=50), (_real(B, 3, 16, 16).sigmoid(),))


@_named("denoising-diffusion sequences")
def _ddpm_1d() -> Case:
    from denoising_diffusion_pytorch import GaussianDiffusion1D, Unet1D

    net = Unet1D(dim=16, dim_mults=(1, 2), channels=4, attn_dim_head=8, attn_heads=2)
    return Case(GaussianDiffusion1D(net, seq_length=16, timesteps=50), (_real(B, 4, 16).sigmoid(),))


def _forecast(kind: str, **options: Any) -> Callable[[], Case]:
    def make() -> Case:
        import neuralforecast.models as models

        model = getattr(models, kind)(h=8, input_size=24, max_steps=1, **options)
        window = {"insample_y": _real(B, 24, 1), "insample_mask": torch.ones(B, 24, 1)}
        window |= dict.fromkeys(("hist_exog", "futr_exog", "stat_exog"))  # type: ignore[arg-type]
        return Case(model, (window,), {}, lambda out, y: F.mse_loss(out.reshape(y.shape), y), (_real(B, 8, 1),))

    return make


MODELS |= {
    "neuralforecast NBEATS": _forecast("NBEATS", mlp_units=[[32, 32]] * 3),
    "neuralforecast NHITS": _forecast("NHITS", mlp_units=[[32, 32]] * 3),
    "neuralforecast PatchTST": _forecast(
        "PatchTST", encoder_layers=2, hidden_size=16, n_heads=4, linear_hidden_size=32, patch_len=4, stride=4
    ),
    "neuralforecast DLinear": _forecast("DLinear"),
    "neuralforecast TCN": _forecast("TCN", encoder_hidden_size=16, decoder_hidden_size=16, context_size=4),
    "neuralforecast TiDE": _forecast("TiDE", hidden_size=16, decoder_output_dim=8, temporal_decoder_dim=16),
}


@_named("speechbrain Conformer")
def _conformer() -> Case:
    from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR

    model = TransformerASR(
        tgt_vocab=96, input_size=40, d_model=32, nhead=4, num_encoder_layers=2, num_decoder_layers=2, d_ffn=64, encoder_module="conformer",
        attention_type="RelPosMHAXL", normalize_before=True, causal=False,
    )  # fmt: skip
    return Case(model, (_real(B, 16, 40), 1 + _ids(95, B, 8)), {}, _squares)


@_named("speechbrain ECAPA-TDNN")
def _ecapa() -> Case:
    from speechbrain.lobes.models.ECAPA_TDNN import ECAPA_TDNN

    model = ECAPA_TDNN(
        40, channels=[16] * 5, kernel_sizes=[5, 3, 3, 3, 1], dilations=[1, 2, 3, 4, 1], lin_neurons=16, res2net_scale=4
    )
    return Case(model, (_real(B, 32, 40),), {}, _squares)


@_named("encodec SEANet")
def _seanet() -> Case:
    from encodec.modules import SEANetDecoder, SEANetEncoder

    options = {"dimension": 16, "n_filters": 4, "n_residual_layers": 1, "ratios": [4, 2], "lstm": 1}
    return Case(nn.Sequential(SEANetEncoder(**options), SEANetDecoder(**options)), (_real(B, 1, 64),), {}, _squares)


@_named("mambapy Mamba")
def _mamba() -> Case:
    from mambapy.mamba import Mamba, MambaConfig

    net = nn.Sequential(nn.Embedding(96, 32), Mamba(MambaConfig(d_model=32, n_layers=2)), nn.Linear(32, 96))
    return Case(net, (_ids(96, B, 16),), {}, _tokens, (_ids(96, B, 16),))


@_named("fair-esm ESM-2")
def _esm() -> Case:
    import esm

    model = esm.ESM2(num_layers=2, embed_dim=32, attention_heads=4, alphabet="ESM-1b", token_dropout=True)
    ids = 4 + _ids(20, B, 16)
    return Case(model, (ids,), {}, lambda out, y: _tokens(out["logits"], y), (ids,))


@_named("tab-transformer FTTransformer")
def _ft() -> Case:
    from tab_transformer_pytorch import FTTransformer

    model = FTTransformer(
        categories=(5, 6, 7),
        num_continuous=4,
        dim=16,
        dim_out=5,
        depth=2,
        heads=4,
        dim_head=8,
        attn_dropout=0.1,
        ff_dropout=0.1,
    )
    return Case(model, (_ids(5, B, 3), _real(B, 4)), {}, _label, (_ids(5, B),))
