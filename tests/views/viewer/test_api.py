"""Answers: every question, equal to what the tape says; and for every wrong question what to ask instead."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from regard import Causal, weights
from regard.lens import Extras, Tape, rollout, sinks, word_weights, words
from regard.lens.recording.reduced import Reduced
from regard.lens.recording.store import TensorInMemory
from regard.views.viewer import api as module
from regard.views.viewer import captures as library
from regard.views.viewer.api import ViewerApi
from regard.views.viewer.captures import ApiError, MatrixId, Pending, PlaceId
from regard.views.viewer.describe import Capture
from regard.views.viewer.routes import RESOURCES, parse_query
from regard.views.viewer.wire_format import parse_frame
from regard.views.viewer.worker import Worker


@pytest.fixture
def worker():
    worker = Worker()
    yield worker
    worker.close()


class OnWorker:
    """An API whose methods run in the thread of the worker, as the server calls them."""

    def __init__(self, api, worker):
        self._api, self._worker = api, worker

    def __getattr__(self, name):
        found = getattr(self._api, name)
        return (lambda *given: self._worker.do(lambda: found(*given)).result()) if callable(found) else found


@pytest.fixture
def asked(tape, worker):
    return OnWorker(ViewerApi([Capture(tape, "first"), Capture(tape, "second")], worker), worker)


def close(x, truth, tolerance=1e-5):
    return bool(np.abs(x - np.asarray(truth)).max() <= tolerance)


def settled(ask):
    """The answer once it is there and exact."""
    for _ in range(500):
        try:
            header, arrays = parse_frame(ask())
        except Pending:
            header = None
        if header is not None and header["state"] == "exact":
            return header, arrays
        torch.randn(200, 200).sum()
    raise AssertionError("never exact")


def test_the_session_says_what_there_is(asked):
    session = json.loads(asked.session())
    assert [capture["name"] for capture in session["captures"]] == ["first", "second"]
    layers = {layer["name"]: layer for layer in session["captures"][0]["layers"]}
    own, cross, encoder, measured = (
        layers[name] for name in ("decoder.0.own", "decoder.0.cross", "encoder.0", "measured")
    )
    assert (own["causal"], own["self"], own["mask"], own["normalize"]) == (True, True, "Causal()", "SinkSoftmax(0.5)")
    assert (cross["causal"], cross["self"], cross["n_i"], cross["n_j"], cross["offset"]) == (False, False, 5, 9, 4)
    assert encoder["texts"] == [[0, 0], [1, 1]]
    assert cross["texts"][0] == [own["texts"][0][0], encoder["texts"][0][1]]
    assert encoder["picture"][0] == [0, 0]
    assert cross["picture"][0] == [None, None]
    assert encoder["groups"].keys() == {"words", "sentences"}
    assert (measured["kind"], measured["finest"], measured["levels"], measured["texts"][0]) == (
        "measures",
        0,
        1,
        [None, None],
    )
    assert session["captures"][0]["pictures"] == [{"width": 8, "height": 8, "rows": 2, "cols": 4, "special": 1}]


def test_texts_come_as_they_are_hostile_or_not(asked, tape):
    own = tape.tokens_of("decoder.0.own")[0]
    expected = [*(tape.tokens_of("encoder.0", batch=row)[0] for row in range(2)), own]
    assert [json.loads(asked.text(0, number))["tokens"] for number in range(3)] == expected


def test_groups_are_those_given_or_found(worker):
    q, k = torch.randn(2, 1, 2, 4, 8)
    tape = Tape({("a", 0): weights(q, k), ("b", 0): weights(q[:, :, :3], k[:, :, :3])})
    tape.tokens = ["na", "##ive", "one", "."]
    given = words(["x", "y", "##z", "w"])
    tape.group("words", given)
    capture = Capture(tape, "x")
    found = json.loads(ViewerApi([capture], worker).group(0, capture.layers[0]["groups"]["words"][0][0]))
    assert found == {"ids": given.ids.tolist(), "labels": list(given.labels)}
    sentences = json.loads(ViewerApi([capture], worker).group(0, capture.layers[0]["groups"]["sentences"][0][1]))
    assert sentences["ids"] == [0, 0, 0, 0]
    assert "words" in capture.layers[1]["groups"]  # those given are of four tokens: found anew for three


def test_pictures_are_png(asked):
    assert asked.picture(0, 0).startswith(b"\x89PNG")


def test_overviews_are_means_and_peaks(asked, tape):
    header, arrays = parse_frame(asked.overview(0, 1, 1))
    A = tape["encoder.1"]
    assert header["state"] == "exact"
    assert close(arrays["entropy"], A.entropy()[1].mean(-1))
    assert close(arrays["distance"], A.distance()[1].mean(-1))
    assert close(arrays["max"], A.max()[1].mean(-1))
    assert close(arrays["sink"], sinks(A).share[1])
    share = A.received()[1] / 9
    assert close(arrays["peak"], share.amax(-1))
    assert arrays["peak_key"].tolist() == share.argmax(-1).tolist()
    assert arrays["thumbs"].shape == (4, 9, 9)
    assert np.allclose(arrays["thumbs"], A.dense()[1], rtol=0.03, atol=5e-7)


def test_overviews_of_measures_say_what_was_kept(asked, tape):
    _, arrays = parse_frame(asked.overview(0, 4, 0))
    assert close(arrays["entropy"], tape["measured"]["entropy"][0].mean(-1))
    assert np.isnan(arrays["distance"]).all()
    assert arrays["thumbs"].shape == (4, 8, 8)


def test_measures_are_means_over_cells(asked, tape):
    A = tape["decoder.0.cross"]
    _, arrays = parse_frame(asked.measures(0, 3, 1, 2, 0))
    assert close(arrays["entropy"], A.entropy()[1, 2])
    assert close(arrays["received"], A.received()[1, 2])
    _, arrays = parse_frame(asked.measures(0, 3, 1, "mean", 2))
    received = A.received()[1].mean(0)
    assert close(arrays["received"], [received[:4].mean(), received[4:8].mean(), received[8]])
    assert arrays["max"].shape == (2,)
    _, arrays = parse_frame(asked.measures(0, 4, 0, 0, 0))
    assert arrays.keys() == {"entropy"}


def test_padding_counts_in_no_number(asked, tape, long, monkeypatch):
    A = tape["encoder.0"]  # the second text has two tokens of padding
    dense, entropy = A.dense()[1, :, :7], A.entropy()[1, :, :7]
    _, arrays = parse_frame(asked.overview(0, 0, 1))
    assert close(arrays["entropy"], entropy.mean(-1))
    assert close(arrays["max"], dense.amax(-1).mean(-1))
    assert close(arrays["peak"], dense.mean(1).amax(-1))
    _, arrays = parse_frame(asked.measures(0, 0, 1, 2, 2))
    assert close(arrays["entropy"], [entropy[2, :4].mean(), entropy[2, 4:].mean(), 0])
    assert close(arrays["received"], [dense[2].sum(0)[:4].mean(), dense[2].sum(0)[4:7].mean(), 0])
    monkeypatch.setattr(library, "MAX_IMMEDIATE_WEIGHTS", 1)
    monkeypatch.setattr(library, "SAMPLED_QUERIES", 9)
    fresh = Tape({("x", 0): type(A)(A.call)})
    header, arrays = parse_frame(ViewerApi([Capture(fresh, "x")], long[1]._worker).overview(0, 0, 1))
    assert (header["state"], header["of"]) == ("sampled", [9, 9])
    assert close(arrays["entropy"], entropy.mean(-1))
    assert close(arrays["peak"], dense.mean(1).amax(-1))


def test_groups_are_those_of_each_batch_row(worker):
    q = torch.randn(2, 1, 3, 4)
    tape = Tape({("x", 0): weights(q, q)})
    texts = [["a", "##b", "c"], ["d", "e", "##f"]]
    tape.tokens = texts
    tape.group("words", [words(text) for text in texts])
    asked = ViewerApi([Capture(tape, "x")], worker)
    numbers = json.loads(asked.session())["captures"][0]["layers"][0]["groups"]["words"]
    labels = [json.loads(asked.group(0, row[0]))["labels"] for row in numbers]
    assert labels == [["ab", "c"], ["d", "ef"]]


@pytest.mark.parametrize("head", [2, "mean", "max"])
def test_tiles_at_the_bottom_are_the_weights(asked, tape, head):
    A = tape["encoder.0"].dense()[1] * tape.real_queries("encoder.0")[1, :, None]  # padding asks nothing
    truth = A[2] if head == 2 else getattr(A, "a" + head if head == "max" else head)(0)
    header, arrays = parse_frame(asked.tile(0, 0, 1, head, None, 0, 0, 0))
    assert header["state"] == "exact"
    assert close(arrays["weight"], truth, 1e-6)


def test_differences_of_heads_and_captures(asked, tape):
    A, B = tape["encoder.0"].dense(), tape["encoder.1"].dense()
    _, arrays = parse_frame(asked.tile(0, 0, 0, 1, MatrixId(1, 1, 1, "mean"), 0, 0, 0))
    assert close(arrays["weight"], A[0, 1] - B[1].mean(0), 1e-6)
    _, arrays = parse_frame(asked.tile(0, 0, 0, 1, MatrixId(1, 0, 0, 1), 0, 0, 0))
    assert not arrays["weight"].any()


@pytest.mark.parametrize("n", [60, 700])
def test_thumbnails_of_a_difference_are_subtracted_before_they_are_coded(worker, n):
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 3, n, 8)
    A, B = weights(q, k, mask=Causal()), weights(q + 1e-3 * torch.randn_like(q), k, mask=Causal())
    asked = ViewerApi([Capture(Tape({("x", 0): one}), "x") for one in (A, B)], worker)
    header, arrays = settled(lambda: asked.difference(0, 0, 0, PlaceId(1, 0, 0)))
    size = 1 if n == 60 else 2
    less = (A.dense() - B.dense())[0].unflatten(1, (-1, size)).unflatten(3, (-1, size)).mean((2, 4))
    assert (header["state"], header["cell"]) == ("exact", [size, size])
    assert close(arrays["difference"], less.abs().mean((1, 2)), 1e-4)
    assert np.allclose(arrays["thumbs"].sum((1, 2)), less.mean((1, 2)) * arrays["thumbs"][0].size, atol=1e-5)
    _, other = settled(lambda: asked.difference(1, 0, 0, PlaceId(0, 0, 0)))
    assert np.allclose(other["thumbs"], -arrays["thumbs"], rtol=1e-3)
    told = json.loads(asked.session())["captures"]
    assert [capture["layers"][0]["counterpart"] for capture in told] == [0, 0]


def test_tiles_of_stored_maps(asked, tape):
    header, arrays = parse_frame(asked.tile(0, 4, 1, 3, None, 0, 0, 0))
    assert header["state"] == "pooled"
    assert header["retry"] is None
    assert arrays["mean"].shape == (60, 40)
    total = tape["measured"]["pool:8"][1, 3].mean()
    assert abs(arrays["mean"].mean() - total) < 0.05 * total
    maps = tape["measured"]["pool:8"][1]
    for head, truth in (("mean", maps.mean(0)), ("max", maps.amax(0))):
        _, arrays = parse_frame(asked.tile(0, 4, 1, head, None, 0, 0, 0))
        assert np.allclose(arrays["mean"][::10, ::5][0, :4], truth[0, :4], rtol=0.001)


def test_tiles_finer_than_what_was_kept_are_refused(worker):
    measures = {"pool:64": TensorInMemory(torch.rand(1, 1, 64, 64))}
    asked = ViewerApi([Capture(Tape({("x", 0): Reduced(torch.Size((1, 1, 1024, 1024)), measures)}), "x")], worker)
    told = json.loads(asked.session())["captures"][0]["layers"][0]
    assert (told["levels"], told["finest"]) == (3, 2)
    assert parse_frame(asked.tile(0, 0, 0, 0, None, 2, 0, 0))[1]["mean"].shape == (256, 256)
    with pytest.raises(ApiError, match="kept only a coarser map"):
        asked.tile(0, 0, 0, 0, None, 1, 0, 0)
    bare = {"entropy": TensorInMemory(torch.rand(1, 1, 9))}
    asked = ViewerApi([Capture(Tape({("x", 0): Reduced(torch.Size((1, 1, 9, 9)), bare)}), "x")], worker)
    with pytest.raises(ApiError, match="kept only a coarser map"):
        asked.tile(0, 0, 0, 0, None, 0, 0, 0)


@pytest.fixture
def long(worker):
    """A capture long enough that coarse tiles take a while, at the limits it is given here."""
    torch.manual_seed(1)
    q, k = torch.randn(2, 1, 2, 1100, 8)
    tape = Tape({("a", 0): weights(q, k, mask=Causal()), ("b", 0): weights(k, q)})
    return tape, OnWorker(ViewerApi([Capture(tape, "long")], worker), worker)


def test_a_coarse_tile_is_a_preview_first_and_exact_soon(long, monkeypatch):
    tape, asked = long
    monkeypatch.setattr(library, "MAX_IMMEDIATE_WEIGHTS", 1000)
    header, arrays = parse_frame(asked.tile(0, 0, 0, 1, None, 2, 0, 0))
    assert (header["state"], header["retry"], header["of"]) == ("sampled", 0.4, [256, 1024])
    header, exact = settled(lambda: asked.tile(0, 0, 0, 1, None, 2, 0, 0))
    dense = tape["a"].dense()[0, 1, :1024, :1024].unflatten(0, (-1, 4)).unflatten(2, (-1, 4))
    assert np.allclose(exact["mean"], dense.mean((1, 3)), rtol=1e-3, atol=1e-9)
    assert np.allclose(exact["max"], dense.amax((1, 3)), rtol=1e-3, atol=1e-9)
    assert arrays["mean"].shape == exact["mean"].shape == (256, 256)
    assert np.corrcoef(arrays["mean"].ravel(), exact["mean"].ravel())[0, 1] > 0.5


def test_a_map_that_fits_is_exact_at_once(long, monkeypatch):
    _, asked = long
    q, k = torch.randn(2, 1, 1, 1024, 8)
    tape = Tape({("a", 0): weights(q, k)})
    tape.summarize()
    asked.library.captures.append(Capture(tape, "fits"))
    monkeypatch.setattr(library, "MAX_IMMEDIATE_WEIGHTS", 1000)
    header, arrays = parse_frame(asked.tile(1, 0, 0, 0, None, 2, 0, 0))
    assert header["state"] == "exact"
    assert np.allclose(arrays["mean"], tape["a"].pool(256, 256)[0, 0], rtol=1e-3)
    assert np.allclose(arrays["max"], tape["a"].pool(256, 256, "max")[0, 0], rtol=1e-3)


@pytest.mark.parametrize("head", ["mean", 0])
def test_largest_weights_that_no_summary_holds_are_computed_and_never_the_means(long, monkeypatch, head):
    _, asked = long
    q, k = torch.randn(2, 1, 2, 1024, 8)
    tape = Tape({("a", 0): weights(q, k)})
    tape.summarize()
    if head == 0:  # as from a file of an earlier version
        key = ("a", 0)
        tape._summaries[key] = replace(tape._summaries[key], peaks=None)
    asked.library.captures.append(Capture(tape, "fits"))
    monkeypatch.setattr(library, "MAX_IMMEDIATE_WEIGHTS", 1000)
    header, arrays = parse_frame(asked.tile(1, 0, 0, head, None, 2, 0, 0))
    assert (header["state"], arrays.keys()) == ("exact", {"mean"})
    header, arrays = parse_frame(asked.largest(1, 0, 0, head, None, 2, 0, 0))
    assert (header["state"], arrays.keys()) == ("pooled", {"mean"})
    _, arrays = settled(lambda: asked.largest(1, 0, 0, head, None, 2, 0, 0))
    A = tape["a"].dense()[0]
    A = A.mean(0) if head == "mean" else A[0]
    assert np.allclose(arrays["max"], A.unflatten(0, (-1, 4)).unflatten(2, (-1, 4)).amax((1, 3)), rtol=1e-3)


def test_kept_maps_come_with_their_largest_weights_or_without_any(asked, worker):
    q, k = torch.randn(2, 1, 2, 1024, 8)
    whole = weights(q, k)
    with_peaks = {"pool:256": whole.pool(256, 256), "peaks:256": whole.pool(256, 256, "max")}
    for kept in (with_peaks, {"pool:256": with_peaks["pool:256"]}):
        measures = {name: TensorInMemory(x) for name, x in kept.items()}
        tape = Tape({("x", 0): Reduced(torch.Size((1, 2, 1024, 1024)), measures)})
        api = ViewerApi([Capture(tape, "x")], worker)
        header, arrays = parse_frame(api.largest(0, 0, 0, 1, None, 2, 0, 0))
        assert header["state"] == "exact"
        assert ("max" in arrays) == ("peaks:256" in kept)
        if "max" in arrays:
            assert np.allclose(arrays["max"], whole.pool(256, 256, "max")[0, 1], rtol=1e-3)


def test_summaries_that_take_a_while_are_pending(long, monkeypatch):
    tape, asked = long
    monkeypatch.setattr(library, "MAX_IMMEDIATE_WEIGHTS", 200_000)
    with pytest.raises(Pending):
        asked.overview(0, 0, 0)
    header, arrays = settled(lambda: asked.overview(0, 0, 0))
    assert close(arrays["entropy"], tape["a"].entropy()[0].mean(-1))
    assert header["retry"] is None


def test_captures_too_long_to_measure_are_sampled_and_say_so(long, monkeypatch):
    tape, asked = long
    monkeypatch.setattr(library, "MAX_IMMEDIATE_WEIGHTS", 1000)
    with pytest.raises(ApiError, match="has no summary, and without one this takes too long") as caught:
        asked.measures(0, 1, 0, 0, 0)
    assert caught.value.status == 409
    assert "tape.summarize()" in caught.value.hint
    assert "regard look --summarize" in caught.value.hint
    header, arrays = parse_frame(asked.overview(0, 1, 0))
    assert (header["state"], header["of"], header["retry"]) == ("sampled", [16, 1100], 1.0)
    assert close(arrays["entropy"], tape["b"].entropy()[0].mean(-1), 0.5)


@pytest.mark.parametrize("head", [1, "mean"])
def test_a_token_gives_and_receives(asked, tape, head):
    A = tape["encoder.0"].dense()[1] * tape.real_queries("encoder.0")[1, :, None]  # padding asks nothing
    A = A[1] if head == 1 else A.mean(0)
    _, arrays = parse_frame(asked.token(0, 0, 1, head, "query", 3, 3, 4))
    assert close(arrays["weight"], A[3], 1e-6)
    best = A[3].topk(4)
    assert arrays["top"].tolist() == best.indices.tolist()
    assert close(arrays["top_weight"], best.values, 1e-6)
    _, arrays = parse_frame(asked.token(0, 0, 1, head, "key", 2, 4, 99))
    assert close(arrays["weight"], A[:, 2:5].sum(1), 1e-6)
    assert len(arrays["top"]) == 7  # two queries are padding
    _, arrays = parse_frame(asked.token(0, 0, 1, head, "query", 2, 4, 99))
    assert close(arrays["weight"], A[2:5].mean(0), 1e-6)
    assert len(arrays["top"]) == 7  # two keys are padding and have no weight


@pytest.mark.parametrize("head", [1, "mean"])
def test_a_span_of_queries_is_averaged_without_its_padding(asked, tape, head):
    A, real = tape["encoder.0"].dense()[1], tape.real_queries("encoder.0")[1]
    A = A[1] if head == 1 else A.mean(0)
    assert real.tolist()[-3:] == [True, False, False]
    n = len(real)
    _, arrays = parse_frame(asked.token(0, 0, 1, head, "query", 2, n - 1, 4))
    assert close(arrays["weight"], A[2 : n - 2].mean(0), 1e-6)
    _, arrays = parse_frame(asked.token(0, 0, 1, head, "query", n - 2, n - 1, 4))
    assert close(arrays["weight"], np.zeros(n))


def test_what_a_token_receives_is_computed_in_parts_between_which_a_row_is_answered(long, monkeypatch):
    tape, asked = long
    monkeypatch.setattr(module, "MAX_IMMEDIATE_WEIGHTS", 1000)
    monkeypatch.setattr(module, "MAX_PART_WEIGHTS", 300_000)
    view = asked.library.matrix_view(MatrixId(0, 0, 0, 1))
    parts = list(module.received_in_parts(view, slice(5, 6)))
    assert len(parts) >= 4
    truth = tape["a"].dense()[0, 1]
    assert close(torch.cat(parts).numpy(), truth[:, 5])
    monkeypatch.setattr(module, "MAX_BACKGROUND_WEIGHTS", 0)
    with pytest.raises(ApiError, match="has no summary"):
        asked.token(0, 0, 0, 0, "key", 7, 7, 4)
    _, arrays = parse_frame(asked.token(0, 0, 0, 0, "query", 7, 7, 4))
    assert close(arrays["weight"], tape["a"].dense()[0, 0, 7])
    monkeypatch.setattr(module, "MAX_BACKGROUND_WEIGHTS", 2**31)
    with pytest.raises(Pending):
        asked.token(0, 0, 0, 0, "key", 7, 7, 4)
    _, arrays = settled(lambda: asked.token(0, 0, 0, 0, "key", 7, 7, 4))
    assert close(arrays["weight"], tape["a"].dense()[0, 0, :, 7])


def test_links_are_ranked_among_numbers(worker):
    q, k = torch.randn(2, 1, 1, 6, 4)
    q[..., 2, :] = torch.nan
    A = weights(q, k)
    asked = ViewerApi([Capture(Tape({("a", 0): A}), "x")], worker)
    _, arrays = parse_frame(asked.token(0, 0, 0, 0, "key", 1, 1, 6))
    assert np.isnan(arrays["weight"][2])
    assert arrays["top"].tolist() == A.dense()[0, 0, :, 1].nan_to_num(-1).argsort(descending=True)[:5].tolist()


def test_long_strips_come_in_parts(long, monkeypatch):
    tape, asked = long
    monkeypatch.setattr(module, "CHUNK", 100)
    A = tape["a"].dense()[0, 1]
    assert close(parse_frame(asked.token(0, 0, 0, 1, "query", 5, 8, 3))[1]["weight"], A[5:9].mean(0), 1e-6)
    assert close(parse_frame(asked.token(0, 0, 0, 1, "key", 5, 8, 3))[1]["weight"], A[:, 5:9].sum(1), 1e-6)


def test_strips_that_take_a_while_are_pending(long, monkeypatch):
    tape, asked = long
    monkeypatch.setattr(module, "MAX_IMMEDIATE_WEIGHTS", 100)
    with pytest.raises(Pending):
        asked.token(0, 0, 0, 0, "key", 7, 7, 3)
    _, arrays = settled(lambda: asked.token(0, 0, 0, 0, "key", 7, 7, 3))
    assert close(arrays["weight"], tape["a"].dense()[0, 0, :, 7], 1e-6)


def test_blocks_are_of_all_heads(asked, tape):
    _, arrays = parse_frame(asked.block(0, 3, 1, 1, 4, 2, 7))
    A = tape["decoder.0.cross"].dense()[1]
    assert close(arrays["weight"], A[:, 1:5, 2:9], 1e-6)
    assert close(arrays["total"], A[:, 1:5].sum(-1), 1e-6)


def test_flow_is_rollout_layer_by_layer(asked, tape):
    header, arrays = parse_frame(asked.flow(0, 1, 1, 4))
    stack = [tape["encoder.0"], tape["encoder.1"]]
    assert header["layers"] == [0, 1]
    assert close(arrays["rollout"][0], rollout(stack, token=4)[1])
    assert close(arrays["rollout"][1], rollout(stack[1:], token=4)[1])
    assert arrays["rollout"][2].tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0]
    header, arrays = parse_frame(asked.flow(0, 0, 0, 4))
    assert header["layers"] == [0]


def test_flow_of_long_captures_is_a_preview_of_pooled_maps(long, monkeypatch):
    tape, asked = long
    tape.summarize()
    monkeypatch.setattr(module, "MAX_IMMEDIATE_WEIGHTS", 1000)
    header, arrays = parse_frame(asked.flow(0, 1, 0, 700))
    assert (header["state"], header["level"]) == ("pooled", 3)
    assert np.allclose(arrays["rollout"].sum(1), 1, atol=1e-4)
    exact_header, exact = settled(lambda: asked.flow(0, 1, 0, 700))
    assert exact_header["level"] == 0
    cells = np.add.reduceat(exact["rollout"], np.arange(0, 1100, 8), axis=1)
    assert np.abs(arrays["rollout"][0] - cells[0]).sum() < 0.5
    assert close(exact["rollout"][0], rollout(list(tape.values()), token=700)[0])


def test_the_preview_of_a_flow_leaves_out_what_nobody_reaches():
    maps = [torch.tensor([[0.5, 0.0], [0.25, 0.25]]) for _ in range(2)]
    spoilt = [maps[0], torch.tensor([[0.5, 0.0], [torch.nan, torch.nan]])]
    assert torch.equal(module.rollout_of_maps(spoilt, 0, 1, 4), module.rollout_of_maps(maps, 0, 1, 4))
    assert module.rollout_of_maps(spoilt, 1, 1, 4)[0].isnan().any()


def test_alignments_are_between_words(asked, tape):
    header, arrays = parse_frame(asked.alignment(0, 3, 0, "mean"))
    source, target = (words(tokens) for tokens in reversed(tape.tokens_of("decoder.0.cross")))
    A = tape["decoder.0.cross"].select(batch=0)
    truth = word_weights(A, target.ids.tolist(), source.ids.tolist()).mean(0)
    assert close(arrays["weight"], truth)
    assert header["source"] == list(source.labels)
    assert sorted(header["links"], key=lambda link: link[1]) == [[s, t] for t, s in enumerate(truth.argmax(1).tolist())]
    assert {tuple(link) for link in header["mutual"]} <= {tuple(link) for link in header["links"]}


WRONG = [
    ("text", "capture=2&text=0", "capture must be from 0 to 1, got 2"),
    ("text", "capture=0&text=9", "text must be from 0 to 2, got 9"),
    ("group", "capture=0&group=99", "group must be from 0 to"),
    ("picture", "capture=0&picture=1", "picture must be from 0 to 0, got 1"),
    ("overview", "capture=0&layer=9&batch=0", "layer must be from 0 to 4, got 9"),
    ("overview", "capture=0&layer=0&batch=2", "batch must be from 0 to 1, got 2"),
    ("measures", "capture=0&layer=0&batch=0&head=4&level=0", "head must be from 0 to 3, got 4"),
    ("measures", "capture=0&layer=0&batch=0&head=0&level=40", "level must be from 0 to"),
    ("tile", "capture=0&layer=0&batch=0&head=0&minus=none&level=1&row=0&col=0", "level must be from 0 to 0, got 1"),
    (
        "tile",
        "capture=0&layer=0&batch=0&head=0&minus=none&level=0&row=1&col=0",
        "row and col must be within 1 by 1 tiles",
    ),
    ("tile", "capture=0&layer=0&batch=0&head=0&minus=0.3.0.0&level=0&row=0&col=0", "matrices of one shape"),
    ("tile", "capture=0&layer=0&batch=0&head=0&minus=0.4.0.0&level=0&row=0&col=0", "matrices of one shape"),
    ("tile", "capture=0&layer=0&batch=0&head=9&minus=none&level=0&row=0&col=0", "head must be from 0 to 3, got 9"),
    ("token", "capture=0&layer=0&batch=0&head=0&axis=query&first=9&last=9&top=1", "last must be from 0 to 8"),
    (
        "token",
        "capture=0&layer=0&batch=0&head=0&axis=query&first=5&last=4&top=1",
        "first to last must span 1 to 512 tokens",
    ),
    ("token", "capture=0&layer=0&batch=0&head=0&axis=query&first=1&last=4&top=257", "top must be from 0 to 256"),
    ("token", "capture=0&layer=4&batch=0&head=0&axis=query&first=1&last=4&top=2", "kept only measures"),
    ("block", "capture=0&layer=0&batch=0&row=0&rows=0&col=0&cols=1", "rows must be 1 to 128 within 9, got 0 from 0"),
    ("block", "capture=0&layer=0&batch=0&row=0&rows=1&col=5&cols=5", "cols must be 1 to 128 within 9, got 5 from 5"),
    ("flow", "capture=0&layer=3&batch=0&token=1", "layer 3 is not self-attention"),
    ("flow", "capture=0&layer=0&batch=0&token=9", "token must be from 0 to 8"),
    ("alignment", "capture=0&layer=0&batch=0&head=0", "an alignment needs two texts"),
]


@pytest.mark.parametrize(("name", "query", "message"), WRONG)
def test_wrong_questions_are_answered_with_what_to_ask(asked, name, query, message):
    with pytest.raises(ApiError) as caught:
        RESOURCES[name].answer(asked, **parse_query(name, query))
    assert message in caught.value.error
    assert caught.value.status == 400
    assert caught.value.hint


def test_layers_of_other_dims_are_refused():
    q, k = torch.randn(2, 1, 2, 3, 4, 8)
    with pytest.raises(ValueError, match="'a' must have dims b h i j to be shown"):
        Capture(Tape({("a", 0): weights(q, k)}), "x")


def test_empty_layers_do_not_stop_the_others(worker):
    q, k = torch.randn(2, 1, 2, 4, 8)
    tape = Tape({("none", 0): weights(q[:, :, :0], k), ("some", 0): weights(q, k)})
    asked = ViewerApi([Capture(tape, "x")], worker)
    assert json.loads(asked.session())["captures"][0]["layers"][0]["n_i"] == 0
    assert parse_frame(asked.overview(0, 0, 0))[1]["entropy"].shape == (2,)
    with pytest.raises(ApiError, match="row and col must be within 0 by 1 tiles"):
        asked.tile(0, 0, 0, 0, None, 0, 0, 0)
    assert parse_frame(asked.tile(0, 1, 0, 0, None, 0, 0, 0))[1]["weight"].shape == (4, 4)


def sunk():
    """Two layers in whose heads the first token draws most of the attention, and a text with punctuation."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 3, 40, 8)
    q[..., 0], k[..., 0] = 3.0, 0.0
    k[:, :, 0, 0] = 6.0
    tape = Tape({("a", 0): weights(q, k, mask=Causal()), ("b", 0): weights(q, k, mask=Causal())})
    tape.tokens = ["<s>", *(["the", "cat", ",", "."] * 10)[:39]]
    return tape


