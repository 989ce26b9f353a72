"""Edit scripts against a recursion over all scripts, and their memory."""

import functools
import random

import pytest

from regard.lens.tape import edit_script
from regard.lens.tape.edit_script import align_tokens


def cheapest(a, b):
    """The fewest edits, and among scripts with as few the fewest replacements, by trying all."""

    @functools.cache
    def cost(i, j):
        if not i or not j:
            return i + j, 0
        kept = cost(i - 1, j - 1)
        options = [kept if a[i - 1] == b[j - 1] else (kept[0] + 1, kept[1] + 1)]
        options += [(edits + 1, replaced) for edits, replaced in (cost(i - 1, j), cost(i, j - 1))]
        return min(options)

    return cost(len(a), len(b))


def cost_of(a, b, rows, cols):
    replaced = sum(a[i] != b[j] for i, j in zip(rows, cols, strict=True))
    return len(a) + len(b) - 2 * len(rows) + replaced, replaced


@pytest.mark.parametrize("entries", [2**20, 60, 1])
def test_scripts_have_the_fewest_edits_and_replacements(entries, monkeypatch):
    monkeypatch.setattr(edit_script, "TABLE_ENTRIES", entries)
    choose = random.Random(0)
    for _ in range(150):
        a, b = ([choose.choice("abcd") for _ in range(choose.randrange(13))] for _ in range(2))
        rows, cols = (x.tolist() for x in align_tokens(a, b))
        assert rows == sorted(set(rows))
        assert cols == sorted(set(cols))
        assert cost_of(a, b, rows, cols) == cheapest(a, b)


@pytest.mark.parametrize(
    ("ours", "theirs", "pairs"),
    [
        ("too big .", "too small .", [(0, 0), (1, 1), (2, 2)]),
        ("it fell", "so it fell", [(0, 1), (1, 2)]),
        ("it fell down", "it fell", [(0, 0), (1, 1)]),
        ("a b", "b a", [(0, 1)]),
        ("", "a b", []),
        ("same", "same", [(0, 0)]),
    ],
)
def test_kept_and_replaced_tokens_are_pairs(ours, theirs, pairs):
    rows, cols = align_tokens(ours.split(), theirs.split())
    assert sorted(zip(rows.tolist(), cols.tolist(), strict=True)) == pairs


def test_long_texts_that_differ_all_over_are_aligned_in_memory_of_their_length(monkeypatch):
    sizes = []
    trace = edit_script._trace
    monkeypatch.setattr(edit_script, "_trace", lambda a, b, edit: (sizes.append(len(a) * len(b)), trace(a, b, edit))[1])
    choose = random.Random(1)
    text = [str(choose.randrange(300)) for _ in range(3000)]
    fewer = [x for x in text if choose.random() > 0.05]
    rows, cols = (x.tolist() for x in align_tokens(text, fewer))
    assert len(cols) == len(fewer)
    assert all(text[i] == fewer[j] for i, j in zip(rows, cols, strict=True))
    assert max(sizes) <= edit_script.TABLE_ENTRIES < 3000 * 2700
