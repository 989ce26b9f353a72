"""Overviews and summaries: measured once, kept, saved, and there when a file is opened without being read."""

import json

import pytest
import safetensors.torch
import torch

from regard import Causal, Sigmoid, weights
from regard.lens import Tape, capture
from regard.lens.recording.reduced import Reduced
from regard.lens.recording.store import TensorInMemory
from regard.lens.tape import archive
from regard.lens.tape.overview import Overview
from regard.nn import Attention

NAMES = ("entropy", "received", "max", "distance", "map", "statistic")


def some_tape():
    q, k = torch.randn(2, 2, 4, 63, 8)
    return Tape({("a", 0): weights(q, k, mask=Causal()), ("b", 0): weights(q, k[:, :2], normalize=Sigmoid(-3.0))})


def test_summaries_are_those_of_the_weights_and_made_once():
    tape = some_tape()
    for key in tape:
        found, truth = tape.summary(key), weights_again(tape[key]).summary()
        for name in NAMES:
            ours, theirs = getattr(found, name), getattr(truth, name)
            assert (ours is theirs is None) or (ours - theirs).abs().max() < 1e-5
        assert tape.summary(key) is found
        assert tape.summarized(key)


def weights_again(A):
    return type(A)(A._call)


def test_heads_are_measured_a_few_at_a_time(monkeypatch):
    monkeypatch.setattr("regard.lens.tape.tape.CHUNK_ENTRIES", 3 * 2 * 63 * 63)
    tape = some_tape()
    assert list(tape.summarizing("a")) == [0.75, 1.0]
    assert list(tape.summarizing("a")) == []
    truth = weights_again(tape["a"]).summary()
    assert (tape.summary("a").map - truth.map).abs().max() < 1e-6
    assert tape["a"]._statistic.shape == (2, 4, 63, 1)


def test_a_summary_of_fewer_tokens_is_made_again():
    q, k = torch.randn(2, 1, 2, 9, 8)
    before = weights(q[:, :, :5], k[:, :, :5]).summary()
    tape = Tape({("x", 0): weights(q, k)}, summaries={("x", 0): (before, Overview.of(before))})
    assert not tape.summarized("x")
    assert tape.summary("x").entropy.shape[-1] == 9
    assert tape.summarized("x")


def test_tensors_in_files_are_measured_once(tmp_path):
    model, x = Attention(16, 4), torch.randn(1, 9, 16)
    with torch.no_grad(), capture(model, to=tmp_path) as tape:
        model(x)
    assert tape[0]._statistic is None
    tape.summarize()
    assert tape[0]._statistic is not None
    assert (tape[0].dense() - model.weights(x).dense()).abs().max() < 1e-6


def test_only_weights_are_summarized():
    tape = Tape({("x", 0): Reduced(torch.Size((1, 2, 5, 7)), {"entropy": TensorInMemory(torch.rand(1, 2, 5))})})
    tape.summarize()
    with pytest.raises(ValueError, match=r"summary\(\) needs queries and keys"):
        tape.summary("x")
    assert tape.overview("x").entropy.shape == (1, 2)


def test_an_overview_averages_over_queries_that_see_a_key():
    q, k = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 5, 8)
    A = weights(q, k, mask=Causal())  # the first four queries see nothing
    found = Overview.of(A.summary())
    assert torch.allclose(found.entropy, A.entropy()[..., 4:].mean(-1))
    assert torch.allclose(found.distance, A.distance()[..., 4:].mean(-1))
    assert torch.allclose(found.peak, A.received().amax(-1) / 5)
    assert found.peak_key.tolist() == A.received().argmax(-1).tolist()


def test_shares_are_of_the_attention_there_is():
    q, k = torch.ones(1, 1, 6, 4), torch.zeros(1, 1, 3, 4)
    k[:, :, 0] = 50.0
    tape = Tape({("a", 0): weights(q, k, mask=Causal())})  # the first three queries see nothing
    found = tape.overview("a")
    assert found.peak.item() == pytest.approx(1)
    assert found.sink.item() == pytest.approx(1)
    assert list(tape.table()["received"]) == [pytest.approx(1)]


def test_nan_in_one_head_stays_in_that_head():
    q, k = torch.randn(2, 1, 2, 20, 8)
    q[0, 1, 3] = torch.nan
    found = Overview.of(weights(q, k).summary())
    for x in (found.entropy, found.max, found.distance, found.peak, found.sink):
        assert x.isnan().tolist() == [[False, True]]


