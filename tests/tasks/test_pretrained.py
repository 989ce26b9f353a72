"""Encoders of others: found whatever their head, refused where they are none."""

from __future__ import annotations

import json

import pytest
import torch

from regard.data import Tokenizer, labelled_tsv
from regard.models import Bert, BertClassifier, BertConfig, BertReader, Gpt, GptConfig, pretrained
from regard.tasks import Batching, classification
from regard.tasks.classification import Classifier
from regard.tasks.pretrained import encoder_of, max_positions
from regard.train import Constant, Recipe, Silence

SIZES = {"dim": 16, "depth": 1, "heads": 2}
PIECES = Tokenizer.words(["ein Haus"])


def test_an_encoder_comes_with_its_head_and_its_tokenizer(tmp_path):
    bert = Bert(BertConfig(vocabulary=30, length=40, hidden=32, pooler=False, **SIZES))
    pretrained.save(BertReader(bert), tmp_path)
    PIECES.save(tmp_path / "tokenizer.json")
    found, model, tokenizer = encoder_of(tmp_path)
    assert isinstance(model, BertReader)
    assert model.bert is found
    assert tokenizer == PIECES
    assert max_positions(found) == 40


def test_what_is_no_encoder_is_named(tmp_path):
    pretrained.save(Gpt(GptConfig(vocabulary=9, **SIZES)), tmp_path)
    with pytest.raises(ValueError, match="must contain a BERT, RoBERTa or DistilBERT, got a Gpt"):
        encoder_of(tmp_path)


def test_a_tokenizer_of_another_model_is_named(tmp_path):
    pretrained.save(Bert(BertConfig(vocabulary=3, hidden=32, **SIZES)), tmp_path)
    PIECES.save(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match=rf"has {len(PIECES)} tokens, but the model has 3 embeddings"):
        encoder_of(tmp_path)


def a_classifier(folder, **labels):
    """A classifier of two classes in a folder whose config has these labels."""
    bert = Bert(BertConfig(vocabulary=30, length=40, hidden=32, **SIZES))
    model = BertClassifier(bert, classes=2)
    model.classes.bias.data = torch.tensor([1.0, 2.0])
    pretrained.save(model, folder)
    PIECES.save(folder / "tokenizer.json")
    path = folder / "config.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps({key: said[key] for key in said.keys() - {"id2label", "label2id"}} | labels))
    return model


@pytest.mark.parametrize(
    ("classes", "labels", "numbers"),
    [
        (("bad", "good"), {"0": "good", "1": "bad"}, [1, 0]),
        (("bad", "good"), {"1": "GOOD", "0": "BAD"}, [0, 1]),
        (("a", "A"), {"0": "A", "1": "a"}, [1, 0]),
        (("1", "0"), {"0": "good", "1": "bad"}, [1, 0]),
        (("1", "0"), {"0": "1", "1": "0"}, [0, 1]),
        (("bad", "good"), {"0": "LABEL_0", "1": "LABEL_1"}, [0, 1]),
        (("LABEL_1", "LABEL_0"), {"0": "LABEL_0", "1": "LABEL_1"}, [1, 0]),
        (("bad", "good"), {"0": "spam", "1": "ham"}, None),
        (("bad", "good"), {"0": "bad", "1": "bad"}, None),
    ],
)
def test_classes_are_kept_by_name(tmp_path, classes, labels, numbers):
    model, lines = a_classifier(tmp_path / "bert", id2label=labels), []
    (tmp_path / "texts.tsv").write_text("".join(f"{name}\tein Haus\n" for name in classes))
    show = Silence()
    show.say = lines.append
    classification.train_texts(
        labelled_tsv(tmp_path / "texts.tsv", classes=classes),
        out=tmp_path / "run",
        pretrained=tmp_path / "bert",
        recipe=Recipe(steps=0, rate=Constant(1e-3)),
        batching=Batching(limit=40),
        show=show,
    )
    found = Classifier.load(tmp_path / "run").model.classes
    [said] = [line for line in lines if "the classification head" in line]
    if numbers is None:
        names = f"{labels['0']}, {labels['1']}"
        assert (
            said == f"the classification head for 2 classes is new: that of {tmp_path / 'bert'} has the classes {names}"
        )
        assert not torch.equal(found.weight, model.classes.weight)
        return
    order = ", ".join(classes[numbers.index(n)] for n in range(2))
    assert said == f"using the classification head of {tmp_path / 'bert'}; its classes are, in order: {order}"
    assert torch.equal(found.weight, model.classes.weight[numbers])
    assert torch.equal(found.bias, model.classes.bias[numbers])


def test_labels_must_be_of_the_numbers_of_the_classes(tmp_path):
    a_classifier(tmp_path, id2label={"1": "good", "2": "bad"})
    texts = tmp_path / "texts.tsv"
    texts.write_text("bad\tein Haus\ngood\tHaus\n")
    with pytest.raises(ValueError, match=r"config.json: id2label must name the classes 0 to 1, got 1, 2"):
        classification.train_texts(
            labelled_tsv(texts), out=tmp_path / "run", pretrained=tmp_path, batching=Batching(limit=40)
        )
