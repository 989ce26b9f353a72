"""`python -m benchmarks.viewer_in_browser [--before COMMIT] [--repeats N]`: seconds until a reader sees it.

Headless Chromium opens the viewer of a saved capture, as it is here and as it was at the commit, and pages of regard
and of BertViz. A time ends at the last change of the page before it stays as it is, painting included. The viewer
computes in a process of its own, on the same cores as the browser. BertViz comes from PyPI and its scripts from npm,
into a folder of their own; what its pages ask of a content delivery network is answered from that folder.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import date
from pathlib import Path
from typing import Any

import torch

from regard import weights
from regard.lens import Tape

from .__main__ import COMMIT, RESULTS, machine
from .measure import Measured, save

REPOSITORY = Path(__file__).parents[1]
BERTVIZ = REPOSITORY / "output" / "bertviz"
SCRIPTS = {
    "require": ("requirejs@2.3.6", "requirejs/require.js"),
    "d3": ("d3@5.7.0", "d3/dist/d3.min.js"),
    "jquery": ("jquery@2.1.0", "jquery/dist/jquery.min.js"),
}
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
WINDOW = {"width": 1280, "height": 800}
OVERVIEWS = (32, 32, 2.0), (64, 80, 8.0)  # layers, heads of each, and the bar in seconds
CHANGE_BAR, ROW_BAR, LONG = 0.3, 0.5, 131_072
CALM = 1.5  # seconds without a change after which a page stays as it is
MOST = 400.0  # seconds that are waited for
NEVER = float("inf")
FIELDS = [
    *(
        "case",
        "median",
        "quartiles",
        "peer",
        "peer_median",
        "peer_quartiles",
        "cpu",
        "bar",
        "met",
        "repeats",
        "machine",
    ),
    *("threads", "load", "python", "torch", "chromium", "commit", "date"),
]
WATCH = """
window.last = window.lastMap = 0;
let waits = false;
const now = () => (performance.timeOrigin + performance.now()) / 1000;
const after = () => setTimeout(() => { waits = false; last = now(); });
const note = () => { if (!waits) requestAnimationFrame(after); waits = true; };
for (const name of ["putImageData", "drawImage", "stroke", "fillRect"]) {
    const draw = CanvasRenderingContext2D.prototype[name];
    CanvasRenderingContext2D.prototype[name] = function (...given) {
        note();
        if (name === "putImageData") lastMap = now();
        return draw.apply(this, given);
    };
}
const every = { subtree: true, childList: true, attributes: true, characterData: true };
const watch = () => new MutationObserver(note).observe(document, every);
document.documentElement ? watch() : addEventListener("DOMContentLoaded", watch);
"""
HEADS = """(count) => {
    const all = [...document.querySelectorAll("button.head")];
    const isOn = ({ top, bottom, left }) => bottom > 110 && top < innerHeight && left < innerWidth;
    const on = all.filter((one) => isOn(one.getBoundingClientRect()));
    const there = all.length === count && on.length > 0 && on.every((one) => one.querySelector(".thumb"));
    return there && !document.querySelector(".bar.waiting");
}"""
LISTS = "() => document.querySelectorAll('.links section[data-side=query] li button').length > 0"
LISTED = f"() => ({LISTS})() || /too long/.test(document.querySelector('.links').textContent)"
MAKE = """
import random, sys, torch
from regard import Causal, weights
from regard.lens import Tape
layers, heads, n = map(int, sys.argv[2:])
torch.manual_seed(0)
random.seed(0)
entries = {}
for m in range(layers):
    entries[f"model.layers.{m}.self_attn", 0] = weights(*torch.randn(2, 1, heads, n, 64), mask=Causal())
