"""Metrics of written text against references, as the field reports them: a number, and how it was computed."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..data.text import check_not_a_string
from ..train.progress import number

# sacreBLEU and above all rouge-score, with all of SciPy behind it, are imported where a text is measured.

# Those of sacreBLEU that want no files from elsewhere, nor packages that are not here.
TOKENIZERS = ("13a", "intl", "zh", "char", "none")
ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)
MAX_TABLE_CLASSES = 20
JOINERS = "_\u200c\u200d"  # the last two have no width: Indic and Persian words are spelled with them


class MetricValue(NamedTuple):
    """A number and its signature, by which others can compute the same."""

    value: float
    signature: str

    def __str__(self) -> str:
        return f"{number(self.value, digits=2)}  {self.signature}"


def bleu(hypotheses: Sequence[str], references: Sequence[str], *, tokenize: str = "13a") -> MetricValue:
    """sacreBLEU from 0 to 100 (Papineni et al. 2002; Post 2018).

    >>> print(bleu(["the cat sat on the mat"], ["the cat sat on the mat"]))
    100.00  nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:...

    `tokenize` is one of sacreBLEU's: "13a", "intl", "zh", "char" or "none".
    """
    from sacrebleu.metrics.bleu import BLEU

    check_tokenizable(tokenize)
    # What sacreBLEU says of text that looks tokenized, it would say again at each validation.
    return _measured(BLEU(tokenize=tokenize, force=True), hypotheses, references)


def check_tokenizable(tokenize: str) -> None:
    """Raise unless `bleu` knows the tokenizer: to be asked before the work that it is to measure."""
    if tokenize not in TOKENIZERS:
        raise ValueError(f"tokenize must be one of {', '.join(TOKENIZERS)}, got {tokenize!r}")


def chrf(hypotheses: Sequence[str], references: Sequence[str]) -> MetricValue:
    """chrF2 from 0 to 100, over characters, so for any script (Popović 2015)."""
    from sacrebleu.metrics.chrf import CHRF

    return _measured(CHRF(), hypotheses, references)


def exact(hypotheses: Sequence[str], references: Sequence[str]) -> MetricValue:
    """The percentage of lines that are the reference, spaces at the ends aside."""
    _check_matches(hypotheses, references)
    same = sum(h.strip() == r.strip() for h, r in zip(hypotheses, references, strict=True))
    return MetricValue(100 * same / len(references), "lines")


def bleu_of_many(hypotheses: Sequence[str], references: Sequence[Sequence[str]], *, order: int) -> MetricValue:
    """BLEU-1 to BLEU-4 from 0 to 100 against several references each, without smoothing (Papineni et al. 2002).

    >>> print(bleu_of_many(["a cat sat"], [["a cat sleeps", "the cat sat"]], order=1))
    100.00  order:1|nrefs:2|case:mixed|eff:no|tok:13a|smooth:none|version:...
    """
    from sacrebleu.metrics.bleu import BLEU

    _check_all_match(hypotheses, references)
    most = max(map(len, references))
    # A corpus of references each; where an image has fewer than another, sacreBLEU takes None.
    streams = [[some[n] if n < len(some) else None for some in references] for n in range(most)]
    metric: Any = BLEU(max_ngram_order=order, smooth_method="none", force=True)
    value = metric.corpus_score(list(hypotheses), streams).score
    return MetricValue(value, f"order:{order}|{metric.get_signature()}")


def exact_of_many(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> MetricValue:
    """The percentage of lines that are one of their references, spaces at the ends aside."""
    _check_all_match(hypotheses, references)
    same = sum(h.strip() in [r.strip() for r in some] for h, some in zip(hypotheses, references, strict=True))
    return MetricValue(100 * same / len(references), "lines")


RougeWords = Literal["english", "unicode"]


def rouge(
    hypotheses: Sequence[str], references: Sequence[str], *, words: RougeWords = "english"
) -> dict[str, MetricValue]:
    """ROUGE-1, -2 and -L, the mean F1 over texts from 0 to 100, as `rouge1`, `rouge2` and `rougeL` (Lin 2004).

    >>> for name, measured in rouge(["cats sat"], ["a cat sat down"]).items():
    ...     print(name, measured)
    rouge1 66.67  F1|stemmed|rouge-score:...
    rouge2 50.00  F1|stemmed|rouge-score:...
    rougeL 66.67  F1|stemmed|rouge-score:...

    The words are those of rouge-score: letters from a to z and digits, stemmed as English. It finds none in other
    scripts; `words="unicode"` takes every run of letters, their marks and digits for a word, without stemming.
    """
    from rouge_score.rouge_scorer import RougeScorer  # type: ignore[import-untyped]

    _check_matches(hypotheses, references)
    if words not in ("english", "unicode"):
        raise ValueError(f"words must be 'english' or 'unicode', got {words!r}")
    names, english = ("rouge1", "rouge2", "rougeL"), words == "english"
    scorer = RougeScorer(names, use_stemmer=english, tokenizer=None if english else UnicodeWords())
    each = [scorer.score(target=target, prediction=h) for h, target in zip(hypotheses, references, strict=True)]
    signature = f"F1|{'stemmed' if english else 'unicode+marks|nfc'}|rouge-score:{version('rouge-score')}"
    return {name: MetricValue(100 * sum(one[name].fmeasure for one in each) / len(each), signature) for name in names}


class UnicodeWords:
    """Runs of letters, their marks and digits of any script, as rouge-score takes a tokenizer."""

    def tokenize(self, text: str) -> list[str]:
        """The words of a text, in lower case and composed (NFC).

        >>> UnicodeWords().tokenize("हिन्दी, Cafe\\u0301!")
        ['हिन्दी', 'café']
        """
        text = unicodedata.normalize("NFC", text.lower())
        return "".join(letter if _in_word(letter) else " " for letter in text).split()


def squad_scores(answers: Sequence[str], gold: Sequence[Sequence[str]]) -> dict[str, MetricValue]:
    """`f1` and `exact`, the percentages of Rajpurkar et al. 2016: each answer by the gold one it is nearest to.

    >>> for name, measured in judged(["the Eiffel tower", "1889"], [["Eiffel Tower"], ["in 1889", "May 1889"]]).items():
    ...     print(name, measured)
    f1 83.33  SQuAD, 2 questions
    exact 50.00  SQuAD, 2 questions

    No gold answers mean that the question has none, which an empty answer says. Where there are such questions, f1
    of the others is `possible`, and the percentage of these that were left unanswered is `impossible`.
    """
    if len(answers) != len(gold) or not gold:
        raise ValueError(
            f"answers must be one for each of one or more questions, got {len(answers)} answers and {len(gold)} "
            "questions"
        )
    f1 = [max(_squad_f1(answer, one) for one in some or [""]) for answer, some in zip(answers, gold, strict=True)]
    exact = [max(_squad_exact(answer, one) for one in some or [""]) for answer, some in zip(answers, gold, strict=True)]
    found = {"f1": _mean_percent(f1), "exact": _mean_percent(exact)}
    with_answer = [value for value, some in zip(f1, gold, strict=True) if some]
    without = [value for value, some in zip(exact, gold, strict=True) if not some]
    if without:
        found["impossible"] = _mean_percent(without)
        if with_answer:
            found["possible"] = _mean_percent(with_answer)
    return found


def normalize_answer(answer: str) -> str:
    """What of an answer counts.

    >>> normalize_answer("The  Eiffel-Tower, a tower.")
    'eiffeltower tower'
    """
    return " ".join(ARTICLES.sub(" ", answer.lower().translate(PUNCTUATION)).split())


class Confusion(NamedTuple):
    """Counts by class, as it is (down) and as it was found (across).

    >>> print(Confusion.of([0, 0, 1, 1], [0, 1, 1, 1], ("cat", "dog")))
                 cat dog
        cat        1   1
        dog        0   2
    """

    counts: Tensor
    classes: tuple[str, ...]

    @classmethod
    def of(cls, right: Sequence[int], found: Sequence[int], classes: tuple[str, ...]) -> Confusion:
        """The table of what examples are, and what they were taken for."""
        n = len(classes)
        pairs = torch.tensor([a * n + b for a, b in zip(right, found, strict=True)], dtype=torch.long)
        return cls(pairs.bincount(minlength=n * n).view(n, n), tuple(classes))

    @property
    def accuracy(self) -> MetricValue:
        """The percentage that was found to be what it is."""
        total = int(self.counts.sum())
        return MetricValue(100 * int(self.counts.diagonal().sum()) / max(total, 1), f"% of {total:,} examples")

    @property
    def f1(self) -> MetricValue:
        """2 p r / (p + r) of precision and recall, in percent, the mean over the classes that occur."""
        hits = self.counts.diagonal().double()
        there, found = self.counts.sum(1), self.counts.sum(0)
        occurs = there + found > 0
        each = 2 * hits[occurs] / (there + found)[occurs]
        return MetricValue(100 * float(each.mean()) if len(each) else 0.0, f"% macro, {len(each)} classes")

    def most_confused(self, limit: int = MAX_TABLE_CLASSES) -> list[tuple[str, str, int]]:
        """What was limit often taken for what: class, other class, how often."""
        wrong = self.counts.clone()
        wrong.fill_diagonal_(0)
        values, places = wrong.flatten().sort(descending=True, stable=True)
        n = len(self.classes)
        pairs = zip(values.tolist()[:limit], places.tolist(), strict=False)
        return [(self.classes[place // n], self.classes[place % n], count) for count, place in pairs if count]

    def __str__(self) -> str:
        if len(self.classes) > MAX_TABLE_CLASSES:
            found = [f"{count:>8} x {a} taken for {b}" for a, b, count in self.most_confused()]
            return "\n".join(found) or "    nothing was taken for anything else"
        names = [name[:12] for name in self.classes]
        wide = max(3, *(len(str(count)) for count in self.counts.flatten().tolist()), *map(len, names))
        left = max(8, *map(len, names))
        lines = [" " * (left + 5) + " ".join(f"{name:>{wide}}" for name in names)]
        for name, row in zip(names, self.counts.tolist(), strict=True):
            lines.append(f"    {name:{left}} " + " ".join(f"{count:>{wide}}" for count in row))
        return "\n".join(lines)


def _in_word(letter: str) -> bool:
    """Whether a character does not end a word: vowel signs are marks, and joiners stand between letters."""
    return letter.isalnum() or letter in JOINERS or unicodedata.category(letter).startswith("M")


def _measured(metric: Any, hypotheses: Sequence[str], references: Sequence[str]) -> MetricValue:
    _check_matches(hypotheses, references)
    value = metric.corpus_score(list(hypotheses), [list(references)]).score
    return MetricValue(value, str(metric.get_signature()))


def _check_all_match(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    _check_matches(hypotheses, references)
    for n, some in enumerate(references):
        check_not_a_string(some, "the references of each hypothesis")
        if not some:
            raise ValueError(f"each hypothesis needs a reference, got none for number {n}; leave it out")


def _check_matches(hypotheses: Sequence[str], references: Sequence[Any]) -> None:
    check_not_a_string(hypotheses, "hypotheses")
    check_not_a_string(references, "references")
    if len(hypotheses) != len(references) or not references:
        raise ValueError(
            f"metrics need a reference for each of one or more hypotheses, got {len(hypotheses)} hypotheses and "
            f"{len(references)} references"
        )


def _squad_exact(answer: str, gold: str) -> float:
    return float(normalize_answer(answer) == normalize_answer(gold))


def _squad_f1(answer: str, gold: str) -> float:
    """The harmonic mean of precision and recall over words, each as often as it comes."""
    a, b = normalize_answer(answer).split(), normalize_answer(gold).split()
    if not a or not b:
        return float(a == b)
    return 2 * sum((Counter(a) & Counter(b)).values()) / (len(a) + len(b))


def _mean_percent(values: Sequence[float]) -> MetricValue:
    return MetricValue(100 * sum(values) / len(values), f"SQuAD, {len(values):,} questions")
