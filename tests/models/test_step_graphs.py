"""Replayed steps: the tokens of modules, over caches at fixed addresses; and what keeps a model from being recorded.

Without a GPU a stand-in for a CUDA graph runs the same step again, over the same tensors.
"""

import copy
import gc

import pytest
import torch

from regard.decode import Ensemble, Gnmt, beam, greedy, replay_objection, sample
from regard.lens import capture
from regard.models import Gpt, GptConfig, step_graphs
from regard.models.step_graphs import ReplayedState, graphs_of, rounded_length, rounded_rows
from tests.models.test_decoder_state import END, MODELS, START, VOCABULARY, source_of

STEPS = 80  # caches of 64 entries must grow


class Repeated:
    """In place of a CUDA graph: run the function again and copy its result to the address of the first."""

    recorded = 0

    def warm_up(self, run):
        run()

    def record(self, run):
        Repeated.recorded += 1
        result = run()
        return lambda: result.copy_(run()), result


@pytest.fixture
def recorded(monkeypatch):
    Repeated.recorded = 0
    monkeypatch.setattr(step_graphs, "recorder_for", lambda device: Repeated())
    monkeypatch.setattr(step_graphs, "MIN_GROWTH", 16)
    return Repeated


def model_of(kind):
    torch.manual_seed(3)
    model = MODELS[kind]().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
    return model


def long_gpt():
    return Gpt(GptConfig(vocabulary=VOCABULARY, length=200, dim=12, depth=2, heads=3, dropout=0.0))


MODELS = MODELS | {"gpt": long_gpt}


def searches(model, rows, steps, *, end=END):
    """What every search writes, from prompts of different lengths."""
    source, prefix = source_of(model, rows), [[START, *range(2, 2 + row % 3), 5] for row in range(rows)]
    limits = {"end": end, "max_length": steps}
    found = {
        "greedy": greedy(model, source, prefix, **limits),
        "sample": sample(model, source, prefix, seed=1, samples=2, **limits),
        "beam": beam(model, source, prefix, width=3, n_best=2, length=Gnmt(0.6), **limits),
    }
    return {
        name: [one for best in lists for one in (best if isinstance(best, list) else [best])]
        for name, lists in found.items()
    }


def assert_equal(found, expected):
    for name, each in expected.items():
        assert [x.tokens for x in found[name]] == [x.tokens for x in each], name
        for x, y in zip(found[name], each, strict=True):
            assert x.log_probabilities == pytest.approx(y.log_probabilities, abs=1e-9)


@pytest.mark.parametrize(
    ("kind", "end"), [("gpt", END), ("gpt", None), ("llama", END), ("transformer", None), ("untied", END)]
)
def test_replayed_searches_write_what_modules_write(kind, end, recorded, monkeypatch):
    model = model_of(kind)
    found = searches(model, 5, STEPS, end=end)
    assert recorded.recorded
    monkeypatch.undo()
    assert_equal(found, searches(model, 5, STEPS, end=end))


def greedy_tokens(stepper, steps=20):
    return [x.tokens for x in greedy(stepper, None, [[START, 2], [START, 3], [5, 6, 7]], end=None, max_length=steps)]


def test_a_search_replays_one_recording(recorded):
    model = model_of("gpt")
    first = greedy_tokens(model)
    assert recorded.recorded == 1
    assert greedy_tokens(model) == first
    assert recorded.recorded == 1  # the second search had the shape of the first
    (kept,) = graphs_of(model)._free
    assert (kept.rows, kept.shape.space) == (4, 64)  # of three rows and 23 tokens


def test_weights_changed_in_place_or_replaced_are_those_of_the_next_search(recorded, monkeypatch):
    model = model_of("gpt")
    greedy_tokens(model)
    changes = [
        lambda: model.blocks[0].attention.query.weight.data.normal_(),
        lambda: model.blocks[1].attention.value.bias.data.normal_(),
        lambda: model.blocks[0].feedforward.up.weight.mul_(-2),
        lambda: model.blocks[0].attention.key.weight.mul_(-2),
        lambda: setattr(model.blocks[1].feedforward, "down", copy.deepcopy(model.blocks[0].feedforward.down)),
        lambda: setattr(model.norm, "weight", torch.nn.Parameter(torch.randn(12, dtype=torch.double))),
        lambda: model.tokens.table.weight.data.mul_(-1),
        model.float,
        model.double,
    ]
    for change in changes:
        with torch.no_grad():
            change()
        found = greedy_tokens(model)
        with monkeypatch.context() as without:
            without.setattr(step_graphs, "recorder_for", lambda device: None)
            assert greedy_tokens(copy.deepcopy(model)) == found


