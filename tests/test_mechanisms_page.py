"""The page of mechanisms: every term is drawn, and each row names a test and a paper that exist."""

from __future__ import annotations

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

import regard
from tests.cases import CASES

ROOT = Path(__file__).parents[1]
SPEC = spec_from_file_location("mechanisms", ROOT / "docs" / "site" / "mechanisms.py")
MECHANISMS = module_from_spec(SPEC)
SPEC.loader.exec_module(MECHANISMS)
ENTRIES = [(slot, *entry) for slot, entries in MECHANISMS.MECHANISMS.items() for entry in entries]


def test_every_term_is_on_the_page():
    bases = {"Score", "Mask", "Bias", "Normalizer", "Weights", "Summary"}
    terms = {name for name in regard.__all__ if isinstance(getattr(regard, name), type)} - bases
    assert {name for _, name, _, _ in ENTRIES} == terms


@pytest.mark.parametrize(("slot", "name", "code", "paper"), ENTRIES, ids=lambda x: x)
def test_a_row_has_a_picture_a_test_and_a_paper(slot, name, code, paper):
    A = MECHANISMS.matrix(slot, code)
    assert A.isfinite().all()
    assert A.std() > 0
    assert MECHANISMS.case(name) in {str(case) for case in CASES}
    assert name in code
    assert re.search(r"[a-z]", MECHANISMS.equation(name))
    listed = (ROOT / "docs" / "book" / "papers.md").read_text(encoding="utf8")
    assert not paper or f"- {paper}: *" in listed


def test_no_two_terms_of_a_slot_make_the_same_picture():
    for slot, entries in MECHANISMS.MECHANISMS.items():
        found = [MECHANISMS.matrix(slot, code) for _, code, _ in entries]
        for n, A in enumerate(found):
            assert not any(torch.allclose(A, B) for B in found[:n]), entries[n]


def test_the_page_has_a_table_for_each_slot():
    page = MECHANISMS.on_page_markdown((ROOT / "docs" / "mechanisms.md").read_text(encoding="utf8"))
    assert page.count("<img") == len(ENTRIES)
    assert [line[3:] for line in page.splitlines() if line.startswith("## ")] == ["Score", "Mask", "Bias", "Normalize"]
    for line in page.splitlines():
        if line.startswith("| ") and "<img" in line:
            assert len(re.findall(r"\|", re.sub(r"`[^`]*`|<img[^>]*>", "", line))) == 6, line
