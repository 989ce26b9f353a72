"""Weights that a model changes after the softmax are shown as they multiply the values."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard import Causal, Softmax
from regard.lens import CaptureWarning, Tape, ablate, capture
from regard.lens.eager.final_weights import Descent, FinalWeights, describe, is_active_dropout, is_over_keys
from regard.lens.terms.changed_weights import Given, Scaled

B, H, N, D = 2, 3, 7, 4
DIM = H * D
HIDDEN = torch.ones(N, N).triu(1).bool()


class Layer(nn.Module):
    """Attends by a function of itself and q, k, v, which returns the heads and the final weights."""

    def __init__(self, attention):
        super().__init__()
        self.qkv, self.num_heads, self.attention, self.found = nn.Linear(DIM, 3 * DIM), H, attention, None
        self.over_heads, self.conv, self.to_gate = nn.Linear(H, H), nn.Conv2d(H, H, 1), nn.Linear(D, 1)
        self.batch_norm, self.layer_norm, self.dropout = nn.BatchNorm2d(H), nn.LayerNorm(H), nn.Dropout(0.4)
        self.gate, self.mixing = nn.Parameter(torch.randn(H)), nn.Parameter(torch.randn(H, H))

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (H, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        out, self.found = self.attention(self, q, k, v)
        return out


def softmax(q, k):
    return (q @ k.mT * 0.5).softmax(-1)


def after(change):
    """Attention whose weights a function changes after the softmax."""

    def attention(layer, q, k, v):
        weights = change(layer, softmax(q, k), q, k)
        return weights @ v, weights

    return attention


def clean(layer, A, q, k):
    """As in TransformerLens."""
    return torch.where(torch.isnan(A), torch.zeros_like(A), A)


def straight_through(layer, A, q, k):
    hard = F.one_hot(A.argmax(-1), N).to(A.dtype)
    return hard - A.detach() + A


def gated_in_place(layer, A, q, k):
    A *= layer.to_gate(q).sigmoid()
    return A


def renormalized_mask(layer, q, k, v):
    """As in AllenNLP."""
    keep = (~HIDDEN).to(q.dtype)
    A = F.softmax(q @ k.mT * keep, dim=-1) * keep
    A = A / (A.sum(-1, keepdim=True) + 1e-13)
    return A @ v, A


def stacked(layer, q, k, v):
    A = torch.stack([softmax(q[:, n], k[:, n]) for n in range(H)], 1)
    return A @ v, A


def written_head_by_head(layer, q, k, v):
    A = torch.zeros(B, H, N, N, dtype=q.dtype)
    for n in range(H):
        A[:, n] = softmax(q[:, n], k[:, n])
    return A @ v, A


def written_to_the_first_dim(layer, q, k, v):
    A = torch.empty(H, B, N, N, dtype=q.dtype)
    for n in range(H):
        A[n] = softmax(q[:, n], k[:, n])
    A = A.transpose(0, 1)
    return A @ v, A


def talking_heads(layer, q, k, v):
    scores = torch.einsum("bhij,hg->bgij", q @ k.mT, layer.mixing)
    A = torch.einsum("bhij,hg->bgij", scores.softmax(-1), layer.mixing)
    return A @ v, A


def with_positions(layer, q, k, v):
    """As in ConViT."""
    places = torch.arange(N, dtype=q.dtype)
    positional = (-(places[:, None] - places).abs() * layer.gate.view(-1, 1, 1)).softmax(-1).expand(B, -1, -1, -1)
    gate = layer.gate.sigmoid().view(-1, 1, 1)
    A = (1 - gate) * softmax(q, k) + gate * positional
    A = A / A.sum(-1, keepdim=True)
    return A @ v, A


def slots(layer, q, k, v):
    """As in slot attention: over queries, then again over keys."""
    A = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-2) + 1e-8
    A = A / A.sum(-1, keepdim=True)
    return torch.einsum("bhjd,bhij->bhid", v, A), A


def slots_of_transposed_scores(layer, q, k, v):
    A = (k @ q.mT).softmax(-1) + 1e-8
    A = A / A.sum(-2, keepdim=True)
    return A.mT @ v, A.mT


def over_queries(layer, q, k, v):
    A = (q @ k.mT).softmax(-2)
    return A @ v, A


def difference(layer, q, k, v):
    A = softmax(q[..., :2], k[..., :2]) - 0.6 * softmax(q[..., 2:], k[..., 2:])
    return A @ v, A


def difference_of_halves(layer, q, k, v):
    both = torch.cat([softmax(q[..., :2], k[..., :2]), softmax(q[..., 2:], k[..., 2:])], 1).view(B, 2, H, N, N)
    A = both[:, 0] - 0.6 * both[:, 1]
    return A @ v, A


def adapter(layer, q, k, v):
    """As in LLaMA-adapter: a gate on the part of the keys that was learned."""
    k, v = (torch.cat([x[:, :, :2] * 0.3, x], 2) for x in (k, v))
    scores, gate = q @ k.mT, layer.gate.tanh().view(-1, 1, 1)
    A = torch.cat([gate * scores[..., :2].softmax(-1), scores[..., 2:].softmax(-1)], -1)
    return A @ v, A


def mean_of_heads(layer, q, k, v):
    """As in a temporal fusion transformer."""
    A = softmax(q, k).mean(1)
    return A @ v[:, 0], A[:, None]


def mean_of_stacked_heads(layer, q, k, v):
    A = torch.stack([softmax(q[:, n], k[:, n]) for n in range(H)]).mean(0)
    return A @ v[:, 0], A[:, None]


def gate_in_a_sum(layer, q, k, v):
    A = softmax(q, k) * layer.to_gate(q).sigmoid()
    return (A.unsqueeze(-1) * v.unsqueeze(2)).sum(3), A


UNCHANGED = {
    "clean": after(clean),
    "detach": after(lambda layer, A, q, k: A.detach()),
    "clamp that clamps nothing": after(lambda layer, A, q, k: A.clamp(min=1e-12)),
    "normalize": after(lambda layer, A, q, k: F.normalize(A, p=1, dim=-1)),
}
SCALED = {
    "renormalized": after(lambda layer, A, q, k: A / (A.sum(-1, keepdim=True) + 1e-6)),
    "mask": after(lambda layer, A, q, k: A * ~HIDDEN),
    "head gate": after(lambda layer, A, q, k: A * layer.gate.sigmoid().view(-1, 1, 1)),
    "head gate below 0": after(lambda layer, A, q, k: A * -layer.gate.square().view(-1, 1, 1)),
    "query gate": after(lambda layer, A, q, k: A * layer.to_gate(q).sigmoid()),
    "query gate in place": after(gated_in_place),
    "key gate": after(lambda layer, A, q, k: A * layer.to_gate(k).sigmoid().mT),
    "threshold": after(lambda layer, A, q, k: F.threshold(A, 0.1, 0.0)),
    "gate in a sum": gate_in_a_sum,
    "renormalized mask": renormalized_mask,
}
DENSE = {
    "epsilon": after(lambda layer, A, q, k: A + 0.05),
    "clamp": after(lambda layer, A, q, k: A.clamp(min=0.1)),
    "normalize with epsilon": after(lambda layer, A, q, k: F.normalize(A + 0.01, p=1, dim=-1)),
    "straight-through": after(straight_through),
    "square": after(lambda layer, A, q, k: A.square() / A.square().sum(-1, keepdim=True)),
    "bias": after(lambda layer, A, q, k: A + 0.1 * torch.arange(N).to(A)),
    "linear": after(lambda layer, A, q, k: layer.over_heads(A.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)),
    "convolution": after(lambda layer, A, q, k: layer.batch_norm(layer.conv(A))),
    "product": after(lambda layer, A, q, k: (layer.mixing @ A.flatten(2)).view(B, H, N, N)),
    **{
        function.__name__: function
        for function in (
            *(stacked, written_head_by_head, written_to_the_first_dim, talking_heads, with_positions, slots),
            *(slots_of_transposed_scores, over_queries, difference, difference_of_halves, adapter, mean_of_heads),
            mean_of_stacked_heads,
        )
    },
}


def seen(layer, dtype=torch.float64, **options):
    x = torch.randn(B, N, DIM, dtype=dtype, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), capture(layer.to(dtype).eval(), **options) as tape:
        layer(x)
    return tape


def each(cases):
    return pytest.mark.parametrize("attention", cases.values(), ids=list(cases))


@each(UNCHANGED | SCALED | DENSE)
@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad, torch.inference_mode], ids=lambda f: f.__name__)
def test_the_final_weights_are_on_the_tape_and_the_output_is_equal_to_the_bit(attention, context):
    layer, x = Layer(attention).double().eval(), torch.randn(B, N, DIM, dtype=torch.float64)
    with context():
        plain = layer(x)
        with capture(layer) as tape:  # where a warning would be an error
            assert torch.equal(layer(x), plain)
    assert len(tape) == 1
    torch.testing.assert_close(tape[0].dense(), layer.found.detach(), atol=1e-12, rtol=1e-12)


@each(UNCHANGED)
def test_steps_that_change_nothing_leave_the_softmax_of_the_scores(attention):
    tape = seen(Layer(attention))
    assert tape[0].call.normalize == Softmax()
    assert tape[0].call.q.shape == (B, H, N, D)
    assert tape.changed == {}
    assert "changed" not in repr(tape)


@each(SCALED)
def test_gates_and_masks_are_terms_over_queries_and_keys(attention):
    tape = seen(Layer(attention))
    call = tape[0].call
    assert call.q.shape == (B, H, N, D)
    assert isinstance(call.normalize, Scaled)
    assert call.normalize.factor[0, 0].numel() < N * N
    assert repr(tape).endswith(f"changed after the softmax: (model) ({tape.changed['']})")


def test_a_mask_with_renormalization_is_a_mask_of_the_softmax():
    def attention(layer, q, k, v):
        A = softmax(q, k) * ~HIDDEN
        A = A / A.sum(-1, keepdim=True)
        return A @ v, A

    tape = seen(Layer(attention))
    assert tape[0].call.mask == Causal()
    assert tape[0].call.normalize == Softmax()
    assert tape.changed == {"": "scaled"}


@each(DENSE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_all_other_changes_are_dense(attention, dtype):
    layer = Layer(attention)
    tape = seen(layer, dtype)
    assert isinstance(tape[0].call.normalize, Given)
    torch.testing.assert_close(tape[0].dense(), layer.found.to(tape[0].dtype), atol=0, rtol=0)
    assert tape.changed[""]


@pytest.mark.parametrize(
    ("attention", "told"),
    [
        (DENSE["talking_heads"], "heads mixed"),
        (DENSE["linear"], "heads mixed"),
        (DENSE["over_queries"], "softmax over queries"),
        (DENSE["mean_of_heads"], "averaged over heads"),
        (DENSE["epsilon"], "added to"),
        (DENSE["stacked"], "joined"),
        (DENSE["adapter"], "scaled, joined"),
        (DENSE["convolution"], "heads mixed, normalized"),
        (SCALED["head gate"], "scaled"),
    ],
)
def test_a_tape_tells_what_was_done_to_the_weights(attention, told):
    assert seen(Layer(attention)).changed == {"": told}


@each({name: DENSE[name] for name in ("talking_heads", "difference", "mean_of_heads")} | SCALED)
def test_it_is_saved_and_loaded(attention, tmp_path):
    tape = seen(Layer(attention), values=True)
    tape.save(tmp_path / "tape.safetensors")
    loaded = Tape.load(tmp_path / "tape.safetensors")
    assert loaded.changed == tape.changed
    assert repr(loaded) == repr(tape)
    assert torch.equal(loaded[0].dense(), tape[0].dense())
    assert loaded.select("*").changed == tape.changed


@each({"mixed": DENSE["talking_heads"], "gated": SCALED["query gate"]})
def test_the_options_of_capture_hold_for_it(attention, tmp_path):
    layer = Layer(attention)
    whole = seen(layer)[0]
    assert torch.equal(seen(layer, heads=[2, 0])[0].dense(), whole.dense()[:, [2, 0]])
    assert torch.equal(seen(layer, to="cpu")[0].dense(), whole.dense())
    assert torch.equal(seen(layer, to=tmp_path)[0].dense(), whole.dense())
    kept = seen(layer, keep=["received", "max"])
    assert torch.equal(kept[0].received(), whole.received())
    assert kept.changed == seen(layer).changed
    with pytest.raises(MemoryError, match="more than budget='1KB'"):
        seen(layer, budget="1KB")


def test_dense_weights_of_some_size_are_warned_of_once_with_their_size():
    model = nn.Sequential(*(Layer(after(lambda layer, A, q, k: A + 0.1)) for _ in range(2)))
    model[0].register_forward_hook(lambda module, args, out: out.transpose(1, 2).flatten(2))
    told = r"^0, 1 changed the weights after the softmax \(added to\)\..* queries x keys: 2.16 MB$"
    with torch.no_grad(), pytest.warns(CaptureWarning, match=told) as warned, capture(model):
        model(torch.randn(1, 300, DIM))
    assert len(warned) == 1


def test_dropout_in_training_is_left_out_as_ever():
    layer = Layer(after(lambda layer, A, q, k: layer.dropout(A * layer.gate.view(-1, 1, 1)))).train()
    before = []
    layer.dropout.register_forward_pre_hook(lambda module, args: before.append(args[0]))
    with torch.no_grad(), capture(layer) as tape:
        layer(torch.randn(B, N, DIM))
    torch.testing.assert_close(tape[0].dense(), before[0])
    assert tape.changed == {"": "scaled"}


def test_dropout_before_another_change_is_part_of_the_weights():
    layer = Layer(after(lambda layer, A, q, k: layer.conv(layer.dropout(A)))).train()
    with torch.no_grad(), capture(layer) as tape:
        layer(torch.randn(B, N, DIM))
    torch.testing.assert_close(tape[0].dense(), layer.found)
    assert tape.changed == {"": "dropped out, heads mixed"}


@each({"mixed": DENSE["talking_heads"], "gated": SCALED["query gate"], "averaged": DENSE["mean_of_heads"]})
def test_its_heads_are_ablated(attention):
    layer, x = Layer(attention).eval(), torch.randn(B, N, DIM)
    with torch.no_grad(), ablate(layer, {"": [0]}):
        out = layer(x)
    with torch.no_grad():
        plain = layer(x)
    heads = (lambda y: y) if out.ndim == 4 else (lambda y: y[:, None])
    assert not heads(out)[:, 0].any()
    assert torch.equal(heads(out)[:, 1:], heads(plain)[:, 1:])


def test_weights_that_were_averaged_before_are_not_recorded_again():
    def attention(layer, q, k, v):
        A = softmax(q, k)
        return A @ v + (A * layer.to_gate(q)) @ v, A

    layer = Layer(attention)
    tape = seen(layer)
    assert len(tape) == 1
    assert tape.changed == {}
    torch.testing.assert_close(tape[0].dense(), layer.found)


def test_a_linear_map_over_as_many_heads_as_tokens_is_no_attention():
    def attention(layer, q, k, v):
        A = softmax(q[:, :, :H], k[:, :, :H])
        A = (A.movedim(1, -1) @ torch.randn(H, H, dtype=q.dtype)).movedim(-1, 1)
        return A @ v[:, :, :H], A

    layer = Layer(attention)
    torch.testing.assert_close(seen(layer)[0].dense(), layer.found)


def test_rows_of_another_layout_than_the_values_are_not_taken_for_keys():
    x = torch.zeros(B, 5, 7)
    assert is_over_keys(x, 0, (5, 7), torch.zeros(B, 7, 2), [torch.zeros(B, 7, 2)])
    assert is_over_keys(x, 1, (5, 7), torch.zeros(B, 5, 2), [torch.zeros(B, 5, 2)])
    assert not is_over_keys(x.movedim(0, -1), 0, (5, 7), torch.zeros(B, 2), [torch.zeros(B, 2)])
    cube = torch.zeros(7, 7, 7)
    assert not is_over_keys(cube, 0, (7, 7), torch.zeros(7, 7), [torch.zeros(7, 7)])


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "told"),
    [
        ("mul", (), {}, "scaled"),
        ("view", (), {}, ""),
        ("dropout", (None, 0.1, True), {}, "dropped out"),
        ("dropout", (None, 0.1, False), {}, ""),
        ("dropout", (None,), {"p": 0.0}, ""),
        ("cumsum", (), {}, "cumsum"),
    ],
)
def test_functions_are_described_in_words(name, args, kwargs, told):
    assert describe(name, args, kwargs) == told
    assert name != "dropout" or is_active_dropout(args, kwargs) == bool(told)


def test_tensors_are_tracked_weakly_until_their_weights_are_recorded():
    final, averaged, x = FinalWeights(), [], torch.rand(2, 5, 7)
    final.add(x, Descent((5, 7), (averaged,)))
    y = x * 2
    final.follow("mul", (x, 2), {}, y, final.get)
    assert final.get(y) == Descent((5, 7), (averaged,), ("scaled",))
    del y
    assert len(final.held) == 1
    averaged.append(True)
    assert final.get(x) is None
    final.forget_recorded()
    assert not final.held
