"""Metrics: BLEU, chrF and ROUGE of texts, SQuAD scores of answers, and the confusion matrix of classes."""

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

# sacreBLEU and rouge-score, which imports SciPy, are slow to import, so functions import them when needed.

# The tokenizers of sacreBLEU that need no downloads and no other packages.
TOKENIZERS = ("13a", "intl", "zh", "char", "none")
ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)
MAX_TABLE_CLASSES = 20
JOINERS = "_\u200c\u200d"  # the last two are zero-width joiners, which occur inside Indic and Persian words


References = Sequence[str] | Sequence[Sequence[str]]  # for each hypothesis one reference, or a list of several


class MetricValue(NamedTuple):
    """The value of a metric and its signature, which says how to compute the same number."""

    value: float
    signature: str

    def __str__(self) -> str:
        return f"{number(self.value, digits=2)}  {self.signature}"


def bleu(hypotheses: Sequence[str], references: References, *, tokenize: str = "13a") -> MetricValue:
    """sacreBLEU from 0 to 100 (Papineni et al. 2002; Post 2018).

    >>> print(bleu(["the cat sat on the mat"], ["the cat sat on the mat"]))
    100.00  nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:...

    `tokenize` is one of sacreBLEU's: "13a", "intl", "zh", "char" or "none". With a list of references for each
    hypothesis, an n-gram may be in any of them.
    """
    from sacrebleu.metrics.bleu import BLEU

    check_tokenizable(tokenize)
    # force=True silences the warning about tokenized text, which would appear at each validation.
    return _corpus_score(BLEU(tokenize=tokenize, force=True), hypotheses, references)


def check_tokenizable(tokenize: str) -> None:
    """Raise unless `bleu` has the tokenizer; called before the translations are computed."""
    if tokenize not in TOKENIZERS:
        raise ValueError(f"tokenize must be one of {', '.join(TOKENIZERS)}, got {tokenize!r}")


def chrf(hypotheses: Sequence[str], references: References) -> MetricValue:
    """chrF2 from 0 to 100, over characters, so for any script (Popović 2015); of several references the best counts."""
    from sacrebleu.metrics.chrf import CHRF

    return _corpus_score(CHRF(), hypotheses, references)


def exact(hypotheses: Sequence[str], references: References) -> MetricValue:
    """The percentage of lines equal to their reference, or one of several, ignoring spaces at the ends."""
    given = _as_lists(hypotheses, references)
    same = sum(h.strip() in [r.strip() for r in some] for h, some in zip(hypotheses, given, strict=True))
    return MetricValue(100 * same / len(given), "lines")


def bleu_of_many(hypotheses: Sequence[str], references: Sequence[Sequence[str]], *, order: int) -> MetricValue:
    """BLEU-1 to BLEU-4 from 0 to 100 against several references each, without smoothing (Papineni et al. 2002).

    >>> print(bleu_of_many(["a cat sat"], [["a cat sleeps", "the cat sat"]], order=1))
    100.00  order:1|nrefs:2|case:mixed|eff:no|tok:13a|smooth:none|version:...
    """
    from sacrebleu.metrics.bleu import BLEU

    measured = _corpus_score(BLEU(max_ngram_order=order, smooth_method="none", force=True), hypotheses, references)
    return MetricValue(measured.value, f"order:{order}|{measured.signature}")


RougeWords = Literal["english", "unicode"]


def rouge(
    hypotheses: Sequence[str], references: References, *, words: RougeWords = "english"
) -> dict[str, MetricValue]:
    """ROUGE-1, -2 and -L, the mean F1 over texts from 0 to 100, as `rouge1`, `rouge2` and `rougeL` (Lin 2004).

    >>> for name, measured in rouge(["cats sat"], ["a cat sat down"]).items():
    ...     print(name, measured)
    rouge1 66.67  F1|stemmed|rouge-score:...
    rouge2 50.00  F1|stemmed|rouge-score:...
    rougeL 66.67  F1|stemmed|rouge-score:...

    By default words are those of rouge-score: letters a to z and digits, stemmed as English, so other scripts have no
    words. With `words="unicode"`, every run of letters, marks and digits is a word, without stemming. Of several
    references the one with the largest F1 counts.
    """
    each = rouge_of_each(hypotheses, references, words=words)
    most = max(map(len, _as_lists(hypotheses, references)))
    kind = "stemmed" if words == "english" else "unicode+marks|nfc"
    signature = f"F1|{kind}{f'|nrefs:{most}' if most > 1 else ''}|rouge-score:{version('rouge-score')}"
    return {name: MetricValue(100 * sum(values) / len(values), signature) for name, values in each.items()}


