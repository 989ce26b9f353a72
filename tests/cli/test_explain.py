"""`regard explain` and `regard bench`: the operator, and its benchmarks, without a model."""

from __future__ import annotations

import pytest
import torch

from tests.cli.commands import run, well


def test_explain_says_who_would_run_an_attention():
    shown = well("explain", "--shape", "1,8,4096,64", "--mask", "Causal() & Window(256)").out
    assert "attend 1 x 8 x 4096 x 4096, d = 64, float32" in shown
    assert "mask       Causal() & Window(256)" in shown
    assert "-> " in shown
    few = ["--keys", 9, "--kv-heads", 2, "--bias", "Alibi(8)", "--score", "Dot(cap=30.0)", "--normalize", "Entmax(1.5)"]
    shown = well("explain", "--shape", "2,8,5,16", *few, "--dtype", "float64", "--device", "cpu").out
    assert "attend 2 x 8 x 5 x 9, d = 16, float64, cpu" in shown
    assert "Entmax(" in shown


def test_explain_does_not_go_by_what_memory_held_before(monkeypatch):
    monkeypatch.setattr(torch, "empty", lambda *sizes, **options: torch.full(sizes, torch.nan, **options))
    assert "-> sdpa" in well("explain", "--shape", "1,8,64,16", "--mask", "Causal()").out


def test_benchmarks_are_those_of_a_clone(monkeypatch, tmp_path):
    monkeypatch.setattr("regard.cli.explain.REPOSITORY", tmp_path)
    assert run("bench") == (
        2,
        "",
        "error: the installed package does not contain the benchmarks; run this in a clone of the repository\n",
    )
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__main__.py").write_text(
        "import sys; open('told', 'w').write(' '.join(sys.argv[1:])); raise SystemExit(7)"
    )
    assert run("bench", "operator", "--only", "Causal").code == 7
    assert (tmp_path / "told").read_text() == "operator --only Causal"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--bias", "Causal()"], "bias must be a bias, got Causal()"),
        (["--score", "Alibi(8)"], "score must be a score, got Alibi(heads=8)"),
        (["--normalize", "Dot()"], "normalize must be a normalizer, got Dot()"),
    ],
)
def test_a_term_of_another_kind_is_refused_with_the_slot_it_was_given_to(flags, message):
    assert run("explain", "--shape", "1,8,4,64", *flags) == (2, "", f"error: {message}\n")
