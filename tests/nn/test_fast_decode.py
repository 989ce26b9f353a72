"""Fast steps compute what the modules do, token by token; None wherever modules must run."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard import Alibi, Causal, Dilated, Sigmoid, Window
from regard.nn import (
    Attention,
    DecoderBlock,
    EncoderBlock,
    FeedForward,
    GatedFeedForward,
    LearnedDot,
    PackedLengths,
    PostNorm,
    PreNorm,
    RMSNorm,
    Rotary,
    fast_decode,
)
from regard.nn.fast_decode import FastSteps

DIM, ROWS, TOKENS = 12, 5, 7


@pytest.fixture(autouse=True)
def without_gradients():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def attention_of(*, heads=3, mask=Causal(), **options):  # noqa: B008
    return Attention(DIM, heads=heads, mask=mask, **options)


def encoder(feedforward=None, *, around=None, **options):
    block = EncoderBlock(attention_of(**options), feedforward or FeedForward(DIM, 20), **(around or {}))
    return randomized(block)


def decoder(cross=None, **options):
    cross = Attention(DIM, heads=3, **(cross or {}))
    return randomized(DecoderBlock(attention_of(**options), cross, FeedForward(DIM, 20, activation=F.silu)))


def randomized(block):
    for parameter in block.parameters():
        parameter.normal_(std=0.5)
    return block.double().eval()


ENCODERS = {
    "as GPT-2": encoder,
    "as Llama": partial(
        encoder, GatedFeedForward(DIM, 10), around={"norm": RMSNorm}, heads=6, kv_heads=2, biased="", rotary=Rotary(2)
    ),
    "after the norm": partial(encoder, around={"residual": PostNorm}),
    "normed queries and keys": partial(encoder, qk_norm=RMSNorm),
    "wide heads": partial(encoder, head_dim=5),
    "one key head": partial(encoder, kv_heads=1),
    "a bias for some": partial(encoder, biased="vo"),
    "a window": partial(encoder, mask=Causal() & Window(3)),
    "another feed-forward": partial(encoder, nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh())),
    "a norm without weights": partial(encoder, around={"norm": partial(nn.LayerNorm, elementwise_affine=False)}),
}


@pytest.mark.parametrize("make", ENCODERS.values(), ids=ENCODERS)
def test_a_token_at_a_time_equals_the_whole_pass(make):
    block = make()
    x, cache, fast = torch.randn(ROWS, TOKENS, DIM, dtype=torch.double), block.attention.new_cache(), FastSteps([block])
    steps = [fast.steps()[0](x[:, n : n + 1], cache=cache) for n in range(TOKENS)]
    torch.testing.assert_close(torch.cat(steps, 1), block(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("per_call", [fast_decode.HIDDEN_PER_CALL, 0])
@pytest.mark.parametrize("name", ["as GPT-2", "as Llama", "a window", "one key head"])
def test_rows_of_different_lengths_go_on_as_if_each_stood_alone(name, per_call, monkeypatch):
    monkeypatch.setattr(fast_decode, "HIDDEN_PER_CALL", per_call)  # 0: one call of the kernel for each row
    block, packed = ENCODERS[name](), PackedLengths(torch.tensor([5, 2, 0, 1, 7]))
    texts = torch.randn(1, 15, DIM, dtype=torch.double)
    x, cache = torch.randn(ROWS, TOKENS, DIM, dtype=torch.double), block.attention.new_cache()
    block(texts, cache=cache.prompts(packed))
    (step,) = FastSteps([block]).steps()
    steps = torch.cat([step(x[:, n : n + 1], cache=cache) for n in range(TOKENS)], 1)
    for row, text in enumerate(texts[0].split(packed.lengths)):
        alone = block(torch.cat((text, x[row]))[None])[0, -TOKENS:]
        torch.testing.assert_close(steps[row], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("padding", [None, torch.tensor([4, 1]), torch.arange(4) < torch.tensor([[2], [4]])])
@pytest.mark.parametrize("each", [1, 3])
@pytest.mark.parametrize("cross", [{}, {"kv_heads": 1, "qk_norm": RMSNorm}])
def test_rows_stand_side_by_side_before_their_source(each, padding, cross):
    block, sources = decoder(cross), torch.randn(2, 4, DIM, dtype=torch.double)
    x, cache = torch.randn(2 * each, TOKENS, DIM, dtype=torch.double), block.attention.new_cache()
    source = block.remember(sources, context_keep=padding)
    (step,) = FastSteps([block]).steps()
    steps = torch.cat([step(x[:, n : n + 1], source, cache=cache) for n in range(TOKENS)], 1)
    rows = torch.arange(2).repeat_interleave(each)
    whole = block(x, sources[rows], context_keep=None if padding is None else padding[rows])
    torch.testing.assert_close(steps, whole, rtol=0, atol=1e-12)


class Other(Attention):
    pass


UNLIKE = {
    "a bias": partial(encoder, bias=Alibi(3)),
    "a learned score": partial(encoder, score=LearnedDot(3, scale=0.1)),
    "another normalizer": partial(encoder, normalize=Sigmoid()),
    "slots": partial(encoder, slots=2),
    "gaps in its mask": partial(encoder, mask=Causal() & Dilated(3, 2)),
    "no mask": partial(encoder, mask=None),
    "values of another width": partial(encoder, value_dim=3),
    "another attention": lambda: randomized(EncoderBlock(Other(DIM, heads=3, mask=Causal()), FeedForward(DIM, 20))),
    "a mask over the source": partial(decoder, {"mask": Window(2)}),
    "another block": lambda: nn.Identity().eval(),
    "another residual": partial(encoder, around={"residual": type("Mine", (PreNorm,), {})}),
}


@pytest.mark.parametrize("make", UNLIKE.values(), ids=UNLIKE)
def test_a_block_that_is_not_plain_is_left_to_its_modules(make):
    assert FastSteps([encoder(), make()]).steps() is None


def test_gradients_dropout_and_autocast_are_left_to_the_modules():
    block, seen = encoder(), []
    fast = FastSteps([block])
    with torch.enable_grad():
        seen.append(fast.steps())
    with torch.autocast("cpu"):
        seen.append(fast.steps())
    seen.append(FastSteps([block.train()]).steps())
    seen.append(fast.steps())
    block.eval().around_attention.dropout.train()
    seen.append(FastSteps([block]).steps())
    assert seen == [None] * 5
    assert FastSteps([block.eval()]).steps() is not None


@pytest.mark.parametrize("name", ["attention", "around_feedforward.dropout"])
def test_a_part_that_begins_to_train_is_left_to_the_modules(name):
    block = encoder()
    fast = FastSteps([block])
    assert fast.steps() is not None
    block.get_submodule(name).train()
    assert fast.steps() is None
    block.eval()
    assert fast.steps() is not None


@pytest.mark.parametrize("name", ["", "attention.core", "attention.query", "around_feedforward.norm"])
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_is_always_called(name, kind):
    block, calls = encoder(), []
    fast = FastSteps([encoder(), block])
    assert fast.steps() is not None
    handle = getattr(block.get_submodule(name), kind)(lambda *given: calls.append(1))
    assert fast.steps() is None
    assert fast.steps() is None
    handle.remove()
    assert fast.steps() is not None


def test_a_hook_on_all_modules_is_always_called():
    fast = FastSteps([encoder()])
    assert fast.steps() is not None
    handle = nn.modules.module.register_module_forward_hook(lambda *given: None)
    try:
        assert fast.steps() is None
    finally:
        handle.remove()
    assert fast.steps() is not None


def test_weights_that_change_in_place_are_seen():
    block, x = encoder(), torch.randn(ROWS, 1, DIM, dtype=torch.double)
    fast = FastSteps([block])
    first = fast.steps()[0](x, cache=block.attention.new_cache())
    for parameter in block.parameters():
        parameter.mul_(1.5)
    second = fast.steps()[0](x, cache=block.attention.new_cache())
    assert not torch.allclose(first, second)
    torch.testing.assert_close(second, block(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["attention", "attention.core", "attention.out", "feedforward", "feedforward.up"])
def test_a_replaced_forward_is_always_called(name):
    block = encoder()
    fast, module = FastSteps([encoder(), block]), block.get_submodule(name)
    assert fast.steps() is not None
    module.forward = lambda *given, **told: type(module).forward(module, *given, **told) * 0
    assert fast.steps() is None
    assert FastSteps([block]).steps() is None
    del module.forward
    assert fast.steps() is not None


def replace_each(block, other):
    for name, parameter in other.named_parameters():
        at, _, own = name.rpartition(".")
        setattr(block.get_submodule(at), own, nn.Parameter(parameter.clone()))


REPLACED = {
    "each parameter": replace_each,
    "a state assigned": lambda block, other: block.load_state_dict(other.state_dict(), assign=True),
    "a part": lambda block, other: setattr(block, "attention", other.attention),
    "a part of a part": lambda block, other: setattr(block.feedforward, "up", other.feedforward.up),
}


@pytest.mark.parametrize("replace", REPLACED.values(), ids=REPLACED)
def test_weights_and_parts_that_are_replaced_are_seen(replace):
    block, x = encoder(), torch.randn(ROWS, 1, DIM, dtype=torch.double)
    fast = FastSteps([block])
    first = fast.steps()[0](x, cache=block.attention.new_cache())
    replace(block, encoder())
    second = fast.steps()[0](x, cache=block.attention.new_cache())
    assert not torch.allclose(first, second)
    torch.testing.assert_close(second, block(x), rtol=0, atol=1e-12)


def test_a_block_that_is_replaced_is_seen():
    blocks, x = nn.ModuleList([encoder()]), torch.randn(ROWS, 1, DIM, dtype=torch.double)
    fast = FastSteps(blocks)
    assert fast.steps() is not None
    blocks[0] = encoder()
    found = fast.steps()[0](x, cache=blocks[0].attention.new_cache())
    torch.testing.assert_close(found, blocks[0](x), rtol=0, atol=1e-12)


def test_weights_made_in_inference_mode_are_left_to_the_modules():
    with torch.inference_mode():
        block = encoder()
    assert FastSteps([block]).steps() is None


def test_weights_of_another_kind_are_left_to_the_modules():
    class Quantized(torch.Tensor):
        """A weight that may only be multiplied by."""

    block = encoder()
    assert FastSteps([block]).steps() is not None
    block.attention.key.weight = nn.Parameter(block.attention.key.weight.as_subclass(Quantized))
    assert FastSteps([block]).steps() is None


def test_a_state_of_other_rows_is_refused():
    block = encoder()
    (step,), cache = FastSteps([block]).steps(), block.attention.new_cache()
    step(torch.randn(ROWS, 1, DIM, dtype=torch.double), cache=cache)
    with pytest.raises(ValueError, match=r"holds keys and values with b g d = \(5, 3, 8\)"):
        step(torch.randn(1, 1, DIM, dtype=torch.double), cache=cache)


def test_inference_mode_may_come_first():
    block, x = encoder(), torch.randn(ROWS, 1, DIM, dtype=torch.double)
    fast = FastSteps([block])
    with torch.inference_mode():
        first = fast.steps()[0](x, cache=block.attention.new_cache())
    assert torch.equal(fast.steps()[0](x, cache=block.attention.new_cache()), first)
