"""Weights without some keys, beside A_ij / (1 - hidden mass) of dense float64 weights."""

import pytest
import torch

from regard import Alibi, Causal, Padding, Sigmoid, SinkSoftmax, Sparsemax, weights
from regard.lens import Tape, sinks
from regard.lens.tape.hidden_keys import is_punctuation, padding, punctuation, without_keys

N = 11


def renormalized(dense, keys):
    """A_ij / (1 - hidden mass), zeros where nothing is left; keys b j."""
    rest = dense.double().masked_fill(keys[:, None, None], 0.0)
    mass = dense.double().sum(-1, keepdim=True)
    hidden = mass - rest.sum(-1, keepdim=True)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest / (mass - hidden), 0.0)


@pytest.mark.parametrize("select", [False, True])
def test_the_rest_of_each_row_sums_to_one_again(select):
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 4, N, 8, dtype=torch.float64)
    A = weights(q, k[:, :2], mask=Causal() & Padding((N, N - 3)), bias=Alibi(4))
    keys = torch.rand(2, N) < 0.3
    keys[:, 0] = True
    if select:
        A, keys = A.select(batch=slice(1, 2), heads=[3, 1]), keys[1:]
    found, truth = without_keys(A, keys).dense(), renormalized(A.dense(), keys)
    assert torch.allclose(found, truth, rtol=1e-12, atol=0)
    assert (found[:, :, 0] == 0).all()  # the first query sees the first key alone
    sums = found.sum(-1)
    assert torch.allclose(sums, (sums > 0).double())


def test_the_sink_logit_is_hidden_too():
    q, k = torch.randn(2, 1, 2, N, 8, dtype=torch.float64)
    A, keys = weights(q, k, normalize=SinkSoftmax(2.0)), torch.arange(N)[None] == 4
    found = without_keys(A, keys).dense()
    rest = A.dense().masked_fill(keys, 0.0)
    assert torch.allclose(found, rest / rest.sum(-1, keepdim=True))


@pytest.mark.parametrize("normalize", [Sigmoid(), Sparsemax()])
def test_weights_of_no_softmax_are_refused(normalize):
    q, k = torch.randn(2, 1, 2, N, 8)
    with pytest.raises(ValueError, match="keys can be hidden in a softmax, and these weights are"):
        without_keys(weights(q, k, normalize=normalize), torch.zeros(1, N, dtype=torch.bool))


def test_punctuation_and_padding_go_by_the_tokens():
    marks = [".", "Ġ,", "▁!", "##'", "Ċ", "»", "...", "<0x0A>", "。"]
    assert all(map(is_punctuation, marks))
    assert not any(map(is_punctuation, ["a.", "[SEP]", "<s>", "Ġ", "", "▁the", "3", "$"]))
    assert punctuation([["a", "."], None], 2).tolist() == [[False, True], [False, False]]
    real = torch.tensor([[True, True, False]])
    assert padding([["a", "[PAD]", "b"]], real).tolist() == [[False, True, True]]


def sunk_tape():
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 3, N, 8)
    k[:, 1, 2] = 4 * q[:, 1].mean(1)  # a sink of one head alone
    q[:, 1] = q[:, 1] * 0.2 + 2 * k[:, 1, 2, None]
    tape = Tape({("a", 0): weights(q, k, mask=Padding((N, N - 2))), ("b", 0): weights(q, k)})
    tape.tokens = ["<s>", "the", "cat", ",", "who", "sat", "fell", ".", "It", "ran", "."]
    return tape


def test_a_tape_hides_kinds_and_numbers_in_each_layer():
    tape = sunk_tape()
    assert torch.equal(tape.hidden_keys("a", "sinks"), sinks(tape["a"]).keys.any(1))
    assert tape.hidden_keys("a", "sinks")[:, 2].all()
    assert tape.hidden_keys("b", "punctuation", 5)[0].nonzero().flatten().tolist() == [3, 5, 7, 10]
    assert tape.hidden_keys("a", "padding").nonzero().tolist() == [[1, 9], [1, 10]]
    rest = tape.without("sinks", "punctuation")
    for layer in "ab":
        truth = renormalized(tape[layer].dense(), tape.hidden_keys(layer, "sinks", "punctuation"))
        assert torch.allclose(rest[layer].dense().double(), truth, atol=1e-5)
        assert torch.equal(rest.real_queries(layer), tape.real_queries(layer))
        assert torch.equal(rest.real_keys(layer), tape.real_keys(layer))
    assert rest.tokens_of("a") == tape.tokens_of("a")
    assert not torch.allclose(rest.overview("a").entropy, tape.overview("a").entropy)


def test_the_rest_can_be_saved(tmp_path):
    rest = sunk_tape().without("sinks")
    rest.save(tmp_path / "rest.safetensors")
    loaded = Tape.load(tmp_path / "rest.safetensors")
    assert torch.equal(loaded["a"].dense(), rest["a"].dense())
    assert torch.equal(loaded.real_keys("a"), rest.real_keys("a"))


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ((), ValueError, "name the keys to hide: 'sinks', 'padding', 'punctuation', or their numbers"),
        ((N,), IndexError, f"keys of 'a' must be from 0 to {N - 1}, got {N}"),
        (("sink",), ValueError, "keys must be 'sinks', 'padding', 'punctuation' or numbers, got 'sink'"),
        ((True,), ValueError, "keys must be .* or numbers, got True"),
    ],
)
def test_wrong_keys_are_named(keys, error, message):
    with pytest.raises(error, match=message):
        sunk_tape().without(*keys)
