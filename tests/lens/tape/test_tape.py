"""Tape: indexing, annotations and tables."""

import copy
import math
import pickle
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from regard import Causal, Weights, weights
from regard.lens import Extras, Tape, capture, spans, words
from regard.lens.recording.reduced import Reduced
from regard.lens.recording.store import TensorInMemory
from regard.nn import Attention

B, N, D, H = 2, 7, 16, 4
TEXT = ["A", "que", "##ry", "look", "##s", "at", "keys"]


@pytest.fixture
def tape():
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": Attention(D, H, mask=Causal()), "b": nn.Sequential(Attention(D, H), Attention(D, H))})
    x = torch.randn(B, N, D)
    with torch.no_grad(), capture(model, TEXT, values=True) as tape:
        model["b"](model["a"](x))
        model["a"](x[:, :5])
    return tape


def test_entries_are_indexed_by_name_call_and_number(tape):
    assert list(tape) == [("a", 0), ("b.0", 0), ("b.1", 0), ("a", 1)]
    assert tape["b.1"] is tape["b.1", 0] is tape[2] is tape[-2]
    assert tape["a", 1] is tape[3]
    assert isinstance(tape[0], Weights)
    assert list(tape.values()) == [tape[n] for n in range(4)]
    assert ("a", 1) in tape
    assert tape.layers == ["a", "b.0", "b.1"]
    assert tape.calls("a") == [tape[0], tape[3]]


def test_a_tape_shows_its_layers(tape):
    assert repr(tape).splitlines() == [
        "Tape(3 layers, 4 calls)",
        "a, 0  Weights(2 x 4 x 7 x 7, mask=Causal())",
        "b.0   Weights(2 x 4 x 7 x 7)",
        "b.1   Weights(2 x 4 x 7 x 7)",
        "a, 1  Weights(2 x 4 x 5 x 5, mask=Causal())",
    ]


@pytest.mark.parametrize(
    ("key", "kind", "message"),
    [
        ("a", KeyError, r"'a' was called 2 times; write tape\['a', 0\], tape\['a', 1\]"),
        (("b.0", 1), KeyError, r"'b.0' was called once; write tape\['b.0', 0\]"),
        ("c", KeyError, "no layer 'c' on the tape; there are a, b.0, b.1"),
        (4, IndexError, "the tape has 4 entries, got index 4"),
    ],
)
def test_a_missing_key_raises_with_the_keys_there_are(tape, key, kind, message):
    with pytest.raises(kind, match=message):
        tape[key]


def test_a_layer_without_a_name_is_there():
    model = Attention(D, H)
    with capture(model) as tape:
        model(torch.randn(B, N, D))
    assert repr(tape).splitlines() == ["Tape(1 layer)", "(model)  Weights(2 x 4 x 7 x 7)"]
    assert tape["(model)"] is tape["(model)", 0] is tape[""] is tape[0]
    assert tape.calls("(model)") == tape.calls("") == [tape[0]]
    assert tape.select("(model)").layers == tape.layers == [""]
    assert set(tape.table()["layer"]) == {"(model)"}
    with pytest.raises(KeyError, match=r"no layer 'x' on the tape; there are \(model\)"):
        tape["x"]
    with pytest.raises(KeyError, match=r"no layer matches 'x'; there are \(model\)"):
        tape.select("x")
    with pytest.raises(KeyError, match="no layer 'x' on the tape; there are none"):
        Tape({})["x"]


def test_a_pattern_selects_a_tape(tape):
    some = tape.select("b.*")
    assert list(some) == [("b.0", 0), ("b.1", 0)]
    assert some["b.0"] is tape["b.0"]
    assert torch.equal(some.extras("b.0").v, tape.extras("b.0").v)
    assert some.tokens_of("b.0") == (TEXT, TEXT)
    with pytest.raises(KeyError, match=r"no layer matches 'c\*'; there are a, b.0, b.1"):
        tape.select("c*")


def test_extras_are_empty_where_nothing_was_kept(tape):
    assert tape.extras("b.0").projection.shape == (D, D)
    plain = Tape({("x", 0): weights(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4))})
    assert plain.extras("x").v is None
    assert Extras().gradient is None


def test_tokens_label_axes_of_their_length(tape):
    assert tape.tokens_of(0) == (TEXT, TEXT)
    assert tape.tokens_of(("a", 1)) == (None, None)
    tape.tokens = {"*": TEXT, "b.1": (TEXT, [*TEXT[:-1], "values"]), "a": [["x"] * 7, ["y"] * 7]}
    assert tape.tokens_of("b.1")[1][-1] == "values"
    assert tape.tokens_of(("a", 0), batch=1) == (["y"] * 7, ["y"] * 7)
    assert len(tape.tokens) == 3
    tape.tokens = {"b.*": TEXT}
    assert tape.tokens_of(("a", 0)) == (None, None)


def test_the_last_token_a_model_writes_may_have_no_row(tape):
    tape.tokens = [*TEXT, "."]
    assert tape.tokens_of(0) == (TEXT, TEXT)


