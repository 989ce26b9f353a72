"""`tape.compare`: the differences of two tapes against the dense matrices in float64."""

import math

import pytest
import torch

from regard import Causal, Padding, weights
from regard.lens import Tape, capture
from regard.lens.tape import comparison
from regard.nn import Attention

COLUMNS = ["layer", "call", "batch", "head", "difference", "largest", "query", "key", "other_query", "other_key"]
COLUMNS += ["query_token", "key_token", "unaligned", "other_unaligned"]


def random_weights(n, seed, b=1, h=3, j=None, **terms):
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(b, h, m, 8, generator=generator, dtype=torch.float64) * 1.5 for m in (n, j or n))
    return weights(q, k, **terms)


def rows_of(tape, other):
    found = tape.compare(other)
    assert list(found) == COLUMNS
    columns = [list(found[name]) for name in COLUMNS]
    return [dict(zip(COLUMNS, row, strict=True)) for row in zip(*columns, strict=True)]


def check(row, A, B, rows, cols):
    """Compare a row of the table with the dense matrices of its head; rows and cols are pairs of positions."""
    (i, i2), (j, j2) = zip(*rows, strict=True), zip(*cols, strict=True)
    a, b = A[list(i)], B[list(i2)]
    difference = a[:, list(j)] - b[:, list(j2)]
    assert row["difference"] == pytest.approx(difference.abs().mean().item(), rel=1e-12)
    assert abs(row["largest"]) == pytest.approx(difference.abs().max().item(), rel=1e-12)
    query, key = i.index(row["query"]), j.index(row["key"])
    assert row["largest"] == pytest.approx(difference[query, key].item(), rel=1e-12)
    assert (row["other_query"], row["other_key"]) == (i2[query], j2[key])
    alone = [n for n in range(A.shape[1]) if n not in j], [n for n in range(B.shape[1]) if n not in j2]
    assert row["unaligned"] == pytest.approx(a[:, alone[0]].sum(1).mean().item(), abs=1e-12)
    assert row["other_unaligned"] == pytest.approx(b[:, alone[1]].sum(1).mean().item(), abs=1e-12)


OURS = ["so", "the", "trophy", "is", "in", "the", "case", "but", "too", "big", "."]
THEIRS = ["the", "trophy", "is", "now", "in", "the", "case", "but", "too", "small", "."]
PAIRS = [(1, 0), (2, 1), (3, 2), (4, 4), (5, 5), (6, 6), (7, 7), (8, 8), (9, 9), (10, 10)]


@pytest.mark.parametrize("entries", [2**21, 1, 3 * 12 * 4])
@pytest.mark.parametrize("mask", [None, Causal()])
def test_heads_are_ranked_by_the_mean_difference_over_aligned_tokens(mask, entries, monkeypatch):
    monkeypatch.setattr(comparison, "CHUNK_ENTRIES", entries)
    names = ("a", "b")
    ours = {(name, 0): random_weights(len(OURS), n, mask=mask) for n, name in enumerate(names)}
    theirs = {(name, 0): random_weights(len(THEIRS), n + 9, mask=mask) for n, name in enumerate(names)}
    tape, other = Tape(ours), Tape(theirs)
    tape.tokens, other.tokens = OURS, THEIRS
    found = rows_of(tape, other)
    assert sorted((row["layer"], row["head"]) for row in found) == [(name, head) for name in names for head in range(3)]
    differences = [row["difference"] for row in found]
    assert differences == sorted(differences, reverse=True)
    for row in found:
        A, B = (x[row["layer"], 0].dense()[0, row["head"]] for x in (ours, theirs))
        check(row, A, B, PAIRS, PAIRS)
        labels = {9: "big / small"}
        assert row["query_token"] == labels.get(row["query"], OURS[row["query"]])
        assert row["key_token"] == labels.get(row["key"], OURS[row["key"]])


@pytest.mark.parametrize("by", ["kl", "js", "mse", "dot"])
@pytest.mark.parametrize("entries", [2**21, 60])
def test_a_divergence_is_the_mean_over_aligned_queries_of_their_weights_on_aligned_keys(by, entries, monkeypatch):
    monkeypatch.setattr(comparison, "CHUNK_ENTRIES", entries)
    ours, theirs = (random_weights(11, seed, mask=Causal()) for seed in range(2))
    tape, other = Tape({("a", 0): ours}), Tape({("a", 0): theirs})
    tape.tokens, other.tokens = OURS, THEIRS
    found = tape.compare(other, by=by)
    assert list(found) == [by if name == "difference" else name for name in COLUMNS]
    i, j = (torch.tensor(x) for x in zip(*PAIRS, strict=True))
    a, b = ours.dense()[0][:, i][:, :, i], theirs.dense()[0][:, j][:, :, j]
    M = (a + b) / 2
    want = {
        "kl": torch.special.xlogy(a, a / b).nan_to_num().sum(-1),
        "js": (torch.special.xlogy(a, a / M).nan_to_num() + torch.special.xlogy(b, b / M).nan_to_num()).sum(-1) / 2,
        "mse": (a - b).square().mean(-1),
        "dot": (a * b).sum(-1),
    }[by].mean(-1)
    assert [float(want[head]) for head in found["head"]] == pytest.approx(list(found[by]), rel=1e-9)
    assert list(found[by]) == sorted(found[by], reverse=by != "dot")
    assert next(tape.comparing(other, by=by))[0][by] == pytest.approx(float(want[0]), rel=1e-9)


