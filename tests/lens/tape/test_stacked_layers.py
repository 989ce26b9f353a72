"""Layers measured in stacks have the numbers that they have alone."""

from __future__ import annotations

import pytest
import torch

from regard import Alibi, Causal, Padding, Sigmoid, weights
from regard.lens import Tape
from regard.lens.real_tokens import real_tokens
from regard.lens.tape import stacked_layers
from regard.lens.tape.stacked_layers import Layer, stack, stacks

FIELDS = ("entropy", "received", "max", "distance", "map", "peaks", "statistic")
MASKS = {
    "none": None,
    "causal": Causal(),
    "lengths": Padding((9, 4)),
    "one length for all": Padding((7,)),
    "lengths in a tensor": Causal() & Padding(torch.tensor([4, 9])),
    "padding on the left": Padding(torch.arange(9) >= torch.tensor([[0], [5]])),
}


@pytest.fixture
def stacking(monkeypatch):
    """Layers of the CPU are stacked, as those of a GPU are."""
    monkeypatch.setattr(stacked_layers, "DEVICES", ("cpu",))


def layers_of(mask, count=4, **terms):
    q, k = torch.randn(2, count, 2, 3, 9, 4)
    return {(f"layers.{n}.attn", 0): weights(q[n], k[n], mask=mask, **terms) for n in range(count)}


def alone(A):
    return Tape({("layer", 0): type(A)(A.call)})


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("known", [False, True])
def test_a_stack_has_the_summaries_and_the_table_of_its_layers(mask, known, stacking):
    layers = layers_of(mask)
    for A in layers.values() if known else ():
        A.lse  # noqa: B018
    tape = Tape(layers)
    table = tape.table()
    tape.summarize()
    for key, A in layers.items():
        ours, theirs = tape.summary(key), alone(A).summary("layer")
        for name in FIELDS:
            torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), msg=name)
        torch.testing.assert_close(tape[key].known_statistic, theirs.statistic[..., None])
        rows = alone(A).table()
        for name in ("entropy", "received", "max", "distance"):
            at = [n for n, layer in enumerate(table["layer"]) if layer == key[0]]
            torch.testing.assert_close([table[name][n] for n in at], list(rows[name]), rtol=1e-5, atol=1e-6)


def test_layers_of_another_form_are_not_in_the_stack(stacking):
    q, k = torch.randn(2, 2, 3, 9, 4)
    mask = Causal()
    each = {
        "a": weights(q, k, mask=mask),
        "sigmoid": weights(q, k, mask=mask, normalize=Sigmoid()),
        "b": weights(q, k, mask=mask),
        "biased": weights(q, k, mask=mask, bias=Alibi(3)),
        "short": weights(q[:, :, :5], k[:, :, :5], mask=mask),
        "selected": weights(q, k, mask=mask).select(heads=[0, 2, 1]),
        "c": weights(q, k, mask=mask),
        "other mask": weights(q, k, mask=Causal()),
    }
    real = real_tokens(each["a"])
    found = [[layer.key for layer in part] for part in stacks(Layer(name, A, real) for name, A in each.items())]
    assert found == [["sigmoid"], ["biased"], ["selected"], ["a", "b", "c"], ["short"], ["other mask"]]


def test_a_stack_holds_so_many_bytes(stacking, monkeypatch):
    layers = layers_of(None, count=5)
    size = sum(x.nbytes for x in (layers["layers.0.attn", 0].call.q, layers["layers.0.attn", 0].call.k))
    monkeypatch.setattr(stacked_layers, "MAX_BYTES", 2 * size)
    real = real_tokens(layers["layers.0.attn", 0])
    assert [len(part) for part in stacks(Layer(key, A, real) for key, A in layers.items())] == [2, 2, 1]


def test_on_a_cpu_each_layer_is_measured_alone():
    layers = layers_of(None)
    real = real_tokens(layers["layers.0.attn", 0])
    assert [len(part) for part in stacks(Layer(key, A, real) for key, A in layers.items())] == [1, 1, 1, 1]


def test_a_stack_of_one_is_the_layer():
    A = weights(*torch.randn(2, 1, 2, 5, 4))
    real = real_tokens(A)
    assert stack([Layer(("a", 0), A, real)]) == (A, real)


@pytest.mark.parametrize("tokens_first", [False, True])
def test_batches_are_joined_in_the_memory_order_they_have(tokens_first):
    parts = [torch.randn(2, 9, 3, 4).transpose(1, 2) if tokens_first else torch.randn(2, 3, 9, 4) for _ in range(3)]
    joined = stacked_layers._join(parts)
    assert torch.equal(joined, torch.cat(parts))
    assert joined.transpose(1, 2).is_contiguous() is tokens_first
