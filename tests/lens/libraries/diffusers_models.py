"""Models of diffusers at small sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from .case import Case
from .small_sizes import Row, Sizes, drawn, row, table

SIZES = (
    {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2, "patch_size": 2, "sample_size": 8}
    | {"in_channels": 4, "out_channels": 4, "norm_num_groups": 8, "layers_per_block": 1, "block_out_channels": (16, 32)}
    | {"joint_attention_dim": 24, "pooled_projection_dim": 24, "caption_projection_dim": 32, "caption_channels": 24}
)
NOISE, WORDS, POOLED = (2, 4, 8, 8), (2, 5, 24), (2, 24)
STEPS, TIMES = torch.tensor([3, 5]), torch.tensor([0.3, 0.6])
TURNS = torch.linspace(0, 3, 36).view(9, 4)


def model(kind: str, given: Sizes, *changes: Sizes, **more: Any) -> Row:
    return row(f"diffusers:{kind}", drawn(**given), *changes, **more)


def text(timestep: torch.Tensor = STEPS, shape: tuple[int, ...] = NOISE, **more: object) -> dict[str, object]:
    """Return the inputs of a model of noise and words."""
    return {"hidden_states": shape, "timestep": timestep, "encoder_hidden_states": WORDS, **more}


MODELS = table(
    SIZES,
    model(
        "UNet2DConditionModel",
        {"sample": NOISE, "timestep": STEPS, "encoder_hidden_states": WORDS},
        num_attention_heads=None,
        cross_attention_dim=24,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ),
    model(
        "UNet2DModel",
        {"sample": (2, 3, 8, 8), "timestep": STEPS},
        in_channels=3,
        out_channels=3,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ),
    model(
        "DiTTransformer2DModel",
        {"hidden_states": NOISE, "timestep": STEPS, "class_labels": torch.tensor([1, 2])},
        num_embeds_ada_norm=10,
        out_channels=None,
    ),
    model(
        "PixArtTransformer2DModel",
        text(added_cond_kwargs={"resolution": None, "aspect_ratio": None}),
        cross_attention_dim=32,
        use_additional_conditions=False,
    ),
    model("SD3Transformer2DModel", text(pooled_projections=POOLED), pos_embed_max_size=16),
    model(
        "SD3Transformer2DModel",
        text(pooled_projections=POOLED),
        name="SD3Transformer2DModel, two attentions",
        pos_embed_max_size=16,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    ),
    model(
        "FluxTransformer2DModel",
        text(TIMES, (2, 16, 4), pooled_projections=POOLED, img_ids=(16, 3), txt_ids=torch.zeros(5, 3)),
        {"patch_size": 1, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16},
        {"num_attention_heads": 2, "axes_dims_rope": (4, 4, 8), "out_channels": None},
    ),
    model(
        "SanaTransformer2DModel",
        text(),
        {"num_cross_attention_heads": 4, "cross_attention_head_dim": 8, "cross_attention_dim": 32, "patch_size": 1},
    ),
    model(
        "AutoencoderKL",
        {"sample": (2, 3, 16, 16)},
        {"in_channels": 3, "out_channels": 3, "block_out_channels": (16,), "sample_size": 16, "latent_channels": 4},
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
    ),
    model("PriorTransformer", text(shape=POOLED, proj_embedding=POOLED), embedding_dim=24, num_embeddings=5),
    model(
        "Transformer2DModel",
        {"hidden_states": (2, 16, 5, 5)},
        {"in_channels": 16, "out_channels": None, "sample_size": None, "patch_size": None, "caption_channels": None},
    ),
    model(
        "TransformerTemporalModel",
        {"hidden_states": (6, 16, 4, 4), "num_frames": 3},
        {"in_channels": 16, "num_layers": 1, "out_channels": None, "sample_size": None},
        batched=False,
    ),
    model(
        "WanTransformer3DModel",
        text(shape=(2, 4, 2, 8, 8)),
        {"patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "text_dim": 24, "freq_dim": 32},
        {"ffn_dim": 32, "rope_max_seq_len": 32, "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads"},
    ),
    model(
        "CogVideoXTransformer3DModel",
        text(shape=(2, 2, 4, 8, 8)),
        {"num_attention_heads": 2, "num_layers": 1, "time_embed_dim": 8, "text_embed_dim": 24, "sample_width": 8},
        {"sample_height": 8, "sample_frames": 5, "temporal_compression_ratio": 4, "max_text_seq_length": 5},
    ),
    model(
        "QwenImageTransformer2DModel",
        {"hidden_states": (1, 16, 16), "encoder_hidden_states": (1, 5, 24), "timestep": torch.tensor([0.3])}
        | {"encoder_hidden_states_mask": torch.ones(1, 5).bool(), "img_shapes": [[(1, 4, 4)]]},
        {"in_channels": 16, "attention_head_dim": 16, "num_attention_heads": 2, "axes_dims_rope": (4, 6, 6)},
    ),
    model(
        "Lumina2Transformer2DModel",
        text(TIMES, encoder_attention_mask=torch.ones(2, 5).bool()),
        {"hidden_size": 32, "num_refiner_layers": 1, "num_attention_heads": 2, "num_kv_heads": 1, "multiple_of": 16},
        {"axes_dim_rope": (4, 6, 6), "axes_lens": (20, 20, 20), "cap_feat_dim": 24, "out_channels": None},
    ),
    model(
        "AuraFlowTransformer2DModel",
        text(TIMES),
        {"num_mmdit_layers": 1, "num_single_dit_layers": 1, "pos_embed_max_size": 64},
    ),
    model(
        "StableAudioDiTModel",
        text(TIMES, (2, 4, 8), global_hidden_states=(2, 1, 24), rotary_embedding=(TURNS.cos(), TURNS.sin())),
        {"num_key_value_attention_heads": 2, "cross_attention_dim": 24, "time_proj_dim": 8},
        {"global_states_input_dim": 24, "cross_attention_input_dim": 24},
    ),
)


def with_processor(case: Case, name: str) -> nn.Module:
    """Build a U-Net whose attention runs by another of the library's processors."""
    from diffusers.models import attention_processor as processors

    unet = case.build()
    unet.set_attn_processor(
        processors.AttnProcessor() if name == "baddbmm" else processors.SlicedAttnProcessor(slice_size=1)
    )
    return unet


def diffusers() -> Iterator[Case]:
    unet, *others = MODELS()
    yield unet
    for name in ("baddbmm", "sliced"):
        yield replace(unet, name=f"{unet.name}, {name}", build=partial(with_processor, unet, name))
    yield from others


LIBRARIES = {"diffusers": diffusers}
