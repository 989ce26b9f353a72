"""ViT: patches as tokens, pooled by a class token or by their mean; other sizes of image by resampled positions."""

from __future__ import annotations

import pytest
import torch

from regard.models import ViT, ViTClassifier, ViTConfig

SMALL = {"image": (8, 12), "patch": 4, "dim": 12, "depth": 2, "heads": 3, "hidden": 20}


@pytest.mark.parametrize(("pool", "tokens"), [("class", 7), ("mean", 6)])
def test_each_patch_is_a_token_and_a_class_token_stands_before_them(pool, tokens):
    vit, image = ViT(ViTConfig(pool=pool, **SMALL)).double(), torch.randn(2, 3, 8, 12, dtype=torch.float64)
    x = vit(image)
    assert x.shape == (2, tokens, 12)
    expected = x[:, 0] if pool == "class" else x.sum(1) / 6
    torch.testing.assert_close(vit.pooled(x), expected)


def test_images_of_a_batch_do_not_see_each_other():
    vit, image = ViT(ViTConfig(**SMALL)).double().eval(), torch.randn(3, 3, 8, 12, dtype=torch.float64)
    torch.testing.assert_close(vit(image)[1:2], vit(image[1:2]))


def test_where_a_patch_stands_matters():
    vit, image = ViT(ViTConfig(pool="mean", **SMALL)).double().eval(), torch.randn(1, 3, 8, 12, dtype=torch.float64)
    torch.nn.init.normal_(vit.positions)
    moved = image.roll(4, -1)
    assert not torch.allclose(vit.pooled(vit(image)), vit.pooled(vit(moved)))
    torch.nn.init.zeros_(vit.positions)
    torch.testing.assert_close(vit.pooled(vit(image)), vit.pooled(vit(moved)))


@pytest.mark.parametrize("pool", ["class", "mean"])
def test_resized_to_its_own_size_a_model_is_the_same(pool):
    vit, image = ViT(ViTConfig(pool=pool, **SMALL)).eval(), torch.randn(2, 3, 8, 12)
    torch.testing.assert_close(vit.resized((8, 12))(image), vit(image))
    other = vit.resized(16)
    assert other(torch.randn(1, 3, 16, 16)).shape[1] == 16 + (pool == "class")
    assert other.config.image == 16
    assert vit.config.image == (8, 12)
    assert other.positions.requires_grad


@pytest.mark.parametrize("pool", ["class", "mean"])
def test_a_handful_of_images_is_learnt_by_heart(pool):
    model = ViTClassifier(ViT(ViTConfig(pool=pool, **SMALL)), classes=5)
    batch = {"image": torch.randn(6, 3, 8, 12), "label": torch.tensor([0, 4, 2, 1, 3, 3])}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(60):
        optimizer.zero_grad()
        loss = model.loss(batch)
        loss.mean.backward()
        optimizer.step()
    assert loss.count == 6
    assert loss.mean < 0.05


def test_it_learns_to_say_where_a_light_is():
    config = ViTConfig(image=8, patch=4, channels=1, dim=32, depth=2, heads=4, hidden=64, dropout=0.0)
    model = ViTClassifier(ViT(config), classes=4)

    def lights(b, seed):
        random = torch.Generator().manual_seed(seed)
        y, x = torch.randint(0, 8, (2, b), generator=random)
        image = 0.3 * torch.randn(b, 1, 8, 8, generator=random)
        image[torch.arange(b), 0, y, x] += 4
        return {"image": image, "label": 2 * (y // 4) + x // 4}

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for step in range(100):
        optimizer.zero_grad()
        model.loss(lights(64, step)).mean.backward()
        optimizer.step()
    test = lights(300, 10_000)
    assert int((model.eval()(test["image"]).argmax(-1) == test["label"]).sum()) >= 297


@pytest.mark.parametrize(
    ("preset", "millions"),
    [(ViTConfig.tiny(), 5.5), (ViTConfig.small(), 21.7), (ViTConfig.base(), 85.8), (ViTConfig.large(), 303.3)],
)
def test_presets_have_the_published_size(preset, millions):
    with torch.device("meta"):
        vit = ViT(preset)
    assert sum(x.numel() for x in vit.parameters()) / 1e6 == pytest.approx(millions, abs=0.06)


def test_an_image_of_another_size_is_refused_with_what_to_write():
    with pytest.raises(ValueError, match=r"image must be \(8, 12\) pixels, got \(8, 8\); .* vit.resized\(\(8, 8\)\)"):
        ViT(ViTConfig(**SMALL))(torch.randn(1, 3, 8, 8))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"patch": 5}, r"image must divide into patches, got image=\(8, 12\) and patch=5"),
        ({"pool": "max"}, "pool must be one of 'class', 'mean', got 'max'"),
        ({"channels": 0}, "channels must be 1 or more, got 0"),
        ({"image": 0}, "image must be 1 or more, got 0"),
        ({"dropout": -0.1}, "dropout must be at least 0 and below 1"),
        ({"image": (8,)}, r"image must be one number of pixels, or height and width, got \(8,\)"),
        ({"image": (8, 12, 3)}, r"image must be one number of pixels, or height and width, got \(8, 12, 3\)"),
        ({"patch": None}, "patch must be one number of pixels, or height and width, got None"),
        ({"eps": -1.0}, "eps must be 0 or more, got -1.0"),
        ({"eps": float("nan")}, "eps must be finite, got nan"),
        ({"eps": "small"}, "eps must be a number, got 'small'"),
    ],
)
def test_configs_that_cannot_be_are_refused(values, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ViTConfig(**{**SMALL, **values})
