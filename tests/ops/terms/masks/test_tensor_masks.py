"""Masks that read a tensor: centres in half precision, and centres that are no number."""

from __future__ import annotations

import pytest
import torch

from regard import Blocks, Causal, Documents, Near, Padding, attend, weights
from regard.ops.terms.masks import tensor_masks as module


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_near_sees_one_key_at_radius_zero_whatever_the_dtype_of_its_centre(dtype):
    center = {torch.bfloat16: 300, torch.float16: 4096}[dtype]
    keys = torch.arange(center - 5, center + 6)
    seen = Near(torch.tensor([float(center)], dtype=dtype), 0)(*[torch.tensor(0)] * 3, keys)
    assert keys[seen].tolist() == [center]


def test_a_centre_that_is_nan_hides_its_own_row_only():
    center = torch.arange(300.0)
    center[7] = torch.nan
    q, k = torch.randn(2, 1, 1, 300, 4)
    rows = weights(q, k, mask=Near(center, 1)).dense()[0, 0].sum(-1)
    assert rows[7] == 0
    torch.testing.assert_close(rows[torch.arange(300) != 7], torch.ones(299))


def test_a_term_on_another_device_is_made_of_tensors_without_gradients():
    center = torch.arange(3.0, requires_grad=True)
    near = Near(center, 1.0).with_tensors(torch.device("cpu"), torch.float32)
    assert not near.center.requires_grad
    padding = Padding((3, 1)).with_tensors(torch.device("meta"), torch.float32)
    assert padding.keys.device.type == "meta"


def test_a_mask_of_a_tensor_draws_at_its_own_size_and_at_most_24():
    assert Padding((2, 4)).draw().count("\n") == 5
    assert Documents(torch.arange(3)).draw() == "■ · ·\n· ■ ·\n· · ■"
    assert Blocks(torch.ones(2, 3, dtype=torch.bool), 2).draw().splitlines()[0].count("■") == 6
    assert Near(torch.arange(100.0), 1).draw().count("\n") == 23
    assert Near(torch.tensor(1.0), 0).draw().count("\n") == 11


def test_documents_of_one_argument_are_queries_and_keys_of_the_same_tokens():
    ids = torch.tensor([5, 5, 7])
    both = Documents(ids).over(weights(torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2))._call.whole())
    assert both[0, 0].int().tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]


def test_a_padding_of_lengths_is_that_of_its_tuple():
    q, k = torch.randn(2, 2, 1, 3, 4).unbind(0)
    one, other = (weights(q, k, mask=Padding(x)).dense() for x in ((3, 1), torch.tensor([3, 1])))
    assert torch.equal(one, other)
    assert torch.equal(one[1, 0] > 0, torch.tensor([True, False, False]).expand(3, 3))


def test_lengths_are_copied_to_a_gpu_once(monkeypatch):
    copied = []
    monkeypatch.setattr(module, "_lengths_on", lambda lengths, device: copied.append((lengths, device.type)))
    Padding((3, 5)).keys_on(torch.device("cuda"))
    assert Padding((3, 5)).keys_on(torch.device("cpu")).tolist() == [3, 5]
    given = torch.tensor([3, 5])
    assert Padding(given).keys_on(torch.device("cuda")) is given
    assert copied == [((3, 5), "cuda")]
    monkeypatch.undo()
    cpu = torch.device("cpu")
    assert module._lengths_on((3, 5), cpu) is module._lengths_on((3, 5), cpu)


def chosen_by_loops(scores, k, rows, cols, causal, offset):
    """The blocks that each block of queries keeps, block by block."""
    layout = torch.zeros(scores.shape, dtype=torch.bool)
    for r in range(scores.shape[-2]):
        first, last = r * rows + offset, r * rows + rows - 1 + offset
        past = [c for c in range(scores.shape[-1]) if not causal or (c + 1) * cols - 1 <= first]
        reached = [c for c in range(scores.shape[-1]) if causal and c not in past and c * cols <= last]
        ranked = sorted((c for c in past if scores[r, c] > -torch.inf), key=lambda c: -scores[r, c])
        layout[r, reached + ranked[: max(0, k - len(reached))]] = True
    return layout


