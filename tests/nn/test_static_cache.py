"""Static caches hold what a cache holds, at fixed addresses, and hide the rest."""

import pytest
import torch
import torch.nn.functional as F

from regard import attend
from regard.nn import KeyValues, KVCache
from regard.nn.static_cache import RowClock, StaticCache, StaticKeyValues, attend_visible

ROWS, GROUPS, D, E = 3, 2, 4, 5


@pytest.fixture(autouse=True)
def without_gradients():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def numbers(*shape):
    return torch.randn(*shape, dtype=torch.double)


def filled(n, *, window=None, lengths=None):
    cache = KVCache(window=window)
    k, v = numbers(ROWS, GROUPS, n, D), numbers(ROWS, GROUPS, n, E)
    cache.append(k, v, lengths=lengths)
    return cache


def static_of(cache, space, rows=ROWS + 1):
    clock = RowClock(rows, torch.device("cpu"))
    static = StaticCache(clock, cache, space=space)
    clock.at.fill_(cache.length)
    if cache.starts is not None:
        clock.starts[:ROWS] = cache.starts.starts
    static.load(cache)
    return static


@pytest.mark.parametrize("lengths", [None, torch.tensor([7, 2, 5])])
@pytest.mark.parametrize(("window", "space"), [(None, 32), (4, 4), (4, 9), (40, 32), (1, 8)])
def test_a_token_sees_what_it_sees_of_a_cache_that_grows(window, space, lengths):
    cache = filled(7, window=window, lengths=lengths)
    static = static_of(cache, space)
    for _ in range(20):
        q, k, v = numbers(ROWS + 1, 6, 1, D), numbers(ROWS + 1, GROUPS, 1, D), numbers(ROWS + 1, GROUPS, 1, E)
        static.clock.begin()
        assert torch.equal(static.positions(1, q.device)[:ROWS], cache.positions(1, q.device).expand(ROWS, 1))
        seen = static.attend(q, *static.append(k, v))
        mask = cache.padding(new=1)
        expected = attend(q[:ROWS], *cache.append(k[:ROWS], v[:ROWS]), mask=mask)
        torch.testing.assert_close(seen[:ROWS], expected, rtol=0, atol=1e-12)
        assert seen.isfinite().all()
        static.clock.at.add_(1)
    again = static.to_cache(cache.length, cache.starts)
    assert repr(again) == repr(cache)
    q, k, v = numbers(ROWS, 6, 1, D), numbers(ROWS, GROUPS, 1, D), numbers(ROWS, GROUPS, 1, E)
    rows = torch.arange(ROWS)
    outs = [attend(q, *each.append(k, v), mask=each.padding()) for each in (again.select(rows), cache)]
    torch.testing.assert_close(*outs, rtol=0, atol=1e-12)


def test_rows_are_selected_in_place():
    cache = filled(5)
    static = static_of(cache, 8)
    address = static.both.data_ptr()
    static.select(torch.tensor([2, 2, 0, 1]))
    assert static.both.data_ptr() == address
    keys, _ = static.to_cache(5, None).read(0, 5)
    torch.testing.assert_close(keys, cache.read(0, 5)[0][[2, 2, 0, 1]])


def test_loading_leaves_nothing_of_an_earlier_search():
    static = static_of(filled(5), 8)
    static.both.fill_(torch.nan)
    static.load(filled(3))
    static.clock.at.fill_(3)
    static.clock.begin()
    q, k, v = numbers(ROWS + 1, 2, 1, D), numbers(ROWS + 1, GROUPS, 1, D), numbers(ROWS + 1, GROUPS, 1, E)
    assert static.attend(q, *static.append(k, v)).isfinite().all()


@pytest.mark.parametrize(
    "keep", [None, torch.tensor([6, 1, 3]), torch.tensor([0, 6, 2]), torch.arange(6) < torch.tensor([[6], [2], [3]])]
)
@pytest.mark.parametrize("each", [1, 4])
def test_sources_are_read_with_their_padding(keep, each):
    source = KeyValues(numbers(ROWS, GROUPS, 6, D), numbers(ROWS, GROUPS, 6, E), keep)
    static = StaticKeyValues.like(source, rows=ROWS + 2, space=16)
    static.k.fill_(torch.nan)
    static.load(source)
    q = numbers(ROWS + 2, 6, each, D)
    seen = static.attend(q)
    expected = attend(q[:ROWS], source.k, source.v, mask=source.mask)
    torch.testing.assert_close(seen[:ROWS], expected, rtol=0, atol=1e-12)
    again = static.to_key_values().select(torch.arange(ROWS))
    torch.testing.assert_close(attend(q[:ROWS], again.k, again.v, mask=again.mask), expected, rtol=0, atol=1e-12)
    static.move(torch.tensor([2, 0]))
    expected = attend(q[:2], *(x[[2, 0]] for x in (source.k, source.v)), mask=source.select(torch.tensor([2, 0])).mask)
    torch.testing.assert_close(static.attend(q)[:2], expected, rtol=0, atol=1e-12)


def test_queries_of_a_group_share_its_keys():
    q, k, v = numbers(2, 6, 3, D), numbers(2, 2, 7, D), numbers(2, 2, 7, E)
    hidden = numbers(2, 1, 1, 7)
    k3, v3 = (x.repeat_interleave(3, 1) for x in (k, v))
    expected = F.scaled_dot_product_attention(q, k3, v3, attn_mask=hidden)
    torch.testing.assert_close(attend_visible(q, k, v, hidden), expected, rtol=0, atol=1e-12)


def test_a_window_is_counted_from_the_token_itself():
    clock = RowClock(1, torch.device("cpu"))
    clock.at.fill_(9)
    visible = clock.hidden(16, 4, torch.double)[0, 0, 0] == 0
    assert visible.nonzero().flatten().tolist() == [6, 7, 8, 9]
