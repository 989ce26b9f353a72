"""Translation: what is learned, found again, scored and aligned."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from regard.data import DataError, Pair, Tokenizer
from regard.decode import Gnmt
from regard.lens import Links
from regard.models import Seq2SeqConfig, TransformerConfig
from regard.tasks import Batching, PairVocabulary, metrics, run_folder, translation, word_alignment
from regard.tasks.pairs import Draft, Tokenizers
from regard.tasks.translation import TranslationModelSettings, Translator
from regard.train import CheckpointError, Constant, Linear, Recipe, Silence, checkpoint

NUMBERS = {"eins": "one", "zwei": "two", "drei": "three", "vier": "four", "fünf": "five"}
PAIRS = [
    Pair(f"{a} und {b}", f"{NUMBERS[b]} and {NUMBERS[a]}") for a in NUMBERS for b in NUMBERS if a != b
]  # the other way round, so that alignments are no diagonal
WORDS = PairVocabulary(kind="word", joint=False)
RECIPE = Recipe(steps=4, rate=Constant(3e-3), save_every=2, log_every=1)
TINY = {
    "rnn": TranslationModelSettings(kind="rnn", dim=16, dropout=0.0),
    "transformer": TranslationModelSettings(dim=16, heads=2, depth=2, dropout=0.0),
}


def trained(out, kind="rnn", recipe=RECIPE, **settings):
    settings = {"model": TINY[kind], "vocabulary": WORDS, "show": Silence()} | settings
    return translation.train(PAIRS, out=out, recipe=recipe, **settings)


@pytest.fixture(scope="module", params=["rnn", "transformer"])
def folder(request, tmp_path_factory):
    out = tmp_path_factory.mktemp(request.param) / "run"
    trained(out, request.param)
    return out


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A recurrent translator that has learned its numbers."""
    out = tmp_path_factory.mktemp("learned") / "run"
    model = TranslationModelSettings(kind="rnn", dim=32, dropout=0.0, smoothing=0.0)
    trained(out, model=model, recipe=replace(RECIPE, steps=250, rate=Constant(5e-3), save_every=250))
    return Translator.load(out)


@pytest.mark.learning
def test_a_translator_learns_to_translate(learned):
    found = learned.translate([pair.source for pair in PAIRS])
    assert [one.text for one in found] == [pair.target for pair in PAIRS]
    assert all(one.finished for one in found)
    measured = learned.evaluate(PAIRS)
    assert measured["exact"].value == 100
    assert measured["chrf"].value == pytest.approx(100)
    assert measured["loss"].value < 0.2


def test_a_translator_that_has_learned_aligns_words(learned):
    links = learned.align(PAIRS)
    right = [Links([(2, 0), (1, 1), (0, 2)])] * len(PAIRS)
    shared = sum(len(one.sure & other.sure) for one, other in zip(links, right, strict=True))
    assert shared / sum(map(len, links)) > 0.6  # by chance one in three


def test_each_line_is_translated_as_if_it_were_alone(folder):
    translator = Translator.load(folder)
    lines = ["eins", "", "zwei und drei und vier", "fünf fünf", "und"]
    for beam in (1, 3):
        together = translator.n_best(lines, n=beam, beam=beam)
        for line, best in zip(lines, together, strict=True):
            [alone] = translator.n_best([line], n=beam, beam=beam)
            assert [one.text for one in alone] == [one.text for one in best]
            assert [one.score for one in alone] == pytest.approx([one.score for one in best], abs=1e-4)


@pytest.mark.parametrize("beam", [1, 3])
def test_of_a_blank_line_comes_an_empty_one_and_no_model_is_asked(beam, folder, monkeypatch):
    translator = Translator.load(folder)
    [[alone]] = translator.n_best(["eins und zwei"], n=1, beam=beam)
    found = translator.n_best(["", "eins und zwei", " \t\u3000"], n=beam, beam=beam)
    assert [len(best) for best in found] == [1, beam, 1]
    assert [(best[0].text, best[0].tokens, best[0].finished) for best in (found[0], found[2])] == [("", (), True)] * 2
    assert found[1][0].text == alone.text
    monkeypatch.setattr(translator, "_stepper", None)
    assert [one.text for one in translator.translate(["", " "], beam=beam)] == ["", ""]
    with pytest.raises(TypeError, match=r"a line must be text, got 3 \(int\)"):
        translator.translate([3])


