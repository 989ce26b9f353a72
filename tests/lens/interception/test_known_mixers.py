"""Known mixers without attention weights: those that ran are listed as unseen, by class name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from regard.lens import CaptureWarning, capture
from regard.lens.interception.known_mixers import KNOWN, known_mixer
from regard.nn import Attention

DIM = 8


class Mix(nn.Module):
    """Mixes positions by a running mean."""

    def forward(self, x):
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


def named(name, file="somewhere.layers", base=Mix, **methods):
    return type(name, (base,), {"__module__": file, **methods})


CLASSES = [
    ("delta rule", "Qwen3NextGatedDeltaNet", ""),
    ("delta rule", "KimiDeltaAttention", ""),
    ("state space", "MambaMixer", ""),
    ("state space", "Mamba2", "mamba_ssm.modules.mamba2"),
    ("state space", "S4Block", ""),
    ("state space", "HyenaOperator", ""),
    ("linear recurrence", "RwkvSelfAttention", ""),
    ("linear recurrence", "RWKV_Tmix_x070", ""),
    ("linear recurrence", "RecurrentGemmaRglru", ""),
    ("linear recurrence", "mLSTMLayer", ""),
    ("retention", "MultiScaleRetention", "fla.layers.multiscale_retention"),
    ("linear attention", "LinearAttention", "denoising_diffusion_pytorch"),
    ("linear attention", "MobileViTV2LinearSelfAttention", ""),
    ("linear attention", "FastAttention", "performer_pytorch.performer_pytorch"),
    ("linear attention", "GatedLinearAttention", "fla.layers.gla"),
    ("linear attention", "BasedAttention", "fla.layers.based"),
    ("linear attention", "LambdaLayer", "timm.layers.lambda_layer"),
    ("deformable attention", "MSDeformAttn", "ultralytics.nn.modules.transformer"),
    ("deformable attention", "MultiScaleDeformableAttention", "mmcv.ops"),
    ("graph attention", "GATConv", "torch_geometric.nn.conv.gat_conv"),
    ("graph attention", "GATv2Conv", ""),
    ("graph attention", "TransformerConv", ""),
    ("graph attention", "HGTConv", ""),
    ("Fourier mixing", "FNetBasicFourierTransform", ""),
    ("Fourier mixing", "AFNO2D", ""),
    ("autocorrelation", "AutoformerAttention", ""),
    ("hashed attention", "LSHSelfAttention", ""),
    ("low-rank attention", "NystromAttention", ""),
    ("token-mixing MLP", "MixerBlock", "timm.models.mlp_mixer"),
    ("gated convolution", "Lfm2ShortConv", ""),
    ("gated convolution", "InklingShortConvolution", ""),
]


@pytest.mark.parametrize(("kind", "name", "file"), CLASSES)
def test_a_class_is_known_by_its_name_and_module(kind, name, file):
    assert known_mixer(named(name, file or "somewhere")).kind == kind


def test_every_kind_of_the_table_has_a_class_here():
    assert {kind for kind, _, _ in CLASSES} == {known.kind for known in KNOWN}


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("MambaRMSNormGated", ""),
        ("JambaMambaDecoderLayer", ""),
        ("RwkvFeedForward", ""),
        ("MambaForCausalLM", ""),
        ("LlamaAttention", ""),
        ("Linear", ""),
        ("LambdaLayer", "somewhere.wrappers"),
        ("MixerBlock", "audio.mixing"),
        ("Attention", "fla.layers.attn"),
        ("GroupedQueryAttention", ""),
    ],
)
def test_other_classes_are_not_taken_for_mixers(name, file):
    assert known_mixer(named(name, file or "somewhere")) is None


def test_a_class_derived_from_a_known_one_is_known():
    assert known_mixer(named("Mine", base=named("MambaMixer"))).kind == "state space"


class Model(nn.Module):
    """A mixer, an attention, and a mixer that never runs."""

    def __init__(self, mixer):
        super().__init__()
        self.mixer, self.attention, self.spare = mixer, Attention(DIM, heads=2), named("MambaMixer")()

    def forward(self, x):
        return self.attention(self.mixer(x))


def test_a_known_mixer_that_ran_is_unseen():
    model = Model(named("MambaMixer")()).eval()
    with pytest.warns(UserWarning, match="^mixer was not recorded: a state space layer"), capture(model) as tape:
        model(torch.randn(2, 5, DIM))
    assert [(each.layer, each.kind) for each in tape.unseen] == [("mixer", "state space")]


def test_a_known_class_that_is_recorded_after_all_is_not_unseen():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Attention(DIM, heads=2)

        def forward(self, x):
            return self.inner(x)

    model = Model(named("LinearAttention", base=Holder)()).eval()
    with capture(model) as tape:
        model(torch.randn(2, 5, DIM))
    assert tape.unseen == []


def test_of_nested_mixers_the_inner_one_is_named():
    model = Model(nn.Sequential(named("GATLayer", base=nn.Sequential)(named("GATConv")()))).eval()
    with pytest.warns(UserWarning, match="^mixer.0.0 was not recorded"), capture(model) as tape:
        model(torch.randn(2, 5, DIM))
    assert [each.layer for each in tape.unseen] == ["mixer.0.0"]


def test_layers_that_are_not_wanted_are_left_out():
    model = Model(named("MambaMixer")()).eval()
    with capture(model, layers="attention") as tape:
        model(torch.randn(2, 5, DIM))
    assert tape.unseen == []


def test_a_model_of_known_mixers_alone_is_refused_with_the_reason():
    model = named("MambaMixer")()
    refused = pytest.raises(
        ValueError, match=r"no attention of MambaMixer was recorded: \(model\) was not recorded: a "
    )
    with refused, capture(model):
        model(torch.randn(2, 5, DIM))


def test_the_hooks_are_gone_after_the_block():
    model = Model(named("MambaMixer")()).eval()
    with pytest.warns(CaptureWarning, match="mixer"), capture(model):
        model(torch.randn(2, 5, DIM))
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_qwen3_next_names_its_three_gated_delta_nets():
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "Qwen3NextConfig"):
        pytest.skip("this version of transformers has no Qwen3-Next")
    sizes = {f"linear_{axis}": n for axis, n in {"num_value_heads": 4, "num_key_heads": 2, "key_head_dim": 8}.items()}
    config = transformers.Qwen3NextConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_value_head_dim=8,
        **sizes,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )
    torch.manual_seed(0)
    model, ids = transformers.Qwen3NextModel(config).eval(), torch.randint(0, 99, (2, 9))
    with torch.no_grad():
        plain = model(ids)[0]
        with pytest.warns(UserWarning, match="the delta rule keeps a state"), capture(model) as tape:
            out = model(ids)[0]
    assert torch.equal(plain, out)
    assert tape.layers == ["layers.3.self_attn"]
    assert [each.layer for each in tape.unseen] == [f"layers.{n}.linear_attn" for n in range(3)]
    assert {each.kind for each in tape.unseen} == {"delta rule"}
