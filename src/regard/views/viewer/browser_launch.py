"""Open the browser at an address with a token, without the token on the browser's command line.

Every user of a machine can read the command lines of all processes. The browser is given a file that only its user may
read, and the file redirects to the address.
"""

from __future__ import annotations

import html
import os
import tempfile
import webbrowser
from contextlib import suppress
from pathlib import Path


def write_redirect(url: str) -> Path:
    """Write a page that redirects to the address, in a new file that only this user may read."""
    handle, name = tempfile.mkstemp(prefix="regard-", suffix=".html")  # mode 0600
    target = html.escape(url)
    with os.fdopen(handle, "w", encoding="utf8") as file:
        file.write(
            f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={target}">'
            f'<title>regard</title><a href="{target}">Open the viewer</a>'
        )
    return Path(name)


def launch_browser(path: Path) -> bool:
    """Open a local page in the browser, and delete it if there is no browser."""
    if webbrowser.open(path.as_uri()):
        return True
    remove_redirect(path)
    return False


def remove_redirect(path: Path) -> None:
    """Delete the page, unless that was done before."""
    with suppress(OSError):
        path.unlink()
