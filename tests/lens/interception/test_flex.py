"""flex_attention, as it is and compiled: seen where a layer's code calls it, in the terms its functions spell out."""

from __future__ import annotations

import copy
import functools
import sys
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention as flexible
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

import regard as R
from regard import weights
from regard.lens import Tape, ablate, capture

pytestmark = pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")

N, HEADS, WIDTH = 10, 4, 8
compiled = torch.compile(flex_attention, backend="eager")
fixed = functools.partial(flex_attention, scale=0.5)
TABLE = torch.linspace(-1, 1, HEADS)


def helper(*args, **kwargs):
    return flex_attention(*args, **kwargs)


def causal(b, h, i, j):
    return j <= i


def blocks(mask=causal, n=N, m=None, batch=None):
    return create_block_mask(mask, batch, None, n, m or n, device="cpu")


class Layer(nn.Module):
    """Calls it in some way, on what it is called with."""

    def __init__(self, call=None, **given):
        super().__init__()
        self.call, self.given = call, given

    def forward(self, q, k, v):
        return flex_attention(q, k, v, **self.given)


class Held(Layer):
    def forward(self, q, k, v):
        return self.call(q, k, v, **self.given)


class Compiled(Layer):
    def forward(self, q, k, v):
        return compiled(q, k, v, **self.given)


class OfModule(Layer):
    def forward(self, q, k, v):
        return flexible.flex_attention(q, k, v, **self.given)


class Helped(Layer):
    def forward(self, q, k, v):
        return helper(q, k, v, **self.given)


class Fixed(Layer):
    def forward(self, q, k, v):
        return fixed(q, k, v, **self.given)


def enclosing(call):
    class Enclosed(Layer):
        def forward(self, q, k, v):
            return call(q, k, v, **self.given)

    return Enclosed


WAYS = {
    "as it is": (Layer(), None),
    "compiled": (Compiled(), None),
    "an attribute": (Held(compiled), None),
    "arguments fixed": (Fixed(), 0.5),
    "compiled with arguments fixed": (Held(torch.compile(fixed, backend="eager")), 0.5),
    "of its module": (OfModule(), None),
    "by a function": (Helped(), None),
    "in a closure": (enclosing(compiled)(), None),
}


def inputs(heads=HEADS, groups=HEADS, n=N, m=N, batch=2):
    torch.manual_seed(0)
    return [torch.randn(batch, count, length, WIDTH) for count, length in ((heads, n), (groups, m), (groups, m))]


def looked(layer, q, k, v):
    """The one entry of a tape of the layer, and what it returned, the same as without."""
    want = layer(q, k, v)
    with capture(layer) as tape:
        got = layer(q, k, v)
    got, want = (x if torch.is_tensor(x) else x[0] for x in (got, want))
    assert torch.equal(got, want)
    ((_, A),) = tape.items()
    return A, got


@pytest.mark.parametrize("way", WAYS)
def test_it_is_seen_however_it_is_called(way):
    layer, scale = WAYS[way]
    layer.given = {"block_mask": blocks()}
    q, k, v = inputs()
    A, out = looked(layer, q, k, v)
    assert repr(A.call.mask) == "Causal()"
    want = weights(q, k, mask=R.Causal(), score=None if scale is None else R.Dot(scale=scale))
    torch.testing.assert_close(A[:], want[:])
    torch.testing.assert_close(A @ v, out)


def alibi(score, b, h, i, j):
    return score - 2.0 ** -(h + 1) * (i - j)


def by_head(score, b, h, i, j):
    return score + TABLE[h]


def hiding(score, b, h, i, j):
    return torch.where(i - j < 3, score, -torch.inf)


def capped(score, b, h, i, j):
    return 2.0 * torch.tanh(score / 2.0)


SCATTERED = torch.randn(2, HEADS, N, N, generator=torch.Generator().manual_seed(1))


def scattered(score, b, h, i, j):
    return score + SCATTERED[b, h, i, j]


def in_turn(score, b, h, i, j):
    return score + SCATTERED[b][h][i][j]


