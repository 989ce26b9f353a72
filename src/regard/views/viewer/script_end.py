"""Keep the viewers of a script serving after its last line, until Ctrl-C.

A viewer ends with its process. In a Python prompt or a notebook the process stays; a script would end before the user
opens the address.
"""

from __future__ import annotations

import atexit
import sys
from typing import Protocol


class Served(Protocol):
    """A viewer that may still be serving."""

    @property
    def is_open(self) -> bool: ...

    @property
    def url(self) -> str: ...

    def wait(self, printed: str | None = None) -> None: ...

    def close(self) -> None: ...


_viewers: list[Served] = []


def is_script() -> bool:
    """Whether this process ends after the last line of a program: no prompt, no notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return not (hasattr(sys, "ps1") or sys.flags.interactive or shell is not None)


def wait_at_exit(viewer: Served) -> None:
    """Let the script wait for this viewer at its end, unless the viewer is closed by then."""
    if is_script():
        if not _viewers:
            atexit.register(_wait)
        _viewers.append(viewer)


def _wait() -> None:
    """Serve until Ctrl-C; after an uncaught exception close the viewers at once."""
    serving = [viewer for viewer in _viewers if viewer.is_open]
    if serving and not hasattr(sys, "last_value"):
        addresses = [viewer.url for viewer in serving]
        print(f"the viewer keeps serving at {' and '.join(addresses)}; press Ctrl-C to stop it", flush=True)
        serving[-1].wait(addresses[-1])
    for viewer in serving:
        viewer.close()
