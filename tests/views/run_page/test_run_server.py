"""The server of a run page: only the owner of the token may read, and the curves are those of now."""

import http.client
import json
import re

import pytest

from regard.views.run_page.run_document import RunState
from regard.views.run_page.run_server import RunViewer


@pytest.fixture
def served():
    curves = {"training/loss": ([10], [2.0])}
    with RunViewer(lambda: RunState(name="deen", curves=curves), port=0) as viewer:
        yield viewer, curves


def get(viewer, path, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", viewer.port, timeout=10)
    connection.request("GET", path, headers={"Host": viewer.auth.host, **headers})
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer, body


def cookie_of(viewer):
    answer, _ = get(viewer, viewer.url.partition(viewer.auth.host)[2])
    return answer.headers["set-cookie"].partition(";")[0]


def test_curves_are_those_of_now(served):
    viewer, curves = served
    cookie = cookie_of(viewer)
    assert json.loads(get(viewer, "/api/run", Cookie=cookie)[1])["panels"][0]["lines"][0]["values"] == [2.0]
    curves["training/loss"] = ([10, 20], [2.0, 1.0])
    assert json.loads(get(viewer, "/api/run", Cookie=cookie)[1])["panels"][0]["lines"][0]["values"] == [2.0, 1.0]


def test_page_names_the_run_and_its_files_are_served(served):
    viewer, _ = served
    cookie = cookie_of(viewer)
    answer, page = get(viewer, "/", Cookie=cookie)
    assert "<h1>deen</h1>" in page
    assert "default-src 'none'; script-src 'self'" in answer.headers["content-security-policy"]
    for name in re.findall(r'(?:src|href)="([a-z_]+\.[a-z]+)"', page):
        assert get(viewer, f"/{name}", Cookie=cookie)[0].status == 200
    assert get(viewer, "/elsewhere", Cookie=cookie)[0].status == 404


def test_nothing_is_read_without_the_token_or_under_another_name(served):
    viewer, _ = served
    for path in ("/", "/api/run", "/run_page.js"):
        assert get(viewer, path)[0].status == 401
        assert get(viewer, path, Host="evil.example", Cookie=cookie_of(viewer))[0].status == 403


def test_error_of_a_run_that_is_gone_is_shown():
    found = [RunState(name="deen", curves={})]

    def read():
        if not found:
            raise ValueError("runs/deen holds no log.csv with a row")
        return found.pop()

    with RunViewer(read, port=0) as viewer:
        answer, body = get(viewer, "/api/run", Cookie=cookie_of(viewer))
    assert (answer.status, json.loads(body)["error"]) == (500, "runs/deen holds no log.csv with a row")
