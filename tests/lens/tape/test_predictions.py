"""Predictions: the model's own probabilities in float64, through padding, files and the tape."""

import warnings

import pytest
import torch

from regard import Causal, Padding, weights
from regard.lens import CaptureWarning, Tape, capture
from regard.lens.tape import predictions as module
from regard.lens.tape.predictions import Predictions
from regard.models import Gpt, GptConfig

VOCABULARY = [f"word {n}" for n in range(11)]


@pytest.fixture(scope="module")
def read():
    """A tape of a float64 model over two texts, the ids, and the log-probabilities by the model itself."""
    torch.manual_seed(0)
    model = Gpt(GptConfig(vocabulary=11, dim=16, depth=2, heads=2, length=9)).double().eval()
    ids = torch.randint(11, (2, 7))
    with torch.no_grad(), capture(model, [[VOCABULARY[n] for n in row] for row in ids]) as tape:
        logits = model(ids)
    return tape, ids, logits, logits.log_softmax(-1)


@pytest.mark.parametrize("chunk", [2**24, 30])
def test_probabilities_are_those_of_the_model(read, chunk, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ENTRIES", chunk)
    _, ids, logits, p = read
    found = Predictions.of(logits, ids, VOCABULARY, top=3)
    assert found.log_probability.dtype == torch.float64
    own = torch.stack([torch.stack([p[b, t - 1, ids[b, t]] for t in range(1, 7)]) for b in range(2)])
    torch.testing.assert_close(found.log_probability[:, 1:-1], own, rtol=0, atol=1e-12)
    assert found.log_probability[:, [0, -1]].isnan().all()
    best = p.topk(3)
    torch.testing.assert_close(found.top_log_probability[:, 1:], best.values, rtol=0, atol=1e-12)
    named = [[[found.names[n] for n in place] for place in row] for row in found.top[:, 1:].tolist()]
    assert named == [[[VOCABULARY[n] for n in place] for place in row] for row in best.indices.tolist()]
    assert (found.top[:, 0] == -1).all()
    assert found.tokens == 7


def test_names_come_from_a_tokenizer_a_function_a_list_or_are_the_ids(read):
    _, ids, logits, p = read

    class Tokenizer:
        def convert_ids_to_tokens(self, ids):
            return [f"piece {n}" for n in ids]

    best = p[0, -1].argmax().item()
    for names, expected in (
        (Tokenizer(), f"piece {best}"),
        (lambda ids: [str(-n) for n in ids], str(-best)),
        (VOCABULARY, f"word {best}"),
        (None, str(best)),
    ):
        found = Predictions.of(logits, ids, names)
        assert found.names[found.top[0, -1, 0]] == expected


def test_a_tape_keeps_predictions_in_its_file_and_its_parts(read, tmp_path):
    tape, ids, logits, _ = read
    tape.predict(logits, ids, VOCABULARY)
    tape.save(tmp_path / "tape.safetensors")
    for one in (tape, Tape.load(tmp_path / "tape.safetensors"), tape.select([1]), tape.select("*", heads=[0])):
        found = one.predictions_of(0)
        expected = Predictions.of(logits, ids, VOCABULARY)
        for name in ("log_probability", "top", "top_log_probability"):
            torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=0, atol=0, equal_nan=True)
        assert found.names == expected.names
    assert Tape({("layer", 0): weights(*torch.randn(2, 1, 2, 7, 4))}).predictions_of(0) is None


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_predicts_nothing_and_is_not_predicted(read, side):
    _, ids, logits, p = read
    real = torch.ones(2, 7, dtype=torch.bool)
    real[1, 4:] = False
    real = real if side == "right" else real.flip(1)
    tape = Tape({("layer", 0): weights(*torch.randn(2, 2, 2, 7, 4), mask=Padding(real) & Causal())})
    tape.predict(logits, ids, VOCABULARY)
    found = tape.predictions_of(0)
    for b in range(2):
        for t in range(8):
            known = t > 0 and bool(real[b, t - 1])
            assert bool(found.top_log_probability[b, t].isfinite().all()) == known
            assert bool(found.log_probability[b, t].isfinite()) == (known and t < 7 and bool(real[b, t]))
            if known and t < 7 and real[b, t]:
                torch.testing.assert_close(found.log_probability[b, t], p[b, t - 1, ids[b, t]])


def test_layers_with_other_queries_have_none_and_patterns_choose(read):
    _, ids, logits, _ = read
    q, k = torch.randn(2, 2, 2, 7, 4)
    tape = Tape({("encoder", 0): weights(q, k), ("decoder", 0): weights(q, k), ("short", 0): weights(q[:, :, :3], k)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tape.predict(logits, ids, layers="decoder")
    assert [tape.predictions_of(name) is None for name in ("encoder", "decoder", "short")] == [True, False, True]
    with pytest.warns(CaptureWarning, match="predictions of 2 texts of 7 tokens were given, but 'short' has 2 batch"):
        tape.predict(logits, ids, layers="short")


def test_what_cannot_be_predictions_is_named(read):
    _, ids, logits, _ = read
    for arguments, message in (
        ((logits[:, :3], ids), r"logits must be b n vocabulary for ids of shape \(2, 7\), got \(2, 3, 11\)"),
        ((logits, ids + 9), "ids must be from 0 to 10, got"),
        ((logits, ids, lambda ids: ["one"]), "names returned 1 tokens for"),
    ):
        with pytest.raises(ValueError, match=message):
            Predictions.of(*arguments)
    with pytest.raises(ValueError, match="top must be 1 or more, got 0"):
        Predictions.of(logits, ids, top=0)
