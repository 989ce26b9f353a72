"""The callback of Lightning, called as its documentation says: the history is that of a plain loop."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from regard.lens import HeadHistory, Monitor
from tests.lens.monitoring.watched_model import Watched, batches


class Callback:
    """The base class of Lightning: every hook does nothing."""

    def __getattr__(self, name):
        if name.startswith("on_"):
            return lambda *args, **kwargs: None
        raise AttributeError(name)


@pytest.fixture
def callback(monkeypatch):
    fake = ModuleType("pytorch_lightning")
    fake.Callback = Callback
    fake.__spec__ = importlib.machinery.ModuleSpec("pytorch_lightning", None)
    monkeypatch.setitem(sys.modules, "pytorch_lightning", fake)
    monkeypatch.setitem(sys.modules, "lightning", None)
    name = "regard.lens.monitoring.lightning_callback"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name).LightningMonitor
    sys.modules.pop(name, None)


def train(callback, model, folder, accumulate):
    """The loop of Lightning: a hook around every batch, validation between batches."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = SimpleNamespace(default_root_dir=str(folder), global_step=0)
    callback.on_train_start(trainer, model)
    for n, tokens in enumerate(batches()):
        callback.on_train_batch_start(trainer, model, tokens, n)
        (model.loss(tokens) / accumulate).backward()
        if (n + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            trainer.global_step += 1
        callback.on_train_batch_end(trainer, model, None, tokens, n)
        callback.on_validation_start(trainer, model)
        model.loss(batches()[0])  # in training mode and with gradients
        callback.on_validation_end(trainer, model)
    callback.on_train_end(trainer, model)


def test_lightning_has_the_history_of_a_plain_loop(callback, tmp_path):
    model = Watched()
    monitor = Monitor(model, every=2)
    train(callback(monitor), model, tmp_path, accumulate=2)
    plain = Watched()
    optimizer, other = torch.optim.SGD(plain.parameters(), 0.1), Monitor(plain, every=2)
    for n in range(0, 6, 2):
        with other:
            for tokens in batches()[n : n + 2]:
                (plain.loss(tokens) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert monitor.history.steps == other.history.steps == [1, 3]
    for name in other.history.measures:
        torch.testing.assert_close(monitor.history[name], other.history[name], atol=0, rtol=0)
    assert len(HeadHistory.load(tmp_path)) == 2
