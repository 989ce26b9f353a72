"""Monitor: the largest logit, the entropy and the sinks of every head while a model trains, in any training loop.

A watched step runs as every other: its forward passes are observed as `capture(model, keep=[...])` does, so queries,
keys and weights are dropped at once, and no kernel changes. Other steps cost nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...checks import check_int
from ..capture_warning import CaptureWarning
from ..interception import diagnostics
from ..interception.function_mode import AttentionMode
from ..interception.intercept import intercept
from ..interception.silent_layers import note_silent_layers
from ..layer_names import shown_name
from ..recording.record import Record
from ..recording.recorder import Recorder
from ..recording.store import Store
from ..recording.unseen import describe
from ..terms.interpret import Interpreter
from .head_events import RULES, Rule
from .head_history import TABLE, HeadEvent, HeadHistory
from .head_tally import KEPT_FOR, MEASURES, HeadTally
from .qk_clip import qk_clip_

DEFAULT_MEASURES = ("logit", "entropy", "sink", "received")


class NumberLogger(Protocol):
    """A place for numbers, such as a logger of `regard.train`."""

    def log(self, step: int, values: Mapping[str, float | Tensor]) -> None: ...


class Monitor:
    """Watch every head of a model at every `every`-th training step, the first one included.

    >>> from regard.lens import Monitor
    >>> from regard.nn import Attention
    >>> model = Attention(16, heads=4)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> monitor = Monitor(model, every=2)
    >>> for _ in range(5):
    ...     with monitor:  # one training step
    ...         model(torch.randn(2, 7, 16)).square().mean().backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    >>> monitor.history
    HeadHistory(logit, entropy, sink, received of 4 heads in 1 layer at 3 steps, steps 1 to 5, 0 events)
    >>> monitor.history["logit"]["(model)"].shape  # steps heads
    torch.Size([3, 4])

    Instead of the block, call `monitor.begin_step()` before the loop and `monitor.step()` after each optimizer step.
    `regard.train.fit(..., monitor=)` and `regard train --monitor 50` do it by themselves, and there are callbacks for
    the `Trainer` of transformers, `regard.lens.monitoring.trainer_callback`, and for Lightning,
    `regard.lens.monitoring.lightning_callback`.

    A step has one number per layer, head and measure, over all its forward passes (gradient accumulation) and all
    processes of the default group of `torch.distributed`: the largest "logit" of any row, and the mean over rows of
    "entropy", "max", "distance", of "sink", the share of attention that sinks receive, and of "received", the largest
    share that one key receives. Rows are the queries that are real tokens and see a key. Passes in evaluation mode and
    without gradients do not count, nor what activation checkpointing computes again.

    Args:
        model: the model, or the part of it, to watch, compiled or not, and below wrappers such as DDP.
        every: the number of steps from one watched step to the next.
        measures: those to watch.
        to: a folder for `heads.csv`, `head_events.csv` and `heads.safetensors`; None keeps the history in memory.
        layers: patterns of layer names to watch, such as "decoder.*".
        rules: functions that find events in the history; `regard.lens.monitoring.head_events` has them.
        loggers: objects with a method `log(step, values)`, such as those of `regard.train`, which get a tensor of heads
            by the name `heads/LAYER/MEASURE`.
        say: prints an event, once.
        clip: a bound for logits; heads above it at a watched step are clipped after it, see `qk_clip_`.
        step: the steps that were made before; the history in `to` is continued from there.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 50,
        measures: Sequence[str] = DEFAULT_MEASURES,
        to: str | Path | None = None,
        *,
        layers: str | Sequence[str] | None = None,
        rules: Sequence[Rule] = RULES,
        loggers: Sequence[NumberLogger] = (),
        say: Callable[[str], Any] = print,
        clip: float | None = None,
        step: int = 0,
    ) -> None:
        diagnostics.check_capturable(model)
        check_int("every", every, least=1)
        check_int("step", step, least=0)
        if isinstance(measures, str) or not measures or not set(measures) <= set(MEASURES):
            raise ValueError(f"measures must be a list of {', '.join(MEASURES)}, got {measures!r}")
        if clip is not None and "logit" not in measures:
            raise ValueError("clip needs the measure 'logit'; add it to measures=")
        self.model, self.every, self.clip, self.rules = model, every, clip, tuple(rules)
        self.loggers, self.say = list(loggers), say
        self.measures, self.made = tuple(measures), step
        self.layers = [layers] if isinstance(layers, str) else layers
        self.to = None if to is None else Path(to)
        self.history = HeadHistory(self.measures)
        self.current: int | None = None  # the step under way
        self._watch: _Watch | None = None
        self._paused = 0
        self._skipped = False  # whether a forward pass of the step under way did not count
        self._force_eager = False
        self._clipped: set[tuple[str, int]] = set()  # heads that the last watched step clipped
        self._warned = False
        self._started = False

    def start(
        self,
        folder: Path,
        step: int,
        *,
        say: Callable[[str], Any] | None = None,
        loggers: Sequence[NumberLogger] = (),
        compiled: bool = False,
    ) -> None:
        """Begin a run, or continue it after `step` steps; `folder` is where files go if the monitor has no `to`.

        `fit` calls this. With `compiled`, watched steps run without torch.compile.
        """
        self.made, self._force_eager = step, compiled
        self.say = self.say if say is None else say
        self.loggers += loggers
        self._open_folder(self.to or folder)
        self._started = True

    def begin_step(self, step: int | None = None) -> None:
        """Begin a training step, by default the next one."""
        self._discard()
        if not self._started:
            self._started = True
            if self.to is not None:
                self._check_new(self.to)
                self._open_folder(self.to)
        self.current = self.made + 1 if step is None else step
        self._skipped = False
        if (self.current - 1) % self.every == 0:
            self._watch = _Watch(self)

    def end_step(self) -> None:
        """End the step under way: add its numbers to the history, and say what the rules find."""
        if self.current is None:
            raise RuntimeError("no step is under way; call monitor.begin_step() before the forward pass")
        self.made, step, self.current = self.current, self.current, None
        if self._watch is not None:
            watch, self._watch = self._watch, None
            self._add(step, watch.close())

    def step(self) -> None:
        """End a training step and begin the next one: call it after each optimizer step."""
        if self.current is None:  # the step that ends here was not begun
            self.made += 1
        else:
            self.end_step()
        self.begin_step()

    def __enter__(self) -> Monitor:
        self.begin_step()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if kind is None:
            self.end_step()
        else:
            self._discard()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Count no forward pass within the block, as for an evaluation in training mode."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def save(self) -> None:
        """Write the safetensors file; the tables are written at every watched step."""
        if self.to is not None and self._started and _leads():
            self.history.save_tensors(self.to)

    def close(self) -> None:
        """End: drop the step under way, and write the safetensors file."""
        self._discard()
        self.save()

    def _discard(self) -> None:
        """Drop the step under way."""
        watch, self._watch, self.current = self._watch, None, None
        if watch is not None:
            watch.stack.close()

    def _counts_pass(self) -> bool:
        """Whether a forward pass that runs now belongs to training."""
        counts = not self._paused and (self.model.training or torch.is_grad_enabled())
        self._skipped = self._skipped or not counts
        return counts

    def _check_new(self, folder: Path) -> None:
        """Raise if a folder holds a history, and the steps made before are not given."""
        if not self.made and (folder / TABLE).is_file() and len(found := HeadHistory.load(folder)):
            raise ValueError(
                f"{folder} already holds a history, up to step {found.steps[-1]}; pass step=N to continue it after "
                "step N, or another folder"
            )

    def _open_folder(self, folder: Path) -> None:
        """Continue the history in a folder up to the steps made."""
        self.to = folder
        if (folder / TABLE).is_file():
            found = HeadHistory.load(folder)
            if found.measures != self.measures:
                raise ValueError(
                    f"{folder} holds a history of {', '.join(found.measures)}; watch these measures, or write to "
                    "another folder"
                )
            self.history = found.upto(self.made)
        if _leads():
            self.history.save(folder)

    def _add(self, step: int, values: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Add the numbers of a step to the history, write and log them, and say what the rules find in them."""
        self.history.add(step, values)
        events = [event for rule in self.rules for event in rule(self.history) if event.step == step]
        self.history.events += events
        if _leads():
            if self.to is not None:
                self.history.append_to(self.to)
            named = {f"heads/{layer}/{name}": x for layer, numbers in values.items() for name, x in numbers.items()}
            for logger in self.loggers:
                logger.log(step, named)
            for event in events:
                self.say(str(event))
        if self.clip is not None:
            clipped = qk_clip_(self.model, self, bound=self.clip)
            self._note_clip(step, clipped)

    def _note_clip(self, step: int, clipped: Mapping[str, Mapping[int, float]]) -> None:
        """Keep and say which heads were clipped, but not those that the watched step before clipped too."""
        before, self._clipped = self._clipped, {(layer, head) for layer, heads in clipped.items() for head in heads}
        for layer, heads in clipped.items():
            for head, logit in heads.items():
                if (layer, head) in before:
                    continue
                text = f"largest logit {logit:.4g}, clipped to {self.clip:g}"
                event = HeadEvent(step, "clipped", layer, head, logit, text)
                self.history.events.append(event)
                if _leads():
                    if self.to is not None:
                        self.history.append_event(self.to, event)
                    self.say(str(event))


class _Watch:
    """One watched step: the interception, open until `close`."""

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor
        kept = dict.fromkeys(
            KEPT_FOR.get(name, name) for name in (*monitor.measures, "max")
        )  # max: rows that see a key
        self.tally = HeadTally()
        self.recorder = Recorder(
            store=Store(),
            layers=monitor.layers,
            keep=tuple(kept),
            counts=monitor._counts_pass,
            pass_ended=self._tally_calls,
        )
        with ExitStack() as stack:
            interpreter = Interpreter(self.recorder.store, holds_biases=False)
            self.mode: AttentionMode = stack.enter_context(intercept(monitor.model, self.recorder, interpreter))
            stack.enter_context(note_silent_layers(self.mode, self.recorder))
            if monitor._force_eager:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            else:
                diagnostics.warn_scripted(self.mode)
            self.stack = stack.pop_all()

    def _tally_calls(self) -> None:
        """Add the calls that were recorded so far to the tally."""
        calls = []
        for (layer, _), entry in self.recorder.entries.items():
            assert not isinstance(entry, Record)  # with keep=, a recorder holds measures alone
            calls.append((shown_name(layer), entry))
        self.tally.add(calls)

    def close(self) -> dict[str, dict[str, Tensor]]:
        """End the interception; return the numbers of each layer, the same in every process."""
        self.stack.close()
        self.recorder.close()
        self._tally_calls()
        device = next((x.device for x in self.monitor.model.parameters()), torch.device("cpu"))
        self.tally.reduce_over_processes(device)
        self._warn_once()
        values = self.tally.values(self.monitor.measures)
        if not values and self.monitor._skipped:
            raise ValueError(
                "every forward pass of this step ran in evaluation mode without gradients, or in a paused block; call "
                "model.train() before, or begin the step where training does"
            )
        if not values:
            diagnostics.check_recorded(self.mode, self.recorder)
        return values

    def _warn_once(self) -> None:
        """Warn, at the first watched step, of layers that are not in the history."""
        if self.monitor._warned:
            return
        self.monitor._warned = True
        diagnostics.note_unseen_layers(self.mode, self.recorder)
        if self.recorder.unseen and _leads():
            message = f"these layers are not in the history of heads: {describe(self.recorder.unseen)}"
            warnings.warn(message, CaptureWarning, stacklevel=4)


def _leads() -> bool:
    """Whether this is the process that writes files and prints."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