def rest_of(A, hidden):
    """A_ij / (1 - hidden mass) in float64, NaN where nothing is left: `h i j`."""
    call = A.call
    dense = weights(call.q.double(), call.k.double(), mask=call.mask).dense()[0]
    mass = dense[..., hidden].sum(-1, keepdim=True)
    rest = dense.masked_fill(hidden, 0.0) / (1 - mass)
    return torch.where(dense[..., ~hidden].sum(-1, keepdim=True) > 0, rest, torch.nan)


def test_hidden_keys_are_left_out_and_the_rest_is_renormalized(worker):
    tape = sunk()
    asked = ViewerApi([Capture(tape, "one"), Capture(tape, "other")], worker)
    found = json.loads(asked.hidden(0, 0, 0))
    assert found["sinks"] == [[0, 0]]
    assert found["padding"] == []
    assert found["punctuation"][:2] == [[3, 4], [7, 8]]
    capture = parse_query("hidden", "capture=0~sinks~20-22&layer=0&batch=0")["capture"]
    hidden = torch.zeros(40, dtype=torch.bool)
    hidden[[0, 20, 21, 22]] = True
    truth = rest_of(tape["a"], hidden)
    for head, expected in ((1, truth[1]), ("mean", truth.mean(0))):
        _, arrays = settled(lambda head=head: asked.tile(capture, 0, 0, head, None, 0, 0, 0))
        assert np.isnan(arrays["weight"][0]).all()  # the first query sees the first key alone
        assert close(arrays["weight"][1:], expected[1:], 2e-6)
    header, arrays = parse_frame(asked.token(capture, 0, 0, 1, "query", 0, 3, 5))
    assert header["left"] == 3
    assert close(arrays["weight"], truth[1, 1:4].mean(0), 2e-6)
    header, arrays = parse_frame(asked.token(capture, 0, 0, 1, "query", 0, 0, 5))
    assert header["left"] == 0
    assert len(arrays["top"]) == 0
    _, arrays = parse_frame(asked.token(capture, 0, 0, 1, "key", 2, 2, 5))
    assert close(arrays["weight"][1:], truth[1, 1:, 2], 2e-6)
    _, arrays = parse_frame(asked.block(capture, 0, 0, 0, 8, 0, 8))
    assert np.isnan(arrays["weight"][:, 0]).all()
    assert close(arrays["weight"][:, 1:], truth[:, 1:8, :8], 2e-6)
    _, arrays = parse_frame(asked.overview(capture, 0, 0))
    assert close(arrays["max"], truth[:, 1:].amax(-1).mean(-1), 2e-5)
    minus = MatrixId(1, 0, 0, 1)
    _, arrays = settled(lambda: asked.tile(capture, 0, 0, 1, minus, 0, 0, 0))
    assert close(arrays["weight"][1:], truth[1, 1:] - tape["a"].dense()[0, 1, 1:].double(), 2e-6)


