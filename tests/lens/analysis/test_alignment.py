"""Word alignments: links read from attention, in Pharaoh format, and judged against gold."""

import itertools
from pathlib import Path

import pytest
import torch

from regard import weights
from regard.lens.analysis.alignment import (
    Links,
    alignment_score,
    argmax_links,
    head_errors,
    mutual_links,
    read_pharaoh,
    word_weights,
    write_pharaoh,
)

GOLD = Path(__file__).parents[3] / ".." / "shared" / "data" / "alignments"
close = torch.testing.assert_close


def test_each_target_word_links_to_its_largest_weight():
    weights = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2], [0.0, 0.0, 0.0], [0.2, 0.2, 0.6]])
    assert argmax_links(weights) == Links([(1, 0), (0, 1), (2, 3)])
    assert argmax_links(torch.zeros(0, 3)) == argmax_links(torch.zeros(3, 0)) == Links()


def test_mutual_links_are_first_choices_of_both_sides():
    weights = torch.rand(7, 5, generator=torch.Generator().manual_seed(1))
    reverse = torch.rand(5, 7, generator=torch.Generator().manual_seed(2))
    for other in (None, reverse):
        back = weights.T if other is None else other
        expected = [
            (s, t)
            for t, s in itertools.product(range(7), range(5))
            if weights[t].argmax() == s and back[s].argmax() == t
        ]
        assert mutual_links(weights, other) == Links(expected)
        assert mutual_links(weights, other).sure <= argmax_links(weights).sure


def test_words_gather_what_their_pieces_give_and_receive():
    A = weights(torch.randn(1, 3, 5, 8, dtype=torch.float64), torch.randn(1, 3, 6, 8, dtype=torch.float64))
    target, source = [None, 0, 0, 2, None], [0, 1, 1, 1, 2, None]
    found, dense = word_weights(A, target, source), A.dense()[0]
    assert found.shape == (3, 3, 3)
    for t, s in itertools.product(range(3), range(3)):
        rows = [n for n, word in enumerate(target) if word == t]
        cols = [n for n, word in enumerate(source) if word == s]
        expected = dense[:, rows][:, :, cols].sum(-1).mean(-1) if rows else torch.zeros(3, dtype=torch.float64)
        close(found[:, t, s], expected)


def test_words_that_are_all_words_lose_none():
    A = weights(torch.randn(1, 2, 3, 8, dtype=torch.float64), torch.randn(1, 2, 4, 8, dtype=torch.float64))
    close(word_weights(A, [0, 1, 2], [0, 1, 2, 3]), A.dense()[0])


@pytest.mark.parametrize("line", ["", "0-0", "0-0 1-2 3p1 10-4", "2p2"])
def test_pharaoh_lines_come_back_as_they_were(line):
    assert str(Links.parse(line)) == line


def test_possible_links_are_marked_and_words_may_count_from_one():
    links = Links.parse("1-1  2p3 4?1\n", first=1)
    assert links.sure == {(0, 0)}
    assert links.possible == {(0, 0), (1, 2), (3, 0)}
    assert len(links) == 3
    assert links == Links([(0, 0)], [(1, 2), (3, 0)])


def test_links_combine_and_flip():
    a, b = Links([(0, 1), (2, 2)], [(3, 0)]), Links([(0, 1)], [(2, 2)])
    assert a & b == Links([(0, 1)], [(2, 2)])
    assert a | b == a
    assert a.flip() == Links([(1, 0), (2, 2)], [(0, 3)])


@pytest.mark.parametrize("word", ["0", "0-", "-1", "0:1", "a-b", "1-2-3", "0--1", "²-1", "1,2"])
def test_a_malformed_link_raises_with_the_link(word):
    with pytest.raises(ValueError, match="a link must be source-target, such as 1-2"):
        Links.parse(f"0-0 {word}")


def test_links_that_are_not_utf8_are_refused_with_file_and_line(tmp_path):
    (tmp_path / "links").write_bytes(b"0-0\n\xff-1\n")
    with pytest.raises(ValueError, match=r"links, line 2: .*decode"):
        read_pharaoh(tmp_path / "links")


