"""Attention maps of classifiers: shares of a text or an image, on its tokens or positions."""

from __future__ import annotations

import pytest
import torch

from regard.lens import rollout_matrix
from regard.models import (
    AttentionConvNet,
    AttentionConvNetConfig,
    Bert,
    BertClassifier,
    BertConfig,
    TextClassifier,
    TextClassifierConfig,
    ViT,
    ViTClassifier,
    ViTConfig,
)
from regard.tasks import attention_maps


def test_a_vit_without_a_class_token_looks_as_the_mean_of_its_patches_does():
    sizes = {"image": 8, "patch": 2, "channels": 1, "dim": 16, "depth": 2, "heads": 2, "hidden": 32}
    model = ViTClassifier(ViT(ViTConfig(**sizes, pool="mean")), classes=3).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # so that attention is not flat
    batch = {"image": torch.rand(2, 1, 8, 8)}
    expected = rollout_matrix(attention_maps.capture_batch(model, batch).values()).mean(1)
    found = torch.stack(attention_maps.input_maps(model, batch)).flatten(1)
    torch.testing.assert_close(found, expected)
    assert found.std() > 1e-3


def text_batch():
    return {"ids": torch.tensor([[5, 6, 7], [8, 0, 0]]), "ids_lengths": torch.tensor([3, 1])}


def text_models():
    torch.manual_seed(0)
    sizes = {"classes": 2, "vocabulary": 9, "dim": 8, "hidden": 8}
    bert = Bert(BertConfig(vocabulary=9, length=5, dim=8, depth=2, heads=2, hidden=8, padding=0))
    return TextClassifier(TextClassifierConfig(**sizes, queries=2)).eval(), BertClassifier(bert, classes=2).eval()


def image_models(attention="self", pool="class"):
    torch.manual_seed(0)
    convnet = AttentionConvNetConfig(classes=2, channels=1, widths=(4, 8), attention=attention, heads=2)
    vit = ViTConfig(image=8, patch=2, channels=1, dim=8, depth=2, heads=2, hidden=8, pool=pool)
    return AttentionConvNet(convnet).eval(), ViTClassifier(ViT(vit), classes=2).eval()


def test_maps_of_texts_are_shares_of_their_tokens_without_padding():
    for model in text_models():
        maps = attention_maps.input_maps(model, text_batch())
        assert [len(row) for row in maps] == [3, 1]
        for row in maps:
            assert row.sum().item() == pytest.approx(1, abs=1e-5)


def test_the_map_of_a_pooled_text_is_the_mean_of_its_queries():
    model, _ = text_models()
    tape = attention_maps.capture_batch(model, text_batch())
    [row, _] = attention_maps.input_maps(model, text_batch())
    torch.testing.assert_close(row, tape["pool"][...][0].mean((0, 1)))


def test_maps_of_images_are_squares_of_shares_without_the_class_token():
    image = torch.rand(2, 1, 8, 8)
    for model in (*image_models(), *image_models(pool="mean")):
        for found in attention_maps.input_maps(model, {"image": image}):
            assert found.shape[0] == found.shape[1] == 4
            assert found.sum().item() == pytest.approx(1, abs=1e-5)


def test_logits_are_those_of_the_model_called_with_the_parts_of_the_batch():
    batch, (pooled, bert) = text_batch(), text_models()
    ids, lengths = batch["ids"], batch["ids_lengths"]
    torch.testing.assert_close(attention_maps.logits(pooled, batch), pooled(ids, lengths=lengths))
    torch.testing.assert_close(attention_maps.logits(bert, batch), bert(ids, keep=lengths))
    for model in image_models():
        image = torch.rand(1, 1, 8, 8)
        torch.testing.assert_close(attention_maps.logits(model, {"image": image}), model(image))


def test_tokens_label_keys_and_numbers_the_queries_that_pool_them():
    tokens = [["the", "great", "film"], ["dull", "<pad>", "<pad>"]]
    pooled, bert = (attention_maps.capture_batch(model, text_batch(), tokens) for model in text_models())
    assert pooled.tokens_of("pool", batch=1) == (["query 1", "query 2"], tokens[1])
    for layer in bert.layers:
        assert bert.tokens_of(layer, batch=0) == (tokens[0], tokens[0])


def test_only_a_convnet_that_attends_between_positions_has_a_map():
    for model in (*text_models(), *image_models()):
        attention_maps.check_attends(model)
    for attention in ("squeeze", None):
        message = f"no attention between positions, only attention='{attention}'; train one with attention='self', or a"
        with pytest.raises(ValueError, match=message):
            attention_maps.check_attends(image_models(attention)[0])
