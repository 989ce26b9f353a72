"""`regard serve`: answer requests over HTTP."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .device import Device
from .stdin_lines import Runs

if TYPE_CHECKING:
    from ..serving.endpoints import Endpoint


def serve(
    folders: Runs,
    host: Annotated[str, typer.Option(help="Address to listen at; other machines can reach any but 127.0.0.1.")] = (
        "127.0.0.1"
    ),
    port: Annotated[
        int | None, typer.Option(help="Port. Default: 8765, or the next free one if it is taken; 0 for any.")
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Another name of this machine that requests may use; may be repeated.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File that holds the token of requests. Default: a new token, printed.")
    ] = None,
    device: Device = None,
) -> None:
    """Answer requests for a run over HTTP: translate, summarize, answer, classify, caption or generate.

    Examples:

        regard serve runs/deen

        regard serve runs/deen runs/deen2 --port 9000 --token-file ~/.regard-token

    Requests that wait are run together. GET / is a page that shows how to ask.
    """
    from .. import serving  # it imports the web server

    token = None if token_file is None else token_file.read_text(encoding="utf8").strip()
    with serving.serve(
        *folders, host=host, port=port, allow_host=allow_host or (), token=token, device=device
    ) as server:
        print(f"{server.endpoint.doing} with {', '.join(map(str, folders))} at http://{server.address}")
        print(_curl(server.address, server.endpoint, server.token if token_file is None else f"$(cat {token_file})"))
        sys.stdout.flush()
        server.wait()


def _curl(address: str, endpoint: Endpoint, token: str) -> str:
    """Return a command that asks the server."""
    headers = f'-H "Authorization: Bearer {token}" -H "Content-Type: application/json"'
    return f"curl http://{address}{endpoint.path} {headers} -d '{json.dumps(endpoint.request)}'"
