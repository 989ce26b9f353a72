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
from regard.lens import EdgeWeights, Extras, Groups, SampledWeights, Tape, capture, rollout, spans, words
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


def test_mass_between_groups_is_that_of_the_matrix(tape):
    tape.group("words", words(TEXT))
    tape.group("words", words(TEXT), spans(N, {"start": (0, 2)}), layers="b.1")
    found = tape.mass("b.0", "words")
    one_hot = nn.functional.one_hot(words(TEXT).ids).double()
    truth = (one_hot.T @ tape["b.0"].dense().double() @ one_hot) / one_hot.sum(0)[:, None]
    assert (found - truth).abs().max() < 1e-6
    assert tape.mass("b.1", "words").shape == (B, H, 5, 2)
    assert tape.groups_of("b.1", "words")[1].labels == ("start", "other")


def test_groups_need_queries_and_keys():
    layer = Attention(D, H)
    with torch.no_grad(), capture(layer, keep=["max"]) as tape:
        layer(torch.randn(B, N, D))
    tape.group("words", words(TEXT))
    with pytest.raises(ValueError, match="this capture kept only measures"):
        tape.mass("", "words")


def test_a_table_has_a_row_for_each_head(tape, monkeypatch):
    monkeypatch.setattr("regard.lens.tape.overview._has_pandas", lambda: False)
    table = tape.table()
    assert list(table) == ["layer", "call", "batch", "head", "entropy", "received", "max", "distance", "logit"]
    assert len(table["layer"]) == 4 * B * H
    row = table["head"].index(3)
    A = tape["a", 0].dense().double()[0, 3]
    entropy = -torch.special.xlogy(A, A).sum(-1).mean()
    assert table["entropy"][row] == pytest.approx(entropy.item(), abs=1e-5)
    assert table["received"][row] == pytest.approx((A.sum(0).max() / N).item(), abs=1e-5)
    assert table["max"][row] == pytest.approx(A.amax(-1).mean().item(), abs=1e-5)
    assert (table["layer"][row], table["call"][row], table["batch"][row]) == ("a", 0, 0)


def test_a_table_is_a_data_frame_where_there_is_pandas(tape, monkeypatch):
    monkeypatch.setattr("regard.lens.tape.overview._has_pandas", lambda: True)
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=lambda columns: ("frame", columns)))
    kind, columns = tape.table()
    assert kind == "frame"
    assert len(columns["head"]) == 4 * B * H


def test_queries_that_see_nothing_are_left_out_of_the_means(monkeypatch):
    monkeypatch.setattr("regard.lens.tape.overview._has_pandas", lambda: False)
    q, k = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 4, 8)
    padded = weights(q, k, mask=Causal(), offset=-2)  # the first two queries stand before every key
    alone = weights(q[:, :, 2:], k, mask=Causal(), offset=0)
    numbers = [Tape({("x", 0): A}).table() for A in (padded, alone)]
    assert numbers[0]["entropy"] == pytest.approx(numbers[1]["entropy"], abs=1e-6)


@pytest.mark.parametrize(("i", "j"), [(0, 0), (0, 3), (3, 0)])
def test_a_table_of_no_tokens_holds_zeros(i, j, monkeypatch):
    monkeypatch.setattr("regard.lens.tape.overview._has_pandas", lambda: False)
    table = Tape({("x", 0): weights(torch.randn(1, 2, i, 8), torch.randn(1, 2, j, 8))}).table()
    assert [table[name] for name in ("entropy", "received", "max", "distance")] == [[0.0, 0.0]] * 4


def test_tables_of_reduced_tapes_have_the_kept_measures(monkeypatch):
    monkeypatch.setattr("regard.lens.tape.overview._has_pandas", lambda: False)
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


def test_numpy_integers_index_entries_and_get_returns_none_for_missing_ones(tape):
    assert tape[np.int64(2)] is tape[2]
    assert 3 in tape
    assert 4 not in tape
    assert "a" not in tape  # called twice
    assert tape.get(4) is None
    assert tape.get("b.0") is tape["b.0"]


