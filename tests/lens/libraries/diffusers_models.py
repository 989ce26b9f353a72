"""Models of diffusers at small sizes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from .case import Case


def unet_conditional(processor: str = "") -> nn.Module:
    from diffusers import UNet2DConditionModel
    from diffusers.models.attention_processor import AttnProcessor, SlicedAttnProcessor

    model = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        cross_attention_dim=24,
        attention_head_dim=8,
        norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    if processor:
        model.set_attn_processor(AttnProcessor() if processor == "baddbmm" else SlicedAttnProcessor(slice_size=1))
    return model


def unet() -> nn.Module:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        attention_head_dim=8,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )


def dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    return DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
        norm_num_groups=8,
    )


def pixart() -> nn.Module:
    from diffusers import PixArtTransformer2DModel

    return PixArtTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        cross_attention_dim=32,
        caption_channels=24,
        out_channels=4,
        use_additional_conditions=False,
        norm_num_groups=8,
    )


def sd3(**more: object) -> nn.Module:
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=24,
        caption_projection_dim=32,
        pooled_projection_dim=24,
        out_channels=4,
        pos_embed_max_size=16,
        **more,
    )


def flux() -> nn.Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        pooled_projection_dim=24,
        axes_dims_rope=(4, 4, 8),
    )


def flux_inputs() -> dict[str, torch.Tensor]:
    return {
        "hidden_states": torch.randn(2, 16, 4),
        "encoder_hidden_states": torch.randn(2, 5, 24),
        "pooled_projections": torch.randn(2, 24),
        "timestep": torch.tensor([0.3, 0.6]),
        "img_ids": torch.randn(16, 3),
        "txt_ids": torch.zeros(5, 3),
    }


def sana() -> nn.Module:
    from diffusers import SanaTransformer2DModel

    return SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=4,
        attention_head_dim=8,
        num_layers=2,
        num_cross_attention_heads=4,
        cross_attention_head_dim=8,
        cross_attention_dim=32,
        caption_channels=24,
        sample_size=8,
    )


def autoencoder() -> nn.Module:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(16,),
        norm_num_groups=8,
        sample_size=16,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
    )


def prior() -> nn.Module:
    from diffusers import PriorTransformer

    return PriorTransformer(
        num_attention_heads=4, attention_head_dim=8, num_layers=2, embedding_dim=24, num_embeddings=5
    )


def vq_transformer() -> nn.Module:
    from diffusers import Transformer2DModel

    return Transformer2DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=16, norm_num_groups=8, num_layers=2
    )


def temporal() -> nn.Module:
    from diffusers import TransformerTemporalModel

    return TransformerTemporalModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=16, norm_num_groups=8, num_layers=1
    )


def wan() -> nn.Module:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=24,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )


def cogvideo() -> nn.Module:
    from diffusers import CogVideoXTransformer3DModel

    return CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=24,
        num_layers=1,
        sample_width=8,
        sample_height=8,
        sample_frames=5,
        patch_size=2,
        temporal_compression_ratio=4,
        max_text_seq_length=5,
    )


def qwen_image() -> nn.Module:
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        axes_dims_rope=(4, 6, 6),
    )


def lumina() -> nn.Module:
    from diffusers import Lumina2Transformer2DModel

    return Lumina2Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        hidden_size=32,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=16,
        axes_dim_rope=(4, 6, 6),
        axes_lens=(20, 20, 20),
        cap_feat_dim=24,
    )


def aura() -> nn.Module:
    from diffusers import AuraFlowTransformer2DModel

    return AuraFlowTransformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=24,
        out_channels=4,
        pos_embed_max_size=64,
    )


def hunyuan() -> nn.Module:
    from diffusers import HunyuanDiT2DModel

    return HunyuanDiT2DModel(
        sample_size=8,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=4,
        mlp_ratio=2,
        in_channels=4,
        cross_attention_dim=24,
        cross_attention_dim_t5=24,
        pooled_projection_dim=16,
        hidden_size=32,
        text_len=4,
        text_len_t5=4,
        activation_fn="gelu-approximate",
        norm_type="layer_norm",
    )


def stable_audio() -> nn.Module:
    from diffusers import StableAudioDiTModel

    return StableAudioDiTModel(
        sample_size=8,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        num_key_value_attention_heads=2,
        out_channels=4,
        cross_attention_dim=24,
        time_proj_dim=8,
        global_states_input_dim=24,
        cross_attention_input_dim=24,
    )


def uvit() -> nn.Module:
    from diffusers import UVit2DModel

    return UVit2DModel(
        hidden_size=32,
        cond_embed_dim=16,
        encoder_hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=16,
        block_out_channels=16,
        block_num_heads=4,
        intermediate_size=32,
        vocab_size=20,
        codebook_size=16,
        micro_cond_encode_dim=8,
        micro_cond_embed_dim=56,
        sample_size=8,
    )


def noisy(channels: int = 4, side: int = 8, **more: object) -> dict[str, object]:
    return {"hidden_states": torch.randn(2, channels, side, side), **more}


def diffusers() -> Iterator[Case]:
    import diffusers as library

    assert library.__name__
    latents = lambda: (torch.randn(2, 4, 8, 8), torch.tensor([3, 5]), torch.randn(2, 5, 24))  # noqa: E731
    for processor in ("", "baddbmm", "sliced"):
        yield Case(
            name=f"UNet2DConditionModel{', ' * bool(processor)}{processor}",
            build=partial(unet_conditional, processor),
            inputs=latents,
        )
    yield Case(name="UNet2DModel", build=unet, inputs=lambda: (torch.randn(2, 3, 8, 8), torch.tensor([3, 5])))
    yield Case(
        name="DiTTransformer2DModel",
        build=dit,
        inputs=lambda: noisy(timestep=torch.tensor([3, 5]), class_labels=torch.tensor([1, 2])),
    )
    yield Case(
        name="PixArtTransformer2DModel",
        build=pixart,
        inputs=lambda: noisy(
            timestep=torch.tensor([3, 5]),
            encoder_hidden_states=torch.randn(2, 5, 24),
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
        ),
    )
    text = lambda: noisy(  # noqa: E731
        timestep=torch.tensor([3, 5]),
        encoder_hidden_states=torch.randn(2, 5, 24),
        pooled_projections=torch.randn(2, 24),
    )
    yield Case(name="SD3Transformer2DModel", build=sd3, inputs=text)
    yield Case(
        name="SD3Transformer2DModel, two attentions",
        build=partial(sd3, dual_attention_layers=(0,), qk_norm="rms_norm"),
        inputs=text,
    )
    yield Case(name="FluxTransformer2DModel", build=flux, inputs=flux_inputs)
    yield Case(
        name="SanaTransformer2DModel",
        build=sana,
        inputs=lambda: noisy(timestep=torch.tensor([3, 5]), encoder_hidden_states=torch.randn(2, 5, 24)),
    )
    yield Case(name="AutoencoderKL", build=autoencoder, inputs=lambda: (torch.randn(2, 3, 16, 16),))
    yield Case(
        name="PriorTransformer",
        build=prior,
        inputs=lambda: {
            "hidden_states": torch.randn(2, 24),
            "timestep": torch.tensor([3, 5]),
            "proj_embedding": torch.randn(2, 24),
            "encoder_hidden_states": torch.randn(2, 5, 24),
        },
    )
    yield Case(name="Transformer2DModel", build=vq_transformer, inputs=lambda: (torch.randn(2, 16, 5, 5),))
    yield Case(
        name="TransformerTemporalModel",
        build=temporal,
        inputs=lambda: {"hidden_states": torch.randn(6, 16, 4, 4), "num_frames": 3},
        batched=False,
    )
    yield Case(
        name="WanTransformer3DModel",
        build=wan,
        inputs=lambda: {
            "hidden_states": torch.randn(2, 4, 2, 8, 8),
            "timestep": torch.tensor([3, 5]),
            "encoder_hidden_states": torch.randn(2, 5, 24),
        },
    )
    yield Case(
        name="CogVideoXTransformer3DModel",
        build=cogvideo,
        inputs=lambda: {
            "hidden_states": torch.randn(2, 2, 4, 8, 8),
            "encoder_hidden_states": torch.randn(2, 5, 24),
            "timestep": torch.tensor([3, 5]),
        },
    )
    yield Case(
        name="QwenImageTransformer2DModel",
        build=qwen_image,
        inputs=lambda: {
            "hidden_states": torch.randn(1, 16, 16),
            "encoder_hidden_states": torch.randn(1, 5, 24),
            "encoder_hidden_states_mask": torch.ones(1, 5).bool(),
            "timestep": torch.tensor([0.3]),
            "img_shapes": [[(1, 4, 4)]],
        },
    )
    yield Case(
        name="Lumina2Transformer2DModel",
        build=lumina,
        inputs=lambda: noisy(
            timestep=torch.tensor([0.3, 0.6]),
            encoder_hidden_states=torch.randn(2, 5, 24),
            encoder_attention_mask=torch.ones(2, 5).bool(),
        ),
    )
    yield Case(
        name="AuraFlowTransformer2DModel",
        build=aura,
        inputs=lambda: noisy(timestep=torch.tensor([0.3, 0.6]), encoder_hidden_states=torch.randn(2, 5, 24)),
    )
    yield Case(
        name="StableAudioDiTModel",
        build=stable_audio,
        inputs=lambda: {
            "hidden_states": torch.randn(2, 4, 8),
            "timestep": torch.tensor([0.3, 0.6]),
            "encoder_hidden_states": torch.randn(2, 5, 24),
            "global_hidden_states": torch.randn(2, 1, 24),
            "rotary_embedding": (torch.randn(9, 4).cos(), torch.randn(9, 4).sin()),
        },
    )


LIBRARIES = {"diffusers": diffusers}
