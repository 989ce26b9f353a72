"""Run the cases of all libraries and write docs/lens_cases.md: `python -m tests.lens.libraries`.

Each file of cases runs in a process of its own, so that a crash is one row. `python -m tests.lens.libraries by_hand`
runs one file again. Exits with 1 if a tape is wrong, misses a layer in silence, or raises.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

from .environment import NEWEST, REQUIREMENTS, requirements
from .judge import BAD, FAILED, NOT_INSTALLED, OUTCOMES, POINTS, RIGHT, SUMS, Row

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "lens_cases.md"
FILES = (
    "by_hand",
    "timm_models",
    "vit_pytorch_models",
    "vision",
    "diffusers_models",
    "x_transformers_models",
    "lucidrains",
    "text",
    "tables_and_graphs",
)
PARTS = (*FILES, "architectures")
SECONDS = 1500  # for one file of cases
INTRODUCTION = """\
Small random models of other libraries, with and without `capture`. The truth does not come from the lens: a mode below
autograd sees every softmax and every fused attention that PyTorch runs, and the operands of the products that follow.
Each matrix of the tape must agree with it within 2e-4, no row of it may be missing unless its layer is in
`tape.unseen`, and the outputs must be equal to the bit. Written by `make test-libraries`.""".splitlines()
ARCHITECTURES = "transformers (newest)"
NAMES = {"open_clip": "open_clip_torch", "fair-esm": "fair-esm"}  # libraries whose package has another name


def run_file(name: str, folder: Path) -> list[Row]:
    """Run one file of cases in a process of its own; a crash or a timeout is a row."""
    out = folder / f"{name}.jsonl"
    command = [sys.executable, "-m", "tests.lens.libraries.one_library", name, str(out)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    out.unlink(missing_ok=True)
    problem = ""
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, timeout=SECONDS, stdout=sys.stderr, check=False)
        if done.returncode:
            problem = f"the process ended with {done.returncode}"
    except subprocess.TimeoutExpired:
        problem = f"the process took more than {SECONDS} s"
    rows = read_rows(out)
    return [*rows, Row(name, "", FAILED, problem)] if problem else rows


def run_architectures(folder: Path) -> list[Row]:
    """Run the architectures of transformers on its newest version, if it is installed."""
    newest = Path(sys.prefix) / NEWEST
    if not newest.is_dir():
        return [Row(ARCHITECTURES, "", NOT_INSTALLED, f"no folder {NEWEST} in the environment")]
    report = folder / "architectures.xml"
    report.unlink(missing_ok=True)
    tests = "tests/lens/test_architectures.py"
    command = [
        python_of_torch(),
        "-m",
        "pytest",
        "-q",
        "-m",
        "",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
        tests,
    ]
    paths = [str(newest), str(ROOT), str(ROOT / "src")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run(command, cwd=ROOT, env=environment, timeout=SECONDS, stdout=sys.stderr, check=False)
    rows = []
    if not report.exists():
        return [Row(ARCHITECTURES, "", FAILED, "pytest wrote no report")]
    for each in ElementTree.parse(report).iter("testcase"):
        name = re.search(r"as_the_model_reports_it\[(.*)\]", each.attrib["name"])
        if name is None:
            continue
        failed = each.find("failure") if each.find("failure") is not None else each.find("error")
        if each.find("skipped") is not None:
            rows.append(Row(ARCHITECTURES, name[1], FAILED, each.find("skipped").attrib.get("message", "")))
        elif failed is not None:
            rows.append(Row(ARCHITECTURES, name[1], "wrong", " ".join(failed.attrib.get("message", "").split())[:200]))
        else:
            rows.append(Row(ARCHITECTURES, name[1], RIGHT))
    return rows


def python_of_torch() -> str:
    """Return the Python of the environment that PyTorch is in: there transformers finds none of the libraries."""
    torch = importlib.util.find_spec("torch")
    return str(Path(torch.origin).parents[4] / "bin" / "python")


def versions() -> dict[str, str]:
    """Return the version of each library, by the name of its package in lower case."""
    found = {}
    for line in requirements(REQUIREMENTS):
        name, _, version = line.partition("==")
        found[name.lower().replace("_", "-")] = version
    newest = list((Path(sys.prefix) / NEWEST).glob("transformers-*.dist-info"))
    if newest:
        found[ARCHITECTURES] = newest[0].name.removesuffix(".dist-info").rpartition("-")[2]
    return found


def page(rows: list[Row]) -> str:
    """Return the page: the counts, then one row per case."""
    known = versions()
    cases = [row for row in rows if row.library != ARCHITECTURES]
    ran = [row for row in cases if row.outcome not in (FAILED, NOT_INSTALLED)]
    counts, architectures = (Counter(row.outcome for row in each) for each in (cases, set_apart(rows)))
    edges, points = (sum(note in row.note for row in cases) for note in (SUMS, POINTS))
    lines = [
        "# Models of other libraries under capture",
        "",
        *INTRODUCTION,
        "",
        f"{len(ran)} cases ran, on PyTorch {importlib.metadata.version('torch').partition('+')[0]}.",
        "",
        "| outcome | cases |",
        "|---|---:|",
        *(f"| {name} | {counts[name]} |" for name in OUTCOMES if counts[name] or name in BAD),
        "",
        "- **right**: every matrix that the model used is on the tape.",
        "- **listed in unseen**: the entries of the tape are right, and `tape.unseen` or a warning names the others.",
        "- **refused with reason**: nothing was recorded, and `capture` raised and said why.",
        "- **wrong**, **missed in silence**, **raised**: errors of the lens. The command then fails.",
        f"- {edges} cases have weights over the edges of a graph, which no operator of PyTorch computes: there only",
        "  the sums of the rows were compared, not the weights.",
        f"- Sampled points are weighed in {points} case{'s' * (points != 1)}: their places were not compared.",
        "- **does not run here**, **not installed**: the library fails without capture too; these cases do not count.",
        "",
        f"transformers {known.get(ARCHITECTURES, '')}, the newest that installs: "
        + ", ".join(f"{architectures[name]} architectures {name}" for name in OUTCOMES if architectures[name])
        + ".",
        "",
        "| library | version | case | outcome | matrices | note |",
        "|---|---|---|---|---:|---|",
    ]
    shown = [row for row in rows if row.library != ARCHITECTURES or row.outcome != RIGHT]
    for row in shown:
        version = known.get(NAMES.get(row.library, row.library).lower().replace("_", "-"), "")
        matrices = row.matrices or ""
        lines.append(f"| {row.library} | {version} | {row.case} | {row.outcome} | {matrices} | {escaped(row.note)} |")
    return "\n".join(lines) + "\n"


def set_apart(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.library == ARCHITECTURES]


def escaped(note: str) -> str:
    """Return a note without characters that Markdown reads, and without paths of this machine."""
    note = re.sub(r"\(?/[\w./-]+/(site-packages|src)/[^\s)]*\)?", "", note)
    return re.sub(r"([*_<>\[\]`~])", r"\\\1", note)


def read_rows(path: Path) -> list[Row]:
    """Return the rows of one file of cases, as its last run left them."""
    return [Row(**json.loads(line)) for line in path.read_text(encoding="utf8").splitlines()] if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help=f"run these alone and keep the rows of the others: {', '.join(PARTS)}")
    given = parser.parse_args()
    folder = Path(sys.prefix) / "rows"
    folder.mkdir(exist_ok=True)
    for name in given.files or PARTS:
        rows = run_architectures(folder) if name == PARTS[-1] else run_file(name, folder)
        lines = (json.dumps(dataclasses.asdict(row)) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf8")
    rows = [row for name in PARTS for row in read_rows(folder / f"{name}.jsonl")]
    PAGE.write_text(page(rows), encoding="utf8")
    counts = Counter(row.outcome for row in rows)
    for row in rows:
        if row.outcome in BAD:
            print(f"{row.library} | {row.case} | {row.outcome} | {row.note}")
    print(", ".join(f"{counts[name]} {name}" for name in OUTCOMES))
    raise SystemExit(any(counts[name] for name in BAD))


if __name__ == "__main__":
    main()