def test_a_file_is_read_and_written_line_by_line(tmp_path):
    path = tmp_path / "links.pharaoh"
    links = [Links([(0, 0), (1, 1)]), Links(), Links([(2, 0)], [(1, 1)])]
    write_pharaoh(path, links)
    assert path.read_text() == "0-0 1-1\n\n1p1 2-0\n"
    assert read_pharaoh(path) == links
    path.write_text("1-1\n0-1\n")
    with pytest.raises(ValueError, match=r"links.pharaoh, line 2: .*words counted from 1, got '0-1'"):
        read_pharaoh(path, first=1)


def test_error_rate_is_that_of_och_and_ney():
    given = [Links([(0, 0), (1, 1), (2, 2)]), Links([(0, 1)])]
    gold = [Links([(0, 0), (1, 2)], [(1, 1)]), Links([(0, 0)], [(0, 1)])]
    # A = 4 links, S = 3; A & S = 1; A & P = (0, 0), (1, 1) and (0, 1) = 3.
    assert alignment_score(given, gold) == (3 / 4, 1 / 3, 1 - (1 + 3) / (4 + 3))
    assert alignment_score(gold[:1], gold[:1]).recall == 1
    assert alignment_score([Links(gold[0].sure)], gold[:1]).error == 0
    assert alignment_score([Links()], gold[:1]) == (0, 0, 1)
    assert alignment_score([Links()], [Links()]) == (0, 0, 0)


def test_head_errors_are_the_error_rates_of_each_head():
    gold = [Links([(0, 0), (1, 1)]), Links([(1, 0), (0, 1)])]
    maps = [[torch.rand(3, 2, 2) for _ in range(2)] for _ in gold]
    maps[0][1][2], maps[1][1][2] = torch.eye(2), torch.eye(2).flip(0)
    errors = head_errors(maps, gold)
    assert errors.shape == (2, 3)
    assert errors[1, 2] == 0
    for layer, head in itertools.product(range(2), range(3)):
        links = [argmax_links(pair[layer][head]) for pair in maps]
        assert errors[layer, head].item() == pytest.approx(alignment_score(links, gold).error)


@pytest.mark.skipif(not GOLD.exists(), reason="the gold German-English links are not in this checkout")
def test_gold_links_of_europarl_are_read_and_lie_within_their_sentences():
    gold = read_pharaoh(GOLD / "gold.de-en.pharaoh")
    german, english = ((GOLD / f"test.{side}").read_text(encoding="utf8").splitlines() for side in ("de", "en"))
    assert len(gold) == len(german) == len(english) == 100
    stray = [
        (n, s, t)
        for n, links in enumerate(gold)
        for s, t in links.possible
        if s >= len(german[n].split()) or t >= len(english[n].split())
    ]
    assert stray == [(62, 12, 16)]  # a slip of the annotators
    assert alignment_score(gold, gold).error == 0
    diagonal = [
        Links((n, n) for n in range(min(len(s.split()), len(t.split())))) for s, t in zip(german, english, strict=True)
    ]
    assert 0.4 < alignment_score(diagonal, gold).error < 0.9


def test_bad_arguments_are_named():
    A = weights(torch.randn(2, 3, 4, 8), torch.randn(2, 3, 5, 8))
    with pytest.raises(ValueError, match=r"takes one sentence pair, got shape \(2, 3, 4, 5\); write A.select"):
        word_weights(A, [0] * 4, [0] * 5)
    one = A.select(batch=0)
    with pytest.raises(ValueError, match="target_words must hold a word for each of the 4 tokens, got 3"):
        word_weights(one, [0] * 3, [0] * 5)
    with pytest.raises(ValueError, match="source_words must be 0 or more, or None"):
        word_weights(one, [0] * 4, [0, 0, 0, 0, -1])
    with pytest.raises(ValueError, match=r"weights must be one map of dims target source, got \(3, 4, 5\)"):
        argmax_links(torch.zeros(3, 4, 5))
    with pytest.raises(ValueError, match=r"reverse must have dims source target, \(5, 4\)"):
        mutual_links(torch.zeros(4, 5), torch.zeros(4, 5))
    with pytest.raises(ValueError, match="reverse must be one map"):
        mutual_links(torch.zeros(4, 5), "back")
    with pytest.raises(ValueError, match="both 0 or more"):
        Links([(-1, 0)])
    with pytest.raises(ValueError, match="the same number of sentence pairs, got 1 and 2"):
        alignment_score([Links()], [Links()] * 2)
    with pytest.raises(ValueError, match="the same layers and heads for every sentence pair"):
        head_errors([[torch.zeros(2, 1, 1)], [torch.zeros(3, 1, 1)]], [Links()] * 2)
