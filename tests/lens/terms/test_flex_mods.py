"""The functions of a flex_attention call as masks, biases and caps."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from regard.lens import Tape, capture
from tests.lens.flex_layers import CompiledFlex, FlexLayer, N, blocks, causal, compiled, flex_inputs
from tests.lens.kernel_layers import HEADS, Held, capture_one

pytestmark = pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")

TABLE = torch.linspace(-1, 1, HEADS)


def alibi(score, b, h, i, j):
    return score - 2.0 ** -(h + 1) * (i - j)


def by_head(score, b, h, i, j):
    return score + TABLE[h]


def hiding(score, b, h, i, j):
    return torch.where(i - j < 3, score, -torch.inf)


def capped(score, b, h, i, j):
    return 2.0 * torch.tanh(score / 2.0)


SCATTERED = torch.randn(2, HEADS, N, N, generator=torch.Generator().manual_seed(1))


def scattered(score, b, h, i, j):
    return score + SCATTERED[b, h, i, j]


def in_turn(score, b, h, i, j):
    return score + SCATTERED[b][h][i][j]


MODS = {
    "alibi": (alibi, "Causal()", "Relative"),
    "by head": (by_head, "Causal()", "Relative"),
    "hiding": (hiding, "Causal() & Window(3)", None),
    "capped": (capped, "Causal()", None),
    "scattered": (scattered, "Causal()", "Added"),
    "looked up in turn": (in_turn, "Causal()", "Added"),
}


@pytest.mark.parametrize("mod", MODS)
def test_a_score_mod_is_a_mask_a_bias_or_a_cap(mod):
    function, mask, bias = MODS[mod]
    q, k, v = flex_inputs()
    A, out = capture_one(FlexLayer(score_mod=function, block_mask=blocks()), q, k, v)
    assert repr(A.call.mask) == mask
    assert (None if A.call.bias is None else type(A.call.bias).__name__) == bias
    torch.testing.assert_close(A @ v, out, rtol=1e-4, atol=1e-5)


def test_a_score_mod_that_multiplies_is_not_recorded():
    model = nn.ModuleDict({"one": FlexLayer(score_mod=lambda score, b, h, i, j: score * (1 + h)), "two": FlexLayer()})
    q, k, v = flex_inputs()
    with pytest.warns(UserWarning, match=r"one was not recorded: its score_mod"), capture(model) as tape:
        model["two"](model["one"](q, k, v), k, v)
    assert list(tape) == [("two", 0)]


def both(score, b, h, i, j):
    return capped(score, b, h, i, j) + TABLE[h] * (j - i)


def low(score, b, h, i, j):
    return score + TABLE.bfloat16()[h] * (i - j)


def undefined_ahead(score, b, h, i, j):
    return score + torch.log(1.0 + i - j)


def shut(score, b, h, i, j):
    return torch.where(j <= i, score, -1e9)


@pytest.mark.parametrize("mod", [both, low, undefined_ahead, shut])
def test_score_mods_that_combine_terms_or_add_nan_to_hidden_pairs_are_read(mod):
    q, k, v = flex_inputs()
    A, out = capture_one(FlexLayer(score_mod=mod, block_mask=None if mod is shut else blocks()), q, k, v)
    torch.testing.assert_close(A @ v, out, rtol=1e-4, atol=1e-5)


def clamped(score, b, h, i, j):
    return score.clamp(-10, 10)


def one_row(score, b, h, i, j):
    return torch.where(i == 3, 3 * score, score)


@pytest.mark.parametrize("mod", [clamped, one_row])
def test_a_score_mod_that_adds_on_most_pairs_only_is_not_recorded(mod):
    model = nn.ModuleDict({"one": FlexLayer(score_mod=mod), "two": FlexLayer()})
    q, k, v = flex_inputs(n=40, m=40)
    with pytest.warns(UserWarning, match=r"one was not recorded: its score_mod"), capture(model) as tape:
        model["two"](model["one"](q, k, v), k, v)
    assert list(tape) == [("two", 0)]


def test_a_mask_mod_whose_tensor_changed_is_read_again():
    lengths = torch.tensor([4])
    layer, (q, k, v) = CompiledFlex(block_mask=blocks(lambda b, h, i, j: j < lengths[0])), flex_inputs()
    with capture(layer) as tape:
        for length in (4, 7):
            lengths.fill_(length)
            torch.testing.assert_close(layer(q, k, v), tape[-1] @ v)


SIZE = 16


def skipping(q, k, v, block_mask, call=flex_attention):
    """As a fused kernel, which leaves out the blocks that are not listed; flex_attention on a CPU does not."""
    return call(q, k, v, block_mask=blocks(lambda b, h, i, j: (j <= i) & (i // SIZE == j // SIZE), n=q.shape[2]))


skipping._torchdynamo_orig_callable = flex_attention  # as if it were compiled


@pytest.mark.parametrize("kernel", [skipping, pytest.param(compiled, marks=pytest.mark.compiled)])
def test_blocks_that_a_kernel_skips_are_hidden(kernel):
    count, places = torch.ones(1, 1, 4, dtype=torch.int32), torch.arange(4, dtype=torch.int32).view(1, 1, 4, 1)
    mask = BlockMask.from_kv_blocks(count, places.expand(1, 1, 4, 4).contiguous(), BLOCK_SIZE=SIZE, mask_mod=causal)
    q, k, v = flex_inputs(n=4 * SIZE, m=4 * SIZE)
    A, out = capture_one(Held(kernel, block_mask=mask), q, k, v)
    torch.testing.assert_close(A @ v, out)


def test_a_saved_tape_holds_its_terms(tmp_path):
    q, k, v = flex_inputs()
    layer = FlexLayer(score_mod=alibi, block_mask=blocks())
    with capture(layer) as tape:
        out = layer(q, k, v)
    tape.save(tmp_path / "tape.safetensors")
    ((_, A),) = Tape.load(tmp_path / "tape.safetensors").items()
    torch.testing.assert_close(A @ v, out, rtol=1e-4, atol=1e-5)
