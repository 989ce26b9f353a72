"""The folder of a model by its name: here, in the cache, or from a hub on this machine."""

from __future__ import annotations

import json
import socket

import pytest

from regard.models import pretrained
from regard.tasks import model_folder as files
from regard.tasks.language import LanguageModel
from regard.tasks.look import tape_of
from regard.tasks.model_folder import SAMPLE, is_complete, model_folder
from tests.tasks.hub_server import hub_server

huggingface_hub = pytest.importorskip("huggingface_hub")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and a hub at which nothing answers."""
    for name, value in (
        ("HF_HUB_CACHE", str(tmp_path / "cache")),
        ("HF_HUB_OFFLINE", False),
        ("HF_HUB_DISABLE_XET", True),
    ):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    use_hub("http://127.0.0.1:9", monkeypatch)
    return tmp_path / "cache"


def use_hub(address, monkeypatch):
    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def no_network(monkeypatch):
    """No socket may connect, and no name be looked up."""

    def refuse(*arguments, **options):
        raise AssertionError("a socket was opened")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def write_model(folder, *more):
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json", *more):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    return folder


def write_cached(cache, name, *more):
    folder = cache / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    return write_model(folder / "snapshots" / "abc", *more)


def test_a_folder_and_a_model_in_the_cache_need_no_network(cache, tmp_path, no_network):
    here = write_model(tmp_path / "model")
    assert model_folder(str(here)) == here
    cached = write_cached(cache, "org/tiny")
    assert model_folder("org/tiny", say=pytest.fail) == cached


def test_everything_but_a_download_stays_offline(cache, tmp_path, no_network):
    assert len(tape_of(SAMPLE, text="the king")) > 1
    LanguageModel.load(SAMPLE)
    for load in (LanguageModel.load, pretrained.load, tape_of):
        with pytest.raises((ValueError, OSError)):
            load("org/tiny", **({"text": "the"} if load is tape_of else {}))
    with pytest.raises(AssertionError, match="a socket was opened"):
        model_folder("org/tiny")


def test_a_name_is_downloaded_once_and_only_what_runs_no_code(cache, tmp_path, monkeypatch, capfd):
    unsafe = ("pytorch_model.bin", "modeling_tiny.py", "model.pkl", "onnx/model.safetensors")
    folder, said = write_model(tmp_path / "model", *unsafe), []
    with hub_server({"org/tiny": folder}) as (address, requests):
        use_hub(address, monkeypatch)
        huggingface_hub.utils.enable_progress_bars()  # the tests of regard look turn them off
        found = model_folder("org/tiny", say=said.append)
        assert sorted(path.name for path in found.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
        assert said == ["org/tiny is no folder here and not in the cache; downloading it from the Hugging Face hub"]
        assert "Fetching 3 files" in capfd.readouterr().err
        requests.clear()
        assert model_folder("org/tiny", say=pytest.fail) == found
        assert requests == []
        with pytest.raises(ValueError, match="org/tinny is no folder, and the hub has no public model of this name"):
            model_folder("org/tinny")


def test_a_model_without_safetensors_is_refused(cache, tmp_path, monkeypatch):
    folder = write_model(tmp_path / "model", "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with hub_server({"old": folder}) as (address, _):
        use_hub(address, monkeypatch)
        with pytest.raises(ValueError, match=r"old on the hub has no config.json with .safetensors weights"):
            model_folder("old")


def test_without_a_network_the_next_step_is_named(cache):
    with pytest.raises(ValueError, match="run hf download org/tiny --local-dir tiny, and give that folder"):
        model_folder("org/tiny")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("./model", "'./model' is no folder; give the folder of a model, or its name on the hub"),
        ("a/b/c", "'a/b/c' is no folder"),
        ("a--b", "cannot be the name of a model on the hub"),
    ],
)
def test_what_can_be_no_model_is_refused(name, said, cache):
    with pytest.raises(ValueError, match=said):
        model_folder(name)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(ValueError, match="is a file; give the folder of a model"):
        model_folder(str(tmp_path / "model.safetensors"))


def test_without_huggingface_hub_the_package_is_named(monkeypatch):
    monkeypatch.setattr(files, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"need pip install 'regard\[hf\]'"):
        model_folder("gpt2")


def test_a_model_is_complete_with_all_its_shards(tmp_path):
    folder = write_model(tmp_path / "model")
    assert is_complete(folder)
    shards = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(shards))
    (folder / "model-1.safetensors").write_text("")
    assert not is_complete(folder)
    (folder / "model-2.safetensors").write_text("")
    assert is_complete(folder)
    (folder / "config.json").unlink()
    assert not is_complete(folder)


def test_the_sample_is_small():
    assert sum(path.stat().st_size for path in SAMPLE.iterdir()) <= 2e6
