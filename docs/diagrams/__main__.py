"""Draw the diagrams of the book: `python docs/diagrams docs/images/diagrams [NAME ...]`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from drawing import save

NAMES = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in ("__main__", "drawing"))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[2:] or NAMES:
        save(importlib.import_module(name).draw(), folder / f"{name}.svg")
