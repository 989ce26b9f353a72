"""Every command of the command line, as typer runs it; importing this file imports PyTorch."""

from __future__ import annotations

from typing import Any

import typer

from . import (
    answering,
    captioning,
    check_command,
    classification,
    compare,
    demo,
    explain,
    language,
    look,
    runs,
    serve,
    summarization,
    train_command,
    translation,
)
from .flags import OnceCommand

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
app.callback()(lambda: None)
train = typer.Typer(no_args_is_help=True, help="Train a model. Each task has a command, listed by regard train --help.")
app.add_typer(train, name="train", rich_help_panel="Train")
check = typer.Typer(
    no_args_is_help=True, help="Print what a training run would read, learn and need, without training."
)
app.add_typer(check, name="check-data", rich_help_panel="Train")

TASKS: tuple[tuple[str, Any, Any], ...] = (
    ("translation", translation.TranslationPlan, translation.train),
    ("language", language.LanguagePlan, language.train),
    ("summarization", summarization.SummarizationPlan, summarization.train),
    ("answering", answering.AnsweringPlan, answering.train),
    ("classification", classification.ClassificationPlan, classification.train),
    ("captioning", captioning.CaptioningPlan, captioning.train),
)
for name, plan, run in TASKS:
    train_command.add_train_command(train, name, plan, run)
    train_command.add_check_command(check, name, plan, run)

app.command(rich_help_panel="Train", cls=OnceCommand)(demo.demo)
app.command(rich_help_panel="Train", cls=OnceCommand)(runs.average)
for use in (
    translation.translate,
    translation.align,
    language.generate,
    summarization.summarize,
    answering.answer,
    classification.classify,
    captioning.caption,
):
    app.command(rich_help_panel="Use", cls=OnceCommand)(use)
app.command(rich_help_panel="Use", cls=OnceCommand)(serve.serve)
app.command("evaluate", rich_help_panel="Use", cls=runs.help_of_run(runs.EVALUATIONS, runs.print_evaluation))(
    runs.evaluate
)
app.command("compare", rich_help_panel="Use", cls=runs.help_of_run(compare.COMPARISONS, compare.print_comparison))(
    compare.compare
)
app.command("score", rich_help_panel="Use", cls=runs.help_of_run(runs.SCORINGS, runs.print_scores))(runs.score)
app.command(rich_help_panel="Look inside", cls=OnceCommand)(look.look)
app.command(rich_help_panel="Look inside", cls=OnceCommand)(look.view)
app.command(rich_help_panel="Look inside", cls=OnceCommand)(check_command.check)
app.command(rich_help_panel="Look inside", cls=OnceCommand)(explain.explain)
app.command(rich_help_panel="Look inside", cls=OnceCommand, context_settings={"ignore_unknown_options": True})(
    explain.bench
)
