"""The server: what it answers is what the tape says, to many at once, within bounds, and until it is closed."""

import json
import re
import socket
import sys
import threading
import time
import urllib.request
import webbrowser
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch

from regard import Causal, weights
from regard.lens import Tape
from regard.views import serve
from regard.views.viewer import server
from regard.views.viewer.api import ViewerApi
from regard.views.viewer.describe import Capture
from regard.views.viewer.server import Viewer
from regard.views.viewer.wire_format import parse_frame

TILE = "tile?capture=0&layer=0&batch=0&head=0&minus=none&level=0&row=0&col=0"


@pytest.fixture
def knock(client):
    """A client of another viewer."""
    return lambda viewer: type(client)(viewer.url)


def test_the_front_end_is_served_from_memory(client, monkeypatch):
    monkeypatch.setattr(server, "read_bundled", lambda name: pytest.fail("read again"))
    for path, start, kind in (
        ("/", b"<!doctype html>", "html"),
        ("/app.js", b"", "javascript"),
        ("/app.css", b"", "css"),
    ):
        response, body = client.ask(path)
        assert response.status == 200
        assert body.startswith(start)
        assert len(body) > 100
        assert kind in response.headers["content-type"]
    _, page = client.ask("/")
    assert page.startswith(b"<!doctype html>")
    assert page.count(b"<script") == 1
    assert b"<style" not in page


def test_every_resource_is_answered_in_its_type(client):
    assert len(client.json("session")["captures"]) == 2
    assert client.json("text?capture=0&text=0")["tokens"][0] == "<script>alert(1)</script>"
    assert client.json("group?capture=1&group=0").keys() == {"ids", "labels"}
    assert client.ask("/api/picture?capture=0&picture=0")[0].headers["content-type"] == "image/png"
    for resource in (
        "overview?capture=0&layer=0&batch=0",
        "measures?capture=0&layer=0&batch=0&head=mean&level=1",
        TILE,
        "token?capture=0&layer=0&batch=0&head=0&axis=key&first=0&last=0&top=3",
        "block?capture=0&layer=0&batch=0&row=0&rows=3&col=0&cols=3",
        "flow?capture=0&layer=0&batch=0&token=0",
        "alignment?capture=0&layer=3&batch=0&head=max",
    ):
        header, arrays = client.frame(resource)
        assert header["state"] == "exact"
        assert arrays


def test_a_tile_holds_the_weights(client, tape):
    _, arrays = client.frame(TILE)
    assert np.abs(arrays["weight"] - tape["encoder.0"].dense()[0, 0].numpy()).max() < 1e-6


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/tile?capture=0", 400),
        ("/api/tile?capture=0&layer=0&batch=0&head=0&minus=none&level=99999999999&row=0&col=0", 400),
        ("/api/tile?capture=0&layer=0&batch=0&head=0&minus=none&level=0&row=-1&col=0", 400),
        ("/api/tile?capture=../0&layer=0&batch=0&head=0&minus=none&level=0&row=0&col=0", 400),
        ("/api/text?capture=0&text=0;capture=1", 400),
        ("/api/nothing", 404),
        ("/web/dist/app.js", 404),
        ("/licenses.txt", 404),
    ],
)
def test_wrong_questions_get_an_error_and_a_hint(client, path, status):
    response, body = client.ask(path)
    assert response.status == status
    assert json.loads(body).keys() == {"error", "hint"}


