"""Captures by number: what is there is found, what is not is refused with the valid numbers."""

from __future__ import annotations

import pytest
import torch

from regard import weights
from regard.lens import Tape
from regard.lens.recording.reduced import Reduced
from regard.lens.recording.store import TensorInMemory
from regard.lens.tape.kept_summaries import KeptSummaries
from regard.views.viewer import captures
from regard.views.viewer.captures import ApiError, Library, MatrixId, Pending
from regard.views.viewer.describe import Capture
from regard.views.viewer.worker import Worker

ENCODER, CROSS, MEASURED = 0, 3, 4  # layers of the tape


@pytest.fixture
def worker():
    worker = Worker()
    yield worker
    worker.close()


@pytest.fixture
def library(tape, worker):
    return Library([Capture(tape, "first"), Capture(tape, "second")], worker)


def refused(call, *arguments):
    with pytest.raises(ApiError) as caught:
        call(*arguments)
    return caught.value


def test_a_number_is_from_0_to_one_below_the_count():
    assert captures.get_by_number("text", ["a", "b"], 1) == "b"
    for number in (-1, 2):
        error = refused(captures.get_by_number, "text", ["a", "b"], number)
        assert (error.status, error.error) == (400, f"text must be from 0 to 1, got {number}")
        assert error.hint == "GET /api/session lists the valid numbers"
    assert refused(captures.get_by_number, "picture", [], 0).error == "there is no picture, got number 0"


def test_captures_layers_and_batch_rows_are_checked_in_this_order(library, tape):
    assert library.capture(1).name == "second"
    assert library.entry(0, ENCODER, 1) is library.captures[0].entry(ENCODER)
    for place, message in (
        ((2, 9, 9), "capture must be from 0 to 1, got 2"),
        ((-1, 0, 0), "capture must be from 0 to 1, got -1"),
        ((0, 5, 9), "layer must be from 0 to 4, got 5"),
        ((0, 0, 2), "batch must be from 0 to 1, got 2"),
        ((0, MEASURED, -1), "batch must be from 0 to 1, got -1"),
    ):
        assert refused(library.entry, *place).error == message


def test_a_layer_of_measures_has_no_weights(library):
    assert isinstance(library.entry(0, MEASURED, 0), Reduced)
    error = refused(library.weights, 0, MEASURED, 0)
    assert (error.status, error.hint) == (400, "capture without keep=[...]")
    assert "kept only measures of the layer, not its weights" in error.error


def test_an_aggregate_is_of_all_heads(library):
    A = library.entry(0, CROSS, 0)
    assert library.heads(A, 2) == [2]
    assert library.heads(A, "mean") == library.heads(A, "max") == [0, 1, 2, 3]
    assert refused(library.heads, A, 4).error == "head must be from 0 to 3, got 4"


@pytest.mark.parametrize("head", [1, "mean", "max"])
def test_the_view_of_a_matrix_holds_its_weights(head, library, tape):
    dense = tape["decoder.0.cross"].dense()[1]
    truth = {1: dense[1], "mean": dense.mean(0), "max": dense.amax(0)}[head]
    view = library.matrix_view(MatrixId(0, CROSS, 1, head))
    assert view.shape == (5, 9)
    torch.testing.assert_close(view.block(slice(0, 5), slice(0, 9)), truth)


def test_a_difference_is_of_two_matrices_of_one_shape(library, tape):
    one, other = MatrixId(0, ENCODER, 0, 1), MatrixId(1, 1, 0, "mean")
    found = library.matrix_view(one, other).block(slice(0, 9), slice(0, 9))
    torch.testing.assert_close(found, tape["encoder.0"].dense()[0, 1] - tape["encoder.1"].dense()[0].mean(0))
    error = refused(library.matrix_view, one, MatrixId(0, CROSS, 0, 0))
    assert error.error == "a difference needs matrices of one shape, got (9, 9) and (5, 9)"
    assert error.hint == "choose another layer"
    assert "kept only measures" in refused(library.matrix_view, one, MatrixId(0, MEASURED, 0, 0)).error
    assert refused(library.matrix_view, one, MatrixId(2, 0, 0, 0)).error == "capture must be from 0 to 1, got 2"


def test_stored_maps_are_aggregated_over_heads(library, tape):
    kept = tape["measured"]["pool:8"][1]
    for head, truth in ((3, kept[3]), ("mean", kept.mean(0)), ("max", kept.amax(0))):
        found = library.map(MatrixId(0, MEASURED, 1, head))
        torch.testing.assert_close(found.map, truth)
        assert found.exact == (head != "max")


def test_the_finest_of_several_maps_is_taken(worker):
    coarse, fine = torch.rand(1, 1, 4, 4), torch.rand(1, 1, 8, 8)
    maps = {"pool:8": TensorInMemory(fine), "pool:4": TensorInMemory(coarse)}
    library = Library([Capture(Tape({("a", 0): Reduced(torch.Size((1, 1, 32, 32)), maps)}), "x")], worker)
    torch.testing.assert_close(library.map(MatrixId(0, 0, 0, 0)).map, fine[0, 0])


