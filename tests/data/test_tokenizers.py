"""Tokenizers: what is encoded comes back, and text never turns into a special token."""

import json
import pickle
from itertools import pairwise

import pytest
import tokenizers as hf
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import models

from regard.data import DataError, Tokenizer

TEXTS = [
    "Zwei junge weiße Männer sind im Freien, in der Nähe (vieler) Büsche.",
    "Don't panic: it's 3.5 % - well-known!",
    "naïve café\ttab  two spaces\nnew line",
    "日本語のテキスト 한국어 हिन्दी",
]
ANY = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
BPE = Tokenizer.bpe(TEXTS, size=320)
CHARACTERS = Tokenizer.characters(TEXTS)
WORDS = Tokenizer.words(TEXTS)
PIECES = Tokenizer.wordpiece(TEXTS, size=200)
ALL = [BPE, CHARACTERS, WORDS, PIECES]


@given(text=ANY)
@example("<eos> <pad></s>[PAD]")
@example("a\r\n\x00\u200d\ufeff 🏳️‍🌈 ")
def test_byte_pairs_give_back_any_text(text):
    ids = BPE.encode(text, bos=True, eos=True)
    assert BPE.decode(ids) == text
    assert ids[0] == BPE.bos
    assert ids[-1] == BPE.eos
    assert not {BPE.pad, BPE.bos, BPE.eos, BPE.unk} & set(ids[1:-1])


@given(text=st.text(sorted(set("".join(TEXTS))), max_size=30))
def test_characters_give_back_the_characters_seen(text):
    assert CHARACTERS.decode(CHARACTERS.encode(text)) == text
    assert len(CHARACTERS.encode(text)) == len(text)


@given(words=st.lists(st.sampled_from(" ".join(TEXTS).split()), max_size=9), gap=st.sampled_from([" ", "  ", "\n"]))
def test_words_give_back_the_text_with_single_spaces(words, gap):
    # Words met in another place may carry other marks, so the vocabulary is of these words.
    text = gap.join(words)
    tokenizer = Tokenizer.words([text, "x"])
    assert tokenizer.decode(tokenizer.encode(text)) == " ".join(words)


def test_words_set_punctuation_apart_and_remember_where_spaces_stood():
    tokenizer = Tokenizer.words(["Hi, you (there) don't ."])
    ids = tokenizer.encode("Hi, you (there) don't .")
    assert tokenizer.tokens(ids) == ["▁Hi", ",", "▁you", "▁(", "there", ")", "▁don't", "▁."]
    assert tokenizer.decode(ids) == "Hi, you (there) don't ."


def test_tokenized_text_is_split_at_spaces_alone():
    tokenizer = Tokenizer.words(["the <unk> @-@ n't .\n"], split="space")
    ids = tokenizer.encode(" the <unk> @-@ n't .\n")
    assert tokenizer.tokens(ids) == ["the", "<unk>", "@-@", "n't", "."]
    assert ids[1] == tokenizer.unk
    assert tokenizer.decode(ids) == "the <unk> @-@ n't ."


def test_word_pieces_give_back_plain_words():
    text = "Zwei junge weiße Männer sind im Freien."
    assert PIECES.decode(PIECES.encode(text)) == text
    assert Tokenizer.wordpiece(TEXTS, size=200, lower=True).decode(PIECES.encode("Zwei")) != ""
    lower = Tokenizer.wordpiece(TEXTS, size=200, lower=True)
    assert lower.encode("ZWEI MÄNNER") == lower.encode("zwei manner")


@pytest.mark.parametrize("tokenizer", ALL, ids=repr)
def test_specials_have_the_first_numbers(tokenizer):
    assert (tokenizer.pad, tokenizer.unk, tokenizer.bos, tokenizer.eos) == (0, 1, 2, 3)
    assert tokenizer.tokens([0, 1, 2, 3]) == ["<pad>", "<unk>", "<bos>", "<eos>"]
    assert tokenizer.decode([2, 0, 3]) == ""


@pytest.mark.parametrize("tokenizer", ALL, ids=repr)
def test_text_cannot_forge_special_tokens(tokenizer):
    assert not {tokenizer.pad, tokenizer.bos, tokenizer.eos} & set(tokenizer.encode("<eos> <pad><bos> </s>"))


