"""The command line of `python -m results`."""

from __future__ import annotations

import argparse
import difflib
import math
import sys
from collections.abc import Mapping
from pathlib import Path

from . import ledger, table
from .data import prepare
from .ledger import Ledger
from .recipe import Recipe, recipes
from .runner import Runner

FEW = 24  # examples of each file, where it is only to be seen that everything runs


def main() -> int:
    """List recipes, run some, or write the table; the exit code."""
    known = recipes()
    parser = argparse.ArgumentParser(prog="python -m results", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the recipes")
    run = commands.add_parser("run", help="train and measure")
    run.add_argument("names", nargs="+", metavar="NAME[:SEED]", help="recipes, with all their seeds or one; or all")
    run.add_argument("--data", type=Path, required=True, help="the folder with the data sets")
    run.add_argument("--work", type=Path, default=Path("runs/results"), help="where runs and unpacked data go")
    run.add_argument("--seed", type=int, help="one seed, in place of those of the recipes")
    run.add_argument("--jobs", type=int, default=1, help="runs at a time")
    run.add_argument("--deadline", type=float, default=math.inf, help="seconds after which trainings end")
    run.add_argument("--smoke", action="store_true", help="a few steps on a few lines, to see that everything runs")
    run.add_argument("--csv", type=Path, default=ledger.FILE, help="the table to append to")
    run.add_argument("--commit", default=ledger.commit(), help="what the rows name as the commit")
    shown = commands.add_parser("table", help="write the table of docs/results.md")
    shown.add_argument("--csv", type=Path, default=ledger.FILE, help="the table to read")
    given = parser.parse_args()
    if given.command == "list":
        for recipe in known.values():
            print(f"{recipe.name:26} {recipe.task} ({recipe.data}), {len(recipe.seeds)} seed(s)")
        return 0
    if given.command == "table":
        table.write(known, Ledger(given.csv).rows())
        return 0
    names = known if "all" in given.names else given.names
    chosen = [pair for name in names for pair in named(name, known, given.seed)]
    folders = {folder for recipe, _ in chosen for folder in recipe.folders}
    prepare(given.data, given.work / "data", folders, few=FEW if given.smoke else None)
    runner = Runner(given.work, Ledger(given.csv), given.jobs, given.deadline, given.smoke, given.commit)
    failed = runner.run(chosen)
    if failed:
        print(f"without a result: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def named(name: str, known: Mapping[str, Recipe], seed: int | None) -> list[tuple[Recipe, int]]:
    """The recipe of a name with each of its seeds, with the one behind a colon, or with `seed`."""
    name, _, own = name.partition(":")
    if name not in known:
        nearest = difflib.get_close_matches(name, known, n=1)
        raise SystemExit(f"error: there is no recipe {name!r}" + (f"; did you mean {nearest[0]!r}?" if nearest else ""))
    recipe = known[name]
    seeds = (int(own),) if own else recipe.seeds if seed is None else (seed,)
    return [(recipe, one) for one in seeds]


if __name__ == "__main__":
    sys.exit(main())