def test_sinks_are_keys_with_more_than_three_tenths():
    q, k = torch.ones(1, 1, 50, 4), torch.zeros(1, 1, 50, 4)
    k[0, 0, 3] = 4.0
    found = Overview.of(weights(q, k).summary())
    assert found.sink.item() > 0.9
    assert found.peak_key.item() == 3
    assert Overview.of(weights(q * 0, k).summary()).sink.item() == 0


def test_summaries_survive_a_file_and_open_without_the_rest(tmp_path):
    tape, path = some_tape(), tmp_path / "tape.safetensors"
    tape.picture(torch.rand(3, 6, 6), patches=(2, 31), special=1, layers="a")
    tape.summarize()
    tape.save(path)
    for again in (Tape.load(path), Tape.open(path)):
        for key in tape:
            assert again.summarized(key)
            for name in NAMES:
                ours, theirs = getattr(again.summary(key), name), getattr(tape.summary(key), name)
                assert (ours is theirs is None) or torch.equal(ours, theirs)
            assert torch.equal(again.overview(key).thumbs, tape.overview(key).thumbs)
        ours, theirs = again.pictures_of("a")[0], tape.pictures_of("a")[0]
        assert torch.equal(ours.pixels, theirs.pixels)
        assert (ours.rows, ours.cols, ours.special) == (2, 31, 1)


def test_opening_reads_no_queries_and_checking_reads_everything(tmp_path):
    path = tmp_path / "tape.safetensors"
    tape = some_tape()
    tape.summarize()
    tape.save(path)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    assert list(Tape.open(path)) == list(tape)
    with pytest.raises(ValueError, match="is corrupted: checksum mismatch"):
        list(archive.check(path))
    with pytest.raises(ValueError, match="is corrupted: checksum mismatch"):
        Tape.load(path)


def test_check_yields_its_progress(tmp_path, monkeypatch):
    path = tmp_path / "tape.safetensors"
    some_tape().save(path)
    monkeypatch.setattr(archive, "DIGEST_CHUNK_BYTES", 4096)
    shares = list(archive.check(path))
    assert len(shares) > 4
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_a_selected_tape_keeps_its_summaries():
    tape = some_tape()
    tape.summarize()
    assert tape.select("a").summarized("a")


HOSTILE = [
    (lambda x: x.pop("map"), "a summary must have the fields"),
    (lambda x: x.update(entropy=x["received"], received=x["map"]), "received must have shape"),
    (lambda x: x.update({"overview.thumbs": x["entropy"]}), "thumbs of a summary must begin with dims"),
    (lambda x: x.update(entropy="t99"), "the file has no tensor 't99'"),
]


@pytest.mark.parametrize(("change", "message"), HOSTILE)
def test_hostile_summaries_are_refused(tmp_path, change, message):
    tape, path = some_tape(), tmp_path / "tape.safetensors"
    tape.summarize()
    tape.save(path)
    with safetensors.safe_open(path, "pt") as file:
        text = json.loads(file.metadata()[archive.METADATA_KEY])
    change(text["entries"][0]["summary"])
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file(tensors, path, archive.checksummed_metadata(json.dumps(text), tensors))
    with pytest.raises(ValueError, match=message):
        Tape.load(path)


def test_maps_of_many_texts_and_heads_have_larger_cells(monkeypatch, tmp_path):
    q, k = torch.randn(2, 3, 4, 63, 8)
    tape = Tape({("a", 0): weights(q, k, mask=Causal())})
    monkeypatch.setattr("regard.lens.tape.overview.MAX_MAP_ENTRIES", 12 * 20 * 20)
    tape.summarize()
    found, A = tape.summary("a"), tape["a"].dense()
    assert found.map.shape == (3, 4, 8, 8)  # cells of 8 x 8, the last ones of 7
    want = [[part.mean((-1, -2)) for part in rows.split(8, -1)] for rows in A.split(8, -2)]
    torch.testing.assert_close(found.map, torch.stack([torch.stack(row, -1) for row in want], -2))
    tape.save(tmp_path / "tape.safetensors")
    again = Tape.load(tmp_path / "tape.safetensors")
    assert again.summarized("a")
    assert again.summary("a").axes == found.axes