def rouge_of_each(
    hypotheses: Sequence[str], references: References, *, words: RougeWords = "english"
) -> dict[str, list[float]]:
    """Return the F1 of ROUGE-1, -2 and -L of each hypothesis, from 0 to 1."""
    from rouge_score.rouge_scorer import RougeScorer  # type: ignore[import-untyped]

    given = _as_lists(hypotheses, references)
    if words not in ("english", "unicode"):
        raise ValueError(f"words must be 'english' or 'unicode', got {words!r}")
    names, english = ("rouge1", "rouge2", "rougeL"), words == "english"
    scorer = RougeScorer(names, use_stemmer=english, tokenizer=None if english else UnicodeWords())
    each = [scorer.score_multi(some, h) for h, some in zip(hypotheses, given, strict=True)]
    return {name: [one[name].fmeasure for one in each] for name in names}


class UnicodeWords:
    """Tokenizer for rouge-score: runs of letters, marks and digits of any script."""

    def tokenize(self, text: str) -> list[str]:
        """Return the words of a text, in lower case and composed (NFC).

        >>> UnicodeWords().tokenize("हिन्दी, Cafe\\u0301!")
        ['हिन्दी', 'café']
        """
        text = unicodedata.normalize("NFC", text.lower())
        return "".join(letter if _in_word(letter) else " " for letter in text).split()


def squad_scores(answers: Sequence[str], gold: Sequence[Sequence[str]]) -> dict[str, MetricValue]:
    """Compute `f1` and `exact` of Rajpurkar et al. 2016, in percent: each answer against its nearest gold answer.

    >>> gold = [["Eiffel Tower"], ["in 1889", "May 1889"]]
    >>> for name, measured in squad_scores(["the Eiffel tower", "1889"], gold).items():
    ...     print(name, measured)
    f1 83.33  SQuAD, 2 questions
    exact 50.00  SQuAD, 2 questions

    An empty list of gold answers means that the question has no answer, and only an empty answer is right. If there
    are such questions, `possible` is the f1 of all others, and `impossible` the percentage of them
    with an empty answer.
    """
    f1, exact = squad_of_each(answers, gold)
    found = {"f1": _mean_percent(f1), "exact": _mean_percent(exact)}
    with_answer = [value for value, some in zip(f1, gold, strict=True) if some]
    without = [value for value, some in zip(exact, gold, strict=True) if not some]
    if without:
        found["impossible"] = _mean_percent(without)
        if with_answer:
            found["possible"] = _mean_percent(with_answer)
    return found


def squad_of_each(answers: Sequence[str], gold: Sequence[Sequence[str]]) -> tuple[list[float], list[float]]:
    """Return the F1 and the exact match of each answer, from 0 to 1."""
    if len(answers) != len(gold) or not gold:
        raise ValueError(
            f"each question needs one answer, and there must be at least one, got {len(answers)} answers and "
            f"{len(gold)} questions"
        )
    f1 = [max(_squad_f1(answer, one) for one in some or [""]) for answer, some in zip(answers, gold, strict=True)]
    exact = [max(_squad_exact(answer, one) for one in some or [""]) for answer, some in zip(answers, gold, strict=True)]
    return f1, exact


def normalize_answer(answer: str) -> str:
    """Remove from an answer what SQuAD ignores: case, punctuation, articles and extra spaces.

    >>> normalize_answer("The  Eiffel-Tower, a tower.")
    'eiffeltower tower'
    """
    return " ".join(ARTICLES.sub(" ", answer.lower().translate(PUNCTUATION)).split())


