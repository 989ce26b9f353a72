"""Measures of heads against their definitions, written out on the dense matrix in float64."""

import pytest
import torch

from regard import Alibi, Causal, Dense, Diagonal, Padding, Prefix, Sigmoid, weights
from regard.lens import (
    capture,
    gradient_attention,
    norm_attention,
    word_weights,
)
from regard.lens.analysis import head_measures as measures
from regard.lens.analysis.head_measures import (
    diagonality,
    duplicate_token,
    induction,
    locality,
    previous_token,
    share,
    similarity,
    sinks,
)
from regard.nn import Attention

B, H, G = 2, 4, 2
close = torch.testing.assert_close


def make(i=23, j=None, seed=0, **terms):
    j = i if j is None else j
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(B, H, i, 8, generator=generator, dtype=torch.float64) * 1.5
    k = torch.randn(B, G, j, 8, generator=generator, dtype=torch.float64)
    return weights(q, k, **terms)


CASES = {
    "plain": {},
    "causal": {"mask": Causal()},
    "alibi": {"mask": Causal(), "bias": Alibi(H)},
    "padding": {"mask": Padding((23, 9))},
    "sigmoid": {"normalize": Sigmoid(-2.0), "mask": Causal()},
    "empty rows": {"mask": Causal() & ~Prefix(3)},
}
every_case = pytest.mark.parametrize("terms", CASES.values(), ids=CASES)


def real(A):
    """True for the queries that are real tokens, `b i`: those whose key some query sees."""
    b, _, i, _ = A.shape
    return (A.dense() > 0).any(2).any(1) if i == A.shape[-1] else torch.ones(b, i, dtype=torch.bool)


def by_hand(A, counts):
    """mean_i sum_j A_ij over the pairs that count, entry by entry; counts(b, i, j) with i the query's position."""
    dense, offset, queries = A.dense(), A.shape[-1] - A.shape[-2], real(A)
    b, h, n_i, n_j = dense.shape
    total = torch.zeros(b, h, dtype=dense.dtype)
    for m in range(b):
        for r in range(n_i):
            for j in range(n_j):
                if queries[m, r] and counts(m, r + offset, j):
                    total[m] += dense[m, :, r, j]
    return total / queries.sum(1)[:, None]


@every_case
def test_locality_is_the_mass_within_a_window(terms, small_blocks):
    A = make(**terms)
    close(locality(A, 4), by_hand(A, lambda b, i, j: abs(i - j) < 4))


@every_case
def test_previous_token_is_the_first_lower_diagonal(terms):
    A = make(**terms)
    dense = A.dense() * real(A)[:, None, :, None]
    close(previous_token(A), dense.diagonal(-1, -2, -1).sum(-1) / real(A).sum(1)[:, None])


def test_positions_count_from_the_end_of_the_keys_when_queries_are_few():
    A = make(5, 12, mask=Causal())
    close(previous_token(A), by_hand(A, lambda b, i, j: j == i - 1))
    close(locality(A, 3), by_hand(A, lambda b, i, j: abs(i - j) < 3))


@every_case
def test_duplicate_token_is_the_mass_on_earlier_equals(terms, small_blocks):
    A, tokens = make(**terms), torch.randint(5, (B, 23))
    close(duplicate_token(A, tokens), by_hand(A, lambda b, i, j: j < i and tokens[b, j] == tokens[b, i]))


@every_case
def test_induction_is_the_mass_behind_earlier_equals(terms, small_blocks):
    A, tokens = make(**terms), torch.randint(5, (B, 23))
    follows = real(A).roll(1, 1)  # the first token of a text follows no token, though padding may stand before it
    follows[:, 0] = False
    close(
        induction(A, tokens), by_hand(A, lambda b, i, j: follows[b, j] and j <= i and tokens[b, j - 1] == tokens[b, i])
    )


def test_token_measures_take_one_sequence_for_all_and_queries_at_the_end():
    A, tokens = make(5, 12, mask=Causal()), torch.randint(3, (12,), dtype=torch.uint8)
    close(duplicate_token(A, tokens), by_hand(A, lambda b, i, j: j < i and tokens[j] == tokens[i]))
    close(induction(A, tokens), by_hand(A, lambda b, i, j: 0 < j <= i and tokens[j - 1] == tokens[i]))


