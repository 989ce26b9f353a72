"""RoPE scaling: slow turns are divided, fast ones stay; the frequencies of transformers."""

from __future__ import annotations

import pytest
import torch

from regard.models import DynamicStretch, LinearStretch, Stretch, YarnStretch
from regard.nn import Rotary

D = torch.float64


def test_a_stretch_divides_slow_turns_and_leaves_fast_ones():
    frequencies = torch.tensor([1.0, 0.1, 0.01, 1e-5], dtype=D)
    stretched = Stretch(factor=8.0, original=1000)(frequencies)
    torch.testing.assert_close(stretched[:2], frequencies[:2])
    torch.testing.assert_close(stretched[3], frequencies[3] / 8)
    turns = 0.01 * 1000 / (2 * torch.pi)
    share = (turns - 1) / 3
    torch.testing.assert_close(stretched[2], torch.tensor(0.01 * share + 0.01 / 8 * (1 - share), dtype=D))


def test_a_stretch_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"low and high must be 0 < low < high, got low=4.0 and high=1.0"):
        Stretch(factor=2.0, low=4.0, high=1.0)
    with pytest.raises(TypeError, match="low must be a number, got 'x'"):
        Stretch(factor=2.0, low="x")


def theirs(kind, dim, length, seq_len=None, **fields):
    """The frequencies and the amplitude of transformers."""
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig

    rope = {"rope_type": kind, "rope_theta": 5000.0, **fields}
    config = LlamaConfig(
        hidden_size=4 * dim, num_attention_heads=4, max_position_embeddings=length, rope_parameters=rope
    )
    return utils.ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=seq_len)


def plain(dim):
    return 5000.0 ** -(torch.arange(0, dim, 2) / dim)


YARNS = [
    ({"factor": 4.0, "original_max_position_embeddings": 64}, {}),
    (
        {"factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 16.0, "beta_slow": 2.0},
        {"fast": 16.0, "slow": 2.0},
    ),
    ({"factor": 2.0, "original_max_position_embeddings": 128, "truncate": False}, {"truncate": False}),
    ({"factor": 2.0, "original_max_position_embeddings": 8, "attention_factor": 0.7}, {"amplitude": 0.7}),
    ({"factor": 0.5, "original_max_position_embeddings": 9}, {}),
]


@pytest.mark.parametrize("dim", [4, 6, 64])
@pytest.mark.parametrize(("given", "ours"), YARNS, ids=[str(n) for n in range(len(YARNS))])
def test_yarn_has_the_frequencies_of_transformers(given, ours, dim):
    frequencies, amplitude = theirs("yarn", dim, 512, **given)
    yarn = YarnStretch(factor=given["factor"], original=given["original_max_position_embeddings"], **ours)
    torch.testing.assert_close(yarn(plain(dim)), frequencies)
    assert yarn.amplitude == pytest.approx(amplitude)


@pytest.mark.parametrize("seq_len", [3, 16, 17, 100])
def test_dynamic_scaling_has_the_frequencies_of_transformers_for_each_length(seq_len):
    frequencies, _ = theirs("dynamic", 64, 16, seq_len, factor=3.0)
    found = DynamicStretch(factor=3.0, original=16)(plain(64), torch.tensor([seq_len]))
    torch.testing.assert_close(found, frequencies)


def test_linear_scaling_has_the_frequencies_of_transformers():
    torch.testing.assert_close(LinearStretch(factor=3.0)(plain(64)), theirs("linear", 64, 16, factor=3.0)[0])


def test_each_text_of_a_batch_has_its_own_length():
    rotary = Rotary(8, scaling=DynamicStretch(factor=2.0, original=4))
    x, positions = torch.randn(2, 3, 5, 8), torch.stack([torch.arange(5), torch.arange(5) - 2]).clamp(min=0)
    both = rotary(x, positions)
    for row in range(2):
        torch.testing.assert_close(both[row], rotary(x[row, None], positions[row])[0])
    torch.testing.assert_close(both[1], Rotary(8)(x[1, None], positions[1])[0])


def test_yarn_multiplies_queries_and_keys_by_its_amplitude_and_takes_one_pair():
    yarn = YarnStretch(factor=4.0, original=64, amplitude=1.5)
    x = torch.randn(1, 1, 3, 8)
    torch.testing.assert_close(Rotary(8, scaling=yarn)(x, torch.zeros(3, dtype=torch.long)), 1.5 * x)
    torch.testing.assert_close(yarn(torch.ones(1)), torch.tensor([0.25]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinearStretch(factor=0), "factor must be above 0"),
        (lambda: DynamicStretch(factor=0.5, original=4), "factor must be 1 or more, got 0.5"),
        (lambda: DynamicStretch(factor=2.0, original=0), "original must be 1 or more, got 0"),
        (lambda: YarnStretch(factor=2.0, original=8, fast=0), "fast must be above 0"),
        (lambda: YarnStretch(factor=2.0, original=8, amplitude=-1.0), "amplitude must be above 0"),
    ],
)
def test_scalings_that_cannot_be_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