def test_fifty_clients_at_once_are_all_answered(client, tape):
    truth = tape["encoder.0"].dense()[0, 0].numpy()
    wrong, barrier = [], threading.Barrier(50)

    def run():
        barrier.wait(10)
        for _ in range(3):
            response, body = client.ask("/api/" + TILE)
            if response.status != 200 or np.abs(parse_frame(body)[1]["weight"] - truth).max() > 1e-6:
                wrong.append(response.status)

    threads = [threading.Thread(target=run) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong


def test_answers_that_take_too_long_are_given_up(tape, knock, monkeypatch):
    monkeypatch.setattr(server, "ANSWER_SECONDS", 0.05)
    with Viewer([Capture(tape, "x")]) as viewer:
        client = knock(viewer)
        viewer._worker.do(lambda: time.sleep(0.5))
        response, body = client.ask("/api/session")
        assert response.status == 503
        assert "takes more than" in json.loads(body)["error"]


def test_what_is_pending_says_when_to_ask_again(knock, monkeypatch):
    monkeypatch.setattr("regard.views.viewer.captures.MAX_IMMEDIATE_WEIGHTS", 20_000)
    q, k = torch.randn(2, 1, 2, 300, 8)
    with Viewer([Capture(Tape({("a", 0): weights(q, k)}), "x")]) as viewer:
        client = knock(viewer)
        response, body = client.ask("/api/overview?capture=0&layer=0&batch=0")
        assert response.status == 202
        assert json.loads(body).keys() == {"pending", "retry", "done"}
        for _ in range(200):
            response, body = client.ask("/api/overview?capture=0&layer=0&batch=0")
            if response.status == 200:
                break
            time.sleep(0.01)
        assert parse_frame(body)[0]["state"] == "exact"


def test_a_failure_inside_tells_nothing_of_the_inside(tape, knock, monkeypatch):
    def fails(self, capture, text):
        raise RuntimeError("secret at /home/somebody")

    monkeypatch.setattr(ViewerApi, "text", fails)
    resource = server.RESOURCES["text"]._replace(answer=fails)
    monkeypatch.setitem(server.RESOURCES, "text", resource)
    with Viewer([Capture(tape, "x")]) as viewer:
        response, body = knock(viewer).ask("/api/text?capture=0&text=0")
    assert response.status == 500
    assert json.loads(body) == {
        "error": "the viewer failed to answer this request",
        "hint": "try another part of the map",
    }


def test_files_are_served_without_being_read_and_checked_on_the_side(tmp_path, knock, capsys):
    q, k = torch.randn(2, 1, 2, 70, 8)
    tape = Tape({("a", 0): weights(q, k, mask=Causal())})
    tape.summarize()
    for name in ("one", "two"):
        tape.save(tmp_path / f"{name}.safetensors")
    raw = bytearray((tmp_path / "two.safetensors").read_bytes())
    raw[-1] ^= 1
    (tmp_path / "bad.safetensors").write_bytes(raw)
    with serve([tmp_path / "one.safetensors", tmp_path / "two.safetensors"], open_browser=False) as viewer:
        assert viewer.url in capsys.readouterr().out
        client = knock(viewer)
        assert [capture["name"] for capture in client.json("session")["captures"]] == ["one", "two"]
        _, arrays = client.frame(TILE.replace("minus=none", "minus=1.0.0.0"))
        assert not arrays["weight"].any()
    with serve([tmp_path / "bad.safetensors"], open_browser=False) as viewer:
        client = knock(viewer)
        for _ in range(200):
            response, body = client.ask("/api/" + TILE)
            if response.status == 500:
                break
            time.sleep(0.01)
        assert json.loads(body)["error"] == "bad.safetensors is corrupted: checksum mismatch"
    for paths in ([], ["a", "b", "c"]):
        with pytest.raises(ValueError, match="one capture or two side by side"):
            serve(paths, open_browser=False)
    with pytest.raises(FileNotFoundError):
        serve([tmp_path / "nothing.safetensors"], open_browser=False)


def test_a_tape_is_viewed_in_one_line(tape, capsys, knock):
    with tape.view(name="mine", open_browser=False) as viewer:
        assert capsys.readouterr().out == f"open {viewer.url}\n"
        assert knock(viewer).json("session")["captures"][0]["name"] == "mine"
    with tape.view(tape, open_browser=False) as viewer:
        assert len(knock(viewer).json("session")["captures"]) == 2


def test_an_address_that_is_used_before_the_wait_begins_is_replaced(tape, capsys):
    with tape.view(open_browser=False) as viewer:
        threading.Timer(1, viewer.close).start()
        viewer.wait("http://127.0.0.1:8765/?token=used")
    assert f"for another browser: {viewer.url}" in capsys.readouterr().out


def test_a_browser_is_opened_where_there_is_one(tape, monkeypatch, capsys, knock):
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or True)
    with tape.view() as viewer:
        (address,) = opened
        path = Path(urlsplit(address).path)
        assert address.startswith("file://")
        assert viewer.auth.token not in address
        link = re.search(r'href="([^"]+)"', path.read_text())[1]
        assert link != viewer.url
        assert knock(SimpleNamespace(url=link)).json("session")["live"]
        assert not path.exists()
        with pytest.raises(AttributeError):  # no cookie for a link that was used
            knock(SimpleNamespace(url=link))
        assert knock(viewer).json("session")["live"]
    assert not capsys.readouterr().out
    with tape.view():
        path = Path(urlsplit(opened[1]).path)
        assert path.exists()
    assert not path.exists()