def test_a_head_that_copies_in_context_has_induction_one():
    period, n = 7, 21
    tokens = torch.arange(n) % period
    keep = torch.eye(n, dtype=torch.bool)
    for i in range(period, n):
        keep[i, i] = False
        keep[i, i - period + 1] = True
    A = make(n, mask=Dense(keep))
    late = torch.arange(n) >= period
    close(induction(A, tokens, queries=late), torch.ones(B, H, dtype=torch.float64))
    assert duplicate_token(A, tokens).abs().max() == 0


@pytest.mark.parametrize(("i", "j"), [(23, 23), (5, 12), (12, 5), (1, 4), (4, 1), (1, 1)])
def test_diagonality_falls_with_distance_from_the_stretched_diagonal(i, j):
    A = make(i, j)
    line = torch.arange(i, dtype=torch.float64) * (j - 1) / max(i - 1, 1)
    away = (line[:, None] - torch.arange(j)).abs() / max(j - 1, 1)
    close(diagonality(A), (A.dense() * (1 - away)).sum(-1).mean(-1))


def test_diagonality_is_the_area_under_the_mass_within_each_distance():
    A, n = make(9), 9
    away = (torch.arange(n)[:, None] - torch.arange(n)).abs()
    steps = torch.linspace(0, 1, 100_001, dtype=torch.float64)
    within = torch.stack([(A.dense() * (away <= d)).sum(-1).mean(-1) for d in range(n)], -1)
    area = within[..., (steps[:-1] * (n - 1)).floor().long()].mean(-1)
    close(diagonality(A), area, atol=1e-4, rtol=0)
    close(diagonality(make(9, mask=Diagonal())), torch.ones(B, H, dtype=torch.float64))


def test_share_takes_any_mask():
    A, keep = make(mask=Causal()), torch.rand(B, H, 23, 23) > 0.5
    close(share(A, Dense(keep)), (A.dense() * keep).sum(-1).mean(-1))
    close(share(A, Prefix(1)), A.dense()[..., 0].mean(-1))
    close(share(A, Causal()), torch.ones(B, H, dtype=torch.float64))


def test_queries_that_do_not_count_change_nothing():
    A = make(mask=Causal())
    real = torch.arange(23) < torch.tensor([[23], [9]])
    dense = A.dense()
    tokens = torch.randint(4, (B, 23))
    for measure in (
        lambda A, **k: locality(A, 3, **k),
        previous_token,
        diagonality,
        lambda A, **k: induction(A, tokens, **k),
    ):
        close(measure(A, queries=real)[0], measure(A)[0])
    expected = (dense * real[:, None, :, None]).sum(-2) / real.sum(-1)[:, None, None]
    found = sinks(A, threshold=0.1, queries=real)
    assert torch.equal(found.keys, expected > 0.1)
    close(found.share, torch.where(expected > 0.1, expected, 0.0).sum(-1))
    near = (torch.arange(23)[:, None] - torch.arange(23)).abs() < 3
    close(locality(A, 3, queries=real)[1], (dense[1] * near).sum(-1)[:, :9].mean(-1))


def test_sinks_are_keys_with_a_large_mean():
    A = make(mask=Causal())
    mean = A.dense().mean(-2)
    for threshold in (0.05, 0.1, 0.3):
        found = sinks(A, threshold=threshold)
        assert torch.equal(found.keys, mean > threshold)
        close(found.share, torch.where(mean > threshold, mean, 0.0).sum(-1))
    assert sinks(A, threshold=0.1).keys.any()
    assert not sinks(A, threshold=0.99).keys.any()


@every_case
@pytest.mark.parametrize("entries", [2**21, 64])
def test_similarity_is_the_cosine_of_whole_matrices(terms, entries, monkeypatch):
    monkeypatch.setattr(measures, "CHUNK_ENTRIES", entries)
    A, other = make(**terms), make(seed=1)
    ours, theirs = ((X.dense() * real(A)[:, None, :, None]).flatten(-2) for X in (A, other))
    close(similarity(A, other), torch.cosine_similarity(ours[:, :, None], theirs[:, None], -1))
    close(similarity(A), torch.cosine_similarity(ours[:, :, None], ours[:, None], -1))


def test_heads_that_see_nothing_resemble_none():
    assert similarity(make(mask=Prefix(0)), make()).abs().max() == 0


