"""What is measured: each case builds its inputs and gives the calls to compare, the first of them ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from regard import Additive, Causal, Documents, Padding, Window, attend, weights
from regard.decode import beam, greedy, sample
from regard.ops.terms.masks.mask_algebra import Mask

from .decoding import decoding, floor, ragged
from .monitoring import monitored
from .training import training
from .watching import by_sdpa, encoder, entering, watching, weighing, written_out

Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """`build()` gives named calls; the ratio reported is time or memory of `peer` over that of `ours`."""

    name: str
    build: Callable[[], dict[str, Call]]
    ours: str
    peer: str
    bar: float | None  # the least ratio promised; None where nothing is
    memory: bool = False  # compare peak memory rather than time
    added: float | None = None  # the most seconds ours may take beyond the peer
    speed: bool = False  # compare tokens a second, which the calls return: ours over that of the peer
    threads: int = 2


def tensors(*shape: int, n: int = 3, grad: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*shape).requires_grad_(grad) for _ in range(n)]


def backward(run: Callable[[], Tensor], leaves: list[Tensor]) -> Call:
    def both() -> None:
        for x in leaves:
            x.grad = None
        run().sum().backward()

    return both


def window(mask: Window, keep: Callable[[Tensor], Tensor], grad: bool) -> Callable[[], dict[str, Call]]:
    def build() -> dict[str, Call]:
        q, k, v = leaves = tensors(1, 8, 8192, 64, grad=grad)
        dense = keep(torch.arange(8192)[:, None] - torch.arange(8192))

        def ours() -> Tensor:
            return attend(q, k, v, mask=mask)

        def peer() -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=dense)

        if grad:
            return {"regard": backward(ours, leaves), "SDPA, dense mask": backward(peer, leaves)}
        return {"regard": ours, "SDPA, dense mask": peer}

    return build


def plain(n: int, mask: Causal | None, grad: bool = False) -> Callable[[], dict[str, Call]]:
    def build() -> dict[str, Call]:
        q, k, v = leaves = tensors(1, 8, n, 64, grad=grad)

        def ours() -> Tensor:
            return attend(q, k, v, mask=mask)

        def peer() -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=mask is not None)

        if grad:
            return {"regard": backward(ours, leaves), "SDPA": backward(peer, leaves)}
        return {"regard": ours, "SDPA": peer}

    return build


def small_masked(n: int, mask: Mask, keep: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], dict[str, Call]]:
    def build() -> dict[str, Call]:
        q, k, v = tensors(1, 8, n, 64)
        dense = keep(torch.arange(n)[:, None], torch.arange(n)).expand(n, n)[None, None].contiguous()
        return {
            "regard": lambda: attend(q, k, v, mask=mask),
            SDPA: lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=dense),
        }

    return build


def batch(mask: Mask, keep: Callable[[Tensor, Tensor], Tensor], grad: bool) -> Callable[[], dict[str, Call]]:
    """Four texts of 512 tokens; `keep(i, j)` is `b|1 i j`."""

    def build() -> dict[str, Call]:
        q, k, v = leaves = tensors(4, 12, 512, 64, grad=grad)
        dense = keep(torch.arange(512)[:, None], torch.arange(512)).expand(-1, 512, 512)[:, None].contiguous()

        def ours() -> Tensor:
            return attend(q, k, v, mask=mask)

        def peer() -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=dense)

        return {"regard": backward(ours, leaves) if grad else ours, SDPA: backward(peer, leaves) if grad else peer}

    return build


def decode_step(mask: Mask, first: int, last: int, offset: int | None = None) -> Callable[[], dict[str, Call]]:
    """One query over 32,768 keys of which it sees those from `first` to `last`, beside SDPA over these alone."""

    def build() -> dict[str, Call]:
        q = tensors(1, 8, 1, 64, n=1)[0]
        k, v = tensors(1, 8, 32768, 64, n=2)
        visible = k[:, :, first:last], v[:, :, first:last]
        return {
            "regard": lambda: attend(q, k, v, mask=mask, offset=offset),
            VISIBLE: lambda: F.scaled_dot_product_attention(q, *visible),
        }

    return build


def doubling() -> dict[str, Call]:
    short, long = tensors(1, 8, 8192, 64), tensors(1, 8, 16384, 64)
    mask = Causal() & Window(256)
    return {
        "regard at 16384": lambda: attend(*long, mask=mask),
        "regard at 8192": lambda: attend(*short, mask=mask),
    }


def summary() -> dict[str, Call]:
    q, k = tensors(1, 8, 8192, 64, n=2)
    return {
        "weights(q, k).summary()": lambda: weights(q, k).summary(),
        "eager matrix": lambda: torch.softmax(q @ k.mT * 64**-0.5, -1),
    }


def fused_route() -> dict[str, Call]:
    q, k, v = tensors(1, 8, 4096, 64)
    distance = (torch.arange(4096)[:, None] - torch.arange(4096)).abs().float()

    def ours() -> object:
        A = weights(q, k)
        return A @ v, A.summary()

    def peer() -> object:
        A = torch.softmax(q @ k.mT * 64**-0.5, -1)
        entropy = -(A * A.clamp(min=1e-30).log()).sum(-1)
        pooled = F.avg_pool2d(A, 8)
        return A @ v, entropy, A.sum(-2), A.amax(-1), (A * distance).sum(-1), pooled

    return {"A @ v; A.summary()": ours, "eager weights": peer}


def received() -> dict[str, Call]:
    q, k = tensors(1, 1, 65536, 64, n=2)
    return {"weights(q, k).received()": lambda: weights(q, k).received(), "300 MB": lambda: torch.ones(75_000_000)}


def additive(n: int, grad: bool) -> Callable[[], dict[str, Call]]:
    def build() -> dict[str, Call]:
        q, k, v = tensors(1, 1, n, 256, grad=grad)
        u = (torch.randn(256) / 16).requires_grad_(grad)

        def ours() -> Tensor:
            return attend(q, k, v, score=Additive(u))

        def peer() -> Tensor:
            return torch.softmax(torch.tanh(q[..., :, None, :] + k[..., None, :, :]) @ u, -1) @ v

        leaves = [q, k, v, u]
        return {
            "regard": backward(ours, leaves) if grad else ours,
            "broadcast expression": backward(peer, leaves) if grad else peer,
        }

    return build


def additive_doubling() -> dict[str, Call]:
    short, long = additive(1024, True)(), additive(2048, True)()
    return {"regard at 2048": long["regard"], "regard at 1024": short["regard"]}


def band(distance: Tensor) -> Tensor:
    return distance.abs() < 256


def before(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor(lengths)[:, None, None]


def causal_band(distance: Tensor) -> Tensor:
    return (distance >= 0) & (distance < 256)


HALF = (160, 224, 288, 352)  # lengths of four texts in a batch of 512 tokens, of which half is padding
FULLER = (400, 448, 480, 512)  # a tenth is padding
BOTH, PAST = Window(256), Causal() & Window(256)
SDPA = "SDPA, dense mask"
VISIBLE = "SDPA, visible keys"
PEERS = ("regard", "generate")
LENGTHS = "different lengths", "equal lengths"
CONFORMANCE = "Dot- or Window or Additive-b or Causal-b or summary or received"
EXPRESSION = "broadcast expression"

BACKENDS = [
    *(
        Case(f"{name}, N {n}, forward", plain(n, mask), "regard", "SDPA", 0.97 if n >= 1024 else None)
        for name, mask in (("plain", None), ("causal", Causal()))
        for n in (128, 1024, 4096)
    ),
    Case("plain, N 2048, forward + backward", plain(2048, None, True), "regard", "SDPA", None),
    Case("causal, N 2048, forward + backward", plain(2048, Causal(), True), "regard", "SDPA", None),
    Case("plain, N 16, forward", plain(16, None), "regard", "SDPA", None, added=60e-6),
    Case("causal, N 16, forward", plain(16, Causal()), "regard", "SDPA", None, added=60e-6),
    *(
        Case(f"{name}, N {n}, forward", small_masked(n, mask, keep), "regard", SDPA, bar, threads=1)
        for n, bar in ((16, 1 / 2), (64, 1 / 1.2))
        for name, mask, keep in (
            ("padding", Padding((n - 3,)), lambda i, j, n=n: j < n - 3),
            ("causal, padding", Causal() & Padding((n - 3,)), lambda i, j, n=n: (j <= i) & (j < n - 3)),
            ("causal window", Causal() & Window(n // 8), lambda i, j, n=n: (j <= i) & (i - j < n // 8)),
        )
    ),
    *(
        Case(f"4 x 512 tokens, {name}, forward{' + backward' * grad}", batch(mask, keep, grad), "regard", SDPA, 1.0)
        for name, mask, keep in (
            ("a tenth is padding", Padding(FULLER), lambda i, j: j < before(FULLER)),
            ("half is padding", Padding(HALF), lambda i, j: j < before(HALF)),
            ("causal, half is padding", Causal() & Padding(HALF), lambda i, j: (j <= i) & (j < before(HALF))),
            ("four packed texts", Documents(torch.arange(512) // 128), lambda i, j: (i // 128 == j // 128)[None]),
        )
        for grad in (False, True)
    ),
    *(
        Case(
            f"one query, 32768 keys, {name}",
            decode_step(mask, first, last, offset),
            "regard",
            VISIBLE,
            1 / 2,
            threads=1,
        )
        for name, mask, first, last, offset in (
            ("causal window 512", Causal() & Window(512), 32256, 32768, None),
            ("static cache, offset 4095", Causal(), 0, 4096, 4095),
            ("padding to 4096", Padding((4096,)), 0, 4096, None),
        )
    ),
    Case("attend and summary, 1 x 8 x 4096 x 64", fused_route, "A @ v; A.summary()", "eager weights", 1.0),
    Case(
        "attend and summary, 1 x 8 x 4096 x 64, memory",
        fused_route,
        "A @ v; A.summary()",
        "eager weights",
        20.0,
        memory=True,
    ),
]

OPERATOR = [
    Case("causal window 256, N 8192, forward", window(PAST, causal_band, False), "regard", SDPA, 8.0),
    Case("causal window 256, N 8192, forward + backward", window(PAST, causal_band, True), "regard", SDPA, 8.0),
    Case("window 256 both sides, N 8192, forward", window(BOTH, band, False), "regard", SDPA, 8.0),
    Case("window 256 both sides, N 8192, forward + backward", window(BOTH, band, True), "regard", SDPA, 8.0),
    Case("causal window 256, N doubled", doubling, "regard at 16384", "regard at 8192", 1 / 2.2),
    Case("summary, 1 x 8 x 8192 x 64", summary, "weights(q, k).summary()", "eager matrix", 1.0),
    Case("summary, 1 x 8 x 8192 x 64, memory", summary, "weights(q, k).summary()", "eager matrix", 20.0, memory=True),
    Case("received, one head, N 65536, memory", received, "weights(q, k).received()", "300 MB", 1.0, memory=True),
    Case("additive, N 1024, d 256, forward", additive(1024, False), "regard", EXPRESSION, 3.0),
    Case("additive, N 1024, d 256, forward + backward", additive(1024, True), "regard", EXPRESSION, 3.0),
    Case("additive, N 1024, d 256, memory", additive(1024, True), "regard", EXPRESSION, 10.0, memory=True),
    Case("additive, N doubled, memory", additive_doubling, "regard at 2048", "regard at 1024", 1 / 2.2, memory=True),
]

DECODING = (
    [
        Case(
            f"{kind}, {rows} x {'greedy' if width == 1 else f'beam {width}'}", decoding(kind, rows, width), *PEERS, bar
        )
        for kind in ("gpt2", "marian")
        for rows, width, bar in ((1, 1, 1.5), (1, 5, 1.5), (16, 5, 1.0))
    ]
    + [
        Case(f"gpt2, 4 prompts of 4 to 28 tokens, {name}", ragged(search, **options), *LENGTHS, 0.95)
        for name, search, options in (
            ("greedy", greedy, {}),
            ("sample", sample, {"seed": 0}),
            ("beam 4", beam, {"width": 4}),
        )
    ]
    + [
        # What no decoder can do without: how far the bar of greedy search is within reach on a machine.
        Case(f"{kind}, 1 x greedy, its products alone", floor(kind), "products", "generate", None)
        for kind in ("gpt2", "marian")
    ]
)

TRAINING = [
    Case("recurrent, Bahdanau's attention", training("JoeyNMT", "rnn"), "regard", "JoeyNMT", 1.5, speed=True),
    Case("Transformer", training("JoeyNMT", "transformer"), "regard", "JoeyNMT", 1.0, speed=True),
    Case("Transformer, one vocabulary", training("transformers", "joint"), "regard", "transformers", 1.0, speed=True),
]

NOTHING = "a mode that does nothing"
WATCHING = [
    Case(
        f"{name}, {n} tokens{', beside the fast path' if 'fast' in peer else ''}",
        watching(make, n),
        ours="capture",
        peer=peer,
        bar=None if bar is None else 1 / bar,
        added=added,
        threads=1,
    )
    for name, make, n, peer, bar, added in (
        ("written out by hand", written_out, 16, "plain", None, 12 * 0.5e-3),
        ("written out by hand", written_out, 128, "plain", 1.5, None),
        ("own layers, SDPA", by_sdpa, 16, "plain", None, None),
        ("own layers, SDPA", by_sdpa, 128, "plain", 1.2, None),
        ("nn.TransformerEncoder", encoder, 16, "plain", None, None),
        ("nn.TransformerEncoder", encoder, 128, "plain", 1.3, None),
        ("nn.TransformerEncoder", encoder, 128, "plain, PyTorch's fast path", None, None),
    )
]
WATCHING += [
    Case(f"{name}, 128 tokens, in a mode that does nothing", watching(make, 128), NOTHING, "plain", None, threads=1)
    for name, make in (("written out by hand", written_out), ("own layers, SDPA", by_sdpa))
]
WATCHING += [
    Case(f"{name}, 128 tokens, forward + backward, {ours}", weighing(make, 128), ours, "plain", None, threads=1)
    for name, make in (("written out by hand", written_out), ("own layers, SDPA", by_sdpa))
    for ours in ("importance", "capture")
]
WATCHING.append(Case("entering the block again", entering, "capture", "nothing", None, added=2e-3, threads=1))
MONITORING = [
    Case("a training step, 512 tokens", monitored(512), "watched", "plain", None, threads=1),
    Case("a training step, 1,024 tokens", monitored(1024), "watched", "plain", None, threads=1),
    Case("20 training steps, one of them watched, 64 tokens", monitored(64, 20), "watched", "plain", None, threads=1),
]

TABLES = {
    "backends": BACKENDS,
    "operator": OPERATOR,
    "decoding": DECODING,
    "training": TRAINING,
    "watching": WATCHING,
    "monitoring": MONITORING,
}
WRITERS = ("seq2seq", "transformer")
TESTS = {  # what must be green before a table is measured: files, and the tests in them
    "backends": (["tests/test_conformance.py", "tests/ops/test_weights.py"], CONFORMANCE),
    "operator": (["tests/test_conformance.py", "tests/ops/test_weights.py"], CONFORMANCE),
    "decoding": (["tests/models/test_gpt.py", "tests/models/pretrained/test_translators.py"], "generate"),
    "training": (
        ["tests/train/test_fit.py", "tests/models/test_seq2seq.py", "tests/models/test_transformer.py"],
        "loss",
    ),
    "watching": (["tests/lens/test_capture.py"], "capture"),
    "monitoring": (["tests/lens/monitoring/test_monitor.py"], "numbers"),
}
