"""Kernels of flash_attn and xformers: seen where a layer's code calls them, and believed where their output agrees.

The libraries run on GPUs alone. Here stand-ins have their names, signatures and, as `standins` defines it, meaning.
"""

from __future__ import annotations

import copy
import functools
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

import regard as R
import tests.lens.fake_kernels as S
from regard import weights
from regard.lens import Tape, ablate, capture, importance
from regard.lens.interception import intercept as interception
from regard.lens.terms.varlen import Sloped

HEADS, WIDTH = 4, 8
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def module(name, **functions):
    made = ModuleType(name)
    vars(made).update(functions)
    return made


@pytest.fixture
def flash(monkeypatch):
    """flash_attn, as if it were installed and imported."""
    functions = {function.__name__: function for function in S.FLASH}
    inner = module("flash_attn.flash_attn_interface", **functions)
    outer = module("flash_attn", **functions, flash_attn_interface=inner)
    monkeypatch.setitem(sys.modules, "flash_attn", outer)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", inner)
    return outer


@pytest.fixture
def third(monkeypatch):
    """The third version."""
    functions = {"flash_attn_func": S.third_flash_attn_func, "flash_attn_varlen_func": S.third_flash_attn_varlen_func}
    made = module("flash_attn_interface", **functions)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", made)
    return made


@pytest.fixture
def xformers(monkeypatch):
    """xformers.ops, as if it were installed and imported."""
    functions = {f.__name__: f for f in (S.memory_efficient_attention, S.memory_efficient_attention_partial)}
    fmha = module("xformers.ops.fmha", **functions)
    ops = module("xformers.ops", **functions, fmha=fmha)
    for name, made in (("xformers", module("xformers", ops=ops)), ("xformers.ops", ops), ("xformers.ops.fmha", fmha)):
        monkeypatch.setitem(sys.modules, name, made)
    return ops


class Held(nn.Module):
    """Calls what it holds on what it is called with."""

    def __init__(self, call, **given):
        super().__init__()
        self.call, self.given = call, given

    def forward(self, *args):
        return self.call(*args, **self.given)


def inputs(n=7, m=7, groups=HEADS, batch=2, dtype=torch.float64):
    """b i h d."""
    torch.manual_seed(0)
    sizes = ((n, HEADS), (m, groups), (m, groups))
    return [torch.randn(batch, length, heads, WIDTH, dtype=dtype) for length, heads in sizes]


def side_by_side(queries, keys, groups=HEADS):
    """i h d of several texts, and where they begin and the longest is."""
    torch.manual_seed(0)
    sizes = ((sum(queries), HEADS), (sum(keys), groups), (sum(keys), groups))
    tokens = [torch.randn(length, heads, WIDTH, dtype=torch.float64) for length, heads in sizes]
    starts = [torch.tensor([0, *lengths]).cumsum(0).to(torch.int32) for lengths in (queries, keys)]
    return (*tokens, *starts, max(queries), max(keys))


def looked(layer, *args):
    """The one entry of a tape of the layer, and what it returned, the same as without."""
    want = layer(*args)
    with capture(layer) as tape:
        got = layer(*args)
    got, want = (x if torch.is_tensor(x) else x[0] for x in (got, want))
    assert torch.equal(got, want)
    ((_, A),) = tape.items()
    return A, got


def same(A, want):
    """Keys behind the last query that nobody sees are not kept, as room of a cache is not."""
    torch.testing.assert_close(A[:], want[..., : A.shape[-1]], rtol=1e-6, atol=1e-6)
    assert not want[..., A.shape[-1] :].any()


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
def test_what_its_arguments_say_is_shown(flash, case, lengths):
    given, mask = CASES[case]
    q, k, v = inputs(*lengths, groups=2)
    A, out = looked(Held(flash.flash_attn_func, **given), q, k, v)
    same(A, flash.flash_attn_func(q, k, v, **given, return_attn_probs=True)[2])
    torch.testing.assert_close((A @ v.transpose(1, 2)).transpose(1, 2), out, rtol=1e-6, atol=1e-6)
    assert mask is None or repr(A.call.mask) == mask
    assert A.call.k.shape[1] == 2


