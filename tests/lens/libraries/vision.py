"""Vision libraries beside timm and vit-pytorch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from .case import Case


def picture(b: int = 2, side: int = 32, channels: int = 3) -> tuple[torch.Tensor]:
    return (torch.randn(b, channels, side, side),)


def torchvision() -> Iterator[Case]:
    from torchvision.models import MaxVit, VisionTransformer
    from torchvision.models.feature_extraction import create_feature_extractor
    from torchvision.models.swin_transformer import (
        PatchMergingV2,
        SwinTransformer,
        SwinTransformerBlock,
        SwinTransformerBlockV2,
    )
    from torchvision.models.video.mvit import MSBlockConfig, MViT

    vit = partial(
        VisionTransformer,
        image_size=32,
        patch_size=8,
        num_layers=2,
        num_heads=4,
        hidden_dim=32,
        mlp_dim=32,
        num_classes=5,
    )
    yield Case(name="VisionTransformer", build=vit, inputs=picture)
    swin = {"patch_size": [4, 4], "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}
    yield Case(
        name="SwinTransformer",
        build=partial(SwinTransformer, **swin, num_classes=5, block=SwinTransformerBlock),
        inputs=lambda: picture(2, 64),
    )
    yield Case(
        name="SwinTransformer v2",
        build=partial(
            SwinTransformer, **swin, num_classes=5, block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2
        ),
        inputs=lambda: picture(2, 64),
    )
    yield Case(
        name="MaxVit",
        build=partial(
            MaxVit,
            input_size=(32, 32),
            stem_channels=8,
            partition_size=4,
            block_channels=[16],
            block_layers=[1],
            head_dim=8,
            stochastic_depth_prob=0.0,
            num_classes=5,
        ),
        inputs=picture,
    )
    block = partial(
        MSBlockConfig,
        num_heads=2,
        input_channels=16,
        output_channels=16,
        kernel_q=[3, 3, 3],
        kernel_kv=[3, 3, 3],
        stride_q=[1, 1, 1],
        stride_kv=[1, 2, 2],
    )
    for relative in (False, True):
        yield Case(
            name=f"MViT{', relative positions' * relative}",
            build=lambda relative=relative: MViT(
                spatial_size=(32, 32),
                temporal_size=4,
                block_setting=[block(), block()],
                residual_pool=relative,
                residual_with_cls_embed=not relative,
                rel_pos_embed=relative,
                proj_after_attn=relative,
                num_classes=5,
            ),
            inputs=lambda: (torch.randn(2, 3, 4, 32, 32),),
        )
    yield Case(
        name="feature extractor",
        build=lambda: create_feature_extractor(vit(), ["encoder.layers.encoder_layer_1"]),
        inputs=picture,
    )


def open_clip() -> Iterator[Case]:
    from open_clip.coca_model import CoCa, MultimodalCfg
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg
    from open_clip.transformer import AttentionalPooler, ResidualAttentionBlock

    text = {"context_length": 12, "vocab_size": 50, "width": 32, "heads": 4, "layers": 2}
    vision = {"layers": 2, "width": 32, "head_width": 8, "image_size": 32, "patch_size": 8}
    pair = lambda: (*picture(), torch.randint(1, 50, (2, 12)))  # noqa: E731
    for name, v, t in (
        ("CLIP", {}, {}),
        ("CLIP, attentional pool", {"attentional_pool": True, "attn_pooler_queries": 4, "attn_pooler_heads": 4}, {}),
        ("CLIP, quick text", {}, {"pool_type": "last", "no_causal_mask": True}),
        ("CLIP, ResNet", {"layers": (1, 1, 1, 1), "width": 8, "image_size": 64}, {}),
    ):
        side = int(str((vision | v)["image_size"]))
        yield Case(
            name=name,
            build=lambda v=v, t=t: CLIP(
                embed_dim=32, vision_cfg=CLIPVisionCfg(**vision | v), text_cfg=CLIPTextCfg(**text | t)
            ),
            inputs=lambda side=side: (*picture(2, side), torch.randint(1, 50, (2, 12))),
        )
    clip = lambda: CLIP(embed_dim=32, vision_cfg=CLIPVisionCfg(**vision), text_cfg=CLIPTextCfg(**text))  # noqa: E731
    yield Case(name="encode_image", build=clip, inputs=picture, call=lambda model, x: model.encode_image(x))
    yield Case(
        name="encode_text",
        build=clip,
        inputs=lambda: (torch.randint(1, 50, (2, 12)),),
        call=lambda model, x: model.encode_text(x),
    )
    yield Case(
        name="CoCa",
        build=lambda: CoCa(
            embed_dim=32,
            multimodal_cfg=MultimodalCfg(**text),
            vision_cfg=CLIPVisionCfg(**vision, attentional_pool=True, attn_pooler_queries=4, attn_pooler_heads=4),
            text_cfg=CLIPTextCfg(**text, embed_cls=True, output_tokens=True),
        ),
        inputs=pair,
    )
    yield Case(
        name="AttentionalPooler",
        build=partial(AttentionalPooler, 32, 32, n_head=4, n_queries=5),
        inputs=lambda: (torch.randn(2, 9, 32),),
    )
    yield Case(
        name="ResidualAttentionBlock",
        build=partial(ResidualAttentionBlock, 32, 4),
        inputs=lambda: (torch.randn(2, 9, 32),),
    )


def segment_anything() -> Iterator[Case]:
    from segment_anything.modeling import ImageEncoderViT, TwoWayTransformer

    for relative in (False, True):
        yield Case(
            name=f"ImageEncoderViT{', relative positions' * relative}",
            build=partial(
                ImageEncoderViT,
                img_size=64,
                patch_size=8,
                embed_dim=32,
                depth=2,
                num_heads=4,
                out_chans=16,
                window_size=3,
                global_attn_indexes=(1,),
                use_rel_pos=relative,
            ),
            inputs=lambda: picture(2, 64),
        )
    yield Case(
        name="TwoWayTransformer",
        build=partial(TwoWayTransformer, depth=2, embedding_dim=32, num_heads=4, mlp_dim=32),
        inputs=lambda: (torch.randn(2, 32, 4, 4), torch.randn(2, 32, 4, 4), torch.randn(2, 5, 32)),
    )


def kornia() -> Iterator[Case]:
    from kornia.feature.lightglue import TransformerLayer
    from kornia.feature.loftr.loftr_module.transformer import LocalFeatureTransformer
    from kornia.models.vit import VisionTransformer

    yield Case(
        name="VisionTransformer",
        build=partial(VisionTransformer, image_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4),
        inputs=picture,
    )
    for flash in (False, True):
        yield Case(
            name=f"LightGlue layer{', flash' * flash}",
            build=partial(TransformerLayer, embed_dim=32, num_heads=4, flash=flash),
            inputs=lambda: (
                torch.randn(2, 7, 32),
                torch.randn(2, 9, 32),
                torch.randn(2, 2, 1, 7, 8),
                torch.randn(2, 2, 1, 9, 8),
            ),
            call=lambda model, a, b, x, y: (
                model(a, b, x, y) if x.ndim == 4 else model(a, b, x.movedim(1, 0), y.movedim(1, 0))
            ),
        )
    for kind in ("linear", "full"):
        yield Case(
            name=f"LoFTR, {kind} attention",
            build=lambda kind=kind: LocalFeatureTransformer(
                {"d_model": 32, "nhead": 4, "layer_names": ["self", "cross"], "attention": kind}
            ),
            inputs=lambda: (torch.randn(2, 9, 32), torch.randn(2, 7, 32)),
        )


def ultralytics() -> Iterator[Case]:
    from ultralytics.nn.modules import AIFI, C2PSA, MLPBlock, TransformerBlock
    from ultralytics.nn.modules.block import PSA, A2C2f
    from ultralytics.nn.tasks import DetectionModel, RTDETRDetectionModel

    assert MLPBlock.__name__
    maps = lambda: (torch.randn(2, 64, 8, 8),)  # noqa: E731
    yield Case(name="AIFI", build=partial(AIFI, 64, 64, 4), inputs=maps)
    yield Case(name="TransformerBlock", build=partial(TransformerBlock, 64, 64, 4, 2), inputs=maps)
    yield Case(name="PSA", build=partial(PSA, 64, 64), inputs=lambda: (torch.randn(2, 64, 8, 8),))
    yield Case(name="C2PSA", build=partial(C2PSA, 128, 128, 1), inputs=lambda: (torch.randn(2, 128, 8, 8),))
    yield Case(name="A2C2f", build=partial(A2C2f, 64, 64, 1, True, 4), inputs=maps)
    for name in ("yolov10n", "yolo11n", "yolo12n"):
        yield Case(
            name=name,
            build=partial(DetectionModel, f"{name}.yaml", nc=3, verbose=False),
            inputs=lambda: picture(2, 64),
        )
    yield Case(
        name="RT-DETR-l",
        build=partial(RTDETRDetectionModel, "rtdetr-l.yaml", nc=3, verbose=False),
        inputs=lambda: picture(2, 64),
        batched=False,
    )


def monai() -> Iterator[Case]:
    from monai.networks.blocks import CrossAttentionBlock, SABlock, SpatialAttentionBlock, TransformerBlock
    from monai.networks.nets import UNETR, DiffusionModelUNet, SwinUNETR, ViT, ViTAutoEnc

    words = lambda: (torch.randn(2, 9, 32),)  # noqa: E731
    for flash in (False, True):
        yield Case(
            name=f"SABlock{', flash' * flash}",
            build=partial(SABlock, hidden_size=32, num_heads=4, use_flash_attention=flash),
            inputs=words,
        )
    yield Case(
        name="SABlock, relative positions",
        build=partial(SABlock, hidden_size=32, num_heads=4, rel_pos_embedding="decomposed", input_size=(3, 3)),
        inputs=words,
    )
    yield Case(name="SABlock, causal", build=partial(SABlock, 32, 4, causal=True, sequence_length=9), inputs=words)
    yield Case(
        name="CrossAttentionBlock",
        build=partial(CrossAttentionBlock, hidden_size=32, num_heads=4, context_input_size=24),
        inputs=lambda: (torch.randn(2, 9, 32), torch.randn(2, 5, 24)),
    )
    yield Case(
        name="SpatialAttentionBlock",
        build=partial(SpatialAttentionBlock, spatial_dims=2, num_channels=16, num_head_channels=8, norm_num_groups=8),
        inputs=lambda: (torch.randn(2, 16, 5, 5),),
    )
    yield Case(
        name="TransformerBlock",
        build=partial(TransformerBlock, hidden_size=32, mlp_dim=32, num_heads=4, save_attn=True),
        inputs=words,
    )
    volume = {"in_channels": 1, "img_size": (32, 32, 32), "hidden_size": 32, "mlp_dim": 32, "num_heads": 4}
    scan = lambda: (torch.randn(2, 1, 32, 32, 32),)  # noqa: E731
    yield Case(name="ViT", build=partial(ViT, **volume, patch_size=(16, 16, 16), num_layers=2), inputs=scan)
    yield Case(
        name="ViTAutoEnc",
        build=partial(ViTAutoEnc, **volume, patch_size=(16, 16, 16), num_layers=2, out_channels=1, deconv_chns=8),
        inputs=scan,
    )
    yield Case(
        name="UNETR",
        build=partial(UNETR, **volume | {"hidden_size": 48}, out_channels=2, feature_size=4, norm_name="instance"),
        inputs=scan,
    )
    yield Case(
        name="SwinUNETR",
        build=partial(
            SwinUNETR,
            in_channels=1,
            out_channels=2,
            feature_size=12,
            depths=(1, 1, 1, 1),
            num_heads=(2, 2, 4, 4),
            spatial_dims=2,
            window_size=4,
        ),
        inputs=lambda: (torch.randn(2, 1, 64, 64),),
    )
    yield Case(
        name="DiffusionModelUNet",
        build=partial(
            DiffusionModelUNet,
            spatial_dims=2,
            in_channels=1,
            out_channels=1,
            channels=(8, 16),
            num_res_blocks=1,
            attention_levels=(False, True),
            norm_num_groups=8,
            num_head_channels=8,
            with_conditioning=True,
            cross_attention_dim=12,
        ),
        inputs=lambda: (torch.randn(2, 1, 8, 8), torch.tensor([3, 5]), torch.randn(2, 5, 12)),
    )


LIBRARIES = {
    "torchvision": torchvision,
    "open_clip": open_clip,
    "segment-anything": segment_anything,
    "kornia": kornia,
    "ultralytics": ultralytics,
    "monai": monai,
}
