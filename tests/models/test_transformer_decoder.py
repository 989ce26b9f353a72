"""TransformerDecoder: hypotheses share the keys of their source, and its attention can be watched."""

import pytest
import torch

from tests.models.generator_checks import B, begun, decoded_attention_is_that_of_the_hypotheses, logits_of, pairs
from tests.models.small_transformer import model_of


@torch.no_grad()
def test_beams_share_the_keys_of_their_source():
    model, batch = model_of("pre"), pairs()
    state = model.start(batch)
    spread = state.select(torch.arange(B).repeat_interleave(4))
    assert spread.each == 4
    assert all(a is b for a, b in zip(spread.source, state.source, strict=True))
    fewer = spread.select(torch.tensor([1, 0, 3, 3, 16, 17, 17, 19]))
    assert [len(one.k) for one in fewer.source] == [2, 2]
    torch.testing.assert_close(fewer.source[0].k, state.source[0].k[[0, 4]])


@pytest.mark.parametrize("name", ["cross.0", "cross.1", "self.1"])
@pytest.mark.parametrize("kind", ["pre", "post", "rotary"])
def test_attention_follows_the_hypotheses_of_a_beam(kind, name):
    decoded_attention_is_that_of_the_hypotheses(
        model_of(kind).watched("cross.0", "cross.1", "self.1"), pairs(), name, B
    )


@torch.no_grad()
def test_watched_attention_is_that_of_the_layers():
    model, batch = model_of("post"), pairs()
    inputs = begun(batch["target"])
    seen = {}
    for n, block in enumerate(model.decoder.blocks):
        for kind, layer in (("self", block.attention), ("cross", block.cross)):
            hook = _note(seen, f"{kind}.{n}", layer)
            layer.register_forward_pre_hook(hook, with_kwargs=True)
    logits_of(model, batch)
    whole = dict(seen)
    stepper = model.watched("self.0", "self.1", "cross.0", "cross.1")
    _, state = stepper.step(inputs, stepper.start(batch))
    assert state.attention.keys() == whole.keys()
    for name, A in state.attention.items():
        torch.testing.assert_close(A, whole[name])
    assert set(model.watched().start(batch).watch) == {"cross.0", "cross.1"}


def _note(seen, name, layer):
    def hook(_, args, kwargs):
        kwargs = {key: x for key, x in kwargs.items() if x is not None and key != "cache"}
        context = args[1:2] if len(args) > 1 and args[1] is not None else ()
        if not context or torch.is_tensor(context[0]):
            seen.setdefault(name, layer.weights(args[0], *context, **kwargs)[...])

    return hook


def test_watching_what_is_not_there_raises():
    with pytest.raises(
        ValueError, match=r"no attention is named 'cross.2'; pass one of cross.0, cross.1, self.0, self.1"
    ):
        model_of("pre").watched("cross.2")
