"""Metrics: the numbers of sacreBLEU, and their signatures."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial

import pytest
import sacrebleu
import torch
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score

from regard.tasks import metrics
from regard.tasks.metrics import Confusion, normalize_answer, squad_scores

WRITTEN = ["the cat sat on a mat", "it is raining today ."]
RIGHT = ["the cat sat on the mat", "it rained today ."]
LABELS = [0, 0, 0, 1, 1, 2, 2, 2, 2, 0]
PREDICTIONS = [0, 1, 2, 1, 1, 2, 0, 2, 2, 0]
CLASSES = ("ant", "bee", "cat")


def test_bleu_and_chrf_are_those_of_sacrebleu():
    assert metrics.bleu(WRITTEN, RIGHT).value == sacrebleu.corpus_bleu(WRITTEN, [RIGHT]).score
    assert metrics.chrf(WRITTEN, RIGHT).value == sacrebleu.corpus_chrf(WRITTEN, [RIGHT]).score
    by_letters = sacrebleu.corpus_bleu(WRITTEN, [RIGHT], tokenize="char").score
    assert metrics.bleu(WRITTEN, RIGHT, tokenize="char").value == by_letters != metrics.bleu(WRITTEN, RIGHT).value


def test_signatures_say_how_a_number_came_about():
    assert "tok:13a|smooth:exp|version:" in metrics.bleu(WRITTEN, RIGHT).signature
    assert "nc:6|nw:0" in str(metrics.chrf(WRITTEN, RIGHT))


def test_numbers_beyond_reading_are_printed_short():
    assert str(metrics.MetricValue(1e304, "a word")) == "1.0e+304  a word"
    assert str(metrics.MetricValue(1234567.891, "a word")) == "1234567.89  a word"


def test_exact_counts_lines_in_percent():
    assert metrics.exact(["a ", "b", "c"], ["a", "x", "c"]).value == pytest.approx(200 / 3)


def test_a_tokenizer_sacrebleu_lacks_is_named():
    with pytest.raises(ValueError, match=r"tokenize must be one of .*13a.*, got 'mine'"):
        metrics.bleu(WRITTEN, RIGHT, tokenize="mine")


@pytest.mark.parametrize("tokenize", sorted(sacrebleu.BLEU.TOKENIZERS))
def test_every_tokenizer_of_sacrebleu_measures_or_is_refused_by_name(tokenize):
    if tokenize in metrics.TOKENIZERS:
        expected = sacrebleu.corpus_bleu(WRITTEN, [RIGHT], tokenize=tokenize).score
        assert metrics.bleu(WRITTEN, RIGHT, tokenize=tokenize).value == expected
    else:
        with pytest.raises(ValueError, match=f"tokenize must be one of 13a, intl, zh, char, none, got '{tokenize}'"):
            metrics.bleu(WRITTEN, RIGHT, tokenize=tokenize)  # it would be downloaded


@pytest.mark.parametrize("metric", [metrics.bleu, metrics.chrf, metrics.exact])
def test_each_hypothesis_needs_a_reference(metric):
    with pytest.raises(ValueError, match="got 2 hypotheses and 1 references"):
        metric(WRITTEN, RIGHT[:1])
    with pytest.raises(ValueError, match="got 0 hypotheses and 0 references"):
        metric([], [])


@pytest.mark.parametrize(
    ("hypothesis", "reference", "expected"),
    [
        ("the cat sat", "the cat sat", (1, 1, 1)),
        ("a b c", "d e f", (0, 0, 0)),
        ("a c b d", "a b c", (2 * 3 / 7, 0, 2 * 2 / 7)),  # a, b, c are shared, no pair, and in order two of them
        ("running dogs", "run dog", (1, 1, 1)),  # stemmed
        ("A, B!", "a b", (1, 1, 1)),
        ("", "a", (0, 0, 0)),
    ],
)
def test_rouge_counts_shared_words_pairs_and_the_longest_common_order(hypothesis, reference, expected):
    found = metrics.rouge([hypothesis], [reference])
    assert list(found) == ["rouge1", "rouge2", "rougeL"]
    assert [one.value for one in found.values()] == pytest.approx([100 * value for value in expected])
    assert found["rouge1"].signature.startswith("F1|stemmed|rouge-score:")


def test_rouge_is_the_mean_over_texts_and_reads_other_scripts_when_told():
    found = metrics.rouge(["a", "b"], ["a", "c"])
    assert found["rouge1"].value == 50
    assert metrics.rouge(["дом и пёс"], ["дом и кот"])["rouge1"].value == 0
    found = metrics.rouge(["дом и пёс"], ["Дом и кот"], words="unicode")
    assert found["rouge1"].value == pytest.approx(100 * 2 / 3)
    assert "|unicode+marks|nfc|" in found["rouge1"].signature
    with pytest.raises(ValueError, match="words must be 'english' or 'unicode', got 'latin'"):
        metrics.rouge(["a"], ["a"], words="latin")
    with pytest.raises(ValueError, match="metrics need a reference for each"):
        metrics.rouge(["a"], [])


MANY = [["the cat sat on the mat", "a cat sat on a mat"], ["it rained today .", "rain today ."]]


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_bleu_against_several_references_is_that_of_papineni(order):
    matched, total = [0] * order, [0] * order
    written, right = 0, 0
    for line, references in zip(WRITTEN, MANY, strict=True):
        words, refs = line.split(), [reference.split() for reference in references]
        written += len(words)
        right += min((abs(len(ref) - len(words)), len(ref)) for ref in refs)[1]
        for n in range(1, order + 1):
            grams = Counter(zip(*(words[i:] for i in range(n)), strict=False))
            most = Counter()
            for ref in refs:
                most |= Counter(zip(*(ref[i:] for i in range(n)), strict=False))
            matched[n - 1] += (grams & most).total()
            total[n - 1] += grams.total()
    precision = math.prod(m / t for m, t in zip(matched, total, strict=True)) ** (1 / order)
    expected = 100 * precision * min(1.0, math.exp(1 - right / written))
    assert metrics.bleu_of_many(WRITTEN, MANY, order=order).value == pytest.approx(expected)
    assert f"order:{order}|nrefs:2|" in metrics.bleu_of_many(WRITTEN, MANY, order=order).signature


def test_lines_may_have_more_references_or_fewer():
    uneven = [MANY[0], MANY[1][:1]]
    again = [MANY[0], [MANY[1][0]] * 2]
    assert metrics.bleu_of_many(WRITTEN, uneven, order=2).value == metrics.bleu_of_many(WRITTEN, again, order=2).value


def ngrams(units, n):
    return Counter(tuple(units[k : k + n]) for k in range(len(units) - n + 1))


def bleu_by_hand(hypotheses, references):
    """Papineni et al. 2002: counts clipped by the reference with most, and the length of the closest reference."""
    right, of, written, closest = [0] * 4, [0] * 4, 0, 0
    for h, some in zip(hypotheses, references, strict=True):
        words, others = h.split(), [r.split() for r in some]
        written += len(words)
        closest += min((abs(len(r) - len(words)), len(r)) for r in others)[1]
        for n in range(4):
            counts = ngrams(words, n + 1)
            of[n] += sum(counts.values())
            right[n] += sum(min(c, max(ngrams(r, n + 1)[gram] for r in others)) for gram, c in counts.items())
    brevity = min(0.0, 1 - closest / written)
    return 100 * math.exp(brevity + sum(math.log(a / b) for a, b in zip(right, of, strict=True)) / 4)


def chrf_by_hand(hypotheses, references):
    """Popovic 2015 with beta 2 over n-grams of 1 to 6 characters; of several references the best of each line."""

    def statistics(h, r):
        h, r = h.replace(" ", ""), r.replace(" ", "")
        rows = []
        for n in range(1, 7):
            a, b = ngrams(h, n), ngrams(r, n)
            rows.append((sum(a.values()), sum(b.values()), sum((a & b).values())))
        return rows

    def score(rows):
        kept = [(both / a, both / b) for a, b, both in rows if a and b]
        p, r = (sum(side) / len(kept) for side in zip(*kept, strict=True))
        return 500 * p * r / (4 * p + r) if p + r else 0.0

    total = [(0, 0, 0)] * 6
    for h, some in zip(hypotheses, references, strict=True):
        best = max((statistics(h, r) for r in some), key=score)
        total = [tuple(x + y for x, y in zip(one, two, strict=True)) for one, two in zip(total, best, strict=True)]
    return score(total)


LINES = ["the small cat sat on the old mat today", "a dog ran over the green hill", "blue birds sing early in the day"]
SEVERAL = [
    ["the small cat sat on a mat", "a small cat sat on the old mat today ok"],
    ["the dog ran over a green hill", "a dog was running over the green hill there"],
    ["blue birds sing in the early day", "birds of blue sing early in the day"],
]


def test_several_references_give_the_numbers_of_the_papers():
    assert metrics.bleu(LINES, SEVERAL).value == pytest.approx(bleu_by_hand(LINES, SEVERAL), abs=1e-9)
    assert metrics.chrf(LINES, SEVERAL).value == pytest.approx(chrf_by_hand(LINES, SEVERAL), abs=1e-9)
    assert metrics.bleu(LINES, SEVERAL).value > metrics.bleu(LINES, [some[0] for some in SEVERAL]).value
    assert "nrefs:2|" in metrics.bleu(LINES, SEVERAL).signature


def test_rouge_of_several_references_is_that_of_the_best():
    found = metrics.rouge(LINES, SEVERAL)
    for name, measured in found.items():
        each = [max(metrics.rouge([h], [r])[name].value for r in some) for h, some in zip(LINES, SEVERAL, strict=True)]
        assert measured.value == pytest.approx(sum(each) / 3)
        assert "|nrefs:2|" in measured.signature
    one = metrics.rouge(LINES, [some[0] for some in SEVERAL])
    assert one == metrics.rouge(LINES, [some[:1] for some in SEVERAL])


@pytest.mark.parametrize("metric", [metrics.bleu, metrics.chrf, metrics.exact, metrics.rouge])
def test_one_hypothesis_is_not_many(metric):
    with pytest.raises(TypeError, match=r"hypotheses must be a list of texts, got a single text; pass \[text\]"):
        metric("abc", ["a", "b", "c"])
    with pytest.raises(TypeError, match=r"references must be a list of texts, got a single text; pass \[text\]"):
        metric(["a", "b", "c"], "abc")


def test_exact_is_any_of_the_references():
    assert metrics.exact(["a", " b", "c"], [["x", "a"], ["b"], ["d", "e"]]).value == pytest.approx(200 / 3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("हिन्दी में, नमस्ते!", ["हिन्दी", "में", "नमस्ते"]),
        ("Cafe\u0301 Ångström", ["café", "ångström"]),
        ("می\u200cخواهم snake_case 3.5", ["می\u200cخواهم", "snake_case", "3", "5"]),
    ],
)
def test_marks_belong_to_the_words_they_stand_in(text, words):
    assert metrics.UnicodeWords().tokenize(text) == words


def test_words_that_share_letters_only_are_different_words():
    assert metrics.rouge(["कि"], ["की"], words="unicode")["rouge1"].value == 0.0
    assert metrics.rouge(["cafe\u0301"], ["café"], words="unicode")["rouge1"].value == 100.0


@pytest.mark.parametrize("metric", [metrics.exact, partial(metrics.bleu_of_many, order=2)])
@pytest.mark.parametrize("references", [[["a"], []], [[], ["a"]], [[], []]])
def test_a_hypothesis_without_a_reference_is_named(metric, references):
    missing = references.index([])
    with pytest.raises(ValueError, match=f"each hypothesis needs a reference, but number {missing} has none; leave it"):
        metric(["a", "a"], references)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("The Eiffel Tower", "eiffel tower"),
        ("  an  apple,\n a day. ", "apple day"),
        ("U.S.A.", "usa"),
        ("theatre", "theatre"),  # articles are words
        ("A", ""),
        ("Œil — 1973", "œil — 1973"),  # ASCII punctuation only, as in the official script
    ],
)
def test_case_punctuation_articles_and_spaces_do_not_count(answer, expected):
    assert normalize_answer(answer) == expected


@pytest.mark.parametrize(
    ("answer", "gold", "f1", "exact"),
    [
        ("Denver Broncos", ["the Denver Broncos!"], 1, 1),
        ("Broncos", ["Denver Broncos"], 2 / 3, 0),
        ("the", ["Denver"], 0, 0),
        ("red red blue", ["red blue blue"], 2 / 3, 0),  # words count as often as they come on both sides
        ("1889", ["May 1889", "1889", "the year 1889"], 1, 1),  # the nearest of several
        ("", ["1889"], 0, 0),
        ("1889", [], 0, 0),
        ("", [], 1, 1),
        ("an", [], 1, 1),  # nothing is left of it
    ],
)
def test_an_answer_is_held_against_the_nearest_gold_one(answer, gold, f1, exact):
    found = squad_scores([answer], [gold])
    assert found["f1"].value == pytest.approx(100 * f1)
    assert found["exact"].value == 100 * exact


def test_questions_with_and_without_answers_are_told_apart():
    found = squad_scores(["1889", "x", "", "y y"], [["1889"], [], [], ["y", "z"]])
    assert found["f1"].value == pytest.approx(100 * (1 + 0 + 1 + 2 / 3) / 4)
    assert found["exact"].value == 50
    assert found["possible"].value == pytest.approx(100 * (1 + 2 / 3) / 2)
    assert found["impossible"].value == 50
    assert str(found["impossible"]) == "50.00  SQuAD, 2 questions"
    assert squad_scores(["", "x"], [[], []]).keys() == {"f1", "exact", "impossible"}
    assert squad_scores(["x"], [["x"]]).keys() == {"f1", "exact"}


@pytest.mark.parametrize(("answers", "gold"), [([], []), (["a"], []), ([], [["a"]])])
def test_answers_and_questions_come_in_equal_numbers(answers, gold):
    with pytest.raises(ValueError, match="each question needs one answer, and there must be at least one, got"):
        squad_scores(answers, gold)


def test_figures_are_those_of_scikit_learn():
    confusion = Confusion.of(LABELS, PREDICTIONS, CLASSES)
    assert confusion.counts.tolist() == confusion_matrix(LABELS, PREDICTIONS).tolist()
    assert confusion.accuracy.value == pytest.approx(100 * accuracy_score(LABELS, PREDICTIONS))
    assert confusion.f1.value == pytest.approx(100 * f1_score(LABELS, PREDICTIONS, average="macro"))


def test_a_class_that_never_occurs_does_not_count():
    with_another = Confusion.of(LABELS, PREDICTIONS, (*CLASSES, "dog"))
    assert with_another.f1 == Confusion.of(LABELS, PREDICTIONS, CLASSES).f1


def test_the_worst_are_the_most_frequent_mistakes():
    confusion = Confusion(torch.tensor([[9, 3, 0], [0, 9, 0], [5, 0, 9]]), CLASSES)
    assert confusion.most_confused() == [("cat", "ant", 5), ("ant", "bee", 3)]
    assert confusion.most_confused(1) == [("cat", "ant", 5)]


def test_a_table_is_as_wide_as_its_numbers_and_names():
    assert str(Confusion(torch.tensor([[12345, 0], [7, 1]]), ("cat", "x" * 20))).splitlines() == [
        "                          cat xxxxxxxxxxxx",
        "    cat                 12345            0",
        "    xxxxxxxxxxxx            7            1",
    ]


def test_of_many_classes_only_the_mistakes_are_told():
    names = tuple(f"class{n}" for n in range(21))
    assert str(Confusion.of([3, 3, 4], [3, 5, 4], names)) == "       1 x class3 predicted as class5"
    assert str(Confusion.of([3], [3], names)) == "    no example was misclassified"
