"""A hub of models on this machine: what huggingface_hub asks of the real one, for the files of a folder."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub_server(models: dict[str, Path]) -> Iterator[tuple[str, list[str]]]:
    """Serve the folders by their names; yields the address, and the requests as they come."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.answer()

        def do_GET(self):
            self.answer()

        def answer(self):
            seen.append(f"{self.command} {self.path}")
            path = self.path.partition("?")[0].strip("/")
            for name, folder in models.items():
                if path in (f"api/models/{name}/revision/main", f"api/models/{name}"):
                    files = [{"rfilename": str(file.relative_to(folder))} for file in sorted(folder.rglob("*"))]
                    body = {"id": name, "modelId": name, "sha": COMMIT, "siblings": files, "private": False}
                    return self.reply(200, json.dumps(body).encode(), "application/json")
                if path == f"api/models/{name}/tree/{COMMIT}" or path == f"api/models/{name}/tree/main":
                    files = [
                        {"type": "file", "path": str(file.relative_to(folder)), "size": file.stat().st_size, "oid": "0"}
                        for file in sorted(folder.rglob("*"))
                        if file.is_file()
                    ]
                    return self.reply(200, json.dumps(files).encode(), "application/json")
                for revision in (COMMIT, "main"):
                    start = f"{name}/resolve/{revision}/"
                    if path.startswith(start) and (folder / path.removeprefix(start)).is_file():
                        return self.reply(200, (folder / path.removeprefix(start)).read_bytes(), "text/plain")
            return self.reply(404, b"", "text/plain", {"X-Error-Code": "RepoNotFound"})

        def reply(self, code, body, kind, more=None):
            self.send_response(code)
            etag = hashlib.sha1(body).hexdigest()
            headers = {"Content-Type": kind, "Content-Length": len(body), "ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}
            for name, value in {**headers, **(more or {})}.items():
                self.send_header(name, str(value))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
