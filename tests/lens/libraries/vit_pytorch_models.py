"""Models of vit-pytorch at small sizes."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from .case import Case

PLAIN = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 32}


def of(module: str, name: str, given: dict[str, Any]) -> torch.nn.Module:
    kind = getattr(importlib.import_module(f"vit_pytorch.{module}"), name)
    return kind(**given)


def without(*names: str, **more: Any) -> dict[str, Any]:
    return {name: value for name, value in PLAIN.items() if name not in names} | more


CROSS = {
    f"{size}_{name}": value
    for size, patch in (("sm", 8), ("lg", 16))
    for name, value in {
        "dim": 32,
        "patch_size": patch,
        "enc_depth": 1,
        "enc_heads": 4,
        "enc_mlp_dim": 32,
        "enc_dim_head": 8,
    }.items()
}
CVT = {
    f"s{stage}_{name}": value
    for stage in (1, 2, 3)
    for name, value in {"emb_dim": 32, "heads": stage, "depth": 1, "mlp_mult": 2}.items()
}
MODELS: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "ViT": ("vit", "ViT", PLAIN, 32),
    "SimpleViT": ("simple_vit", "SimpleViT", PLAIN, 32),
    "SimpleViT with registers": ("simple_vit_with_register_tokens", "SimpleViT", PLAIN, 32),
    "SimpleViT with qk-norm": ("simple_vit_with_qk_norm", "SimpleViT", PLAIN, 32),
    "SimpleViT with flash": ("simple_flash_attn_vit", "SimpleViT", {**PLAIN, "use_flash": True}, 32),
    "SimpleViT with patch dropout": ("simple_vit_with_patch_dropout", "SimpleViT", PLAIN, 32),
    "SimpleViT with FFT": ("simple_vit_with_fft", "SimpleViT", {**PLAIN, "freq_patch_size": 8}, 32),
    "SimpleViT with hyper connections": (
        "simple_vit_with_hyper_connections",
        "SimpleViT",
        {**PLAIN, "num_residual_streams": 2},
        32,
    ),
    "SimpleViT with value residual": ("simple_vit_with_value_residual", "SimpleViT", PLAIN, 32),
    "SimpleUViT": ("simple_uvit", "SimpleUViT", PLAIN, 32),
    "ViT with patch dropout": ("vit_with_patch_dropout", "ViT", PLAIN, 32),
    "ViT with decorrelation": ("vit_with_decorr", "ViT", PLAIN, 32),
    "DeepViT": ("deepvit", "DeepViT", PLAIN, 32),
    "CaiT": ("cait", "CaiT", {**PLAIN, "cls_depth": 1}, 32),
    "normalized ViT": ("normalized_vit", "nViT", PLAIN, 32),
    "T2T-ViT": ("t2t", "T2TViT", without("patch_size", t2t_layers=((7, 4), (3, 2))), 32),
    "CCT": (
        "cct",
        "CCT",
        {
            "img_size": 32,
            "embedding_dim": 32,
            "n_conv_layers": 1,
            "kernel_size": 7,
            "stride": 2,
            "padding": 3,
            "num_layers": 2,
            "num_heads": 4,
            "mlp_ratio": 2.0,
            "num_classes": 5,
            "positional_embedding": "learnable",
        },
        32,
    ),
    "CrossViT": ("cross_vit", "CrossViT", {"image_size": 32, "num_classes": 5, "depth": 1, **CROSS}, 32),
    "PiT": ("pit", "PiT", without("depth", depth=(1, 1)), 32),
    "LeViT": (
        "levit",
        "LeViT",
        {"image_size": 64, "num_classes": 5, "stages": 2, "dim": (32, 48), "depth": 1, "heads": (2, 4), "mlp_mult": 2},
        64,
    ),
    "CvT": ("cvt", "CvT", {"num_classes": 5, **CVT}, 64),
    "Twins SVT": (
        "twins_svt",
        "TwinsSVT",
        {
            "num_classes": 5,
            **{f"s{stage}_{name}": value for stage in (1, 2, 3, 4) for name, value in {"emb_dim": 32}.items()},
            "s1_local_patch_size": 4,
            "s2_local_patch_size": 4,
            "s3_local_patch_size": 2,
            "s4_local_patch_size": 1,
            "s1_global_k": 2,
            "s2_global_k": 2,
            "s3_global_k": 2,
            "s4_global_k": 1,
            "s3_depth": 1,
        },
        64,
    ),
    "MaxViT": (
        "max_vit",
        "MaxViT",
        {"num_classes": 5, "dim_conv_stem": 16, "dim": 16, "dim_head": 8, "depth": (1, 1), "window_size": 4},
        32,
    ),
    "MaxViT with registers": (
        "max_vit_with_registers",
        "MaxViT",
        {
            "num_classes": 5,
            "dim_conv_stem": 16,
            "dim": 16,
            "dim_head": 8,
            "depth": (1, 1),
            "window_size": 4,
            "num_register_tokens": 2,
        },
        32,
    ),
    "RegionViT": (
        "regionvit",
        "RegionViT",
        {"dim": (16, 16, 16, 16), "depth": (1, 1, 1, 1), "window_size": 2, "num_classes": 5},
        64,
    ),
    "CrossFormer": (
        "crossformer",
        "CrossFormer",
        {
            "num_classes": 5,
            "dim": (32, 32, 64, 64),
            "depth": (1, 1, 1, 1),
            "global_window_size": (4, 2, 2, 1),
            "local_window_size": 2,
        },
        64,
    ),
    "ScalableViT": (
        "scalable_vit",
        "ScalableViT",
        {
            "num_classes": 5,
            "dim": 16,
            "heads": (1, 2, 2, 4),
            "depth": (1, 1, 1, 1),
            "ssa_dim_key": (8, 8, 8, 8),
            "reduction_factor": (2, 1, 1, 1),
            "window_size": (4, 2, None, None),
        },
        64,
    ),
    "SepViT": (
        "sep_vit",
        "SepViT",
        {"num_classes": 5, "dim": 16, "dim_head": 8, "heads": (1, 2), "depth": (1, 1)},
        56,
    ),
    "NesT": (
        "nest",
        "NesT",
        {
            "image_size": 32,
            "patch_size": 4,
            "dim": 32,
            "heads": 2,
            "num_hierarchies": 2,
            "block_repeats": (1, 1),
            "num_classes": 5,
        },
        32,
    ),
    "MobileViT": (
        "mobile_vit",
        "MobileViT",
        {
            "image_size": (64, 64),
            "dims": [16, 16, 16],
            "channels": [8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 32],
            "num_classes": 5,
        },
        64,
    ),
    "XCiT": (
        "xcit",
        "XCiT",
        {
            "image_size": 32,
            "patch_size": 8,
            "num_classes": 5,
            "dim": 32,
            "depth": 1,
            "cls_depth": 1,
            "heads": 4,
            "mlp_dim": 32,
        },
        32,
    ),
    "parallel ViT": ("parallel_vit", "ViT", {**PLAIN, "num_parallel_branches": 2}, 32),
    "ViT for small datasets": ("vit_for_small_dataset", "ViT", PLAIN, 32),
    "rotary ViT": ("rvt", "RvT", PLAIN, 32),
    "ATS-ViT": ("ats_vit", "ViT", {**PLAIN, "max_tokens_per_depth": (8, 4)}, 32),
    "learnable memory ViT": ("learnable_memory_vit", "ViT", PLAIN, 32),
    "JumboViT": ("jumbo_vit", "JumboViT", {**PLAIN, "num_jumbo_cls": 1, "jumbo_cls_k": 2, "jumbo_ff_mult": 2}, 32),
    "ViT 1d": ("vit_1d", "ViT", without("image_size", "patch_size", seq_len=32, patch_size=8), 0),
    "simple ViT 1d": ("simple_vit_1d", "SimpleViT", without("image_size", "patch_size", seq_len=32, patch_size=8), 0),
    "ViT 3d": ("vit_3d", "ViT", {**PLAIN, "image_patch_size": 8, "frames": 4, "frame_patch_size": 2}, -1),
    "ViViT": (
        "vivit",
        "ViViT",
        {
            **without("patch_size", "depth"),
            "image_patch_size": 8,
            "frames": 4,
            "frame_patch_size": 2,
            "spatial_depth": 1,
            "temporal_depth": 1,
        },
        -1,
    ),
}
for _video in ("ViT 3d", "ViViT"):
    MODELS[_video][2].pop("patch_size", None)


def inputs(side: int) -> tuple[torch.Tensor]:
    if side == 0:
        return (torch.randn(4, 3, 32),)
    return (torch.randn(4, 3, 4, 32, 32) if side < 0 else torch.randn(4, 3, side, side),)


def navit(model: torch.nn.Module, *pictures: torch.Tensor) -> object:
    return model([[pictures[0], pictures[1]], [pictures[2]]])


def vit_pytorch() -> Iterator[Case]:
    import vit_pytorch as library

    assert library.__name__
    for name, (module, kind, given, side) in MODELS.items():
        yield Case(name=name, build=partial(of, module, kind, given), inputs=partial(inputs, side))
    sizes = ((3, 16, 24), (3, 16, 16), (3, 32, 24))
    yield Case(
        name="NaViT",
        build=partial(of, "na_vit", "NaViT", PLAIN),
        inputs=lambda: tuple(torch.randn(size) for size in sizes),
        call=navit,
        batched=False,
    )


LIBRARIES = {"vit-pytorch": vit_pytorch}
