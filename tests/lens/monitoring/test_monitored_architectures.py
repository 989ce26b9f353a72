"""Logits and entropies of ten architectures of transformers are those of their eager attention."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from regard.lens import Monitor
from tests.lens import tiny_transformers as tiny

hf = pytest.importorskip("transformers")
SOFTMAXES = (torch.softmax, torch.nn.functional.softmax, torch.Tensor.softmax)


class EagerScores(TorchFunctionMode):
    """Keeps the scores and the weights of each softmax over b h i j, without the column of a sink."""

    def __init__(self):
        super().__init__()
        self.found = []
        self.scores = None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.cat and len(args[0]) == 2 and args[0][1].ndim == 4 and args[0][1].shape[-1] == 1:
            self.scores = args[0][0]  # a sink is the last column
        if func in SOFTMAXES and args[0].ndim == 4:
            scores, self.scores = args[0] if self.scores is None else self.scores, None
            self.found.append((scores, out[..., : scores.shape[-1]]))
        return out


def encoder_decoder(model):
    return {"input_ids": tiny.ids(), "decoder_input_ids": tiny.ids(n=6)}


def images(model):
    return {"pixel_values": torch.randn(2, 3, 20, 20, generator=torch.Generator().manual_seed(1))}


def sounds(model):
    features = torch.randn(2, 8, 30, generator=torch.Generator().manual_seed(1))
    return {"input_features": features, "decoder_input_ids": tiny.ids(n=6)}


INPUTS = {"t5": encoder_decoder, "marian": encoder_decoder, "whisper": sounds, "vit": images}
ONLY_EAGER = ("gemma2", "gpt_oss")
NAMES = ("bert", "gpt2", "llama", "mistral", "gemma2", "gpt_oss", "t5", "marian", "whisper", "vit")


@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_those_of_eager_attention(name):
    build = getattr(tiny, name)
    eager = tiny.made(build, "eager", scale=2.0)
    fused = tiny.made(build, "eager" if name in ONLY_EAGER else "sdpa", scale=2.0)
    inputs = INPUTS.get(name, lambda model: {"input_ids": tiny.ids()})(eager)
    with torch.no_grad(), EagerScores() as seen:
        eager(**inputs)
    monitor = Monitor(fused, rules=())
    with monitor:
        fused(**inputs)
    history = monitor.history
    assert len(history.layers) == len(seen.found) >= 2
    for layer, (scores, weights) in zip(history.layers, seen.found, strict=True):
        entropy = -torch.special.xlogy(weights, weights).sum(-1).mean((0, 2))
        torch.testing.assert_close(history.latest("logit", layer), scores.amax((0, 2, 3)), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(history.latest("entropy", layer), entropy, atol=1e-5, rtol=1e-5)
