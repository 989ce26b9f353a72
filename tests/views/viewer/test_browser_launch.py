"""The file that redirects a browser: readable by its user alone, and gone after use."""

import os
import stat
import webbrowser

import pytest

from regard.views.viewer.browser_launch import launch_browser, remove_redirect, write_redirect

URL = "http://127.0.0.1:8765/?token=abc&x=<script>"


@pytest.fixture
def path():
    path = write_redirect(URL)
    yield path
    remove_redirect(path)


def test_only_its_user_may_read_the_redirect(path):
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_uid == os.getuid()


def test_it_redirects_to_the_address_and_is_markup_of_its_own_alone(path):
    text = path.read_text()
    assert 'http-equiv="refresh" content="0; url=http://127.0.0.1:8765/?token=abc&amp;x=&lt;script&gt;"' in text
    assert "<script" not in text


def test_the_browser_is_given_the_file_and_not_the_token(path, monkeypatch):
    given = []
    monkeypatch.setattr(webbrowser, "open", lambda url: given.append(url) or True)
    assert launch_browser(path)
    assert given == [path.as_uri()]
    assert "abc" not in given[0]
    assert path.exists()


def test_without_a_browser_the_file_goes(path, monkeypatch):
    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    assert not launch_browser(path)
    assert not path.exists()
    remove_redirect(path)
