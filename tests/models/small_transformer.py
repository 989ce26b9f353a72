"""Small models of Transformer with every kind of position."""

import torch

from regard.models.transformer import Transformer, TransformerConfig
from tests.models.generator_checks import SOURCES, START, VOCABULARY, D, N

DIM, HEADS = 12, 3


KINDS = {
    "pre": {},
    "post": {"norm": "post", "positions": "sinusoidal_halves", "activation": "silu", "output_bias": True},
    "learned": {"positions": "learned", "longest": N, "embedding_norm": True, "embedding_scale": 1.0, "tied": "none"},
    "rotary": {"positions": "rotary", "kv_heads": 1},
    "t5": {"positions": "t5"},
    "shaw": {"positions": "shaw", "reach": 3},
    "alibi": {"positions": "alibi"},
    "no_positions": {"positions": "none"},
    "masked": {"encoder_mask": "Window(3) | Global(1)"},
    "segments": {"segment": 4, "memory": 3},
    "rotary_segments": {"segment": 4, "memory": 8, "positions": "rotary"},
}


def config(**options):
    sizes = {"source_vocabulary": SOURCES, "target_vocabulary": VOCABULARY, "start": START}
    sizes |= {"dim": DIM, "heads": HEADS, "hidden": 16, "encoder_layers": 2, "decoder_layers": 2}
    return TransformerConfig(**{**sizes, "dropout": 0.0, **options})


def model_of(kind):
    model = Transformer(config(**KINDS[kind])).to(D).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(1.0 if "norm" in name else 2.0)  # so that attention is not flat
    return model
