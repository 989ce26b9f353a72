"""The HTTP server of the viewer, on the loopback interface unless a host is given."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from threading import Event, Thread
from typing import Self, TypeVar

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ...lens.tape import archive
from ...lens.tape.kept_summaries import KeptSummaries
from ...lens.tape.tape import Tape
from .api import ViewerApi
from .auth import TokenAuth
from .browser_launch import launch_browser, remove_redirect, write_redirect
from .captures import ApiError, Pending
from .describe import Capture
from .http import ANSWER_SECONDS, server_config
from .notebook import find_notebook, show_in_colab
from .routes import JSON, RESOURCES, Resource, parse_query
from .script_end import wait_at_exit
from .sockets import LOOPBACK, open_socket
from .worker import Closed, Worker

S = TypeVar("S", bound="TokenServer")
STATIC = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/app.css": ("app.css", "text/css; charset=utf-8"),
}


class TokenServer:
    """A server for the browsers of one user, at `url`, until `close` or the end of a `with` block.

    As the last line of a notebook cell it shows itself in the notebook. `application` builds what it serves, and
    `others` completes the warning about an address that other machines can reach.
    """

    def __init__(
        self,
        application: Callable[[], ASGIApp],
        *,
        host: str,
        port: int | None,
        allow_host: Sequence[str],
        others: str,
    ) -> None:
        self._socket = open_socket(host, port, others=others)
        self.port: int = self._socket.getsockname()[1]
        self._notebook = find_notebook(self.port)
        self._redirects: list[Path] = []
        address = f"{f'[{host}]' if ':' in host else host}:{self.port}"
        self.auth = TokenAuth(
            application(),
            address,
            allowed=allow_host,
            embedding=None if self._notebook is None else self._notebook.embedding,
        )
        self._server = uvicorn.Server(server_config(self.auth))
        self._ended = Event()  # `Thread.join` takes a running thread for ended once Ctrl-C interrupted it
        Thread(target=self._serve, name="regard-viewer", daemon=True).start()
        while not (self._server.started or self._ended.is_set()):
            time.sleep(0.005)

    def _serve(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._ended.set()

    @property
    def url(self) -> str:
        """An address that no browser has used yet: each works once, and gives its browser a cookie."""
        return self._address(self.auth.token)

    def _address(self, token: str) -> str:
        return f"http://{self.auth.host}/?token={token}"

    @property
    def is_open(self) -> bool:
        """Whether the server answers."""
        return not (self._ended.is_set() or self._server.should_exit)

    @property
    def is_in_notebook(self) -> bool:
        """Whether the server runs in the kernel of a notebook, which can show it in a frame."""
        return self._notebook is not None

    def open_browser(self) -> bool:
        """Open the page in a browser; returns False if this machine has none."""
        token = self.auth.new_token(lambda: remove_redirect(path))
        path = write_redirect(self._address(token))
        self._redirects.append(path)
        return launch_browser(path)

    def wait(self, printed: str | None = None) -> None:
        """Serve until interrupted; print a new address whenever a browser used the printed one, or `printed`."""
        printed = self.url if printed is None else printed
        try:
            while not self._ended.wait(0.5):
                if self.is_open and printed != self.url:
                    printed = self.url
                    print(f"for another browser: {printed}", flush=True)
        except KeyboardInterrupt:
            pass
        finally:
            self.close()

    def close(self) -> None:
        """Stop serving."""
        self._server.should_exit = True
        self._ended.wait(10)
        self._socket.close()
        for path in self._redirects:
            remove_redirect(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"{name} at {self.url}" if self.is_open else f"{name}, closed"

    def _repr_html_(self) -> str | None:
        """Return the page in a frame, None outside of notebooks."""
        if self._notebook is None or self._notebook.base is None or not self.is_open:
            return None
        return self._notebook.frame(self.auth.new_token(), self.auth.new_token())

    def _ipython_display_(self) -> None:
        """Show the page in Colab, which makes the frame itself; elsewhere IPython takes the other formats."""
        if self._notebook is None or self._notebook.base is not None or not self.is_open:
            raise NotImplementedError
        show_in_colab(self.port, self.auth.new_token())


class Viewer(TokenServer):
    """A running viewer, at `url`, until `close` or the end of a `with` block.

    As the last line of a notebook cell it shows itself in the notebook.
    """

    def __init__(
        self,
        captures: Sequence[Capture],
        *,
        host: str = LOOPBACK,
        port: int | None = None,
        allow_host: Sequence[str] = (),
        device: str | torch.device | None = None,
        checks: Sequence[Path] = (),
    ) -> None:
        place = None if device is None else _check_device(device)

        def build() -> ASGIApp:
            self._worker = Worker()
            return application(ViewerApi(captures, self._worker, place), self._worker, checks)

        others = "anyone with its URL can see the captures"
        super().__init__(build, host=host, port=port, allow_host=allow_host, others=others)

    def close(self) -> None:
        """Stop serving."""
        self._worker.close()  # first, so that waiting requests are answered
        super().close()


def view(
    tape: Tape,
    other: Tape | None = None,
    *,
    name: str = "capture",
    port: int | None = None,
    allow_host: Sequence[str] = (),
    device: str | torch.device | None = None,
    open_browser: bool = True,
) -> Viewer:
    """Serve one tape, or two side by side, from memory; maps are computed on `device` (default: the tape's).

    A notebook shows the viewer below the cell. A script serves after its last line, until Ctrl-C or `close`.
    """
    captures = [Capture(tape, name)] if other is None else [Capture(tape, f"{name} 1"), Capture(other, f"{name} 2")]
    return open_or_print(Viewer(captures, port=port, allow_host=allow_host, device=device), open_browser)


def serve(
    captures: str | Path | Sequence[str | Path],
    *,
    host: str = LOOPBACK,
    port: int | None = None,
    allow_host: Sequence[str] = (),
    device: str | torch.device | None = None,
    keep_summaries: bool = True,
    open_browser: bool = True,
) -> Viewer:
    """Serve one capture file, or two side by side; tensors stay in the files and are verified in the background.

    With a `device` such as "cuda" the heads on display are copied there, and every tile is exact at once.
    The port is 8765 or, if that is taken, the next free one. `allow_host` are names of this machine under which a
    browser may open the viewer, `name:port` or `name` for every port. Summaries of layers that take long to measure are
    kept in a folder beside the capture, `look.safetensors.summaries`, for the next time.
    """
    paths = [Path(path) for path in ([captures] if isinstance(captures, str | Path) else captures)]
    if not 1 <= len(paths) <= 2:
        raise ValueError(f"the viewer shows one capture or two side by side, got {len(paths)}")
    named = [Capture(Tape.open(path), path.stem, KeptSummaries(path) if keep_summaries else None) for path in paths]
    viewer = Viewer(named, host=host, port=port, allow_host=allow_host, device=device, checks=paths)
    return open_or_print(viewer, open_browser)


def application(answers: ViewerApi, worker: Worker, checks: Sequence[Path] = ()) -> Starlette:
    """Build the application: three static files and a route for each resource. Serve it behind `TokenAuth` only."""
    damaged: dict[int, ApiError] = {}
    for number, path in enumerate(checks):
        worker.schedule(("check", number), partial(_verify_file, path, number, damaged))
    static = [Route(path, partial(_static, read_bundled(name), kind)) for path, (name, kind) in STATIC.items()]
    routes = [
        Route(f"/api/{name}", partial(_resource, name, resource, answers, worker, damaged))
        for name, resource in RESOURCES.items()
    ]
    app = Starlette(
        routes=[*static, *routes], exception_handlers={HTTPException: _not_found, Exception: _internal_error}
    )
    app.router.redirect_slashes = False
    return app


async def _static(body: bytes, kind: str, request: Request) -> Response:
    return Response(body, media_type=kind)


async def _resource(
    name: str, resource: Resource, answers: ViewerApi, worker: Worker, damaged: dict[int, ApiError], request: Request
) -> Response:
    try:
        parameters = parse_query(name, request.url.query)
        if damaged:
            raise next(iter(damaged.values()))
        future = worker.do(partial(resource.answer, answers, **parameters))
        body = await asyncio.wait_for(asyncio.wrap_future(future), ANSWER_SECONDS)
    except ApiError as refused:
        return _error(refused.status, refused.error, refused.hint)
    except Pending as pending:
        shown = {"pending": True, "retry": 0.5, "done": pending.done}
        return Response(json.dumps(shown), 202, media_type=JSON)
    except Closed:
        return _error(503, "the viewer is closing", "start it again")
    except TimeoutError:
        return _error(503, f"the answer takes more than {ANSWER_SECONDS} seconds", "try again, or request less")
    return Response(body, media_type=resource.type)


async def _not_found(request: Request, error: Exception) -> Response:
    return _error(404, "not found", "open the URL printed in the terminal")


async def _internal_error(request: Request, error: Exception) -> Response:
    return _error(500, "the viewer failed to answer this request", "try another part of the map")


def _error(status: int, error: str, hint: str) -> Response:
    return Response(json.dumps({"error": error, "hint": hint}), status, media_type=JSON)


def _verify_file(path: Path, number: int, damaged: dict[int, ApiError]) -> Iterator[float]:
    try:
        yield from archive.check(path)
    except ValueError:
        damaged[number] = ApiError(500, f"{path.name} is corrupted: checksum mismatch", "capture it again")


def read_bundled(name: str) -> bytes:
    """Return a file of the front end."""
    return files("regard.views").joinpath("web", "dist", name).read_bytes()


def _check_device(device: str | torch.device) -> torch.device:
    """Return the device; raises `ValueError` if this machine does not have it."""
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ValueError(f"device {str(device)!r} is not available on this machine; write 'cpu'") from None
    return place


def open_or_print(viewer: S, open_browser: bool) -> S:
    """Open a browser or print the address; a notebook shows the returned viewer."""
    if viewer.is_in_notebook:
        return viewer
    if not (open_browser and viewer.open_browser()):
        print(f"open {viewer.url}", flush=True)
        if "SSH_CONNECTION" in os.environ:
            to, name = viewer.auth.host, socket.gethostname()
            print(f"from your own machine, first run: ssh -N -L {viewer.port}:{to} {name}", flush=True)
    wait_at_exit(viewer)
    return viewer
