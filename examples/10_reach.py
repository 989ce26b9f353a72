# --8<-- [start:code]
"""Local, sparse, memory: what a pattern costs, and how far it lets a token see through the layers.

Writes 10_patterns.png, six masks, and 10_reach.png: the time they take on longer and longer sequences, and how much of
the past has reached the last token after so many layers.
"""

import sys
import time
import timeit
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from regard import Blocks, Causal, Dilated, Prefix, Window, attend, weights
from regard.nn import Attention, SegmentMemory
from regard.views.figures.canvas import WHITE_TO_DARK

torch.manual_seed(0)
torch.set_grad_enabled(False)  # nothing is trained here
n, w, lengths = 256, 16, (1024, 2048, 4096, 8192)
folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images")


def patterns(n, w):
    """Six ways to look back over n tokens, about w of them at a time."""
    layout = torch.rand(n // w, n // w) < 1.5 / (n // w)  # one or two blocks a row, drawn once
    return {
        "Causal()": Causal(),
        "& Window(w)": Causal() & Window(w),
        "& Dilated(w, 4)": Causal() & Dilated(w, 4),
        "& (Window(w) | Prefix(4))": Causal() & (Window(w) | Prefix(4)),
        "& (Window(w) | Dilated(n, w))": Causal() & (Window(w) | Dilated(n, w)),
        "& (Window(w) | Blocks(drawn, w))": Causal() & (Window(w) | Blocks(layout, w)),
    }


def milliseconds(mask, n):
    """The better of two runs of one head, 64 wide, on one backend for all: the processor's own time."""
    q, k, v = torch.randn(3, 1, 1, n, 64)
    run = timeit.Timer(lambda: attend(q, k, v, mask=mask, backend="tiled"), timer=time.process_time)
    return 1e3 * min(run.repeat(2, number=1))


masks, reaches, times = {}, {}, {}
x = torch.zeros(1, 1, n, 8)
print(f"{'pairs':>40}{'seen by the last after 1':>27}{'2':>5}{'4':>5}{'8 layers':>11}")
for name, mask in patterns(n, w).items():
    seen = masks[name] = weights(x, x, mask=mask)[0, 0] > 0  # n n
    reached = torch.eye(n)[-1] > 0
    reach = reaches[name] = []
    for _ in range(16):
        reached = (reached.float() @ seen.float()) > 0  # whatever one of those sees whom the last token sees
        reach.append(int(reached.sum()))
    print(f"{name:33}{seen.float().mean():7.1%}{reach[0]:27}{reach[1]:5}{reach[3]:5}{reach[7]:11}")
for name in patterns(n, w):
    costs = times[name] = [milliseconds(patterns(length, 128)[name], length) for length in lengths]
    print(f"{name:33}" + "".join(f"{cost:8.0f} ms" for cost in costs))

# Memory: a text in segments, of which each layer keeps its last w states. How far back is a change still felt?
text = torch.randn(1, 128, 32).repeat(129, 1, 1)
text[range(128), range(128)] = 0.0  # row r without token r, the last row whole
for depth in (1, 2, 3, 4):
    layers = [(Attention(32, 4, mask=Causal()), SegmentMemory(w)) for _ in range(depth)]
    for segment in text.split(w, 1):
        for layer, memory in layers:
            segment = segment + layer(segment, memory.extend(segment))
    felt = (segment[:-1, -1] != segment[-1, -1]).any(-1).sum()  # in how many rows is the last state another?
    print(f"depth {depth}, a memory of {w} states a layer: the last token feels {felt} tokens")
layer = Attention(32, 4, mask=Causal() & Window(w))
cache = layer.new_cache()
for token in torch.randn(1000, 1, 1, 32):
    layer(token, cache=cache)
print(f"after {cache.length} tokens, a window of {w} has kept the keys of {cache.kept}")
# --8<-- [end:code]
# --8<-- [start:figures]

plt.style.use(Path(__file__).with_name("book.mplstyle"))
figure, panels = plt.subplots(1, 6, figsize=(12, 2.4), subplot_kw={"xticks": [], "yticks": []})
chart, (left, right) = plt.subplots(1, 2, figsize=(11, 3.4))
for panel, (name, seen) in zip(panels, masks.items(), strict=True):
    panel.imshow(seen, cmap=WHITE_TO_DARK, vmin=0, vmax=1.6)
    panel.set_title(name, fontsize=7)
    right.plot(range(1, 17), reaches[name], marker="o", label=name)
    left.loglog(lengths, times[name], marker="o")
left.set(xlabel="tokens, w = 128", ylabel="milliseconds of one core")
left.set_xticks(lengths, [f"{length:,}" for length in lengths])
left.minorticks_off()
right.set(xlabel=f"layers, w = {w}", xticks=range(2, 17, 2), ylabel=f"of {n} tokens seen by the last")
right.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
figure.savefig(folder / "10_patterns.png")
chart.savefig(folder / "10_reach.png")
# --8<-- [end:figures]