def test_kl_is_infinite_where_the_other_tape_sees_less():
    tape, other = (Tape({("a", 0): random_weights(5, 0, mask=mask)}) for mask in (None, Causal()))
    assert list(tape.compare(other, by="kl")["kl"]) == [math.inf] * 3
    assert all(x < math.log(2) for x in tape.compare(other, by="js")["js"])


@pytest.mark.parametrize("by", ["jsd", None])
def test_other_names_of_differences_are_refused(by):
    tape = Tape({("a", 0): random_weights(5, 0)})
    with pytest.raises(ValueError, match="by must be 'difference', 'kl', 'js', 'mse' or 'dot', got"):
        tape.compare(tape, by=by)


def test_a_tape_compared_with_itself_has_no_difference():
    tape = Tape({("a", 0): random_weights(9, 0), ("a", 1): random_weights(9, 1)})
    for row in rows_of(tape, tape):
        assert row["difference"] == row["largest"] == row["unaligned"] == row["other_unaligned"] == 0
        assert (row["query_token"], row["key_token"]) == ("", "")


def test_each_batch_row_has_its_own_tokens_and_padding_has_no_pair():
    real, real2 = torch.arange(8) < torch.tensor([[8], [5]]), torch.arange(9) >= torch.tensor([[2], [0]])
    A = random_weights(8, 0, b=2, mask=Padding(real))
    B = random_weights(9, 1, b=2, mask=Padding(real2))
    tape, other = Tape({("a", 0): A}), Tape({("a", 0): B})
    tape.tokens = [list("abcdefgh"), list("abcde")]
    other.tokens = [list("abxdefg"), list("zabcxdefg")]
    pairs = [
        [(0, 2), (1, 3), (2, 4), (3, 5), (4, 6), (5, 7), (6, 8)],
        [(0, 1), (1, 2), (2, 3), (3, 5), (4, 6)],
    ]
    for row in rows_of(tape, other):
        batch, head = row["batch"], row["head"]
        check(row, A.dense()[batch, head], B.dense()[batch, head], pairs[batch], pairs[batch])


def test_queries_and_keys_of_a_cross_attention_are_aligned_each_by_their_own_tokens():
    A, B = random_weights(4, 0, j=6), random_weights(3, 1, j=7)
    tape, other = Tape({("cross", 0): A}), Tape({("cross", 0): B})
    tape.tokens = {"*": (list("wxyz"), list("abcdef"))}
    other.tokens = {"*": (list("wyz"), list("abcdefg"))}
    for row in rows_of(tape, other):
        rows, cols = [(0, 0), (2, 1), (3, 2)], [(n, n) for n in range(6)]
        check(row, A.dense()[0, row["head"]], B.dense()[0, row["head"]], rows, cols)


def test_captures_of_two_models_are_compared_without_tokens():
    torch.manual_seed(0)
    x, models = torch.randn(1, 7, 16), [Attention(16, heads=2) for _ in range(2)]
    tapes = []
    for model in models:
        with torch.no_grad(), capture(model) as tape:
            model(x)
        tapes.append(tape)
    every = [(n, n) for n in range(7)]
    for row in rows_of(*tapes):
        check(row, *(tape[0].dense()[0, row["head"]].double() for tape in tapes), every, every)


def test_no_matrix_is_held():
    n, largest = 3000, 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max([largest, *(x.numel() for x in torch.utils._pytree.tree_leaves(out) if torch.is_tensor(x))])
            return out

    tape, other = (Tape({("a", 0): random_weights(n, seed, h=4)}) for seed in range(2))
    with Watch():
        tape.compare(other)
    assert largest < 4 * n * n / 8


def test_tapes_of_other_layers_heads_or_lengths_are_refused():
    def tape(name="a", n=5, **shape):
        return Tape({(name, 0): random_weights(n, 0, **shape)})

    with pytest.raises(TypeError, match="other must be a Tape, got list"):
        tape().compare([])
    with pytest.raises(ValueError, match="must have the same layers to compare them, got a on this tape alone"):
        tape().compare(tape("b"))
    two = Tape({("a", 0): random_weights(5, 0), ("a", 1): random_weights(5, 0)})
    with pytest.raises(ValueError, match="got a, 1 on the other alone; compare parts with"):
        tape().compare(two)
    with pytest.raises(ValueError, match="a has 1 batch rows and 3 heads on this tape, and 1 and 4 on the other"):
        tape().compare(tape(h=4))
    with pytest.raises(ValueError, match="a has 1 batch rows and 3 heads on this tape, and 2 and 3 on the other"):
        tape().compare(tape(b=2))
    with pytest.raises(ValueError, match=r"a has 5 queries on this tape and 6 on the other; set tape\.tokens of both"):
        tape().compare(tape(n=6))
    model = Attention(16, heads=4)
    with torch.no_grad(), capture(model, keep=["entropy"]) as reduced:
        model(torch.randn(1, 5, 16))
    with pytest.raises(ValueError, match="needs queries and keys; this capture kept only measures"):
        reduced.compare(reduced)


def test_a_text_without_tokens_has_no_difference():
    tape, other = Tape({("a", 0): random_weights(4, 0)}), Tape({("a", 0): random_weights(4, 0, mask=Padding((0,)))})
    tape.tokens, other.tokens = list("abcd"), []
    assert all(math.isnan(x) for x in tape.compare(other)["difference"])
