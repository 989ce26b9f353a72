"""The page and the OpenAPI document of a server say what it takes."""

from __future__ import annotations

import re
import urllib.request

from regard.serving.api_page import api_page, openapi
from tests.serving.conftest import ask, shout


def test_the_document_names_every_field():
    document = openapi(shout(), "shouter")
    [schema] = [each["schema"] for each in document["paths"]["/shout"]["post"]["requestBody"]["content"].values()]
    assert list(schema["properties"]) == ["text", "times"]
    assert schema["required"] == ["text"]
    assert not schema["additionalProperties"]
    assert document["paths"]["/health"]["get"]["security"] == []


def test_the_page_shows_a_command_and_every_field():
    page = api_page(shout(), "<shouter>", "127.0.0.1:8765")
    assert "&lt;shouter&gt;" in page
    assert "curl http://127.0.0.1:8765/shout" in page
    assert re.findall(r"<tr><td><code>(\w+)</code>", page) == ["text", "times"]


def test_both_are_served_without_a_token(server):
    with urllib.request.urlopen(f"http://{server.address}/") as response:
        assert "style-src 'sha256-" in response.headers["content-security-policy"]
        assert b"Shout texts" in response.read()
    status, document = ask(server, None, path="/openapi.json", method="GET", token="x")
    assert (status, document["info"]["title"]) == (200, "regard: shouter")
