"""Findings and reports: what they print, when they are true, what they raise."""

import pytest

from regard.lens import CheckReport, Finding
from regard.lens.linter.findings import CHECKS, AttentionBugError

LEAK = Finding("future-leak", "changed tokens", "3 pairs leak", "the mask is missing", "blocks.0")


def report(*findings):
    return CheckReport(
        "Layer", findings, ("scale",), {"cache": "no cache", "padding": "no mask", "positions": "no cache"}
    )


def test_a_finding_prints_what_was_tried_what_came_out_and_the_cause():
    assert str(LEAK).splitlines() == [
        "leaks from the future (blocks.0) [future-leak]",
        "  tried: changed tokens",
        "  result: 3 pairs leak",
        "  likely cause: the mask is missing",
    ]


def test_a_report_is_true_without_findings_and_raises_with_one():
    assert report()
    report().raise_if_any()
    assert not report(LEAK)
    with pytest.raises(AttentionBugError, match="FOUND  leaks from the future"):
        report(LEAK).raise_if_any()


def test_what_was_not_checked_is_printed_once_for_each_reason():
    lines = str(report(LEAK)).splitlines()
    assert lines[0] == "Layer: 1 finding, 1 passed, 3 not checked"
    assert f"    {CHECKS['cache']}, {CHECKS['positions']}: no cache" in lines
    assert f"    {CHECKS['padding']}: no mask" in lines
    assert repr(report()) == str(report())