def test_lines_may_be_read_once(folder):
    translator = Translator.load(folder)
    assert translator.translate(iter(["eins und zwei"])) == translator.translate(["eins und zwei"])


@pytest.mark.parametrize("beam", [1, 3])
def test_a_score_has_the_length_penalty_whatever_the_beam(beam, folder):
    [one] = Translator.load(folder).translate(["drei und vier"], beam=beam, alpha=0.9)
    assert one.score == pytest.approx(one.log_probability / Gnmt(0.9)(len(one.tokens)))
    with pytest.raises(ValueError, match="Gnmt alpha must be from -50 to 50, got 99"):
        Translator.load(folder).translate(["eins"], beam=beam, alpha=99)


def test_n_best_are_sorted_and_the_first_is_the_best(folder):
    translator = Translator.load(folder)
    [best] = translator.n_best(["eins und zwei"], n=3, beam=4)
    assert len(best) == 3
    assert best == sorted(best, key=lambda one: -one.score)
    assert translator.translate(["eins und zwei"], beam=4) == best[:1]


class Loud:
    """A stepper that finds some tokens likelier than all others."""

    def __init__(self, inner, tokens):
        self.inner, self.tokens = inner, list(tokens)

    def start(self, source):
        return self.inner.start(source)

    def step(self, tokens, state):
        logits, state = self.inner.step(tokens, state)
        logits[..., self.tokens] += 50
        return logits, state


@pytest.mark.parametrize("beam", [1, 3])
def test_what_no_text_holds_is_never_written(beam, folder, monkeypatch):
    translator, seen = Translator.load(folder), []
    words = translator.tokenizers.target
    translator._stepper = Loud(translator.models[0], (words.pad, words.bos))
    written = translator._decode_text
    monkeypatch.setattr(translator, "_decode_text", lambda one, line: seen.append(one.tokens) or written(one, line))
    translator.translate(["eins", "zwei und drei"], beam=beam)
    assert len(seen) == 2
    assert all(tokens and not {words.pad, words.bos} & set(tokens) for tokens in seen)


def test_scores_are_what_the_loss_of_the_model_says(folder):
    translator = Translator.load(folder)
    scores = translator.score(PAIRS)
    assert len(scores) == len(PAIRS)
    for pair, score in zip(PAIRS[:5], scores, strict=False):
        batch = translator.tokenizers.encode([pair]).batch([0], pad={}, device=torch.device("cpu"))
        assert score == pytest.approx(-translator.models[0].loss(batch).sum.item(), rel=1e-5)


def test_the_loss_of_an_evaluation_is_that_of_all_tokens(folder):
    translator = Translator.load(folder)
    tokens = sum(len(pair.target.split()) + 1 for pair in PAIRS)
    expected = -sum(translator.score(PAIRS)) / tokens
    assert translator.evaluate(PAIRS, beam=1)["loss"].value == pytest.approx(expected)


def test_an_evaluation_is_of_translations_as_long_as_they_may_be(folder):
    translator = Translator.load(folder)
    short = translator.translate([pair.source for pair in PAIRS], beam=2, max_length=1)
    expected = metrics.chrf([one.text for one in short], [pair.target for pair in PAIRS])
    assert translator.evaluate(PAIRS, beam=2, max_length=1)["chrf"] == expected


def test_a_tokenizer_that_cannot_measure_is_refused_before_the_work(folder, monkeypatch):
    monkeypatch.setattr(Translator, "translate", lambda *_, **__: pytest.fail("translated in vain"))
    with pytest.raises(ValueError, match=r"tokenize must be one of .*, got 'spBLEU-1K'"):
        Translator.load(folder).evaluate(PAIRS, tokenize="spBLEU-1K")


def test_several_copies_of_a_model_decode_as_the_model(folder):
    lines = [pair.source for pair in PAIRS[:5]]
    alone, twice = Translator.load(folder), Translator.load(folder, folder)
    assert [one.text for one in twice.translate(lines)] == [one.text for one in alone.translate(lines)]
    assert twice.align(PAIRS[:5]) == alone.align(PAIRS[:5])