@pytest.mark.parametrize(
    ("slopes", "kind"),
    [(SLOPES, R.Alibi), (SLOPES.expand(2, -1), R.Alibi), (torch.stack((SLOPES, SLOPES.flip(0))), Sloped)],
)
def test_slopes_are_a_term(flash, slopes, kind):
    A, _ = looked(Held(flash.flash_attn_func, alibi_slopes=slopes), *inputs())
    assert type(A.call.bias) is kind


def test_slopes_that_are_written_to_later_stay_as_they_were(flash):
    slopes, (q, k, v) = SLOPES.clone(), inputs()
    want = flash.flash_attn_func(q, k, v, alibi_slopes=slopes, return_attn_probs=True)[2]
    layer = Held(flash.flash_attn_func, alibi_slopes=slopes)
    with capture(layer) as tape:
        layer(q, k, v)
        slopes.zero_()
    same(tape[0], want)


@pytest.mark.parametrize("name", ["flash_attn_qkvpacked_func", "flash_attn_kvpacked_func"])
def test_those_that_take_them_in_one_tensor_are_seen_once(flash, name):
    q, k, v = inputs()
    args = (torch.stack((q, k, v), 2),) if "qkv" in name else (q, torch.stack((k, v), 2))
    A, _ = looked(Held(getattr(flash, name), causal=True), *args)
    same(A, flash.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[2])


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
def test_texts_side_by_side_see_their_own(flash, case, lengths):
    given = dict(OF_TEXTS[case])
    if case == "alibi of each":
        given["alibi_slopes"] = torch.stack([SLOPES.roll(n) for n in range(len(PACKED[lengths][0]))])
    args = side_by_side(*PACKED[lengths], groups=2)
    A, _ = looked(Held(flash.flash_attn_varlen_func, **given), *args)
    same(A, flash.flash_attn_varlen_func(*args, **given, return_attn_probs=True)[2])
    terms = [x for x in (A.call.mask, A.call.bias) if x is not None]
    assert sum(x.numel() for term in terms for x in term.tensors()) <= (HEADS + 2) * (len(args[0]) + len(args[1]))


def test_texts_side_by_side_are_documents(flash):
    A, _ = looked(Held(flash.flash_attn_varlen_func, causal=True), *side_by_side((3, 1, 5), (3, 1, 5)))
    assert repr(A.call.mask) == "Causal() & Documents(int64[9])"


@pytest.mark.parametrize("name", ["flash_attn_varlen_qkvpacked_func", "flash_attn_varlen_kvpacked_func"])
def test_texts_in_one_tensor_are_seen_once(flash, name):
    q, k, v, starts, key_starts, most, most_keys = side_by_side((3, 1, 5), (3, 1, 5))
    args = (torch.stack((q, k, v), 1), starts, most)
    if "qkv" not in name:
        args = (q, torch.stack((k, v), 1), starts, key_starts, most, most_keys)
    A, _ = looked(Held(getattr(flash, name), causal=True), *args)
    want = flash.flash_attn_varlen_func(
        q, k, v, starts, key_starts, most, most_keys, causal=True, return_attn_probs=True
    )
    same(A, want[2])


class Choosing(nn.Module):
    def forward(self, qkv, packed=True):
        import flash_attn

        if packed:
            return flash_attn.flash_attn_qkvpacked_func(qkv, causal=True)
        return flash_attn.flash_attn_func(*qkv.unbind(2), causal=True)


def test_a_kernel_that_calls_another_is_seen_once(flash):
    def through(qkv, causal=False):
        return flash.flash_attn_func(*qkv.unbind(2), causal=causal)

    flash.flash_attn_qkvpacked_func = through
    q, k, v = inputs()
    A, _ = looked(Choosing(), torch.stack((q, k, v), 2))
    same(A, S.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[2])


def test_it_may_return_more_than_its_output(flash):
    q, k, v = inputs()
    layer = Held(flash.flash_attn_func, return_attn_probs=True)
    with capture(layer) as tape:
        got = layer(q, k, v)
    assert len(got) == 3
    same(tape[0], got[2])


def test_the_third_version_is_seen(flash, third):
    q, k, v = inputs(5, 9)
    A, _ = looked(Held(third.flash_attn_func, causal=True, window_size=(3, 0)), q, k, v)
    same(A, flash.flash_attn_func(q, k, v, causal=True, window_size=(3, 0), return_attn_probs=True)[2])
    args = side_by_side((2, 3), (4, 3))
    A, _ = looked(Held(third.flash_attn_varlen_func, causal=True), *args)
    same(A, flash.flash_attn_varlen_func(*args, causal=True, return_attn_probs=True)[2])


