"""Deformable attention is recorded as places and weights, however a model writes it, and only if they are proved."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from regard.lens import SampledWeights, Tape, ablate, capture
from regard.lens.eager.sampled_points import SampledPoints
from tests.lens.eager.deformable_layers import (
    CELLS,
    HEADS,
    MAPS,
    POINTS,
    QUERIES,
    WAYS,
    B,
    Deformable,
    Pair,
    assert_shows,
    texts,
    watched,
)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad, torch.inference_mode], ids=lambda f: f.__name__)
def test_places_and_weights_are_those_of_the_layer(way, context):
    layer = Deformable(way).double().eval()
    with context():
        tape = watched(layer, *texts())
    (A,) = tape.values()
    assert_shows(A, *layer.kept)
    assert A.shape == (B, HEADS, QUERIES, CELLS)
    assert (A.maps, sorted(A.levels)) == (MAPS, [0] * POINTS + [1] * POINTS)
    assert (tape.unseen, tape.guessed) == ([], {})


@pytest.mark.parametrize("b", [1, HEADS, 2 * HEADS, 7])
def test_batch_and_heads_are_told_apart_for_every_batch_size(b):
    layer = Deformable().double()
    tape = watched(layer, *texts(b))
    assert_shows(tape[0], *layer.kept)
    assert tape.guessed == {}


def test_rows_over_cells_average_the_values_of_the_layer():
    layer, (x, memory) = Deformable().double(), texts()
    A = watched(layer, x, memory)[0]
    heads = layer.values(memory).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    out = layer.out((A.dense() @ heads).transpose(1, 2).flatten(2))
    torch.testing.assert_close(out, layer(x, memory), rtol=1e-9, atol=1e-9)


def test_heads_layers_and_places_of_tensors_are_chosen_as_for_other_layers(tmp_path):
    model, inputs = Pair(Deformable()).double(), texts()
    A = watched(model, *inputs, heads=[1])["other"]
    assert torch.equal(A.weights, model.other.kept[1].transpose(1, 2).flatten(3)[:, [1]])
    assert watched(model, *inputs, layers="seen").layers == ["seen"]
    for given in ({"keep": ["entropy"]}, {"to": "cpu"}, {"budget": "1MB"}, {"to": tmp_path}):
        assert_shows(watched(model, *inputs, **given)["other"], *model.other.kept)


def test_sampled_points_are_saved_loaded_and_tabulated(tmp_path):
    tape = watched(Deformable().double(), *texts())
    path = tmp_path / "tape.safetensors"
    tape.save(path)
    for again in (Tape.load(path), Tape.open(path)):
        A, B = tape[0], again[0]
        assert torch.equal(A.weights, B.weights)
        assert torch.equal(A.locations, B.locations)
        assert (A.levels, A.maps, repr(again)) == (B.levels, B.maps, repr(tape))
    table = dict(tape.table())
    mean = [round(x, 9) for x in tape[0].entropy().mean(-1).flatten().tolist()]
    assert [round(x, 9) for x in table["entropy"]] == mean


def test_later_writes_of_the_model_do_not_change_the_points():
    layer = Deformable().double().requires_grad_(False)
    A = watched(layer, *texts())[0]
    expected = A.weights.clone()
    layer.kept[1].zero_()
    assert torch.equal(A.weights, expected)


def test_ablating_another_layer_leaves_the_points_as_they_are():
    model, inputs = Pair(Deformable()).double(), texts()
    want = model(*inputs)
    with ablate(model, {"seen": [0]}):
        assert not torch.equal(model(*inputs), want)


def test_maps_are_forgotten_with_the_tensors_of_their_points():
    points, values = SampledPoints(), torch.randn(1, 2, 3, 3)
    grid = torch.zeros(1, 4, 2, 2)
    out = F.grid_sample(values, grid, align_corners=False)
    points.follow(F.grid_sample, (values, grid), {"align_corners": False}, out)
    assert points.held
    del out
    assert not points.held


def small_model(kind):
    """A detector of transformers with random weights."""
    hf = pytest.importorskip("transformers")
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1] * 4, "layer_type": "basic"}
    sizes["out_features"] = ["stage2", "stage3", "stage4"]
    both = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": HEADS, "encoder_attention_heads": HEADS}
    both |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_queries": 10}
    if kind == "RTDetr":
        backbone = hf.RTDetrResNetConfig(**sizes)
        own = {"encoder_hidden_dim": 32, "num_denoising": 0, "encoder_in_channels": [16, 16, 32]}
        config = hf.RTDetrConfig(**both, **own, backbone_config=backbone, decoder_in_channels=[32] * 3)
    else:
        backbone = hf.ResNetConfig(**sizes)
        own = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
        config = hf.DeformableDetrConfig(
            **both, **own, encoder_layers=1, num_feature_levels=3, backbone_config=backbone
        )
    return getattr(hf, f"{kind}Model")(config).eval()


@pytest.mark.parametrize(("kind", "count"), [("RTDetr", 2), ("DeformableDetr", 3)])
def test_detectors_of_transformers_are_seen(kind, count):
    torch.manual_seed(0)
    model, used = small_model(kind), []
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "attention_weights" in name or "sampling_offsets.weight" in name:
                parameter.normal_(std=0.3)
    for module in model.modules():
        if type(module).__name__ == "MultiScaleDeformableAttention":
            module.register_forward_pre_hook(lambda module, args: used.append(args[4:6]))
    images = torch.randn(2, 3, 96, 128)
    with torch.no_grad():
        want = model(images)[0]
        used.clear()
        with capture(model) as tape:
            assert torch.equal(model(images)[0], want)
    found = [A for A in tape.values() if isinstance(A, SampledWeights)]
    assert len(found) == len(used) == count
    for A, (places, weights) in zip(found, used, strict=True):
        assert_shows(A, places, weights)
        assert A.maps == ((12, 16), (6, 8), (3, 4))
    assert (tape.unseen, tape.guessed) == ([], {})
