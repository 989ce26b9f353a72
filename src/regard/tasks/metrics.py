"""Metrics of written text against references, as the field reports them: a number, and how it was computed."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, Literal, NamedTuple

from ..data.text import check_not_a_string
from ..train.progress import number

# sacreBLEU and above all rouge-score, with all of SciPy behind it, are imported where a text is measured.

# Those of sacreBLEU that want no files from elsewhere, nor packages that are not here.
TOKENIZERS = ("13a", "intl", "zh", "char", "none")
JOINERS = "_\u200c\u200d"  # the last two have no width: Indic and Persian words are spelled with them


class Measured(NamedTuple):
    """A number and its signature, by which others can compute the same."""

    value: float
    signature: str

    def __str__(self) -> str:
        return f"{number(self.value, digits=2)}  {self.signature}"


def bleu(hypotheses: Sequence[str], references: Sequence[str], *, tokenize: str = "13a") -> Measured:
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


def chrf(hypotheses: Sequence[str], references: Sequence[str]) -> Measured:
    """chrF2 from 0 to 100, over characters, so for any script (Popović 2015)."""
    from sacrebleu.metrics.chrf import CHRF

    return _measured(CHRF(), hypotheses, references)


def exact(hypotheses: Sequence[str], references: Sequence[str]) -> Measured:
    """The percentage of lines that are the reference, spaces at the ends aside."""
    _check_matches(hypotheses, references)
    same = sum(h.strip() == r.strip() for h, r in zip(hypotheses, references, strict=True))
    return Measured(100 * same / len(references), "lines")


def bleu_of_many(hypotheses: Sequence[str], references: Sequence[Sequence[str]], *, order: int) -> Measured:
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
    return Measured(value, f"order:{order}|{metric.get_signature()}")


def exact_of_many(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> Measured:
    """The percentage of lines that are one of their references, spaces at the ends aside."""
    _check_all_match(hypotheses, references)
    same = sum(h.strip() in [r.strip() for r in some] for h, some in zip(hypotheses, references, strict=True))
    return Measured(100 * same / len(references), "lines")


Words = Literal["english", "unicode"]


def rouge(hypotheses: Sequence[str], references: Sequence[str], *, words: Words = "english") -> dict[str, Measured]:
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
    return {name: Measured(100 * sum(one[name].fmeasure for one in each) / len(each), signature) for name in names}


class UnicodeWords:
    """Runs of letters, their marks and digits of any script, as rouge-score takes a tokenizer."""

    def tokenize(self, text: str) -> list[str]:
        """The words of a text, in lower case and composed (NFC).

        >>> UnicodeWords().tokenize("हिन्दी, Cafe\\u0301!")
        ['हिन्दी', 'café']
        """
        text = unicodedata.normalize("NFC", text.lower())
        return "".join(letter if _in_word(letter) else " " for letter in text).split()


def _in_word(letter: str) -> bool:
    """Whether a character does not end a word: vowel signs are marks, and joiners stand between letters."""
    return letter.isalnum() or letter in JOINERS or unicodedata.category(letter).startswith("M")


def _measured(metric: Any, hypotheses: Sequence[str], references: Sequence[str]) -> Measured:
    _check_matches(hypotheses, references)
    value = metric.corpus_score(list(hypotheses), [list(references)]).score
    return Measured(value, str(metric.get_signature()))


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
