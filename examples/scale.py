"""What it costs to keep the attention of a large model over a long text, in bytes and in seconds.

    python examples/scale.py --tokens 1048576 --layers 80 --heads 64 --kv-heads 8 --width 128 --gpus 64

Writes scale.png, what is kept by the length of the text. Bytes are counted, seconds are scaled from a measured rate:
causal attention of 16 heads, 16,384 tokens, 128 wide, in bfloat16 takes 1.75 ms on one H200 (cuDNN, by PyTorch), and
all its measures, from our kernels, 0.70 times that once more. `--forward` and `--measures` take what your machine does:
`python -m benchmarks.gpu` measures it.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt

MEASURED = {"heads": 16, "tokens": 16_384, "width": 128}
MAP = 512  # a side of the map that a summary keeps
MEASURES = 4  # entropy, received, max and distance, a number for each token and head


def shown(nbytes: float) -> str:
    """Bytes as people say them: 1.5e12 -> '1.50 TB'."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} PB"


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("folder", type=Path, nargs="?", default=Path("docs/images"), help="for the figure")
parser.add_argument("--tokens", type=int, default=2**20)
parser.add_argument("--layers", type=int, default=80)
parser.add_argument("--heads", type=int, default=64)
parser.add_argument("--kv-heads", type=int, default=8)
parser.add_argument("--width", type=int, default=128, help="of a head")
parser.add_argument("--gpus", type=int, default=64, help="that share the work evenly")
parser.add_argument("--forward", type=float, default=1.75e-3, help="seconds of the measured forward pass")
parser.add_argument("--measures", type=float, default=0.70, help="cost of all measures, in forward passes")
parser.add_argument("--link", type=float, default=25e9, help="bytes a second that leave a machine, assumed")
a = parser.parse_args()


def kept(tokens: int) -> dict[str, float]:
    """The bytes of a layer, by what is kept of it."""
    rows, pair = tokens * a.heads, 2 * a.width * tokens  # row statistics; one head of queries or keys in bfloat16
    return {
        "the matrices, bfloat16": 2 * rows * tokens,
        "q, k and a number a row": pair * (a.heads + a.kv_heads) + 4 * rows,
        "the same, of 4 heads": pair * (4 + min(4, a.kv_heads)) + 4 * 4 * tokens,
        "measures and maps": 4 * MEASURES * rows + 4 * MAP**2 * a.heads,
        "maps alone": 4 * MAP**2 * a.heads,
    }


bytes_of = kept(a.tokens)
scale = (a.tokens / MEASURED["tokens"]) ** 2 * (a.heads / MEASURED["heads"]) * (a.width / MEASURED["width"])
forward = a.forward * scale * a.layers
seconds_of = {
    "attention, forward": forward,
    "measures, once more": forward * a.measures,
    "sending q and k of all layers": bytes_of["q, k and a number a row"] * a.layers / a.link,
}

print(f"{a.layers} layers, {a.heads} heads ({a.kv_heads} of keys), {a.width} wide, {a.tokens:,} tokens, {a.gpus} GPUs")
print(f"\n{'kept':30}{'a layer':>12}{'all layers':>14}{'a GPU':>12}")
for name, nbytes in bytes_of.items():
    print(f"{name:30}{shown(nbytes):>12}{shown(nbytes * a.layers):>14}{shown(nbytes * a.layers / a.gpus):>12}")
print(f"\n{'time':30}{'a layer':>12}{'all layers':>14}{f'{a.gpus} GPUs':>12}")
for name, seconds in seconds_of.items():
    print(f"{name:30}{seconds / a.layers:>10.2f} s{seconds:>12,.0f} s{seconds / a.gpus:>10.1f} s")

lengths = [2**n for n in range(12, 22)]
figure, panel = plt.subplots(figsize=(7.5, 3.4), constrained_layout=True)
for name in bytes_of:
    panel.plot(lengths, [kept(n)[name] * a.layers for n in lengths], marker="o", markersize=3, label=name)
for name, nbytes in {"a GPU of 141 GB": 141e9, "64 of them": 64 * 141e9}.items():
    panel.axhline(nbytes, color="black", linewidth=0.8, linestyle=":")
    panel.text(1.2 * lengths[1], 1.2 * nbytes, name, fontsize=8)
panel.set(xlabel="tokens", ylabel=f"bytes of {a.layers} layers", xscale="log", yscale="log")
panel.spines[["top", "right"]].set_visible(False)
panel.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
a.folder.mkdir(parents=True, exist_ok=True)
figure.savefig(a.folder / "scale.png", dpi=90)
