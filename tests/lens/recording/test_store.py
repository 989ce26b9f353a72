"""Snapshots of terms: a tape keeps the masks and biases of the call, even if their tensors change later."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tests.lens.tiny_transformers as zoo
from regard import Additive, Bilinear, Causal, Dense, Documents, Padding, attend
from regard.lens import Tape, capture
from regard.lens.recording.store import TermSnapshots
from regard.nn import (
    Attention,
    BahdanauAttention,
    KVCache,
    LearnedSink,
    T5Bias,
)
from tests.lens.sdpa_layers import B, D, H, Layer, N, assert_close, tokens


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
                model(x, keep=keep)
                right.append(model.weights(x, keep=keep).dense().detach().clone())
                keep[:, n] = False
        for n in range(3):
            torch.testing.assert_close(tape["", n].dense(), right[n])


@pytest.mark.parametrize(
    ("slot", "make", "held"),
    [
        ("mask", Padding, torch.tensor([3, 4])),
        ("mask", Documents, torch.arange(N)[None] // 2),
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
    for A, want in zip(tape.values(), right, strict=True):
        torch.testing.assert_close(A.dense(), want)


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


def test_parameters_in_terms_are_copied():
    layer = BahdanauAttention(query_dim=5, state_dim=6, dim=7)
    memory = layer.remember(torch.randn(B, N, 6), torch.tensor([9, 4]))
    with capture(layer) as tape:
        layer(torch.randn(B, 3, 5), memory)
    before = tape[0].dense()
    assert isinstance(tape[0]._call.score, Additive)
    with torch.no_grad():
        layer.score.vector.add_(1.0)
    assert torch.equal(tape[0].dense(), before)


def test_a_change_in_place_after_the_attention_raises_unless_it_was_copied():
    class Rude(nn.Module):
        def forward(self, x):
            out = F.scaled_dot_product_attention(x, x, x)
            x.zero_()
            return out

    model = Rude()
    with capture(model) as tape:
        model(torch.randn(1, 2, 5, 4))
    with pytest.raises(RuntimeError, match=r"changed in place by the model.*to='cpu'"):
        tape[0]
    with capture(model, to="cpu") as tape:
        x = torch.randn(1, 2, 5, 4)
        truth = (x @ x.mT / 2).softmax(-1)
        model(x)
    assert_close(tape[0], truth.double())


def test_tensors_on_disk_do_not_count_towards_the_budget(tmp_path):
    model, x = nn.Sequential(Layer(), Attention(D, H, mask=Causal()).eval()), tokens()
    with torch.no_grad(), capture(model) as held:
        model(x)
    with torch.no_grad(), capture(model, to=tmp_path / "scratch", budget="0KB") as tape:
        model(x)
    # Queries and keys of both.
    assert len(list((tmp_path / "scratch").glob("*/*.safetensors"))) == 4
    for A, B_ in zip(tape.values(), held.values(), strict=True):
        assert torch.equal(A.dense(), B_.dense())


def test_generation_on_disk_leaves_one_file_per_tensor(tmp_path):
    layer, x = Attention(D, H, mask=Causal()).eval(), tokens()
    with torch.no_grad(), capture(layer, to=tmp_path) as tape:
        cache = KVCache()
        for part in x.split(1, 1):
            layer(part, cache=cache)
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 2
    assert (tape[0].dense() - layer.weights(x).dense()).abs().max() < 1e-6


def test_a_tensor_beyond_the_budget_raises_before_it_is_kept():
    model, x = nn.Sequential(*(Layer() for _ in range(4))), tokens(130)
    one = 2 * B * 130 * D * 4 + B * H * 130 * 4  # queries, keys and a number for each row
    with torch.no_grad(), capture(model, budget=f"{4 * one}B"):
        model(x)
    message = r"^3: statistic of shape \(2, 4, 130\) .* more than budget='.*keep=\['entropy'"
    with torch.no_grad(), pytest.raises(MemoryError, match=message), capture(model, budget=f"{4 * one - 1}B"):
        model(x)


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("some/folder", r"or to=Path\('some/folder'\)"),
        ("gpu", r"got 'gpu'; write to='cpu' or to='cuda', or to=Path\('gpu'\)"),
        ("cuda:99", r"to='cuda:99' is a device this machine does not have; write"),
    ],
)
def test_a_place_that_is_no_device_of_this_machine_is_refused(to, message):
    with pytest.raises(ValueError, match=message), capture(Layer(), to=to):
        pass