def decorated(function):
    @functools.wraps(function)
    def call(q, k, v, **given):
        return function(q, k, v, **given)

    return call


def helper(q, k, v, **given):
    from flash_attn import flash_attn_func

    return flash_attn_func(q, k, v, **given)


class Importing(nn.Module):
    def forward(self, q, k, v):
        from flash_attn.flash_attn_interface import flash_attn_func as own

        return own(q, k, v, causal=True)


class OfModule(nn.Module):
    def forward(self, q, k, v):
        import flash_attn

        return flash_attn.flash_attn_func(q, k, v, causal=True)


class ByName(nn.Module):
    def forward(self, q, k, v):
        return sys.modules["flash_attn"].flash_attn_func(q, k, v, causal=True)


def globally():
    """A layer whose file imports the function."""
    file = module("a_model")
    exec(
        "from flash_attn import flash_attn_func\n"
        "from torch import nn\n"
        "class Layer(nn.Module):\n"
        "    def forward(self, q, k, v): return flash_attn_func(q, k, v, causal=True)",
        vars(file),
    )
    return file.Layer()


WAYS = {
    "an attribute": lambda f: Held(f.flash_attn_func, causal=True),
    "arguments fixed": lambda f: Held(functools.partial(f.flash_attn_func, causal=True)),
    "decorated": lambda f: Held(decorated(f.flash_attn_func), causal=True),
    "not to be compiled": lambda f: Held(torch.compiler.disable(f.flash_attn_func), causal=True),
    "imported by a function": lambda f: Held(helper, causal=True),
    "imported within": lambda f: Importing(),
    "of its module": lambda f: OfModule(),
    "of a module that is asked for by its name": lambda f: ByName(),
    "of its file": lambda f: globally(),
}


@pytest.mark.parametrize("way", WAYS)
def test_it_is_seen_however_it_is_called(flash, way):
    layer, (q, k, v) = WAYS[way](flash), inputs(5, 9)
    before = dict(vars(flash)), dict(vars(flash.flash_attn_interface)), dict(vars(layer))
    A, _ = looked(layer, q, k, v)
    same(A, S.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[2])
    assert (dict(vars(flash)), dict(vars(flash.flash_attn_interface)), dict(vars(layer))) == before


def both(model, args, x):
    model["one"](*args)
    model["two"](x, x, x)


def told(layer, *args, match):
    """The layer is told of; the one after it, so that a tape is not empty, is shown."""
    model, x = nn.ModuleDict({"one": layer, "two": nn.MultiheadAttention(WIDTH, 2)}), torch.randn(3, 1, WIDTH)
    with pytest.warns(UserWarning, match=match), capture(model) as tape:
        both(model, args, x)
    assert list(tape) == [("two", 0)]


OTHERWISE = r"one was not recorded: flash_attn_func did not return what its documented arguments give"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("given", [{"causal": True}, {"window_size": (2, 1)}, {"alibi_slopes": 8 * SLOPES}])
def test_one_that_means_something_else_is_told_of_and_not_shown(flash, given, dtype):
    flash.flash_attn_func = S.from_the_top
    told(Held(S.from_the_top, **given), *inputs(5, 9, dtype=dtype), match=OTHERWISE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [7, 63, 129])
def test_rounding_is_no_reason_to_doubt(flash, monkeypatch, n, dtype):
    def rounded(q, k, v, causal=False):
        s = torch.einsum("bihd,bjhd->bhij", q.float(), k.float()) * WIDTH**-0.5
        A = s.masked_fill(~torch.ones(n, n).tril().bool(), -torch.inf).softmax(-1).to(q.dtype)
        return torch.einsum("bhij,bjhe->bihe", A.float(), v.float()).to(q.dtype)

    flash.flash_attn_func = rounded
    q, k, v = inputs(n, n, dtype=dtype)
    A, _ = looked(Held(rounded, causal=True), q, k, v)
    assert repr(A.call.mask) == "Causal()"


@pytest.mark.parametrize("row", [0, 128])
def test_of_many_rows_the_first_and_the_last_are_looked_at(flash, row):
    def off(q, k, v):
        out = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
        return out.index_fill(1, torch.tensor([row]), 0.5)

    flash.flash_attn_func = off
    told(Held(off), *inputs(129, 129), match=OTHERWISE)


