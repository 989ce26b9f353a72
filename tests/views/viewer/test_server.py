"""The server: what it answers is what the tape says, to many at once, within bounds, and until it is closed."""

import json
import threading
import time
import urllib.request

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


def test_a_failure_inside_tells_nothing_of_the_inside(tape, knock, monkeypatch, caplog):
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
        assert json.loads(body)["error"] == "capture 0 is corrupted: checksum mismatch"
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


def test_a_browser_is_opened_where_there_is_one(tape, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr(server.webbrowser, "open", lambda url: opened.append(url) or True)
    with tape.view() as viewer:
        assert opened == [viewer.url]
    assert not capsys.readouterr().out


def test_closed_is_closed(tape):
    viewer = Viewer([Capture(tape, "x")])
    viewer.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(viewer.url, timeout=2)
    viewer.wait()
    assert not any(thread.name.startswith("regard-") and not thread.daemon for thread in threading.enumerate())


def test_who_still_waits_when_a_viewer_closes_is_told(tape, knock, caplog):
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
    assert not caplog.records


def test_other_hosts_are_asked_for_by_name_and_warned_about(tape):
    told = pytest.warns(UserWarning, match="other machines may reach the viewer at 192.0.2.1")
    with told, pytest.raises(OSError, match=r"cannot listen at 192\.0\.2\.1"):  # an address that no machine has
        Viewer([Capture(tape, "x")], host="192.0.2.1")
    for host in ("", "0.0.0.0", "::"):
        with pytest.raises(ValueError, match="host must be a single address that browsers can open"):
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
