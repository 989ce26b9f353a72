"""What must hold whatever the numbers: properties of the operator, each with the terms it holds for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import regard as R
from regard import attend, weights
from regard.ops.backend_plan import BackendPlan
from regard.ops.blocks import prepared_call
from regard.ops.call import Call
from regard.ops.dispatch import BACKENDS
from tests.backends import flex_on_the_cpu

D = torch.float64
LENGTHS = st.integers(0, 13) | st.sampled_from([63, 129])
SEEN = st.integers(1, 13) | st.sampled_from([63, 129])


@dataclass(frozen=True)
class World:
    """One drawn attention: its tensors, its terms, its backend."""

    q: Tensor
    k: Tensor
    v: Tensor
    terms: dict[str, Any]
    backend: str
    offset: int | tuple[int, ...] | None = None

    def __repr__(self) -> str:
        shapes = [tuple(x.shape) for x in (self.q, self.k, self.v)]
        return f"World({shapes}, {self.terms}, {self.backend!r}, offset={self.offset})"

    @property
    def first_positions(self) -> Tensor:
        """The position of the first query of each batch row."""
        offset = self.k.shape[2] - self.q.shape[2] if self.offset is None else self.offset
        return torch.as_tensor(offset).expand(self.q.shape[0])

    def attend(self, **changed: Any) -> Tensor:
        given = {"q": self.q, "k": self.k, "v": self.v} | changed
        q, k, v = (given.pop(name) for name in ("q", "k", "v"))
        terms = self.terms | {"offset": self.offset} | given
        with flex_on_the_cpu():
            # A backend that objects leaves its turn to one that never does.
            plan = BACKENDS[self.backend].plan(Call.of(q, k, v, **terms))
            return attend(q, k, v, **terms, backend=self.backend if isinstance(plan, BackendPlan) else "tiled")

    def weights(self, **changed: Any) -> R.Weights:
        given = {"q": self.q, "k": self.k} | changed
        return weights(
            given.pop("q"),
            given.pop("k"),
            **(self.terms | {"offset": self.offset} | given),
            backend="reference" if self.backend == "reference" else None,
        )


MASKS = st.sampled_from(
    [
        None,
        R.Causal(),
        R.Window(3),
        R.Causal() & R.Chunked(4),
        R.Causal() & R.Window(5),
        R.Causal() | R.Prefix(2),
        R.Window(2) | R.Global(2),
        R.Dilated(3, 2),
        ~R.Diagonal(),
        R.Diagonal(),
        R.Prefix(0),
        R.Rule(lambda b, h, i, j: (i * 5 + j * 3) % 4 > 1),
    ]
)
SCORES = st.sampled_from(
    [None, R.Dot(0.7), R.Dot(cap=2.0), R.Cosine(0.3), "additive", "bilinear", "location", "function"]
)
NORMALIZERS = st.sampled_from(
    [None, R.SinkSoftmax(0.3), R.Sigmoid(-1.0), R.Sparsemax(), R.Entmax(1.4), R.Hard(), "tapered"]
)
BIASES = st.sampled_from([None, "alibi", "t5", "shaw", "added", "function", "scaled"])
SUMS_TO_ONE = (R.Softmax, R.Sparsemax, R.Entmax, R.Hard)


@st.composite
def worlds(draw, masks=MASKS, scores=SCORES, normalizers=NORMALIZERS, biases=BIASES, i=LENGTHS, j=LENGTHS):
    g = draw(st.integers(1, 3))
    h = g * draw(st.integers(1, 3))
    b, n_i, n_j = draw(st.integers(1, 2)), draw(i), draw(j)
    d, e = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=D)

    terms: dict[str, Any] = {
        "mask": draw(masks),
        "score": draw(scores),
        "bias": draw(biases),
        "normalize": draw(normalizers),
    }
    named = {
        "additive": lambda: R.Additive(randn(d)),
        "bilinear": lambda: R.Bilinear(randn(h, d, d)),
        "location": lambda: R.Location(randn(n_j + 1, d)),
        "alibi": lambda: R.Alibi(h),
        "scaled": lambda: randn(h) * R.Alibi(h) + randn(n_i, n_j),
        "t5": lambda: R.Relative.t5(randn(h, 8), 16),
        "shaw": lambda: R.Relative.shaw(randn(5, d)),
        "added": lambda: R.Added(randn(n_i, n_j)),
        "tapered": lambda: R.Tapered(R.Softmax(), R.Gaussian(randn(n_i) * 5, 2.0)),
    }
    table = randn(h, 5)
    functions = {
        "score": lambda: R.Score.of(lambda score, b, h, i, j: score * table[h, 0] + table[h, j % 5]),
        "bias": lambda: R.Bias.of(lambda b, h, i, j: table[h, (j - i) % 5]),
    }
    terms = {
        name: functions[name]() if term == "function" else named[term]() if isinstance(term, str) else term
        for name, term in terms.items()
    }
    return World(
        randn(b, h, n_i, d),
        randn(b, g, n_j, d),
        randn(b, g, n_j, e),
        terms,
        draw(st.sampled_from(list(BACKENDS))),
        draw(st.none() | st.integers(-4, 20) | st.just(tuple(range(3, 3 + 4 * b, 4)))),
    )


@pytest.fixture(autouse=True)
def _small(small_blocks):
    """Every property runs across the borders of blocks."""


def visible(world: World) -> Tensor:
    b, h, i, _ = world.q.shape
    j = world.k.shape[2]
    mask = world.terms["mask"]
    if mask is None:
        return torch.ones(b, h, i, j, dtype=torch.bool)
    fn = mask.bind(world.q, world.k, world.first_positions)
    at = [torch.arange(n).view([-1 if m == axis else 1 for m in range(4)]) for axis, n in enumerate((b, h, i, j))]
    return fn(*at).expand(b, h, i, j)


def close(x: Tensor, y: Tensor, tolerance: float = 1e-9) -> bool:
    return x.shape == y.shape and bool(x.isfinite().all()) and bool(((x - y).abs() <= tolerance * (1 + y.abs())).all())


def grouped(v: Tensor, h: int) -> Tensor:
    return v.repeat_interleave(h // v.shape[1], 1)


@given(worlds())
def test_attend_is_weights_times_v(world):
    assert close(world.attend(), world.weights() @ world.v)
    assert close(world.attend(), world.weights().dense() @ grouped(world.v, world.q.shape[1]))


@given(worlds())
def test_weights_are_zero_where_masked_and_never_negative(world):
    A = world.weights().dense()
    assert (A[~visible(world)] == 0).all()
    assert (A >= 0).all()


@given(worlds())
def test_rows_sum_to_one_or_are_empty(world):
    kind = world.terms["normalize"] or R.Softmax()
    sums = world.weights().dense().sum(-1)
    empty = ~visible(world).any(-1)
    assert (sums[empty] == 0).all()
    if isinstance(kind, SUMS_TO_ONE):
        assert close(sums[~empty], torch.ones_like(sums[~empty]))
    elif not isinstance(kind, R.Sigmoid):
        assert (sums <= 1 + 1e-9).all()


@given(worlds())
def test_an_empty_row_gives_zeros_and_no_gradient(world):
    leaves = [x.clone().requires_grad_() for x in (world.q, world.k, world.v)]
    out = world.attend(q=leaves[0], k=leaves[1], v=leaves[2])
    empty = ~visible(world).any(-1)
    assert (out[empty] == 0).all()
    grads = torch.autograd.grad(out.sum(), leaves, allow_unused=True, materialize_grads=True)
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[0][empty] == 0).all()


@given(worlds(normalizers=st.sampled_from([None, R.Sparsemax(), R.Entmax(1.5), R.Hard()]), j=SEEN))
def test_outputs_lie_in_the_hull_of_visible_values(world):
    seen = visible(world)
    v = grouped(world.v, world.q.shape[1])[:, :, None]
    low = torch.where(seen[..., None], v, torch.inf).amin(3)
    high = torch.where(seen[..., None], v, -torch.inf).amax(3)
    out, some = world.attend(), seen.any(-1)
    assert ((out >= low - 1e-9) & (out <= high + 1e-9))[some].all()


@given(worlds(scores=st.just(None), biases=st.just(None), normalizers=st.just(None), j=SEEN))
def test_a_zero_query_gives_the_mean_of_visible_values(world):
    seen = visible(world).to(D)
    mean = seen @ grouped(world.v, world.q.shape[1]) / seen.sum(-1, keepdim=True).clamp(min=1)
    assert close(world.attend(q=torch.zeros_like(world.q)), mean)


@given(worlds(biases=st.sampled_from([None, "added"]), scores=st.sampled_from([None, R.Dot(0.7), "additive"])))
def test_each_head_and_batch_row_alone_is_itself_in_the_batch(world):
    out, h, g = world.attend(), world.q.shape[1], world.k.shape[1]
    if isinstance(world.terms["mask"], R.Rule):
        return
    for b in range(world.q.shape[0]):
        for n in range(h):
            m = n // (h // g)
            one = world.attend(
                q=world.q[b : b + 1, n : n + 1],
                k=world.k[b : b + 1, m : m + 1],
                v=world.v[b : b + 1, m : m + 1],
                offset=int(world.first_positions[b]),
            )
            assert close(one[0, 0], out[b, n])


@given(worlds(), st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e6, 1e300]))
def test_garbage_in_keys_hidden_from_everyone_changes_nothing(world, garbage):
    hidden = ~visible(world).any(2).any(1)
    dirty = [torch.where(hidden[:, None, :, None], garbage, x).requires_grad_() for x in (world.k, world.v)]
    clean = [x.clone().requires_grad_() for x in (world.k, world.v)]
    results = []
    for k, v in (dirty, clean):
        q = world.q.clone().requires_grad_()
        out = world.attend(q=q, k=k, v=v)
        results.append([out, *torch.autograd.grad(out.sum(), (q, k, v), allow_unused=True, materialize_grads=True)])
    for ours, want in zip(*results, strict=True):
        assert close(ours, want)


@given(worlds(j=SEEN, i=SEEN), st.sampled_from([float("nan"), float("inf"), 1e6]), st.integers(0, 1000))
def test_garbage_in_a_key_reaches_only_the_rows_that_see_it(world, garbage, where):
    at = where % world.k.shape[2]
    k, v = world.k.clone(), world.v.clone()
    k[:, :, at], v[:, :, at] = garbage, garbage
    blind = ~visible(world)[..., at]
    q, dirty_q = world.q.clone().requires_grad_(), world.q.clone().requires_grad_()
    out, dirty = world.attend(q=q), world.attend(q=dirty_q, k=k, v=v)
    assert close(dirty[blind], out[blind])
    (grad,) = torch.autograd.grad(out[blind].sum(), q, materialize_grads=True)
    (dirty_grad,) = torch.autograd.grad(dirty[blind].sum(), dirty_q, materialize_grads=True)
    assert close(dirty_grad[blind], grad[blind])


@given(
    worlds(
        masks=st.just(None), biases=st.just(None), scores=st.sampled_from([None, R.Cosine(0.3), "additive", "bilinear"])
    ),
    st.randoms(),
)
def test_permuting_keys_and_values_together_changes_nothing(world, random):
    if isinstance(world.terms["normalize"], (R.Hard, R.Tapered)):
        return
    order = list(range(world.k.shape[2]))
    random.shuffle(order)
    assert close(world.attend(k=world.k[:, :, order], v=world.v[:, :, order]), world.attend(), 1e-7)


@given(worlds(masks=st.just(None), biases=st.sampled_from([None]), i=SEEN), st.randoms())
def test_permuting_queries_permutes_outputs(world, random):
    if isinstance(world.terms["normalize"], R.Tapered):
        return
    order = list(range(world.q.shape[2]))
    random.shuffle(order)
    assert close(world.attend(q=world.q[:, :, order]), world.attend()[:, :, order])


@given(worlds(scores=st.sampled_from([None, R.Dot(0.7)]), normalizers=st.just(None)))
def test_adding_a_constant_to_all_keys_changes_nothing(world):
    assert close(world.attend(k=world.k + torch.ones(world.k.shape[-1], dtype=D)), world.attend(), 1e-7)


@given(worlds(j=SEEN))
def test_linear_in_v(world):
    other = torch.randn_like(world.v)
    both = world.attend(v=2 * world.v - 3 * other)
    assert close(both, 2 * world.attend() - 3 * world.attend(v=other))


@given(worlds(scores=st.just(None), biases=st.just(None)))
def test_scale_is_a_factor_of_the_query(world):
    d = world.q.shape[-1]
    assert close(world.attend(score=R.Dot(0.4)), world.attend(q=world.q * 0.4 * d**0.5))


@given(
    worlds(
        scores=st.sampled_from([None, R.Dot(0.7), "bilinear"]),
        normalizers=st.sampled_from([None, R.SinkSoftmax(0.0), R.Sparsemax(), R.Entmax(1.5)]),
        biases=st.just(None),
    )
)
def test_huge_scores_stay_finite_and_equal_a_plain_softmax(world):
    huge = world.attend(q=world.q * 1e6)
    assert huge.isfinite().all()
    other = next(name for name in BACKENDS if name != world.backend)
    assert close(huge, replace(world, backend=other).attend(q=world.q * 1e6), 1e-6)


@given(worlds(masks=st.just(R.Causal()), i=SEEN, j=SEEN), st.integers(0, 200))
def test_the_future_leaves_the_past_as_it_was_to_the_bit(world, at):
    at = at % world.k.shape[2]
    past = max(0, min(world.q.shape[2], at - int(world.first_positions.max())))
    k, v = world.k.clone(), world.v.clone()
    k[:, :, at:] += 7
    v[:, :, at:] -= 7
    assert torch.equal(world.attend()[:, :, :past], world.attend(k=k, v=v)[:, :, :past])


@given(worlds())
def test_strides_and_offsets_do_not_matter(world):
    spread = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (world.q, world.k, world.v)]
    assert close(world.attend(q=spread[0], k=spread[1], v=spread[2]), world.attend())
    repeated = world.k[:, :, :1].expand(world.k.shape) if world.k.shape[2] else world.k
    assert close(world.attend(k=repeated), world.attend(k=repeated.contiguous()))


@given(worlds())
def test_inputs_are_not_modified_and_nothing_is_remembered(world):
    before = [x.clone() for x in (world.q, world.k, world.v)]
    first = world.attend()
    world.attend(q=world.q + 1)
    assert torch.equal(world.attend(), first)
    assert all(torch.equal(x, y) for x, y in zip(before, (world.q, world.k, world.v), strict=True))


@given(worlds(), st.sampled_from([(1, 1, 1), (3, 2, 64), (16, 8, 2**10), (128, 64, 2**20)]))
def test_tile_size_does_not_matter(world, sizes):
    out = world.attend()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(("ROWS_PER_BLOCK", "KEYS_PER_TILE", "SCORES_PER_BLOCK"), sizes, strict=True):
            patch.setattr(prepared_call, name, value)
        assert close(world.attend(), out)


@given(worlds())
def test_every_pair_of_backends_agrees(world):
    outs = [replace(world, backend=name).attend() for name in BACKENDS]
    assert all(close(out, outs[0]) for out in outs[1:])


@given(
    worlds(
        masks=st.sampled_from([R.Causal(), R.Window(3), R.Causal() & R.Window(4), R.Causal() | R.Prefix(2)]),
        biases=st.sampled_from([None, "alibi", "shaw", "t5"]),
        normalizers=st.sampled_from([None, R.Sparsemax()]),
        scores=st.just(None),
        i=SEEN,
    ),
    st.data(),
)
def test_any_chunking_through_a_cache_is_the_full_pass(world, data):
    n = world.q.shape[2]
    k, v = (torch.cat([x, x.flip(2)], 2)[:, :, : n or 1].expand(-1, -1, -1, -1) for x in (world.k, world.v))
    if k.shape[2] != n:
        return
    full = replace(world, k=k, v=v, offset=None)
    cuts = sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=4))})
    parts = []
    for start, stop in pairwise(cuts):
        ahead = world.terms["mask"] in (R.Window(3), R.Causal() | R.Prefix(2))  # these look past their own place
        seen = n if ahead else stop
        parts.append(full.attend(q=world.q[:, :, start:stop], k=k[:, :, :seen], v=v[:, :, :seen], offset=start))
    assert close(torch.cat(parts, 2), full.attend())


@given(
    worlds(
        j=SEEN,
        biases=st.sampled_from([None, "alibi", "t5"]),
        scores=st.sampled_from([None, "additive"]),
        masks=st.just(None),
    ),
    st.integers(0, 200),
)
def test_masking_keys_at_the_end_equals_removing_them(world, cut):
    if isinstance(world.terms["normalize"], R.Tapered):
        return
    n = cut % (world.k.shape[2] + 1)
    offset = 0 if world.offset is None else world.offset
    masked = world.attend(mask=R.Padding((n,) * world.q.shape[0]), offset=offset)
    assert close(masked, world.attend(k=world.k[:, :, :n], v=world.v[:, :, :n], offset=offset))


@given(
    worlds(j=SEEN, biases=st.just(None), scores=st.just(None), normalizers=st.sampled_from([None, R.Entmax(1.5)])),
    st.integers(1, 9),
)
def test_left_padded_equals_unpadded(world, pad):
    keys = [torch.cat([torch.full_like(x[:, :, :1], 9.0).expand(-1, -1, pad, -1), x], 2) for x in (world.k, world.v)]
    keep = torch.arange(keys[0].shape[2])[None] >= pad
    mask = R.Padding(keep.expand(world.q.shape[0], -1)) & R.Causal()
    plain = replace(world, offset=None)
    assert close(plain.attend(k=keys[0], v=keys[1], mask=mask), plain.attend(mask=R.Causal()))


@given(worlds(masks=st.just(None), i=SEEN, j=SEEN))
def test_structured_masks_equal_their_dense_spelling(world):
    i, j = world.q.shape[2], world.k.shape[2]
    rows, keys = torch.arange(i)[:, None] + world.first_positions[:, None, None, None], torch.arange(j)
    for mask, keep in (
        (R.Causal(), keys <= rows),
        (R.Window(3), (rows - keys).abs() < 3),
        (
            R.Blocks((torch.arange(-(-i // 4))[:, None] + torch.arange(-(-j // 4))) % 2 == 0, 4),
            (torch.arange(i)[:, None] // 4 + keys // 4) % 2 == 0,
        ),
    ):
        assert close(world.attend(mask=mask), world.attend(mask=R.Dense(keep)))


@given(
    worlds(
        i=SEEN,
        biases=st.sampled_from([None]),
        scores=st.just(None),
        masks=st.just(R.Causal()),
        normalizers=st.sampled_from([None, R.Sparsemax()]),
    ),
    st.data(),
)
def test_packed_documents_equal_a_loop_over_them(world, data):
    n = world.q.shape[2]
    k, v = (x[:, :, torch.arange(n) % max(1, x.shape[2])] if x.shape[2] else None for x in (world.k, world.v))
    if k is None:
        return
    cuts = sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=3))})
    ids = torch.bucketize(torch.arange(n), torch.tensor(cuts[1:]), right=True)
    packed = replace(world, k=k, v=v, offset=None).attend(mask=R.Causal() & R.Documents(ids))
    parts = [
        replace(world, offset=None).attend(q=world.q[:, :, a:z], k=k[:, :, a:z], v=v[:, :, a:z])
        for a, z in pairwise(cuts)
    ]
    assert close(packed, torch.cat(parts, 2))


@given(
    worlds(masks=st.just(None), normalizers=st.just(None), scores=st.just(None), biases=st.just(None), i=SEEN, j=SEEN),
    st.integers(0, 200),
)
def test_split_keys_merge_by_their_lse(world, cut):
    n = cut % (world.k.shape[2] + 1)
    parts = [slice(0, n), slice(n, None)]
    lses = [world.weights(k=world.k[:, :, part]).lse for part in parts]
    outs = [world.attend(k=world.k[:, :, part], v=world.v[:, :, part]) for part in parts]
    total = torch.logaddexp(*lses)
    merged = sum(out * (lse - total).exp()[..., None] for out, lse in zip(outs, lses, strict=True))
    assert close(total, world.weights().lse)
    assert close(merged, world.attend())


@given(
    worlds(
        i=SEEN,
        j=SEEN,
        masks=st.sampled_from([None, R.Causal()]),
        normalizers=st.sampled_from([None, R.SinkSoftmax(0.1)]),
    )
)
def test_half_precision_is_bounded_by_its_rounding(world):
    half = {name: getattr(world, name).to(torch.bfloat16) for name in ("q", "k", "v")}
    terms = {
        name: None if term is None else term.map_tensors(lambda x: x.to(torch.bfloat16).to(D))
        for name, term in world.terms.items()
    }
    rounded = replace(world, terms=terms)
    truth = rounded.attend(**{name: x.to(D) for name, x in half.items()})
    assert close(rounded.attend(**half).to(D), truth, 0.02)


@given(worlds(j=SEEN, i=SEEN))
@settings(max_examples=12)
def test_dropout_is_unbiased_and_repeats_with_the_seed(world):
    if world.q.shape[2] * world.k.shape[2] > 200:
        return
    torch.manual_seed(1)
    first = world.attend(dropout=0.3)
    torch.manual_seed(1)
    assert torch.equal(world.attend(dropout=0.3), first)
    draws = torch.stack([world.attend(dropout=0.3) for _ in range(300)])
    error = (draws.mean(0) - world.attend()).abs()
    assert (error <= 6 * draws.std(0) / 300**0.5 + 1e-9).all()


@pytest.mark.thorough
@given(
    worlds(
        i=st.integers(1, 5),
        j=st.integers(1, 5),
        normalizers=st.sampled_from([None, R.Sigmoid(0.0), R.SinkSoftmax(0.0)]),
    )
)
@settings(max_examples=20)
def test_gradients_under_dropout_pass_gradcheck_with_a_fixed_seed(world):
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(3)
        return world.attend(q=q, k=k, v=v, dropout=0.4)

    assert torch.autograd.gradcheck(run, [x.clone().requires_grad_() for x in (world.q, world.k, world.v)])


def test_every_term_is_drawn_by_some_property():
    drawn = "Causal Chunked Neighborhood Window Prefix Global Dilated Diagonal Rule Padding Dense Blocks Documents"
    drawn += " Alibi Relative Added Gaussian Bias"
    drawn += " Dot Cosine Additive Bilinear Location Score Softmax SinkSoftmax Sigmoid Sparsemax Entmax Hard Tapered"
    base_classes = {"Mask", "Normalizer"}
    covered_elsewhere = {"Near", "Summary", "Weights"}
    terms = {name for name in R.__all__ if name[0].isupper()}
    assert terms - base_classes - covered_elsewhere == set(drawn.split())


@given(
    worlds(
        masks=st.just(None),
        scores=st.sampled_from([None, R.Dot(0.7), R.Dot(cap=2.0), R.Cosine(0.3), "additive", "bilinear"]),
        normalizers=st.just(None),
        biases=st.just(None),
        j=SEEN,
    ),
    st.data(),
)
def test_parts_of_the_keys_merge_into_the_whole(world, data):
    cut = data.draw(st.integers(0, world.k.shape[2]))
    outs, statistics = [], []
    for keys in (slice(0, cut), slice(cut, None)):
        A = world.weights(k=world.k[:, :, keys], offset=0)
        outs.append(A @ world.v[:, :, keys])
        statistics.append(A.lse)
    out, lse = R.merge(outs, statistics)
    whole = world.weights()
    torch.testing.assert_close(out, whole @ world.v)
    torch.testing.assert_close(lse, whole.lse)


@given(
    worlds(
        scores=st.sampled_from([None, R.Dot(0.7), R.Dot(cap=2.0), R.Cosine(0.3), "additive", "bilinear", "function"]),
        normalizers=st.sampled_from([None, R.SinkSoftmax(0.3), R.Sigmoid(-1.0), R.Sparsemax(), R.Entmax(1.4)]),
        biases=st.sampled_from([None, "alibi", "t5", "shaw", "function"]),
        i=SEEN,
        j=SEEN,
    ),
    st.data(),
)
def test_texts_of_a_nested_tensor_are_attended_as_if_each_stood_alone(world, data):
    texts = data.draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=4))
    texts[0] = (max(1, texts[0][0]), max(1, texts[0][1]))  # an empty nested tensor has no width
    torch.manual_seed(0)
    q = [torch.randn(n, world.q.shape[1], world.q.shape[3], dtype=D) for n, _ in texts]
    k, v = ([torch.randn(n, x.shape[1], x.shape[3], dtype=D) for _, n in texts] for x in (world.k, world.v))
    given = (torch.nested.nested_tensor(x, layout=torch.jagged).transpose(1, 2) for x in (q, k, v))
    for out, *text in zip(attend(*given, **world.terms).unbind(), q, k, v, strict=True):
        alone = attend(*(x.transpose(0, 1)[None] for x in text), **world.terms)
        torch.testing.assert_close(out, alone[0])