@pytest.mark.parametrize(
    ("name", "given", "match"),
    [
        ("flash_attn_func", {"qv": torch.ones(1)}, "argument qv is not supported"),
        ("flash_attn_func", {"attention_chunk": 4}, "argument attention_chunk is not supported"),
        ("flash_attn_varlen_func", {"seqused_k": torch.ones(1)}, "argument seqused_k is not supported"),
    ],
)
def test_arguments_that_are_not_understood_are_told_of(third, name, given, match):
    args = inputs() if name == "flash_attn_func" else side_by_side((3, 2), (3, 2))
    told(Held(getattr(third, name), **given), *args, match=f"{name} {match}")


def test_one_whose_arguments_are_others_is_told_of(flash):
    def later(q, k, v, window_size=0):
        return q

    flash.flash_attn_func = later
    told(
        Held(later, window_size=3),
        *inputs(),
        match="arguments of flash_attn_func differ from the documented",
    )


def test_one_that_returns_another_shape_is_told_of(flash):
    def wider(q, k, v):
        return torch.cat((v, v), -1)

    flash.flash_attn_func = wider
    told(Held(wider), *inputs(), match=OTHERWISE)


def test_texts_that_leave_tokens_out_are_told_of(flash):
    q, k, v, *starts = side_by_side((3, 2), (3, 2))
    longer = [torch.cat((x, x[:1])) for x in (q, k, v)]
    told(
        Held(flash.flash_attn_varlen_func),
        *longer,
        *starts,
        match=r"cu_seqlens \[0, 3, 5\], which do not cover its 6 tokens",
    )


def test_numbers_that_are_scaled_elsewhere_are_told_of(flash):
    def small(q, k, v):
        return q.to(torch.bfloat16)

    flash.flash_attn_func = small
    small_ones = [x.to(torch.float8_e4m3fn) for x in inputs()]
    told(Held(small), *small_ones, match=r"got tensors of torch\.float8_e4m3fn, which are not supported")


@pytest.mark.parametrize("packed", [False, True])
def test_with_dropout_the_weights_before_it_are_shown(flash, packed):
    function = flash.flash_attn_varlen_func if packed else flash.flash_attn_func
    args = side_by_side((3, 2), (3, 2)) if packed else inputs()
    layer = Held(function, causal=True, dropout_p=0.5)
    torch.manual_seed(3)
    want = layer(*args), torch.rand(1)
    torch.manual_seed(3)
    with capture(layer) as tape:
        got = layer(*args), torch.rand(1)  # nothing of what is drawn is used up
    assert all(map(torch.equal, got, want))
    same(tape[0], function(*args, causal=True, return_attn_probs=True)[2])


def test_with_dropout_it_is_looked_at_all_the_same(flash):
    flash.flash_attn_func = S.from_the_top
    told(Held(S.from_the_top, causal=True, dropout_p=0.5), *inputs(5, 9), match=OTHERWISE)


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
        same(A[..., :count], S.flash_attn_func(*one, **own, return_attn_probs=True)[2])
        assert not A[..., count:].any()


def test_a_cache_that_is_written_to_again_leaves_the_tape_as_it_was(flash):
    q, k, v = inputs(3, 3, groups=2)
    keys, values = cache(3)
    layer = Held(flash.flash_attn_with_kvcache, causal=True, cache_seqlens=0)
    with capture(layer) as tape:
        layer(q, keys, values, k, v)
        keys.data.zero_()
    same(tape[0], S.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[2])


def test_steps_with_a_cache_join(flash):
    q, k, v = inputs(6, 6, groups=2)
    keys, values = cache(8)
    layer = Held(flash.flash_attn_with_kvcache, causal=True)
    with capture(layer) as tape:
        for start, stop in ((0, 4), (4, 5), (5, 6)):
            layer.given["cache_seqlens"] = start
            layer(q[:, start:stop], keys, values, k[:, start:stop], v[:, start:stop])
    assert len(tape) == 1
    same(tape[0], S.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[2])


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"rotary_cos": torch.ones(9, 4)}, "argument rotary_cos is not supported"),
        ({"block_table": torch.zeros(2, 1)}, "argument block_table is not supported"),
        ({"cache_seqlens": 12}, "got a cache for 2 sequences of 9 keys, and queries of 2 sequences of up to 12 keys"),
    ],
)
def test_a_cache_that_is_read_in_other_ways_is_told_of(flash, given, match):
    told(Held(flash.flash_attn_with_kvcache, **given), inputs(3)[0], *cache(9), match=match)


