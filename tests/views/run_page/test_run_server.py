"""The server of a run page: only the owner of the token may read, and the curves are those of now."""

import http.client
import json
import re

import pytest
import torch

from regard.lens import HeadHistory
from regard.views.run_page.run_document import RunState
from regard.views.run_page.run_server import RunViewer


@pytest.fixture
def served():
    curves, heads = {"training/loss": ([10], [2.0])}, HeadHistory(("logit",))

    def read():
        return RunState(name="deen", curves=curves, heads_version=str(len(heads)) if len(heads) else None)

    with RunViewer(read, lambda: heads, port=0) as viewer:
        yield viewer, curves, heads


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
    viewer, curves, _ = served
    cookie = cookie_of(viewer)
    assert json.loads(get(viewer, "/api/run", Cookie=cookie)[1])["panels"][0]["lines"][0]["values"] == [2.0]
    curves["training/loss"] = ([10, 20], [2.0, 1.0])
    assert json.loads(get(viewer, "/api/run", Cookie=cookie)[1])["panels"][0]["lines"][0]["values"] == [2.0, 1.0]


def test_page_names_the_run_and_its_files_are_served(served):
    viewer, _, _ = served
    cookie = cookie_of(viewer)
    answer, page = get(viewer, "/", Cookie=cookie)
    assert "<h1>deen</h1>" in page
    assert "default-src 'none'; script-src 'self'" in answer.headers["content-security-policy"]
    for name in re.findall(r'(?:src|href)="([a-z_]+\.[a-z]+)"', page):
        assert get(viewer, f"/{name}", Cookie=cookie)[0].status == 200
    assert get(viewer, "/elsewhere", Cookie=cookie)[0].status == 404


def test_nothing_is_read_without_the_token_or_under_another_name(served):
    viewer, _, _ = served
    for path in ("/", "/api/run", "/api/heads", "/run_page.js"):
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


@pytest.mark.browser
def test_a_browser_follows_the_run_while_it_trains(served, chromium):
    viewer, curves, heads = served
    page, wrong = chromium.new_page(), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(viewer.url)
    page.wait_for_selector("#panels section")
    assert "2 at 10" in page.inner_text("#panels .values").replace("\n", " ")
    assert not page.is_visible("#tabs")  # no step was watched yet
    curves["training/loss"] = ([10, 20], [2.0, 1.25])
    heads.add(1, {"a": {"logit": torch.tensor([1.0, 2.5])}})
    page.click("#tab-heads")
    page.wait_for_selector("#heads canvas")
    assert page.inner_text("#heads .step tr:last-child").split("\t") == ["a, head 1", "2.5"]
    heads.add(21, {"a": {"logit": torch.tensor([1.0, 7.5])}})
    page.wait_for_selector("#heads .step h2:text-is('Step 21')")
    page.click("#tab-curves")
    page.wait_for_selector("#panels .values:has-text('1.250 at 20')")
    assert wrong == []
    page.close()