@pytest.mark.parametrize("k", [1, 2, 3, 9])
@pytest.mark.parametrize(
    ("rows", "cols", "offset"), [(1, 4, 0), (2, 3, 0), (4, 4, 0), (5, 2, 0), (1, 4, 6), (3, 4, -5)]
)
@pytest.mark.parametrize("causal", [True, False])
def test_blocks_are_chosen_as_by_a_loop(k, rows, cols, offset, causal):
    scores = torch.rand(2, 3, -(-12 // rows), 5, dtype=torch.float64)
    scores[:, :, :, 1] = -torch.inf
    mask = Blocks.choose(scores, k, rows=rows, cols=cols, causal=causal, offset=offset)
    assert mask.size == (rows, cols)
    for b in range(2):
        for h in range(3):
            assert torch.equal(mask.layout[b, h], chosen_by_loops(scores[b, h], k, rows, cols, causal, offset))


def test_the_choice_of_a_query_depends_on_no_later_token():
    n, cols = 24, 4
    q, k = torch.randn(2, 1, 2, n, 8).unbind()

    def mask(q, k):
        means = k.unflatten(2, (-1, cols)).mean(3)
        return Causal() & Blocks.choose(q @ means.mT, 2, cols=cols)

    v = torch.randn(1, 2, n, 8)
    want = attend(q, k, v, mask=mask(q, k))
    for start in range(1, n):
        other = [x.clone() for x in (q, k, v)]
        for x in other:
            x[:, :, start:] = torch.randn(1, 2, n - start, 8)
        got = attend(*other, mask=mask(*other[:2]))
        torch.testing.assert_close(got[:, :, :start], want[:, :, :start])
    assert (weights(q, k, mask=mask(q, k)).dense() > 0).sum(-1).max() <= 2 * cols


def test_scores_that_are_no_number_are_never_chosen_and_choices_have_no_gradient():
    scores = torch.tensor([[torch.nan, -torch.inf, 1.0]], requires_grad=True)
    mask = Blocks.choose(scores, 3, cols=2, causal=False)
    assert mask.layout.tolist() == [[False, False, True]]
    assert not mask.layout.requires_grad


@pytest.mark.parametrize(
    ("scores", "options", "error", "message"),
    [
        (torch.ones(2, 2).long(), {}, ValueError, "takes scores b h query-blocks key-blocks in floating point, got"),
        (torch.ones(2), {}, ValueError, r"got torch.float32 \(2,\)"),
        ([[1.0]], {}, TypeError, "Blocks.choose scores"),
        (torch.ones(2, 2), {"k": 0}, ValueError, "Blocks.choose k must be 1 or more, got 0"),
        (torch.ones(2, 2), {"rows": 0}, ValueError, "Blocks.choose rows must be 1 or more, got 0"),
        (torch.ones(2, 2), {"cols": 1.5}, TypeError, "Blocks.choose cols must be a whole number"),
        (torch.ones(2, 2), {"offset": None}, TypeError, "Blocks.choose offset must be a whole number"),
    ],
)
def test_choices_that_cannot_be_made_are_refused(scores, options, error, message):
    with pytest.raises(error, match=message):
        Blocks.choose(scores, **{"k": 1, **options})


def test_a_size_is_one_number_or_two():
    with pytest.raises(ValueError, match=r"Blocks size must be a number, or \(rows, columns\), got \(1, 2, 3\)"):
        Blocks(torch.ones(2, 2).bool(), (1, 2, 3))
    with pytest.raises(ValueError, match="Blocks size must be 1 or more, got 0"):
        Blocks(torch.ones(2, 2).bool(), (1, 0))


def test_cumulative_lengths_say_where_each_packed_sequence_begins():
    assert Documents.from_cu_seqlens(torch.tensor([0, 2, 2, 5, 6])).query_ids.tolist() == [0, 0, 2, 2, 2, 3]
    packed = Documents.from_cu_seqlens(torch.tensor([0, 2, 3]), torch.tensor([0, 1, 4]))
    A = weights(torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 4, 2), mask=packed).dense()[0, 0]
    assert (A > 0).tolist() == [[True, False, False, False], [True, False, False, False], [False, True, True, True]]