tape = Tape(entries)
tape.tokens = [random.choice(("the", "map", "##ping", "of", ".")) for _ in range(n)]
tape.save(sys.argv[1])
"""
SERVE = """
import sys, torch
from regard.views import serve
torch.set_num_threads(1)
viewer = serve([sys.argv[1]], open_browser=False)
sys.stdout.flush()
viewer.wait()
"""
CHANGE = "hash => { location.hash = hash; return (performance.timeOrigin + performance.now()) / 1000; }"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", help="a commit to measure beside this one, such as ed1f453")
    parser.add_argument("--repeats", type=int, default=5, help="of what is here; a commit before and BertViz once")
    parser.add_argument("--only", help="cases whose names hold this text; they are not saved")
    arguments = parser.parse_args()
    from playwright.sync_api import sync_playwright

    rows = []
    with sync_playwright() as driver, checkout(arguments.before) as before:
        bench = Bench(driver, before, arguments.repeats)
        for measure in (bench.overviews, bench.long_row, bench.pages):
            for row in measure(arguments.only or ""):
                rows.append(row)
                beside = f"{row['peer']} {row['peer_median']}" if row["peer"] else ""
                bar = f"bar {row['bar']}, {row['met']}" if row["bar"] else ""
                print(f"{row['case']:<66} {row['median']:>9}  {row['quartiles']:<20} {beside:<30} {bar}", flush=True)
    if not arguments.only and before:
        table = RESULTS / "viewer_browser_cpu.csv"
        save(rows, table, FIELDS)
        print(f"saved {table}")


class Bench:
    """The cases, each with what is here beside what was before, or beside BertViz."""

    def __init__(self, driver: Any, before: Path | None, repeats: int) -> None:
        self._driver, self._repeats = driver, repeats
        self._sources = {"here": REPOSITORY / "src"} | ({"before": before / "src"} if before else {})
        with self._page() as page:
            self._version = page.context.browser.version

    def overviews(self, only: str) -> Iterator[dict[str, Any]]:
        """From navigation to the last thumbnail, and from a click to the last change of it."""
        for layers, heads, bar in OVERVIEWS:
            count, found = layers * heads, {}
            names = {
                "open": f"{count:,} heads of 64 tokens: navigation to last thumbnail",
                "all": f"{count:,} heads of 64 tokens: navigation to last change, roles of heads included",
                "scale": f"{count:,} heads: change of scale",
                "sort": f"{count:,} heads: change of order",
            }
            if not any(only in name for name in names.values()):
                continue
            for name, source in self._sources.items():
                with saved(source, layers, heads, 64) as path:
                    repeats = self._repeats if name == "here" else 1
                    found[name] = [self._overview(source, path, count) for _ in range(repeats)]
            for step, name in names.items():
                taken = {side: [one[step] for one in all] for side, all in found.items()}
                cpu = [one["cpu"] for one in found["here"]] if step == "all" else None
                before, most = taken.get("before"), {"open": bar, "all": None}.get(step, CHANGE_BAR)
                yield self._row(name, taken["here"], "before", before, most, cpu=cpu)

    def _overview(self, source: Path, path: Path, count: int) -> dict[str, float]:
        with served(source, path) as url, self._page() as page:
            start, spent = time.time(), cpu_seconds()
            page.goto(url)
            taken = {"all": over(page, HEADS, count) - start}
            taken["open"] = page.evaluate("lastMap") - start
            taken["cpu"] = cpu_seconds() - spent
            for step, change in (("scale", "scale=linear"), ("sort", "scale=linear&sort=entropy")):
                start = page.evaluate(CHANGE, change)
                taken[step] = over(page, HEADS, count, start) - start
            return taken

    def long_row(self, only: str) -> Iterator[dict[str, Any]]:
        """From the choice of a token to the list of what it looks at."""
        name = f"{LONG:,} tokens without a summary: the row of one token"
        if only not in name:
            return
        found: dict[str, list[float]] = {}
        cpu: list[float] = []
        for side, source in self._sources.items():
            with saved(source, 1, 8, LONG) as path, served(source, path) as url, self._page() as page:
                page.goto(url)
                over(page, "() => document.querySelector('.stage > *') !== null", None)
                page.evaluate(CHANGE, "view=text")
                over(page, "() => document.querySelector('.text .pages')?.childElementCount > 0", None)
                found[side] = []
                for n in range(self._repeats if side == "here" else 1):
                    token = LONG - 1000 * (n + 1)
                    spent = cpu_seconds()
                    start = page.evaluate(CHANGE, f"view=text&chosen={token},{token}")
                    is_listed, end = page.evaluate(LISTED), over(page, LISTED, None, start)
                    assert not is_listed
                    found[side].append(end - start if page.evaluate(LISTS) else NEVER)
                    if side == "here":
                        cpu.append(cpu_seconds() - spent)
                    page.evaluate(CHANGE, "view=text")
                    over(page, f"() => !({LISTED})()", None)
        yield self._row(name, found["here"], "before", found.get("before"), ROW_BAR, cpu=cpu)

    def pages(self, only: str) -> Iterator[dict[str, Any]]:
        """Offline pages of a model of BERT-base's shape: to write them, their size, and to open them."""
        for n in (128, 512):
            if not any(only in name for name in (f"{n} tokens", "BertViz")):
                continue
            install()
            torch.manual_seed(0)
            layers = [weights(*(1.5 * torch.randn(2, 1, 12, n, 64))) for _ in range(12)]
            tokens = [f"token{m}" for m in range(n)]
            tape = Tape({(f"encoder.layer.{m}", 0): A for m, A in enumerate(layers)})
            tape.tokens = tokens
            dense = [A.dense() for A in layers]
            with tempfile.TemporaryDirectory() as folder:
                ours, theirs = Path(folder) / "regard.html", Path(folder) / "bertviz.html"
                start = time.perf_counter()
                tape.page().save(ours)
                written = [time.perf_counter() - start]
                taken = [bertviz(dense, tokens, theirs)]
                what = f"page of 12 x 12 heads, {n} tokens"
                yield self._row(f"{what}: to write it", written, "BertViz", taken)
                sizes = [[float(path.stat().st_size)] for path in (ours, theirs)]
                yield self._row(f"{what}: size", sizes[0], "BertViz", sizes[1], show=megabytes)
                opened = [self._opened(ours, HEADS, 144) for _ in range(self._repeats)]
                lines = "(count) => document.querySelectorAll('svg line').length >= count"
                other = [self._opened(theirs, lines, 144)]
                yield self._row(f"{what}: navigation to last picture", opened, "BertViz", other)

    def _opened(self, path: Path, done: str, count: int) -> float:
        """Seconds until a page is shown; infinite where the browser gives up."""
        from playwright.sync_api import Error

        try:
            with self._page() as page:
                page.route(re.compile("^https?://"), answer)
                start = time.time()
                page.goto(path.as_uri(), timeout=1000 * MOST)
                return over(page, done, count) - start
        except Error as error:
            print(f"{path.name}: {str(error).splitlines()[0]}")
            return NEVER

    @contextmanager
    def _page(self) -> Iterator[Any]:
        browser = self._driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        try:
            page = browser.new_context(viewport=WINDOW).new_page()
            page.set_default_timeout(1000 * MOST)
            page.add_init_script(WATCH)
            yield page
        finally:
            browser.close()

    def _row(
        self,
        case: str,
        values: list[float],
        peer: str,
        others: list[float] | None,
        bar: float | None = None,
        show: Any = None,
        cpu: list[float] | None = None,
    ) -> dict[str, Any]:
        show = show or shown
        ours, theirs = Measured.of(values), Measured.of(others) if others else None
        return {
            "case": case,
            "median": show(ours.median),
            "quartiles": f"{show(ours.low)} to {show(ours.high)}",
            "peer": peer if theirs else "",
            "peer_median": show(theirs.median) if theirs else "",
            "peer_quartiles": f"{show(theirs.low)} to {show(theirs.high)}" if theirs else "",
            "cpu": shown(statistics.median(cpu)) if cpu else "",
            "bar": "" if bar is None else shown(bar),
            "met": "" if bar is None else "yes" if ours.median <= bar else "no",
            "repeats": len(values),
            "machine": machine(),
            "threads": os.cpu_count(),
            "load": f"{os.getloadavg()[0]:.1f}",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "chromium": self._version,
            "commit": COMMIT,
            "date": date.today().isoformat(),
        }


