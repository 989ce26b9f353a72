"""Draw what watching costs, from the table of the benchmark: `python docs/site/watching_chart.py watching.png`."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "benchmarks" / "results" / "lens_gpu.csv"
LINES = {
    "eager with output_attentions": ("eager, with output_attentions", "#b5367a", "o"),
    "capture, summaries": ("fused, captured, with a summary of every head", "#e8853f", "s"),
    "capture, q and k": ("fused, captured", "#3b0f70", "D"),
}


def ratios() -> dict[str, dict[int, float]]:
    """Return, for each case, the time over that of the plain fused pass by the number of tokens."""
    with TABLE.open(encoding="utf8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["case"] in LINES and row["ratio"]]
    found: dict[str, dict[int, float]] = {case: {} for case in LINES}
    for row in rows:
        found[row["case"]][int(row["tokens"].replace(",", ""))] = float(row["ratio"])
    return found


def draw(path: Path) -> None:
    """Draw the chart."""
    plt.style.use(ROOT / "examples" / "book.mplstyle")
    figure, axes = plt.subplots(figsize=(7.2, 3.0))
    for case, times in ratios().items():
        label, colour, marker = LINES[case]
        axes.plot(list(times), list(times.values()), marker=marker, markersize=5, color=colour, label=label)
        for n, (tokens, ratio) in enumerate(times.items()):
            offset = (0, -13) if case == "capture, q and k" else (24, -9) if n == 0 and "summ" in case else (0, 7)
            axes.annotate(
                f"{ratio:.2f}x",
                (tokens, ratio),
                offset,
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color=colour,
            )
    last, ratio = list(ratios()["eager with output_attentions"].items())[-1]
    axes.annotate(
        "out of memory\nfrom 32,768 tokens on",
        (last, ratio),
        (last * 2.1, ratio - 0.2),
        fontsize=8,
        color="#b5367a",
        va="center",
        arrowprops={"arrowstyle": "<-", "color": "#b5367a"},
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks([2048, 8192, 32768, 131072], ["2,048", "8,192", "32,768", "131,072"])
    axes.set_xlabel("tokens")
    axes.set_ylabel("time of a forward pass,\nplain fused pass = 1")
    axes.set_ylim(0.5, 6.5)
    axes.axhline(1, color="#999999", linewidth=0.8, zorder=0)
    axes.legend(loc="center right")
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
