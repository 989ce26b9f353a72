"""`python -m benchmarks.gpu [--only part of a name]`: attention and its weights on a GPU, beside PyTorch's kernels.

bfloat16, 16 heads, inputs drawn at random, CUDA events, the calls of a case in turn. What is measured is checked
against float64 first; the whole suite for a GPU is `pytest -m gpu` and `pytest tests/kernels`.
"""

from __future__ import annotations

import argparse
import csv
import functools
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from regard import Additive, Causal, Weights, Window, attend, weights
from regard.ops.masks import Mask

from .__main__ import COMMIT, RESULTS
from .measure import _summarized

Call = Callable[[], object]
HEADS = 16
FEWEST, ROUNDS = 3, 5  # rounds: few where they agree
AGREE = 0.02  # of the median, between the shortest and the longest round
HOPELESS = 1.5  # times the fastest peer: a slower one is timed once
LEAST = 0.004  # seconds of calls in a round
FIELDS = [
    *("case", "ours", "quartiles", "peer", "peer_time", "peer_quartiles", "ratio", "bar", "met", "rounds"),
    *("machine", "python", "torch", "triton", "commit", "date"),
]


@dataclass(frozen=True)
class Case:
    """Our call and its peers; the ratio is that of the fastest peer's time to ours, or with `cost` ours to theirs."""

    name: str
    build: Callable[[], tuple[Call, dict[str, Call]]]
    bar: float | None = None
    cost: bool = False  # the ratio says how many times a peer's time ours takes, at most `bar`
    show: str = "ms"  # or "us", of the host, or "MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="measure only cases whose name holds this, and save nothing")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    check()
    rows = []
    for case in cases():
        if arguments.only in case.name:
            rows.append(measured(case))
            report(rows[-1])
            torch.cuda.empty_cache()
            if not arguments.only:
                save(rows)  # after each, so that a run cut short has not run for nothing


def cases() -> Iterator[Case]:
    for mask in (None, Causal()):
        yield Case(f"{kind(mask)}, N 16, host time", functools.partial(overhead, mask), 15, show="us")
    for n in (4096, 16384, 65536):
        for d in (64, 128):
            for mask in (None, Causal()):
                name = f"attend and summary, {kind(mask)}, N {n}, d {d}"
                yield Case(name, functools.partial(summarized, n, d, mask), 1.8, cost=True)
    for mask in (None, Causal()):
        name = f"attend and summary, {kind(mask)}, N 16384, d 128, against stored weights"
        yield Case(name, functools.partial(against_stored, mask), 12)
    yield Case("attend and summary, causal, N 16384, d 128, memory", memory, 200, show="MB")
    for name, question in QUESTIONS.items():
        yield Case(f"{name}, causal, N 16384, d 128", functools.partial(asked, question))
    yield Case("attend and summary, causal, N 1048576, d 64, one head", million)
    for shape, dtype, bar in (
        ((4, 1024, 256), torch.bfloat16, 4.0),
        ((4, 1024, 256), torch.float32, 2.0),
        ((1, 2048, 256), torch.bfloat16, 3.0),
        ((1, 4096, 128), torch.bfloat16, None),
    ):
        b, n, d = shape
        for grad in (False, True):
            way = "forward + backward" if grad else "forward"
            name = f"additive, {b} x {n}, d {d}, {str(dtype)[6:]}, {way}"
            needed = bar if not grad else 3.0 if dtype == torch.bfloat16 and bar else None
            yield Case(name, functools.partial(additive, b, n, d, dtype, grad), needed)
    yield Case("causal window 512, N 65536, d 64, forward", functools.partial(window, 65536), 1.0)
    yield Case("causal window 512, N 65536 over N 32768", doubling, 2.1, cost=True)
    yield Case("attend and summary, causal window 512, N 65536, d 64", window_summary, 2.7, cost=True)
    for n in (1024, 4096, 16384, 65536):
        for d in (64, 128):
            for mask in (None, Causal()):
                for grad in (False, True):
                    way = "forward + backward" if grad else "forward"
                    name = f"{kind(mask)}, N {n}, d {d}, {way}"
                    yield Case(name, functools.partial(plain, n, d, mask, grad), 0.97)


def kind(mask: Mask | None) -> str:
    return "plain" if mask is None else "causal"


