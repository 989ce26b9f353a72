"""`regard serve`: each task over HTTP gives what its command gives."""

from __future__ import annotations

import base64
import json
import shlex

import pytest

from regard.serving import serve
from regard.serving.endpoints import endpoint_of
from regard.serving.http_server import Server
from regard.serving.request_fields import parse_request
from regard.tasks.answering import Answerer, Asking
from regard.tasks.classification import Classifier
from regard.tasks.language import LanguageModel
from regard.tasks.summarization import Summarizer
from regard.tasks.translation import Translator
from tests.cli.commands import NEWS, SOURCE, TEXTS, run, well
from tests.serving.conftest import ask

pytestmark = pytest.mark.commands


def answers(folder, body):
    with serve(folder, port=0) as server:
        status, found = ask(server, body)
    assert status == 200, found
    return found["answers"]


def test_translation(translator):
    lines = [*SOURCE[:3], ""]
    wanted = Translator.load(translator).n_best(lines, n=2, beam=3)
    body = {"text": lines, "beam": 3, "nbest": 2, "alignment": True, "attention": True}
    found = answers(translator, body)
    assert [[one["text"] for one in each.get("nbest", [each])] for each in found] == [
        [one.text for one in best] for best in wanted
    ]
    for line, one in zip(lines, found, strict=True):
        if one["text"]:
            rows = one["attention"]["weights"]
            assert (len(rows), len(rows[0])) == (len(one["text"].split()), len(line.split()))
            assert "-" in one["alignment"]
        else:
            assert "attention" not in one


def test_summarization(summarizer):
    found = answers(summarizer, {"text": [NEWS[0], "The fox"]})
    assert [one["text"] for one in found] == [
        one.text for one in Summarizer.load(summarizer).summarize([NEWS[0], "The fox"])
    ]
    assert [one["read_whole"] for one in found] == [False, True]


def test_answering(answerer):
    text = TEXTS[0][0]
    found = answers(answerer, {"question": ["When or what?", ""], "document": text, "attention": True})
    wanted = Answerer.load(answerer).answer([Asking("When or what?", text), Asking("", text)])
    assert [(one["text"], one["start"], one["end"]) for one in found] == [(x.text, x.start, x.end) for x in wanted]
    assert len(found[0]["attention"]["weights"][0]) == len(found[0]["attention"]["words"])
    assert "attention" not in found[1]


def test_classification_of_texts(critic):
    found = answers(critic, {"text": ["no wit at all", "great heart"], "top": 1, "attention": True})
    wanted = Classifier.load(critic).classify(["no wit at all", "great heart"])
    assert [one["label"] for one in found] == [one.label for one in wanted]
    assert [len(one["probabilities"]) for one in found] == [1, 1]
    assert len(found[0]["attention"]["tokens"]) == len(found[0]["attention"]["weights"])


def test_classification_and_captions_of_images(seer, captioner, files):
    picture = base64.b64encode((files / "scenes" / "0.png").read_bytes()).decode()
    [one] = answers(seer, {"image": picture, "top": 3})
    assert len(one["probabilities"]) == 3
    two = answers(captioner, {"image": [picture, picture]})
    assert two[0] == two[1]
    assert two[0].keys() == {"text", "score", "finished"}


def test_generation(writer):
    body = {"prompt": ["a d", "the"], "tokens": 5, "seed": 3}
    model = LanguageModel.load(writer)
    wanted = [model.generate(prompt, tokens=5, seed=3)[0] for prompt in body["prompt"]]
    assert [one["text"] for one in answers(writer, body)] == wanted


def test_examples_of_the_api_page_are_understood(translator, summarizer, answerer, critic, writer):
    for folder in (translator, summarizer, answerer, critic, writer):
        endpoint = endpoint_of([folder])
        body = str(endpoint.request).replace("'", '"').replace("True", "true").encode()
        examples, settings = endpoint.examples(parse_request(body, endpoint.fields))
        found = endpoint.run(examples, settings)
        assert found[0].keys() >= set(endpoint.response["answers"][0]) - {"alignment"}


def test_the_command_prints_how_to_ask(translator, tmp_path, monkeypatch):
    (tmp_path / "token").write_text("correct horse battery\n")
    asked = []

    def wait(server):
        asked.append((server.address, server.token, ask(server, {"text": "ein Haus"})[0]))

    monkeypatch.setattr(Server, "wait", wait)
    for flags, shown in (([], None), (["--token-file", tmp_path / "token"], f"Bearer $(cat {tmp_path / 'token'})")):
        first, command = well("serve", translator, "--port", 0, *flags).lines
        address, token, status = asked[-1]
        assert status == 200
        assert first == f"Translate texts with {translator} at http://{address}"
        words = shlex.split(command)
        assert words[:2] == ["curl", f"http://{address}/translate"]
        assert f"Authorization: {shown or f'Bearer {token}'}" in words
        assert json.loads(words[-1])["text"]
    assert asked[1][1] == "correct horse battery"


def test_two_runs_are_an_ensemble(translator, recurrent):
    wanted = Translator.load(translator, recurrent).translate(SOURCE[:2])
    with serve(translator, recurrent, port=0) as server:
        found = ask(server, {"text": SOURCE[:2]})[1]["answers"]
    assert [one["text"] for one in found] == [one.text for one in wanted]


def test_bad_flags_are_refused(translator, tmp_path):
    (tmp_path / "token").write_text("short")
    assert "at least 16" in run("serve", translator, "--token-file", tmp_path / "token").err
    assert "port must be from 0 to 65535" in run("serve", translator, "--port", 70000).err
    assert "is not a folder" in run("serve", tmp_path / "none").err
