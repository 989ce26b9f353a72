"""Roles of heads: planted heads of each kind are found and no other is named; scores against their definitions."""

import math
import warnings

import pytest
import torch

from regard import Causal, Padding, weights
from regard.lens import CaptureWarning, Tape, capture, head_roles
from regard.lens.analysis import head_measures as measures
from regard.lens.analysis.head_roles import repeats, token_ids
from regard.nn import Attention

N = 160
SCORES = ["previous_token", "induction", "duplicate_token", "retrieval", "sink", "positional"]


def scores_of(tape, **thresholds):
    """The columns of the table, as float64 tensors if they are scores."""
    found = head_roles(tape, **thresholds)
    columns = {name: list(found[name]) for name in found}
    return columns | {name: torch.tensor(columns[name], dtype=torch.float64) for name in SCORES}


def texts(rows=1, n=N, seed=0, vocabulary=30):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (rows, n), generator=generator)


def words(ids):
    return [[f"word {x}" for x in row] for row in ids.tolist()]


def targets(ids):
    """The keys that a head of each kind looks at in one text, `i j`."""
    n = len(ids)
    i, j = torch.arange(n)[:, None], torch.arange(n)
    before, after = ids.roll(1), ids.roll(-1)
    return {
        "previous_token": j == i - 1,
        "induction": (before == ids[:, None]) & (j > 0) & (j <= i),
        "duplicate_token": (ids == ids[:, None]) & (j < i),
        "retrieval": (ids == after[:, None]) & (j < i) & (i < n - 1),
        "sink": (j == 0) & (i >= 0),
    }


def planted(ids, size=9.0):
    """Scores `b h i j` of heads by the role that they should have; None for those without one."""
    n = ids.shape[1]
    generator = torch.Generator().manual_seed(1)
    distance = (torch.arange(n)[:, None] - torch.arange(n)).double()
    heads = {}
    for name in ("previous_token", "induction", "duplicate_token", "retrieval", "sink"):
        heads[name, name] = torch.stack([size * targets(row)[name].double() for row in ids])
    everywhere = torch.ones(len(ids), 1, 1, dtype=torch.float64)
    heads["the nearest", "positional"] = -0.2 * distance.abs() * everywhere
    heads["five back", "positional"] = size * (distance == 5).double() * everywhere
    heads["itself", "positional"] = size * (distance == 0).double() * everywhere
    heads["even", ""] = 0 * distance * everywhere
    heads["random pairs", ""] = 4 * torch.randn(len(ids), n, n, generator=generator, dtype=torch.float64)
    heads["some words", ""] = 4 * torch.randn(len(ids), 1, 30, generator=generator, dtype=torch.float64).expand(
        -1, n, -1
    ).gather(2, ids[:, None].expand(-1, n, -1))
    return [role for _, role in heads], torch.stack(list(heads.values()), 1)


def matrix(scores, **terms):
    """Weights with these scores: queries are the rows, keys the unit vectors."""
    unit = torch.eye(scores.shape[-1], dtype=scores.dtype).expand(*scores.shape[:2], -1, -1)
    return weights(scores * math.sqrt(scores.shape[-1]), unit, **terms)


def planted_tape(rows=1, **terms):
    ids = texts(rows)
    roles, scores = planted(ids)
    tape = Tape({("layer", 0): matrix(scores, **{"mask": Causal()} | terms)})
    tape.tokens = words(ids)
    return tape, roles, ids


@pytest.mark.parametrize("rows", [1, 3])
def test_planted_heads_of_each_kind_are_found_and_no_other_is_named(rows):
    tape, roles, _ = planted_tape(rows)
    assert scores_of(tape)["roles"] == roles
    assert {name for name in roles if name} == set(SCORES)


def test_planted_heads_are_found_in_a_model_that_sees_later_tokens():
    tape, roles, _ = planted_tape(mask=None)
    assert scores_of(tape)["roles"] == roles


def test_weakly_planted_heads_are_named_by_lower_thresholds():
    ids = texts()
    roles, scores = planted(ids, size=4.0)
    tape = Tape({("layer", 0): matrix(scores[:, 1:5], mask=Causal())})
    tape.tokens = words(ids)
    high = dict.fromkeys(SCORES, 0.9)
    assert set(scores_of(tape, **high)["roles"]) == {""}
    low = dict.fromkeys(roles[1:5], 0.25)
    assert scores_of(tape, **low)["roles"] == roles[1:5]


