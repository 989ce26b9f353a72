"""Endpoints: for each task the path, the fields of a request, and how a run of that task answers examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..tasks import run_folder
from ..tasks.answering import Answerer, Asking
from ..tasks.captioning import Describer
from ..tasks.classification import Classifier
from ..tasks.language import LanguageModel
from ..tasks.pairs import Draft
from ..tasks.seq2seq_task import GeneratedText, Writer
from ..tasks.summarization import Summarizer
from ..tasks.text_inputs import TextInputs
from ..tasks.translation import Translator
from .request_fields import BadRequest, Field, Kind

MAX_BEAM, MAX_TOKENS = 64, 4096
Settings = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """The path under which a run answers, and the fields of its requests; the first holds the examples."""

    path: str
    doing: str  # what it does, for the API page
    fields: Sequence[Field]
    run: Callable[[list[Any], Settings], list[Any]]
    request: Mapping[str, Any]  # an example
    response: Mapping[str, Any]  # its answer

    def examples(self, values: Mapping[str, Any]) -> tuple[list[Any], Settings]:
        """Split the values of a request into examples and settings, which requests must share to run together."""
        settings = dict(values)
        found = list(settings.pop(self.fields[0].name))
        if "document" in settings:
            document = settings.pop("document")
            found = [Asking(question, document) for question in found]
        if settings.get("nbest", 1) > settings.get("beam", MAX_BEAM):
            raise BadRequest(f"nbest must be at most beam, {settings['beam']}, got {settings['nbest']}")
        return found, settings


def endpoint_of(folders: Sequence[str | Path], device: str | None = None) -> Endpoint:
    """Load a run, or several as an ensemble, and return its endpoint."""
    task = run_folder.task_of(run_folder.open_run(folders[0]))
    if task not in ENDPOINTS:
        raise ValueError(f"{folders[0]} is a run of the task {task!r}, expected {' or '.join(map(repr, ENDPOINTS))}")
    if len(folders) > 1 and task not in ENSEMBLES:
        raise ValueError(f"runs of the task {task!r} cannot be served as an ensemble, got {len(folders)}; name one")
    return ENDPOINTS[task](*folders, device=device)


def _texts(help: str, name: str = "text", kind: Kind = "texts") -> Field:
    return Field(name, kind, help)


def _search(beam: int) -> tuple[Field, ...]:
    return (
        Field("beam", "whole number", "Beam size; 1 is greedy search.", beam, 1, MAX_BEAM),
        Field("nbest", "whole number", "Number of outputs to return for each input, best first.", 1, 1, MAX_BEAM),
        Field("length_penalty", "number", "Exponent of the length penalty; 0 for none.", 0.6, -10, 10),
        Field("max_length", "whole number", "Maximum number of output tokens.", None, 1, MAX_TOKENS),
    )


def _to_json(best: Sequence[GeneratedText]) -> dict[str, Any]:
    """Return the best output and, if there are several, all of them."""
    texts = [{"text": one.text, "score": one.score, "finished": one.finished} for one in best]
    return {**texts[0], "nbest": texts} if len(texts) > 1 else texts[0]


def _write(writer: Writer, lines: list[str], settings: Settings) -> list[list[GeneratedText]]:
    known = {name: settings[name] for name in ("beam", "max_length", "min_length", "no_repeat") if name in settings}
    return writer.n_best(lines, n=settings["nbest"], alpha=settings["length_penalty"], **known)


def _translation(*folders: str | Path, device: str | None) -> Endpoint:
    translator = Translator.load(*folders, device=device)

    def run(lines: list[str], settings: Settings) -> list[Any]:
        found = _write(translator, lines, settings)
        answers = [_to_json(best) for best in found]
        drafts = {
            number: Draft(line, best[0].text, best[0].tokens)
            for number, (line, best) in enumerate(zip(lines, found, strict=True))
            if line.strip() and best[0].text.strip()
        }
        if settings["alignment"] and drafts:
            for number, links in zip(drafts, translator.align(list(drafts.values())), strict=True):
                answers[number]["alignment"] = str(links)
        if settings["attention"] and drafts:
            for (number, draft), map_ in zip(drafts.items(), translator.word_maps(list(drafts.values())), strict=True):
                answers[number]["attention"] = {
                    "source": draft.source.split(),
                    "target": draft.target.split(),
                    "weights": _to_list(map_),
                }
        return answers

    return Endpoint(
        path="/translate",
        doing="Translate texts",
        fields=(
            _texts("Sentences to translate, a text or a list."),
            *_search(5),
            Field("alignment", "yes or no", "Also return the links of words, in Pharaoh format.", False),
            Field("attention", "yes or no", "Also return the attention of target words to source words.", False),
        ),
        run=run,
        request={"text": ["Ein kleines Haus ."], "alignment": True},
        response={
            "answers": [{"text": "A small house .", "score": -0.41, "finished": True, "alignment": "0-0 1-1 2-2 3-3"}]
        },
    )


def _summarization(*folders: str | Path, device: str | None) -> Endpoint:
    summarizer = Summarizer.load(*folders, device=device)

    def run(documents: list[str], settings: Settings) -> list[Any]:
        answers = [_to_json(best) for best in _write(summarizer, documents, settings)]
        for answer, is_long in zip(answers, summarizer.too_long(documents), strict=True):
            answer["read_whole"] = not is_long
        return answers

    return Endpoint(
        path="/summarize",
        doing="Summarize documents",
        fields=(
            _texts("Documents to summarize, a text or a list."),
            *_search(4),
            Field("min_length", "whole number", "Minimum number of output tokens.", 0, 0, MAX_TOKENS),
            Field(
                "no_repeat", "whole number", "Never repeat a sequence of this number of tokens.", None, 1, MAX_TOKENS
            ),
        ),
        run=run,
        request={"text": ["The tower opened in 1889 . It is made of iron . Its height is 330 metres ."]},
        response={"answers": [{"text": "tower opened", "score": -1.2, "finished": True, "read_whole": True}]},
    )


def _answering(folder: str | Path, *, device: str | None) -> Endpoint:
    answerer = Answerer.load(folder, device=device)

    def run(asked: list[Asking], settings: Settings) -> list[Any]:
        answers: list[Any] = []
        for best in answerer.n_best(asked, n=settings["nbest"], threshold=settings["threshold"]):
            found = [{"text": one.text, "start": one.start, "end": one.end, "score": one.score} for one in best]
            answers.append({**found[0], "nbest": found} if settings["nbest"] > 1 else found[0])
        if settings["attention"]:
            for answer, one in zip(answers, asked, strict=True):
                if one.question.strip() and one.context.strip():
                    A, words = answerer.look(one)
                    answer["attention"] = {"words": words, "weights": _to_list(A)}
        return answers

    return Endpoint(
        path="/answer",
        doing="Find answers in a document",
        fields=(
            _texts("Questions about the document, a text or a list.", "question"),
            _texts("The text to find answers in.", "document", "text"),
            Field(
                "nbest", "whole number", "Number of answers to return for each question, best first.", 1, 1, MAX_BEAM
            ),
            Field("threshold", "number", "Answer with an empty text if the best score is below this.", 0.0),
            Field("attention", "yes or no", "Also return the attention of the question to the document.", False),
        ),
        run=run,
        request={"question": "When did it open?", "document": "The tower opened in 1889."},
        response={"answers": [{"text": "1889", "start": 20, "end": 24, "score": 7.5}]},
    )


def _classification(folder: str | Path, *, device: str | None) -> Endpoint:
    classifier = Classifier.load(folder, device=device)
    texts = classifier.reads if isinstance(classifier.reads, TextInputs) else None

    def run(examples: list[Any], settings: Settings) -> list[Any]:
        answers: list[Any] = []
        for one in classifier.classify(examples):
            likely = dict(list(one.probabilities.items())[: settings["top"]])
            answers.append({"label": one.label, "probability": one.probability, "probabilities": likely})
        if settings["attention"]:
            for answer, example, look in zip(answers, examples, classifier.looks(examples), strict=True):
                tokens = {} if texts is None else {"tokens": texts.pieces(example)}
                answer["attention"] = {**tokens, "weights": _to_list(look)}
        return answers

    what = _texts("Texts to classify, a text or a list.") if texts else _image_field("classify")
    return Endpoint(
        path="/classify",
        doing="Classify texts" if texts else "Classify images",
        fields=(
            what,
            Field("top", "whole number", "Number of most likely classes to return.", 5, 1, 10_000),
            Field("attention", "yes or no", "Also return the relevance of each part of the input.", False),
        ),
        run=run,
        request={what.name: "no wit at all" if texts else "<base64>", "top": 2},
        response={"answers": [{"label": "neg", "probability": 0.93, "probabilities": {"neg": 0.93, "pos": 0.07}}]},
    )


def _captioning(*folders: str | Path, device: str | None) -> Endpoint:
    describer = Describer.load(*folders, device=device)

    def run(images: list[Any], settings: Settings) -> list[Any]:
        search = {name: settings[name] for name in ("beam", "max_length")}
        return list(
            map(_to_json, describer.n_best(images, n=settings["nbest"], alpha=settings["length_penalty"], **search))
        )

    return Endpoint(
        path="/caption",
        doing="Describe images",
        fields=(_image_field("describe"), *_search(3)),
        run=run,
        request={"image": "<base64>"},
        response={"answers": [{"text": "a dog on the grass", "score": -0.8, "finished": True}]},
    )


def _language(folder: str | Path, *, device: str | None) -> Endpoint:
    model = LanguageModel.load(folder, device=device)

    def run(prompts: list[str], settings: Settings) -> list[Any]:
        # Each text has its own random numbers, so that a seed gives the same text beside any other request.
        sampling = {name: value for name, value in settings.items() if name != "until_line_end"}
        return [
            {"text": text}
            for prompt in prompts
            for text in model.generate(prompt, until_line_end=settings["until_line_end"], **sampling)
        ]

    return Endpoint(
        path="/generate",
        doing="Continue texts",
        fields=(
            _texts("Beginnings of texts, a text or a list.", "prompt"),
            Field("tokens", "whole number", "Number of tokens to generate.", 100, 1, MAX_TOKENS),
            Field("temperature", "number", "Sampling temperature; 0 takes the most likely token.", 1.0, 0, 100),
            Field("top_k", "whole number", "Sample from this number of most likely tokens.", None, 1, 10**9),
            Field("top_p", "number", "Sample from the most likely tokens with this total probability.", None, 1e-6, 1),
            Field("until_line_end", "yes or no", "Stop at the end of the line.", False),
            Field("seed", "whole number", "Random seed; the same seed gives the same text.", 0, 0, 2**53),
        ),
        run=run,
        request={"prompt": "ROMEO:", "tokens": 60, "temperature": 0.8},
        response={"answers": [{"text": " But soft, what light"}]},
    )


def _image_field(verb: str) -> Field:
    return Field("image", "images", f"Image files to {verb}, in base64, one or a list.")


def _to_list(x: Any) -> Any:
    return [_to_list(row) for row in x] if x.ndim > 1 else [round(value, 6) for value in x.tolist()]


ENDPOINTS: dict[str, Callable[..., Endpoint]] = {
    "translation": _translation,
    "summarization": _summarization,
    "answering": _answering,
    "classification": _classification,
    "captioning": _captioning,
    "language": _language,
}
ENSEMBLES = ("translation", "summarization", "captioning")
