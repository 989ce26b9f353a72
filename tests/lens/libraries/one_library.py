"""Run the cases of one library: `python -m tests.lens.libraries.one_library timm rows.jsonl`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import re
import sys
import traceback
from importlib import import_module
from pathlib import Path

import torch

from .judge import NOT_INSTALLED, Row, judge


def define_vision_operators() -> None:
    """Declare two operators of torchvision, which does not import if its compiled library does not load."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    with contextlib.suppress(RuntimeError):
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define(
            "qnms(Tensor dets, Tensor dets_scale, Tensor scores, float iou_threshold, float scale) -> Tensor"
        )
    define_vision_operators.library = library  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library")
    parser.add_argument("out", type=Path)
    parser.add_argument("--case", default="", help="regular expression of the cases to run")
    given = parser.parse_args()
    torch.set_num_threads(1)
    define_vision_operators()
    module = import_module(f"tests.lens.libraries.{given.library}")
    with given.out.open("w", encoding="utf8") as out:

        def write(row: Row) -> None:
            print(json.dumps(dataclasses.asdict(row)), file=out, flush=True)
            print(row.library, "|", row.case, "|", row.outcome, "|", row.note, file=sys.stderr, flush=True)

        for library, cases in module.LIBRARIES.items():
            try:
                listed = list(cases())
            except Exception as error:
                traceback.print_exc()
                write(Row(library, "", NOT_INSTALLED, " ".join(f"{type(error).__name__}: {error}".split())[:200]))
                continue
            for case in listed:
                if re.search(given.case, case.name):
                    write(judge(library, case))


if __name__ == "__main__":
    main()