MODS = {
    "alibi": (alibi, "Causal()", "Relative"),
    "by head": (by_head, "Causal()", "Relative"),
    "hiding": (hiding, "Causal() & Window(3)", None),
    "capped": (capped, "Causal()", None),
    "scattered": (scattered, "Causal()", "Added"),
    "looked up in turn": (in_turn, "Causal()", "Added"),
}


@pytest.mark.parametrize("mod", MODS)
def test_what_a_function_does_to_scores_is_a_term(mod):
    function, mask, bias = MODS[mod]
    q, k, v = inputs()
    A, out = looked(Layer(score_mod=function, block_mask=blocks()), q, k, v)
    assert repr(A.call.mask) == mask
    assert (None if A.call.bias is None else type(A.call.bias).__name__) == bias
    torch.testing.assert_close(A @ v, out, rtol=1e-4, atol=1e-5)


def test_one_that_multiplies_scores_is_told_of():
    model = nn.ModuleDict({"one": Layer(score_mod=lambda score, b, h, i, j: score * (1 + h)), "two": Layer()})
    q, k, v = inputs()
    with pytest.warns(UserWarning, match=r"one was not recorded: its score_mod"), capture(model) as tape:
        model["two"](model["one"](q, k, v), k, v)
    assert list(tape) == [("two", 0)]


def test_a_mask_that_looks_lengths_up_in_turn_is_read_as_it_is_meant():
    lengths = torch.tensor([[4], [7]])
    mask = blocks(lambda b, h, i, j: j < lengths[b][0], n=7, batch=2)
    q, k, v = inputs(n=7, m=7)
    A, out = looked(Layer(block_mask=mask), q, k, v)
    torch.testing.assert_close(A @ v, out)


def test_grouped_heads_other_lengths_and_texts_of_their_own_length():
    lengths = torch.tensor([4, 7])
    mask = blocks(lambda b, h, i, j: j < lengths[b], n=5, m=7, batch=2)
    q, k, v = inputs(groups=2, n=5, m=7)
    A, out = looked(Layer(block_mask=mask, enable_gqa=True), q, k, v)
    assert repr(A.call.mask) == "Padding((4, 7))"
    assert A.call.k.shape[1] == 2
    torch.testing.assert_close(A @ v, out)


def test_it_may_return_more_than_its_output():
    q, k, v = inputs()
    A, out = looked(Layer(return_aux=AuxRequest(lse=True)), q, k, v)
    torch.testing.assert_close(A @ v, out)


def fails_after(model, *given):
    model(*given)
    raise KeyError


def test_every_name_holds_what_it_held_before():
    layer, here = WAYS["compiled"][0], sys.modules[__name__]
    held = WAYS["an attribute"][0]
    layer.given = held.given = {}
    q, k, v = inputs()
    for model in (layer, held, WAYS["in a closure"][0], WAYS["of its module"][0]):
        before = here.compiled, here.flex_attention, held.call, flexible.flex_attention
        with pytest.raises(KeyError), capture(model):
            fails_after(model, q, k, v)
        assert (here.compiled, here.flex_attention, held.call, flexible.flex_attention) == before


def test_captures_within_captures_see_it_too():
    layer = Compiled(block_mask=blocks())
    q, k, v = inputs()
    with capture(layer) as outer:
        with capture(layer) as inner:
            layer(q, k, v)
        layer(k, q, v)
    assert len(inner) == 1
    assert len(outer) == 2


def test_a_function_that_was_compiled_is_not_compiled_anew():
    seen = []

    def backend(graph, examples):
        seen.append(graph)
        return graph.forward

    layer = Held(torch.compile(flex_attention, backend=backend), block_mask=blocks())
    q, k, v = inputs()
    layer(q, k, v)
    before = len(seen)
    for _ in range(2):
        with capture(layer):
            layer(q, k, v)
    assert len(seen) == before


def test_layers_that_are_not_asked_for_are_passed_over():
    model = nn.ModuleDict({"one": Layer(), "two": Layer()})
    q, k, v = inputs()
    with capture(model, layers="two") as tape:
        model["two"](model["one"](q, k, v), k, v)
    assert list(tape) == [("two", 0)]