def tensors(b: int, h: int, n: int, d: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> list[Tensor]:
    return [torch.randn(b, h, n, d, device="cuda", dtype=dtype).requires_grad_(grad) for _ in range(3)]


def through(run: Callable[[], Tensor], leaves: list[Tensor]) -> Call:
    """Forward and backward."""

    def both() -> object:
        out = run()
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    return both


def plain(n: int, d: int, mask: Mask | None, grad: bool) -> tuple[Call, dict[str, Call]]:
    q, k, v = leaves = tensors(max(1, 16384 // n), HEADS, n, d, grad=grad)
    causal = mask is not None

    def fused(kernel: SDPBackend) -> Tensor:
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    blocks = _causal_blocks(n) if causal else None
    runs: dict[str, Callable[[], Tensor]] = {
        "cuDNN": functools.partial(fused, SDPBackend.CUDNN_ATTENTION),
        "flash": functools.partial(fused, SDPBackend.FLASH_ATTENTION),
        "FlexAttention": lambda: _flex()(q, k, v, block_mask=blocks),
    }
    ours = functools.partial(attend, q, k, v, mask=mask)
    if not grad:
        return ours, dict(runs)
    return through(ours, leaves), {name: through(run, leaves) for name, run in runs.items()}


@functools.cache
def _causal_blocks(n: int) -> BlockMask:
    return create_block_mask(_at_or_before, None, None, n, n, device="cuda", _compile=True)


def _at_or_before(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return j <= i


@functools.cache
def _flex() -> Callable[..., Tensor]:
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(flex_attention, dynamic=True)


def overhead(mask: Mask | None) -> tuple[Call, dict[str, Call]]:
    q, k, v = tensors(1, HEADS, 16, 64)
    causal = mask is not None
    peer = functools.partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal)
    return functools.partial(attend, q, k, v, mask=mask), {"SDPA": peer}


def seen(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Call:
    def both() -> object:
        A = weights(q, k, mask=mask)
        return A @ v, A.summary()

    return both


def summarized(n: int, d: int, mask: Mask | None) -> tuple[Call, dict[str, Call]]:
    q, k, v = tensors(1, HEADS, n, d)
    causal = mask is not None

    def fused(kernel: SDPBackend) -> Tensor:
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    peers: dict[str, Call] = {
        "cuDNN forward": functools.partial(fused, SDPBackend.CUDNN_ATTENTION),
        "flash forward": functools.partial(fused, SDPBackend.FLASH_ATTENTION),
    }
    return seen(q, k, v, mask), peers


def against_stored(mask: Mask | None) -> tuple[Call, dict[str, Call]]:
    q, k, v = tensors(1, HEADS, 16384, 128)
    hidden = torch.ones(16384, 16384, dtype=torch.bool, device="cuda").triu(1) if mask is not None else None
    at = torch.arange(16384, device="cuda", dtype=torch.float32)
    gap = (at[:, None] - at).abs()

    def stored() -> object:
        s = q @ k.mT * 128**-0.5
        A = torch.softmax(s if hidden is None else s.masked_fill_(hidden, -torch.inf), -1)
        entropy, received = torch.special.entr(A).sum(-1, dtype=torch.float32), A.sum(-2, dtype=torch.float32)
        distance = torch.stack([(head * gap).sum(-1) for head in A[0]])
        return A @ v, entropy, received, A.amax(-1), distance, F.avg_pool2d(A[0], 32)

    return seen(q, k, v, mask), {"stored weights, the same measures": stored}


def asked(question: Callable[[Weights], object]) -> tuple[Call, dict[str, Call]]:
    """One question to the weights, by the kernel and by blocks of rows."""
    q, k, _ = tensors(1, HEADS, 16384, 128)

    def by(backend: str | None) -> object:
        return question(weights(q, k, mask=Causal(), backend=backend))

    return functools.partial(by, None), {"by blocks": functools.partial(by, "tiled")}


def groups(n: int) -> Tensor:
    """Sentences of 7 to 23 tokens."""
    lengths = 7 + torch.arange(n, device="cuda") * 5 % 17
    return torch.searchsorted(lengths.cumsum(0), torch.arange(n, device="cuda"), right=True)


QUESTIONS: dict[str, Callable[[Weights], object]] = {
    "the 8 largest weights": lambda A: A.topk(8),
    "the largest of 512 x 512 bins": lambda A: A.pool(512, 512, how="max"),
    "mass between sentences": lambda A: A.mass(groups(A.shape[2]), groups(A.shape[3])),
}


def memory() -> tuple[Call, dict[str, Call]]:
    q, k, v = tensors(1, HEADS, 16384, 128)
    run = seen(q, k, v, Causal())

    def beyond() -> float:
        """Megabytes allocated at most during a call, beyond inputs and what it returns."""
        run()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        kept = run()
        torch.cuda.synchronize()
        after = torch.cuda.memory_allocated()
        assert kept is not None
        return (torch.cuda.max_memory_allocated() - max(before, after)) / 1e6

    return beyond, {}


def million() -> tuple[Call, dict[str, Call]]:
    q, k, v = tensors(1, 1, 2**20, 64)
    peer = functools.partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
    return seen(q, k, v, Causal()), {"SDPA forward": peer}


def additive(b: int, n: int, d: int, dtype: torch.dtype, grad: bool) -> tuple[Call, dict[str, Call]]:
    q, k, v = leaves = tensors(b, 1, n, d, dtype, grad)
    u = torch.randn(d, device="cuda", dtype=dtype).requires_grad_(grad)
    leaves = [*leaves, u]

    def ours() -> Tensor:
        return attend(q, k, v, score=Additive(u))

    def peer() -> Tensor:
        return _expression()(q, k, v, u)

    if grad:
        return through(ours, leaves), {"torch.compile": through(peer, leaves)}
    return ours, {"torch.compile": peer}


@functools.cache
def _expression() -> Callable[..., Tensor]:
    def expression(q: Tensor, k: Tensor, v: Tensor, u: Tensor) -> Tensor:
        s = torch.tanh(q[:, :, :, None] + k[:, :, None]) @ u
        return torch.softmax(s, -1) @ v

    return torch.compile(expression, dynamic=False)


def window(n: int) -> tuple[Call, dict[str, Call]]:
    q, k, v = tensors(1, HEADS, n, 64)

    def near(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i - j < 512)

    blocks = create_block_mask(near, None, None, n, n, device="cuda", _compile=True)
    ours = functools.partial(attend, q, k, v, mask=Causal() & Window(512))
    return ours, {"FlexAttention": lambda: _flex()(q, k, v, block_mask=blocks)}


def doubling() -> tuple[Call, dict[str, Call]]:
    long, short = tensors(1, HEADS, 65536, 64), tensors(1, HEADS, 32768, 64)
    mask = Causal() & Window(512)
    return functools.partial(attend, *long, mask=mask), {"N 32768": functools.partial(attend, *short, mask=mask)}


def window_summary() -> tuple[Call, dict[str, Call]]:
    q, k, v = tensors(1, HEADS, 65536, 64)
    mask = Causal() & Window(512)
    return seen(q, k, v, mask), {"its forward": functools.partial(attend, q, k, v, mask=mask)}


def check() -> None:
    """A benchmark of wrong numbers is worth nothing."""
    for mask in (None, Causal(), Causal() & Window(512)):
        for d in (64, 128):
            q, k, v = tensors(1, 2, 2048, d)
            A, exact = weights(q, k, mask=mask), weights(q.double(), k.double(), mask=mask, backend="reference")
            near("output", A @ v, exact @ v.double(), 0.02)
            got, want = A.summary(), exact.summary()
            for name in ("entropy", "received", "max", "distance", "map"):
                near(f"{name} under {mask}", getattr(got, name), getattr(want, name), 0.01)
            near(f"topk under {mask}", A.topk(8).values, exact.topk(8).values, 0.01)
            near(f"maxima under {mask}", A.pool(64, 64, "max"), exact.pool(64, 64, "max"), 0.01)
            both = groups(2048), groups(2048)
            near(f"mass under {mask}", A.mass(*both), exact.mass(*both), 0.01)
    q, k, v = tensors(2, 1, 300, 64)
    u = torch.randn(64, device="cuda", dtype=torch.bfloat16)
    exact = attend(q.double(), k.double(), v.double(), score=Additive(u.double()), backend="reference")
    near("additive", attend(q, k, v, score=Additive(u)), exact, 0.02)


def near(name: str, got: Tensor, want: Tensor, most: float) -> None:
    off = (got.double() - want).abs().max().item() / want.abs().max().item()
    if not off < most:
        raise SystemExit(f"error: {name} is off by {off:.3g} of the largest; nothing was measured")


def measured(case: Case) -> dict[str, object]:
    ours, peers = case.build()
    if case.show == "MB":
        taken = {"regard": [float(ours()) for _ in range(3)]}  # type: ignore[arg-type]
    else:
        taken = times(ours, peers, _host if case.show == "us" else _events)
    found = {name: _summarized(values) for name, values in taken.items()}
    mine = found.pop("regard")
    best = min(found, key=lambda name: found[name].median) if found else ""
    ratio, met = None, None
    if best:
        ratio = mine.median / found[best].median if case.cost else found[best].median / mine.median
    if case.bar is not None:
        if case.show == "MB":
            met = mine.median <= case.bar
        elif case.show == "us":
            met = mine.median - found[best].median <= case.bar / 1e6
        elif ratio is not None:
            met = ratio <= case.bar if case.cost else ratio >= case.bar
    show = functools.partial(shown, unit=case.show)
    return {
        "case": case.name,
        "ours": show(mine.median),
        "quartiles": f"{show(mine.low)} to {show(mine.high)}",
        "peer": best,
        "peer_time": show(found[best].median) if best else "",
        "peer_quartiles": f"{show(found[best].low)} to {show(found[best].high)}" if best else "",
        "ratio": "" if ratio is None else f"{'costs ' if case.cost else ''}{ratio:.2f}",
        "bar": "" if case.bar is None else promise(case),
        "met": "" if met is None else "yes" if met else "no",
        "rounds": len(taken["regard"]),
        "machine": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": __import__("triton").__version__,
        "commit": COMMIT,
        "date": date.today().isoformat(),
    }


def promise(case: Case) -> str:
    if case.show == "ms":
        return f"at most {case.bar:.2f}" if case.cost else f"{case.bar:.2f}"
    return f"at most {case.bar:.0f} {case.show}{' more' if case.show == 'us' else ''}"


def times(ours: Call, peers: dict[str, Call], clock: Callable[[Call, int], float]) -> dict[str, list[float]]:
    """Seconds of each call, all in turn, until rounds agree; a short one is called many times in a round."""
    calls = {"regard": ours, **peers}
    first = {name: warm(call, clock) for name, call in calls.items()}
    best = min((first[name] for name in peers), default=0.0)
    taken = {name: [first[name]] if first[name] > HOPELESS * best else [] for name in peers}
    rivals = ["regard", *(name for name in peers if not taken[name])]
    taken |= {name: [] for name in rivals}
    for done in range(ROUNDS):
        if done >= FEWEST and all(agreed(taken[name]) for name in rivals):
            break
        for name in rivals:
            often = max(1, min(200, int(LEAST / max(first[name], 1e-6))))
            taken[name].append(clock(calls[name], often))
    return taken


def warm(call: Call, clock: Callable[[Call, int], float]) -> float:
    """Seconds of a call, once it is compiled and, if it is short, has run a few times."""
    call()
    taken = clock(call, 1)
    return clock(call, 3) if taken < LEAST else taken


def agreed(values: list[float]) -> bool:
    return max(values) - min(values) <= AGREE * min(values)


def _events(call: Call, often: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(often):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / often


def _host(call: Call, often: int) -> float:
    """Until the call returns; the device may still be at work."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(often):
        call()
    taken = (time.perf_counter() - start) / often
    torch.cuda.synchronize()
    return taken


def shown(x: float, unit: str) -> str:
    return {"ms": f"{x * 1e3:.3f} ms", "us": f"{x * 1e6:.1f} us", "MB": f"{x:.0f} MB"}[unit]


def report(row: dict[str, object]) -> None:
    mark = "   <- under the bar" if row["met"] == "no" else ""
    against = f"{row['peer_time']:>12} {row['peer']:<20} {row['ratio']}"
    print(f"{row['case']:<70} {row['ours']:>12} vs {against}{mark}", flush=True)


def save(rows: list[dict[str, object]]) -> None:
    path = RESULTS / "kernels_gpu.csv"
    with path.open("w", newline="", encoding="utf8") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