def test_hooks_see_every_step_and_capture_every_layer(recorded):
    model, seen = model_of("gpt"), []
    expected = greedy_tokens(model)
    handle = model.blocks[1].register_forward_hook(lambda *_: seen.append(1))
    assert replay_objection(model) == "hooks or a function mode watch the model, and a replay calls no module"
    assert greedy_tokens(model) == expected
    assert len(seen) >= 20
    handle.remove()
    assert replay_objection(model) is None
    with capture(model) as tape:
        greedy(model, None, [[START, 2], [START, 3]], end=None, max_length=20)
    assert tape[0].shape == (2, 3, 21, 21)


@torch.no_grad()
def test_a_search_goes_on_with_modules_when_a_hook_comes_or_rows_repeat(recorded):
    model, seen = model_of("llama"), []
    ids = torch.randint(2, VOCABULARY, (3, 30))
    whole = model(ids)
    state = model.replay_steps(model.start(ids[:, :5]), 99)
    assert isinstance(state, ReplayedState)
    for n in range(5, 9):
        logits, state = model.step(ids[:, n], state)
        torch.testing.assert_close(logits, whole[:, n], rtol=0, atol=1e-10)
    rows = torch.tensor([2, 2, 0, 1, 1, 1])
    more = state.select(rows)  # more rows than were recorded
    assert not isinstance(more, ReplayedState)
    assert more.rows == 6
    torch.testing.assert_close(model.step(ids[rows, 9], more)[0], whole[rows, 9], rtol=0, atol=1e-10)

    state = model.replay_steps(model.start((ids[:, :5], torch.tensor([5, 5, 5]))), 99)
    _, state = model.step(ids[:, 5], state)
    state = state.select(torch.tensor([2, 0])).select(torch.tensor([1]))
    handle = model.blocks[0].register_forward_hook(lambda *_: seen.append(1))
    logits, state = model.step(ids[:1, 6], state)
    assert seen
    assert not isinstance(state, ReplayedState)
    torch.testing.assert_close(logits, whole[:1, 6], rtol=0, atol=1e-10)
    handle.remove()


@torch.no_grad()
def test_a_state_that_was_overwritten_raises(recorded):
    model, one = model_of("gpt"), torch.tensor([3])
    state = model.replay_steps(model.start(torch.tensor([[1, 2]])), 99)
    after = model.step(one, state)[1]
    for use in (lambda: model.step(one, state), lambda: state.select(torch.tensor([0]))):
        with pytest.raises(RuntimeError, match="this state was overwritten by a later step of its search"):
            use()
    with pytest.raises(ValueError, match="tokens must be one for each of the 1 rows of the state, got 2"):
        model.step(torch.tensor([3, 4]), after)
    assert model.step(one, after)[0].shape == (1, VOCABULARY)


def test_two_searches_at_once_have_a_recording_each(recorded):
    model = model_of("gpt")
    assert greedy_tokens(Ensemble([model, model])) == greedy_tokens(model)
    assert len(graphs_of(model)._free) == 2
    assert replay_objection(Ensemble([model, model])) is None


def test_a_recording_that_fails_is_said_and_modules_run(recorded, monkeypatch):
    model = model_of("gpt")
    expected = greedy_tokens(copy.deepcopy(model))

    def fail(self, run):
        raise RuntimeError("operation not permitted when stream is capturing\nmore lines")

    monkeypatch.setattr(Repeated, "record", fail)
    with pytest.warns(RuntimeWarning, match="decoding without CUDA graphs: recording failed: operation not permitted"):
        assert greedy_tokens(model) == expected
    assert replay_objection(model) == "recording failed: operation not permitted when stream is capturing"
    assert greedy_tokens(model) == expected  # without another warning


