"""A table without pandas: columns, and short aligned text."""

import torch

from regard import weights
from regard.lens import Tape
from regard.lens.tape import overview
from regard.lens.tape.measure_table import FIRST, LAST, MeasureTable


def test_a_table_without_pandas_prints_as_aligned_rows(monkeypatch):
    monkeypatch.setattr(overview, "find_spec", lambda name: None)
    torch.manual_seed(0)
    A = weights(*torch.randn(2, 1, 2, 5, 8))
    table = Tape({("layers.0", 0): A, ("b", 0): A}).table()
    assert isinstance(table, dict)
    lines = repr(table).splitlines()
    assert lines[0].split() == ["layer", "call", "batch", "head", "entropy", "received", "max", "distance", "logit"]
    assert lines[1].split()[:4] == ["layers.0", "0", "0", "0"]
    assert lines[1].split()[4] == f"{float(A.entropy()[0, 0].mean()):.4g}"
    assert len({len(line) for line in lines[:5]}) == 1
    assert lines[5:] == ["[4 rows x 9 columns; with pandas installed, this is a data frame]"]


def test_of_a_long_table_the_first_and_last_rows_are_printed():
    table = MeasureTable({"n": list(range(1000)), "half": [n / 2 for n in range(1000)]})
    lines = repr(table).splitlines()
    assert len(lines) == 1 + FIRST + 1 + LAST + 1
    assert lines[1].split() == ["0", "0"]
    assert lines[1 + FIRST] == "... 975 more rows ..."
    assert lines[-2].split() == ["999", "499.5"]
    shown = table._repr_html_()
    assert shown.count("<tr>") == 1 + FIRST + 1 + LAST
    assert "... 975 more rows ..." in shown
    assert len(table["n"]) == 1000


def test_an_empty_table_and_hostile_names_are_text():
    assert repr(MeasureTable()) == "\n[0 rows x 0 columns; with pandas installed, this is a data frame]"
    assert "<script" not in MeasureTable({"<script>": ["<script>"]})._repr_html_()
