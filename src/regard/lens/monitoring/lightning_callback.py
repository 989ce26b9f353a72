"""LightningMonitor for Lightning: watches each step of a training with a `Monitor`."""

from __future__ import annotations

from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .monitor import Monitor

PACKAGE = "lightning.pytorch" if find_spec("lightning") is not None else "pytorch_lightning"
if find_spec(PACKAGE.partition(".")[0]) is None:
    raise ImportError("LightningMonitor needs Lightning; install it with pip install lightning")
LightningCallback: Any = import_module(PACKAGE).Callback


class LightningMonitor(LightningCallback):  # type: ignore[misc]
    """Watch the heads of a model that Lightning trains.

        from regard.lens import Monitor
        from regard.lens.monitoring.lightning_callback import LightningMonitor

        trainer = lightning.Trainer(callbacks=[LightningMonitor(Monitor(module, every=50))])

    A step of the monitor is one of the optimizer, `trainer.global_step`, whatever the gradient accumulation; a
    validation in the middle of one does not count. Files go to the monitor's `to`, or else to `default_root_dir`.
    """

    def __init__(self, monitor: Monitor) -> None:
        super().__init__()
        self.monitor = monitor
        self._pause = ExitStack()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.monitor.start(Path(trainer.default_root_dir), trainer.global_step)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.monitor.current is None:
            self.monitor.begin_step(trainer.global_step + 1)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.monitor.current is not None and trainer.global_step >= self.monitor.current:
            self.monitor.end_step()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._pause.enter_context(self.monitor.pause())

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._pause.close()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.monitor.close()
