"""The positional score against its definition on the dense matrix in float64, and heads where it is known."""

import pytest
import torch

from regard import Alibi, Causal, Diagonal, Documents, Padding, Prefix, Window, weights
from regard.lens import positional
from regard.lens.analysis import head_measures as measures

H, N = 4, 37
close = torch.testing.assert_close


def make(seed=0, slopes=(1.0, 0.3, 0.1, 0.03), **terms):
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 2, H, N, 8, generator=generator, dtype=torch.float64)
    return weights(q, k, bias=Alibi(slopes=torch.tensor(slopes, dtype=torch.float64)), **terms)


def by_hand(A, counted):
    """max(0, 1 - sum D(A_i, moved_i) / sum D(A_i, even_i)), row by row; keys are visible if their weight is above 0."""
    dense = A.dense()
    score = torch.zeros(dense.shape[:2], dtype=torch.float64)
    for b in range(dense.shape[0]):
        for h in range(dense.shape[1]):
            moved = even = 0.0
            for i in range(1, N):
                if counted[b, i] and counted[b, i - 1]:
                    row, before = dense[b, h, i], torch.cat([torch.zeros(1), dense[b, h, i - 1]])
                    moved += (torch.cat([row, torch.zeros(1)]) - before).abs().sum() / 2
                    visible = row > 0
                    even += (row - visible * row.sum() / max(visible.sum(), 1)).abs().sum() / 2
            score[b, h] = max(0.0, 1 - moved / even)
    return score


CASES = {
    "plain": {},
    "causal": {"mask": Causal()},
    "window": {"mask": Causal() & Window(9)},
    "padding": {"mask": Padding((N, 20))},
    "left padding": {"mask": Causal() & Padding(torch.arange(N) >= torch.tensor([[0], [11]]))},
    "documents": {"mask": Causal() & Documents(torch.arange(N) // 13)},
}


@pytest.mark.parametrize("terms", CASES.values(), ids=CASES)
@pytest.mark.parametrize("entries", [2**21, 1, N * 2 * H * 5])
def test_it_is_its_definition_however_few_rows_are_in_memory(terms, entries, monkeypatch):
    monkeypatch.setattr(measures, "CHUNK_ENTRIES", entries)
    A = make(**terms)
    found = positional(A)
    assert 0.01 < found.max() < 0.99
    close(found, by_hand(A, (A.dense() > 0).any(2).any(1)))


def test_queries_are_chosen_and_leading_dims_kept():
    A, chosen = make(mask=Causal()), torch.rand(2, N) > 0.3
    close(positional(A, queries=chosen), by_hand(A, chosen))
    q, k = torch.randn(2, 2, 3, H, 9, 8)
    assert positional(weights(q, k)).shape == (2, 3, H)


def test_scores_of_distance_alone_have_one_and_even_attention_and_a_sink_zero():
    q = torch.zeros(1, 2, 400, 8)
    steep = weights(q, q, mask=Causal(), bias=Alibi(slopes=torch.tensor([1.0, 0.3])))
    assert positional(steep).min() > 0.97
    assert positional(weights(q, q, mask=Causal())).abs().max() == 0
    assert positional(weights(q, q)).abs().max() == 0
    assert positional(weights(q, q, mask=Diagonal())).tolist() == [[0.0, 0.0]]  # the mask leaves no other key
    assert positional(weights(q, q, mask=Causal() & Prefix(1))).abs().max() == 0
    sink = q.clone()
    sink[:, :, 0] = 3.0
    assert positional(weights(q + 3, sink, mask=Causal())).max() < 0.02


def test_heads_that_follow_the_tokens_have_zero():
    q, k = torch.randn(2, 1, 4, 400, 16)
    assert positional(weights(q * 2, k, mask=Causal())).max() < 0.02


def test_what_is_no_matrix_and_queries_of_another_number_are_refused():
    with pytest.raises(TypeError, match="A must be the Weights of one layer"):
        positional(torch.rand(1, 1, 4, 4))
    with pytest.raises(ValueError, match="queries must be bool with one entry for each of the 37 queries"):
        positional(make(), queries=torch.ones(4, dtype=torch.bool))
