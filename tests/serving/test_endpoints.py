"""Which runs can be served, and what a request is split into; `tests/cli/test_serve.py` asks a run of each task."""

from __future__ import annotations

from dataclasses import replace

import pytest

from regard.serving import endpoints
from regard.serving.endpoints import endpoint_of
from regard.serving.request_fields import BadRequest, Field
from regard.tasks.answering import Asking
from tests.serving.conftest import shout


@pytest.fixture
def task(monkeypatch):
    """Every folder is a run of this task."""
    monkeypatch.setattr(endpoints.run_folder, "open_run", lambda folder: folder)
    monkeypatch.setattr(endpoints.run_folder, "task_of", lambda folder: "classification")
    return "classification"


def test_examples_are_split_from_settings():
    assert shout().examples({"text": ("a", "b"), "times": 2}) == (["a", "b"], {"times": 2})


def test_each_question_is_asked_of_the_document():
    endpoint = replace(shout(), fields=[Field("question", "texts", ""), Field("document", "text", "")])
    found, settings = endpoint.examples({"question": ("who", "why"), "document": "a text"})
    assert found == [Asking("who", "a text"), Asking("why", "a text")]
    assert settings == {}


def test_more_outputs_than_the_beam_are_refused():
    with pytest.raises(BadRequest, match="nbest must be at most beam, 2, got 3"):
        shout().examples({"text": ("x",), "beam": 2, "nbest": 3})


def test_what_cannot_be_served_is_refused(task, monkeypatch):
    with pytest.raises(ValueError, match="cannot be served as an ensemble, got 2; name one"):
        endpoint_of(["one", "two"])
    monkeypatch.setattr(endpoints, "ENDPOINTS", {"language": None})
    with pytest.raises(ValueError, match=f"is a run of the task {task!r}, expected 'language'"):
        endpoint_of(["one"])