def test_its_text_is_an_address_that_works(tape, knock):
    with Viewer([Capture(tape, "x")]) as viewer:
        for _ in range(3):
            url = repr(viewer).removeprefix("Viewer at ")
            assert knock(SimpleNamespace(url=url)).json("session")["live"]
    assert repr(viewer) == "Viewer, closed"


def test_a_session_over_ssh_is_told_how_to_forward_the_port(tape, capsys, monkeypatch):
    monkeypatch.setenv("SSH_CONNECTION", "192.0.2.7 50000 192.0.2.8 22")
    with tape.view(open_browser=False) as viewer:
        assert f"ssh -N -L {viewer.port}:127.0.0.1:{viewer.port} {socket.gethostname()}\n" in capsys.readouterr().out


def test_an_allowed_name_reaches_the_viewer(tape, knock):
    with tape.view(open_browser=False, allow_host=["gpu7.example.org"]) as viewer:
        client = knock(viewer)
        for host, status in (("gpu7.example.org:8080", 200), ("gpu8.example.org", 403)):
            assert client.ask("/api/session", headers={"Host": host})[0].status == status


def test_a_waiting_viewer_prints_a_new_address_when_one_was_used(tape, knock, capsys):
    viewer = Viewer([Capture(tape, "x")])
    waiting = threading.Thread(target=viewer.wait)
    waiting.start()
    knock(viewer)
    for _ in range(100):
        if "for another browser" in (out := capsys.readouterr().out):
            break
        time.sleep(0.05)
    assert out == f"for another browser: {viewer.url}\n"
    viewer.close()
    waiting.join(5)
    assert not waiting.is_alive()


class Kernel:
    """An IPython shell of a notebook."""

    kernel, user_ns = object(), {}


