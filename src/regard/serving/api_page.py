"""The API of a server: as an OpenAPI document, and as a page for people."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from typing import Any

from .. import __version__
from .endpoints import Endpoint
from .request_fields import Field

STYLE = (
    ":root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:2rem auto;"
    "padding:0 1rem}pre{overflow-x:auto;padding:.7rem;border:1px solid #8886;border-radius:6px}"
    "table{border-collapse:collapse;width:100%}td,th{text-align:left;vertical-align:top;padding:.3rem .8rem .3rem 0;"
    "border-top:1px solid #8886}code{white-space:nowrap}"
)
POLICY = (
    f"default-src 'none'; style-src 'sha256-{base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()}'"
    "; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
ERRORS = {
    400: "The request is not valid; `error` names the field.",
    401: "The token is missing or wrong.",
    403: "The Host header is not a name of the server, or the request came from a page.",
    413: "The body is too large.",
    503: "Too many requests wait, or the answer took too long; try again later.",
}


def openapi(endpoint: Endpoint, name: str) -> dict[str, Any]:
    """Return the OpenAPI document of a server."""
    request = {
        "type": "object",
        "additionalProperties": False,
        "properties": {field.name: field.schema() for field in endpoint.fields},
        "required": [field.name for field in endpoint.fields if field.is_required],
        "example": endpoint.request,
    }
    error = {"type": "object", "properties": {key: {"type": "string"} for key in ("error", "hint")}}
    answers = {
        "type": "object",
        "properties": {"answers": {"type": "array", "items": {"type": "object"}, "description": "One for each input."}},
        "example": endpoint.response,
    }

    def response(description: str, schema: dict[str, Any]) -> dict[str, Any]:
        return {"description": description, "content": {"application/json": {"schema": schema}}}

    return {
        "openapi": "3.1.0",
        "info": {"title": f"regard: {name}", "version": __version__},
        "security": [{"token": []}],
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "paths": {
            endpoint.path: {
                "post": {
                    "summary": endpoint.doing,
                    "requestBody": {"required": True, "content": {"application/json": {"schema": request}}},
                    "responses": {
                        "200": response("The answers, in the order of the inputs.", answers),
                        **{str(status): response(text, error) for status, text in ERRORS.items()},
                    },
                }
            },
            "/health": {
                "get": {
                    "summary": "Whether the server answers",
                    "security": [],
                    "responses": {"200": response("It does.", {"type": "object"})},
                }
            },
        },
    }


def api_page(endpoint: Endpoint, name: str, address: str) -> str:
    """Return a page that shows how to ask the server."""
    command = (
        f"curl http://{address}{endpoint.path} \\\n  -H 'Authorization: Bearer TOKEN' "
        f"-H 'Content-Type: application/json' \\\n  -d '{json.dumps(endpoint.request)}'"
    )
    rows = "".join(_row(field) for field in endpoint.fields)
    errors = "".join(f"<tr><td>{status}<td>{html.escape(text)}" for status, text in ERRORS.items())
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<link rel="icon" href="data:,"><title>regard: {html.escape(name)}</title><style>{STYLE}</style>'
        f"<h1>{html.escape(name)}</h1><p>{html.escape(endpoint.doing)}: <code>POST {endpoint.path}</code>, with the "
        "token that the terminal printed.</p>"
        f"<pre>{html.escape(command)}</pre><p>The answer:</p>"
        f"<pre>{html.escape(json.dumps(endpoint.response, indent=2))}</pre>"
        f"<h2>Fields</h2><table><tr><th>Name<th>Kind<th>Default<th>Meaning{rows}</table>"
        f"<h2>Errors</h2><table><tr><th>Status<th>Meaning{errors}</table>"
        "<p>Also: <code>GET /health</code>, and <code>GET /openapi.json</code> for programs.</p>"
    )


def _row(field: Field) -> str:
    default = "required" if field.is_required else json.dumps(field.default)
    cells = (f"<code>{field.name}</code>", field.kind, default, html.escape(field.help))
    return "<tr>" + "".join(f"<td>{cell}" for cell in cells)