def test_two_tokens_are_a_text_and_no_pair():
    A = weights(torch.randn(1, 1, 2, 4), torch.randn(1, 1, 2, 4))
    tape = Tape({("x", 0): A})
    tape.tokens = ("a", "b")
    assert tape.tokens_of("x") == (["a", "b"], ["a", "b"])
    tape.tokens = {"x": ("a", "b")}
    assert tape.tokens_of("x") == (["a", "b"], ["a", "b"])


def test_tokens_must_be_strings(tape):
    with pytest.raises(TypeError, match="tokens must be strings"):
        tape.tokens = [[1, 2], [3, 4]]


def test_mass_between_groups_is_that_of_the_matrix(tape):
    tape.group("words", words(TEXT))
    tape.group("words", words(TEXT), spans(N, {"start": (0, 2)}), layers="b.1")
    found = tape.mass("b.0", "words")
    one_hot = nn.functional.one_hot(words(TEXT).ids).double()
    truth = (one_hot.T @ tape["b.0"].dense().double() @ one_hot) / one_hot.sum(0)[:, None]
    assert (found - truth).abs().max() < 1e-6
    assert tape.mass("b.1", "words").shape == (B, H, 5, 2)
    assert tape.groups_of("b.1", "words")[1].labels == ("start", "other")


def test_groups_that_are_missing_or_do_not_fit_are_named(tape):
    with pytest.raises(KeyError, match=r"'b.0' has no groups 'lines'; add them with tape.group"):
        tape.mass("b.0", "lines")
    tape.group("words", words(TEXT))
    with pytest.raises(ValueError, match="groups 'words' have 7 tokens, but 'a' has 5 queries"):
        tape.groups_of(("a", 1), "words")


def test_groups_need_queries_and_keys():
    layer = Attention(D, H)
    with torch.no_grad(), capture(layer, keep=["max"]) as tape:
        layer(torch.randn(B, N, D))
    tape.group("words", words(TEXT))
    with pytest.raises(ValueError, match="this capture kept only measures"):
        tape.mass("", "words")


def test_a_table_has_a_row_for_each_head(tape, monkeypatch):
    monkeypatch.setattr("regard.lens.tape.overview.find_spec", lambda name: None)
    table = tape.table()
    assert list(table) == ["layer", "call", "batch", "head", "entropy", "received", "max", "distance"]
    assert len(table["layer"]) == 4 * B * H
    row = table["head"].index(3)
    A = tape["a", 0].dense().double()[0, 3]
    entropy = -torch.special.xlogy(A, A).sum(-1).mean()
    assert table["entropy"][row] == pytest.approx(entropy.item(), abs=1e-5)
    assert table["received"][row] == pytest.approx((A.sum(0).max() / N).item(), abs=1e-5)
    assert table["max"][row] == pytest.approx(A.amax(-1).mean().item(), abs=1e-5)
    assert (table["layer"][row], table["call"][row], table["batch"][row]) == ("a", 0, 0)


def test_a_table_is_a_data_frame_where_there_is_pandas(tape, monkeypatch):
    monkeypatch.setattr("regard.lens.tape.overview.find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=lambda columns: ("frame", columns)))
    kind, columns = tape.table()
    assert kind == "frame"
    assert len(columns["head"]) == 4 * B * H


def test_queries_that_see_nothing_are_left_out_of_the_means(monkeypatch):
    monkeypatch.setattr("regard.lens.tape.overview.find_spec", lambda name: None)
    q, k = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 4, 8)
    padded = weights(q, k, mask=Causal(), offset=-2)  # the first two queries stand before every key
    alone = weights(q[:, :, 2:], k, mask=Causal(), offset=0)
    numbers = [Tape({("x", 0): A}).table() for A in (padded, alone)]
    assert numbers[0]["entropy"] == pytest.approx(numbers[1]["entropy"], abs=1e-6)


@pytest.mark.parametrize(("i", "j"), [(0, 0), (0, 3), (3, 0)])
def test_a_table_of_no_tokens_holds_zeros(i, j, monkeypatch):
    monkeypatch.setattr("regard.lens.tape.overview.find_spec", lambda name: None)
    table = Tape({("x", 0): weights(torch.randn(1, 2, i, 8), torch.randn(1, 2, j, 8))}).table()
    assert [table[name] for name in ("entropy", "received", "max", "distance")] == [[0.0, 0.0]] * 4


def test_tables_of_reduced_tapes_have_the_kept_measures(monkeypatch):
    monkeypatch.setattr("regard.lens.tape.overview.find_spec", lambda name: None)
    layer = Attention(D, H)
    with torch.no_grad(), capture(layer, keep=["distance", "pool:4"]) as tape:
        layer(torch.randn(B, N, D))
    assert list(tape.table()) == ["layer", "call", "batch", "head", "distance"]
    with torch.no_grad(), capture(layer, keep=["pool:4"]) as tape:
        layer(torch.randn(B, N, D))
    assert tape.table() == {}


def test_facts_name_the_model(tape):
    assert tape.facts["model"] == "torch.nn.modules.container.ModuleDict"
    assert tape.facts["torch"] == str(torch.__version__)