def test_a_table_has_every_measure_that_any_layer_has():
    A = weights(*torch.randn(2, 1, 2, 6, 4))
    reduced = Reduced(torch.Size(A.shape), {"entropy": TensorInMemory(A.entropy())})
    for entries in ({("x", 0): A, ("y", 0): reduced}, {("y", 0): reduced, ("x", 0): A}):
        found = Tape(entries).table()
        assert {"entropy", "received", "max", "distance"} <= set(found)
        assert sum(math.isnan(x) for x in found["received"]) == 2


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


def test_real_tokens_follow_a_tape_that_grows():
    layer = nn.MultiheadAttention(D, H, batch_first=True)
    padding = torch.arange(N) >= torch.tensor([[N], [3]])
    with torch.no_grad(), capture(nn.ModuleDict({"a": layer})) as tape:
        x = torch.randn(B, N, D)
        layer(x, x, x, key_padding_mask=padding)
        assert torch.equal(tape.real_queries("a"), ~padding)
        layer(x[:, :5], x, x, key_padding_mask=padding)
        assert torch.equal(tape.real_keys(("a", 1)), ~padding)
        assert tape.real_queries(("a", 1)).all()
    assert torch.equal(tape.select("a").real_queries(("a", 0)), ~padding)


def graph_tape():
    """A tape of one layer over a graph: two targets, four sources, two heads."""
    weights = torch.tensor([[0.5, 1.0], [0.5, 0.0], [1.0, 1.0]])
    return Tape({("gat", 0): EdgeWeights(torch.tensor([[3, 0, 1], [1, 1, 0]]), weights, (2, 4))})


def test_a_table_has_the_measures_of_edges():
    columns = {name: list(column) for name, column in graph_tape().table().items()}
    assert columns["head"] == [0, 1]
    assert columns["entropy"] == pytest.approx([math.log(2) / 2, 0.0])
    assert columns["received"] == pytest.approx([0.5, 0.5])
    assert columns["max"] == pytest.approx([0.75, 1.0])


def test_all_nodes_of_a_graph_are_real():
    tape = graph_tape()
    assert (tape.real_queries(0).tolist(), tape.real_keys(0).tolist()) == ([[True] * 2], [[True] * 4])
    assert tape.overview(0).peak_key.tolist() == [[1, 1]]


def points_tape():
    """A tape of one layer over sampled points: two queries, a map of four cells, two heads."""
    return Tape({("detr", 0): SampledWeights(torch.rand(1, 2, 2, 3, 2), torch.rand(1, 2, 2, 3), [0] * 3, [(1, 4)])})


@pytest.mark.parametrize("build", [graph_tape, points_tape])
def test_measures_of_queries_and_keys_refuse_edges_and_points(build):
    tape = build()
    tape.group("halves", Groups(torch.tensor([0, 1]), ("x", "y")), Groups(torch.tensor([0, 0, 1, 1]), ("a", "b")))
    for call in (lambda: tape.mass(0, "halves"), lambda: tape.summary(0)):
        with pytest.raises(ValueError, match=r"keeps weights of edges or points alone: \w+\(1 x 2"):
            call()
    tape.summarize()
    with pytest.raises(TypeError, match="pass its other layers"):
        rollout(tape)


def test_layers_are_selected_by_number_and_heads_with_what_is_known_of_them():
    torch.manual_seed(0)
    A, B = (weights(*torch.randn(2, 1, heads, 7, 8)) for heads in (4, 2))
    tape = Tape({("a", 0): A, ("b", 0): B, ("c", 0): A})
    assert tape.select([-1, 0]).layers == ["a", "c"]
    tape.summary("a")
    part = tape.select("*", heads=[1, 3])
    assert part.layers == ["a", "b", "c"]
    assert (part["a"][0, 1] - A[0, 3]).abs().max() < 1e-6
    assert (part["b"][0, 0] - B[0, 1]).abs().max() < 1e-6
    assert (part.summarized("a"), part.summarized("c")) == (True, False)
    assert torch.equal(part.summary("a").entropy, tape.summary("a").entropy[:, [1, 3]])
    assert tape.select("*", heads=[2]).layers == ["a", "c"]
    for heads in ([], [4], [-1]):
        with pytest.raises(ValueError, match="heads must be numbers from 0 to 3, got"):
            tape.select("*", heads=heads)
    with pytest.raises(IndexError, match="the tape has 3 entries, got index 9"):
        tape.select([9])
