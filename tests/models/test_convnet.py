"""AttentionConvNet: five ways to weigh what convolutions see, none of which sees another image."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from regard.lens import capture
from regard.models import AttentionConvNet, AttentionConvNetConfig, Captioner, CaptionerConfig
from regard.nn import CBAM, SelectiveKernel, SqueezeExcite
from tests.models.generator_checks import D, trained
from tests.models.save_and_reload import keeps_its_config_and_its_weights

KINDS = [None, "self", "squeeze", "cbam", "selective"]


def config(**options):
    sizes = {"classes": 5, "channels": 1, "stem": 4, "widths": (8, 12), "depth": 1, "heads": 2, "reduction": 4}
    return AttentionConvNetConfig(**{**sizes, **options})


def model_of(attention):
    """A model that has seen images, and whose attention is not flat."""
    model = AttentionConvNet(config(attention=attention, depth=2)).to(D)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gamma"):
                parameter.fill_(1.5)
            elif ".attention." in name:
                parameter.mul_(40)
        model(torch.rand(16, 1, 13, 11, dtype=D))
    return model.eval()


@pytest.fixture(params=KINDS, ids=str)
def model(request):
    return model_of(request.param)


@torch.no_grad()
def test_each_image_alone_and_in_another_order_gives_the_same(model):
    image, order = torch.rand(4, 1, 13, 11, dtype=D), torch.tensor([2, 0, 3, 1])
    together = model(image)
    assert together.isfinite().all()
    torch.testing.assert_close(model(image[order]), together[order], rtol=0, atol=1e-10)
    for n in range(4):
        torch.testing.assert_close(model(image[n : n + 1])[0], together[n], rtol=0, atol=1e-10)


@torch.no_grad()
def test_every_stage_but_the_first_halves_the_map(model):
    assert model.features(torch.rand(2, 1, 13, 11, dtype=D)).shape == (2, 12, 7, 6)


@pytest.mark.parametrize(
    ("attention", "layer"), [("squeeze", SqueezeExcite), ("cbam", CBAM), ("selective", SelectiveKernel)]
)
def test_every_block_has_an_attention_of_its_own(attention, layer):
    assert sum(isinstance(module, layer) for module in model_of(attention).modules()) == 4
    assert not any(isinstance(module, layer) for module in model_of(None).modules())


@torch.no_grad()
def test_it_runs_channels_last_from_end_to_end(model):
    image = torch.rand(2, 1, 13, 11, dtype=D)
    expected = model(image)
    model.to(memory_format=torch.channels_last)
    image = image.contiguous(memory_format=torch.channels_last)
    assert model.features(image).is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(model(image), expected)


@torch.no_grad()
def test_capture_sees_what_places_look_at():
    model, image = model_of("self"), torch.rand(2, 1, 13, 11, dtype=D)
    layer, seen = model.features.stage2[-1].attention, []
    layer.query.weight *= 10  # so that places look at some more than at others
    layer.register_forward_pre_hook(lambda layer, args: seen.append(args[0]))
    with capture(model) as tape:
        model(image)
    (name,) = tape.layers
    assert name == f"features.stage2.{len(model.features.stage2) - 1}.attention"
    A = tape[name][...]
    q, k = (side(seen[0]).flatten(2).unflatten(1, (2, -1)) for side in (layer.query, layer.key))
    expected = (torch.einsum("bhdi,bhdj->bhij", q, k) * q.shape[2] ** -0.5).softmax(-1)
    torch.testing.assert_close(A, expected)
    assert A.amax(-1).mean() > 1.5 / 42


@torch.no_grad()
def test_capture_sees_which_kernels_are_selected():
    model = model_of("selective")
    with capture(model) as tape:
        model(torch.rand(2, 1, 13, 11, dtype=D))
    assert len(tape.layers) == 4  # one a block
    A = tape["features.stage2.0.first"][...]
    assert A.shape == (2, 12, 1, 2)
    torch.testing.assert_close(A.sum(-1), torch.ones(2, 12, 1, dtype=D))


@pytest.mark.parametrize(("attention", "reaches"), [(None, False), ("self", True)], ids=["none", "self"])
@torch.no_grad()
def test_the_far_corner_is_seen_by_attention_alone(attention, reaches):
    model, image = model_of(attention), torch.rand(1, 1, 48, 48, dtype=D)
    other = image.clone()
    other[..., 0, 0] += 1
    before, after = (model.features[:-2](x)[..., -1, -1] for x in (image, other))
    assert bool((before - after).abs().max() > 1e-9) == reaches


def test_the_loss_is_smoothed_in_training_alone():
    model = AttentionConvNet(config(smoothing=0.2)).to(D)
    batch = {"image": torch.rand(6, 1, 9, 9, dtype=D), "label": torch.tensor([0, 1, 2, 3, 4, 0])}
    for mode, smoothing in ((True, 0.2), (False, 0.0)):
        logp = model.train(mode)(batch["image"]).detach().log_softmax(-1)
        expected = sum(
            -(1 - smoothing) * float(logp[row, label]) - smoothing * float(logp[row].mean())
            for row, label in enumerate(batch["label"].tolist())
        )
        loss = model.loss(batch)
        assert loss.sum.item() == pytest.approx(expected, abs=1e-10)
        assert loss.count == 6


def test_a_captioner_sees_with_its_features():
    features = model_of("cbam").features
    captioner = Captioner(CaptionerConfig(vocabulary=9, start=2, widths=(8, 12), dim=8, hidden=6), features=features)
    assert captioner.to(D)(torch.rand(2, 1, 13, 11, dtype=D), torch.tensor([[2, 5]] * 2)).shape == (2, 2, 9)


@pytest.mark.learning
@pytest.mark.parametrize("attention", KINDS, ids=str)
def test_it_learns_a_handful_of_images_by_heart(attention):
    model = AttentionConvNet(config(attention=attention, widths=(16, 32)))
    batch = {"image": torch.rand(8, 1, 10, 10), "label": torch.tensor([0, 4, 2, 1, 3, 3, 0, 1])}
    trained(model, lambda step: batch, steps=60, rate=0.01)
    assert model.train().loss(batch).mean < 0.05
    assert torch.equal(model(batch["image"]).argmax(-1), batch["label"])


@pytest.mark.learning
@pytest.mark.parametrize("attention", ["self", "squeeze"])
def test_it_learns_shapes_wherever_they_stand(attention):
    model = AttentionConvNet(config(attention=attention, classes=4, widths=(16, 24)))
    trained(model, lambda step: shapes(48, step), steps=60, rate=0.01)
    batch = shapes(400, seed=10_000)
    with torch.no_grad():
        right = model(batch["image"]).argmax(-1) == batch["label"]
    assert right.double().mean() >= 0.99


def shapes(b, seed):
    """A bar down, a bar across, a cross or a frame, anywhere on noise."""
    random = torch.Generator().manual_seed(seed)
    forms = torch.zeros(4, 5, 5)
    forms[0, :, 2] = forms[1, 2] = forms[2, :, 2] = forms[2, 2] = forms[3] = 1
    forms[3, 1:4, 1:4] = 0
    label = torch.randint(4, (b,), generator=random)
    image = torch.rand(b, 1, 12, 12, generator=random) * 0.3
    for n, (y, x) in enumerate(torch.randint(8, (b, 2), generator=random).tolist()):
        image[n, 0, y : y + 5, x : x + 5] += forms[label[n]]
    return {"image": image, "label": label}


@torch.no_grad()
def test_config_and_weights_make_the_round_trip(model, tmp_path):
    other, image = keeps_its_config_and_its_weights(model, tmp_path), torch.rand(2, 1, 13, 11, dtype=D)
    assert torch.equal(other(image), model(image))


def test_autocast_stays_near_and_finite(model):
    model, image = model.float(), torch.rand(2, 1, 13, 11)
    with torch.autocast("cpu", torch.bfloat16):
        half = model(image)
    torch.testing.assert_close(half.float(), model(image), rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    ("preset", "millions"),
    [
        (AttentionConvNetConfig.tiny, 0.31),
        (AttentionConvNetConfig.small, 2.75),
        (AttentionConvNetConfig.base, 10.96),
        (AttentionConvNetConfig.large, 36.48),
    ],
)
def test_presets_without_attention_have_the_published_size(preset, millions):
    with torch.device("meta"):
        model = AttentionConvNet(preset(classes=10, attention=None))
    assert sum(x.numel() for x in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.01)


def test_dropout_stands_in_every_block_and_acts_in_training_alone():
    model = AttentionConvNet(replace(config(), dropout=0.5)).to(D)
    assert [layer.p for layer in model.modules() if isinstance(layer, nn.Dropout)] == [0.5, 0.5]
    image = torch.rand(2, 1, 9, 9, dtype=D)
    assert not torch.equal(model(image), model(image))
    model.eval()
    assert torch.equal(model(image), model(image))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "loud"}, "attention must be one of 'self', 'squeeze', 'cbam', 'selective', got 'loud'"),
        ({"widths": ()}, "widths must name the channels of at least one stage, got none"),
        ({"widths": (8, 0)}, "widths must be 1 or more, got 0"),
        ({"widths": (8,), "attention": "self"}, r"attention='self' needs a stage .* got widths=\(8,\)"),
        ({"classes": 0}, "classes must be 1 or more, got 0"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
        ({"smoothing": -0.1}, "smoothing must be at least 0 and below 1, got -0.1"),
    ],
)
def test_configs_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        config(**options)


@pytest.mark.parametrize("shape", [(2, 3, 9, 9), (1, 9, 9)], ids=str)
def test_images_of_other_channels_are_refused(shape):
    with pytest.raises(ValueError, match=r"image must have dims b c y x with c=1 channels, got shape \("):
        AttentionConvNet(config())(torch.rand(shape))
