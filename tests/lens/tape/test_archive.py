"""Tapes in files: the same answers afterwards, and nothing believed that is not what was written."""

import json
import os
import re
import struct

import pytest
import safetensors.torch
import torch
from torch import nn

from regard import (
    Alibi,
    Causal,
    Padding,
    Window,
    weights,
)
from regard.lens import EdgeWeights, SampledWeights, Tape, capture, words
from regard.lens.recording.reduced import Reduced
from regard.lens.tape import archive
from regard.lens.tape.string_tensors import StringReader
from regard.nn import Attention, T5Bias

B, H, I, J, D = 2, 4, 5, 7, 8


TEXT = ["na", "##ïve", "\u202eevil", "<script>", "日本", "\x00", "🙂"]


def some(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.fixture
def tape():
    torch.manual_seed(0)
    make = {"mask": Causal(), "bias": T5Bias(H)}
    model = nn.Sequential(Attention(16, H, kv_heads=2, slots=1, **make), Attention(16, H, **make))
    x = torch.randn(B, 7, 16)
    with capture(model, TEXT, values=True, gradients=True) as tape:
        model(x).square().mean().backward()
    tape.group("words", words(TEXT))
    return tape


def test_a_tape_answers_the_same_after_a_file(tape, tmp_path):
    for A in tape.values():
        A.summary()  # the row statistic it finds is saved too
    tape.save(tmp_path / "tape.safetensors")
    again = Tape.load(tmp_path / "tape.safetensors")
    assert list(again) == list(tape)
    for key in tape:
        A, truth = again[key], tape[key]
        assert A._statistic is not None
        for name in ("entropy", "received", "max", "distance", "map", "statistic"):
            assert (getattr(A.summary(), name) - getattr(truth.summary(), name)).abs().max() < 1e-6
        assert torch.equal(A.topk(2).indices, truth.topk(2).indices)
        assert (A[0, 1] - truth[0, 1]).abs().max() < 1e-6
        for name in ("v", "projection", "gradient"):
            assert torch.equal(getattr(again.extras(key), name), getattr(tape.extras(key), name))
    assert again.tokens_of("1") == tape.tokens_of("1") == (TEXT, TEXT)
    assert (again.mass("1", "words") - tape.mass("1", "words")).abs().max() < 1e-6
    assert again.facts == tape.facts


def test_a_loaded_tape_can_be_saved_again(tape, tmp_path):
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    tape.save(first)
    Tape.load(first).save(second)
    assert header(first) == header(second)


def test_what_layers_share_is_stored_once(tmp_path):
    mask, path = Padding(some(B, J) > 0), tmp_path / "tape.safetensors"
    q, k = some(B, H, I, D), some(B, 2, J, D).roll(1, 0)
    Tape({(str(n), 0): weights(q, k, mask=mask) for n in range(3)}).save(path)
    assert len(safetensors.torch.load_file(path)) == 3


def test_chosen_heads_survive(tmp_path):
    model, x = Attention(16, H, bias=Alibi(H)), torch.randn(B, 7, 16)
    with torch.no_grad(), capture(model, heads=[3, 1]) as tape:
        model(x)
    tape.save(tmp_path / "tape.safetensors")
    again = Tape.load(tmp_path / "tape.safetensors")
    assert torch.equal(again[0].dense(), model.weights(x).dense()[:, [3, 1]])


def test_reduced_tapes_survive(tmp_path):
    model, x = Attention(16, H), torch.randn(B, 70, 16)
    with torch.no_grad(), capture(model, keep=["entropy", "received", "pool:8"]) as tape:
        model(x)
    tape.save(tmp_path / "tape.safetensors")
    again = Tape.load(tmp_path / "tape.safetensors")
    assert repr(again) == repr(tape)
    for name in ("entropy", "received", "pool:8", "peaks:8"):
        assert torch.equal(again[0][name], tape[0][name])


def test_edge_weights_survive(tmp_path):
    A = EdgeWeights(torch.tensor([[4, 0, 1], [1, 1, 0]]), torch.rand(3, H), (2, 5))
    tape = Tape({("gat", 0): A})
    tape.save(tmp_path / "tape.safetensors")
    for again in (Tape.load(tmp_path / "tape.safetensors"), Tape.open(tmp_path / "tape.safetensors")):
        assert repr(again) == repr(tape)
        assert torch.equal(again[0].edge_index, A.edge_index)
        assert torch.equal(again[0].weights, A.weights)


def points_tape():
    return Tape(
        {("detr", 0): SampledWeights(torch.rand(1, H, 2, 3, 2), torch.rand(1, H, 2, 3), [0, 0, 1], [(3, 4), (1, 2)])}
    )


def test_sampled_weights_survive(tmp_path):
    tape = points_tape()
    tape.save(tmp_path / "tape.safetensors")
    for again in (Tape.load(tmp_path / "tape.safetensors"), Tape.open(tmp_path / "tape.safetensors")):
        assert repr(again) == repr(tape)
        assert (again[0].levels, again[0].maps) == (tape[0].levels, tape[0].maps)
        assert torch.equal(again[0].locations, tape[0].locations)
        assert torch.equal(again[0].weights, tape[0].weights)


@pytest.mark.parametrize(("name", "value"), [("levels", [0, 0, 2]), ("maps", [[3, 0], [1, 2]]), ("levels", "abc")])
def test_points_on_maps_that_are_not_there_are_refused(tmp_path, monkeypatch, name, value):
    describe = archive._entry_json
    monkeypatch.setattr(archive, "_entry_json", lambda *given: {**describe(*given), name: value})
    points_tape().save(tmp_path / "tape.safetensors")
    with pytest.raises(ValueError, match=r"cannot read .* as a tape"):
        Tape.load(tmp_path / "tape.safetensors")


def test_a_failed_save_leaves_the_file_before_it(tape, tmp_path, monkeypatch):
    path = tmp_path / "tape.safetensors"
    tape.save(path)
    before = path.read_bytes()

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(archive.safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        tape.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_half_a_character_comes_back(tape, tmp_path):
    text = ["a", "\ud83d", "\ude00", "é", "\\ud83d", "\x00", "g"]  # as tokenizers by bytes of UTF-16 cut it
    tape.tokens = text
    tape.facts["note"] = "\udcff"
    tape.save(tmp_path / "tape.safetensors")
    again = Tape.load(tmp_path / "tape.safetensors")
    assert again.tokens_of(0)[0] == text
    assert again.facts["note"] == "\udcff"


def test_what_cannot_be_saved_is_named(tmp_path):
    from regard.ops.terms.biases import Bias
    from regard.ops.terms.term import term

    @term
    class Mine(Bias):
        def over(self, at):
            return at.i * 0.0

    q, k = some(B, H, I, D), some(B, 2, J, D).roll(1, 0)
    with pytest.raises(ValueError, match=r"Mine\(\) cannot be saved: tape files have no term Mine"):
        Tape({("x", 0): weights(q, k, bias=Mine())}).save(tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="holds selected rows"):
        Tape({("x", 0): weights(q, k).select(batch=[1])}).save(tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"takes 10\.\d MB, more than the 9 MB that a file may hold; save fewer"):
        Tape({("x", 0): weights(q, k)}, facts={"notes": "x" * 10_000_000}).save(tmp_path / "x.safetensors")
    assert not list(tmp_path.iterdir())


def header(path):
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def rewritten(path, change):
    """The file again after `change(description, tensors)`, with a digest that fits."""
    tensors = safetensors.torch.load_file(path)
    described = json.loads(header(path)[0]["__metadata__"][archive.METADATA_KEY])
    described = change(described, tensors) or described
    text = described if isinstance(described, str) else json.dumps(described)
    safetensors.torch.save_file(tensors, path, archive.checksummed_metadata(text, tensors))


def test_captures_of_the_first_layout_are_refused_with_the_next_step(tape, tmp_path):
    path = tmp_path / "old.safetensors"
    tape.save(path)
    tensors, text = safetensors.torch.load_file(path), header(path)[0]["__metadata__"][archive.METADATA_KEY]
    safetensors.torch.save_file(tensors, path, {archive.METADATA_KEY: text, "sha256": "0" * 64})
    for read in (Tape.load, Tape.open):
        with pytest.raises(
            ValueError, match=r"old.safetensors .* has format 1, but .*; create it again with capture\(model\)"
        ):
            read(path)


def entry(change):
    def apply(described, tensors):
        change(described["entries"][0], tensors)

    return apply


def strings(change):
    """Change the tensors of the tokens."""
    return lambda described, tensors: change(described["tokens"][0][1], tensors)


def empty(tensors):
    """Labels that are none."""
    counts = torch.zeros(1, dtype=torch.int32)
    tensors |= {"utf8": torch.zeros(0, dtype=torch.uint8), "bytes": counts[:0].clone(), "strings": counts}
    return {name: name for name in ("utf8", "bytes", "strings")}


def in_text(described, tensors):
    """The description as it was when tokens and labels were a part of it."""
    read = StringReader(tensors).read
    tokens = [[layers, read(queries), read(keys)] for layers, queries, keys in described["tokens"]]
    groups = {
        name: [
            [layers, *([{**x, "labels": read(x["labels"])[0]} for x in axis] for axis in axes)] for layers, *axes in all
        ]
        for name, all in described["groups"].items()
    }
    return {**described, "format": 4, "tokens": tokens, "groups": groups}


BELOW = torch.tensor([-1, 3], dtype=torch.int32)
HOSTILE = [
    ("text that is no JSON", lambda d, t: "{", "cannot read .* as a tape"),
    ("not an object", lambda d, t: "[]", "must have the fields format, entries"),
    ("newer format", lambda d, t: {**d, "format": 6}, "it has format 6, but .* reads format 5; upgrade regard"),
    ("older format", lambda d, t: {**d, "format": 1}, "it has format 1, but .* reads format 5; create it again"),
    ("no format", lambda d, t: {k: v for k, v in d.items() if k != "format"}, "has format None.*create it again"),
    ("unknown field", lambda d, t: {**d, "code": "import os"}, "must have the fields format, entries.*code"),
    ("unknown term", entry(lambda e, t: e["terms"].update(mask={"term": "os.system"})), "unknown term 'os.system'"),
    ("term in a wrong slot", entry(lambda e, t: e["terms"].update(mask=e["terms"]["score"])), "mask must be a Mask"),
    (
        "unknown term field",
        entry(lambda e, t: e["terms"]["score"].update(extra=1)),
        "Dot must have the fields scale, cap",
    ),
    ("wrong term value", entry(lambda e, t: e["terms"]["score"].update(cap="x")), "Dot cap must be a number"),
    ("missing tensor", entry(lambda e, t: e["tensors"].update(q="t99")), "the file has no tensor 't99'"),
    ("unknown tensor", entry(lambda e, t: e["tensors"].update(w="t0")), "unknown tensors w"),
    ("unhashable name", entry(lambda e, t: e["tensors"].update(q=[1])), "cannot read .* as a tape"),
    ("no queries", entry(lambda e, t: e["tensors"].pop("q")), "an entry has no tensor q"),
    (
        "integer queries",
        entry(lambda e, t: t.update({e["tensors"]["q"]: torch.zeros(2, 4, 7, 4, dtype=torch.long)})),
        "q must be float",
    ),
    ("flat queries", entry(lambda e, t: t.update({e["tensors"]["q"]: torch.zeros(7)})), "q must have dims"),
    ("wrong heads", entry(lambda e, t: t.update({e["tensors"]["q"]: torch.zeros(2, 3, 7, 4)})), "must be a multiple"),
    ("wrong width", entry(lambda e, t: t.update({e["tensors"]["q"]: torch.zeros(2, 4, 7, 5)})), "width"),
    (
        "wrong statistic",
        entry(lambda e, t: e["tensors"].update(statistic=e["tensors"]["q"])),
        "the statistic must have shape",
    ),
    ("offset of another kind", entry(lambda e, t: e.update(offset=1.5)), "expected a whole number, got 1.5"),
    ("negative call", entry(lambda e, t: e.update(call=-1)), "whole number of at least 0, got -1"),
    ("offset past int64", entry(lambda e, t: e.update(offset=10**30)), r"up to 2\*\*53, got one of 31 digits"),
    ("call past int64", entry(lambda e, t: e.update(call=10**30)), r"up to 2\*\*53, got one of 31 digits"),
    (
        "field past int64",
        entry(lambda e, t: e["terms"].update(mask={"term": "Prefix", "n": 10**30})),
        r"up to 2\*\*53, got one of 31 digits",
    ),
    ("shape past int64", lambda d, t: {**d, "entries": [{**reduced(d, "max"), "shape": [10**30] * 4}]}, "31 digits"),
    ("terms nested 200 deep", entry(lambda e, t: e["terms"].update(mask=nested(200))), "nested up to 128 deep"),
    ("terms nested 20,000 deep", lambda d, t: deep(d), "nested up to 128 deep"),
    ("heads of another kind", entry(lambda e, t: e.update(heads=["a"])), "expected a whole number"),
    ("heads past the table", entry(lambda e, t: e.update(heads=[0, 1, 2, 9])), "cannot read .* as a tape"),
    (
        "tokens of another kind",
        lambda d, t: {**d, "tokens": [["*", "text", "text"]]},
        "strings must have the fields utf8, bytes, strings, got str",
    ),
    (
        "tokens of another kind in the format before",
        lambda d, t: {**in_text(d, t), "tokens": [["*", "text", "text"]]},
        "tokens must be lists of strings",
    ),
    ("tokens past their text", strings(lambda d, t: t.update({d["bytes"]: t[d["bytes"]] + 1})), "add up to"),
    ("tokens shorter than nothing", strings(lambda d, t: t.update({d["bytes"]: BELOW})), "at least 0"),
    (
        "texts past their tokens",
        strings(lambda d, t: t.update({d["strings"]: t[d["strings"]] + 1})),
        "counts of strings must",
    ),
    ("tokens that are no text", strings(lambda d, t: t.update({d["utf8"]: t[d["utf8"]] | 128})), "can't decode"),
    ("tokens of another dtype", strings(lambda d, t: t.update({d["bytes"]: t[d["bytes"]].long()})), "torch.int32"),
    ("tokens in rows", strings(lambda d, t: t.update({d["utf8"]: t[d["utf8"]][None]})), "one dim, got"),
    ("tokens that are not there", strings(lambda d, t: d.update(utf8="t99")), "the file has no tensor 't99'"),
    (
        "groups past their labels",
        lambda d, t: d["groups"]["words"][0][1][0].update(labels=empty(t)),
        "below the number of labels 0",
    ),
    ("unknown measure", lambda d, t: {**d, "entries": [reduced(d, "mean")]}, "unknown measure 'mean'"),
    ("measure of a wrong shape", lambda d, t: {**d, "entries": [reduced(d, "entropy")]}, "entropy must have shape"),
]


def nested(depth):
    mask = {"term": "Causal"}
    for _ in range(depth):
        mask = {"term": "Not", "mask": mask}
    return mask


def deep(described):
    """The description as text, as `json.dumps` cannot write this depth either."""
    first = described["entries"][0]
    first["terms"]["mask"] = "HERE"
    inner = '{"term": "Not", "mask": ' * 20_000 + "null" + "}" * 20_000
    return json.dumps(described).replace('"HERE"', inner, 1)


def reduced(described, name):
    first = described["entries"][0]
    return {"layer": "x", "call": 0, "shape": [2, 4, 7, 7], "measures": {name: first["tensors"]["q"]}}


@pytest.mark.parametrize(("change", "message"), [x[1:] for x in HOSTILE], ids=[x[0] for x in HOSTILE])
def test_hostile_files_are_refused_with_their_name(tape, tmp_path, change, message):
    path = tmp_path / "tape.safetensors"
    tape.save(path)
    rewritten(path, change)
    with pytest.raises(ValueError, match=message) as caught:
        Tape.load(path)
    assert str(path) in str(caught.value)


def broken(tape, path, raw):
    tape.save(path)
    path.write_bytes(raw(path.read_bytes()))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (lambda x: b"", "as safetensors|not a safetensors file"),
        (lambda x: x[:5], "as safetensors|not a safetensors file"),
        (
            lambda x: b"The cat sat on the mat.",
            "is not a capture: it is not a safetensors file; regard look and tape.save",
        ),
        (lambda x: x[:-1], "as safetensors|not a safetensors file"),
        (lambda x: x + b"\x00", "as safetensors|not a safetensors file"),
        (lambda x: struct.pack("<Q", 2**40) + x[8:], "has a header of 1099511627776 bytes; the limit is 10000000"),
        (lambda x: struct.pack("<Q", 3) + x[8:], "as safetensors|not a safetensors file"),
        (lambda x: x[:8] + b"\xff" * 40 + x[48:], "as safetensors|not a safetensors file"),
        (lambda x: x[:-1] + bytes([x[-1] ^ 1]), "is corrupted: checksum mismatch"),
    ],
)
def test_damaged_files_are_refused(tape, tmp_path, raw, message):
    path = tmp_path / "tape.safetensors"
    broken(tape, path, raw)
    with pytest.raises(ValueError, match=message):
        Tape.load(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    path = tmp_path / "pipe.safetensors"
    os.mkfifo(path)
    for read in (Tape.load, Tape.open):
        with pytest.raises(ValueError, match=r"pipe\.safetensors is not a capture: it is a pipe or a device"):
            read(path)
    assert not archive.is_tape(path)


def test_terms_nested_too_deep_to_be_read_are_not_written_either(tmp_path):
    q, k = some(B, H, I, D), some(B, 2, J, D).roll(1, 0)
    mask = Causal()
    for _ in range(127):
        mask = mask & Window(9)
    path = tmp_path / "x.safetensors"
    Tape({("x", 0): weights(q, k, mask=mask)}).save(path)
    assert repr(Tape.load(path)["x"].call.mask) == repr(mask)
    with pytest.raises(ValueError, match="terms may be nested up to 128 deep in a tape file"):
        Tape({("x", 0): weights(q, k, mask=~~(mask & Window(9)))}).save(path)


def test_no_changed_byte_gets_through(tape, tmp_path):
    path = tmp_path / "tape.safetensors"
    tape.save(path)
    whole, generator = path.read_bytes(), torch.Generator().manual_seed(0)
    for at in torch.randint(len(whole), (150,), generator=generator).tolist():
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x11]) + whole[at + 1 :])
        with pytest.raises(ValueError, match=r"safetensors"):
            Tape.load(path)


