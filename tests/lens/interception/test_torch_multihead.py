"""nn.MultiheadAttention: its tape holds the weights that it returns."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard import torch_internals
from regard.lens import CaptureWarning, capture
from regard.lens.interception.function_mode import AttentionMode
from regard.lens.interception.operator_watch import can_watch, set_watcher
from tests.lens.host_calls import calls_of
from tests.lens.sdpa_layers import B, D, H, N, assert_close, lower

MULTI = [
    pytest.param({}, {}, id="plain"),
    pytest.param({"bias": False}, {"need_weights": False}, id="no bias"),
    pytest.param({"kdim": 5, "vdim": 7}, {}, id="other widths"),
    pytest.param({"add_bias_kv": True, "add_zero_attn": True}, {}, id="added keys"),
    pytest.param({"batch_first": False}, {}, id="batch second"),
    pytest.param({}, {"attn_mask": ~lower(N, N)}, id="causal"),
    pytest.param({}, {"key_padding_mask": torch.arange(N) >= torch.tensor([[N], [4]])}, id="padding"),
    pytest.param(
        {}, {"attn_mask": ~lower(N, N), "key_padding_mask": torch.arange(N) >= torch.tensor([[N], [4]])}, id="both"
    ),
    pytest.param({"add_zero_attn": True}, {"attn_mask": torch.randn(B * H, N, N)}, id="numbers"),
]


@pytest.mark.parametrize(("made", "asked"), MULTI)
@pytest.mark.parametrize("training", [False, True])
def test_multi_head_attention_of_pytorch_shows_its_own_weights(made, asked, training):
    layer = nn.MultiheadAttention(D, H, **{"batch_first": True, **made}).train(training)
    widths = [D, made.get("kdim", D), made.get("vdim", D)]
    q, k, v = (torch.randn(B, N, width) for width in widths)
    if made.get("batch_first") is False:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    with torch.no_grad():
        out, truth = layer(q, k, v, average_attn_weights=False, **{**asked, "need_weights": True})
        with capture(layer) as tape:
            seen, _ = layer(q, k, v, **asked)
    assert_close(tape[0], truth.double())
    assert (seen - out).abs().max() < 1e-6


def test_boolean_masks_given_to_the_function_hide_where_true():
    class Direct(nn.MultiheadAttention):
        def forward(self, x, **masks):
            projections = self.in_proj_weight, self.in_proj_bias
            out = self.out_proj.weight, self.out_proj.bias
            given = *projections, None, None, False, 0.0, *out
            return F.multi_head_attention_forward(x, x, x, D, H, *given, average_attn_weights=False, **masks)

    layer, x = Direct(D, H), torch.randn(N, B, D)
    with torch.no_grad(), capture(layer) as tape:
        _, truth = layer(x, attn_mask=~lower(N, N), key_padding_mask=torch.arange(N) >= torch.tensor([[N], [4]]))
    assert repr(tape[0]._call.mask) == "Causal() & Padding((9, 4))"
    assert_close(tape[0], truth.double())


def test_multi_head_attention_takes_one_text_without_a_batch():
    layer, x = nn.MultiheadAttention(D, H), torch.randn(N, D)
    with torch.no_grad(), capture(layer) as tape:
        _, truth = layer(x, x, x, average_attn_weights=False)
    assert_close(tape[0], truth[None].double())


def test_a_multihead_attention_is_checked_if_other_code_replaced_sdpa(monkeypatch):
    sdpa, layer, x = F.scaled_dot_product_attention, nn.MultiheadAttention(12, 3), torch.randn(7, 2, 12)

    def run():
        return layer(x, x, x, need_weights=False)

    with capture(layer) as truth:
        run()
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **given: sdpa(*args, **given))
    with capture(layer) as tape:
        run()
    torch.testing.assert_close(tape[0].dense(), truth[0].dense())
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, *args, **given: sdpa(3 * q, *args, **given))
    with pytest.raises(ValueError, match=r"other code has replaced F\.scaled_dot"), capture(layer):
        run()


@pytest.mark.parametrize("asked", [{}, {"src_key_padding_mask": torch.arange(N) >= torch.tensor([[N], [4]])}])
def test_layers_of_an_encoder_are_recorded_from_the_inputs_of_the_kernel(asked):
    layer = nn.TransformerEncoderLayer(D, H, 2 * D, dropout=0.0, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval(), torch.randn(B, N, D)
    with torch.no_grad():
        with capture(model) as tape:
            out = model(x, **asked)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            assert torch.equal(out, model(x, **asked))
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
        for n, each in enumerate(model.layers):
            hidden = asked.get("src_key_padding_mask")
            attend = each.self_attn
            _, A = attend(x, x, x, key_padding_mask=hidden, average_attn_weights=False)
            assert_close(tape[n], A.double())
            x = each(x, src_key_padding_mask=hidden)


def small_encoder(layers=3):
    layer = nn.TransformerEncoderLayer(D, H, 2 * D, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval().requires_grad_(False)


@pytest.mark.skipif(not can_watch(), reason="this version of PyTorch lets no operators be watched")
def test_an_attention_without_masks_is_read_from_its_kernel_alone(monkeypatch):
    model, x = small_encoder(), torch.randn(B, N, D)
    with capture(model) as truth:
        model(x, mask=torch.zeros(N, N))
    monkeypatch.setattr(AttentionMode, "_multi_head", None)
    for options in ({}, {"heads": [1]}, {"keep": ["entropy"]}):
        with capture(model, **options) as tape:
            model(x)
        assert tape.layers == truth.layers
        for name in truth.layers:
            A, found = truth[name].dense(), tape[name]
            if "keep" in options:
                torch.testing.assert_close(found.entropy(), torch.special.entr(A).sum(-1))
            else:
                torch.testing.assert_close(found.dense(), A[:, options.get("heads", slice(None))])


@pytest.mark.skipif(not can_watch(), reason="this version of PyTorch lets no operators be watched")
def test_an_attention_that_does_not_call_its_kernel_is_named(monkeypatch):
    model, x = small_encoder(), torch.randn(B, N, D)
    begin = AttentionMode._watch_multi_head

    def unwatched(self, module, *args, **kwargs):
        is_watched = begin(self, module, *args, **kwargs)
        if module is model.layers[1].self_attn:
            set_watcher(None)
        return is_watched

    monkeypatch.setattr(AttentionMode, "_watch_multi_head", unwatched)
    with pytest.warns(CaptureWarning, match="ran otherwise"), capture(model) as tape:
        model(x)
    assert tape.layers == ["layers.0.self_attn", "layers.2.self_attn"]
    assert [each.layer for each in tape.unseen] == ["layers.1.self_attn"]
    assert set_watcher(None) is None


@pytest.mark.skipif(not can_watch(), reason="this version of PyTorch lets no operators be watched")
def test_a_watched_encoder_takes_few_calls_of_the_host():
    added, x = [], torch.randn(1, N, D)
    for layers in (2, 6):
        model = small_encoder(layers)

        def captured(model=model):
            with capture(model) as tape:
                model(x)
            assert len(tape.layers) == len(model.layers)

        def plain(model=model):
            torch.backends.mha.set_fastpath_enabled(False)
            try:
                model(x)
            finally:
                torch.backends.mha.set_fastpath_enabled(True)

        captured(), captured()
        added.append(calls_of(captured) - calls_of(plain))
    assert added[1] - added[0] <= 4 * 310


def test_functions_of_a_layer_of_pytorch_run_without_a_mode():
    stacks = []

    def activation(x):
        stacks.append(len(torch_internals.function_mode_stack()))
        return F.relu(x)

    class Own(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)[..., :D]

    layer = nn.TransformerEncoderLayer(D, H, 2 * D, activation=activation, batch_first=True)
    layer.norm2 = Own()  # another part of the layer is seen as before
    model = nn.Sequential(layer, nn.MultiheadAttention(D, H, batch_first=True)).eval()
    x = torch.randn(B, N, D)
    with torch.no_grad(), capture(model) as tape:
        y = model[0](x)
        model[1](y, y, y)
    assert stacks == [0]
    assert set(tape.layers) == {"0.self_attn", "0.norm2", "1"}
    assert torch_internals.function_mode_stack() == []


def test_an_error_in_a_layer_of_pytorch_leaves_no_mode():
    def activation(x):
        raise RuntimeError("no activation")

    layer = nn.TransformerEncoderLayer(D, H, 2 * D, activation=activation, batch_first=True)
    model = nn.Sequential(layer).eval()
    with pytest.raises(RuntimeError, match="no activation"), torch.no_grad(), capture(model):
        model(torch.randn(B, N, D))
    assert torch_internals.function_mode_stack() == []
