"""What a model computed before a layer is replayed: modules before it do not run again."""

import torch
from torch import nn

from regard.lens.edits.replayed_prefix import PrefixRecorder, replay_outputs
from regard.lens.interception.intercept import intercept
from regard.nn import Attention


class Block(nn.Module):
    def __init__(self, writes=False):
        super().__init__()
        self.before, self.attention, self.after = nn.Linear(16, 16), Attention(16, heads=4), nn.Linear(16, 16)
        self.writes, self.calls = writes, 0

    def forward(self, x):
        self.calls += 1
        y = x + self.attention(self.before(x))
        out = y + self.after(y)
        return {"x": out, "calls": [out]}


class Model(nn.Module):
    def __init__(self, writes=False):
        super().__init__()
        self.blocks, self.writes = nn.ModuleList(Block() for _ in range(3)), writes

    def forward(self, x):
        for block in self.blocks:
            x = block(x)["x"]
            if self.writes:
                x += 1
        return x


def recorded(model, x):
    recorder = PrefixRecorder(lambda layer: layer != "blocks.1.attention")
    with torch.no_grad(), intercept(model, recorder), recorder.watch(model):
        out = model(x)
    return recorder, out


def test_a_pass_that_replays_runs_the_rest_alone():
    model, x = Model().eval(), torch.randn(1, 5, 16)
    recorder, out = recorded(model, x)
    assert list(recorder.before) == ["blocks.0.attention", "blocks.2.attention"]
    # Layers without parts in the block of the attention run again rather than be kept.
    assert [call.module for call in recorder.before["blocks.2.attention"]] == [*model.blocks[:2]]
    assert {layer: shape[1] for layer, shape in recorder.shapes.items()} == {
        f"blocks.{n}.attention": 4 for n in range(3)
    }
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with torch.no_grad(), replay_outputs(recorder.before["blocks.2.attention"]):
        assert torch.equal(model(x), out)
    assert [block.calls for block in model.blocks] == [1, 1, 2]
    assert not any("forward" in vars(module) for module in model.modules())
    with torch.no_grad(), replay_outputs(recorder.before["blocks.0.attention"]):
        assert torch.equal(model(x), out)
    assert [block.calls for block in model.blocks] == [2, 2, 3]


def test_an_output_that_the_model_writes_to_later_is_not_replay_outputs():
    model, x = Model(writes=True).eval(), torch.randn(1, 5, 16)
    recorder, out = recorded(model, x)
    with torch.no_grad(), replay_outputs(recorder.before["blocks.2.attention"]):
        assert torch.equal(model(x), out)
    assert [block.calls for block in model.blocks] == [2, 2, 2]


def test_the_forward_of_another_library_comes_back():
    model, x = Model().eval(), torch.randn(1, 5, 16)
    own = model.blocks[0].forward
    model.blocks[0].forward = lambda x: own(x)
    wrapper = model.blocks[0].forward
    recorder, _ = recorded(model, x)
    with torch.no_grad(), replay_outputs(recorder.before["blocks.2.attention"]):
        model(x)
    assert model.blocks[0].forward is wrapper