def test_other_safetensors_files_are_no_tapes(tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="is a safetensors file but not a tape"):
        Tape.load(path)
    with pytest.raises(FileNotFoundError):
        Tape.load(tmp_path / "nothing.safetensors")


def test_of_the_format_before_everything_but_summaries_is_read(tape, tmp_path):
    path = tmp_path / "before.safetensors"
    tape.summarize()
    tape.save(path)
    rewritten(path, lambda described, tensors: {**in_text(described, tensors), "format": 2})
    found = Tape.load(path)
    for key in tape:
        if not isinstance(tape[key], Reduced):
            assert not found.summarized(key)
            torch.testing.assert_close(found[key].dense(), tape[key].dense())
            torch.testing.assert_close(found.summary(key).map, tape.summary(key).map)


def test_summaries_keep_logits_and_the_largest_weight_of_each_cell_and_files_without_them_are_read(tape, tmp_path):
    path = tmp_path / "tape.safetensors"
    tape.summarize()
    tape.save(path)
    for key, A in tape.items():
        if not isinstance(A, Reduced):
            assert torch.equal(Tape.load(path).summary(key).peaks, tape.summary(key).peaks)
            assert torch.equal(Tape.load(path).summary(key).logit, tape.summary(key).logit)

    def drop(described, tensors):
        for one in described["entries"]:
            if one.get("summary"):
                del one["summary"]["peaks"], one["summary"]["logit"]

    rewritten(path, drop)
    found = Tape.load(path)
    for key, A in tape.items():
        if not isinstance(A, Reduced):
            assert found.summarized(key)
            assert found.summary(key).peaks is None


