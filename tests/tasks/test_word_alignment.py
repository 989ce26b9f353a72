"""Word alignment: attention between tokens as attention between words, in a layer and a head that exist."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from regard.data import Pair, Tokenizer
from regard.tasks import PairVocabulary, word_alignment
from regard.tasks.pairs import Draft, Tokenizers
from regard.tasks.translation import Translator
from tests.tasks.tiny_translators import PAIRS, WORDS, trained


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


def test_a_layer_that_is_not_there_cannot_be_aligned_by(translator_folder):
    with pytest.raises(ValueError, match=r"layer must be between 0 and [01], got 7"):
        Translator.load(translator_folder).align(PAIRS[:1], layer=7)


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


def test_a_tape_has_a_row_for_each_pair_in_its_order(translator_folder):
    translator = Translator.load(translator_folder)
    pairs = [Pair("eins und zwei", "two"), Pair("drei", "three and four"), Pair("vier und", "four")]
    tape = translator.tape(pairs)
    name = word_alignment.layer_of(translator.models[0])
    for row, pair in enumerate(pairs):
        queries, keys = tape.tokens_of(name, batch=row)
        assert translator.tokenizers.target.decode(map(translator.tokenizers.target.id, queries)) == pair.target
        assert translator.tokenizers.source.decode(map(translator.tokenizers.source.id, keys)) == pair.source
        alone = translator.tape([pair])[name][...]
        torch.testing.assert_close(tape[name][row : row + 1, :, : alone.shape[2], : alone.shape[3]], alone)


@pytest.mark.parametrize("text", ["ein Haus, (dort) stehen", "ein  Häuschen ", "", "ein\u2028Haus"])
@pytest.mark.parametrize("kind", [Tokenizer.words, Tokenizer.characters, Tokenizer.bpe, Tokenizer.wordpiece])
def test_tokens_of_a_draft_belong_to_the_words_that_its_text_says(kind, text):
    one = kind(["ein Haus, (dort) stehen", "ein  Häuschen\u2028"])
    tokens = tuple(one.encode(text))
    draft = Draft("", one.decode(tokens), tokens)
    assert word_alignment.word_per_draft_token(Tokenizers(one, one), draft) == word_alignment.word_per_token(
        one, draft.target
    )


class Layers(nn.Module):
    """Only the names of layers matter here."""

    def __init__(self, *names):
        super().__init__()
        for name in names:
            at = self
            *path, last = name.split(".")
            for part in path:
                if not hasattr(at, part):
                    at.add_module(part, nn.Module())
                at = getattr(at, part)
            at.add_module(last, nn.Module())


def test_the_layer_above_the_middle_aligns_unless_another_is_named():
    crossing = [f"decoder.blocks.{n}.cross" for n in range(5)]
    model = Layers("encoder.blocks.0.cross", "decoder.blocks.0.own", *crossing)
    assert word_alignment.cross_layers(model) == crossing
    for n, middle in ((1, 0), (2, 1), (4, 2), (5, 2)):
        assert word_alignment.layer_of(Layers(*crossing[:n])) == crossing[middle]
    assert word_alignment.layer_of(model, 0) == crossing[0]
    assert word_alignment.layer_of(model, 4) == crossing[4]
    for layer in (-1, 5):
        with pytest.raises(ValueError, match=f"layer must be between 0 and 4, got {layer}"):
            word_alignment.layer_of(model, layer)


def test_a_model_that_does_not_look_at_its_source_cannot_align():
    with pytest.raises(ValueError, match="the model has no attention to its source, so words cannot be aligned"):
        word_alignment.cross_layers(Layers("encoder.attention", "decoder.own"))


def test_a_layer_without_a_number_of_heads_has_one():
    model = Layers("decoder.attention")
    for head in (None, 0):
        word_alignment.check_head(model, "decoder.attention", head)
    with pytest.raises(ValueError, match="head must be between 0 and 0, got 1"):
        word_alignment.check_head(model, "decoder.attention", 1)


@pytest.mark.parametrize(("text", "words"), [("", []), ("  ", []), (" a  b", [0, 1]), ("ab\tc", [0, 1])])
def test_tokens_of_spaces_belong_to_no_word(text, words):
    found = word_alignment.word_per_token(Tokenizer.characters(["a b\tc"]), text)
    assert len(found) == len(text)
    assert sorted({word for word in found if word is not None}) == words
    assert all((word is None) == letter.isspace() for word, letter in zip(found, text, strict=True))
