"""`python -m benchmarks.viewer [--tokens N] [--layers N] [--device cuda]`: the viewer on a long capture, and its pages.

A capture of random queries and keys is written to a file and served by a process of its own; times are a client's.
Row statistics are estimated from a few keys and measures are made up, for the true ones take hours on a CPU: what a
tile costs does not depend on them.
"""

from __future__ import annotations

import argparse
import http.client
import platform
import random
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch

from regard import Causal, Summary, Weights, weights
from regard.lens import Tape
from regard.lens.tape.overview import Overview
from regard.views.viewer.pyramid import TILE
from regard.views.viewer.wire_format import parse_frame

from .__main__ import COMMIT, RESULTS, machine
from .measure import Measured, save

BARS = {"first view": 2.0, "exact tile": 0.15, "preview": 0.15, "memory": 500e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("--tokens", 131072), ("--layers", 8), ("--heads", 16), ("--width", 64), ("--repeats", 20)):
        parser.add_argument(name, type=int, default=value)
    parser.add_argument("--device", help="where tiles are computed, such as cuda")
    parser.add_argument("--capture", type=Path, help="the file of the capture, written and kept if it is not there")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.capture or Path(folder) / "long.safetensors"
        if not path.exists():
            synthetic(path, arguments)
        print(f"capture of {path.stat().st_size / 1e9:.2f} GB")
        rows += served(path, arguments)
        rows += [] if arguments.device else pages(Path(folder))
    for row in rows:
        print(f"{row['case']:<56} {row['median']:>10}  {row['quartiles']:<24} bar {row['bar']}, {row['met']}")
    if (arguments.tokens, arguments.layers, arguments.heads) == (131072, 8, 16):
        if arguments.device:
            rows = [
                row | {"machine": f"{torch.cuda.get_device_name(arguments.device)}, {row['machine']}"} for row in rows
            ]
        table = RESULTS / ("viewer_gpu.csv" if arguments.device else "viewer_cpu.csv")
        save(rows, table, list(rows[0]))
        print(f"saved {table}")


def synthetic(path: Path, arguments: argparse.Namespace) -> None:
    """A tape of random queries and keys with summaries of the right shapes."""
    n, h, d = arguments.tokens, arguments.heads, arguments.width
    entries, summaries = {}, {}
    for layer in range(arguments.layers):
        drawn = torch.randn(2, 1, h, n, d, dtype=torch.bfloat16, device=arguments.device or "cpu")
        scores = drawn[0].float() @ drawn[1, :, :, :64].float().mT / d**0.5
        q, k = drawn.cpu()
        A = weights(q, k, mask=Causal())
        seen = (torch.arange(n) + 1.0).view(1, 1, n)
        statistic = scores.logsumexp(-1).cpu() + (seen / 64).log()
        cells = torch.rand(1, h, min(n, 512), min(n, 512)).tril() / n
        flat = torch.rand(1, h, n)
        found = Summary(entropy=seen.log() * flat, received=flat, max=1 / seen + 0 * flat, distance=seen / 2 * flat,
                        map=cells, statistic=statistic)  # fmt: skip
        entries[f"layers.{layer}.attention", 0] = Weights(A.call, statistic.unsqueeze(-1))
        summaries[f"layers.{layer}.attention", 0] = found, Overview.of(found)
    tape = Tape(entries, summaries=summaries)
    tape.tokens = [random.choice(("▁the", "▁map", "ping", "▁of", "▁attention", ".")) for _ in range(n)]
    tape.save(path)


