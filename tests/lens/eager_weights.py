"""The weights that models of Hugging Face return themselves, and a tape compared with them."""

import pytest
import torch

import tests.lens.tiny_transformers as zoo

CLOSE = 1e-5
SEQ2SEQ = (zoo.t5, zoo.marian, zoo.whisper)
KINDS = ("encoder_attentions", "attentions", "decoder_attentions", "cross_attentions")


def inputs_of(build, side=None):
    if build is zoo.vit:
        return {"pixel_values": torch.randn(2, 3, 20, 20)}
    inputs = {"input_features": torch.randn(2, 8, 30)} if build is zoo.whisper else {"input_ids": zoo.ids()}
    if build in SEQ2SEQ:
        inputs["decoder_input_ids"] = zoo.ids(n=7)
    if side is not None:
        inputs["attention_mask"] = zoo.padding(side)
    return inputs


def scale_of(build):
    return 1.0 if build is zoo.t5 else 4.0  # T5 divides by nothing: its scores are large already


def eager_weights(build, **inputs):
    """What the model itself says it attends to: encoder, self and cross attentions, layer by layer."""
    with torch.no_grad():
        out = zoo.made(build, "eager", scale_of(build))(**inputs, output_attentions=True)
    return [A for kind in KINDS for A in getattr(out, kind, None) or ()]


def in_order(tape):
    """The weights of a tape, encoder first, then decoder, then cross."""

    def rank(name):
        cross = "encoder_attn" in name or "EncDec" in name
        return 2 if cross else 1 if "decoder" in name else 0

    return [tape[key] for key in sorted(tape, key=lambda key: rank(key[0]))]


def assert_same(tape, expected, real=None):
    found = in_order(tape)
    if not expected:
        pytest.skip("this version of transformers returns no attentions of this model")
    assert [tuple(A.shape) for A in found] == [tuple(A.shape) for A in expected]
    for A, truth in zip(found, expected, strict=True):
        error = (A.dense() - truth).abs()
        if real is not None and real.shape[1] == error.shape[2]:
            # Queries that are padding see nothing and weigh 0; eager attention spreads them over all keys.
            error = error[real.bool()[:, None, :, None].expand_as(error)]
        assert error.max() < CLOSE
