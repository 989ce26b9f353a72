"""An interpreter that has the slow imports behind it and runs each script in a fork of itself.

To import PyTorch, transformers and Matplotlib takes longer than most snippets of the docs.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

MODULES = ("torch._dynamo", "matplotlib.pyplot", "regard.lens", "regard.tasks", "regard.views", "transformers")
LIMIT_IN_SECONDS = 600


class WarmInterpreter:
    """`run(["script.py", "argument"], folder)` does what `python script.py argument` does there, as does `-c code`."""

    def __init__(self) -> None:
        environment = os.environ | {"MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # so that `close` ends a script too that does not end
        )

    def run(self, arguments: list[str], folder: Path) -> str:
        """Return what a script prints; it must end without an error."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        out, errors = (folder.parent / f"{folder.name}.{name}" for name in ("out", "errors"))
        job = {"arguments": arguments, "folder": str(folder), "out": str(out), "errors": str(errors)}
        self._server.stdin.write(json.dumps(job).encode() + b"\n")
        self._server.stdin.flush()
        ended = select.select([self._server.stdout], [], [], LIMIT_IN_SECONDS)[0]
        assert ended, f"{arguments[0]} takes more than {LIMIT_IN_SECONDS} seconds"
        assert self._server.stdout.readline() == b"0\n", errors.read_text(encoding="utf8")
        return out.read_text(encoding="utf8")

    def close(self) -> None:
        """End the interpreter and what runs in it."""
        os.killpg(self._server.pid, signal.SIGKILL)
        self._server.communicate()


def serve() -> dict[str, Any] | None:
    """Fork for each line of the input, and print the exit status of the fork; return the job in the fork."""
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            return json.loads(line)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return None


def run_script(arguments: list[str], folder: str, out: str, errors: str) -> None:
    """Run a script, or the code after `-c`, as the main module of this process."""
    os.chdir(folder)
    for stream, path in ((0, os.devnull), (1, out), (2, errors)):
        os.dup2(os.open(path, os.O_RDONLY if stream == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    sys.stdin = open(0, encoding="utf8", closefd=False)  # noqa: SIM115, the fork has read ahead in the other one
    first, *rest = arguments
    if first == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    else:
        sys.argv, sys.path[0] = arguments, str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")


def read_weights_once() -> None:
    """Keep what a GGUF file holds: transformers reads one three times, and lists the names anew for each module."""
    if find_spec("gguf") is not None:
        gguf = importlib.import_module("gguf")
        gguf.GGUFReader, gguf.get_tensor_name_map = cache(gguf.GGUFReader), cache(gguf.get_tensor_name_map)


if __name__ == "__main__":
    for name in MODULES:
        if find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    read_weights_once()
    if (job := serve()) is not None:
        run_script(**job)