def test_cells_are_marked_where_nothing_is_left(worker):
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 600, 8)
    tape = Tape({("a", 0): weights(q, k, mask=Causal())})
    asked = ViewerApi([Capture(tape, "one")], worker)
    capture = parse_query("hidden", "capture=0~0-4&layer=0&batch=0")["capture"]
    hidden = torch.arange(600) < 5
    truth = rest_of(tape["a"], hidden)[0]
    _, arrays = settled(lambda: asked.largest(capture, 0, 0, 0, None, 1, 0, 0))
    for name, how in (("mean", torch.mean), ("max", torch.amax)):
        cells = how(truth[:512, :512].nan_to_num().view(256, 2, 256, 2), dim=(1, 3))
        assert np.isnan(arrays[name][:2]).all()
        assert np.allclose(arrays[name][2:], cells[2:], rtol=2e-3, atol=1e-6)  # row 4 of the third cell counts as 0


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ("capture=0~drains", "capture must be a whole number of up to nine digits"),
        ("capture=0~1-9999", "capture must be at most 512 hidden keys"),
        ("capture=~sinks", "capture must be a whole number of up to nine digits"),
    ],
)
def test_wrong_hidden_keys_are_refused(query, error):
    with pytest.raises(ApiError, match=error):
        parse_query("hidden", f"{query}&layer=0&batch=0")


