"""Models of timm at small sizes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from .case import Case

# Name of the model -> its settings; "size" is the side of the picture.
MODELS: dict[str, dict[str, object]] = {
    "vit_tiny_patch16_224": {"img_size": 64, "depth": 3},
    "vit_small_patch32_224": {"img_size": 96, "depth": 2},
    "vit_base_patch16_clip_224": {"img_size": 48, "depth": 2},
    "vit_base_patch16_siglip_224": {"img_size": 48, "depth": 2},
    "vit_base_patch16_rope_224": {"img_size": 48, "depth": 2},
    "vit_small_patch14_dinov2": {"img_size": 56, "depth": 2},
    "vit_small_patch14_reg4_dinov2": {"img_size": 56, "depth": 2},
    "vit_small_patch16_dinov3": {"img_size": 64, "depth": 2},
    "vit_relpos_small_patch16_224": {"img_size": 64, "depth": 2},
    "vit_srelpos_small_patch16_224": {"img_size": 64, "depth": 2},
    "vit_base_resnet26d_224": {"img_size": 64, "depth": 2},
    "vit_tiny_r_s16_p8_224": {"img_size": 64, "depth": 2},
    "vit_base_patch16_18x2_224": {"img_size": 48, "depth": 2},
    "vit_medium_patch16_gap_240": {"img_size": 48, "depth": 2},
    "vit_so150m_patch16_reg4_map_256": {"img_size": 48, "depth": 2},
    "vit_wee_patch16_reg1_gap_256": {"img_size": 64, "depth": 2},
    "vit_small_patch16_36x1_224": {"img_size": 64, "depth": 2},
    "samvit_base_patch16": {"img_size": 64, "depth": 2, "global_attn_indexes": (1,), "window_size": 3},
    "naflexvit_base_patch16_gap": {"img_size": 48, "depth": 2},
    "deit_tiny_patch16_224": {"img_size": 64, "depth": 2},
    "deit_tiny_distilled_patch16_224": {"img_size": 64, "depth": 2},
    "deit3_small_patch16_224": {"img_size": 64, "depth": 2},
    "beit_base_patch16_224": {"img_size": 48, "depth": 2},
    "beitv2_base_patch16_224": {"img_size": 48, "depth": 2},
    "eva02_tiny_patch14_224": {"img_size": 56, "depth": 2},
    "eva_giant_patch14_224": {"img_size": 28, "depth": 2, "embed_dim": 176},
    "swin_tiny_patch4_window7_224": {"img_size": 56, "depths": (2, 2)},
    "swin_s3_tiny_224": {"img_size": 224, "depths": (1, 1, 2, 1)},
    "swinv2_tiny_window8_256": {"img_size": 64, "depths": (2, 2)},
    "swinv2_cr_tiny_224": {"img_size": 64, "depths": (2, 2, 1, 1)},
    "cait_xxs24_224": {"img_size": 64, "depth": 2},
    "convit_tiny": {"img_size": 64, "depth": 3, "local_up_to_layer": 2},
    "crossvit_9_240": {"img_size": 240},
    "pit_ti_224": {"img_size": 64},
    "pvt_v2_b0": {},
    "tnt_s_patch16_224": {"img_size": 64, "depth": 2},
    "twins_pcpvt_small": {"img_size": 64},
    "twins_svt_small": {"img_size": 64},
    "visformer_tiny": {"img_size": 64},
    "volo_d1_224": {"img_size": 64},
    "xcit_nano_12_p16_224": {"img_size": 64, "depth": 2},
    "coat_tiny": {"img_size": 64},
    "coat_lite_tiny": {"img_size": 64},
    "coatnet_nano_rw_224": {"img_size": 64},
    "coatnet_rmlp_nano_rw_224": {"img_size": 64},
    "coatnext_nano_rw_224": {"img_size": 64},
    "maxvit_nano_rw_256": {"img_size": 128},
    "maxvit_tiny_pm_256": {"img_size": 128},
    "maxxvit_rmlp_nano_rw_256": {"img_size": 128},
    "nest_tiny": {"img_size": 64},
    "hiera_tiny_224": {"img_size": 64, "stages": (1, 1, 1, 1)},
    "hieradet_small": {"size": 64},
    "gcvit_xxtiny": {"img_size": 64},
    "mvitv2_tiny": {"img_size": 64},
    "davit_tiny": {"size": 64},
    "focalnet_tiny_srf": {"size": 64},
    "levit_128s": {"img_size": 64},
    "levit_conv_128s": {"img_size": 64},
    "botnet26t_256": {"size": 256},
    "sebotnet33ts_256": {"size": 256},
    "halonet26t": {"size": 256},
    "lambda_resnet26t": {"size": 128},
    "halo2botnet50ts_256": {"size": 256},
    "lamhalobotnet50ts_256": {"size": 256},
    "eca_botnext26ts_256": {"size": 256},
    "mobilevit_xxs": {"size": 128},
    "mobilevit_s": {"size": 64},
    "mobilevitv2_050": {"size": 64},
    "mobilenetv4_hybrid_medium": {"size": 96},
    "edgenext_xx_small": {"size": 96},
    "efficientformer_l1": {"size": 224},
    "efficientformerv2_s0": {"size": 224},
    "efficientvit_b0": {"size": 96},
    "efficientvit_m0": {"img_size": 128},
    "fastvit_sa12": {"size": 64},
    "fastvit_t8": {"size": 64},
    "swiftformer_xs": {"size": 64},
    "tiny_vit_5m_224": {"size": 224},
    "nextvit_small": {"size": 64},
    "repvit_m0_9": {"size": 64},
    "shvit_s1": {"size": 128},
    "starnet_s1": {"size": 64},
    "sequencer2d_s": {"img_size": 64, "layers": (1, 1, 1, 1)},
    "poolformer_s12": {"size": 64},
    "caformer_s18": {"size": 64},
    "convformer_s18": {"size": 64},
    "resnet50_clip": {"size": 64},
    "resnet50_gap": {"size": 64},
    "resnest14d": {"size": 64},
    "skresnet18": {"size": 64},
    "mixer_s32_224": {"img_size": 64},
    "gmlp_s16_224": {"img_size": 64},
    "resmlp_12_224": {"img_size": 64},
    "inception_next_tiny": {"size": 64},
    "rdnet_tiny": {"size": 64},
    "csatv2": {"size": 128},
}


def build(name: str, settings: dict[str, object]) -> torch.nn.Module:
    import timm

    return timm.create_model(name, pretrained=False, num_classes=5, **settings)


def timm_models() -> Iterator[Case]:
    import timm

    for name, settings in MODELS.items():
        if not timm.is_model(name):
            continue
        given = {key: value for key, value in settings.items() if key != "size"}
        side = int(settings.get("size", settings.get("img_size", 64)))  # type: ignore[call-overload]
        yield Case(
            name=name,
            build=partial(build, name, given),
            inputs=lambda side=side: (torch.randn(2, 3, side, side),),
        )


LIBRARIES = {"timm": timm_models}