LAYOUTS = {
    "flash_attn_func": lambda: inputs(),
    "flash_attn_varlen_func": lambda: side_by_side((3, 4), (3, 4)),
    "memory_efficient_attention": lambda: inputs(),
    "b i d": lambda: [x[:, :, 0] for x in inputs()],
    "b i g h d": lambda: [x.unflatten(2, (2, 2)) for x in inputs()],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_its_heads_are_switched_off(flash, xformers, layout):
    function = getattr(flash, layout, xformers.memory_efficient_attention)
    layer, args = Held(function), LAYOUTS[layout]()
    whole = layer(*args)
    off = [0] if layout == "b i d" else [1, 3]
    with ablate(layer, {"": off}):
        without = layer(*args)
    assert without.is_contiguous()  # a model may take a view of it
    heads, rest = (x[:, :, None] if layout == "b i d" else x for x in (whole, without))
    heads, rest = (x.flatten(2, 3) if layout == "b i g h d" else x for x in (heads, rest))
    kept = [h for h in range(heads.shape[-2]) if h not in off]
    assert torch.equal(rest[..., kept, :], heads[..., kept, :])
    assert not rest[..., off, :].any()
    assert torch.equal(layer(*args), whole)


def test_a_capture_of_an_ablated_model_shows_what_the_kernel_weighed(flash):
    layer, (q, k, v) = Held(flash.flash_attn_func, causal=True), inputs()
    with ablate(layer, {"": [1]}), capture(layer) as tape:
        out = layer(q, k, v)
    assert not out[:, :, 1].any()
    same(tape[0], flash.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[2])


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


def test_what_a_loss_leans_on_is_found(flash):
    model, (q, k, v) = Whole(flash.flash_attn_func), [x.requires_grad_() for x in inputs()]
    with importance(model) as scores:
        model(q, k, v).sum().backward()
    out, grad = flash.flash_attn_func(q, k, v, causal=True), model.out.weight.sum(0).view(HEADS, WIDTH)
    torch.testing.assert_close(scores[""], (out * grad).sum(-1).abs().sum((0, 1)).detach())


def test_a_saved_tape_holds_its_terms(flash, tmp_path):
    args = side_by_side((2, 1, 3), (4, 1, 6))
    given = {"causal": True, "alibi_slopes": torch.stack((SLOPES, SLOPES.flip(0), SLOPES))}
    layer = Held(flash.flash_attn_varlen_func, **given)
    with capture(layer) as tape:
        layer(*args)
    tape.save(tmp_path / "tape.safetensors")
    ((_, A),) = Tape.load(tmp_path / "tape.safetensors").items()
    same(A, flash.flash_attn_varlen_func(*args, **given, return_attn_probs=True)[2])


def test_some_heads_and_layers_alone_are_kept(flash):
    model = nn.ModuleDict({x: Held(flash.flash_attn_varlen_func, alibi_slopes=SLOPES) for x in ("one", "two")})
    args = side_by_side((2, 3), (4, 3))
    with capture(model, layers="two", heads=[1, 3]) as tape:
        for layer in model.values():
            layer(*args)
    assert list(tape) == [("two", 0)]
    same(tape[0], flash.flash_attn_varlen_func(*args, alibi_slopes=SLOPES, return_attn_probs=True)[2][:, [1, 3]])


def test_a_copy_within_a_capture_is_as_the_model_was(flash):
    layer = Held(flash.flash_attn_func)
    with capture(layer):
        layer(*inputs())
        copied = copy.deepcopy(layer)
    assert copied.call is S.flash_attn_func


def test_another_model_is_seen_while_one_is_watched(flash):
    one, other, args = OfModule(), Held(S.flash_attn_func), inputs()
    with capture(one) as outer:
        one(*args)
        with capture(other) as inner:
            other(*args)
        other(*args)
    assert len(outer) == len(inner) == 1
    assert flash.flash_attn_func is other.call is S.flash_attn_func


def test_sloped_must_fit():
    q = k = torch.randn(2, HEADS, 5, WIDTH)
    with pytest.raises(TypeError, match="Sloped slopes must be a tensor"):
        Sloped(1.0, torch.zeros(5))
    with pytest.raises(TypeError, match="Sloped center must be a tensor"):
        Sloped(torch.ones(1), 0)
    with pytest.raises(ValueError, match="Sloped slopes must broadcast"):
        weights(q, k, bias=Sloped(torch.ones(3, 1), torch.arange(5)))
    with pytest.raises(ValueError, match="Sloped center must broadcast"):
        weights(q, k, bias=Sloped(torch.ones(HEADS, 1), torch.arange(4)))
    torch.testing.assert_close(
        weights(q, k, bias=Sloped(SLOPES[:, None], torch.arange(5)))[:],
        weights(q, k, bias=R.Alibi(slopes=SLOPES))[:],
    )


def test_what_is_not_imported_is_not_looked_for(monkeypatch):
    found = []
    monkeypatch.setattr(interception, "patched", lambda mode, parts, kernels: found.extend(kernels))
    interception.patched_kernels(SimpleNamespace(), [Held(None)])
    assert [kernel.function.__name__ for kernel in found] == ["flex_attention"]


@pytest.fixture
def llama():
    """Imported before there are stand-ins, which it would look for."""
    return pytest.importorskip("transformers.models.llama.modeling_llama")


def test_through_the_interface_of_transformers_it_is_seen_once(llama, flash):
    import transformers

    def by_flash(module, q, k, v, mask, scaling=None, **kwargs):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return flash.flash_attn_func(q, k, v, softmax_scale=scaling, causal=True), None

    transformers.AttentionInterface.register("standing_in", by_flash)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=HEADS, vocab_size=9
    )
    config._attn_implementation = "standing_in"

    class Around(nn.Module):
        """Attends once more, by code of its own."""

        def __init__(self):
            super().__init__()
            self.inner = llama.LlamaModel(config).eval()

        def forward(self, ids):
            from flash_attn import flash_attn_func

            x = self.inner(ids).last_hidden_state.unflatten(-1, (HEADS, WIDTH))
            return flash_attn_func(x, x, x)

    model = Around()
    with torch.no_grad(), capture(model) as tape:
        model(torch.tensor([[1, 2, 3]]))
    assert list(tape) == [("inner.layers.0.self_attn", 0), ("", 0)]


