"""The numbers of heads over training steps: those of the dense matrices, in every loop, with files that resume."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from regard.lens import CaptureWarning, HeadHistory, Monitor, capture
from regard.lens.monitoring.head_history import EVENTS, TABLE, TENSORS
from regard.nn import Attention
from regard.train import Constant, Recipe, Shuffled, Silence, Stopped, fit
from tests.cli.commands import well
from tests.lens.monitoring.watched_model import HEADS, Watched, batches

ALL = ("logit", "entropy", "max", "distance", "sink", "received")


def sgd_step(model, optimizer, *parts):
    for tokens in parts:
        (model.loss(tokens) / len(parts)).backward()
    optimizer.step()
    optimizer.zero_grad()


def watched(every=1, parts=1, **options):
    """The history of three steps in a plain loop."""
    model = Watched()
    optimizer, monitor = torch.optim.SGD(model.parameters(), 0.1), Monitor(model, every=every, **options)
    for n in range(3):
        with monitor:
            sgd_step(model, optimizer, *batches()[n * parts : (n + 1) * parts])
    return monitor.history


def same(one, other, **tolerance):
    assert one.steps == other.steps
    for name in one.measures:
        torch.testing.assert_close(one[name], other[name], **tolerance)


def expected(A, real):
    """The numbers of a layer from its dense matrix, row by row."""
    rows = [A[b, :, i] for b, i in real.nonzero().tolist()]  # h j each
    entropies = torch.stack([-torch.special.xlogy(row, row).sum(-1) for row in rows])
    n = real.sum(1).double()
    share = torch.stack([A[b, :, real[b]].sum(1) / n[b] for b in range(len(A))])  # b h j
    sinks = torch.where(share > 0.3, share, 0.0).sum(-1)
    return {
        "entropy": entropies.mean(0),
        "max": torch.stack([row.amax(-1) for row in rows]).mean(0),
        "sink": (sinks * n[:, None]).sum(0) / n.sum(),
        "received": (share.amax(-1) * n[:, None]).sum(0) / n.sum(),
    }


def test_the_numbers_are_those_of_the_dense_matrices_without_padding():
    model, tokens = Watched(), batches()[0]
    monitor = Monitor(model, measures=ALL)
    with monitor, capture(model) as tape:
        model.loss(tokens).backward()
    assert monitor.history.layers == ["layers.0", "layers.1"]
    for layer in monitor.history.layers:
        A, real = tape[layer].dense().double(), tokens != 0
        scores = tape[layer].scores.dense().double().amax(-1)
        found = {name: monitor.history.latest(name, layer).double() for name in ALL}
        logit = scores.masked_fill(~real[:, None], -math.inf).amax((0, 2))
        torch.testing.assert_close(found["logit"], logit, atol=1e-5, rtol=1e-5)
        for name, value in expected(A, real).items():
            torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-5, msg=name)


def test_a_step_of_several_passes_has_the_numbers_of_the_joined_batch():
    model = Watched()
    split, joined = Monitor(model, measures=ALL), Monitor(model, measures=ALL)
    with split:
        for tokens in batches()[:3]:
            model(tokens)
    with joined:
        model(torch.cat(batches()[:3]))
    same(split.history, joined.history, atol=1e-6, rtol=1e-6)


def test_numbers_are_tallied_when_a_pass_ends_and_the_measures_of_rows_are_released():
    model = Watched()
    monitor = Monitor(model)
    with monitor:
        for n, tokens in enumerate(batches()[:2], start=1):
            model(tokens)
            entries = [*monitor._watch.recorder.entries.values()]
            assert len(entries) == 2 * n
            assert not any(entry.names for entry in entries)
        model.layers[0](torch.randn(1, 9, 16))  # not within a pass of the model: tallied when the step ends
        assert monitor._watch.recorder.entries["layers.0", 2].names
    assert monitor.history.latest("logit", "layers.0").isfinite().all()


def test_watching_changes_no_weight_and_every_nth_step_is_watched():
    plain, seen = Watched(), Watched()
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (plain, seen)]
    monitor = Monitor(seen, every=2)
    for tokens in batches()[:5]:
        sgd_step(plain, optimizers[0], tokens)
        with monitor:
            sgd_step(seen, optimizers[1], tokens)
    assert all(map(torch.equal, plain.parameters(), seen.parameters()))
    assert monitor.history.steps == [1, 3, 5]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in seen.modules())


def test_a_loop_with_step_has_the_history_of_a_loop_with_blocks():
    model = Watched()
    optimizer, monitor = torch.optim.SGD(model.parameters(), 0.1), Monitor(model, every=1)
    monitor.begin_step()
    for tokens in batches()[:3]:
        sgd_step(model, optimizer, tokens)
        monitor.step()
    monitor.close()
    same(monitor.history, watched(), atol=0, rtol=0)


def test_fit_has_the_history_of_a_plain_loop(tmp_path):
    model = Watched()
    monitor = Monitor(model, every=1)
    recipe = Recipe(steps=3, rate=Constant(0.1), clip=None, accumulate=2)
    data = InOrder(batches())
    fit(model, data, recipe, folder=tmp_path, monitor=monitor, show=Silence(), optimizer=sgd)
    same(monitor.history, watched(parts=2), atol=1e-6, rtol=1e-6)
    same(HeadHistory.load(tmp_path), monitor.history, atol=0, rtol=0)


class InOrder(Shuffled):
    def __iter__(self):
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]
        self.epoch, self.position = self.epoch + 1, 0


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1)


def test_evaluations_and_paused_passes_do_not_count():
    model, tokens = Watched(), batches()
    once, more = Monitor(model), Monitor(model)
    with once:
        model.loss(tokens[0]).backward()
    with more:
        model.eval()
        with torch.no_grad():
            model(tokens[1])
        model.train()
        model.loss(tokens[0]).backward()
        with more.pause():
            model(tokens[2])
    same(once.history, more.history, atol=0, rtol=0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_computes_again_does_not_count(reentrant):
    model, tokens = Watched(), batches()[0]
    plain, again = Monitor(model), Monitor(model)
    with plain:
        model.loss(tokens).backward()
    x = model.embedding(tokens)
    with again:
        for layer in model.layers:
            x = x + checkpoint(lambda x, layer=layer: layer(x, keep=tokens != 0), x, use_reentrant=reentrant)
        x.sum().backward()
    same(plain.history, again.history, atol=0, rtol=0)


def test_autocast_is_watched_in_its_dtype():
    model, tokens = Watched(), batches()[0]
    full, half = Monitor(model), Monitor(model)
    with full:
        model.loss(tokens).backward()
    with half, torch.autocast("cpu", torch.bfloat16):
        model.loss(tokens).backward()
    same(full.history, half.history, atol=0.05, rtol=0.05)
    assert not torch.equal(full.history["logit"]["layers.1"], half.history["logit"]["layers.1"])


class Cut(Silence):
    """Kills a run after a step, as SIGTERM does."""

    def __init__(self, step):
        self.step = step

    def advance(self, report):
        if report.step == self.step:
            raise Stopped(15, "killed")


def test_a_killed_and_resumed_run_has_the_history_of_one_that_was_not(tmp_path):
    recipe = Recipe(steps=9, rate=Constant(0.3), save_every=3)

    def run(folder, **options):
        model = Watched()
        fit(model, Shuffled(batches()), recipe, folder=folder, monitor=Monitor(model, every=2, rules=RULES), **options)

    run(tmp_path / "whole", show=Silence())
    with pytest.raises(Stopped):
        run(tmp_path / "cut", show=Cut(8))
    assert HeadHistory.load(tmp_path / "cut").steps == [1, 3, 5, 7]
    run(tmp_path / "cut", show=Silence(), resume=True)
    for name in (TABLE, EVENTS, TENSORS):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert HeadHistory.load(tmp_path / "cut").steps == [1, 3, 5, 7, 9]


def every_head(history):
    """A rule that finds something at each step."""
    from regard.lens import HeadEvent

    return [HeadEvent(step, "seen", "layers.0", 1, 0.5, "a, b") for step in history.steps]


RULES = (every_head,)


def test_events_are_said_once_and_logged_numbers_have_names(tmp_path):
    lines, logged = [], []

    class Log:
        def log(self, step, values):
            logged.append((step, values))

    history = watched(every=2, rules=RULES, say=lines.append, loggers=[Log()], to=tmp_path)
    assert lines == [f"step {step} · seen · layers.0, head 1: a, b" for step in (1, 3)]
    assert [event.step for event in history.events] == [1, 3]
    step, values = logged[-1]
    assert step == 3
    assert torch.equal(values["heads/layers.1/entropy"], history.latest("entropy", "layers.1"))
    assert len(values) == 8
    assert values["heads/layers.0/logit"].shape == (HEADS,)


def test_a_folder_with_a_history_is_continued_only_after_a_given_step(tmp_path):
    watched(to=tmp_path)
    with pytest.raises(ValueError, match=r"already holds a history, up to step 3; pass step=N to continue it"):
        watched(to=tmp_path)
    with pytest.raises(ValueError, match="holds a history of logit, entropy, sink, received; watch these measures"):
        watched(to=tmp_path, step=2, measures=("logit",))
    assert watched(to=tmp_path, step=2).steps == [1, 2, 3, 4, 5]


def test_a_step_that_fails_is_dropped():
    model = Watched()
    monitor = Monitor(model)
    with pytest.raises(IndexError), monitor:
        model(batches()[0]).index_select(0, torch.tensor([99]))
    assert len(monitor.history) == 0
    assert not any(module._forward_hooks for module in model.modules())


class Odd(nn.Module):
    """A softmax of queries and keys that multiplies no values."""

    def forward(self, x):
        return x * torch.softmax(x @ x.mT, -1).amax(-1, keepdim=True)


def test_a_model_without_attention_raises_and_layers_left_out_are_named():
    plain = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="no attention of Linear was recorded"), Monitor(plain):
        plain(torch.ones(2, 3))

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.odd = Attention(8, heads=2), Odd()

        def forward(self, x):
            return self.odd(self.attention(x))

    model, x = Mixed(), torch.randn(1, 4, 8)
    monitor = Monitor(model, every=1)
    with pytest.warns(CaptureWarning, match="these layers are not in the history of heads: odd"), monitor:
        model(x)
    with warnings.catch_warnings(), monitor:
        warnings.simplefilter("error")
        model(x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"measures": ("logits",)}, r"measures must be a list of logit, entropy, .*, got \('logits',\)"),
        ({"measures": "logit"}, "measures must be a list"),
        ({"every": 0}, "every must be 1 or more, got 0"),
        ({"clip": 9.0, "measures": ("entropy",)}, "clip needs the measure 'logit'; add it to measures="),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Monitor(Watched(), **options)


def test_ends_without_a_beginning_and_replayed_graphs_are_refused(tmp_path):
    with pytest.raises(RuntimeError, match=r"no step is under way; call monitor.begin_step\(\)"):
        Monitor(Watched()).end_step()
    model = Watched()
    with pytest.raises(ValueError, match="a replayed CUDA graph cannot be watched; leave out monitor or graphs"):
        fit(model, Shuffled(batches()), Recipe(steps=1, graphs=True), folder=tmp_path, monitor=Monitor(model))


def test_the_command_line_watches_a_run(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat\n" * 40)
    flags = ["--out", tmp_path / "run", "--steps", 3, "--monitor", 2, "--qk-clip", 1e-3, "--device", "cpu"]
    sizes = ["--batch-tokens", 64, "--length", 16, "--dim", 16, "--depth", 1, "--heads", 2]
    printed = well("train", "language", "--text", text, *flags, *sizes)
    history = HeadHistory.load(tmp_path / "run")
    assert history.steps == [1, 3]
    assert {event.kind for event in history.events} >= {"clipped"}
    assert f"{history.events[0]}\n" in printed.out + printed.err
    with pytest.raises(ValueError, match="the recipe has monitor, but fit has none"):
        fit(Watched(), Shuffled(batches()), Recipe(steps=1, monitor=2), folder=tmp_path / "other")