def test_its_heads_are_switched_off():
    layer = Compiled(block_mask=blocks())
    q, k, v = inputs()
    whole = layer(q, k, v)
    with ablate(layer, {"": [1, 3]}):
        without = layer(q, k, v)
    assert torch.equal(without[:, [0, 2]], whole[:, [0, 2]])
    assert not without[:, [1, 3]].any()
    assert torch.equal(layer(q, k, v), whole)


def test_values_and_projections_are_kept():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(HEADS * WIDTH, 6, bias=False)

        def forward(self, q, k, v):
            return self.out(flex_attention(q, k, v).transpose(1, 2).flatten(2))

    model = Whole().requires_grad_(False)
    q, k, v = inputs()
    with capture(model, values=True) as tape:
        model(q, k, v)
    extras = tape.extras("")
    assert torch.equal(extras.v, v)
    assert torch.equal(extras.projection, model.out.weight)


def test_a_saved_tape_holds_its_terms(tmp_path):
    q, k, v = inputs()
    layer = Layer(score_mod=alibi, block_mask=blocks())
    with capture(layer) as tape:
        out = layer(q, k, v)
    tape.save(tmp_path / "tape.safetensors")
    ((_, A),) = Tape.load(tmp_path / "tape.safetensors").items()
    torch.testing.assert_close(A @ v, out, rtol=1e-4, atol=1e-5)


class OfClass(Layer):
    flex = torch.compile(flex_attention, backend="eager")
    still = staticmethod(flex)

    def forward(self, q, k, v):
        return OfClass.flex(q, k, v, **self.given)


class Still(OfClass):
    def forward(self, q, k, v):
        return self.still(q, k, v, **self.given)


class Kernel:
    """One of several a model may choose from, and no layer."""

    def __init__(self, call):
        self.call = call

    def run(self, *args, **kwargs):
        return self.call(*args, **kwargs)


KERNELS = {"flex": compiled}


class Chosen(Layer):
    def forward(self, q, k, v):
        return KERNELS["flex"](q, k, v, **self.given)


ELSEWHERE = ModuleType("elsewhere")  # as a file beside that of the model
exec(
    "from torch.nn.attention.flex_attention import flex_attention as own\n"
    "def help(*args, **kwargs): return own(*args, **kwargs)",
    vars(ELSEWHERE),
)


class Elsewhere(Layer):
    def forward(self, q, k, v):
        return ELSEWHERE.help(q, k, v, **self.given)


class Run(Layer):
    def forward(self, q, k, v):
        return self.call.run(q, k, v, **self.given)


ROUNDABOUT = {
    "of the class": OfClass(),
    "a static method": Still(),
    "in a dict": Chosen(),
    "of another file": Elsewhere(),
    "a helper of another file": Held(ELSEWHERE.help),
    "a helper with arguments fixed": Held(functools.partial(helper, scale=None)),
    "of an object": Run(Kernel(compiled)),
    "a method of an object": Held(Kernel(compiled).run),
}


@pytest.mark.parametrize("way", ROUNDABOUT)
def test_it_is_seen_in_roundabout_ways(way):
    layer = ROUNDABOUT[way]
    before = [dict(vars(OfClass)), dict(KERNELS), dict(vars(ELSEWHERE)), dict(vars(layer))]
    q, k, v = inputs()
    A, out = looked(layer, q, k, v)
    torch.testing.assert_close(A @ v, out)
    assert [dict(vars(OfClass)), dict(KERNELS), dict(vars(ELSEWHERE)), dict(vars(layer))] == before


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@torch.compile(backend="eager")
def whole(*args, **kwargs):
    return flex_attention(*args, **kwargs)


@pytest.mark.usefixtures("dynamo")
def test_one_within_a_compiled_function_is_refused_with_its_reason():
    layer, (q, k, v) = Held(whole), inputs()
    told = pytest.raises(ValueError, match=r"calls flex_attention inside a torch\.compile'd function")
    with torch.no_grad(), told, capture(layer):
        layer(q, k, v)


def both(score, b, h, i, j):
    return capped(score, b, h, i, j) + TABLE[h] * (j - i)