def test_tokens_and_labels_in_the_text_of_a_file_are_read(tape, tmp_path):
    path = tmp_path / "before.safetensors"
    tape.summarize()
    tape.save(path)
    rewritten(path, in_text)
    found = Tape.load(path)
    assert found.tokens_of(1) == tape.tokens_of(1) == (TEXT, TEXT)
    assert found.groups_of(1, "words")[0].labels == words(TEXT).labels
    assert found.summarized(0)


def test_a_tape_of_the_format_without_unseen_layers_has_none(tape, tmp_path):
    path = tmp_path / "before.safetensors"
    tape.save(path)
    rewritten(path, lambda described, tensors: {**without(in_text(described, tensors), "unseen"), "format": 3})
    assert Tape.load(path).unseen == []


def without(described, name):
    return {key: value for key, value in described.items() if key != name}


def test_a_tape_is_not_saved_where_there_is_no_folder(tape, tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"none is not a folder; create it before you save tape\.safetensors there"
    ):
        tape.save(tmp_path / "none" / "tape.safetensors")


def test_a_tape_is_not_saved_over_a_folder(tape, tmp_path):
    with pytest.raises(IsADirectoryError, match=rf"{re.escape(str(tmp_path))} is a folder; name a file in it$"):
        tape.save(tmp_path)
    assert not list(tmp_path.iterdir())


