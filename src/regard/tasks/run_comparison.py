"""Comparison of two runs on the same test data: their outputs, metrics, speed and size."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from ..data import Question
from ..lens import Links
from . import metrics
from .answering import Answerer
from .caption_inputs import ExampleImages
from .captioning import Describer
from .classification import Classifier, ExampleInputs
from .language import LanguageModel
from .metrics import RougeWords, reference_streams, rouge_of_each, squad_of_each
from .paired_bootstrap import MetricStatistics, PairedDifference, paired_bootstrap, sacrebleu_statistics
from .pairs import TextPair
from .seq2seq_task import Writer

Show = Callable[[int, int], None] | None
Example = TypeVar("Example")
Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class TestOutputs:
    """The outputs of a run for each test example, and the statistics of its metrics.

    `each` is a score of each example, larger for better ones, which finds the examples where runs differ most.
    """

    __test__ = False  # pytest would collect it

    inputs: Sequence[str]
    references: Sequence[str]
    outputs: Sequence[str]
    metrics: Mapping[str, MetricStatistics]
    each: Sequence[float]
    each_name: str
    seconds: float
    parameters: int


@dataclass(frozen=True, kw_only=True)
class ExamplePair:
    """An example and the outputs of both runs, with their scores."""

    number: int
    input: str
    reference: str
    outputs: tuple[str, str]
    scores: tuple[float, float]

    @property
    def gain(self) -> float:
        """The score of b, minus that of a."""
        return self.scores[1] - self.scores[0]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The metrics of two runs, the examples where they differ most, and their speed and size."""

    names: tuple[str, str]
    metrics: Mapping[str, PairedDifference]
    examples: Sequence[ExamplePair]
    each_name: str
    same: int
    count: int
    seconds: tuple[float, float]
    parameters: tuple[int, int]
    better: Mapping[str, str] = field(default_factory=dict)