@pytest.fixture
def in_notebook(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=Kernel))
    monkeypatch.setattr(webbrowser, "open", lambda url: pytest.fail("a notebook opened a browser"))
    for name in ("REGARD_VIEWER_URL", "VSCODE_PROXY_URI", "VSCODE_PID", "JUPYTERHUB_SERVICE_PREFIX"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("in_notebook")
def test_a_notebook_shows_the_viewer_behind_its_proxy(tape, monkeypatch, capsys, knock):
    monkeypatch.setenv("JUPYTERHUB_SERVICE_PREFIX", "/user/ada/")
    with tape.view() as viewer:
        shown = viewer._repr_html_()
        source = re.search(r'<iframe src="(/user/ada/proxy/\d+/\?token=[^"]+)"', shown)[1]
        token = source.partition("token=")[2]
        client = knock(SimpleNamespace(url=f"http://127.0.0.1:{viewer.port}/?token={token}"))
        assert client.json("session")["live"]
        with pytest.raises(NotImplementedError):
            viewer._ipython_display_()
    assert viewer._repr_html_() is None
    assert not capsys.readouterr().out


@pytest.mark.usefixtures("in_notebook")
def test_colab_makes_the_frame_itself(tape, monkeypatch):
    shown = []
    output = SimpleNamespace(serve_kernel_port_as_iframe=lambda port, path, height: shown.append((port, path, height)))
    monkeypatch.setitem(sys.modules, "google.colab", SimpleNamespace(output=output))
    with tape.view() as viewer:
        assert viewer._repr_html_() is None
        viewer._ipython_display_()
        ((port, path, height),) = shown
        assert (port, height) == (viewer.port, "720")
        assert path.removeprefix("/?token=") in viewer.auth._unused


def test_outside_of_notebooks_there_is_no_frame(tape):
    with tape.view(open_browser=False) as viewer:
        assert viewer._repr_html_() is None
        with pytest.raises(NotImplementedError):
            viewer._ipython_display_()


def test_closed_is_closed(tape):
    viewer = Viewer([Capture(tape, "x")])
    viewer.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(viewer.url, timeout=2)
    viewer.wait()
    assert not any(thread.name.startswith("regard-") and not thread.daemon for thread in threading.enumerate())


def test_who_still_waits_when_a_viewer_closes_is_told(tape, knock, logged):
    viewer = Viewer([Capture(tape, "x")])
    client, answers = knock(viewer), []
    viewer._worker.do(lambda: time.sleep(0.3))
    asking = [threading.Thread(target=lambda: answers.append(client.ask("/api/session"))) for _ in range(3)]
    for thread in asking:
        thread.start()
    time.sleep(0.1)
    viewer.close()
    for thread in asking:
        thread.join(5)
    assert [response.status for response, _ in answers] == [503] * 3
    assert json.loads(answers[0][1])["error"] == "the viewer is closing"
    assert not logged


def test_other_hosts_are_asked_for_by_name_and_warned_about(tape):
    told = pytest.warns(UserWarning, match="other machines may reach 192.0.2.1")
    with told, pytest.raises(OSError, match=r"cannot listen at 192\.0\.2\.1"):  # an address that no machine has
        Viewer([Capture(tape, "x")], host="192.0.2.1")
    for host in ("", "0.0.0.0", "::"):
        with pytest.raises(ValueError, match="host must be a single address that clients can open"):
            Viewer([Capture(tape, "x")], host=host)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.2"])
def test_other_names_of_this_machine_are_no_reason_to_warn(tape, knock, host):
    with Viewer([Capture(tape, "x")], host=host) as viewer:
        assert viewer.url.startswith(f"http://{host}:")
        assert knock(viewer).json("session")["live"]


def test_an_address_of_IPv6_is_written_in_brackets(tape):
    try:
        viewer = Viewer([Capture(tape, "x")], host="::1")
    except OSError:
        pytest.skip("there is no IPv6 here")
    assert viewer.url.startswith("http://[::1]:")
    viewer.close()


def test_a_port_that_is_taken_is_named(tape, viewer):
    port = int(viewer.auth.host.rpartition(":")[2])
    with pytest.raises(OSError, match=f"cannot listen at 127.0.0.1, port {port}"):
        Viewer([Capture(tape, "x")], port=port)


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_a_port_that_cannot_be_is_refused(tape, port):
    with pytest.raises(ValueError, match=f"port must be from 0 to 65535, got {port}; 0 chooses a free port"):
        Viewer([Capture(tape, "x")], port=port)


def test_one_file_is_served_by_its_path(tape, tmp_path, knock):
    tape.save(tmp_path / "p.safetensors")
    for path in (tmp_path / "p.safetensors", str(tmp_path / "p.safetensors")):
        with serve(path, open_browser=False) as viewer:
            assert [capture["name"] for capture in knock(viewer).json("session")["captures"]] == ["p"]