def test_measures_alone_are_read_from_the_format_before(tmp_path):
    model, path = Attention(8, heads=2), tmp_path / "reduced.safetensors"
    with capture(model, keep=["entropy", "pool:4"]) as tape:
        model(torch.randn(1, 6, 8))
    tape.save(path)
    rewritten(path, lambda described, tensors: {**described, "format": 2})
    found = Tape.load(path)
    assert found[0].kept == ("entropy", "pool:4")
    assert torch.equal(found[0].entropy(), tape[0].entropy())


@pytest.mark.parametrize(
    ("q", "k"),
    [
        pytest.param(lambda x: x, lambda x: x[:], id="the same numbers"),
        pytest.param(lambda x: x, lambda x: x.view(2, 2, 8, 3).transpose(2, 3), id="the same memory"),
        pytest.param(lambda x: x[:, :1], lambda x: x[:, 1:], id="parts of it"),
    ],
)
def test_queries_and_keys_may_share_memory(q, k, tmp_path):
    x = torch.randn(2, 2, 3, 8)
    tape = Tape({("a", 0): weights(q(x), k(x))})
    tape.save(tmp_path / "tape.safetensors")
    torch.testing.assert_close(Tape.load(tmp_path / "tape.safetensors")[0].dense(), tape[0].dense())
