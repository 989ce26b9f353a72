"""What is measured on a GPU: our call, its peers and the bar."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from regard import Additive, Causal, Weights, Window, attend, weights
from regard.ops.terms.masks import Mask

Call = Callable[[], object]
HEADS = 16


@dataclass(frozen=True)
class Case:
    """Our call and its peers; the ratio is that of the fastest peer's time to ours, or with `cost` ours to theirs."""

    name: str
    build: Callable[[], tuple[Call, dict[str, Call]]]
    bar: float | None = None
    cost: bool = False  # the ratio says how many times a peer's time ours takes, at most `bar`
    show: str = "ms"  # or "us", of the host, or what our call returns: "MB", or "%"


def cases() -> Iterator[Case]:
    for mask in (None, Causal()):
        yield Case(f"{kind(mask)}, N 16, host time", functools.partial(overhead, mask), 15, show="us")
    for b, n in ((1, 4096), (4, 4096), (1, 16384), (1, 65536)):
        for d in (64, 128):
            for mask in (None, Causal()):
                name = f"attend and summary, {kind(mask)}, {f'{b} x {n}' if b > 1 else f'N {n}'}, d {d}"
                yield Case(name, functools.partial(summarized, n, d, mask, b=b), 1.8, cost=True)
    # A length that falls on no tile, and whose last cells hold fewer entries than the others.
    yield Case(
        "attend and summary, causal, N 20011, d 128", functools.partial(summarized, 20011, 128, Causal()), cost=True
    )
    for measure, question in MEASURES.items():
        for d in (64, 128):
            name = f"attend and {measure}, plain, N 16384, d {d}"
            yield Case(name, functools.partial(summarized, 16384, d, None, question), cost=True)
    for d in (64, 128):
        for mask in (None, Causal()):
            name = f"attend and summary, {kind(mask)}, N 16384, d {d}, against stored weights"
            yield Case(name, functools.partial(against_stored, d, mask), 12)
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
    for d in (64, 128):
        for mask in (None, Causal()):
            name = f"A.kl(B), {kind(mask)}, N 16384, d {d}, forward + backward"
            yield Case(name, functools.partial(diverged, 16384, d, mask), 3.0)
        name = f"A.kl(B), causal, N 16384, d {d}, forward + backward for B alone"
        yield Case(name, functools.partial(diverged, 16384, d, Causal(), frozen=True), 3.0)
    yield Case("A.kl(B), causal, N 16384, d 64, forward", functools.partial(diverged, 16384, 64, Causal(), grad=False))
    yield Case("A.kl(B), causal, N 16384, d 64, memory of the compiled expression", divergence_memory, 2, show="%")
    yield Case("A.kl(B), causal, N 65536, d 64, forward + backward", functools.partial(diverged, 65536, 64, Causal()))
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
    return torch.compile(flex_attention, dynamic=False)  # a kernel for each length: the fastest it has


def overhead(mask: Mask | None) -> tuple[Call, dict[str, Call]]:
    q, k, v = tensors(1, HEADS, 16, 64)
    causal = mask is not None
    peer = functools.partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal)
    return functools.partial(attend, q, k, v, mask=mask), {"SDPA": peer}


def seen(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, measure: Callable[[Weights], object] = Weights.summary
) -> Call:
    def both() -> object:
        A = weights(q, k, mask=mask)
        return A @ v, measure(A)

    return both


MEASURES: dict[str, Callable[[Weights], object]] = {"entropy": Weights.entropy, "received": Weights.received}


def summarized(
    n: int, d: int, mask: Mask | None, measure: Callable[[Weights], object] = Weights.summary, b: int = 1
) -> tuple[Call, dict[str, Call]]:
    q, k, v = tensors(b, HEADS, n, d)
    causal = mask is not None

    def fused(kernel: SDPBackend) -> Tensor:
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    peers: dict[str, Call] = {
        "cuDNN forward": functools.partial(fused, SDPBackend.CUDNN_ATTENTION),
        "flash forward": functools.partial(fused, SDPBackend.FLASH_ATTENTION),
    }
    return seen(q, k, v, mask, measure), peers


def against_stored(d: int, mask: Mask | None) -> tuple[Call, dict[str, Call]]:
    q, k, v = tensors(1, HEADS, 16384, d)
    hidden = torch.ones(16384, 16384, dtype=torch.bool, device="cuda").triu(1) if mask is not None else None
    at = torch.arange(16384, device="cuda", dtype=torch.float32)
    gap = (at[:, None] - at).abs()

    def stored() -> object:
        s = q @ k.mT * d**-0.5
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
    return functools.partial(megabytes_beyond, seen(q, k, v, Causal())), {}


def megabytes_beyond(run: Call) -> float:
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


def diverged(
    n: int, d: int, mask: Mask | None, *, grad: bool = True, frozen: bool = False
) -> tuple[Call, dict[str, Call]]:
    """KL of two matrices, and the expression over stored weights, compiled, at lengths where they fit."""
    q, k, _ = tensors(1, HEADS, n, d, grad=grad and not frozen)
    q2, k2, _ = tensors(1, HEADS, n, d, grad=grad)
    leaves = [x for x in (q, k, q2, k2) if x.requires_grad]

    def ours() -> Tensor:
        return weights(q, k, mask=mask).kl(weights(q2, k2, mask=mask))

    peers: dict[str, Call] = {}
    if n <= 16384:
        hidden = None if mask is None else torch.ones(n, n, dtype=torch.bool, device="cuda").triu(1)
        stored = functools.partial(_stored_kl(), q, k, q2, k2, hidden)
        peers["torch.compile"] = through(stored, leaves) if grad else stored
    return (through(ours, leaves) if grad else ours), peers


@functools.cache
def _stored_kl() -> Callable[..., Tensor]:
    def expression(q: Tensor, k: Tensor, q2: Tensor, k2: Tensor, hidden: Tensor | None) -> Tensor:
        scores = [x @ y.mT * x.shape[-1] ** -0.5 for x, y in ((q, k), (q2, k2))]
        lowest = torch.finfo(q.dtype).min
        scores = scores if hidden is None else [s.masked_fill(hidden, lowest) for s in scores]
        log_a, log_b = (F.log_softmax(s, -1, dtype=torch.float32) for s in scores)
        return (log_a.exp() * (log_a - log_b)).sum(-1)

    return torch.compile(expression, dynamic=False)


def divergence_memory() -> tuple[Call, dict[str, Call]]:
    """The memory of our call in percent of that of the compiled expression."""
    ours, peers = diverged(16384, 64, Causal())

    def share() -> float:
        return 100 * megabytes_beyond(ours) / megabytes_beyond(peers["torch.compile"])

    return share, {}


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