def over(page: Any, done: str, argument: Any = None, since: float = 0.0) -> float:
    """Wait until a page has changed, is done and stays as it is; return the time of its last change, since 1970.

    The time is infinite if that does not come about.
    """
    from playwright.sync_api import Error

    deadline = time.time() + MOST
    while time.time() < deadline:
        try:
            last = page.evaluate("window.last")
            is_calm = last > since and time.time() - last > CALM
            is_done = is_calm and page.evaluate(f"(argument) => ({done})(argument)", argument)
        except Error as error:
            if "context" not in str(error):  # the page is on its way to another address
                raise
            is_done = False
        if is_done:
            return float(last)
        page.wait_for_timeout(250)
    return NEVER


def cpu_seconds() -> float:
    """CPU time of the running browsers and viewers below this process."""
    parents, ticks = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            arguments = (folder / "cmdline").read_text()
            parents[int(folder.name)] = int(fields[1])
            if "chromium" in arguments or "viewer.wait" in arguments:
                ticks[int(folder.name)] = int(fields[11]) + int(fields[12])

    def is_below(process: int) -> bool:
        return process == os.getpid() or (process in parents and is_below(parents[process]))

    return sum(time for process, time in ticks.items() if is_below(process)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def saved(source: Path, *size: int) -> Iterator[Path]:
    """A capture of layers, heads and tokens, written by the package in a folder."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "capture.safetensors"
        command = [sys.executable, "-c", MAKE, str(path), *map(str, size)]
        subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(source)})
        yield path


@contextmanager
def served(source: Path, path: Path) -> Iterator[str]:
    """The address of a viewer of a capture, started for this, of the package in a folder."""
    command = [sys.executable, "-c", SERVE, str(path)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(source)})
    assert server.stdout is not None
    try:
        yield server.stdout.readline().split()[-1]
    finally:
        server.terminate()
        server.wait()


@contextmanager
def checkout(commit: str | None) -> Iterator[Path | None]:
    """Another commit of this repository in a folder of its own."""
    if commit is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "before"
        git = ["git", "-C", str(REPOSITORY), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(path), commit], check=True)
        try:
            yield path
        finally:
            subprocess.run([*git, "remove", "--force", str(path)], check=True)


def install() -> None:
    """BertViz, IPython, which it imports, and its scripts, without touching what is installed here."""
    if BERTVIZ.exists():
        return
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(BERTVIZ)]
    subprocess.run([*pip, "--no-deps", "bertviz==1.4.1"], check=True)
    subprocess.run([*pip, "ipython==9.6.0"], check=True)
    npm = ["npm", "install", "--silent", "--no-fund", "--no-audit", "--prefix", str(BERTVIZ)]
    subprocess.run([*npm, *(package for package, _ in SCRIPTS.values())], check=True)


def bertviz(attention: list[torch.Tensor], tokens: list[str], path: Path) -> float:
    """Write BertViz's model view of some weights to a file; seconds, without its imports."""
    sys.path.append(str(BERTVIZ))
    from bertviz import model_view

    start = time.perf_counter()
    path.write_text(model_view(attention, tokens, html_action="return").data, encoding="utf8")
    return time.perf_counter() - start


def answer(route: Any) -> None:
    """Answer what a page asks of a content delivery network from the folder."""
    name = next((name for name in SCRIPTS if f"{name}." in route.request.url), None)
    if name is None:
        route.abort()
    else:
        route.fulfill(path=BERTVIZ / "node_modules" / SCRIPTS[name][1], content_type="text/javascript")


def shown(seconds: float) -> str:
    return f"not in {MOST:.0f} s" if seconds == NEVER else f"{seconds:.2f} s"


def megabytes(n: float) -> str:
    return f"{n / 1e6:.2f} MB"


if __name__ == "__main__":
    main()