def bias_of(shape):
    torch.manual_seed(5)
    return torch.randn(*shape, dtype=torch.float64)


BIASES = {
    "nothing": (None, None),
    "causal": (S.LowerTriangularMask(), "Causal()"),
    "causal at the end": (S.LowerTriangularFromBottomRightMask(), "Causal()"),
    "causal in a window": (S.LowerTriangularFromBottomRightLocalAttentionMask(3), "Causal() & Window(3)"),
    "a window": (S.LocalAttentionFromBottomRightMask(2, 1), "Window(before=2, after=1)"),
    "causal and numbers": (S.LowerTriangularMaskWithTensorBias(bias_of((2, HEADS, 5, 9))), "Causal()"),
    "a tensor": (bias_of((2, HEADS, 5, 9)), None),
    "another class": (S.Checkered(), "Packed(uint8[1, 1, 5, 2], 9)"),
}


def softmaxed(q, k, bias, scale=None):
    """b h i j of b i h d, by the numbers that are added."""
    added = bias if torch.is_tensor(bias) else torch.zeros(1)
    if bias is not None and not torch.is_tensor(bias):
        added = bias.materialize((len(q), q.shape[2], q.shape[1], k.shape[1]))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (WIDTH**-0.5 if scale is None else scale) + added
    return s.softmax(-1).nan_to_num(0.0)


@pytest.mark.parametrize("case", BIASES)
def test_what_hides_keys_in_xformers_is_shown(xformers, case):
    bias, mask = BIASES[case]
    q, k, v = inputs(5, 9)
    A, out = looked(Held(xformers.memory_efficient_attention, attn_bias=bias, scale=0.6), q, k, v)
    same(A, softmaxed(q, k, bias, 0.6))
    made = A @ v[:, : A.shape[-1]].transpose(1, 2)
    torch.testing.assert_close(made.transpose(1, 2), out, rtol=1e-6, atol=1e-6)
    assert mask is None or repr(A.call.mask) == mask


