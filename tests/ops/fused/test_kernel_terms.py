"""Masks and biases as kernels take them: a band, lengths, or lists of tiles that spell out the mask."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, which comes with the development extras on Linux")

import regard as R
from regard.kernels.tiles import UNBOUNDED
from regard.ops.call import Call
from regard.ops.fused.kernel_terms import Tiling, band_pattern, has_kernel_form, kernel_bias, mask_pattern
from regard.ops.terms.masks import Mask
from regard.ops.terms.term import term

N_I, N_J = 37, 70


def call_of(mask=None, bias=None, n_i=N_I, n_j=N_J, **options):
    return Call.of(torch.randn(2, 2, n_i, 4), torch.randn(2, 1, n_j, 4), mask=mask, bias=bias, **options)


BANDS = {
    "none": (None, (-UNBOUNDED, UNBOUNDED, None)),
    "causal": (R.Causal(), (0, UNBOUNDED, None)),
    "window": (R.Window(5), (-4, 4, None)),
    "causal window": (R.Causal() & R.Window(before=9, after=3), (0, 9, None)),
    "diagonal": (R.Diagonal() & R.Window(5), (0, 0, None)),
    "lengths": (R.Padding((70, 3)), (-UNBOUNDED, UNBOUNDED, [70, 3])),
    "one length for all": (R.Padding((9,)), (-UNBOUNDED, UNBOUNDED, [9, 9])),
    "the shorter of two": (R.Padding((70, 3)) & R.Padding(torch.tensor([8, 9])), (-UNBOUNDED, UNBOUNDED, [8, 3])),
}


@pytest.mark.parametrize("name", BANDS)
def test_bands_and_lengths_are_numbers(name):
    mask, (low, high, lengths) = BANDS[name]
    pattern = band_pattern(call_of(mask))
    assert (pattern.low, pattern.high) == (low, high)
    assert (None if pattern.lengths is None else pattern.lengths.tolist()) == lengths
    assert pattern.lists is None


@term
class EvenKeys(Mask):
    """(j + shift[b]) % 2 == 0, and nothing is said of its tiles."""

    shift: torch.Tensor

    def over(self, at):
        return (at.j + at.slice_of(self.shift, "b")) % 2 == 0


KEEP = torch.rand(2, N_J, generator=torch.Generator().manual_seed(0)) < 0.5
LISTED = {
    "keep": R.Padding(KEEP),
    "prefix": R.Causal() | R.Prefix(40),
    "documents": R.Documents(torch.arange(N_I) // 20, torch.arange(N_J) // 20),
    "not self": R.Causal() & ~R.Diagonal(),
    "dense": R.Dense(torch.rand(2, 2, N_I, N_J, generator=torch.Generator().manual_seed(1)) < 0.5),
    "nothing": R.Prefix(0) & R.Prefix(3),
    "rule": R.Rule(lambda b, h, i, j: (i + j + h) % 3 > b),
    "rule of heads": R.Causal() & R.Rule(lambda b, h, i, j: j <= i - h),
    "of a user": EvenKeys(torch.tensor([0, 1])),
}


def written_out(lists, tiling, order):
    """The mask that lists of tiles spell out, as the docstring of `Pattern` says."""
    rows, cols = tiling.rows, tiling.cols
    seen = torch.zeros(2, 2, len(order), -(-N_J // cols) * cols, dtype=torch.bool)

    def at(x, b, h):
        return x[b if x.shape[0] > 1 else 0, h if x.shape[1] > 1 else 0]

    for b in range(2):
        for h in range(2):
            full, full_n, part, part_n, index = (
                at(x, b, h) for x in (lists.full, lists.full_counts, lists.part, lists.part_counts, lists.bits_index)
            )
            for one in range(len(full_n)):
                tiles = [(int(n), None) for n in full[one, : int(full_n[one])]]
                tiles += [(int(n), int(m)) for n, m in zip(part[one], index[one], strict=True)][: int(part_n[one])]
                for other, bits in tiles:
                    r, c = (other, one) if tiling.by_keys else (one, other)
                    where = slice(r * rows, (r + 1) * rows), slice(c * cols, (c + 1) * cols)
                    assert not seen[b, h][where].any(), "a tile is visited twice"
                    words = None if bits is None else lists.bits[bits]
                    entries = True if words is None else (words[..., None] >> torch.arange(32) & 1).flatten(-2).bool()
                    seen[b, h][where] = entries
    natural = torch.zeros(2, 2, N_I + 1, seen.shape[-1], dtype=torch.bool)
    natural[:, :, order.clamp(max=N_I)] = seen
    return natural[:, :, :N_I, :N_J]


@pytest.mark.parametrize("by_keys", [False, True], ids=["by rows", "by keys"])
@pytest.mark.parametrize("ordered", [False, True], ids=["in order", "sorted by bin"])
@pytest.mark.parametrize("name", LISTED)
def test_lists_of_tiles_spell_out_the_mask(name, ordered, by_keys):
    call = call_of(LISTED[name])
    order = torch.full((48,), N_I)
    order[:N_I] = torch.arange(N_I).flip(0) if ordered else torch.arange(N_I)
    tiling = Tiling(16, 32, order.int() if ordered else None, by_keys)
    assert band_pattern(call) is None
    lists = mask_pattern(call, tiling).lists
    assert torch.equal(written_out(lists, tiling, order), LISTED[name].over(call.whole()).expand(call.shape))


def test_tiles_on_the_diagonal_or_past_the_last_key_are_taken_entry_by_entry():
    call = call_of(R.Prefix(70) | R.Prefix(71), n_i=64, n_j=70, offset=0)  # all is seen; the third tile has 6 keys
    lists = mask_pattern(call, Tiling(16, 32)).lists
    full = [set(lists.full[0, 0, r, : int(lists.full_counts[0, 0, r])].tolist()) for r in range(4)]
    assert full == [{1}, {1}, {0}, {0}]


def test_lists_are_made_once_for_each_mask_and_tiling_and_never_kept_for_rules():
    keep = R.Padding(KEEP)
    first = mask_pattern(call_of(keep), Tiling(16, 32)).lists
    assert mask_pattern(call_of(keep), Tiling(16, 32)).lists is first
    assert mask_pattern(call_of(keep), Tiling(32, 32)).lists is not first
    rule = LISTED["rule"]
    assert mask_pattern(call_of(rule), Tiling(16, 32)).lists is not mask_pattern(call_of(rule), Tiling(16, 32)).lists


def test_each_bias_is_slopes_a_table_or_values():
    shaw = R.Relative.shaw(torch.zeros(5, 4))
    assert [has_kernel_form(x) for x in (R.Alibi(2), R.Added(torch.randn(37, 70)), shaw)] == [True, True, False]
    torch.testing.assert_close(kernel_bias(call_of(bias=R.Alibi(2))).slopes, torch.tensor([2**-4, 2**-8]))
    values = torch.randn(2, N_I, N_J)
    assert kernel_bias(call_of(bias=R.Added(values))).values.shape == (1, 2, N_I, N_J)
    none = kernel_bias(call_of())
    assert none.slopes is None
    assert none.values is None


@pytest.mark.parametrize("offset", [None, 0, 50])
def test_a_table_of_distances_is_walked_by_its_steps(offset):
    bias = R.Relative.t5(torch.randn(2, 32))
    call = call_of(bias=bias, offset=offset)
    found = kernel_bias(call)
    b, h, i, j = torch.meshgrid(*map(torch.arange, call.shape), indexing="ij")
    at = found.origin + sum(n * step for n, step in zip((b, h, i, j), found.steps, strict=True))
    assert torch.equal(found.values.flatten()[at], bias(b, h, i + call.offset, j))