def test_measures_of_selected_weights_number_batch_rows_as_they_stand():
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, 3, H, 11, 8, generator=generator, dtype=torch.float64)
    A, tokens = weights(q, k, mask=Causal()), torch.randint(3, (3, 11), generator=generator)
    part = A.select(batch=[2, 1], heads=[3, 0])
    close(induction(part, tokens[[2, 1]]), induction(A, tokens)[[2, 1]][:, [3, 0]])


def test_leading_dims_are_kept():
    q = torch.randn(2, 3, H, 7, 8, dtype=torch.float64)
    A = weights(q, q)
    assert locality(A, 2).shape == (2, 3, H)
    assert similarity(A).shape == (2, 3, H, H)
    assert sinks(A).share.shape == (2, 3, H)


def test_measures_have_gradients():
    q = torch.randn(1, 2, 9, 4, dtype=torch.float64, requires_grad=True)
    locality(weights(q, q.detach(), mask=Causal()), 3).sum().backward()
    other = q.detach().clone().requires_grad_()
    dense = weights(other, q.detach(), mask=Causal(), backend="reference")[...]
    near = (torch.arange(9)[:, None] - torch.arange(9)).abs() < 3
    (dense * near).sum(-1).mean(-1).sum().backward()
    close(q.grad, other.grad)


def test_nothing_of_the_size_of_the_matrix_is_held():
    n, largest = 4096, 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max([largest, *(x.numel() for x in torch.utils._pytree.tree_leaves(out) if torch.is_tensor(x))])
            return out

    q, k = torch.randn(2, 1, 2, n, 4)
    A, tokens = weights(q, k, mask=Causal()), torch.randint(50, (n,))
    with Watch():
        previous_token(A), induction(A, tokens), diagonality(A), sinks(A), similarity(A)
    assert largest < 2 * n * n / 6


def test_bad_arguments_are_named():
    A = make()
    with pytest.raises(TypeError, match="mask must be a Mask term, got Tensor"):
        share(A, torch.ones(23, 23))
    with pytest.raises(ValueError, match="Dense keep must broadcast"):
        share(A, Dense(torch.ones(22, 23, dtype=torch.bool)))
    with pytest.raises(ValueError, match="queries must be bool with one entry for each of the 23 queries"):
        locality(A, 3, queries=torch.ones(22, dtype=torch.bool))
    with pytest.raises(ValueError, match="queries must be bool"):
        sinks(A, queries=torch.ones(23))
    with pytest.raises(TypeError, match="tokens must be a tensor"):
        induction(A, list(range(23)))
    with pytest.raises(TypeError, match="tokens must hold whole numbers"):
        induction(A, torch.randn(23))
    with pytest.raises(ValueError, match="tokens must hold one id for each of the 23 keys"):
        duplicate_token(A, torch.arange(22))
    with pytest.raises(ValueError, match="token measures are for self-attention"):
        induction(make(12, 5), torch.arange(5))
    with pytest.raises(ValueError, match="A and B must share batch, queries and keys"):
        similarity(A, make(22))
    with pytest.raises(TypeError, match="threshold must be a number"):
        sinks(A, threshold="high")
    with pytest.raises(ValueError, match="Window width must be 1 or more"):
        locality(A, 0)


TOKENS = torch.zeros(7, dtype=torch.long)


@pytest.mark.parametrize(
    "ask",
    [
        sinks,
        diagonality,
        previous_token,
        similarity,
        lambda A: similarity(make(7), A),
        lambda A: share(A, Causal()),
        lambda A: induction(A, TOKENS),
        lambda A: norm_attention(A, torch.randn(1, 2, 7, 4), torch.randn(8, 8)),
        lambda A: gradient_attention(A, torch.randn(1, 2, 7, 4), torch.randn(1, 2, 7, 4)),
        lambda A: word_weights(A, [0], [0]),
    ],
)
def test_a_tape_or_measures_instead_of_weights_raise(ask):
    model, x = Attention(8, 2), torch.randn(1, 7, 8)
    for keep, kind in ((None, "Tape"), (["max"], "Reduced")):
        with capture(model, keep=keep) as tape:
            model(x)
        with pytest.raises(
            TypeError, match=rf"must be the Weights of one layer, got {kind}; for a tape pass tape\[0\]"
        ):
            ask(tape if keep is None else tape[0])
