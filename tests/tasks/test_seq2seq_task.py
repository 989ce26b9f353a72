"""Writers: what a config says of them, and how much of a source they read."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from regard.data import Tokenizer
from regard.models import Pointer, PointerConfig, Seq2Seq, Seq2SeqConfig, Transformer, TransformerConfig
from regard.tasks import word_alignment
from regard.tasks.captioning import Describer
from regard.tasks.copy_vocabulary import CopyTokenizers
from regard.tasks.pairs import Draft, Tokenizers
from regard.tasks.seq2seq_task import Sampling, Seq2SeqTaskConfig, Writer, build_model, tokenizers_class
from regard.tasks.translation import Translator
from regard.train.dataclass_json import from_json, to_json
from tests.tasks.tiny_translators import PAIRS

SIZES = {"source_vocabulary": 9, "target_vocabulary": 9, "start": 2, "dim": 8, "hidden": 8}
WORDS = Tokenizer.words(["ein kleines Haus am See"])


def test_a_config_that_names_no_limit_reads_sources_whole():
    config = Seq2SeqTaskConfig(model=Seq2SeqConfig(**SIZES), longest=7)
    named = to_json(config)
    assert named.pop("limit") is None
    assert from_json(Seq2SeqTaskConfig, json.dumps(named), source="config.json") == config


@pytest.mark.parametrize(
    ("config", "model", "tokenizers"),
    [
        (Seq2SeqConfig(**SIZES), Seq2Seq, Tokenizers),
        (PointerConfig(**SIZES, tied="all", unknown=1), Pointer, CopyTokenizers),
        (TransformerConfig(**SIZES, heads=2, encoder_layers=1, decoder_layers=1), Transformer, Tokenizers),
    ],
)
def test_a_config_is_built_and_read_by_its_kind(config, model, tokenizers):
    assert type(build_model(config)) is model
    assert tokenizers_class(config) is tokenizers


@pytest.mark.parametrize(
    ("limit", "read"), [(None, "ein kleines Haus am See"), (6, "ein kleines Haus am See"), (3, "ein kleines"), (1, "")]
)
def test_a_source_is_read_up_to_the_limit_which_its_end_counts_to(limit, read):
    model = nn.Module()
    model.weight = nn.Parameter(nn.Linear(1, 1).weight)
    writer = Writer([model], Tokenizers(WORDS, WORDS), longest=9, limit=limit)
    assert writer.read("ein kleines Haus am See") == read
    assert writer.too_long(["ein kleines Haus am See", ""]) == [read != "ein kleines Haus am See", False]


@pytest.mark.parametrize(
    ("wish", "error", "message"),
    [
        ({"beam": 0, "n": 1}, ValueError, "beam must be 1 or more, got 0"),
        ({"beam": True, "n": 1}, TypeError, "beam must be a whole number, got True"),
        ({"beam": 5, "n": 0}, ValueError, "n must be 1 or more, got 0"),
        ({"beam": 5, "n": 7}, ValueError, "n must be at most beam, got n=7 and beam=5; pass beam=7 or more"),
    ],
)
def test_a_beam_that_cannot_find_so_many_is_named_as_it_was_given(wish, error, message):
    for kind in (Writer, Describer):
        with pytest.raises(error, match=f"^{message}"):
            kind.n_best(None, [], **wish)


LINES = [pair.source for pair in PAIRS[:5]]


@pytest.fixture
def translator(translator_folder):
    return Translator.load(translator_folder, device="cpu")


def test_drawn_outputs_do_not_depend_on_other_lines(translator):
    sampling = Sampling(seed=11, temperature=1.5)
    found = translator.n_best([LINES[0], "", *LINES[1:]], n=3, sampling=sampling)
    assert [len(some) for some in found] == [3, 1, 3, 3, 3, 3]
    alone = translator.n_best([LINES[2]], n=3, sampling=sampling.after(3 * 3))
    assert [one.text for one in alone[0]] == [one.text for one in found[3]]
    assert [one.log_probability for one in alone[0]] == pytest.approx([one.log_probability for one in found[3]])
    for some in found:
        assert [one.score for one in some] == sorted([one.score for one in some], reverse=True)
    assert len({one.text for some in found for one in some}) > 5


def test_drawn_outputs_with_one_token_to_draw_from_are_greedy(translator):
    greedy = [one.text for one in translator.translate(LINES, beam=1)]
    assert [one.text for one in translator.translate(LINES, sampling=Sampling(top_k=1))] == greedy


@pytest.mark.parametrize("beam", [1, 3])
def test_beginning_of_the_best_output_leads_to_the_same_output(translator, beam):
    best = translator.translate(LINES, beam=1)
    firsts = ["", *[one.text.split()[0] for one in best[1:]]]
    again = translator.translate(LINES, beam=1, prefixes=firsts)
    assert [one.text for one in again] == [one.text for one in best]
    assert [one.tokens for one in again] == [one.tokens for one in best]
    forced = translator.translate(LINES, beam=beam, prefixes=["and three"] * len(LINES))
    assert all(one.text.startswith("and three") for one in forced)


def test_score_after_a_prefix_is_that_of_the_tokens_after_it(translator):
    [one] = translator.translate(LINES[:1], beam=1, prefixes=["two"])
    [whole] = translator.score([Draft(LINES[0], one.text, one.tokens)])
    [start] = translator.translate(LINES[:1], beam=1, max_length=1, prefixes=[""])
    first = [x for x in translator.n_best(LINES[:1], n=8, beam=8, max_length=1)[0] if x.text == "two"]
    if first:  # the first token is among the eight likeliest
        assert whole == pytest.approx(first[0].log_probability + one.log_probability, abs=1e-4)
    assert start.tokens


def test_unknown_words_and_missing_lines_of_prefixes_are_refused(translator):
    with pytest.raises(ValueError, match="the prefix 'zebra' has a token that the target vocabulary lacks"):
        translator.translate(LINES[:1], prefixes=["zebra"])
    with pytest.raises(ValueError, match="one text for each of the 2 lines, got 1"):
        translator.translate(LINES[:2], prefixes=["two"])


def test_coverage_adds_the_penalty_of_the_attention_received(translator):
    [plain] = translator.translate(LINES[:1], beam=3, alpha=0.0)
    [found] = translator.translate(LINES[:1], beam=3, alpha=0.0, coverage=0.3)
    draft = Draft(LINES[0], found.text, found.tokens)
    tape = translator.tape([draft])
    name = word_alignment.layer_of(translator.models[0])
    weights = torch.cat([tape[key][...][0].mean(0) for key in tape if key[0] == name])[: len(found.tokens)]
    penalty = 0.3 * weights.double().sum(0).clamp(max=1.0).log().sum().item()
    [whole] = translator.score([draft])
    assert penalty < -1e-4
    assert found.score == pytest.approx(whole + penalty, abs=1e-4)
    assert plain.score == pytest.approx(plain.log_probability)


def test_coverage_of_an_ensemble_is_refused(translator_folder):
    both = Translator.load(translator_folder, translator_folder, device="cpu")
    with pytest.raises(ValueError, match="coverage needs exactly one model, got 2; leave it out for an ensemble"):
        both.translate(LINES[:1], coverage=0.2)