def test_keys_that_cannot_be_hidden_say_why(asked, tape):
    for capture, layer, why in (("0~99", 0, "must be from 0 to 8, got 99"), ("0~3", 4, "needs queries and keys")):
        with pytest.raises(ApiError, match=why):
            asked.overview(parse_query("hidden", f"capture={capture}&layer=0&batch=0")["capture"], layer, 0)


def test_a_pair_comes_step_by_step(asked, tape):
    found = json.loads(asked.pair(0, 1, 1, 3, 6, 2))
    A = tape["encoder.1"]
    q, k = A.call.q[1, 3, 6].double(), A.call.k[1, 1, 2].double()
    assert np.allclose(found["terms"], q * k)
    assert found["scale"] == pytest.approx(8**-0.5)
    assert found["score"] == pytest.approx(float(q @ k) * 8**-0.5)
    assert found["total"] == pytest.approx(found["score"] + found["bias"])
    assert found["weight"] == pytest.approx(float(A[1, 3, 6, 2]), rel=1e-5)
    assert np.allclose(found["q"], q)
    assert np.allclose(found["k"], k)
    assert found["slots"]["bias"] == repr(A.call.bias)
    hidden = json.loads(asked.pair(parse_query("hidden", "capture=0~2&layer=1&batch=1")["capture"], 1, 1, 3, 6, 2))
    assert (hidden["visible"], hidden["weight"]) == (False, 0.0)
    assert hidden["statistic"] < found["statistic"]
    for wrong in ((0, 1, 1, "mean", 6, 2), (0, 4, 0, 0, 0, 0), (0, 1, 1, 3, 9, 2), (0, 1, 1, 9, 6, 2)):
        with pytest.raises(ApiError):
            asked.pair(*wrong)