def served(path: Path, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """The figures of a server in another process."""
    code = (
        "import sys, torch; torch.set_num_threads(2); from regard.views import serve\n"
        "viewer = serve([sys.argv[1]], device=sys.argv[2] or None, open_browser=False)\n"
        "sys.stdout.flush(); viewer.wait()"
    )
    command = [sys.executable, "-c", code, str(path), arguments.device or ""]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        n, what = arguments.tokens, f"{arguments.layers} x {arguments.heads} x {arguments.tokens:,}"
        rows = [row(f"first view, {what}: session and overviews", "first view", first_views(url, arguments))]
        client, on_gpu = Client(url), arguments.device not in (None, "cpu")
        level = 4
        tiles = max(n // (TILE << level), 1)
        exact = [client.tile(arguments, level, random.randrange(tiles), 0) for _ in range(arguments.repeats)]
        assert {state for _, state in exact} == {"exact"}
        rows.append(row("exact tile of 4,096 x 4,096 tokens", "exact tile", [taken for taken, _ in exact]))
        if on_gpu:
            mean = [client.tile(arguments, level, random.randrange(tiles), 0, "mean") for _ in range(arguments.layers)]
            assert {state for _, state in mean} == {"exact"}
            rows.append(row("the same of the mean of all heads", "exact tile", [taken for taken, _ in mean]))
        if n > TILE << 5:
            coarse = []
            for level in range(5, (n // TILE - 1).bit_length()):
                coarse += [client.tile(arguments, level, 0, 0) for _ in range(3)]
            assert not on_gpu or {state for _, state in coarse} == {"exact"}
            name = "coarser tiles, all exact" if on_gpu else "coarser tiles, preview or exact"
            rows.append(row(name, "preview", [taken for taken, _ in coarse]))
        name, idle = "server memory beyond the mapped file", 0.0
        if on_gpu:
            idle = idle_memory(arguments.device)
            name += f" and the {megabytes(idle)} of an idle process with a GPU"
        rows.append(row(name, "memory", [memory(server.pid) - idle], show=megabytes))
        return rows
    finally:
        server.terminate()
        server.wait()


def first_views(url: str, arguments: argparse.Namespace) -> list[float]:
    """Seconds from a browser's first request to the last overview."""
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        client = Client(url)
        for name in ("", "app.js", "app.css", "api/session"):
            client.get(f"/{name}")
        for layer in range(arguments.layers):
            client.get(f"/api/overview?capture=0&layer={layer}&batch=0")
        taken.append(time.perf_counter() - start)
    return taken


class Client:
    """A browser that draws nothing."""

    def __init__(self, url: str) -> None:
        address, _, token = url.removeprefix("http://").partition("/")
        self._connection = http.client.HTTPConnection(address, timeout=60)
        self._headers: dict[str, str] = {}
        self._connection.request("GET", f"/{token}")
        response = self._connection.getresponse()
        response.read()
        self._headers = {"Cookie": response.headers["set-cookie"].partition(";")[0]}

    def get(self, path: str) -> bytes:
        self._connection.request("GET", path, headers=self._headers)
        response = self._connection.getresponse()
        body = response.read()
        assert response.status == 200, body
        return body

    def tile(
        self, arguments: argparse.Namespace, level: int, row: int, col: int, head: str | None = None
    ) -> tuple[float, str]:
        layer, head = random.randrange(arguments.layers), head or str(random.randrange(arguments.heads))
        where = f"layer={layer}&batch=0&head={head}&minus=none&level={level}&row={row}&col={col}"
        start = time.perf_counter()
        body = self.get(f"/api/tile?capture=0&{where}")
        return time.perf_counter() - start, parse_frame(body)[0]["state"]


def pages(folder: Path) -> list[dict[str, object]]:
    """Time and size of the offline page of a model of BERT-base's shape."""
    rows = []
    for n, most in ((512, 5e6), (128, 4e6)):
        entries = {}
        for layer in range(12):
            q, k = 1.5 * torch.randn(2, 1, 12, n, 64)
            entries[f"encoder.layer.{layer}", 0] = weights(q, k)
        tape = Tape(entries)
        tape.tokens = [f"token{m}" for m in range(n)]
        start = time.perf_counter()
        tape.page().save(folder / "page.html")
        taken, size = time.perf_counter() - start, (folder / "page.html").stat().st_size
        rows.append(row(f"offline page, 12 x 12 heads, {n} tokens: time", 15.0, [taken]))
        rows.append(row(f"offline page, 12 x 12 heads, {n} tokens: size", most, [size], show=megabytes))
    return rows


def memory(pid: int) -> float:
    """Bytes a process holds of its own, pages of mapped files not counted."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024.0 * sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))


def idle_memory(device: str) -> float:
    """The same of a process that has made its context on a GPU and nothing else."""
    code = "import sys, torch; torch.zeros(1, device=sys.argv[1]).item(); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code, device], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as idle:
        assert idle.stdout is not None
        idle.stdout.readline()
        held = memory(idle.pid)
        idle.terminate()
    return held


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


def megabytes(n: float) -> str:
    return f"{n / 1e6:.2f} MB"


def row(case: str, bar: str | float, values: list[float], show=milliseconds) -> dict[str, object]:
    most = BARS[bar] if isinstance(bar, str) else bar
    found = Measured.of(values)
    return {
        "case": case,
        "median": show(found.median),
        "quartiles": f"{show(found.low)} to {show(found.high)}",
        "bar": show(most),
        "met": "yes" if found.median <= most else "no",
        "repeats": len(values),
        "machine": machine(),
        "threads": 2,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": COMMIT,
        "date": date.today().isoformat(),
    }


if __name__ == "__main__":
    main()