class Confusion(NamedTuple):
    """Counts of examples by true class (rows) and predicted class (columns).

    >>> print(Confusion.of([0, 0, 1, 1], [0, 1, 1, 1], ("cat", "dog")))
                 cat dog
        cat        1   1
        dog        0   2
    """

    counts: Tensor
    classes: tuple[str, ...]

    @classmethod
    def of(cls, labels: Sequence[int], predictions: Sequence[int], classes: tuple[str, ...]) -> Confusion:
        """Count examples by their labels and predictions."""
        n = len(classes)
        pairs = torch.tensor([a * n + b for a, b in zip(labels, predictions, strict=True)], dtype=torch.long)
        return cls(pairs.bincount(minlength=n * n).view(n, n), tuple(classes))

    @property
    def accuracy(self) -> MetricValue:
        """The percentage of examples with the right prediction."""
        total = int(self.counts.sum())
        return MetricValue(100 * int(self.counts.diagonal().sum()) / max(total, 1), f"% of {total:,} examples")

    @property
    def f1(self) -> MetricValue:
        """2 p r / (p + r) of precision p and recall r, in percent, averaged over the classes that occur."""
        hits = self.counts.diagonal().double()
        there, found = self.counts.sum(1), self.counts.sum(0)
        occurs = there + found > 0
        each = 2 * hits[occurs] / (there + found)[occurs]
        return MetricValue(100 * float(each.mean()) if len(each) else 0.0, f"% macro, {len(each)} classes")

    def most_confused(self, limit: int = MAX_TABLE_CLASSES) -> list[tuple[str, str, int]]:
        """Return the most frequent confusions: true class, predicted class, count."""
        wrong = self.counts.clone()
        wrong.fill_diagonal_(0)
        values, places = wrong.flatten().sort(descending=True, stable=True)
        n = len(self.classes)
        pairs = zip(values.tolist()[:limit], places.tolist(), strict=False)
        return [(self.classes[place // n], self.classes[place % n], count) for count, place in pairs if count]

    def __str__(self) -> str:
        if len(self.classes) > MAX_TABLE_CLASSES:
            lines = [f"{count:>8} x {a} predicted as {b}" for a, b, count in self.most_confused()]
            return "\n".join(lines) or "    no example was misclassified"
        names = [name[:12] for name in self.classes]
        wide = max(3, *(len(str(count)) for count in self.counts.flatten().tolist()), *map(len, names))
        left = max(8, *map(len, names))
        lines = [" " * (left + 5) + " ".join(f"{name:>{wide}}" for name in names)]
        for name, row in zip(names, self.counts.tolist(), strict=True):
            lines.append(f"    {name:{left}} " + " ".join(f"{count:>{wide}}" for count in row))
        return "\n".join(lines)


def _in_word(letter: str) -> bool:
    """Whether a character is part of a word: letters, digits, marks such as vowel signs, and joiners."""
    return letter.isalnum() or letter in JOINERS or unicodedata.category(letter).startswith("M")


def reference_streams(references: Sequence[Sequence[str]]) -> list[list[str | None]]:
    """Return one list per reference number, as sacreBLEU takes them; None for a hypothesis with fewer references."""
    most = max(map(len, references))
    return [[some[n] if n < len(some) else None for some in references] for n in range(most)]


def _corpus_score(metric: Any, hypotheses: Sequence[str], references: References) -> MetricValue:
    given = _as_lists(hypotheses, references)
    value = metric.corpus_score(list(hypotheses), reference_streams(given)).score
    return MetricValue(value, str(metric.get_signature()))


def _as_lists(hypotheses: Sequence[str], references: References) -> list[Sequence[str]]:
    """Return a list of references for each hypothesis; raise unless each has one."""
    _check_matches(hypotheses, references)
    given = [[one] if isinstance(one, str) else one for one in references]
    for n, some in enumerate(given):
        if not some:
            raise ValueError(f"each hypothesis needs a reference, but number {n} has none; leave it out")
    return given


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
    """The harmonic mean of precision and recall over words, counting repetitions."""
    a, b = normalize_answer(answer).split(), normalize_answer(gold).split()
    if not a or not b:
        return float(a == b)
    return 2 * sum((Counter(a) & Counter(b)).values()) / (len(a) + len(b))


def _mean_percent(values: Sequence[float]) -> MetricValue:
    return MetricValue(100 * sum(values) / len(values), f"SQuAD, {len(values):,} questions")
