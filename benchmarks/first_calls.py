"""The first calls of a fresh process with empty caches of compiled kernels, and those of other kinds after them.

`python -m benchmarks.first_calls KIND` prints, for each call in order, how many seconds it took, the import of the
library and one CUDA operation before it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

FIRST, LATER = 2.0, 0.3  # seconds that the first call of a process may take, and one of a new length, width or mask
KINDS = ("attend, bfloat16", "summary, bfloat16", "summary, other widths", "float32", "entropy in a loss")
TIMEOUT = 180  # seconds of a process


def latencies(kind: str, *, tiny: bool) -> Iterator[tuple[str, float | str]]:
    """Yield the name of each call of a fresh process and its seconds, or why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        command = [sys.executable, "-m", "benchmarks.first_calls", kind, *(["--tiny"] if tiny else [])]
        try:
            run = subprocess.run(
                command,
                capture_output=True,
                text=True,
                cwd=Path(__file__).parents[1],
                env={**os.environ, **caches, "REGARD_WAIT_FOR_KERNELS": "0"},  # as without this package
                timeout=TIMEOUT,
            )
            output, failed = run.stdout, run.stderr.strip().splitlines()[-1:] if run.returncode else []
        except subprocess.TimeoutExpired as error:
            output = (error.stdout or b"").decode() if isinstance(error.stdout, bytes) else error.stdout or ""
            failed = [f"more than {TIMEOUT} s"]
    for line in output.splitlines():
        yield tuple(json.loads(line))
    if failed:
        yield "the process", failed[0][:120]


def main(kind: str, tiny: bool) -> None:
    import torch

    import regard

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.zeros(1, device=device).add(1).tolist()

    def qkv(n: int, d: int = 64, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
        n = n // 16 if tiny else n
        return [torch.randn(2, 8, n, d, device=device, dtype=dtype) for _ in range(3)]

    def attend(n: int, mask: object, d: int = 64, dtype: torch.dtype = torch.bfloat16) -> Callable[[], object]:
        q, k, v = qkv(n, d, dtype)
        return lambda: regard.attend(q, k, v, mask=mask)  # type: ignore[arg-type]

    def summary(n: int, mask: object, d: int = 64, dtype: torch.dtype = torch.bfloat16) -> Callable[[], object]:
        q, k, _ = qkv(n, d, dtype)
        return lambda: regard.weights(q, k, mask=mask).summary()  # type: ignore[arg-type]

    def entropy(n: int) -> Callable[[], object]:
        q, k, _ = (x.requires_grad_() for x in qkv(n))
        return lambda: torch.autograd.grad(regard.weights(q, k, mask=causal).entropy().mean(), (q, k))

    causal, padding = regard.Causal(), regard.Padding((16, 30))
    near, single = causal & regard.Window(32), torch.float32
    calls: dict[str, list[tuple[str, Callable[[], object]]]] = {
        "attend, bfloat16": [
            ("causal, N 1024", attend(1024, causal)),
            ("window, N 1024", attend(1024, near)),
            ("window, N 777", attend(777, near)),
            ("window, N 2048", attend(2048, near)),
            ("window, N 3000, d 128", attend(3000, near, 128)),
            ("padding, N 1024", attend(1024, padding)),
            ("causal and padding, N 1500", attend(1500, causal & padding)),
            ("a window on both sides, N 1024", attend(1024, regard.Window(32))),
            ("dilated, N 1024", attend(1024, regard.Dilated(32, 2))),
        ],
        "summary, bfloat16": [
            *((f"causal, N {n}", summary(n, causal)) for n in (512, 777, 1025, 2048, 3000)),
            *((f"no mask, N {n}", summary(n, None)) for n in (512, 1025)),
            *((f"window, N {n}", summary(n, near)) for n in (512, 1025)),
            ("padding, N 512", summary(512, padding)),
        ],
        "summary, other widths": [
            (f"causal, N 1024, d {d}", summary(1024, causal, d)) for d in (80, 96, 128, 192, 256)
        ],
        "float32": [
            ("attend, causal, N 1024", attend(1024, causal, dtype=single)),
            ("attend, window, N 1024", attend(1024, near, dtype=single)),
            ("attend, window, N 1500, d 192", attend(1500, near, 192, dtype=single)),
            *((f"summary, causal, N 1024, d {d}", summary(1024, causal, d, dtype=single)) for d in (64, 128, 192)),
        ],
        "entropy in a loss": [(f"causal, N {n}, forward + backward", entropy(n)) for n in (1024, 777)],
    }
    for name, call in calls[kind]:
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        try:
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            taken: float | str = time.perf_counter() - start
        except Exception as error:
            taken = f"{type(error).__name__}: {str(error)[:100]}"
        print(json.dumps([name, taken]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], "--tiny" in sys.argv[2:])
