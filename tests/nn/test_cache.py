"""Memory: cached decoding equals the full pass however it is cut, and what else is remembered."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from regard import (
    Alibi,
    Bias,
    Causal,
    Dense,
    Diagonal,
    Dilated,
    Documents,
    Entmax,
    Gaussian,
    Global,
    Prefix,
    Rule,
    Sigmoid,
    Softmax,
    Tapered,
    Window,
    attend,
)
from regard.nn import (
    Attention,
    DecoderBlock,
    DifferentialAttention,
    EncoderBlock,
    FeedForward,
    KVCache,
    LatentAttention,
    LearnedSink,
    PackedLengths,
    RMSNorm,
    Rotary,
    SegmentMemory,
    ShawBias,
    T5Bias,
    positions_of,
)

D = torch.float64
N = 23

LAYERS = {
    "causal": {"mask": Causal()},
    "window": {"mask": Causal() & Window(5)},
    "window of one": {"mask": Causal() & Window(1)},
    "before": {"mask": Window(before=6, after=0)},
    "dilated": {"mask": Causal() & Dilated(3, 2)},
    "two windows": {"mask": Causal() & (Window(2) | Dilated(2, 4))},
    "no self": {"mask": Causal() & ~Diagonal()},
    "self": {"mask": Diagonal()},
    "prefix": {"mask": Causal() & (Window(3) | Prefix(2))},
    "global": {"mask": Causal() & (Window(3) | Global((0, 4)))},
    "rule": {"mask": Causal() & Rule(lambda b, h, i, j: (i + j) % 3 != 1)},
    "alibi": {"mask": Causal(), "bias": Alibi(4)},
    "alibi window": {"mask": Causal() & Window(5), "bias": Alibi(4)},
    "t5": {"mask": Causal(), "bias": T5Bias(4, buckets=8, max_distance=16)},
    "shaw window": {"mask": Causal() & Window(7), "bias": ShawBias(4, reach=3)},
    "rotary": {"mask": Causal(), "rotary": Rotary(4), "kv_heads": 2},
    "rotary window": {"mask": Causal() & Window(5), "rotary": Rotary(2), "kv_heads": 1, "qk_norm": RMSNorm},
    "entmax": {"mask": Causal() & Window(6), "normalize": Entmax()},
    "sigmoid": {"mask": Causal(), "normalize": Sigmoid(-1.0)},
    "sink": {"mask": Causal() & Window(4), "normalize": LearnedSink(4)},
    "slots": {"mask": Causal() & Window(4), "slots": 3, "bias": Alibi(4)},
}


def layer_of(name):
    torch.manual_seed(0)
    return Attention(16, 4, **LAYERS[name]).to(D).requires_grad_(False)


def close(x, y):
    assert not x.isnan().any()
    torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


CUTS = st.lists(st.integers(1, 9), min_size=1, max_size=N)


def chunks(sizes, n=N):
    """Cut n tokens into pieces of these sizes, the last taking what remains."""
    start = 0
    for size in [*sizes, n]:
        if start < n:
            yield slice(start, min(start + size, n))
        start += size


@pytest.mark.parametrize("name", LAYERS)
@settings(max_examples=12)
@given(sizes=CUTS)
def test_any_chunking_through_the_cache_equals_the_full_pass(name, sizes):
    layer = layer_of(name)
    x = torch.randn(2, N, 16, dtype=D)
    cache = layer.new_cache()
    parts = []
    for chunk in chunks(sizes):
        A = layer.weights(x[:, chunk], cache=cache)
        assert cache.length == chunk.start
        before = A.entropy()
        parts.append(layer(x[:, chunk], cache=cache))
        close(A.entropy(), before)
    assert cache.length == N
    close(torch.cat(parts, 1), layer(x))


@pytest.mark.parametrize("name", ["causal", "window", "rotary", "rotary window", "slots"])
@settings(max_examples=8)
@given(sizes=CUTS)
def test_left_padded_chunks_equal_the_unpadded_full_pass(name, sizes):
    layer = layer_of(name)
    x = torch.randn(2, N, 16, dtype=D)
    keep = torch.arange(N) >= torch.tensor([[0], [6]])
    positions = positions_of(keep)
    cache = layer.new_cache()
    parts = [layer(x[:, c], cache=cache, keep=keep[:, : c.stop], positions=positions[:, c]) for c in chunks(sizes)]
    out = torch.cat(parts, 1)
    close(out[0], layer(x[:1])[0])
    close(out[1, 6:], layer(x[1:, 6:])[0])


def test_lengths_hide_the_same_keys_in_a_cache_that_forgets():
    layer = layer_of("window")
    x, lengths = torch.randn(2, N, 16, dtype=D), torch.tensor([N, 12])
    cache = layer.new_cache()
    parts = [layer(x[:, c], cache=cache, keep=lengths.clamp(max=c.stop)) for c in chunks([3] * 8)]
    close(torch.cat(parts, 1), layer(x, keep=lengths))


def test_masks_that_hold_tensors_go_through_the_cache_row_by_row():
    layer = layer_of("causal")
    x, ids, keep = torch.randn(2, N, 16, dtype=D), torch.arange(N) // 5, torch.rand(N, N) < 0.7
    cache = layer.new_cache()
    parts = []
    for c in chunks([4, 1, 9]):
        seen = slice(0, c.stop)
        parts.append(layer(x[:, c], cache=cache, mask=Documents(ids[c], ids[seen]) & Dense(keep[c, seen])))
    close(torch.cat(parts, 1), layer(x, mask=Documents(ids) & Dense(keep)))


@pytest.mark.parametrize("window", [None, 1, 4])
@settings(max_examples=25)
@given(moves=st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.integers(1, 40)), min_size=1, max_size=12))
def test_forks_and_selections_see_what_they_were_given_and_nothing_else(window, moves):
    whole = {0: torch.empty(2, 1, 0, 3)}  # of each cache, everything appended to it or to what it comes from
    caches, count = [KVCache(window=window)], 0.0
    for which, select, n in moves:
        parent = which % len(caches)
        new = torch.arange(count, count + n)[:, None].expand(2, 1, n, 3) * torch.tensor([1.0, -1.0]).view(2, 1, 1, 1)
        count += n
        rows = torch.tensor([1, 0])
        child = caches[parent].select(rows) if select else caches[parent].fork()
        before = whole[parent][rows] if select else whole[parent]
        k, v = child.append(new, 2 * new)
        whole[len(caches)] = torch.cat((before, new), 2)
        caches.append(child)
        kept = before.shape[2] if window is None else min(before.shape[2], window - 1)
        assert child.length == before.shape[2] + n
        assert torch.equal(k, whole[len(caches) - 1][:, :, before.shape[2] - kept :])
        assert torch.equal(v, 2 * k)
    for n, cache in enumerate(caches):
        last = torch.full((2, 1, 1, 3), 0.5)
        seen = whole[n] if window is None else whole[n][:, :, max(0, whole[n].shape[2] - window + 1) :]
        assert cache.length == whole[n].shape[2]
        assert torch.equal(cache.join(last), torch.cat((seen, last), 2))


def test_a_fork_copies_nothing_until_a_second_one_writes():
    cache, x = KVCache(), torch.randn(1, 1, 1, 2)
    k, _ = cache.append(x, x)
    first, second = cache.fork(), cache.fork()
    assert first.append(x, x)[0].data_ptr() == k.data_ptr()
    assert second.append(x, x)[0].data_ptr() != k.data_ptr()
    assert torch.equal(k, x)


def test_a_window_keeps_the_cache_bounded():
    cache = KVCache(window=5)
    for n in range(1000):
        k, v = cache.append(torch.full((1, 1, 1, 2), float(n)), torch.full((1, 1, 1, 3), float(n)))
        expected = [float(m) for m in range(max(0, n - 4), n + 1)]
        assert k[0, 0, :, 0].tolist() == v[0, 0, :, 2].tolist() == expected
    assert cache.length == 1000
    cache.append(torch.zeros(1, 1, 5000, 2), torch.zeros(1, 1, 5000, 3))
    for _ in range(6):
        k, _ = cache.append(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 3))
    assert k.untyped_storage().nbytes() <= 64 * (2 + 3) * 4


def test_a_step_copies_no_past():
    cache = KVCache()
    rooms = set()
    for _ in range(1000):
        k, _ = cache.append(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2))
        rooms.add(k.untyped_storage().data_ptr())
    assert k.shape[2] == 1000
    assert len(rooms) <= 6


@pytest.mark.parametrize("window", [None, 4])
def test_beams_move_their_cache_with_them(window):
    torch.manual_seed(0)
    mask = Causal() if window is None else Causal() & Window(window)
    layer = Attention(16, 4, mask=mask).to(D).requires_grad_(False)
    x = torch.randn(3, 9, 16, dtype=D)
    cache, parts = layer.new_cache(), []
    layer(x[:, :5], cache=cache)
    rows = torch.tensor([2, 0, 0, 1, 2])
    other = cache.select(rows)
    y = torch.cat((x[rows, :5], torch.randn(5, 4, 16, dtype=D)), 1)
    parts = [layer(y[:, c], cache=other) for c in (slice(5, 6), slice(6, 9))]
    close(torch.cat(parts, 1), layer(y)[:, 5:])
    assert (cache.length, other.length) == (5, 9)
    close(layer(x[:, 5:], cache=cache), layer(x)[:, 5:])


def test_selections_in_turn_take_no_new_memory_and_change_nothing_that_is_held():
    cache, addresses, held = KVCache(), [], []
    cache.append(*torch.randn(2, 4, 2, 5, 8))
    for n in range(6):
        cache = cache.select(torch.tensor([0, 0, 2, 1]))
        k, v = cache.append(*torch.randn(2, 4, 2, 1, 8))
        addresses.append(k.untyped_storage().data_ptr())
        if n == 2:  # a view keeps the memory of its cache from being written again
            held = [(k, k.clone()), (v, v.clone())]
        del k, v
    assert addresses[0] == addresses[2]
    assert addresses[1] == addresses[3] == addresses[5]
    assert addresses[4] not in addresses[:4]
    for now, then in held:
        torch.testing.assert_close(now, then, rtol=0, atol=0)


BEAMS = st.one_of(
    st.lists(st.integers(0, 1), min_size=4, max_size=4).map(lambda x: [x[0], x[1], 2 + x[2], 2 + x[3]]),
    st.sampled_from([[2, 3, 0, 1], [0, 1, 1, 1], [3, 3, 3, 3], [0, 2, 2, 3]]),  # rows move between prompts
)


@pytest.mark.parametrize("window", [None, 8, 40])
@settings(max_examples=40)
@given(prompt=st.integers(1, 12), moves=st.lists(st.tuples(BEAMS, st.integers(0, 20)), min_size=3, max_size=12))
def test_beams_have_the_entries_of_the_rows_they_come_from(window, prompt, moves):
    whole = torch.arange(2.0 * prompt).view(2, 1, prompt, 1)
    cache = KVCache(window=window)
    cache.append(whole, -whole)
    cache, whole, older = cache.select(two := torch.tensor([0, 0, 1, 1])), whole[two], []
    for number, (rows, back) in enumerate(moves):
        if back == 0 and older:  # an earlier state, whose tensors later ones may have written to
            cache, whole = older[-1]
        older = [(cache, whole)] if back == 1 else older
        new = torch.rand(4, 1, 1 + 30 * (back == 2), 1) + 100 * number
        cache, whole = cache.select(torch.tensor(rows)), torch.cat((whole[rows], new), 2)
        k, v = cache.append(new, -new)
        assert torch.equal(k, whole[:, :, whole.shape[2] - k.shape[2] :])
        assert torch.equal(v, -k)
        assert k.shape[2] == whole.shape[2] if window is None else k.shape[2] >= min(whole.shape[2], window)
        del k, v


def test_beams_that_stay_with_their_prompt_do_not_copy_it():
    class Copied(TorchDispatchMode):
        entries = 0

        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            if f is torch.ops.aten.index_select.out:
                self.entries += kwargs["out"].shape[2]
            return f(*args, **(kwargs or {}))

    def copied(cache, rows):
        with Copied() as mode:
            cache = cache.select(torch.tensor(rows))
        cache.append(*torch.randn(2, 4, 2, 1, 8))
        return cache, mode.entries

    cache, found = KVCache(), []
    cache.append(*torch.randn(2, 2, 2, 50, 8))
    for rows in ([0, 0, 1, 1], [1, 0, 3, 3], [0, 0, 3, 2], [1, 1, 2, 3], [0, 2, 1, 3], [0, 1, 2, 3], [2, 1, 0, 3]):
        cache, entries = copied(cache, rows)
        found.append(entries)
    # The second tensor gets the prompt too, and both get it again after a row has moved to the other prompt.
    assert found == [50, 51, 2, 3, 54, 55, 6]
    cache, found = KVCache(), []
    cache.append(*torch.randn(2, 1, 2, 10, 8))
    for rows in ([0, 0, 0, 0], *[[1, 0, 3, 2]] * 57):
        cache, entries = copied(cache, rows)
        found.append(entries)
    assert found == [10, 11, *range(2, 55), 65, 56, 57]  # 64 entries fill both, and two larger ones take their place


def test_beams_are_selected_without_looking_at_numbers_that_a_trace_does_not_have():
    with FakeTensorMode():
        cache = KVCache()
        for _ in range(3):
            cache.append(*torch.zeros(2, 2, 1, 3, 4))
            cache = cache.select(torch.tensor([1, 0]))
    assert cache.length == 9


def test_an_empty_cache_may_be_selected():
    assert KVCache(window=3).select(torch.tensor([0, 0])).length == 0


def test_two_texts_through_two_caches_do_not_meet():
    layer = layer_of("rotary")
    a, b = torch.randn(2, 1, 7, 16, dtype=D)
    first = layer(a, cache=layer.new_cache())
    layer(b, cache=layer.new_cache())
    assert torch.equal(layer(a, cache=layer.new_cache()), first)


def test_a_cache_begun_in_inference_mode_goes_on_outside_of_it():
    layer = Attention(16, 4, mask=Causal()).to(D).eval()
    x, cache, rows = torch.randn(2, 7, 16, dtype=D), layer.new_cache(), torch.tensor([1, 0])
    with torch.inference_mode():
        layer(x[:, :4], cache=cache)
        moved = cache.select(rows)
    with torch.no_grad():
        expected = layer(x)[:, 4:]
        close(layer(x[:, 4:], cache=cache), expected)
        close(layer(x[rows, 4:], cache=moved), expected[rows])


def test_a_cache_keeps_no_gradients():
    layer = Attention(16, 4)
    with pytest.raises(ValueError, match=r"a cache keeps no gradients.*decode under torch.no_grad\(\)"):
        layer(torch.randn(1, 2, 16), cache=KVCache())


def test_another_batch_in_the_same_cache_is_refused_and_changes_nothing():
    cache = KVCache()
    cache.append(torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3, 4))
    message = "the cache holds k with b g d = (2, 1, 4) of torch.float32, got (3, 1, 4) of torch.float32; start a new"
    with pytest.raises(ValueError, match=re.escape(message)):
        cache.append(torch.zeros(3, 1, 3, 4), torch.zeros(3, 1, 3, 4))
    with pytest.raises(ValueError, match="the cache holds v"):
        cache.append(torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3, 5))
    with pytest.raises(ValueError, match="the cache holds k"):
        cache.join(torch.zeros(2, 1, 3, 4, dtype=D))
    assert cache.length == 3
    assert cache.append(torch.zeros(2, 1, 1, 4), torch.zeros(2, 1, 1, 4))[0].shape[2] == 4


@pytest.mark.parametrize("mask", [Causal() & Window(5), None, Causal() & Window(3) & Prefix(4), Causal()])
def test_a_cache_that_forgets_what_the_mask_sees_is_refused_before_it_changes(mask):
    layer = Attention(16, 4, mask=mask).requires_grad_(False)
    cache = KVCache(window=4)
    with pytest.raises(ValueError, match=r"forgets keys that mask=.* may still see; pass cache=KVCache\(\)"):
        layer(torch.zeros(1, 2, 16), cache=cache)
    assert cache.length == 0


def test_a_cache_that_forgets_does_not_know_where_keys_stood():
    class Centred(nn.Module):
        def forward(self):
            return Tapered(Softmax(), Gaussian(torch.tensor(2.0), 1.5))

    layer, x = Attention(16, 4, mask=Causal() & Window(3), normalize=Centred()).eval(), torch.randn(2, 9, 16)
    with torch.no_grad():
        with pytest.raises(ValueError, match=r"but Tapered\(.*\) depends on them; pass"):
            layer(x, cache=KVCache(window=3))
        cache = layer.new_cache()
        steps = torch.cat([layer(x[:, n : n + 1], cache=cache) for n in range(9)], 1)
        torch.testing.assert_close(steps, layer(x))


def test_bad_padding_is_refused_before_the_cache_changes():
    layer, x = layer_of("window"), torch.zeros(2, 3, 16, dtype=D)
    cache = layer.new_cache()
    layer(x, cache=cache)
    message = "keep must be lengths (b,) or keep (b, 6) over all keys, with those of the cache, got shape (2, 3)"
    with pytest.raises(ValueError, match=re.escape(message)):
        layer(x, cache=cache, keep=torch.ones(2, 3, dtype=torch.bool))
    assert (cache.length, cache.kept) == (3, 3)


def test_a_window_counts_from_one():
    with pytest.raises(ValueError, match="window must be 1 or more, got 0"):
        KVCache(window=0)


def stack(made, depth=3):
    torch.manual_seed(1)
    blocks = [EncoderBlock(Attention(16, 4, **made), FeedForward(16, 24)) for _ in range(depth)]
    return nn.ModuleList(blocks).to(D)


@pytest.mark.parametrize("made", [{}, {"bias": Alibi(4)}, {"rotary": Rotary(4)}, {"bias": ShawBias(4, reach=3)}])
@pytest.mark.parametrize("segment", [1, 5, 8])
def test_segment_memory_equals_the_full_pass_with_the_same_window(made, segment):
    window = 6
    blocks = stack({**made, "mask": Causal() & Window(window)})
    x = torch.randn(2, N, 16, dtype=D)
    memories = [SegmentMemory(window - 1) for _ in blocks]
    parts = []
    for c in chunks([segment] * N):
        y = x[:, c]
        for block, memory in zip(blocks, memories, strict=True):
            y = block(y, memory=memory)
        parts.append(y)
    full = x
    for block in blocks:
        full = block(full)
    close(torch.cat(parts, 1), full)


def test_segment_memory_hands_over_the_past_without_gradient():
    layer = Attention(16, 4, mask=Causal()).to(D)
    memory = SegmentMemory(5)
    first, second = (torch.randn(1, 4, 16, dtype=D, requires_grad=True) for _ in range(2))
    layer(first, memory.extend(first))
    out = layer(second, memory.extend(second))
    grad_first, grad_second, grad_key = torch.autograd.grad(
        out.square().sum(), (first, second, layer.key.weight), allow_unused=True
    )
    assert grad_first is None
    assert grad_second.abs().sum() > 0
    expected = layer(second, torch.cat((first.detach(), second), 1))
    close(grad_key, torch.autograd.grad(expected.square().sum(), layer.key.weight)[0])


def test_segment_memory_keeps_the_last_states_in_order():
    memory = SegmentMemory(3)
    x = torch.arange(10.0).view(1, 10, 1)
    for c in chunks([2, 1, 4], 10):
        memory.extend(x[:, c])
    assert memory.states.flatten().tolist() == [7, 8, 9]
    assert SegmentMemory(0).extend(x).shape[1] == 10
    rows = memory.select(torch.tensor([0, 0]))
    assert rows.extend(torch.zeros(2, 1, 1)).shape == (2, 4, 1)
    assert memory.states.shape == (1, 3, 1)
    nothing = SegmentMemory(0)
    assert [nothing.extend(x).shape[1] for _ in range(2)] == [10, 10]


def test_segment_memory_of_another_batch_is_refused():
    memory = SegmentMemory(3)
    memory.extend(torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match=re.escape("the memory holds b dim = (2, 4), got (3, 4); start a new")):
        memory.extend(torch.zeros(3, 3, 4))


def test_a_call_that_fails_leaves_the_cache_as_it_was():
    layer, x = Attention(16, 4, mask=Causal()).eval(), torch.randn(1, 6, 16)
    cache = layer.new_cache()
    with torch.no_grad():
        layer(x[:, :3], cache=cache)
        with pytest.raises(ValueError, match="Dense keep must broadcast"):
            layer(x[:, 3:], cache=cache, mask=Dense(torch.ones(3, 3, dtype=torch.bool)))
        assert cache.length == 3
        torch.testing.assert_close(layer(x[:, 3:], cache=cache), layer(x)[:, 3:])


def test_a_decoder_block_steps_as_it_runs_at_once():
    torch.manual_seed(0)
    block = DecoderBlock(
        Attention(16, 4, mask=Causal(), rotary=Rotary(4)), Attention(16, 4, key_width=10), FeedForward(16, 24)
    )
    block = block.to(D).requires_grad_(False)
    x, context, lengths = torch.randn(2, 9, 16, dtype=D), torch.randn(2, 7, 10, dtype=D), torch.tensor([7, 3])
    expected = block(x, context, context_keep=lengths)
    memory, cache = block.remember(context, context_keep=lengths), block.attention.new_cache()
    projected = []
    block.cross.key.register_forward_hook(lambda *_: projected.append(1))
    parts = [block(x[:, [n]], memory, cache=cache) for n in range(5)]
    rows = torch.tensor([1, 0])
    memory, cache, x = memory.select(rows), cache.select(rows), x[rows]
    parts = [*(part[rows] for part in parts), *(block(x[:, [n]], memory, cache=cache) for n in range(5, 9))]
    close(torch.cat(parts, 1), expected[rows])
    assert not projected


def test_keys_and_values_of_two_dtypes_are_refused():
    x = torch.zeros(1, 1, 1, 2)
    with pytest.raises(ValueError, match=r"same dtype, got torch.float32 and torch.float64; write v.to\(k.dtype\)"):
        KVCache().append(x, x.double())


def test_lengths_of_unsigned_bytes_go_with_a_window():
    layer = Attention(16, 4, mask=Causal() & Window(3)).eval()
    x, lengths, found = torch.randn(2, 6, 16), torch.tensor([6, 2]), []
    for dtype in (torch.int64, torch.uint8):
        cache = layer.new_cache()
        padding = [lengths.clamp(max=n + 1).to(dtype) for n in range(6)]
        with torch.no_grad():
            found.append([layer(x[:, n : n + 1], cache=cache, keep=padding[n]) for n in range(6)])
    assert all(map(torch.equal, *found))


RELATIVE = [name for name in LAYERS if name not in ("prefix", "global", "rule")]
STARTS = (6, 0, 9, 1)


@pytest.mark.parametrize("block", [None, 1, 4])
@pytest.mark.parametrize("name", RELATIVE)
def test_texts_in_one_row_become_rows_of_a_cache_that_go_on_as_if_each_stood_alone(name, block):
    layer, packed = layer_of(name), PackedLengths(torch.tensor(STARTS), width=11)
    cache = KVCache(window=layer.new_cache().window, block=block)
    texts, x = torch.randn(1, sum(STARTS), 16, dtype=D), torch.randn(4, 5, 16, dtype=D)
    out = layer(texts, cache=cache.prompts(packed))
    assert cache.length == 11
    assert cache.lengths.tolist() == list(STARTS)
    A = layer.weights(x[:, :2], cache=cache)
    steps = torch.cat([layer(x[:, :2], cache=cache), *(layer(x[:, n : n + 1], cache=cache) for n in range(2, 5))], 1)
    for row, (text, first) in enumerate(zip(texts[0].split(STARTS), out[0].split(STARTS), strict=True)):
        alone = layer(torch.cat((text, x[row]))[None])[0]
        close(torch.cat((first, steps[row])), alone)
        if layer.slots is None:
            hidden = layer.weights(torch.cat((text, x[row, :2]))[None])[0, :, -2:]
            keys = min(A.shape[-1], hidden.shape[-1])
            close(A[row, :, :, A.shape[-1] - keys :], hidden[..., hidden.shape[-1] - keys :])


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("block", [None, 3])
def test_rows_may_grow_by_different_numbers_of_tokens(window, block):
    mask = Causal() if window is None else Causal() & Window(window)
    cache, q = KVCache(window=window, block=block), torch.randn(3, 2, 20, 8, dtype=D)
    k, v = torch.randn(2, 3, 2, 20, 8, dtype=D)
    done = torch.zeros(3, dtype=torch.long)
    for lengths in ((4, 2, 0), (1, 1, 1), (3, 0, 5), (0, 1, 0), (2, 2, 2)):
        n, new = max(lengths), torch.tensor(lengths)
        at = (done[:, None] + torch.arange(n)).clamp(max=19)[:, None, :, None].expand(-1, 2, -1, 8)
        found_k, found_v = cache.append(k.gather(2, at), v.gather(2, at), lengths=new)
        offset = found_k.shape[2] - new
        here = mask if cache.padding() is None else mask & cache.padding()
        out = attend(q.gather(2, at), found_k, found_v, mask=here, offset=offset)
        done = done + new
        for row, (m, end) in enumerate(zip(lengths, done.tolist(), strict=True)):
            part = (x[row : row + 1, :, :end] for x in (k, v))
            alone = attend(q[row : row + 1, :, end - m : end], *part, mask=mask)
            close(out[row, :, :m], alone[0])
    assert cache.length == done.max()
    expected = None if done.unique().numel() == 1 else done.tolist()
    assert (None if cache.lengths is None else cache.lengths.tolist()) == expected


def test_selected_rows_keep_their_lengths_and_share_one_mask():
    caches = [KVCache(), KVCache()]
    for cache in caches:
        cache.append(*torch.randn(2, 3, 1, 5, 4), lengths=torch.tensor([5, 2, 3]))
    rows = torch.tensor([1, 1, 2])
    chosen = caches[0].select(rows)
    assert chosen.lengths.tolist() == [2, 2, 3]
    assert repr(chosen) == "KVCache(lengths=[2, 2, 3])"
    assert chosen.starts is caches[0].starts.select(rows)
    assert caches[0].select(torch.arange(3)).starts is caches[0].starts
    assert caches[0].lengths.tolist() == [5, 2, 3]


def test_rows_of_different_lengths_do_not_know_where_keys_stood():
    cache = KVCache()
    cache.append(*torch.zeros(2, 2, 4, 5, 4, dtype=D), lengths=torch.tensor([5, 2]))
    x = torch.randn(2, 1, 16, dtype=D)
    for options in ({"mask": Causal() | Prefix(2)}, {"mask": Causal(), "bias": Bias.of(lambda b, h, i, j: j * 0.1)}):
        layer = Attention(16, 4, **options).to(D).requires_grad_(False)
        with pytest.raises(ValueError, match=r"begin at different entries, but .* depends on them; decode rows one"):
            layer(x, cache=cache)
        with pytest.raises(ValueError, match="depends on them"):
            layer(x.view(1, 2, 16), cache=KVCache().prompts(PackedLengths(torch.tensor([1, 1]))))
    layer = Attention(16, 4, mask=Causal()).to(D).requires_grad_(False)
    with pytest.raises(ValueError, match="knows the length of each row; pass no keep"):
        layer(x, cache=cache, keep=torch.tensor([6, 3]))
    assert cache.lengths.tolist() == [5, 2]


def test_wrong_lengths_are_refused():
    k = torch.zeros(2, 1, 3, 4)
    for lengths in ([3], [4, 1], [-1, 2]):
        with pytest.raises(ValueError, match=r"lengths must be one number per row, from 0 to 3, for 2 rows, got"):
            KVCache().append(k, k, lengths=torch.tensor(lengths))
    cache = KVCache()
    cache.append(k, k)
    with pytest.raises(ValueError, match=r"prompts begin a cache, got KVCache\(length=3\)"):
        cache.prompts(PackedLengths(torch.tensor([1])))
    with pytest.raises(ValueError, match="the texts have 3 tokens together, got 2"):
        KVCache().prompts(PackedLengths(torch.tensor([1, 2]))).padding(2)
    with pytest.raises(ValueError, match="a cache keeps no gradients"):
        KVCache().append(k.requires_grad_(), k, lengths=torch.tensor([1, 2]))


@pytest.mark.parametrize("name", ["causal", "window", "rotary window"])
@settings(max_examples=6)
@given(sizes=CUTS)
def test_a_cache_in_blocks_gives_what_any_cache_gives(name, sizes):
    layer = layer_of(name)
    x = torch.randn(2, N, 16, dtype=D)
    cache = KVCache(window=layer.new_cache().window, block=4)
    close(torch.cat([layer(x[:, chunk], cache=cache) for chunk in chunks(sizes)], 1), layer(x))


def test_beams_share_the_blocks_of_their_prompt():
    cache = KVCache(block=4)
    cache.append(*torch.randn(2, 1, 1, 10, 2))
    beams = cache.select(torch.zeros(5, dtype=torch.long))
    assert len(beams._buffer.blocks) == 3
    k, _ = beams.append(*torch.randn(2, 5, 1, 1, 2))
    assert len(beams._buffer.blocks) == 2 + 5  # each continues in its own copy of the last block
    assert len(cache._buffer.blocks) == 3
    assert (k[0, 0, :10] == k[4, 0, :10]).all()
    assert (k[0, 0, 10] != k[4, 0, 10]).all()
    assert repr(beams) == "KVCache(length=11, block=4)"


def test_layers_that_do_not_hide_what_lies_before_shorter_rows_refuse_them():
    cache, x = KVCache(), torch.zeros(2, 1, 16)
    cache.append(*torch.zeros(2, 2, 1, 5, 4), lengths=torch.tensor([5, 2]))
    texts = KVCache().prompts(PackedLengths(torch.tensor([1, 1])))
    for layer in (LatentAttention(16, 4, latent=8, head_dim=4, rotary_dim=2), DifferentialAttention(16, 2, depth=1)):
        with pytest.raises(ValueError, match=r"KVCache\(lengths=\[5, 2\]\) has rows of different lengths"):
            layer(x, cache=cache)
        with pytest.raises(ValueError, match="does not read several texts in one row"):
            layer(x.view(1, 2, 16), cache=texts)