@pytest.mark.parametrize("tokenizer", [CHARACTERS, WORDS, PIECES], ids=repr)
def test_what_was_never_seen_is_unk_and_shows(tokenizer):
    ids = tokenizer.encode("Ж")
    assert tokenizer.unk in ids
    assert "<unk>" in tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("text", "decoded"),
    [
        ("ein Foo Haus", "ein <unk> Haus"),
        ("Foo bar ein", "<unk> <unk> ein"),
        ("ein Haus (dort)", "ein Haus <unk> <unk> <unk>"),  # of an unknown token nobody knows where a space stood
    ],
)
def test_an_unknown_word_is_a_word_of_its_own(text, decoded):
    tokenizer = Tokenizer.words(["ein Haus steht dort"])
    for one in (tokenizer, pickle.loads(pickle.dumps(tokenizer)), Tokenizer.from_json(tokenizer.to_json())):
        assert one.decode(one.encode(text, eos=True)) == decoded


def test_ids_of_no_token_say_nothing():
    assert WORDS.decode([*WORDS.encode("Zwei"), 10**6]) == "Zwei"


@pytest.mark.parametrize("tokenizer", ALL, ids=repr)
def test_many_at_once_equal_one_at_a_time(tokenizer):
    assert tokenizer.encode_all(TEXTS, bos=True, eos=True) == [tokenizer.encode(t, bos=True, eos=True) for t in TEXTS]


@pytest.mark.parametrize("tokenizer", [CHARACTERS, WORDS, PIECES], ids=repr)
def test_spans_cover_what_each_token_stands_for(tokenizer):
    text = TEXTS[0]
    spans = tokenizer.spans(text)
    assert [span.id for span in spans] == tokenizer.encode(text)
    assert "".join(text[start:end] for _, start, end in spans).replace(" ", "") == text.replace(" ", "")
    assert all(a.end <= b.start for a, b in pairwise(spans))


def test_spans_of_byte_pairs_cover_the_text():
    spans = BPE.spans(TEXTS[0])
    assert {n for _, start, end in spans for n in range(start, end)} == set(range(len(TEXTS[0])))


@pytest.mark.parametrize("tokenizer", ALL, ids=repr)
def test_saved_loaded_pickled_and_equal(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]
    for again in (
        Tokenizer.load(tmp_path / "tokenizer.json"),
        Tokenizer.from_json(tokenizer.to_json()),
        pickle.loads(pickle.dumps(tokenizer)),
    ):
        assert again == tokenizer
        assert hash(again) == hash(tokenizer)
        assert again.encode("Zwei <eos> Männer") == tokenizer.encode("Zwei <eos> Männer")
    assert tokenizer != ALL[ALL.index(tokenizer) - 1]


def test_training_twice_gives_the_same():
    for kind in (Tokenizer.bpe, Tokenizer.wordpiece, Tokenizer.words, Tokenizer.characters):
        assert len({kind(iter(TEXTS), size=300).to_json() for _ in range(5)}) == 1


def test_size_bounds_the_vocabulary():
    assert len(Tokenizer.words(TEXTS, size=9)) == 9
    assert len(Tokenizer.bpe(TEXTS, size=270)) == 270


def test_more_specials_follow_the_four():
    tokenizer = Tokenizer.bpe(TEXTS, size=300, specials=["<mask>", "<sep>"])
    assert (tokenizer.id("<mask>"), tokenizer.id("<sep>"), tokenizer.id("nothing")) == (4, 5, None)
    assert tokenizer.tokens([10**6]) == ["<none>"]


