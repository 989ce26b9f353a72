"""Runner: trains and measures recipes, several at a time, until a deadline.

Each run has a folder `WORK/runs/NAME-SEED` and a log beside it. At the deadline trainings are asked to stop, which
saves them, and what they are by then is measured; runs that have not begun are left out.
"""

from __future__ import annotations

import csv
import math
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from .ledger import Ledger, Row, machine, versions
from .recipe import Measure, Recipe, Step, with_flags

STOPPED = 143  # the exit code of a training that was asked to stop
GRACE = 120.0  # seconds after the deadline, for what is left to measure
TEXTS = Path(__file__).parent / "texts"  # to look at what a model looks at


@dataclass
class Runner:
    """Everything the runs of one call share."""

    work: Path
    ledger: Ledger
    jobs: int = 1
    deadline: float = math.inf  # seconds from now
    smoke: bool = False
    commit: str = ""
    began: float = field(default_factory=time.monotonic)

    def run(self, chosen: Sequence[tuple[Recipe, int]]) -> list[str]:
        """Run recipes with seeds in order, but what they need before them; the names of those without a result."""
        (self.work / "runs").mkdir(parents=True, exist_ok=True)
        futures: dict[tuple[str, int], Future[bool]] = {}
        with ThreadPoolExecutor(self.jobs) as pool:
            for recipe, seed in in_order(chosen):
                needed = [future for (name, _), future in futures.items() if name in recipe.needs]
                futures[recipe.name, seed] = pool.submit(self._do, Run(self.work, recipe, seed), needed)
        return [f"{name}-{seed}" for (name, seed), future in futures.items() if not future.result()]

    def _do(self, run: Run, needed: Sequence[Future[bool]]) -> bool:
        recipe = run.recipe
        if not all(future.result() for future in needed):
            return self._say(run, "left out: what it needs has failed")
        for name in recipe.needs:
            if not any(path.is_dir() for path in (self.work / "runs").glob(f"{name}-*")):
                return self._say(run, f"left out: it needs {name}, which has not run here; run {name} {recipe.name}")
        began, note, seconds = time.monotonic(), "", 0.0
        try:
            if recipe.train is not None:
                if self.deadline <= began - self.began:
                    return self._say(run, "left out: the deadline has passed")
                self._say(run, "begins")
                train = with_flags(recipe.train, recipe.smoke) if self.smoke else recipe.train
                train = f"{train} --seed {run.seed} --out {{run}}"
                code = self._call(run, Step(command=train), until=self.deadline)
                if code not in (0, STOPPED):
                    return self._say(run, f"failed: {run.last_line()}")
                note = "stopped by the deadline" if code == STOPPED else ""
                seconds = time.monotonic() - began
                self._say(run, f"trained {run.steps()[0]:,} steps in {seconds:.0f} s {note}")
            for step in recipe.then:
                if self._call(run, step):
                    return self._say(run, f"failed: {run.last_line()}")
            printed: dict[str, str] = {}
            for measure in recipe.measure:
                if measure.command not in printed:
                    behind = run.logged()
                    if self._call(run, measure):
                        return self._say(run, f"failed: {run.last_line()}")
                    printed[measure.command] = run.logged()[len(behind) :]
                row = self._row(run, measure, found(measure.metric, printed[measure.command]), seconds, note)
                self.ledger.add(row)
                self._say(run, f"{row.metric}: {row.value:g} {row.bar}")
        except (OSError, ValueError) as error:
            return self._say(run, f"failed: {error}")
        return True

    def _row(self, run: Run, measure: Measure, value: float, seconds: float, note: str) -> Row:
        steps, speed = run.steps()
        return Row(
            recipe=run.recipe.name,
            seed=run.seed,
            metric=measure.name,
            value=value,
            bar="" if measure.bar is None else f"{'>=' if measure.better == 'higher' else '<='} {measure.bar:g}",
            published=measure.published,
            steps=steps,
            seconds=round(seconds, 1),
            speed=speed,
            note=note,
            command=run.shown(measure),
            machine=machine(),
            versions=versions(),
            commit=self.commit,
        )

    def _call(self, run: Run, step: Step, *, until: float | None = None) -> int:
        """The exit code of a command, which tells the log of the run what it has to say; asked to stop at `until`."""
        read = "/dev/null" if step.input is None else step.input.format(**run.places)
        write = run.log if step.output is None else step.output.format(**run.places)
        with open(read, "rb") as stdin, open(write, "ab") as stdout, run.log.open("ab") as stderr:
            process = subprocess.Popen(step.arguments(run.places), stdin=stdin, stdout=stdout, stderr=stderr)
            return self._wait(process, self.deadline + GRACE if until is None else until)

    def _wait(self, process: subprocess.Popen[bytes], until: float) -> int:
        try:
            return process.wait(None if until == math.inf else max(0.0, self.began + until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
        try:
            return process.wait(GRACE / 2)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def _say(self, run: Run, line: str) -> bool:
        print(f"{time.monotonic() - self.began:6.0f} s  {run.name}: {line}", flush=True)
        return not line.startswith(("failed", "left out"))


@dataclass(frozen=True)
class Run:
    """A recipe with a seed, and where it happens."""

    work: Path
    recipe: Recipe
    seed: int

    @property
    def name(self) -> str:
        """Of its folder, and of the log beside it."""
        return f"{self.recipe.name}-{self.seed}"

    @property
    def log(self) -> Path:
        """What its commands have said."""
        return self.work / "runs" / f"{self.name}.log"

    @property
    def places(self) -> dict[str, Path]:
        """What names in braces stand for."""
        runs = self.work / "runs"
        return {"run": runs / self.name, "runs": runs, "data": self.work / "data", "texts": TEXTS}

    def logged(self) -> str:
        """The log so far."""
        return self.log.read_text(encoding="utf8", errors="replace") if self.log.exists() else ""

    def last_line(self) -> str:
        """The last words."""
        return (self.logged().strip().splitlines() or ["without a word"])[-1]

    def steps(self) -> tuple[int, str]:
        """How many it has made, and how fast, as `31,000 tokens/s`."""
        path = self.places["run"] / "log.csv"
        if not path.exists():
            return 0, ""
        with path.open(encoding="utf8", newline="") as file:
            *_, last = csv.DictReader(file)
        [unit] = [name for name in last if name.endswith("_per_second")]
        return int(last["step"]), f"{float(last[unit]):,.0f} {unit.removesuffix('_per_second')}/s"

    def shown(self, measure: Measure) -> str:
        """The commands in one line, as someone would type them."""
        train = "" if self.recipe.train is None else f"regard {self.recipe.train} --seed {self.seed} --out {{run}} && "
        return " ".join(f"{train}regard {measure.command}".replace("regard results.", "python -m results.").split())


def in_order(chosen: Sequence[tuple[Recipe, int]]) -> list[tuple[Recipe, int]]:
    """The same, each once and behind those it needs."""
    ordered: dict[tuple[str, int], tuple[Recipe, int]] = {}

    def place(recipe: Recipe, seed: int) -> None:
        for other, one in chosen:
            if other.name in recipe.needs and (other.name, one) not in ordered:
                place(other, one)
        ordered.setdefault((recipe.name, seed), (recipe, seed))

    for recipe, seed in chosen:
        place(recipe, seed)
    return list(ordered.values())


def found(metric: str, text: str) -> float:
    """The number a command printed behind the name of a metric, the last one where there are several.

    >>> found("bleu", "bleu        41.20  nrefs:1\\nchrf        60.01")
    41.2
    """
    numbers = re.findall(rf"^{re.escape(metric)}\s+(-?\d[\d.]*(?:e[+-]?\d+)?)", text, re.MULTILINE)
    if not numbers:
        raise ValueError(f"expected a line {metric!r} and a number, got {text[-200:]!r}")
    return float(numbers[-1])