BLOCKS = {
    "texts": S.BlockDiagonalMask,
    "causal": S.BlockDiagonalCausalMask,
    "causal at the end": S.BlockDiagonalCausalFromBottomRightMask,
    "causal in a window": functools.partial(S.BlockDiagonalCausalLocalAttentionMask.of, _window_size=2),
    "causal in a window at the end": functools.partial(
        S.BlockDiagonalCausalLocalAttentionFromBottomRightMask.of, _window_size=2
    ),
}


@pytest.mark.parametrize("lengths", [((3, 1, 5), (3, 1, 5)), ((2, 1, 3), (4, 1, 6)), ((3,), (5,)), ((5,), (3,))])
@pytest.mark.parametrize("case", BLOCKS)
def test_blocks_of_xformers_are_texts_side_by_side(xformers, case, lengths):
    make = BLOCKS[case]
    bias = make(*lengths) if isinstance(make, functools.partial) else make.of(*lengths)
    q, k, v = inputs(sum(lengths[0]), sum(lengths[1]), batch=1)
    A, _ = looked(Held(xformers.memory_efficient_attention, attn_bias=bias), q, k, v)
    same(A, softmaxed(q, k, bias))
    tensors = A.call.mask.tensors() if A.call.mask is not None else ()
    assert sum(x.numel() for x in tensors) <= 2 * sum(map(sum, lengths))


def test_one_head_and_grouped_heads_of_xformers_are_seen(xformers):
    q, k, v = inputs(5, 9)
    bias = bias_of((2, HEADS, 5, 9))
    one = [x[:, :, 0] for x in (q, k, v)]
    A, _ = looked(Held(xformers.memory_efficient_attention, attn_bias=bias[:, 0]), *one)
    same(A, softmaxed(q, k, bias)[:, :1])
    grouped = [x.unflatten(2, (2, 2)) for x in (q, k, v)]
    A, _ = looked(Held(xformers.memory_efficient_attention, attn_bias=bias.unflatten(1, (2, 2))), *grouped)
    same(A, softmaxed(q, k, bias))
    shared = [x[:, :, :2, None].expand(-1, -1, -1, 2, -1) for x in (k, v)]
    A, _ = looked(Held(xformers.memory_efficient_attention), grouped[0], *shared)
    same(A, softmaxed(q, shared[0].flatten(2, 3), None))
    assert A.call.k.shape[1] == 2


def test_with_dropout_what_xformers_weighs_before_it_is_shown(xformers):
    q, k, v = inputs()
    layer = Held(xformers.memory_efficient_attention, p=0.5)
    with capture(layer) as tape:
        layer(q, k, v)
    same(tape[0], softmaxed(q, k, None))


def test_a_part_of_an_attention_is_told_of(xformers):
    layer = Held(xformers.memory_efficient_attention_partial)
    told(layer, *inputs(), match="the output of memory_efficient_attention_partial is one part of an attention")


class Mute(S.LowerTriangularMask):
    """One that makes no matrix, and whose kernel knows it."""

    def materialize(self, shape, dtype=torch.float32, device="cpu"):
        if len(shape) == 2:
            raise NotImplementedError("nobody wrote it")
        return super().materialize(shape, dtype, device)


def test_what_hides_keys_and_cannot_be_read_is_told_of(xformers, monkeypatch):
    layer = Held(xformers.memory_efficient_attention, attn_bias=Mute())
    told(
        layer,
        *inputs(),
        match="recorded: its Mute bias could not be materialized as 7 x 7: nobody wrote it",
    )
    monkeypatch.setattr("regard.lens.interception.xformers.MAX_BIAS_ENTRIES", 48)
    told(
        Held(xformers.memory_efficient_attention, attn_bias=S.Checkered()),
        *inputs(),
        match="Checkered bias, 7 x 7, has more than 48 entries",
    )


class LowerTriangularMask(S.LowerTriangularFromBottomRightMask):
    """One that means something else by a known name."""


def test_a_class_of_xformers_that_means_something_else_is_told_of(xformers):
    layer = Held(xformers.memory_efficient_attention, attn_bias=LowerTriangularMask())
    told(layer, *inputs(5, 9), match="memory_efficient_attention did not return what its documented arguments give")