class Noted(torch.nn.Module):
    """A module of a user, which may do more than compute."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner.eval()
        self.eval()

    def forward(self, x):
        return self.inner(x)


def test_objections_name_the_reason(recorded, monkeypatch):
    model = model_of("gpt")
    assert replay_objection(model) is None
    assert replay_objection(object()) == "object has no replay_steps(state, steps)"
    assert replay_objection(model.watched("self.0")) == "Watched has no replay_steps(state, steps)"
    assert replay_objection(model.train()) == "the model is in training mode; call model.eval()"
    with torch.autocast("cpu", torch.bfloat16):
        assert replay_objection(model.eval()).startswith("autocast is on, or a block does more than softmax")
    model.blocks[1].feedforward = Noted(model.blocks[1].feedforward)
    assert replay_objection(model) == "Noted is no module of PyTorch or regard, and a replay would not call it"
    monkeypatch.undo()
    assert replay_objection(model) == "the model is on cpu, and only steps on a CUDA device are recorded"


def test_a_model_is_copied_saved_and_freed_without_its_recordings(recorded, tmp_path):
    model = model_of("gpt")
    greedy_tokens(model)
    torch.save(copy.deepcopy(model), tmp_path / "model.pt")
    gc.collect()
    before = len(step_graphs._graphs)
    del model
    gc.collect()
    assert len(step_graphs._graphs) == before - 1


def test_recordings_beyond_the_limits_are_dropped(recorded, monkeypatch):
    model = model_of("gpt")
    for rows in (1, 2, 4):
        greedy(model, None, [[START, 2]] * rows, end=None, max_length=9)
    assert [each.rows for each in graphs_of(model)._free] == [1, 2, 4]
    monkeypatch.setattr(step_graphs, "MAX_KEPT", 2)
    greedy(model, None, [[START, 2]], end=None, max_length=9)
    assert [each.rows for each in graphs_of(model)._free] == [4, 1]
    monkeypatch.setattr(step_graphs, "MAX_KEPT_BYTES", 0)
    greedy(model, None, [[START, 2]], end=None, max_length=9)
    assert not graphs_of(model)._free


def test_positions_beyond_the_table_raise_as_modules_do(recorded):
    with pytest.raises(ValueError, match="positions must be from 0 to 199, got 200"):
        greedy(model_of("gpt"), None, [[START] * 190], end=None, max_length=20)


def test_shapes_are_rounded_to_few():
    assert [rounded_rows(n) for n in (1, 2, 3, 33, 64, 65, 130)] == [1, 2, 4, 64, 64, 128, 192]
    assert [rounded_length(n) for n in (1, 64, 65, 96, 97, 129, 200, 1152)] == [64, 64, 96, 96, 128, 192, 256, 1536]


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.gpu
@cuda
@pytest.mark.parametrize("kind", MODELS)
def test_cuda_graphs_write_what_modules_write(kind, monkeypatch):
    model = model_of(kind).cuda()
    assert replay_objection(model) is None
    found = searches(model, 5, STEPS, end=None)
    assert graphs_of(getattr(model, "decoder", model))._free
    monkeypatch.setattr(step_graphs, "recorder_for", lambda device: None)
    assert_equal(found, searches(model, 5, STEPS, end=None))


@pytest.mark.gpu
@cuda
def test_a_graph_that_cannot_be_recorded_leaves_the_model_usable(monkeypatch):
    model = model_of("gpt").cuda()
    expected = greedy_tokens(model)
    logits = Gpt.logits

    def waits(self, hidden):
        y = logits(self, hidden)
        return y + (y.sum().item() * 0 if y.shape[1] == 1 else 0)

    monkeypatch.setattr(Gpt, "logits", waits)
    step_graphs._graphs.clear()
    stream = torch.cuda.current_stream()
    with pytest.warns(RuntimeWarning, match="decoding without CUDA graphs: recording failed"):
        assert greedy_tokens(model) == expected
    assert torch.cuda.current_stream() == stream
    monkeypatch.undo()
    step_graphs._graphs.clear()
    assert greedy_tokens(model) == expected
    assert replay_objection(model) is None


@pytest.mark.gpu
@cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cuda_graphs_are_as_close_to_float64_as_modules(dtype):
    exact = model_of("llama").cuda()
    model = copy.deepcopy(exact).to(dtype)
    ids = torch.randint(2, VOCABULARY, (4, 40), device="cuda")
    with torch.no_grad():
        rounded = copy.deepcopy(model).double()
        want, eager, state = rounded(ids), model.start(ids[:, :3]), model.replay_steps(model.start(ids[:, :3]), 99)
        assert isinstance(state, ReplayedState)
        errors = [0.0, 0.0]
        for n in range(3, 40):
            for which, start in enumerate((eager, state)):
                got, after = model.step(ids[:, n], start)
                errors[which] = max(errors[which], (got.double() - want[:, n]).abs().max().item())
                eager, state = (after, state) if which == 0 else (eager, after)
    assert errors[1] <= 2 * errors[0]


def test_a_search_whose_rows_cannot_be_recorded_goes_on_with_modules(recorded, monkeypatch):
    model = model_of("gpt")
    expected = [x.tokens for (x,) in beam(copy.deepcopy(model), None, [[START, 2]], width=3, end=None, max_length=20)]
    record = step_graphs.RecordedStep.record

    def fail(self, *, reorder):
        if reorder:
            raise RuntimeError("no memory")
        record(self, reorder=reorder)

    monkeypatch.setattr(step_graphs.RecordedStep, "record", fail)
    with pytest.warns(RuntimeWarning, match="decoding without CUDA graphs: recording failed: no memory"):
        found = beam(model, None, [[START, 2]], width=3, end=None, max_length=20)
    assert [x.tokens for (x,) in found] == expected
