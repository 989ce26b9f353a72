"""TrainerMonitor for the `Trainer` of transformers: watches each step of a training with a `Monitor`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from .monitor import Monitor


class TrainerMonitor(TrainerCallback):
    """Watch the heads of a model that `Trainer` trains.

        from regard.lens import Monitor
        from regard.lens.monitoring.trainer_callback import TrainerMonitor

        trainer = Trainer(model, arguments, callbacks=[TrainerMonitor(Monitor(model, every=50))])

    A step of the monitor is one of the optimizer, whatever the gradient accumulation. Files go to the monitor's `to`,
    or else to `output_dir`; a run that `trainer.train(resume_from_checkpoint=...)` resumes continues them.
    """

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.monitor.start(Path(args.output_dir), state.global_step, compiled=bool(args.torch_compile))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.monitor.begin_step(state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.monitor.end_step()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.monitor.close()
