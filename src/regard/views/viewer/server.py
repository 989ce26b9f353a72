"""The HTTP server of the viewer, on the loopback interface unless a host is given."""

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
from .api import ViewerApi
from .auth import TokenAuth
from .captures import ApiError, Pending
from .describe import Capture
from .http import ANSWER_SECONDS, server_config
from .routes import JSON, RESOURCES, Resource, parse_query
from .worker import Closed, Worker

LOOPBACK = "127.0.0.1"
STATIC = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/app.css": ("app.css", "text/css; charset=utf-8"),
}


class Viewer:
    """A running viewer, at `url`, until `close` or the end of a `with` block."""

    def __init__(
        self,
        captures: Sequence[Capture],
        *,
        host: str = LOOPBACK,
        port: int = 0,
        device: str | torch.device | None = None,
        checks: Sequence[Path] = (),
    ) -> None:
        place = None if device is None else _check_device(device)
        self._socket = _open_socket(host, port)
        self._worker = Worker()
        address = f"{f'[{host}]' if ':' in host else host}:{self._socket.getsockname()[1]}"
        self.auth = TokenAuth(application(ViewerApi(captures, self._worker, place), self._worker, checks), address)
        self.url = f"http://{address}/?token={self.auth.token}"
        self._server = uvicorn.Server(server_config(self.auth))
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
        self._worker.close()  # first, so that waiting requests are answered
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
    """Serve one tape, or two side by side, from memory; maps are computed on `device` (default: the tape's)."""
    captures = [Capture(tape, name)] if other is None else [Capture(tape, f"{name} 1"), Capture(other, f"{name} 2")]
    return _open_or_print(Viewer(captures, device=device), open_browser)


def serve(
    captures: str | Path | Sequence[str | Path],
    *,
    host: str = LOOPBACK,
    port: int = 0,
    device: str | torch.device | None = None,
    open_browser: bool = True,
) -> Viewer:
    """Serve one capture file, or two side by side; tensors stay in the files and are verified in the background.

    With a `device` such as "cuda" the heads on display are copied there, and every tile is exact at once.
    """
    paths = [Path(path) for path in ([captures] if isinstance(captures, str | Path) else captures)]
    if not 1 <= len(paths) <= 2:
        raise ValueError(f"the viewer shows one capture or two side by side, got {len(paths)}")
    named = [Capture(Tape.open(path), path.stem) for path in paths]
    return _open_or_print(Viewer(named, host=host, port=port, device=device, checks=paths), open_browser)


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
        damaged[number] = ApiError(500, f"capture {number} is corrupted: checksum mismatch", "capture it again")


def read_bundled(name: str) -> bytes:
    """Return a file of the front end."""
    return files("regard.views").joinpath("web", "dist", name).read_bytes()


def _open_socket(host: str, port: int) -> socket.socket:
    if host in ("", "0.0.0.0", "::"):
        raise ValueError(f"host must be a single address that browsers can open, got {host!r}; write {LOOPBACK!r}")
    if not 0 <= port <= 65535:
        raise ValueError(f"port must be from 0 to 65535, got {port}; 0 chooses a free port")
    if not _is_loopback(host):
        warnings.warn(
            f"other machines may reach the viewer at {host}; anyone with its URL can see the captures", stacklevel=4
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(
        family, socket.SOCK_STREAM, socket.IPPROTO_TCP
    )  # with the protocol named, asyncio sets TCP_NODELAY
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen at {host}, port {port}: {error.strerror}") from None
    return listener


def _is_loopback(host: str) -> bool:
    """Whether no other machine can reach this address."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _check_device(device: str | torch.device) -> torch.device:
    """Return the device; raises `ValueError` if this machine does not have it."""
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ValueError(f"device {str(device)!r} is not available on this machine; write 'cpu'") from None
    return place


def _open_or_print(viewer: Viewer, open_browser: bool) -> Viewer:
    if not (open_browser and webbrowser.open(viewer.url)):
        print(f"open {viewer.url}")
    return viewer
