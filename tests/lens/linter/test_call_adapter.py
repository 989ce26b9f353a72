"""CallAdapter finds the tokens, the layout, the width and the masks of a call by the signature and by trying."""

import pytest
import torch
from torch import nn

from regard.lens.linter.call_adapter import CallAdapter, CannotCall


class Layer(nn.Module):
    """The order of a well-known tutorial, with masks."""

    def __init__(self):
        super().__init__()
        self.embed_size = 12
        self.linear = nn.Linear(12, 12)

    def forward(self, values, keys, query, mask):
        return self.linear(query + 2 * keys + 3 * values)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(30, 8, padding_idx=0)

    def forward(self, ids, attention_mask=None, past_key_values=None):
        return {"loss": torch.zeros(()), "logits": self.table(ids)}


class Cross(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.batch_first = False

    def forward(self, tgt, memory, memory_key_padding_mask=None):
        return self.attention(tgt, memory, memory, key_padding_mask=memory_key_padding_mask)[0]


def test_tokens_masks_and_caches_are_found_by_their_names():
    adapter = CallAdapter(lambda q, k, v, mask=None: q + k + v)
    assert adapter.main == ("q", "k", "v")
    assert adapter.masks == ["mask"]
    reader = CallAdapter(Reader())
    assert (reader.main, reader.masks, reader.caches) == (("ids",), ["attention_mask"], ["past_key_values"])
    cross = CallAdapter(Cross())
    assert (cross.main, cross.context) == (("tgt",), ("memory",))


def test_a_required_mask_is_passed_as_none():
    adapter = CallAdapter(Layer())
    assert adapter.main == ("query", "keys", "values")
    assert adapter.run(adapter.tokens(7)).shape == (3, 7, 12)


def test_a_required_mask_that_may_not_be_none_shows_everything():
    adapter = CallAdapter(lambda x, mask: x.masked_fill(mask[..., :1] == 0, 5.0), dim=6)
    x = adapter.tokens(7)
    assert torch.equal(adapter.run(x), x)


def test_the_kind_of_input_and_its_width_are_found():
    reader = CallAdapter(Reader())
    assert (reader.kind, reader.tokens(7).dtype) == ("ids", torch.int64)
    assert 0 not in reader.tokens(50)
    assert reader.run(reader.tokens(7)).shape == (3, 7, 8)
    layer = CallAdapter(nn.Sequential(nn.LayerNorm(10), nn.Linear(10, 10)))
    assert (layer.kind, layer.dim, layer.dtype) == ("vectors", 10, torch.float64)


def test_outputs_are_batch_first_whatever_the_module_reads():
    cross = CallAdapter(Cross())
    assert cross.axis == 0
    assert cross.run(cross.tokens(7)).shape == (3, 7, 8)
    split = CallAdapter(lambda q, k, v: q + k + v)
    assert split.run(split.tokens(7)).shape == (3, 7, 24)


@pytest.mark.parametrize("make", [Reader, Cross])
def test_one_token_is_changed_and_nothing_else(make):
    adapter = CallAdapter(make())
    x = adapter.tokens(7)
    changed = (adapter.change(x, 2) != x).reshape(3, 7, -1).any(-1)
    assert changed[:, 2].all()
    assert changed.sum() == 3
    only = (adapter.change(x, 2, text=slice(1, 2)) != x).reshape(3, 7, -1).any(-1)
    assert only.nonzero().tolist() == [[1, 2]]


def test_modules_that_do_not_run_in_float64_run_in_their_own_format():
    layer = nn.Linear(6, 6)
    layer.forward = lambda x: nn.functional.linear(x, torch.ones(6, 6))
    assert CallAdapter(layer).dtype == torch.float32


def test_what_cannot_be_called_is_refused_with_what_was_tried():
    with pytest.raises(CannotCall, match=r"Conv1d could not be called: .*Pass an example input"):
        CallAdapter(nn.Conv1d(3, 3, 3))


class Step(nn.Module):
    """One step of a decoder: a state asks all outputs of the encoder."""

    def __init__(self, axis=-1):
        super().__init__()
        self.linear, self.axis = nn.Linear(12, 12), axis

    def forward(self, decoder_state, encoder_outputs, mask=None):
        scores = (self.linear(encoder_outputs) @ decoder_state[..., None])[..., 0]
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return (scores.softmax(self.axis)[:, None] @ encoder_outputs)[:, 0]


def test_a_layer_whose_query_is_one_vector_gets_the_first_token_as_its_query():
    adapter = CallAdapter(Step())
    assert (adapter.main, adapter.has_one_query) == (("decoder_state", "encoder_outputs"), True)
    x = adapter.tokens(7)
    torch.testing.assert_close(adapter.run(x), adapter.module(x[:, 0], x))
    assert CallAdapter(lambda query, keys: keys * query[:, None], dim=6).has_one_query
    assert not CallAdapter(lambda query, keys: query + keys.mean(1, keepdim=True), dim=6).has_one_query


def test_examples_are_arguments_in_the_order_of_the_signature():
    q, k, v = torch.randn(3, 2, 7, 12)
    adapter = CallAdapter(lambda q, k, v, mask=None, scale=1.0: (q + k + v) * scale, (q, k, v, None, 2.0))
    assert adapter.fixed == {"mask": None, "scale": 2.0}


class Listener(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.table = nn.Linear(8, 6), nn.Embedding(30, 6)

    def forward(self, input_features, decoder_input_ids=None):
        heard = self.linear(input_features.mT)  # b mels n -> b n d
        if decoder_input_ids is None:
            return heard
        return self.table(decoder_input_ids) + heard.mean(1, keepdim=True)


def test_audio_needs_an_example_of_its_size():
    def heard(input_values):
        return input_values.unflatten(1, (-1, 4))

    with pytest.raises(CannotCall, match=r"reads audio as input_values.*; pass an example, check\(model, input_values"):
        CallAdapter(heard)
    adapter = CallAdapter(heard, (torch.randn(1, 40),))
    assert (adapter.signal, adapter.run(adapter.tokens(7)).shape) == ("audio", (adapter.batch, 10, 4))


def test_a_decoder_of_audio_is_checked_by_its_tokens():
    adapter = CallAdapter(Listener(), (torch.randn(1, 8, 40),))
    assert adapter.main == ("decoder_input_ids",)
    assert adapter.run(adapter.tokens(7)).shape == (3, 7, 6)
