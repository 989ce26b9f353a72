"""The equation for one tile: a tile of any rows and keys is its part of the dense matrix."""

from dataclasses import replace

import pytest
import torch

from regard import Added, Additive, Causal, Sigmoid, SinkSoftmax
from regard.ops.blocks.tile_weights import (
    PlannedBlock,
    additive_mask,
    additive_tile,
    entry_weights,
    normalize_tile,
    tile_scores,
    tile_weights,
)
from regard.ops.call import Call
from regard.ops.terms.coordinates import Point

B, H, G, I, J, D = 2, 4, 2, 7, 11, 3
HIDDEN = torch.arange(J) > torch.arange(I)[:, None] + J - I
ROWS = slice(1, 5)
COLS = {"slice": slice(1, 10), "tensor": torch.tensor([9, 0, 10, 4])}
close = torch.testing.assert_close


def biased_call(**terms):
    q, k = torch.randn(B, H, I, D).double(), torch.randn(B, G, J, D).double()
    return Call.of(q, k, **({"mask": Causal(), "bias": Added(torch.randn(H, I, J).double())} | terms))


def dense_scores(call):
    """All scores of a causal call with its bias, -inf where the mask hides, written out."""
    s = call.q @ call.k.repeat_interleave(H // G, 1).mT * D**-0.5 + call.bias.values
    return s.masked_fill(HIDDEN, -torch.inf)


def tile_of(call, cols, masked=...):
    """A tile: its plan, which evaluates the mask at all keys by default, and its part of prepared q and k."""
    block = replace(call.whole(), rows=ROWS, cols=cols)
    q, k = call.score.prepare(call.q[:, :, ROWS], call.k[:, :, cols], None)
    return PlannedBlock(block, slice(0, block.j.numel()) if masked is ... else masked), q, k


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("cols", COLS.values(), ids=COLS)
def test_a_tile_is_its_part_of_the_softmax_of_whole_rows(cols, finite):
    call = biased_call()
    s = dense_scores(call)
    found = tile_weights(call, *tile_of(call, cols), s.logsumexp(-1, keepdim=True)[:, :, ROWS], finite=finite)
    close(found, s.softmax(-1)[:, :, ROWS, cols])


def test_additive_scores_go_through_the_function_that_is_given():
    u = torch.randn(D).double()
    call = biased_call(score=Additive(u), mask=None)
    planned, q, k = tile_of(call, slice(0, 9))
    gaps = torch.tanh(q[:, :, :, None] + k.repeat_interleave(2, 1)[:, :, None])
    close(tile_scores(call, planned, q, k), (gaps * u).sum(-1) + call.bias.values[:, ROWS, :9])
    zeros = tile_scores(call, planned, q, k, additive=lambda q, k, u: q.new_zeros(B, H, 4, 9))
    close(zeros, call.bias.values[:, ROWS, :9].expand(B, H, 4, 9))


@pytest.mark.parametrize("masked", [None, slice(0, 3), slice(1, 2)])
@pytest.mark.parametrize("cols", COLS.values(), ids=COLS)
def test_the_mask_is_evaluated_at_the_planned_keys_alone(cols, masked):
    call = biased_call(mask=~Causal())
    hidden = ~HIDDEN[ROWS, cols]
    reached = torch.zeros(hidden.shape[-1], dtype=torch.bool)
    reached[slice(0, 0) if masked is None else masked] = True
    found = tile_scores(call, *tile_of(call, cols, masked))
    assert torch.equal(found == -torch.inf, (hidden & reached).expand_as(found))


def test_hidden_numbers_that_are_not_finite_change_nothing_if_the_caller_says_so():
    call = biased_call()
    call.bias.values[:, HIDDEN] = torch.nan
    found = tile_scores(call, *tile_of(call, slice(0, J)), finite=False)
    close(found, dense_scores(call)[:, :, ROWS])


def test_the_mask_that_is_added_in_place_changes_no_gradient():
    call = biased_call()
    leaves = [x.requires_grad_() for x in (call.q, call.k, call.bias.values)]
    s = dense_scores(call).softmax(-1)[:, :, ROWS]
    tile = normalize_tile(call, call.whole(), tile_scores(call, *tile_of(call, slice(0, J))), None)[0]
    close(*(torch.autograd.grad(A.sin().sum(), leaves) for A in (tile, s)))


@pytest.mark.parametrize("normalize", [None, SinkSoftmax(0.3), Sigmoid()], ids=repr)
def test_whole_rows_need_no_statistic_and_have_the_same_weights_with_it(normalize):
    call = biased_call(normalize=normalize)
    at, s = call.whole(), dense_scores(call)
    A, statistic = normalize_tile(call, at, s, None)
    again, kept = normalize_tile(call, at, s, statistic)
    close(again, A)
    assert kept is statistic
    sink = torch.full((B, H, I, 1), 0.3 if normalize == SinkSoftmax(0.3) else -torch.inf).double()
    close(A, s.sigmoid() if normalize == Sigmoid() else torch.cat([s, sink], -1).softmax(-1)[..., :-1])
    if statistic is not None:
        shifted, _ = normalize_tile(call, at, s, statistic + 1)
        close(shifted, A / torch.e)


def test_single_entries_have_the_weights_of_the_dense_matrix():
    call = biased_call()
    s = dense_scores(call)
    b, h, row, j = (torch.randint(n, (50,)) for n in (B, H, I, J))
    at = Point(b, h, row, j, call.offset, torch.float64)
    bare = (s - call.bias.values)[b, h, row, j].nan_to_num(neginf=5.0)  # the mask of the call hides them again
    close(entry_weights(call, at, bare, s.logsumexp(-1)[b, h, row]), s.softmax(-1)[b, h, row, j])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_mask_to_be_added_is_exactly_zero_or_minus_infinity(dtype):
    found = additive_mask(torch.tensor([True, False]), dtype)
    assert torch.equal(found, torch.tensor([0.0, -torch.inf], dtype=dtype))


def test_the_tile_to_be_added_holds_bias_and_mask_or_is_none():
    call = biased_call()
    block = replace(call.whole(), rows=ROWS, cols=slice(1, 10))
    bias = call.bias.values[None, :, ROWS, 1:10]
    both = bias.masked_fill(HIDDEN[ROWS, 1:10], -torch.inf)
    close(additive_tile(call, block, torch.float64), both)
    close(additive_tile(call, block, torch.float64, masked=False), bias)
    mask = additive_tile(biased_call(bias=None), block, torch.float32)
    close(mask, torch.zeros(1, 1, 4, 9).masked_fill(HIDDEN[ROWS, 1:10], -torch.inf))
    shared = biased_call(bias=Added(torch.ones(1, J).double()), mask=None)
    close(additive_tile(shared, block, torch.float32), torch.ones(1, 1, 4, 9))
    assert additive_tile(biased_call(bias=None), block, torch.float32, masked=False) is None
    assert additive_tile(biased_call(bias=None, mask=None), block, torch.float32) is None
