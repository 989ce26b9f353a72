"""Decoders, encoders and encoder-decoders of x-transformers, one option at a time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from .case import Case

DECODER = {
    "plain": {},
    "rotary_pos_emb": {"rotary_pos_emb": True},
    "rotary_xpos": {"rotary_xpos": True},
    "alibi_pos_bias": {"alibi_pos_bias": True},
    "rel_pos_bias": {"rel_pos_bias": True},
    "dynamic_pos_bias": {"dynamic_pos_bias": True},
    "attn_qk_norm": {"attn_qk_norm": True},
    "attn_qk_norm_dim_scale": {"attn_qk_norm": True, "attn_qk_norm_dim_scale": True},
    "attn_kv_heads 2": {"attn_kv_heads": 2},
    "attn_one_kv_head": {"attn_one_kv_head": True},
    "attn_num_mem_kv": {"attn_num_mem_kv": 3},
    "attn_softclamp_logits": {"attn_softclamp_logits": True},
    "attn_selective": {"attn_selective": True},
    "attn_laser": {"attn_laser": True},
    "attn_flash": {"attn_flash": True},
    "attn_flash, rotary": {"attn_flash": True, "rotary_pos_emb": True},
    "attn_flash, alibi": {"attn_flash": True, "alibi_pos_bias": True},
    "attn_head_learned_sink": {"attn_head_learned_sink": True},
    "attn_add_zero_kv": {"attn_add_zero_kv": True},
    "attn_sparse_topk": {"attn_sparse_topk": 4},
    "attn_pre_talking_heads": {"attn_pre_talking_heads": True},
    "attn_post_talking_heads": {"attn_post_talking_heads": True},
    "attn_head_scale": {"attn_head_scale": True},
    "attn_value_rmsnorm": {"attn_value_rmsnorm": True},
    "attn_gate_values": {"attn_gate_values": True},
    "attn_gate_value_heads": {"attn_gate_value_heads": True},
    "attn_on_attn": {"attn_on_attn": True},
    "attn_sigmoid": {"attn_sigmoid": True},
    "attn_cog_signed": {"attn_cog_signed": True},
    "attn_hard": {"attn_hard": True},
    "attn_data_dependent_alibi": {"attn_data_dependent_alibi": True},
    "attn_learned_value_residual_mix": {"add_value_residual": True, "learned_value_residual_mix": True},
    "attn_orthog_projected_values": {"attn_orthog_projected_values": True},
    "attn_add_gated_kv": {"attn_logit_softclamp_value": 20.0, "attn_softclamp_logits": True},
    "shift_tokens": {"shift_tokens": 1},
    "macaron": {"macaron": True},
    "sandwich_norm": {"sandwich_norm": True},
    "hyper-connections": {"num_residual_streams": 2},
    "unet_skips": {"unet_skips": True},
    "layer_dropout": {"layer_dropout": 0.0},
    "attn_max_attend_past": {"attn_max_attend_past": 4},
    "polar_pos_emb": {"polar_pos_emb": True},
    "attn_dropout, evaluated": {"attn_dropout": 0.1},
}


def decoder(given: dict[str, object], **wrapper: object) -> torch.nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **given)
    return TransformerWrapper(num_tokens=50, max_seq_len=32, attn_layers=layers, **wrapper)


def encoder(given: dict[str, object]) -> torch.nn.Module:
    from x_transformers import Encoder, TransformerWrapper

    layers = Encoder(dim=32, depth=2, heads=4, attn_dim_head=8, **given)
    return TransformerWrapper(num_tokens=50, max_seq_len=32, attn_layers=layers)


def both() -> torch.nn.Module:
    from x_transformers import XTransformer

    sizes = {"enc_num_tokens": 50, "dec_num_tokens": 50, "enc_max_seq_len": 16, "dec_max_seq_len": 16}
    return XTransformer(dim=32, enc_depth=2, enc_heads=4, dec_depth=2, dec_heads=4, **sizes)


def cross() -> torch.nn.Module:
    from x_transformers import CrossAttender

    return CrossAttender(dim=32, depth=2, heads=4)


def vision() -> torch.nn.Module:
    from x_transformers import Encoder, ViTransformerWrapper

    return ViTransformerWrapper(
        image_size=32, patch_size=8, num_classes=5, attn_layers=Encoder(dim=32, depth=2, heads=4)
    )


def ids(b: int = 2, n: int = 9) -> torch.Tensor:
    return torch.randint(1, 50, (b, n))


def padded(model: torch.nn.Module, x: torch.Tensor, mask: torch.Tensor) -> object:
    return model(x, mask=mask)


def x_transformers() -> Iterator[Case]:
    import x_transformers as library

    assert library.__name__
    for name, given in DECODER.items():
        streams = ("attn_layers",) if "num_residual_streams" in given else ()  # a softmax over residual streams
        yield Case(name=f"decoder, {name}", build=partial(decoder, given), inputs=lambda: (ids(),), excused=streams)
    for name in ("plain", "rotary_pos_emb", "alibi_pos_bias", "attn_qk_norm", "attn_flash", "rel_pos_bias"):
        yield Case(name=f"encoder, {name}", build=partial(encoder, DECODER[name]), inputs=lambda: (ids(4, 11),))
    mask = torch.arange(11) < torch.tensor([[11], [7]])
    yield Case(name="encoder, padded", build=partial(encoder, {}), inputs=lambda: (ids(2, 11), mask), call=padded)
    yield Case(name="memory tokens", build=partial(decoder, {}, num_memory_tokens=3), inputs=lambda: (ids(),))
    yield Case(name="encoder-decoder", build=both, inputs=lambda: (ids(2, 9), ids(2, 7)))
    yield Case(name="vision", build=vision, inputs=lambda: (torch.randn(2, 3, 32, 32),))
    yield Case(
        name="cross attender",
        build=cross,
        inputs=lambda: (torch.randn(2, 5, 32), torch.randn(2, 9, 32)),
        call=lambda model, x, context: model(x, context=context),
    )


LIBRARIES = {"x-transformers": x_transformers}
