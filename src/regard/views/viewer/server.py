"""The server of the viewer: questions in, frames out, on this machine alone."""

from __future__ import annotations

import asyncio
import json
import socket
import time
import warnings
import webbrowser
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.resources import files
from ipaddress import ip_address
from pathlib import Path
from threading import Thread

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...lens.tape import archive
from ...lens.tape.tape import Tape
from .api import Answers
from .auth import Gate
from .captures import Pending, Refused
from .describe import Capture
from .http import SECONDS, settings
from .routes import JSON, RESOURCES, Resource, understood
from .worker import Closed, Desk

LOOPBACK = "127.0.0.1"
STATIC = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/app.css": ("app.css", "text/css; charset=utf-8"),
}


class Viewer:
    """A viewer that is being served, at `url`, until `close`; also good for a `with` block."""

    def __init__(
        self,
        captures: Sequence[Capture],
        *,
        host: str = LOOPBACK,
        port: int = 0,
        device: str | torch.device | None = None,
        checks: Sequence[Path] = (),
    ) -> None:
        place = None if device is None else _usable(device)
        self._socket = _listening(host, port)
        self._desk = Desk()
        address = f"{f'[{host}]' if ':' in host else host}:{self._socket.getsockname()[1]}"
        self.gate = Gate(application(Answers(captures, self._desk, place), self._desk, checks), address)
        self.url = f"http://{address}/?token={self.gate.token}"
        self._server = uvicorn.Server(settings(self.gate))
        self._thread = Thread(target=self._serve, name="regard-viewer", daemon=True)
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.005)

    def _serve(self) -> None:
        self._server.run(sockets=[self._socket])

    def wait(self) -> None:
        """Serve until interrupted."""
        try:
            while self._thread.is_alive():
                self._thread.join(timeout=0.5)
        except KeyboardInterrupt:
            pass
        finally:
            self.close()

    def close(self) -> None:
        """Stop serving."""
        self._desk.close()  # first, so that who still waits is told
        self._server.should_exit = True
        self._thread.join(timeout=10)
        self._socket.close()

    def __enter__(self) -> Viewer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Viewer at {self.url.partition('?')[0]}"


def view(
    tape: Tape,
    other: Tape | None = None,
    *,
    name: str = "capture",
    device: str | torch.device | None = None,
    open_browser: bool = True,
) -> Viewer:
    """Serve one tape, or two side by side, from memory; `device` is where maps are computed, unless where tapes are."""
    captures = [Capture(tape, name)] if other is None else [Capture(tape, f"{name} 1"), Capture(other, f"{name} 2")]
    return _shown(Viewer(captures, device=device), open_browser)


def serve(
    captures: str | Path | Sequence[str | Path],
    *,
    host: str = LOOPBACK,
    port: int = 0,
    device: str | torch.device | None = None,
    open_browser: bool = True,
) -> Viewer:
    """Serve one capture file, or two side by side; their tensors stay in the files and are checked on the side.

    On a `device` such as "cuda" the heads that are looked at are brought there, and every tile is exact at once.
    """
    paths = [Path(path) for path in ([captures] if isinstance(captures, str | Path) else captures)]
    if not 1 <= len(paths) <= 2:
        raise ValueError(f"the viewer shows one capture or two side by side, got {len(paths)}")
    named = [Capture(Tape.open(path), path.stem) for path in paths]
    return _shown(Viewer(named, host=host, port=port, device=device, checks=paths), open_browser)


def application(answers: Answers, desk: Desk, checks: Sequence[Path] = ()) -> Starlette:
    """The routes: three static files and a route for each resource. To be served behind the gate only."""
    damaged: dict[int, Refused] = {}
    for number, path in enumerate(checks):
        desk.later(("check", number), partial(_checking, path, number, damaged))
    static = [Route(path, partial(_static, bundled(name), kind)) for path, (name, kind) in STATIC.items()]
    routes = [
        Route(f"/api/{name}", partial(_resource, name, resource, answers, desk, damaged))
        for name, resource in RESOURCES.items()
    ]
    app = Starlette(routes=[*static, *routes], exception_handlers={HTTPException: _not_there, Exception: _failed})
    app.router.redirect_slashes = False
    return app


async def _static(body: bytes, kind: str, request: Request) -> Response:
    return Response(body, media_type=kind)


async def _resource(
    name: str, resource: Resource, answers: Answers, desk: Desk, damaged: dict[int, Refused], request: Request
) -> Response:
    try:
        parameters = understood(name, request.url.query)
        if damaged:
            raise next(iter(damaged.values()))
        future = desk.do(partial(resource.answer, answers, **parameters))
        body = await asyncio.wait_for(asyncio.wrap_future(future), SECONDS)
    except Refused as refused:
        return _error(refused.status, refused.error, refused.hint)
    except Pending as pending:
        shown = {"pending": True, "retry": 0.5, "done": pending.done}
        return Response(json.dumps(shown), 202, media_type=JSON)
    except Closed:
        return _error(503, "the viewer is being closed", "open it again")
    except TimeoutError:
        return _error(503, f"the answer takes more than {SECONDS} seconds", "ask again, or for less")
    return Response(body, media_type=resource.type)


async def _not_there(request: Request, error: Exception) -> Response:
    return _error(404, "there is nothing at this address", "open the address that was printed")


async def _failed(request: Request, error: Exception) -> Response:
    return _error(500, "the viewer could not answer this", "look at another part")


def _error(status: int, error: str, hint: str) -> Response:
    return Response(json.dumps({"error": error, "hint": hint}), status, media_type=JSON)


def _checking(path: Path, number: int, damaged: dict[int, Refused]) -> Iterator[float]:
    try:
        yield from archive.check(path)
    except ValueError:
        damaged[number] = Refused(500, f"capture {number} is damaged: it is not what was written", "make it again")


def bundled(name: str) -> bytes:
    """A file of the front end."""
    return files("regard.views").joinpath("web", "dist", name).read_bytes()


def _listening(host: str, port: int) -> socket.socket:
    if host in ("", "0.0.0.0", "::"):
        raise ValueError(f"host must be the one address a browser will ask at, got {host!r}; write {LOOPBACK!r}")
    if not 0 <= port <= 65535:
        raise ValueError(f"port must be from 0 to 65535, 0 for one that is free, got {port}")
    if not _is_loopback(host):
        warnings.warn(f"other machines may reach the viewer at {host}; whoever has its address can look", stacklevel=4)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # named, so that asyncio sends at once
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen at {host}, port {port}: {error.strerror}") from None
    return listener


def _is_loopback(host: str) -> bool:
    """Is this an address that no other machine can reach?"""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _usable(device: str | torch.device) -> torch.device:
    """The device, if there is such a one here."""
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ValueError(f"device must be one that PyTorch can use here, got {str(device)!r}; write 'cpu'") from None
    return place


def _shown(viewer: Viewer, open_browser: bool) -> Viewer:
    if not (open_browser and webbrowser.open(viewer.url)):
        print(f"open {viewer.url}")
    return viewer
