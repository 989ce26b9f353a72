"""Initial weights: small, and smaller where they enter the residual stream."""

from __future__ import annotations

import pytest
import torch

from regard.models import Gpt, GptConfig, ViT, ViTConfig

CONFIGS = {
    "gpt": GptConfig(vocabulary=97, dim=64, depth=7, heads=4),
    "llama": GptConfig.llama(vocabulary=97, dim=64, depth=7, heads=4, kv_heads=2),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_enters_the_residual_stream_is_less_the_more_layers_there_are(kind):
    model = Gpt(CONFIGS[kind])
    for block in model.blocks:
        for layer in (block.attention.out, block.feedforward.down):
            assert layer.weight.std().item() == pytest.approx(0.02 / 14**0.5, rel=0.1)
        for layer in (block.attention.query, block.feedforward.up):
            assert layer.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_biases_are_zero_and_norms_are_one():
    for name, parameter in Gpt(CONFIGS["gpt"]).named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
        elif "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter))


def test_a_vit_of_the_published_width_begins_as_published():
    vit = ViT(ViTConfig(depth=1))
    for layer in (vit.patches.project, vit.blocks[0].attention.query, vit.blocks[0].feedforward.down):
        assert layer.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert vit.positions.std().item() == pytest.approx(0.02, rel=0.05)


def test_small_patches_are_not_lost_beside_their_positions():
    vit = ViT(ViTConfig(image=28, patch=4, channels=1, dim=64, depth=1, heads=4, hidden=64))
    assert 0.3 < vit.patches(torch.randn(8, 1, 28, 28)).std().item() < 1
