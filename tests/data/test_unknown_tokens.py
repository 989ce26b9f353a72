"""Unknown words and characters: a token stands for them, or the tokenizer raises; none is dropped."""

import pytest
import tokenizers as hf
from tokenizers import models

from regard.data import DataError, Tokenizer


@pytest.mark.parametrize(
    "model",
    [
        models.BPE({"<pad>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4}, [], unk_token="<unk>"),
        models.BPE({"<pad>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4}, []),
        models.Unigram([("<pad>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("a", -1.0), ("b", -1.0)]),
    ],
    ids=["bpe", "bpe without unk_token", "unigram"],
)
def test_a_character_that_nothing_stands_for_is_shown(model):
    tokenizer = Tokenizer(hf.Tokenizer(model))
    assert tokenizer.encode("ab") == [3, 4]
    for read in (tokenizer.encode, tokenizer.spans, tokenizer.pieces, lambda text: tokenizer.encode_all(["ab", text])):
        with pytest.raises(
            DataError, match=r"the tokenizer cannot read 'axb' \(.*\); give its model a token for unknown"
        ):
            read("axb")


def test_byte_pairs_that_name_no_unknown_token_take_the_one_there_is():
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "[UNK]": 3, "a": 4, "b": 5}
    tokenizer = Tokenizer(hf.Tokenizer(models.BPE(vocabulary, [])))
    assert tokenizer.encode("axb") == [4, 3, 5]
    assert [span.start for span in tokenizer.spans("axb")] == [0, 1, 2]
    assert Tokenizer.from_json(tokenizer.to_json()).encode_all(["axb"]) == [[4, 3, 5]]


def test_byte_pairs_that_lack_a_byte_do_not_drop_it():
    inner = hf.Tokenizer(models.BPE({"<pad>": 0, "<s>": 1, "</s>": 2, "a": 3, "Ã": 4}, []))
    inner.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    with pytest.raises(DataError, match="the tokenizer cannot read 'aé'"):
        Tokenizer(inner).encode("aé")
