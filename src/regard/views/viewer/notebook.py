"""The viewer inside a notebook: find the address under which the notebook's page reaches a port of the kernel.

| notebook | address of the frame |
|---|---|
| any, with `REGARD_VIEWER_URL` set | its value, with the port for `{port}` |
| Google Colab | `google.colab.output.serve_kernel_port_as_iframe` |
| code-server (`VSCODE_PROXY_URI`) | its value |
| VS Code | `http://localhost:PORT/`, which VS Code forwards from a remote machine |
| JupyterHub, or Jupyter with jupyter-server-proxy | `PREFIX/proxy/PORT/` of the same server |
| Jupyter without it | `http://127.0.0.1:PORT/`, for a kernel on your machine |
"""

from __future__ import annotations

import html
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from .auth import Embedding

HEIGHT = 720  # pixels of the frame


@dataclass(frozen=True)
class Notebook:
    """How the page of a notebook reaches the viewer: a base address, None if Colab makes the frame."""

    base: str | None
    advice: str

    @property
    def embedding(self) -> Embedding:
        """The viewer's side of the frame."""
        if self.base is None:
            return Embedding(cross_site=True)
        return Embedding(urlsplit(self.base).path or "/", cross_site=not self.base.startswith("/"))

    def frame(self, token: str, link_token: str) -> str:
        """Return HTML with the viewer in a frame, and a link that opens it in a tab."""
        assert self.base is not None
        source, link = (html.escape(f"{self.base}?token={one}") for one in (token, link_token))
        return (
            f'<iframe src="{source}" style="width:100%;height:{HEIGHT}px;border:0"></iframe>'
            f'<p><a href="{link}" target="_blank" rel="noopener">open in a tab</a>. {html.escape(self.advice)} '
            "<code>tape.page()</code> shows the same without a server.</p>"
        )


def find_notebook(port: int, environment: Mapping[str, str] = os.environ) -> Notebook | None:
    """Return how this notebook reaches a port of the kernel, or None outside of notebooks."""
    if not in_kernel():
        return None
    if template := environment.get("REGARD_VIEWER_URL"):
        return Notebook(template.replace("{port}", str(port)), "The address is from REGARD_VIEWER_URL.")
    if in_colab():
        return Notebook(None, "")
    if template := environment.get("VSCODE_PROXY_URI"):
        return Notebook(template.replace("{{port}}", str(port)), "Empty? Check the port in the Ports view of VS Code.")
    if in_vscode(environment):
        return Notebook(f"http://localhost:{port}/", f"Empty? Forward port {port} in the Ports view of VS Code.")
    if (path := proxy_path(port, environment)) is not None:
        return Notebook(path, "Empty? Install jupyter-server-proxy where Jupyter runs, and restart it.")
    advice = f"Empty? If the kernel is on another machine, install jupyter-server-proxy there, or forward port {port}."
    return Notebook(f"http://127.0.0.1:{port}/", advice)


def in_kernel() -> bool:
    """Whether this code runs in the kernel of a notebook; a kernel's IPython shell has the attribute `kernel`."""
    return getattr(_shell(), "kernel", None) is not None


def cell_id() -> str | None:
    """Return the name of the cell that runs, None if the notebook does not send it; JupyterLab and VS Code do."""
    get_parent = getattr(getattr(_shell(), "kernel", None), "get_parent", None)
    message = get_parent("shell") if get_parent is not None else None
    return None if not message else message.get("metadata", {}).get("cellId")


def in_colab() -> bool:
    """Whether the notebook is one of Google Colab; its kernels import `google.colab` at the start."""
    return "google.colab" in sys.modules


def in_vscode(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether VS Code shows the notebook.

    Its extension names the file in `__vsc_ipynb_file__`. A kernel that Jupyter started has `JPY_SESSION_NAME`, also if
    Jupyter itself was started in the terminal of VS Code.
    """
    named = "__vsc_ipynb_file__" in getattr(_shell(), "user_ns", {})
    return named or ("VSCODE_PID" in environment and "JPY_SESSION_NAME" not in environment)


def proxy_path(port: int, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the path of a port behind jupyter-server-proxy, or None if Jupyter has no proxy that is known here.

    JupyterHub names the path of its server. On a hub the proxy may be installed beside Jupyter and not in the kernel.
    """
    prefix = environment.get("JUPYTERHUB_SERVICE_PREFIX")
    if prefix is None and find_spec("jupyter_server_proxy") is None:
        return None
    return f"{(prefix or '/').rstrip('/')}/proxy/{port}/"


def show_in_colab(port: int, token: str) -> None:
    """Show a port of the kernel in a frame below the cell."""
    sys.modules["google.colab"].output.serve_kernel_port_as_iframe(port, path=f"/?token={token}", height=str(HEIGHT))


def _shell() -> Any:
    """Return the IPython shell of this process, None if there is none."""
    module = sys.modules.get("IPython")
    return None if module is None else module.get_ipython()