def low(score, b, h, i, j):
    return score + TABLE.bfloat16()[h] * (i - j)


def undefined_ahead(score, b, h, i, j):
    return score + torch.log(1.0 + i - j)


def shut(score, b, h, i, j):
    return torch.where(j <= i, score, -1e9)


@pytest.mark.parametrize("mod", [both, low, undefined_ahead, shut])
def test_terms_together_of_less_precision_or_where_nobody_looks_are_read(mod):
    q, k, v = inputs()
    A, out = looked(Layer(score_mod=mod, block_mask=None if mod is shut else blocks()), q, k, v)
    torch.testing.assert_close(A @ v, out, rtol=1e-4, atol=1e-5)


def clamped(score, b, h, i, j):
    return score.clamp(-10, 10)


def one_row(score, b, h, i, j):
    return torch.where(i == 3, 3 * score, score)


@pytest.mark.parametrize("mod", [clamped, one_row])
def test_one_that_only_seems_to_add_is_told_of(mod):
    model = nn.ModuleDict({"one": Layer(score_mod=mod), "two": Layer()})
    q, k, v = inputs(n=40, m=40)
    with pytest.warns(UserWarning, match=r"one was not recorded: its score_mod"), capture(model) as tape:
        model["two"](model["one"](q, k, v), k, v)
    assert list(tape) == [("two", 0)]


def test_a_mask_whose_numbers_change_between_passes_is_read_anew():
    lengths = torch.tensor([4])
    layer, (q, k, v) = Compiled(block_mask=blocks(lambda b, h, i, j: j < lengths[0])), inputs()
    with capture(layer) as tape:
        for length in (4, 7):
            lengths.fill_(length)
            torch.testing.assert_close(layer(q, k, v), tape[-1] @ v)


SIZE = 16


def skipping(q, k, v, block_mask, call=flex_attention):
    """As a fused kernel, which leaves out the blocks that are not listed; flex_attention on a CPU does not."""
    return call(q, k, v, block_mask=blocks(lambda b, h, i, j: (j <= i) & (i // SIZE == j // SIZE), n=q.shape[2]))


skipping._torchdynamo_orig_callable = flex_attention  # as if it were compiled


@pytest.mark.parametrize("kernel", [skipping, compiled])
def test_blocks_that_a_kernel_skips_are_hidden(kernel):
    count, places = torch.ones(1, 1, 4, dtype=torch.int32), torch.arange(4, dtype=torch.int32).view(1, 1, 4, 1)
    mask = BlockMask.from_kv_blocks(count, places.expand(1, 1, 4, 4).contiguous(), BLOCK_SIZE=SIZE, mask_mod=causal)
    q, k, v = inputs(n=4 * SIZE, m=4 * SIZE)
    A, out = looked(Held(kernel, block_mask=mask), q, k, v)
    torch.testing.assert_close(A @ v, out)


def test_a_copy_within_a_capture_is_as_the_model_was(tmp_path):
    layer, (q, k, v) = Held(flex_attention), inputs()
    with capture(layer):
        layer(q, k, v)
        copied = copy.deepcopy(layer)
        torch.save(layer.call, tmp_path / "call.pt")
    assert copied.call is flex_attention
    assert torch.load(tmp_path / "call.pt", weights_only=False) is flex_attention


def test_what_is_put_there_meanwhile_stays():
    layer, (q, k, v) = Held(compiled), inputs()
    with capture(layer):
        layer(q, k, v)
        layer.call = flex_attention
    assert layer.call is flex_attention


@pytest.mark.usefixtures("dynamo")
def test_one_that_is_compiled_within_a_capture_is_compiled_as_it_is():
    class Late(Layer):
        def forward(self, q, k, v):
            self.call = self.call or torch.compile(flex_attention, backend="eager")
            return self.call(q, k, v)

    layer, (q, k, v) = Late(), inputs()
    with pytest.raises(ValueError, match="calls flex_attention inside a torch"), capture(layer):
        layer(q, k, v)
    A, out = looked(layer, q, k, v)
    torch.testing.assert_close(A @ v, out)
