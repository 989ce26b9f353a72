"""Snapshots of terms: a tape keeps the masks and biases of the call, even if their tensors change later."""

import pytest
import torch
from torch import nn

import tests.lens.tiny_transformers as zoo
from regard import Bilinear, Dense, Documents, Padding, attend
from regard.lens import Tape, capture
from regard.lens.recording.store import TermSnapshots
from regard.nn import Attention, LearnedSink, T5Bias

B, N, D, H = 2, 5, 16, 2


class Called(nn.Module):
    """A layer without weights of its own, over terms it is given."""

    def forward(self, x, **terms):
        heads = x.unflatten(-1, (H, -1)).transpose(1, 2)
        return attend(heads, heads, heads, **terms)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_mask_that_is_reused_in_place_for_the_next_batch_is_copied(mode):
    with mode():
        model, x = Attention(D, heads=H), torch.randn(B, N, D)
        keep, right = torch.ones(B, N, dtype=torch.bool), []
        with capture(model) as tape:
            for n in range(3):
                model(x, key_padding=keep)
                right.append(model.weights(x, key_padding=keep).dense().detach().clone())
                keep[:, n] = False
        for n in range(3):
            torch.testing.assert_close(tape["", n].dense(), right[n])


@pytest.mark.parametrize(
    ("slot", "make", "held"),
    [
        ("mask", Padding, torch.tensor([3, 4])),
        ("mask", Documents, torch.tensor([[0, 0, 1, 1, 1]])),
        ("mask", Dense, torch.rand(N, N) > 0.3),
        ("score", Bilinear, torch.randn(D // H, D // H)),
    ],
)
def test_tensors_of_terms_are_copied_before_they_change(slot, make, held, tmp_path):
    x = torch.randn(B, N, D)
    model = Called()
    with torch.no_grad(), capture(model) as tape:
        model(x, **{slot: make(held)})
    with torch.no_grad(), capture(model) as right:
        model(x, **{slot: make(held.clone())})
    held.copy_(torch.zeros_like(held))
    torch.testing.assert_close(tape[0].dense(), right[0].dense())
    tape.save(tmp_path / "tape.safetensors")
    torch.testing.assert_close(Tape.load(tmp_path / "tape.safetensors")[0].dense(), right[0].dense())


@pytest.mark.parametrize(("slot", "part"), [("bias", T5Bias(H)), ("normalize", LearnedSink(H))])
@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_of_terms_are_copied_before_they_change(slot, part, frozen):
    model, x = Attention(D, heads=H, **{slot: part}).requires_grad_(not frozen), torch.randn(B, N, D)
    with capture(model) as tape:
        model(x)
    right = model.weights(x).dense().detach().clone()
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.uniform_(-9, 9)
    torch.testing.assert_close(tape[0].dense(), right)


def test_sinks_of_transformers_are_copied_before_they_change():
    model = zoo.made(zoo.gpt_oss, "eager")
    with torch.no_grad(), capture(model) as tape:
        model(zoo.ids(1))
    with torch.no_grad(), capture(model) as right:
        model(zoo.ids(1))
    right = [A.dense().clone() for A in right.values()]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(5.0)
    for A, B in zip(tape.values(), right, strict=True):
        torch.testing.assert_close(A.dense(), B)


def test_a_tensor_is_copied_once_for_all_layers_until_it_is_written_to():
    copies, keep = TermSnapshots(), torch.ones(B, N, dtype=torch.bool)
    term = Padding(keep)
    own = copies.copy(term)
    assert copies.copy(term) is own
    assert copies.copy(Padding(keep)).tensors()[0] is own.tensors()[0]
    assert own.tensors()[0] is not keep
    keep[0, 0] = False
    other = copies.copy(term)
    assert not other.tensors()[0][0, 0]
    assert own.tensors()[0][0, 0]


def test_copies_count_towards_the_budget_where_they_are_kept():
    model, x, mask = Called(), torch.randn(1, 64, D), Dense(torch.rand(64, 64) > 0.5)

    def held(**options):
        with torch.no_grad(), capture(model, **options) as tape:
            model(x, mask=mask)
        return tape._recorder.store.held

    whole = held()
    assert whole == 2 * x.nbytes + 64 * 64
    assert held(budget=f"{whole}B") == whole
    with pytest.raises(MemoryError, match="more than budget"):
        held(budget=f"{whole - 1}B")
    assert held(keep=["entropy"]) == 4 * H * 64