def test_models_of_other_vocabularies_are_no_ensemble(folder, tmp_path):
    trained(tmp_path / "other", vocabulary=PairVocabulary(kind="char"))
    with pytest.raises(ValueError, match=r"an ensemble must share its vocabularies, but those of .*other.* differ"):
        Translator.load(folder, tmp_path / "other")


@pytest.mark.parametrize("kind", ["rnn", "transformer"])
def test_a_resumed_run_ends_with_the_weights_of_one_that_was_not_interrupted(kind, tmp_path):
    whole = trained(tmp_path / "whole", kind)
    torch.manual_seed(99)  # a run depends on its own seed alone
    trained(tmp_path / "parts", kind, replace(RECIPE, steps=2))
    other = replace(TINY[kind], dim=8)  # a run that is resumed keeps the model and the words it has
    parts = trained(tmp_path / "parts", kind, resume=True, model=other, vocabulary=PairVocabulary(kind="char"))
    expected, found = (checkpoint.read_tensors(outcome.best) for outcome in (whole, parts))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_folder_that_holds_a_run_is_refused(folder):
    before = sorted(folder.rglob("*"))
    with pytest.raises(ValueError, match=r"run already has a run; resume it \(resume=True, --resume\)"):
        trained(folder)
    assert sorted(folder.rglob("*")) == before


