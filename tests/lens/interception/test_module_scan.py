"""The code of a class says whether it can attend, before it runs."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as aliased

from regard.lens.interception.module_scan import attends, attends_aside, is_an_attention, may_attend, multiplies
from regard.nn.core import Core


class BySign(nn.Module):
    def forward(self, q, k, v):
        return nn.Softmax(-1)(q @ k.mT) @ v


class ByParts(nn.Module):
    def forward(self, q, k, v):
        return self.matmul_qkv(self.softmax(self.matmul_qk(q, k)), v)


class Inherits(BySign):
    """A layer without code of its own."""


class Scales(nn.Module):
    def forward(self, q, k):
        return q @ k.mT * self.softmax_scale


@pytest.mark.parametrize(("kind", "does"), [(BySign, True), (ByParts, True), (Inherits, True), (Scales, False)])
def test_code_with_a_softmax_and_a_product_multiplies(kind, does):
    assert multiplies(kind) is does


def test_a_file_of_transformers_that_calls_the_kernel_itself_may_attend():
    hf = pytest.importorskip("transformers")
    for model in (hf.SamModel, hf.LlamaModel):  # which are imported here
        assert may_attend(model) == (model is hf.SamModel)
    assert may_attend(torch.nn.MultiheadAttention)
    assert not may_attend(torch.nn.ModuleList)


def test_a_file_of_transformers_that_calls_multi_head_attention_may_attend():
    wavlm = pytest.importorskip("transformers.models.wavlm.modeling_wavlm")
    assert may_attend(wavlm.WavLMAttention)


class Attends(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


class ByAlias(nn.Module):
    def forward(self, x):
        return aliased(x, x, x)


class AttendsAside(nn.Module):
    def encode(self, x):
        return F.scaled_dot_product_attention(x, x, x)

    def forward(self, x):
        return self.encode(x)


class Quiet(nn.Module):
    def forward(self, x):
        return x


class OwnAttention(BySign):
    """Says attention in its name."""


@pytest.mark.parametrize(
    ("kind", "does"),
    [
        (Attends, True),
        (ByAlias, True),
        (AttendsAside, True),
        (nn.MultiheadAttention, True),
        (Core, True),
        (Quiet, False),
        (nn.Linear, False),
    ],
)
def test_code_that_names_an_attention_function_attends(kind, does):
    assert attends(kind) is does


@pytest.mark.parametrize(("kind", "does"), [(AttendsAside, True), (Attends, False), (Quiet, False)])
def test_a_method_beside_forward_may_attend(kind, does):
    assert attends_aside(kind) is does


def test_a_class_without_source_does_not_attend_aside():
    made = {}
    exec("from torch import nn\nclass Made(nn.Module):\n    def encode(self, x): return attend(x)", made)
    assert not attends_aside(made["Made"])


@pytest.mark.parametrize(("kind", "is_one"), [(OwnAttention, True), (BySign, False), (Attends, False)])
def test_an_attention_by_name_has_a_softmax_and_a_product(kind, is_one):
    assert is_an_attention(kind) is is_one


def test_a_class_outside_of_transformers_may_always_attend():
    assert may_attend(Quiet)
    assert not may_attend(nn.ModuleDict)
