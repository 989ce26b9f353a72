"""flash_attn: masks, windows, slopes, packed sequences and KV caches are read from its arguments."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tests.lens.fake_kernels as fake
from regard.lens import ablate, capture, importance
from tests.lens.kernel_layers import (
    HEADS,
    SLOPES,
    WIDTH,
    Held,
    assert_not_recorded,
    assert_shows,
    capture_one,
    inputs,
    side_by_side,
)

CASES = {
    "everything": ({}, None),
    "causal": ({"causal": True}, "Causal()"),
    "a window": ({"window_size": (2, 1)}, "Window(before=2, after=1)"),
    "an even window": ({"window_size": (2, 2)}, "Window(3)"),
    "no end before": ({"window_size": (-1, 1)}, None),
    "no end after": ({"window_size": (1, -1)}, None),
    "looking back": ({"window_size": (2, 0)}, "Causal() & Window(3)"),
    "causal in a window": ({"causal": True, "window_size": (2, 2)}, "Causal() & Window(3)"),
    "a cap": ({"softcap": 1.5}, None),
    "a scale": ({"softmax_scale": 0.7, "causal": True}, "Causal()"),
    "alibi": ({"alibi_slopes": SLOPES}, None),
    "alibi of each text": ({"alibi_slopes": torch.stack((SLOPES, SLOPES.flip(0))), "causal": True}, "Causal()"),
    "alibi of each text, all alike": ({"alibi_slopes": SLOPES.expand(2, -1)}, None),
    "all of it": ({"causal": True, "window_size": (3, 0), "softcap": 2.0, "alibi_slopes": SLOPES}, None),
}


@pytest.mark.parametrize("lengths", [(7, 7), (5, 9), (9, 5), (1, 6)])
@pytest.mark.parametrize("case", CASES)
def test_masks_scales_caps_and_slopes_are_read(flash, case, lengths):
    given, mask = CASES[case]
    q, k, v = inputs(*lengths, groups=2)
    A, out = capture_one(Held(flash.flash_attn_func, **given), q, k, v)
    assert_shows(A, flash.flash_attn_func(q, k, v, **given, return_attn_probs=True)[2])
    torch.testing.assert_close((A @ v.transpose(1, 2)).transpose(1, 2), out, rtol=1e-6, atol=1e-6)
    assert mask is None or repr(A.call.mask) == mask
    assert A.call.k.shape[1] == 2


@pytest.mark.parametrize("name", ["flash_attn_qkvpacked_func", "flash_attn_kvpacked_func"])
def test_packed_queries_keys_and_values_are_recorded_once(flash, name):
    q, k, v = inputs()
    args = (torch.stack((q, k, v), 2),) if "qkv" in name else (q, torch.stack((k, v), 2))
    A, _ = capture_one(Held(getattr(flash, name), causal=True), *args)
    assert_shows(A, flash.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[2])


PACKED = {
    "of their lengths": ((3, 1, 5), (3, 1, 5)),
    "one": ((6,), (6,)),
    "one that goes on": ((2,), (7,)),
    "that go on": ((2, 1, 3), (4, 1, 6)),
    "with more queries than keys": ((4, 2, 0, 3), (2, 5, 1, 3)),
}


OF_TEXTS = {
    "everything": {},
    "causal": {"causal": True},
    "a window": {"window_size": (2, 1)},
    "no end before": {"window_size": (-1, 0)},
    "no end after": {"window_size": (1, -1)},
    "alibi": {"alibi_slopes": SLOPES, "causal": True},
    "alibi of each": {"alibi_slopes": SLOPES, "softcap": 2.0},
}


@pytest.mark.parametrize("lengths", PACKED)
@pytest.mark.parametrize("case", OF_TEXTS)
def test_packed_sequences_see_their_own_keys(flash, case, lengths):
    given = dict(OF_TEXTS[case])
    if case == "alibi of each":
        given["alibi_slopes"] = torch.stack([SLOPES.roll(n) for n in range(len(PACKED[lengths][0]))])
    args = side_by_side(*PACKED[lengths], groups=2)
    A, _ = capture_one(Held(flash.flash_attn_varlen_func, **given), *args)
    assert_shows(A, flash.flash_attn_varlen_func(*args, **given, return_attn_probs=True)[2])
    terms = [x for x in (A.call.mask, A.call.bias) if x is not None]
    assert sum(x.numel() for term in terms for x in term.tensors()) <= (HEADS + 2) * (len(args[0]) + len(args[1]))


@pytest.mark.parametrize("name", ["flash_attn_varlen_qkvpacked_func", "flash_attn_varlen_kvpacked_func"])
def test_packed_tensors_of_packed_sequences_are_recorded_once(flash, name):
    q, k, v, starts, key_starts, most, most_keys = side_by_side((3, 1, 5), (3, 1, 5))
    args = (torch.stack((q, k, v), 1), starts, most)
    if "qkv" not in name:
        args = (q, torch.stack((k, v), 1), starts, key_starts, most, most_keys)
    A, _ = capture_one(Held(getattr(flash, name), causal=True), *args)
    want = flash.flash_attn_varlen_func(
        q, k, v, starts, key_starts, most, most_keys, causal=True, return_attn_probs=True
    )
    assert_shows(A, want[2])


def test_the_third_version_is_recorded(flash, third):
    q, k, v = inputs(5, 9)
    A, _ = capture_one(Held(third.flash_attn_func, causal=True, window_size=(3, 0)), q, k, v)
    assert_shows(A, flash.flash_attn_func(q, k, v, causal=True, window_size=(3, 0), return_attn_probs=True)[2])
    args = side_by_side((2, 3), (4, 3))
    A, _ = capture_one(Held(third.flash_attn_varlen_func, causal=True), *args)
    assert_shows(A, flash.flash_attn_varlen_func(*args, causal=True, return_attn_probs=True)[2])


OF_CUTE = {
    "everything": {},
    "causal": {"causal": True, "softmax_scale": 0.7},
    "a window": {"window_size": (2, 1), "softcap": 1.5},
    "no end before": {"window_size": (None, 0)},
    "no end after": {"window_size": (1, None)},
}


@pytest.mark.parametrize("case", OF_CUTE)
def test_the_fourth_version_is_recorded(flash, cute, case):
    given = OF_CUTE[case]
    known = {**given, "window_size": tuple(-1 if x is None else x for x in given.get("window_size", (-1, -1)))}
    q, k, v = inputs(5, 9, groups=2)
    A, out = capture_one(Held(cute.flash_attn_func, **given), q, k, v)
    assert_shows(A, flash.flash_attn_func(q, k, v, **known, return_attn_probs=True)[2])
    torch.testing.assert_close((A @ v.transpose(1, 2)).transpose(1, 2), out)
    args = side_by_side((2, 3), (4, 3))
    A, _ = capture_one(Held(cute.flash_attn_varlen_func, **given), *args)
    assert_shows(A, flash.flash_attn_varlen_func(*args, **known, return_attn_probs=True)[2])


def test_the_functions_of_the_fourth_version_take_batches_without_cu_seqlens(flash, cute):
    q, k, v = inputs(5, 9)
    A, _ = capture_one(Held(cute.flash_attn_varlen_func, causal=True), q, k, v)
    assert_shows(A, flash.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[2])


@pytest.mark.parametrize("given", [{}, {"causal": True}, {"window_size": (2, 1), "softcap": 1.5}])
def test_a_learnable_sink_is_a_normalizer(cute, given):
    q, k, v = inputs(6, 6, groups=2)
    sink = torch.linspace(-1, 2, HEADS)
    A, out = capture_one(Held(cute.interface.flash_attn_func, learnable_sink=sink, **given), q, k, v)
    assert torch.equal(A.call.normalize.sink, sink.to(q.dtype))
    torch.testing.assert_close((A @ v.transpose(1, 2)).transpose(1, 2), out)


@pytest.mark.parametrize("name", ["mask_mod", "score_mod", "aux_tensors"])
def test_functions_that_change_scores_are_named(cute, name):
    layer = Held(cute.flash_attn_func, **{name: [torch.ones(1)]})
    assert_not_recorded(layer, *inputs(), match=f"flash_attn_func argument {name} is not supported")


@pytest.mark.parametrize(
    ("name", "given", "match"),
    [
        ("flash_attn_func", {"qv": torch.ones(1)}, "argument qv is not supported"),
        ("flash_attn_func", {"attention_chunk": 4}, "argument attention_chunk is not supported"),
        ("flash_attn_varlen_func", {"seqused_k": torch.ones(1)}, "argument seqused_k is not supported"),
    ],
)
def test_unsupported_arguments_are_named(third, name, given, match):
    args = inputs() if name == "flash_attn_func" else side_by_side((3, 2), (3, 2))
    assert_not_recorded(Held(getattr(third, name), **given), *args, match=f"{name} {match}")


def test_cu_seqlens_that_leave_tokens_out_are_named(flash):
    q, k, v, *starts = side_by_side((3, 2), (3, 2))
    longer = [torch.cat((x, x[:1])) for x in (q, k, v)]
    assert_not_recorded(
        Held(flash.flash_attn_varlen_func),
        *longer,
        *starts,
        match=r"cu_seqlens \[0, 3, 5\], which do not cover its 6 tokens",
    )


@pytest.mark.parametrize("packed", [False, True])
def test_with_dropout_the_weights_before_it_are_recorded(flash, packed):
    function = flash.flash_attn_varlen_func if packed else flash.flash_attn_func
    args = side_by_side((3, 2), (3, 2)) if packed else inputs()
    layer = Held(function, causal=True, dropout_p=0.5)
    torch.manual_seed(3)
    want = layer(*args), torch.rand(1)
    torch.manual_seed(3)
    with capture(layer) as tape:
        got = layer(*args), torch.rand(1)  # nothing of what is drawn is used up
    assert all(map(torch.equal, got, want))
    assert_shows(tape[0], function(*args, causal=True, return_attn_probs=True)[2])


def cache(room, batch=2, heads=2):
    torch.manual_seed(1)
    return [torch.randn(batch, room, heads, WIDTH, dtype=torch.float64) for _ in range(2)]


@pytest.mark.parametrize("lengths", [4, torch.tensor([4, 4]), torch.tensor([2, 6]), None])
@pytest.mark.parametrize("case", ["everything", "causal", "a window", "alibi", "alibi of each text"])
def test_keys_of_a_cache_are_those_that_were_written(flash, case, lengths):
    given = CASES[case][0]
    q = inputs(3)[0]
    k, v = (x[:, :3, :2] for x in inputs(3)[1:])
    keys, values = cache(9)
    new = (k, v) if lengths is not None else (None, None)
    layer = Held(flash.flash_attn_with_kvcache, cache_seqlens=lengths, **given)
    with capture(layer, values=True) as tape:
        layer(q, keys, values, *new)
    n = 9 if lengths is None else 3 + torch.as_tensor(lengths).expand(2)
    for b, count in enumerate(torch.as_tensor(n).expand(2).tolist()):
        slopes = given.get("alibi_slopes")
        own = dict(given) if slopes is None or slopes.ndim == 1 else {**given, "alibi_slopes": slopes[b]}
        one = q[b : b + 1], keys[b : b + 1, :count], values[b : b + 1, :count]
        A = tape[0].select(batch=b)[:]
        assert_shows(A[..., :count], fake.flash_attn_func(*one, **own, return_attn_probs=True)[2])
        assert not A[..., count:].any()


def test_a_cache_that_is_written_to_again_leaves_the_tape_as_it_was(flash):
    q, k, v = inputs(3, 3, groups=2)
    keys, values = cache(3)
    layer = Held(flash.flash_attn_with_kvcache, causal=True, cache_seqlens=0)
    with capture(layer) as tape:
        layer(q, keys, values, k, v)
        keys.data.zero_()
    assert_shows(tape[0], fake.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[2])


def test_steps_with_a_kv_cache_join(flash):
    q, k, v = inputs(6, 6, groups=2)
    keys, values = cache(8)
    layer = Held(flash.flash_attn_with_kvcache, causal=True)
    with capture(layer) as tape:
        for start, stop in ((0, 4), (4, 5), (5, 6)):
            layer.given["cache_seqlens"] = start
            layer(q[:, start:stop], keys, values, k[:, start:stop], v[:, start:stop])
    assert len(tape) == 1
    assert_shows(tape[0], fake.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[2])


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"rotary_cos": torch.ones(9, 4)}, "argument rotary_cos is not supported"),
        ({"block_table": torch.zeros(2, 1)}, "argument block_table is not supported"),
        ({"cache_seqlens": 12}, "got a cache for 2 sequences of 9 keys, and queries of 2 sequences of up to 12 keys"),
    ],
)
def test_unsupported_arguments_of_a_kv_cache_are_named(flash, given, match):
    assert_not_recorded(Held(flash.flash_attn_with_kvcache, **given), inputs(3)[0], *cache(9), match=match)


def test_a_capture_of_an_ablated_model_shows_the_weights_of_the_kernel(flash):
    layer, (q, k, v) = Held(flash.flash_attn_func, causal=True), inputs()
    with ablate(layer, {"": [1]}), capture(layer) as tape:
        out = layer(q, k, v)
    assert not out[:, :, 1].any()
    assert_shows(tape[0], flash.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[2])


class Whole(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call, self.out = call, nn.Linear(HEADS * WIDTH, 6, bias=False).double()

    def forward(self, q, k, v):
        return self.out(self.call(q, k, v, causal=True).flatten(2))


def test_values_projections_and_gradients_are_kept(flash):
    model, (q, k, v) = Whole(flash.flash_attn_func), [x.requires_grad_() for x in inputs()]
    with capture(model, values=True, gradients=True) as tape:
        model(q, k, v).sum().backward()
    extras = tape.extras("")
    assert torch.equal(extras.v, v.transpose(1, 2))
    assert torch.equal(extras.projection, model.out.weight)
    want = model.out.weight.sum(0).view(1, HEADS, 1, WIDTH).expand(2, -1, 7, -1)
    torch.testing.assert_close(extras.gradient, want)


def test_importance_is_output_times_gradient(flash):
    model, (q, k, v) = Whole(flash.flash_attn_func), [x.requires_grad_() for x in inputs()]
    with importance(model) as scores:
        model(q, k, v).sum().backward()
    out, grad = flash.flash_attn_func(q, k, v, causal=True), model.out.weight.sum(0).view(HEADS, WIDTH)
    torch.testing.assert_close(scores[""], (out * grad).sum(-1).abs().sum((0, 1)).detach())


def test_only_the_chosen_heads_and_layers_are_kept(flash):
    model = nn.ModuleDict({x: Held(flash.flash_attn_varlen_func, alibi_slopes=SLOPES) for x in ("one", "two")})
    args = side_by_side((2, 3), (4, 3))
    with capture(model, layers="two", heads=[1, 3]) as tape:
        for layer in model.values():
            layer(*args)
    assert list(tape) == [("two", 0)]
    assert_shows(
        tape[0], flash.flash_attn_varlen_func(*args, alibi_slopes=SLOPES, return_attn_probs=True)[2][:, [1, 3]]
    )