def test_a_folder_that_holds_something_else_is_refused(tmp_path):
    (tmp_path / "letter.txt").write_text("Dear")
    with pytest.raises(ValueError, match="is not empty; name another folder"):
        trained(tmp_path)
    with pytest.raises(ValueError, match=r"out must be a folder, but .*letter.txt is a file"):
        trained(tmp_path / "letter.txt")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batching": Batching(limit=3, long="error")}, "example 0: the example has more than 3 tokens"),
        ({"batching": Batching(limit=3)}, "like 20 of 20 examples; raise the limit"),
        ({"valid": []}, "valid has no pairs"),
        ({"model": TranslationModelSettings(kind="rnn", dim=0)}, "dim must be 1 or more, got 0"),
        ({"vocabulary": PairVocabulary(kind="bpe", size=7)}, "size must leave room for the 256 bytes"),
        (
            {"model": TINY["transformer"], "recipe": replace(RECIPE, forcing=Linear(steps=9))},
            "forcing needs a recurrent decoder, got a Transformer",
        ),
        ({"recipe": replace(RECIPE, patience=2)}, "patience and Plateau need evaluations"),
    ],
)
def test_what_is_wrong_shows_before_anything_is_written(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        trained(tmp_path / "run", **settings)
    assert list(tmp_path.iterdir()) == []


def test_no_pairs_at_all_are_an_error(tmp_path):
    with pytest.raises(DataError, match="there is nothing to learn a vocabulary from"):
        translation.train([], out=tmp_path / "run")


def test_a_pair_is_no_tuple(folder, tmp_path):
    told = r"a pair must have a source and a target, got \('eins', 'one'\); use Pair\("
    translator = Translator.load(folder)
    with pytest.raises(TypeError, match=told):
        translation.train([("eins", "one")], out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    for ask in (translator.score, translator.align, translator.tape, translator.evaluate):
        with pytest.raises(TypeError, match=told):
            ask([("eins", "one")])


def test_pairs_come_again(tmp_path):
    with pytest.raises(TypeError, match="pairs must be readable more than once, got a generator; pass a list"):
        translation.train((pair for pair in PAIRS), out=tmp_path / "run")


def test_how_many_are_too_long_is_said(tmp_path):
    heard = []

    class Heard(Silence):
        def say(self, line):
            heard.append(line)

    pairs = [*PAIRS, Pair("eins " * 9, "one")]
    settings = {"model": TINY["rnn"], "vocabulary": WORDS, "batching": Batching(limit=8, tokens=64)}
    translation.train(pairs, out=tmp_path / "run", recipe=RECIPE, show=Heard(), **settings)
    assert "1 of 21 examples have more than 8 tokens and were dropped" in heard


@pytest.mark.parametrize(
    ("kind", "attention"),
    [
        ("rnn", "bahdanau"),
        ("rnn-plain", None),
        ("luong-dot", "dot"),
        ("luong-general", "general"),
        ("luong-concat", "concat"),
        ("luong-location", "location"),
        ("luong-local-m", "local_monotonic"),
        ("luong-local-p", "local_predictive"),
    ],
)
def test_every_recurrent_kind_has_the_attention_of_its_name(kind, attention, tmp_path):
    outcome = trained(
        tmp_path / "run", model=TranslationModelSettings(kind=kind, dim=8), recipe=replace(RECIPE, steps=1)
    )
    config = json.loads((outcome.best / "config.json").read_text())
    assert config["task"] == "translation"
    assert config["model"]["attention"] == attention
    translator = Translator.load(tmp_path / "run")
    assert len(translator.translate(["eins und zwei"], beam=2)) == 1
    if attention is None:
        with pytest.raises(ValueError, match="the model has no attention to its source"):
            translator.align(PAIRS[:1])


def test_any_function_from_tokenizers_to_a_config_is_a_model(tmp_path):
    def rotary(source, target):
        sizes = {"source_vocabulary": len(source), "target_vocabulary": len(target), "start": target.bos}
        return TransformerConfig(**sizes, dim=16, heads=2, encoder_layers=1, decoder_layers=1, positions="rotary")

    trained(tmp_path / "run", model=rotary)
    assert Translator.load(tmp_path / "run").models[0].config.positions == "rotary"


def test_tables_are_tied_as_the_vocabularies_allow():
    one, other = (Tokenizer.characters([letters]) for letters in ("abc", "abcd"))
    assert TranslationModelSettings()(one, one).tied == "all"
    assert TranslationModelSettings()(one, other).tied == "output"
    assert TranslationModelSettings(kind="rnn", tied="none")(one, one).tied == "none"
    assert isinstance(TranslationModelSettings(kind="rnn")(one, other), Seq2SeqConfig)
    with pytest.raises(ValueError, match="tied='all' needs one vocabulary for both sides"):
        TranslationModelSettings(tied="all")(one, other)


def test_one_tokenizer_is_kept_for_both_sides_or_one_for_each(tmp_path):
    for joint, names in ((True, {"tokenizer.json"}), (False, {"tokenizer.source.json", "tokenizer.target.json"})):
        outcome = trained(tmp_path / str(joint), vocabulary=PairVocabulary(kind="word", joint=joint))
        assert {path.name for path in outcome.best.glob("tokenizer*")} == names
        assert Tokenizers.load(outcome.best).joint is joint


def test_a_tokenizer_of_others_serves_both_sides(tmp_path):
    Tokenizer.characters([" ".join(pair) for pair in PAIRS]).save(tmp_path / "own.json")
    trained(tmp_path / "run", vocabulary=PairVocabulary(load=str(tmp_path / "own.json")))
    assert Translator.load(tmp_path / "run").tokenizers.source == Tokenizer.load(tmp_path / "own.json")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.source.json", "model.safetensors"])
def test_a_damaged_checkpoint_is_not_used(name, tmp_path):
    outcome = trained(tmp_path / "run")
    file = outcome.best / name
    file.write_bytes(file.read_bytes().replace(b"a", b"b", 1))
    with pytest.raises(CheckpointError, match=f"is corrupted: checksum mismatch of {name}"):
        Translator.load(outcome.best)


def test_a_config_of_another_shape_is_named(folder, tmp_path):
    best = run_folder.open_run(folder)
    texts = {path.name: path.read_text() for path in best.glob("*.json") if path.name != "training.json"}
    tensors = checkpoint.read_tensors(best)
    for old, new, message in (
        ('"longest"', '"longset"', r"config.json: unknown key 'longset'; did you mean 'longest'\?; it may"),
        ('"translation"', '"painting"', r"is a checkpoint of the task 'painting', expected 'translation'"),
        ('"format": 1', '"format": 2', "config.json does not have format 1"),
        ('"start": 2', '"start": "two"', "start must be a whole number"),
        ('"format": 1,', "", "config.json does not have format 1"),
        ('"format": 1,', "'", "config.json is not valid JSON"),
    ):
        config = texts["config.json"].replace(old, new)
        assert config != texts["config.json"]
        checkpoint.write(tmp_path / "step-1", {**texts, "config.json": config, "model.safetensors": tensors})
        with pytest.raises((CheckpointError, ValueError), match=message):
            Translator.load(tmp_path / "step-1")


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere is not a folder; expected a run written by regard train"):
        Translator.load(tmp_path / "nowhere")


@pytest.mark.parametrize("vocabulary", [WORDS, PairVocabulary(kind="char"), PairVocabulary(kind="bpe", size=300)])
@pytest.mark.parametrize(("kind", "when"), [("rnn", "written"), ("transformer", "written"), ("transformer", "read")])
def test_maps_between_words_are_sums_over_source_and_means_over_target_tokens(kind, when, vocabulary, tmp_path):
    trained(tmp_path / "run", kind, vocabulary=vocabulary)
    translator = Translator.load(tmp_path / "run")
    pairs = [Pair("eins und  zwei!", "two, and"), Pair("fünf", "five five five")]
    [name] = {word_alignment.layer_of(model) for model in translator.models}
    for pair, found in zip(pairs, translator.word_maps(pairs, when=when), strict=True):
        A = translator.tape([pair])[name][...][0].mean(0)
        late = when == "read"
        source, target = (
            [(span.start, span.end) for span in tokenizer.spans(text)]
            for tokenizer, text in zip(translator.tokenizers, pair, strict=True)
        )
        for t, spoken in enumerate(pair.target.split()):
            rows = [A[row + late] for row, ends in enumerate(target) if _within(pair.target, ends, t)]
            for s in range(len(pair.source.split())):
                columns = [column for column, ends in enumerate(source) if _within(pair.source, ends, s)]
                expected = sum(float(row[column]) for row in rows for column in columns) / len(rows)
                assert found[t, s].item() == pytest.approx(expected, abs=1e-6), spoken
        assert found.shape == (len(pair.target.split()), len(pair.source.split()))


def _within(text, ends, word):
    """Does the first letter of a token that is no space stand in this word?"""
    at = next((place for place in range(*ends) if not text[place].isspace()), None)
    return at is not None and len(text[: at + 1].split()) - 1 == word


def test_only_links_that_both_directions_agree_on_are_kept(folder):
    translator = Translator.load(folder)
    pairs = PAIRS[:3]
    both = translator.align(pairs, reverse=translator)
    there = translator.align(pairs)
    back = translator.align([Pair(pair.target, pair.source) for pair in pairs])
    assert both == [one & other.flip() for one, other in zip(there, back, strict=True)]


def test_a_layer_that_is_not_there_cannot_be_aligned_by(folder):
    with pytest.raises(ValueError, match=r"layer must be between 0 and [01], got 7"):
        Translator.load(folder).align(PAIRS[:1], layer=7)


def test_the_mean_of_the_maps_of_all_heads_is_the_map_of_all(tmp_path):
    trained(tmp_path / "run", "transformer")
    translator = Translator.load(tmp_path / "run")
    [heads] = {model.get_submodule(word_alignment.layer_of(model)).heads for model in translator.models}
    each = [translator.word_maps(PAIRS[:3], head=head) for head in range(heads)]
    assert heads > 1
    assert not each[0][0].equal(each[1][0])
    for whole, *maps in zip(translator.word_maps(PAIRS[:3]), *each, strict=True):
        torch.testing.assert_close(torch.stack(maps).mean(0), whole)
    for head in (-1, heads):
        with pytest.raises(ValueError, match=rf"head must be between 0 and {heads - 1}, got {head}"):
            translator.align([], head=head)


def test_a_tape_has_a_row_for_each_pair_in_its_order(folder):
    translator = Translator.load(folder)
    pairs = [Pair("eins und zwei", "two"), Pair("drei", "three and four"), Pair("vier und", "four")]
    tape = translator.tape(pairs)
    name = word_alignment.layer_of(translator.models[0])
    for row, pair in enumerate(pairs):
        queries, keys = tape.tokens_of(name, batch=row)
        assert translator.tokenizers.target.decode(map(translator.tokenizers.target.id, queries)) == pair.target
        assert translator.tokenizers.source.decode(map(translator.tokenizers.source.id, keys)) == pair.source
        alone = translator.tape([pair])[name][...]
        torch.testing.assert_close(tape[name][row : row + 1, :, : alone.shape[2], : alone.shape[3]], alone)


def test_a_tape_is_of_one_model_and_of_few_sentences(folder):
    with pytest.raises(ValueError, match="a capture needs exactly one model, got 2; load one of them"):
        Translator.load(folder, folder).tape(PAIRS[:1])
    for pairs in ([], PAIRS * 30):
        with pytest.raises(ValueError, match=f"a capture holds 1 to 500 pairs, got {len(pairs)}"):
            Translator.load(folder).tape(pairs)


def test_one_line_is_not_many(folder):
    translator = Translator.load(folder)
    for call in (translator.translate, partial(translator.n_best, n=2)):
        with pytest.raises(TypeError, match=r"lines must be a list of texts, got a single text; pass \[text\]"):
            call("eins und zwei")
    with pytest.raises(TypeError, match=r"sources must be a list of texts, got a single text; pass \[text\]"):
        translator.too_long("eins und zwei")


def test_the_loss_is_that_of_a_pair_or_more(folder):
    with pytest.raises(ValueError, match="loss needs at least one pair, got none"):
        Translator.load(folder).loss([])


def test_a_draft_is_scored_and_aligned_by_its_own_tokens(folder):
    translator = Translator.load(folder)
    words = translator.tokenizers.target
    tokens = (*words.encode("two"), words.unk, *words.encode("one"), words.eos)
    drafts = [Draft("eins und zwei", "two <unk> one", ids) for ids in (tokens, tokens[:-1])]
    assert [row["target"].tolist() for row in translator.tokenizers.encode(drafts)] == [[*tokens]] * 2
    assert [one.shape for one in translator.word_maps(drafts)] == [(3, 3)] * 2
    assert all((one.sum(1) > 0).all() for one in translator.word_maps(drafts))
    found = translator.translate([pair.source for pair in PAIRS])
    drafts = [Draft(pair.source, one.text, one.tokens) for pair, one in zip(PAIRS, found, strict=True) if one.finished]
    expected = [one.log_probability for one in found if one.finished]
    assert translator.score(drafts) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("text", ["ein Haus, (dort) stehen", "ein  Häuschen ", "", "ein\u2028Haus"])
@pytest.mark.parametrize("kind", [Tokenizer.words, Tokenizer.characters, Tokenizer.bpe, Tokenizer.wordpiece])
def test_tokens_of_a_draft_belong_to_the_words_that_its_text_says(kind, text):
    one = kind(["ein Haus, (dort) stehen", "ein  Häuschen\u2028"])
    tokens = tuple(one.encode(text))
    draft = Draft("", one.decode(tokens), tokens)
    assert word_alignment.word_per_draft_token(Tokenizers(one, one), draft) == word_alignment.word_per_token(
        one, draft.target
    )


def test_progress_is_told_up_to_the_last_line(folder):
    told = []
    Translator.load(folder).translate([pair.source for pair in PAIRS], beam=1, show=lambda *both: told.append(both))
    assert told[-1] == (20, 20)


def test_a_translator_is_loaded_from_a_folder():
    with pytest.raises(ValueError, match="load needs at least one folder, got none"):
        Translator.load()


def test_validation_is_by_the_same_numbers_as_an_evaluation(tmp_path):
    recipe = replace(RECIPE, metric="chrf", better="higher", evaluate_every=2)
    outcome = trained(tmp_path / "run", valid=PAIRS[:3], recipe=recipe)
    measured = Translator.load(tmp_path / "run").evaluate(PAIRS[:3], beam=1)
    rows = (tmp_path / "run" / "evaluations.csv").read_text().splitlines()
    assert rows[0] == "step,epoch,bleu,chrf,exact,loss"
    best = next(row for row in rows if row.startswith(f"{checkpoint.step_of(outcome.best)},"))
    assert [float(number) for number in best.split(",")[2:]] == pytest.approx([one.value for one in measured.values()])
