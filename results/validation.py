"""A number of the validation of a run: the best where lower is better, else the last.

python -m results.validation runs/a --metric loss
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

LOWER = ("loss", "bits", "perplexity")


def validated(run: Path, metric: str) -> float:
    """What `evaluations.csv` of a run says of a metric."""
    with (run / "evaluations.csv").open(encoding="utf8", newline="") as file:
        values = [float(row[metric]) for row in csv.DictReader(file)]
    return min(values) if metric in LOWER else values[-1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--metric", required=True)
    given = parser.parse_args()
    print(given.metric, f"{validated(given.run, given.metric):.4f}")
