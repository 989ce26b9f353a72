"""`regard train translation`, `translate` and `align`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ..data import DataError, Lines
from ..lens import Links, alignment_score
from ..tasks import translation
from ..tasks.batching import Batching
from ..tasks.metrics import check_tokenizable
from ..tasks.pairs import PairVocabulary
from ..tasks.seq2seq_task import MAX_CAPTURED_PAIRS
from ..tasks.translation import TranslationModelSettings, Translator
from ..tasks.word_alignment import When
from ..train import Outcome
from ..train import checkpoint as checkpoints
from ..train.failures import disk_errors
from .attention_output import check_single_input, max_examples, save_pairs
from .cleaning import Cleaning
from .decoding_flags import (
    COVERAGE,
    LENGTH,
    LENGTH_PENALTY,
    Beam,
    Coverage,
    MaxLength,
    Nbest,
    Penalty,
    Prefix,
    Prefixes,
    Search,
    Seed,
    Temperature,
    TopK,
    TopP,
    sampling_of,
)
from .device import Device
from .evaluation_files import OUT, REFERENCE, check_out, read_references, write_outputs
from .files import Files, PairFiles, check_writable
from .fine_tuning_flags import FineTuningFlags
from .stdin_chunks import Stream
from .stdin_lines import Runs, write_lines
from .terminal import print_status, progress
from .training_flags import DecoderTraining

Layer = Annotated[
    int | None,
    typer.Option(
        "--layer", help="Layer to read alignments from, from 0 (Transformer only). Default: the one above the middle."
    ),
]

Head = Annotated[
    int | None,
    typer.Option("--head", help="Head to read alignments from, from 0. Default: the mean of all heads.", min=0),
]
Moment = Annotated[
    When,
    typer.Option(
        "--when",
        help="Align a target word by its attention in the step that writes it, or in the next, which reads it.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class TranslationPlan:
    """The sections of `regard train translation`."""

    data: PairFiles
    valid: PairFiles | None
    cleaning: Cleaning
    vocabulary: PairVocabulary
    model: TranslationModelSettings
    batching: Batching
    finetuning: FineTuningFlags
    training: DecoderTraining


def train(plan: TranslationPlan, out: Path, resume: bool, device: str | None, files: Mapping[str, str]) -> Outcome:
    """Train a translator on pairs of sentences.

    Examples:

        regard train translation --source a.de --target a.en --out runs/deen

        regard train translation --source a.de --target a.en --valid-source b.de --valid-target b.en \\
            --model rnn --tokenizer word --patience 10 --out runs/words

        regard train translation --from runs/deen --source news.de --target news.en --rate 1e-4 --out runs/news

    The best checkpoint has the highest chrF on the validation data; without validation data it is the last one.
    """
    pairs, valid = plan.data.read(), None if plan.valid is None else plan.valid.read(prefix="valid-")
    return translation.train(
        plan.cleaning.clean(pairs, valid),
        valid=valid,
        out=out,
        recipe=plan.training.recipe("chrf", "bleu", "exact", "loss"),
        **plan.finetuning.unless_kept(model=plan.model, vocabulary=plan.vocabulary),
        batching=plan.batching,
        base=plan.finetuning.tuning,
        resume=resume,
        files=files,
        device=device,
    )


@dataclass(frozen=True, kw_only=True)
class TranslationEvaluation(PairFiles):
    """The flags of `regard evaluate` for a translator."""

    beam: Annotated[int, "Beam size; 1 is greedy search."] = 5
    length_penalty: Annotated[float, LENGTH_PENALTY] = 0.6
    coverage_penalty: Annotated[float, COVERAGE] = 0.0
    max_length: Annotated[int | None, LENGTH] = None
    tokenize: Annotated[str, "Tokenizer of sacreBLEU: 13a, intl, zh, char or none."] = "13a"
    reference: Annotated[Files | None, REFERENCE] = None
    out: Annotated[str | None, OUT] = None

    def run(self, folders: Sequence[Path], device: str | None) -> dict[str, object]:
        """Compute BLEU, chrF and exact matches of the translations, and the loss.

        Several run folders are one ensemble.
        """
        search = Search(
            beam=self.beam, penalty=self.length_penalty, max_length=self.max_length, coverage=self.coverage_penalty
        )
        check_tokenizable(self.tokenize)
        pairs = list(self.read())
        references = read_references(pairs, self.reference)
        check_out(self.out, *folders, *self.files, references=self.reference)
        translator = Translator.load(*folders, device=device)
        with progress("translating") as show:
            found = translator.write([pair.source for pair in pairs], **search.one_best, show=show)
        written = [one.text for one in found]
        write_outputs(self.out, written)
        search.print_method()
        return dict(translator.measure(written, pairs, tokenize=self.tokenize, references=references))


@dataclass(frozen=True, kw_only=True)
class TranslationScoring(PairFiles):
    """The flags of `regard score` for a translator."""

    def run(self, folders: Sequence[Path], device: str | None) -> list[float]:
        """Compute log p(target | source) of each pair; several run folders are one ensemble."""
        pairs = list(self.read())
        with progress("scoring") as show:
            return Translator.load(*folders, device=device).score(pairs, show=show)


def translate(
    folders: Runs,
    beam: Beam = 5,
    nbest: Nbest = 1,
    penalty: Penalty = 0.6,
    max_length: MaxLength = None,
    coverage: Coverage = 0.0,
    prefix: Prefix = "",
    prefixes: Prefixes = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = 0,
    alignments: Annotated[Path | None, typer.Option(help="Write word links to this file, in Pharaoh format.")] = None,
    attention: Annotated[
        Path | None,
        typer.Option(help="Write the attention to this file: .png (one sentence) or .safetensors for regard view."),
    ] = None,
    layer: Layer = None,
    head: Head = None,
    when: Moment = "written",
    stream: Stream = False,
    device: Device = None,
) -> None:
    """Translate standard input, line by line.

    Examples:

        regard translate runs/deen < in.de > out.en

        regard translate runs/deen runs/deen2 --beam 8 --alignments out.align < in.de > out.en

        regard translate runs/deen --temperature 0.8 --nbest 5 --seed 1 < in.de

    With --nbest a line is: number of the input line ||| text ||| score.
    """
    search = Search(
        beam=beam,
        nbest=nbest,
        penalty=penalty,
        max_length=max_length,
        coverage=coverage,
        prefix=prefix,
        prefixes=None if prefixes is None else list(Lines(prefixes)),
        sampling=sampling_of(temperature, top_k, top_p, seed),
    )
    check_writable(alignments, *folders)
    max_examples(attention, MAX_CAPTURED_PAIRS, *folders)
    check_single_input(attention, folders)
    translator = Translator.load(*folders, device=device)
    watched = alignments is not None or attention is not None
    if not watched and (layer is not None or head is not None):
        raise ValueError("--layer and --head select the attention to write; also give --alignments or --attention")
    if watched:
        translator.align([], layer=layer, head=head)  # raises before decoding if the layer or head does not exist
    pairs = write_lines(
        translator,
        search,
        doing="translating",
        what="translations",
        attention=attention,
        keep=watched,
        stream=stream,
    )
    if alignments is not None:
        with progress("aligning") as show:
            links = translator.align(pairs, layer=layer, head=head, when=when, show=show)
        checkpoints.write_text(alignments, "".join(f"{link}\n" for link in links), then="try again")
    if attention is not None and pairs:
        with disk_errors(attention, then="try again"):
            save_pairs(translator, pairs, attention, layer=layer, head=head)


def align(
    folder: Annotated[Path, typer.Argument(help="Folder of a run.", metavar="RUN")],
    source: Annotated[str, typer.Option(help="File of source sentences, one per line, words separated by spaces.")],
    target: Annotated[str, typer.Option(help="File of their translations, line by line.")],
    reverse: Annotated[
        Path | None,
        typer.Option(help="Folder of a run for the opposite direction; print only links that both runs agree on."),
    ] = None,
    layer: Layer = None,
    head: Head = None,
    when: Moment = "written",
    gold: Annotated[Path | None, typer.Option(help="File of gold links in Pharaoh format, e.g. 0-0 1-2 2p1.")] = None,
    first: Annotated[int, typer.Option(help="Number of the first word in the gold links.")] = 0,
    device: Device = None,
) -> None:
    """Print word alignments of sentence pairs, as source-target pairs counted from 0, from a translator's attention.

    Example:

        regard align runs/deen --source test.de --target test.en --gold gold.pharaoh > links

    With gold links, also prints the alignment error rate (Och & Ney 2003) on standard error.
    """
    pairs = list(PairFiles(source=source, target=target).read())
    right = None if gold is None else read_gold(gold, len(pairs), first=first)
    with progress("aligning") as show:
        back = None if reverse is None else Translator.load(reverse, device=device)
        translator = Translator.load(folder, device=device)
        links = translator.align(pairs, layer=layer, head=head, when=when, reverse=back, show=show)
    print(*links, sep="\n")
    if right is not None:
        score = alignment_score(links, right)
        print_status(
            f"alignment error rate {score.error:.4f} · precision {score.precision:.4f} · recall {score.recall:.4f}"
        )


def read_gold(path: Path, pairs: int, *, first: int) -> list[Links]:
    """Read gold links, one line for each pair."""
    lines, links = Lines(path), []
    if len(lines) != pairs:
        raise DataError(f"has {len(lines):,} lines, expected one for each of the {pairs:,} pairs", file=path)
    for number, line in enumerate(lines, start=1):
        try:
            links.append(Links.parse(line, first=first))
        except ValueError as error:
            raise DataError(str(error), file=path, line=number) from None
    return links
