"""Read a JSON file, with errors that name the file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .compression import read_content
from .errors import DataError
from .lines import Lines

MAX_BYTES = 2**30


def read_json(path: str | Path) -> Any:
    """Return the content of a JSON file, plain or gzip, of at most 1 GiB."""
    file = Lines(path).path
    try:
        return json.loads(read_content(file, MAX_BYTES).decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        problem = f"byte {error.start + 1} is not valid UTF-8"
        raise DataError(problem, file=file, hint="convert it with iconv") from error
    except json.JSONDecodeError as error:
        raise DataError(f"not valid JSON: {error.msg}", file=file, line=error.lineno) from error
    except RecursionError as error:
        raise DataError("not valid JSON: nested too deeply", file=file) from error