def compare_outputs(
    names: tuple[str, str], a: TestOutputs, b: TestOutputs, *, examples: int = 5, samples: int = 1000, seed: int = 0
) -> Comparison:
    """Compare the outputs of two runs for the same examples.

    Of the `examples` with the largest difference of scores, about half are those where b is better, if there are any.
    """
    if list(a.inputs) != list(b.inputs):
        raise ValueError("both runs must have outputs for the same examples; give the same test data")
    gains = [y - x for x, y in zip(a.each, b.each, strict=True)]
    order = sorted(range(len(gains)), key=lambda n: (-abs(gains[n]), n))
    up = [n for n in order if gains[n] > 0]
    down = [n for n in order if gains[n] < 0]
    more = max(examples - len(down), (examples + 1) // 2)  # one side takes the places that the other cannot fill
    up = up[:more]
    down = down[: examples - len(up)]
    shown = [
        ExamplePair(
            number=n,
            input=a.inputs[n],
            reference=a.references[n],
            outputs=(a.outputs[n], b.outputs[n]),
            scores=(a.each[n], b.each[n]),
        )
        for n in [*up, *down]
    ]
    return Comparison(
        names=names,
        metrics={
            name: paired_bootstrap(one, b.metrics[name], samples=samples, seed=seed) for name, one in a.metrics.items()
        },
        better={name: one.better for name, one in a.metrics.items()},
        examples=shown,
        each_name=a.each_name,
        same=sum(x == y for x, y in zip(a.outputs, b.outputs, strict=True)),
        count=len(gains),
        seconds=(a.seconds, b.seconds),
        parameters=(a.parameters, b.parameters),
    )


def translation_outputs(
    translator: Writer,
    pairs: Sequence[TextPair],
    references: Sequence[Sequence[str]],
    *,
    tokenize: str = "13a",
    show: Show = None,
    **search: Any,
) -> TestOutputs:
    """Translate the sources; the metrics are BLEU and chrF."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    metrics.check_tokenizable(tokenize)
    written, seconds = _write(translator, pairs, show, search)
    streams, chrf = reference_streams(references), CHRF()
    return TestOutputs(
        inputs=[pair.source for pair in pairs],
        references=[pair.target for pair in pairs],
        outputs=written,
        metrics={
            "bleu": sacrebleu_statistics(BLEU(tokenize=tokenize, force=True), written, streams),
            "chrf": sacrebleu_statistics(chrf, written, streams),
            "loss per character": _loss(translator, pairs),
        },
        each=[chrf.sentence_score(text, list(some)).score for text, some in zip(written, references, strict=True)],
        each_name="chrF of the line",
        seconds=seconds,
        parameters=_count_parameters(translator.models),
    )


def summary_outputs(
    summarizer: Writer,
    pairs: Sequence[TextPair],
    references: Sequence[Sequence[str]],
    *,
    words: RougeWords = "english",
    show: Show = None,
    **search: Any,
) -> TestOutputs:
    """Summarize the documents; the metrics are ROUGE-1, -2 and -L."""
    written, seconds = _write(summarizer, pairs, show, search)
    each = rouge_of_each(written, references, words=words)
    return TestOutputs(
        inputs=[pair.source for pair in pairs],
        references=[pair.target for pair in pairs],
        outputs=written,
        metrics={
            **{name: MetricStatistics.mean(values, scale=100) for name, values in each.items()},
            "loss per character": _loss(summarizer, pairs),
        },
        each=[100 * value for value in each["rougeL"]],
        each_name="ROUGE-L of the summary",
        seconds=seconds,
        parameters=_count_parameters(summarizer.models),
    )


def class_outputs(classifier: Classifier, examples: Any, *, field: str, show: Show = None) -> TestOutputs:
    """Classify texts or images; the metrics are accuracy and loss."""
    found, seconds = _time_outputs(classifier.classify, ExampleInputs(examples, field), show)
    true = [examples.classes[label] for label in list(examples.labels)]
    right = [one.probabilities[name] for one, name in zip(found, true, strict=True)]
    return TestOutputs(
        inputs=[example.text if field == "text" else f"image {n}" for n, example in enumerate(examples)],
        references=true,
        outputs=[one.label for one in found],
        metrics={
            "accuracy": MetricStatistics.mean(
                [float(one.label == name) for one, name in zip(found, true, strict=True)], scale=100
            ),
            "loss": MetricStatistics.mean([-math.log(max(p, 1e-45)) for p in right], better="lower"),
        },
        each=[100 * p for p in right],
        each_name="probability of the true class, %",
        seconds=seconds,
        parameters=_count_parameters([classifier.model]),
    )


def answer_outputs(
    answerer: Answerer, questions: Sequence[Question], *, threshold: float = 0.0, show: Show = None
) -> TestOutputs:
    """Answer the questions; the metrics are F1 and exact matches as of SQuAD."""
    found, seconds = _time_outputs(partial(answerer.answer, threshold=threshold), questions, show)
    answers = [one.text for one in found]
    gold = [[answer.text for answer in one.answers] for one in questions]
    f1, exact = squad_of_each(answers, gold)
    return TestOutputs(
        inputs=[one.question for one in questions],
        references=[some[0] if some else "" for some in gold],
        outputs=answers,
        metrics={
            "f1": MetricStatistics.mean(f1, scale=100),
            "exact": MetricStatistics.mean(exact, scale=100),
        },
        each=[100 * value for value in f1],
        each_name="F1 of the answer",
        seconds=seconds,
        parameters=_count_parameters([answerer.model]),
    )


def caption_outputs(describer: Describer, examples: Any, *, show: Show = None, **search: Any) -> TestOutputs:
    """Caption the images; the metrics are BLEU-4 and chrF against all references."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    found, seconds = _time_outputs(partial(describer.n_best, n=1, **search), ExampleImages(examples), show)
    written = [best[0].text for best in found]
    references = [list(example.captions) for example in examples]
    streams, chrf = reference_streams(references), CHRF()
    bleu = BLEU(max_ngram_order=4, smooth_method="none", force=True)
    return TestOutputs(
        inputs=[f"image {n}" for n in range(len(written))],
        references=[some[0] for some in references],
        outputs=written,
        metrics={
            "bleu4": sacrebleu_statistics(bleu, written, streams),
            "chrf": sacrebleu_statistics(chrf, written, streams),
        },
        each=[chrf.sentence_score(text, some).score for text, some in zip(written, references, strict=True)],
        each_name="chrF of the caption",
        seconds=seconds,
        parameters=_count_parameters(describer.models),
    )


def language_outputs(model: LanguageModel, lines: Sequence[str], *, show: Show = None) -> TestOutputs:
    """Score the lines; the metric is bits per character, which does not depend on the tokens."""
    kept = [line for line in lines if line]
    scores, seconds = _time_outputs(model.score, kept, show)
    bits = [-score / math.log(2) for score in scores]
    return TestOutputs(
        inputs=kept,
        references=[""] * len(kept),
        outputs=[""] * len(kept),
        metrics={
            "bits per character": MetricStatistics.ratio(bits, [float(len(line)) for line in kept], better="lower")
        },
        each=[-one / len(line) for one, line in zip(bits, kept, strict=True)],
        each_name="-bits per character of the line",
        seconds=seconds,
        parameters=_count_parameters([model.model]),
    )


def alignment_statistics(links: Sequence[Links], gold: Sequence[Links]) -> MetricStatistics:
    """Return the alignment error rate as a metric: 1 - (|A & S| + |A & P|) / (|A| + |S|) (Och & Ney 2003)."""
    right = [
        float(len(one.possible & true.sure) + len(one.possible & true.possible))
        for one, true in zip(links, gold, strict=True)
    ]
    both = [float(len(one.possible) + len(true.sure)) for one, true in zip(links, gold, strict=True)]
    wrong = [n - hits for n, hits in zip(both, right, strict=True)]
    return MetricStatistics.ratio(wrong, both, better="lower")


def _write(writer: Writer, pairs: Sequence[TextPair], show: Show, search: Mapping[str, Any]) -> tuple[list[str], float]:
    """Return the outputs for the sources, and the seconds that they took."""
    found, seconds = _time_outputs(partial(writer.write, **search), [pair.source for pair in pairs], show)
    return [one.text for one in found], seconds


def _time_outputs(
    run: Callable[..., Sequence[Found]], examples: Sequence[Example], show: Show
) -> tuple[Sequence[Found], float]:
    """Return the outputs for the examples, and their seconds; the first example also runs before, without the clock.

    A first call loads libraries and compiles kernels. It would count against the run that comes first.
    """
    if len(examples):
        run([examples[0]])
    began = time.perf_counter()
    found = run(examples, show=show)
    return found, time.perf_counter() - began


def _loss(writer: Writer, pairs: Sequence[TextPair]) -> MetricStatistics:
    """Return the loss per character of the target, which runs with other tokens share."""
    scores = writer.score(pairs)
    characters = [float(max(len(pair.target), 1)) for pair in pairs]
    return MetricStatistics.ratio([-score for score in scores], characters, better="lower")


def _count_parameters(models: Sequence[Any]) -> int:
    return sum(parameter.numel() for model in models for parameter in model.parameters())
