"""The server of a run page: the document, its scripts and styles, and the curves and heads as they are now."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...lens.monitoring.head_history import HeadHistory
from ..heads_page.heads_document import heads_to_json
from ..inline_document import SCRIPT, STYLE
from ..viewer.server import TokenServer, open_or_print
from ..viewer.sockets import LOOPBACK
from .run_document import RunState, document, read_asset, to_json


class RunViewer(TokenServer):
    """A running page of a run, at `url`, until `close` or the end of a `with` block.

    `read` returns the state of the run; the server calls it whenever a browser asks for the curves. `read_heads`
    returns the history of heads, for the tab that shows them.
    """

    def __init__(
        self,
        read: Callable[[], RunState],
        read_heads: Callable[[], HeadHistory] | None = None,
        *,
        host: str = LOOPBACK,
        port: int | None = None,
        allow_host: Sequence[str] = (),
    ) -> None:
        name = read().name  # raises before the server starts
        super().__init__(
            partial(application, read, read_heads, name),
            host=host,
            port=port,
            allow_host=allow_host,
            others="anyone with its URL can see the run",
        )


def serve_run(
    read: Callable[[], RunState],
    read_heads: Callable[[], HeadHistory] | None = None,
    *,
    host: str = LOOPBACK,
    port: int | None = None,
    allow_host: Sequence[str] = (),
    open_browser: bool = True,
) -> RunViewer:
    """Serve the page of a run, and open it in a browser or print its address."""
    return open_or_print(RunViewer(read, read_heads, host=host, port=port, allow_host=allow_host), open_browser)


def application(read: Callable[[], RunState], read_heads: Callable[[], HeadHistory] | None, name: str) -> Starlette:
    """Build the application. Serve it behind `TokenAuth` only."""
    page = document(name)
    kinds = {**dict.fromkeys(SCRIPT.findall(page), "text/javascript"), **dict.fromkeys(STYLE.findall(page), "text/css")}
    routes = [
        Route("/", partial(_send, page, "text/html")),
        *(Route(f"/{file}", partial(_send, read_asset(file), kind)) for file, kind in kinds.items()),
        Route("/api/run", partial(_send_json, lambda: to_json(read()))),
    ]
    if read_heads is not None:
        routes.append(Route("/api/heads", partial(_send_json, lambda: heads_to_json(read_heads()))))
    app = Starlette(routes=routes, exception_handlers={HTTPException: _not_found, Exception: _internal_error})
    app.router.redirect_slashes = False
    return app


async def _send(body: str, kind: str, request: Request) -> Response:
    return Response(body, media_type=kind)


async def _send_json(read: Callable[[], object], request: Request) -> Response:
    try:
        found = await asyncio.to_thread(read)
    except (OSError, ValueError) as error:
        return _error(500, str(error), "look into the folder of the run")
    return Response(json.dumps(found, ensure_ascii=False), media_type="application/json")


async def _not_found(request: Request, error: Exception) -> Response:
    return _error(404, "not found", "open the URL printed in the terminal")


async def _internal_error(request: Request, error: Exception) -> Response:
    return _error(500, "the server failed to answer this request", "reload the page")


def _error(status: int, error: str, hint: str) -> Response:
    return Response(json.dumps({"error": error, "hint": hint}), status, media_type="application/json")