@pytest.mark.parametrize("projected", [True, False])
def test_value_weighted_maps_are_norms_of_what_is_added(worker, projected):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 300, 8), torch.randn(2, 2, 300, 8), 3 * torch.randn(2, 2, 300, 6)
    W = torch.randn(10, 4 * 6) if projected else None
    A = weights(q, k, mask=Causal())
    tape = Tape({("a", 0): A, ("b", 0): A}, extras={("a", 0): Extras(v, W)})
    asked = ViewerApi([Capture(tape, "one")], worker)
    described = json.loads(asked.session())["captures"][0]["layers"]
    assert [layer["values"] for layer in described] == ["v W_o" if projected else "v", None]
    dense = weights(q.double(), k.double(), mask=Causal()).dense()[1]
    parts = v[1].double().repeat_interleave(2, 0)  # h j e
    if projected:
        parts = torch.einsum("h j e, a h e -> h j a", parts, W.double().unflatten(1, (4, 6)))
    truth = (dense[..., None] * parts[:, None]).norm(dim=-1)
    capture = parse_query("hidden", "capture=0~values&layer=0&batch=0")["capture"]
    _, arrays = settled(lambda: asked.tile(capture, 0, 1, 3, None, 0, 0, 0))
    assert np.allclose(arrays["weight"], truth[3, :256, :256], rtol=1e-4, atol=1e-6)
    header, arrays = settled(lambda: asked.largest(capture, 0, 1, "mean", None, 1, 0, 0))
    cells = truth.mean(0).view(150, 2, 150, 2)
    assert header["error"] == 0
    assert np.allclose(arrays["mean"], cells.mean((1, 3)), rtol=1e-4, atol=1e-6)
    assert np.allclose(arrays["max"], cells.amax((1, 3)), rtol=1e-4, atol=1e-6)
    assert arrays["max"].max() > 1
    capture = parse_query("hidden", "capture=0~0~values&layer=0&batch=0")["capture"]
    _, arrays = settled(lambda: asked.tile(capture, 0, 1, 3, None, 0, 0, 0))
    rest = rest_of(A.select(batch=slice(1, 2)), torch.arange(300) == 0)[3] * (truth[3] / dense[3])
    assert np.allclose(arrays["weight"][1:, :1], 0)
    seen = np.tril(np.ones((256, 256), bool))[1:, 1:]
    assert np.allclose(arrays["weight"][1:, 1:][seen], rest[1:256, 1:256][seen], rtol=1e-4, atol=1e-6)
    with pytest.raises(ApiError, match="this capture kept no values"):
        asked.tile(capture, 1, 1, 3, None, 0, 0, 0)