def test_foreign_tokenizers_are_found_by_their_usual_names(tmp_path):
    tree = json.loads(PIECES.to_json())
    names = {"<pad>": "[PAD]", "<unk>": "[UNK]", "<bos>": "[CLS]", "<eos>": "[SEP]"}
    tree["model"]["vocab"] = {names.get(token, token): id for token, id in tree["model"]["vocab"].items()}
    tree["model"]["unk_token"] = "[UNK]"
    for token in tree["added_tokens"]:
        token["content"] = names[token["content"]]
    tree["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "[PAD]",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    assert (tokenizer.pad, tokenizer.unk, tokenizer.bos, tokenizer.eos) == (0, 1, 2, 3)
    assert tokenizer.encode(TEXTS[0]) == PIECES.encode(TEXTS[0])
    other = Tokenizer.load(tmp_path / "tokenizer.json", bos="[SEP]", eos="[CLS]")
    assert (other.bos, other.eos) == (3, 2)
    with pytest.raises(DataError, match=r"tokenizer.json: the tokenizer has no token '<s>' for bos; name an existing"):
        Tokenizer.load(tmp_path / "tokenizer.json", bos="<s>")
    text = json.dumps(tree).replace("[SEP]", "[END]")
    with pytest.raises(DataError, match=r"has no eos token under a known name; name it: Tokenizer.load\(path, eos"):
        Tokenizer.from_json(text)


@pytest.mark.parametrize("tokenizer", ALL)
def test_special_tokens_that_were_chosen_are_kept(tokenizer, tmp_path):
    text = tokenizer.to_json()
    chosen = Tokenizer.from_json(text, pad="<bos>", bos="<eos>", eos="<pad>")
    chosen.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert (loaded.pad, loaded.unk, loaded.bos, loaded.eos) == (2, 1, 3, 0)
    assert loaded == chosen == pickle.loads(pickle.dumps(chosen)) == Tokenizer.from_json(chosen.to_json())
    assert Tokenizer.load(tmp_path / "tokenizer.json", eos="<eos>").eos == 3
    assert hf.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).to_str() == text
    assert Tokenizer.from_json(text, eos="<eos>").to_json() == text


@pytest.mark.parametrize("told", ["<eos>", {"end": "<eos>"}, {"eos": 3}])
def test_special_tokens_that_a_file_tells_wrongly_are_refused(told):
    tree = json.loads(WORDS.to_json())
    tree["model"]["roles"] = told
    with pytest.raises(
        DataError,
        match=r"the special tokens must be an object of names by role, got .*; the roles are pad, unk, bos, eos",
    ):
        Tokenizer.from_json(json.dumps(tree))


@pytest.mark.parametrize("tokenizer", [WORDS, CHARACTERS, PIECES])
def test_a_vocabulary_without_its_unknown_token_is_refused(tokenizer, tmp_path):
    tree = json.loads(tokenizer.to_json())
    tree["model"]["unk_token"] = "[UNK]"
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    with pytest.raises(DataError, match=r"tokenizer.json: the vocabulary lacks '\[UNK\]', its token for unknown words"):
        Tokenizer.load(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("kind", [Tokenizer.words, Tokenizer.characters, Tokenizer.bpe, Tokenizer.wordpiece])
@pytest.mark.parametrize("size", [2**24 + 1, 9_999_999_999_999, 2**64, 300.0, "300", True])
def test_a_size_that_no_vocabulary_has_is_refused(kind, size):
    with pytest.raises(ValueError, match="size must be a whole number, at most 16,777,216, got"):
        kind(TEXTS, size=size)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1, 2]", b"not json", b"\xff\xfe"])
def test_what_is_no_tokenizer_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer.json: is not (a tokenizer|valid UTF-8)"):
        Tokenizer.load(tmp_path / "tokenizer.json")


def test_missing_and_enormous_files_are_refused(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"no such file; expected a tokenizer.json"):
        Tokenizer.load(tmp_path / "tokenizer.json")
    BPE.save(tmp_path / "tokenizer.json")
    monkeypatch.setattr("regard.data.tokenizers.MAX_FILE_BYTES", 100)
    with pytest.raises(DataError, match=r"is larger than 100 bytes"):
        Tokenizer.load(tmp_path / "tokenizer.json")


def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.json"
    path.write_text("old")
    monkeypatch.setattr(Tokenizer, "to_json", lambda self: "x" * 10 + "\ud800")
    with pytest.raises(UnicodeEncodeError):
        BPE.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer.json"]
    assert path.read_text() == "old"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Tokenizer.bpe([]), DataError, "nothing to learn"),
        (
            lambda: Tokenizer.words(["", " "]),
            DataError,
            "no texts, or only blank ones: there is nothing to learn a vocabulary from; pass texts",
        ),
        (
            lambda: Tokenizer.words("one text"),
            TypeError,
            r"texts must be a list of texts, got a single text; pass \[text\]",
        ),
        (
            lambda: Tokenizer.wordpiece(["a", "b\udcff"]),
            ValueError,
            r"text must be Unicode, got the lone surrogate '\\udcff' as character 2; write it in UTF-8",
        ),
        (lambda: Tokenizer.bpe(["a", "\ud800"]), ValueError, "text must be Unicode, got the lone surrogate"),
        (lambda: Tokenizer.words(["a", 3]), TypeError, r"text must be text, got 3 \(int\)"),
        (lambda: Tokenizer.words(TEXTS, split="x"), ValueError, "split must be 'punctuation' or 'space', got 'x'"),
        (
            lambda: Tokenizer.words(TEXTS, size=4),
            ValueError,
            "size must be more than the 4 special tokens, got 4",
        ),
        (lambda: Tokenizer.bpe(TEXTS, size=259), ValueError, "the 256 bytes and the specials, at least 260, got 259"),
        (lambda: Tokenizer.words(TEXTS, specials=["<pad>"]), ValueError, "specials must differ from each other"),
    ],
)
def test_what_cannot_be_trained_says_why(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    "call",
    [BPE.encode, BPE.spans, BPE.pieces, lambda text: BPE.encode_all(["a", text])],
    ids=["encode", "spans", "pieces", "encode_all"],
)
def test_half_a_character_is_refused(call):
    with pytest.raises(ValueError, match=r"text must be Unicode, got the lone surrogate '\\udcff' as character 3"):
        call("ab\udcff")