def by_hand(A, ids, real, threshold=0.3):
    """The scores of a layer but `positional`, from its dense matrix, over all texts."""
    dense = A.dense()
    _, h, n, _ = dense.shape
    sums = {name: torch.zeros(h, dtype=torch.float64) for name in SCORES}
    counts = dict.fromkeys(SCORES, 0)
    for b, text in enumerate(ids.tolist()):
        valid = [i for i in range(n) if real[b, i]]
        start = valid[0]
        received = dense[b][:, valid].mean(1)
        sums["sink"] += torch.where(received > threshold, received, 0.0).sum(-1) * len(valid)
        counts["sink"] += len(valid)
        for i in valid:
            row, earlier = dense[b, :, i], range(start, i)
            if i > 0:
                sums["previous_token"] += row[:, i - 1]
            counts["previous_token"] += 1
            if any(text[j] == text[i] for j in earlier):
                sums["duplicate_token"] += sum(row[:, j] for j in earlier if text[j] == text[i])
                sums["induction"] += sum(row[:, j + 1] for j in earlier if text[j] == text[i])
                counts["duplicate_token"] += 1
                counts["induction"] += 1
            if i + 1 in valid:
                is_new = not any(text[j : j + 2] == text[i : i + 2] for j in earlier)
                if is_new and any(text[j] == text[i + 1] for j in earlier):
                    sums["retrieval"] += sum(row[:, j] for j in earlier if text[j] == text[i + 1])
                    counts["retrieval"] += 1
    return {name: sums[name] / counts[name] for name in SCORES[:-1]}


def padded(n, lengths, side):
    keep = torch.arange(n) < torch.tensor(lengths)[:, None]
    return keep if side == "right" else keep.flip(1)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_scores_are_their_definitions_and_leave_padding_out(side, is_causal, small_blocks):
    n, lengths = 41, [41, 29, 17]
    real, ids = padded(n, lengths, side), texts(3, n, vocabulary=7)
    generator = torch.Generator().manual_seed(2)
    q, k = torch.randn(2, 3, 4, n, 8, generator=generator, dtype=torch.float64)
    mask = Padding(real) & Causal() if is_causal else Padding(real)
    A = weights(q * 2, k, mask=mask)
    tape = Tape({("layer", 0): A})
    tape.tokens = [
        [word if r else "[PAD]" for word, r in zip(*x, strict=True)] for x in zip(words(ids), real, strict=True)
    ]
    found = scores_of(tape, sink=0.05)
    expected = by_hand(A, ids, real, threshold=0.05)
    assert expected["sink"].min() > 0
    for name in SCORES[:-1]:
        torch.testing.assert_close(found[name], expected[name], msg=name)


def test_batch_rows_of_leading_dims_and_queries_at_the_end_of_the_keys():
    ids = texts(6, 40, vocabulary=8)
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 2, 3, 2, 40, 8, generator=generator, dtype=torch.float64)
    flat = Tape({("layer", 0): weights(q.flatten(0, 1), k.flatten(0, 1), mask=Causal())})
    lead = Tape({("layer", 0): weights(q, k, mask=Causal())})
    last = Tape({("layer", 0): weights(q[..., 15:, :].flatten(0, 1), k.flatten(0, 1), mask=Causal())})
    flat.tokens = lead.tokens = words(ids)
    last.tokens = {"*": (words(ids[:, 15:]), words(ids))}
    assert str(scores_of(flat)) == str(scores_of(lead))
    counted = torch.arange(40) >= 15
    chosen = repeats(ids)["token"] & counted
    expected = measures.induction(flat["layer"], ids, queries=chosen) * chosen.sum(1)[:, None] / chosen.sum()
    torch.testing.assert_close(scores_of(last)["induction"], expected.sum(0))


def test_a_text_that_repeats_no_token_has_no_score_for_copies():
    q, k = torch.randn(2, 1, 2, 20, 8)
    tape = Tape({("layer", 0): weights(q, k, mask=Causal())})
    tape.tokens = [str(n) for n in range(20)]
    found = scores_of(tape)
    assert all(found[name].isnan().all() for name in ("induction", "duplicate_token", "retrieval"))
    assert all(found[name].isfinite().all() for name in ("previous_token", "sink", "positional"))