def test_a_layer_without_a_map_is_refused(worker):
    bare = {"entropy": TensorInMemory(torch.rand(1, 1, 9))}
    library = Library([Capture(Tape({("a", 0): Reduced(torch.Size((1, 1, 9, 9)), bare)}), "x")], worker)
    error = refused(library.map, MatrixId(0, 0, 0, 0))
    assert (error.error, error.hint) == (
        "this capture kept no map of the layer",
        "capture with keep=['pool:512', ...]",
    )


@pytest.fixture
def fresh(worker):
    """A capture of one layer without a summary."""
    q, k = torch.randn(2, 1, 2, 60, 8, generator=torch.Generator().manual_seed(0))
    tape = Tape({("a", 0): weights(q, k)})
    return tape, Library([Capture(tape, "x")], worker)


def test_a_small_layer_is_summarized_at_once_and_the_summary_kept(fresh):
    tape, library = fresh
    assert not library.has_summary(0, 0)
    summary = library.summary(0, 0)
    assert library.has_summary(0, 0)
    torch.testing.assert_close(summary.entropy, tape["a"].entropy())


def test_a_layer_that_takes_a_while_is_pending_until_the_worker_has_summarized_it(fresh, worker, monkeypatch):
    tape, library = fresh
    monkeypatch.setattr(captures, "MAX_IMMEDIATE_WEIGHTS", 60 * 60 // 8)
    with pytest.raises(Pending) as caught:
        library.summary(0, 0)
    assert caught.value.done is None or 0 <= caught.value.done <= 1
    for _ in range(1000):
        if library.has_summary(0, 0):
            break
        worker.do(lambda: None).result(5)
    torch.testing.assert_close(library.summary(0, 0).entropy, tape["a"].entropy())


def test_a_layer_that_takes_minutes_is_refused_and_its_overview_sampled(fresh, monkeypatch):
    tape, library = fresh
    monkeypatch.setattr(captures, "MAX_IMMEDIATE_WEIGHTS", 60 * 60 // 8 - 1)
    error = refused(library.summary, 0, 0)
    assert error.status == 409
    assert error.hint == "capture it with regard look --summarize, or call tape.summarize() before tape.save(...)"
    overview, certainty = library.overview(0, 0)
    assert (certainty.state, certainty.of) == ("sampled", (16, 60))
    assert overview.entropy.shape == (1, 2)
    rows = torch.arange(16) * 3 + 1  # 16 of 60 queries, at even distances
    torch.testing.assert_close(overview.entropy, tape["a"].entropy()[:, :, rows].mean(-1))
    tape.summarize()
    overview, certainty = library.overview(0, 0)
    assert certainty.state == "exact"
    torch.testing.assert_close(overview.entropy, tape["a"].entropy().mean(-1))


def test_a_head_is_viewed_again_with_its_map_once_there_is_a_summary(fresh):
    _, library = fresh
    chosen = MatrixId(0, 0, 0, 1)
    before = library.matrix_view(chosen)
    assert library.matrix_view(chosen) is before
    assert before.stored_map() is None
    library.summary(0, 0)
    after = library.matrix_view(chosen)
    assert after.stored_map() is not None
    assert library.matrix_view(chosen) is after


def test_a_gpu_may_compute_more_while_the_browser_waits(library):
    view = library.matrix_view(MatrixId(0, ENCODER, 0, 0))
    assert captures.immediate_weights(view) == 4096**2
    view.__class__ = type("OnGpu", (type(view),), {"device": property(lambda self: torch.device("cuda"))})
    assert captures.immediate_weights(view) == 131072**2


def test_a_summary_made_while_looking_is_there_when_the_file_is_opened_again(fresh, worker, tmp_path, monkeypatch):
    monkeypatch.setattr(captures, "MAX_IMMEDIATE_WEIGHTS", 60 * 60 // 8)
    path = tmp_path / "look.safetensors"
    fresh[0].save(path)

    def library(kept=True):
        return Library([Capture(Tape.open(path), "x", KeptSummaries(path) if kept else None)], worker)

    def measure(library):
        for _ in range(1000):
            try:
                return worker.do(lambda: library.summary(0, 0)).result(5)
            except Pending:
                pass
        raise AssertionError("not measured")

    measure(library(kept=False))
    assert list(tmp_path.iterdir()) == [path]
    first = measure(library())
    again = library()
    assert again.has_summary(0, 0)
    assert torch.equal(again.summary(0, 0).map, first.map)
    assert not again.has_summary(captures.Variant(0, (3,)), 0)  # without key 3
    assert again.matrix_view(MatrixId(0, 0, 0, 1)).stored_map() is not None