def test_one_text_is_not_many_to_encode():
    with pytest.raises(TypeError, match=r"texts must be a list of texts, got a single text; pass \[text\]"):
        BPE.encode_all("abc")


@pytest.mark.parametrize("text", ["  ein Müller, (Meier) Haus.\nX", "Haus ein", "", "Müller", "<unk> Haus"])
@pytest.mark.parametrize("kind", ["words", "space", "characters", "bpe", "wordpiece"])
def test_unknown_tokens_are_called_by_their_text_and_joined_again(kind, text):
    texts = ["ein Haus, ein Hund.", "das (Haus)"]
    tokenizer = {
        "words": lambda: Tokenizer.words(texts),
        "space": lambda: Tokenizer.words(texts, split="space"),
        "characters": lambda: Tokenizer.characters(texts),
        "bpe": lambda: Tokenizer.bpe(texts, size=300),
        "wordpiece": lambda: Tokenizer.wordpiece(texts, size=60),
    }[kind]()
    ids, pieces = tokenizer.encode(text), tokenizer.pieces(text)
    names = tokenizer.tokens(ids)
    assert len(pieces) == len(ids)
    assert all(piece == name for id, piece, name in zip(ids, pieces, names, strict=True) if id != tokenizer.unk)
    assert tokenizer.join(names) == tokenizer.decode(ids)
    joined = tokenizer.join(pieces)
    assert "".join(joined.split()) == "".join(text.split())
    if kind in ("words", "space"):
        assert joined == " ".join(text.split())
    if kind in ("characters", "bpe"):
        assert joined == text


def test_padding_and_the_start_stand_in_no_text_unless_texts_end_with_them():
    tokenizer = Tokenizer.characters(["ab"])
    assert tokenizer.unwritten == (tokenizer.pad, tokenizer.bos)
    inner = hf.Tokenizer(models.WordLevel({"<|endoftext|>": 0, "a": 1}, unk_token="a"))
    assert Tokenizer(inner).unwritten == ()


def test_labels_of_byte_level_pieces_read_as_text():
    tokenizer = Tokenizer.bpe(["ein schönes Haus", "ein schönes Haus"], size=290)
    ids = tokenizer.encode("ein schönes Häuschen", eos=True)
    labels = tokenizer.labels(ids)
    assert labels[-1] == "<eos>"
    assert " schönes" in labels
    assert "ĠschÃ¶nes" in tokenizer.tokens(ids)
    assert Tokenizer.words(["ein Haus"]).labels([4, 5]) == Tokenizer.words(["ein Haus"]).tokens([4, 5])


def test_specials_spelled_out_in_a_text_leave_no_gap_between_ids():
    tokenizer = Tokenizer.words(["a <unk> b <eos> c", "a b c <unk>"], split="space", size=50)
    assert tokenizer.tokens(range(len(tokenizer))) == ["<pad>", "<unk>", "<bos>", "<eos>", "a", "b", "c"]
    assert tokenizer.encode("a <unk> zz") == [4, 1, 1]


def test_ids_below_0_are_no_tokens_as_those_behind_the_last_are():
    tokenizer = Tokenizer.words(["ein Haus"])
    assert tokenizer.tokens([4, -100, 99]) == ["▁Haus", "<none>", "<none>"]
    assert tokenizer.decode([4, -100, 99]) == "Haus"


def test_a_folder_to_save_in_that_is_not_there_is_named(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"nowhere is not a folder; create it before you save tokenizer\.json there"
    ):
        BPE.save(tmp_path / "nowhere" / "tokenizer.json")
