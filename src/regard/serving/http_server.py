"""The HTTP server of a run, on the loopback interface unless a host is given."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .. import __version__
from ..views.viewer.host_names import HostNames
from ..views.viewer.http import TimeoutProtocol, server_config
from ..views.viewer.sockets import LOOPBACK, open_socket
from .api_page import POLICY, api_page, openapi
from .batcher import Batcher, BatcherClosed, TooManyWaiting
from .bearer import BearerAuth, check_token, make_token
from .endpoints import Endpoint, endpoint_of
from .request_fields import parse_request

ANSWER_SECONDS = 300  # longest time for an answer, the wait in the queue included
MAX_BODY_BYTES = 2**24
SECONDS_BETWEEN_LOOKS = 0.5  # at whether a client that waits is still there


class ServingProtocol(TimeoutProtocol):
    """HTTP/1.1 for programs, whose answers may take minutes."""

    answer_seconds = ANSWER_SECONDS
    hint = "send an HTTP/1.1 request"


class Server:
    """A run that answers requests at `http://{address}`, until `close` or the end of a `with` block."""

    def __init__(
        self,
        endpoint: Endpoint,
        name: str,
        *,
        host: str = LOOPBACK,
        port: int | None = None,
        allow_host: Sequence[str] = (),
        token: str | None = None,
    ) -> None:
        self.endpoint, self.name = endpoint, name
        self.token = make_token() if token is None else check_token(token)  # each request for answers carries it
        self._socket = open_socket(host, port, others="anyone with the token can ask, and the token is not encrypted")
        self.port: int = self._socket.getsockname()[1]
        self.address = f"{f'[{host}]' if ':' in host else host}:{self.port}"
        try:
            names = HostNames(self.address, allow_host)
        except ValueError:
            self._socket.close()
            raise
        self._batcher = Batcher(_without_gradients(endpoint.run))
        app = BearerAuth(application(endpoint, self._batcher, name, self.address), names, self.token)
        self._server = uvicorn.Server(server_config(app, ServingProtocol))
        self._ended = Event()
        Thread(target=self._serve, name="regard-http", daemon=True).start()
        while not (self._server.started or self._ended.is_set()):
            time.sleep(0.005)

    def _serve(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._ended.set()

    def wait(self) -> None:
        """Serve until interrupted."""
        try:
            while not self._ended.wait(0.5):
                pass
        except KeyboardInterrupt:
            pass
        finally:
            self.close()

    def close(self) -> None:
        """Stop serving; requests that wait are refused."""
        self._batcher.close()
        self._server.should_exit = True
        self._ended.wait(10)
        self._socket.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(
    *folders: str | Path,
    host: str = LOOPBACK,
    port: int | None = None,
    allow_host: Sequence[str] = (),
    token: str | None = None,
    device: str | None = None,
) -> Server:
    """Serve a run, or several as an ensemble; the port is 8765 or, if that is taken, the next free one.

        with serve("runs/deen") as server:
            print(server.address, server.token)
            server.wait()

    Each request for answers carries the token.
    """
    endpoint = endpoint_of(folders, device)
    return Server(endpoint, Path(folders[0]).name, host=host, port=port, allow_host=allow_host, token=token)


def application(endpoint: Endpoint, batcher: Batcher, name: str, address: str) -> Starlette:
    """Build the application. Serve it behind `BearerAuth` only."""
    page = Response(
        api_page(endpoint, name, address), media_type="text/html", headers={"content-security-policy": POLICY}
    )
    schema = JSONResponse(openapi(endpoint, name))
    routes = [
        Route(endpoint.path, partial(_answer, endpoint, batcher), methods=["POST"]),
        Route("/", partial(_send_fixed, page), methods=["GET"]),
        Route("/openapi.json", partial(_send_fixed, schema), methods=["GET"]),
        Route("/health", partial(_health, endpoint, batcher, name), methods=["GET"]),
    ]
    handlers: dict[Any, Callable[..., Awaitable[Response]]] = {
        HTTPException: partial(_not_found, endpoint),
        Exception: _internal_error,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


async def _answer(endpoint: Endpoint, batcher: Batcher, request: Request) -> Response:
    try:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return _error(415, "the body must be JSON", "send the header Content-Type: application/json")
        body = await _read_body(request)
        if body is None:
            return _error(413, f"the body is larger than {MAX_BODY_BYTES:,} bytes", "send fewer inputs at a time")
        loop = asyncio.get_running_loop()
        values = await loop.run_in_executor(None, parse_request, body, endpoint.fields)
        examples, settings = endpoint.examples(values)
        future = batcher.submit(examples, tuple(settings.items()))
        found = await _wait_for(future, request)
    except ClientDisconnect:
        return Response(status_code=499)
    except ValueError as wrong:  # a `BadRequest`, or what the model refuses
        return _error(400, str(wrong), "see GET / for the fields of a request")
    except TooManyWaiting:
        return _error(503, "too many requests wait", "try again later", {"retry-after": "1"})
    except BatcherClosed:
        return _error(503, "the server is closing", "start it again")
    except TimeoutError:
        return _error(503, f"the answer takes more than {ANSWER_SECONDS} seconds", "send fewer or shorter inputs")
    except torch.OutOfMemoryError:
        return _error(503, "the model has not enough memory for this request", "send fewer or shorter inputs")
    return JSONResponse({"answers": found})


async def _read_body(request: Request) -> bytes | None:
    """Return the body; None if it is too large."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            return None
        parts.append(part)
    return b"".join(parts)


async def _wait_for(future: Future[list[Any]], request: Request) -> list[Any]:
    """Wait for the answers; withdraw the request if its client leaves."""
    waiting = asyncio.wrap_future(future)
    deadline = time.monotonic() + ANSWER_SECONDS
    while not (await asyncio.wait({waiting}, timeout=SECONDS_BETWEEN_LOOKS))[0]:
        if await request.is_disconnected():
            waiting.cancel()
            raise ClientDisconnect
        if time.monotonic() > deadline:
            waiting.cancel()
            raise TimeoutError
    return waiting.result()


async def _send_fixed(response: Response, request: Request) -> Response:
    return response


async def _health(endpoint: Endpoint, batcher: Batcher, name: str, request: Request) -> Response:
    found = {"status": "ok", "run": name, "path": endpoint.path, "waiting": batcher.waiting, "regard": __version__}
    return JSONResponse(found)


async def _not_found(endpoint: Endpoint, request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code == 405:
        return _error(405, f"{request.method} is not supported here", f"send POST {endpoint.path}, or GET /")
    return _error(404, "not found", f"send POST {endpoint.path}, or GET / for the API")


async def _internal_error(request: Request, error: Exception) -> Response:
    return _error(500, "the model failed to answer this request", "see the terminal of the server")


def _error(status: int, error: str, hint: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": error, "hint": hint}, status, headers)


def _without_gradients(run: Callable[[list[Any], Any], list[Any]]) -> Callable[[list[Any], Any], list[Any]]:
    def answers(examples: list[Any], settings: Any) -> list[Any]:
        with torch.no_grad():
            return run(examples, dict(settings))

    return answers
