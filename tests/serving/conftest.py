"""A server whose model is a function, and requests to it."""

from __future__ import annotations

import http.client
import json

import pytest

from regard.serving.endpoints import Endpoint
from regard.serving.http_server import Server
from regard.serving.request_fields import Field


def shout(run=None) -> Endpoint:
    """An endpoint whose answers are its texts in capitals."""
    return Endpoint(
        path="/shout",
        doing="Shout texts",
        fields=(Field("text", "texts", "Texts."), Field("times", "whole number", "How often.", 1, 1, 9)),
        run=run or (lambda texts, settings: [text.upper() * settings["times"] for text in texts]),
        request={"text": "ah"},
        response={"answers": ["AH"]},
    )


def ask(server, body, *, path=None, method="POST", host=None, token=None, **headers):
    """Status and JSON of one request."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    given = {"Authorization": f"Bearer {server.token if token is None else token}", "Content-Type": "application/json"}
    given |= {"Host": host} if host else {}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    data = body if body is None or isinstance(body, bytes) or hasattr(body, "__next__") else json.dumps(body).encode()
    try:
        connection.request(method, server.endpoint.path if path is None else path, data, given)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


@pytest.fixture
def server():
    with Server(shout(), "shouter", port=0) as running:
        yield running
