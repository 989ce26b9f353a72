"""Notebooks: each kind is recognized by what its kernels have, and the frame is where its page reaches the port."""

import sys
from types import SimpleNamespace

import pytest

from regard.views.viewer import notebook
from regard.views.viewer.auth import Embedding
from regard.views.viewer.notebook import find_notebook, in_colab, in_kernel, in_vscode, proxy_path


@pytest.fixture
def shell(monkeypatch):
    """The IPython shell of a kernel."""
    shell = SimpleNamespace(kernel=object(), user_ns={})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr(notebook, "find_spec", lambda name: None)
    return shell


def test_a_program_and_a_terminal_are_no_notebooks(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not in_kernel()
    assert find_notebook(8765, {"JUPYTERHUB_SERVICE_PREFIX": "/user/ada/"}) is None
    for shell in (None, SimpleNamespace(user_ns={})):
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda shell=shell: shell))
        assert not in_kernel()
        assert find_notebook(8765, {}) is None


@pytest.mark.usefixtures("shell")
@pytest.mark.parametrize(
    ("environment", "base", "embedding"),
    [
        ({}, "http://127.0.0.1:8765/", Embedding("/", cross_site=True)),
        (
            {"JUPYTERHUB_SERVICE_PREFIX": "/user/ada/"},
            "/user/ada/proxy/8765/",
            Embedding("/user/ada/proxy/8765/", cross_site=False),
        ),
        ({"VSCODE_PID": "7"}, "http://localhost:8765/", Embedding("/", cross_site=True)),
        ({"VSCODE_PID": "7", "JPY_SESSION_NAME": "a.ipynb"}, "http://127.0.0.1:8765/", Embedding(cross_site=True)),
        (
            {"VSCODE_PROXY_URI": "https://code.example.org/proxy/{{port}}/", "VSCODE_PID": "7"},
            "https://code.example.org/proxy/8765/",
            Embedding("/proxy/8765/", cross_site=True),
        ),
        (
            {"REGARD_VIEWER_URL": "/lab/proxy/{port}/", "JUPYTERHUB_SERVICE_PREFIX": "/user/ada/"},
            "/lab/proxy/8765/",
            Embedding("/lab/proxy/8765/", cross_site=False),
        ),
    ],
)
def test_the_frame_is_where_the_page_reaches_the_port(environment, base, embedding):
    found = find_notebook(8765, environment)
    assert (found.base, found.embedding) == (base, embedding)


def test_the_extension_of_vs_code_names_its_file(shell):
    assert not in_vscode({})
    shell.user_ns["__vsc_ipynb_file__"] = "/home/ada/a.ipynb"
    assert in_vscode({})
    assert find_notebook(8765, {}).base == "http://localhost:8765/"


@pytest.mark.usefixtures("shell")
def test_jupyter_with_the_proxy_beside_the_kernel_goes_through_it(monkeypatch):
    assert proxy_path(8765, {}) is None
    monkeypatch.setattr(notebook, "find_spec", lambda name: name == "jupyter_server_proxy" or None)
    assert proxy_path(8765, {}) == "/proxy/8765/"
    assert find_notebook(8765, {}).base == "/proxy/8765/"


@pytest.mark.usefixtures("shell")
def test_colab_is_known_by_its_module(monkeypatch):
    assert not in_colab()
    monkeypatch.setitem(sys.modules, "google.colab", SimpleNamespace())
    assert in_colab()
    found = find_notebook(8765, {})
    assert found.base is None
    assert found.embedding == Embedding(cross_site=True)


@pytest.mark.usefixtures("shell")
def test_the_frame_escapes_its_address_and_says_what_to_do_where_it_stays_empty():
    shown = find_notebook(8765, {"REGARD_VIEWER_URL": '/"><script>{port}/'}).frame("one", "two")
    assert "<script" not in shown
    assert shown.count("token=one") == shown.count("token=two") == 1
    assert "forward port 8765" in find_notebook(8765, {}).frame("one", "two")
    assert "jupyter-server-proxy" in find_notebook(8765, {"JUPYTERHUB_SERVICE_PREFIX": "/"}).frame("one", "two")
