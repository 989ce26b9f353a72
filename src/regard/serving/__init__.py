"""A trained run as a small HTTP server: `regard serve`."""

from .http_server import Server, serve

__all__ = ["Server", "serve"]