def test_copies_that_induction_finds_do_not_count_for_retrieval():
    ids = torch.tensor([[1, 2, 3, 1, 2, 4, 2, 3, 9, 4, 1]])
    found = repeats(ids)
    assert found["token"].nonzero()[:, 1].tolist() == [3, 4, 6, 7, 9, 10]
    # 3 1 is new and 1 known; 1 2 known; 4 2 is new; 2 3 known; 9 4 is new; 4 1 is new
    assert found["next token"].nonzero()[:, 1].tolist() == [2, 5, 8, 9]
    with_padding = token_ids([["a", "b", "a"], None], torch.tensor([[True, True, False], [True, True, True]]))
    assert with_padding.tolist() == [[0, 1, -1], [-1, -1, -1]]
    assert not repeats(with_padding)["token"].any()


def test_a_cross_attention_has_a_sink_score_alone():
    q, k = torch.randn(2, 1, 2, 20, 8)
    source, target = [[f"{side} {n % 7}" for n in range(20)] for side in "st"]
    layers = ("layer", "decoder.0.cross", "self")
    tape = Tape({(name, 0): weights(q, k) for name in layers})
    tape.tokens = {"layer": (target, source), "self": source}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = scores_of(tape)
    assert found["layer"] == [name for name in layers for _ in range(2)]
    assert found["sink"].isfinite().all()
    for name in {*SCORES} - {"sink"}:
        assert found[name].isfinite().tolist() == [False] * 4 + [True] * 2


def test_without_pandas_the_table_is_a_dict_of_columns(monkeypatch):
    monkeypatch.setattr("regard.lens.tape.overview.find_spec", lambda name: None)
    tape, roles, _ = planted_tape()
    found = head_roles(tape)
    assert list(found) == ["layer", "call", "head", *SCORES, "roles"]
    assert found["roles"] == roles
    assert set(found["layer"]) == {"layer"}


def test_roles_of_a_captured_model_have_a_row_for_each_call_and_head():
    model = torch.nn.Sequential(Attention(16, heads=4, mask=Causal()), Attention(16, heads=2, mask=Causal()))
    tokens = words(texts(1, 20, vocabulary=5))
    with torch.no_grad(), capture(model, tokens) as tape:
        model(torch.randn(1, 20, 16))
        model(torch.randn(1, 20, 16))
    found = scores_of(tape)
    calls = [("0", 0)] * 4 + [("1", 0)] * 2 + [("0", 1)] * 4 + [("1", 1)] * 2
    assert list(zip(found["layer"], found["call"], strict=True)) == calls
    assert found["head"] == [0, 1, 2, 3, 0, 1] * 2
    assert all(found[name].isfinite().all() for name in SCORES)


def test_no_matrix_is_held():
    n, largest = 4096, 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max([largest, *(x.numel() for x in torch.utils._pytree.tree_leaves(out) if torch.is_tensor(x))])
            return out

    q, k = torch.randn(2, 1, 2, n, 4)
    tape = Tape({("layer", 0): weights(q, k, mask=Causal())})
    tape.tokens = words(texts(1, n))
    with Watch():
        head_roles(tape)
    assert largest < 2 * n * n / 6


def test_short_texts_missing_tokens_and_bad_arguments_are_named():
    q, k = torch.randn(2, 1, 2, 20, 8)
    tape = Tape({("layer", 0): weights(q, k)})
    with pytest.warns(
        CaptureWarning, match="induction, duplicate_token and retrieval are NaN in layer, as the tape has"
    ):
        assert scores_of(tape)["induction"].isnan().all()
    short = Tape({("layer", 0): weights(q[:, :, :9], k[:, :, :9])})
    short.tokens = list("abcabcabc")
    with pytest.warns(CaptureWarning, match="the text of layer has fewer than 16 tokens"):
        head_roles(short)
    with pytest.raises(TypeError, match="retrieval must be a number, got 'high'"):
        head_roles(tape, retrieval="high")
    model = Attention(16, 4)
    with torch.no_grad(), capture(model, keep=["entropy"]) as tape:
        model(torch.randn(1, 20, 16))
    with pytest.raises(TypeError, match=r"tape\['\(model\)'\] must be the Weights of one layer, got Reduced"):
        head_roles(tape)