def test_batch_rows_without_tokens_or_pictures_have_none(tape):
    rows = [TEXT, TEXT[::-1]]
    tape.tokens = rows
    assert tape.tokens_of("b.0", batch=1) == (rows[1], rows[1])
    assert tape.tokens_of("b.0", batch=2) == (None, None)
    pixels = torch.zeros(4, 4, 3, dtype=torch.uint8)
    tape.picture([pixels, pixels], patches=(2, 3), special=1)
    assert None not in tape.pictures_of("b.0", batch=1)
    assert tape.pictures_of("b.0", batch=2) == (None, None)


def test_numpy_integers_index_entries_and_get_returns_none_for_missing_ones(tape):
    assert tape[np.int64(2)] is tape[2]
    assert 3 in tape
    assert 4 not in tape
    assert "a" not in tape  # called twice
    assert tape.get(4) is None
    assert tape.get("b.0") is tape["b.0"]


def test_two_batch_rows_are_no_pair_of_queries_and_keys(tape):
    first, second = [f"{n}" for n in range(N)], [f"w{n}" for n in range(N)]
    tape.tokens = (first, second)
    assert tape.tokens_of("b.0", batch=1) == (second, second)
    tape.tokens = {"*": (first, second)}
    assert tape.tokens_of("b.0", batch=1) == (first, second)
    tape.tokens = None
    assert tape.tokens_of("b.0") == (None, None)


def test_a_list_instead_of_groups_raises(tape):
    with pytest.raises(TypeError, match=r"Groups, got list; write tape.group\('words', words\(tokens\)\)"):
        tape.group("words", TEXT)


def test_a_table_has_every_measure_that_any_layer_has():
    A = weights(*torch.randn(2, 1, 2, 6, 4))
    reduced = Reduced(torch.Size(A.shape), {"entropy": TensorInMemory(A.entropy())})
    for entries in ({("x", 0): A, ("y", 0): reduced}, {("y", 0): reduced, ("x", 0): A}):
        found = Tape(entries).table()
        assert {"entropy", "received", "max", "distance"} <= set(found)
        assert sum(math.isnan(x) for x in found["received"]) == 2


def test_groups_that_fit_no_layer_warn(tape):
    few = words(TEXT[:3])
    message = r"groups 'few' cover 3 queries and 3 keys, but 'b.0' has 7 queries and 7 keys; pass groups of all tokens"
    with pytest.warns(UserWarning, match=message):
        tape.group("few", few, layers="b.*")
    with pytest.warns(UserWarning, match=r"groups were given for 'c\*', which matches no layer; there are a, b.0, b.1"):
        tape.group("words", words(TEXT), layers="c*")


def test_another_number_of_pictures_than_batch_rows_warns(tape):
    pixels = torch.zeros(4, 4, 3, dtype=torch.uint8)
    with pytest.warns(UserWarning, match=f"3 pictures were given, but 'a' has {B} batch rows; pass one for all"):
        tape.picture([pixels] * 3, patches=(2, 3), special=1)
    with pytest.warns(UserWarning, match="pictures were given for 'c', which matches no layer; there are a, b.0, b.1"):
        tape.picture(pixels, patches=(2, 3), special=1, layers="c")


def test_messages_show_a_layer_without_a_name_as_model():
    model, x = Attention(D, H), torch.randn(1, N, D)
    with capture(model) as tape:
        model(x)
        model(x)
    with pytest.raises(KeyError, match=r"write tape\['\(model\)', 0\], tape\['\(model\)', 1\]"):
        tape[""]
    with pytest.raises(KeyError, match=r"'\(model\)' has no groups 'words'"):
        tape.groups_of(0, "words")
    with pytest.warns(UserWarning, match="cover 3 queries"):
        tape.group("words", spans(3, {"first": (0, 2)}))
    with pytest.raises(ValueError, match=r"'\(model\)' has 7 queries"):
        tape.groups_of(0, "words")
    for keep, what in ((None, "q"), (["entropy"], "entropy")):
        with pytest.raises(MemoryError, match=rf"^\(model\): {what}"), capture(model, keep=keep, budget="1KB"):
            model(torch.randn(9, 50, D))
    with pytest.raises(IndexError, match=r"from 0 to 3 in '\(model\)'"), capture(model, heads=[4]):
        model(x)
    with (
        pytest.raises(ValueError, match=r"the output of '\(model\)' does not"),
        torch.no_grad(),
        capture(model, gradients=True),
    ):
        model(x)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_copying_a_captured_tape_raises_and_names_save_and_load(copied, tape, tmp_path):
    written = (
        r"a captured tape cannot be copied or pickled; write tape\.save\(path\), and regard\.lens\.Tape\.load\(path\)"
    )
    with pytest.raises(TypeError, match=written):
        copied(tape)
    assert copy.copy(tape)["b.1"] is tape["b.1"]
    tape.save(tmp_path / "tape.safetensors")
    loaded = Tape.load(tmp_path / "tape.safetensors")
    for again in (copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
        assert torch.equal(again["b.1"].dense(), tape["b.1"].dense())
