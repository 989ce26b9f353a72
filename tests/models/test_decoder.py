"""Decoders step by step: with prepared weights as without, and past a prefix without its logits."""

import pytest
import torch

from regard.decode import Ensemble, beam, greedy
from regard.models import Gpt, GptConfig, Transformer, TransformerConfig
from regard.nn import linear

END, START, VOCABULARY = 0, 1, 31


def gpt():
    return Gpt(GptConfig(vocabulary=VOCABULARY, length=40, dim=12, depth=2, heads=3, dropout=0.0))


def llama():
    return Gpt(GptConfig.llama(vocabulary=VOCABULARY, dim=12, depth=2, heads=3, kv_heads=1, window=5))


def transformer(tied="output"):
    sizes = {"dim": 12, "heads": 3, "hidden": 20, "encoder_layers": 1, "decoder_layers": 2, "tied": tied}
    vocabularies = {"source_vocabulary": VOCABULARY, "target_vocabulary": VOCABULARY}
    return Transformer(TransformerConfig(**vocabularies, **sizes, start=START, output_bias=True))


MODELS = {"gpt": gpt, "llama": llama, "transformer": transformer, "untied": lambda: transformer("none")}


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(3)
    model = MODELS[request.param]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
    return model


def source_of(stepper, rows):
    if isinstance(stepper, Gpt) or isinstance(getattr(stepper, "members", [None])[0], Gpt):
        return None
    return {"source": torch.arange(rows * 6).view(rows, 6) % VOCABULARY, "source_lengths": torch.arange(rows) % 4 + 3}


def written(model, rows):
    source, prefix = source_of(model, rows), [[START, 2 + row, 5] for row in range(rows)]
    limits = {"end": END, "max_length": 9}
    return (
        [one.tokens for one in greedy(model, source, prefix, **limits)],
        [[one.tokens for one in best] for best in beam(model, source, prefix, width=4, n_best=3, **limits)],
    )


@pytest.mark.parametrize("rows", [1, 3])
def test_prepared_weights_write_the_same(model, rows, monkeypatch):
    plain = written(model, rows)
    used = []
    monkeypatch.setattr(linear, "LEAST", 0)
    monkeypatch.setattr(linear, "ON_ARM", True)
    few = linear.Prepared._few
    monkeypatch.setattr(linear.Prepared, "_few", lambda self, *given: used.append(self) or few(self, *given))
    assert written(model, rows) == plain
    if linear.ARRANGES:
        assert len(set(used)) == (1 if rows == 1 else 2)  # one to a decoding; greedy has them where there are rows


def test_a_prefix_is_read_without_logits(model, monkeypatch):
    expected = written(model, 3)
    seen = []
    owner = model if isinstance(model, Gpt) else model.decoder
    logits = owner.logits
    monkeypatch.setattr(owner, "logits", lambda x: seen.append(x.shape[1]) or logits(x))
    assert written(model, 3) == expected
    assert set(seen) == {1}
    assert written(Ensemble([model]), 3) == expected
    assert set(seen) == {1}


def test_weights_may_change_between_decodings_in_any_way(model, monkeypatch):
    monkeypatch.setattr(linear, "LEAST", 0)
    first = written(model, 3)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn_like(parameter) * 0.4)  # leaves no trace in its version
    changed = written(model, 3)
    monkeypatch.setattr(linear, "MOST", 0)
    assert changed == written(model, 3) != first
