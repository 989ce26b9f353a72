"""Reports of `check`: the findings, the checks that passed, and those that could not run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import TextWrapper

CHECKS = {
    "future-leak": "leaks from the future",
    "unmet-tokens": "tokens that never meet",
    "heads-to-heads": "heads that attend to heads",
    "padding": "padding that changes results",
    "empty-rows": "rows that see nothing",
    "softmax-axis": "softmax over the wrong axis",
    "scale": "scale of the wrong width",
    "reversed-mask": "a mask with its meaning reversed",
    "positions": "positions off by one",
    "cache": "a cache that disagrees with the full pass",
    "dropout": "dropout in evaluation",
}


class AttentionBugError(AssertionError):
    """Raised by `CheckReport.raise_if_any` if there are findings."""


@dataclass(frozen=True)
class Finding:
    """One bug that `check` found: the test, its result and the likely cause."""

    name: str  # a key of CHECKS
    tried: str
    result: str
    cause: str
    layer: str = ""  # name of the layer within the model; "" for the model itself

    @property
    def title(self) -> str:
        """The bug in words."""
        return CHECKS[self.name]

    def __str__(self) -> str:
        place = f" ({self.layer})" if self.layer else ""
        rows = (("tried", self.tried), ("result", self.result), ("likely cause", self.cause))
        return "\n".join([f"{self.title}{place} [{self.name}]", *(_row(*row) for row in rows)])


@dataclass(frozen=True)
class CheckReport:
    """The result of `check`. It prints as text, and is True if there are no findings.

    `findings` are the bugs; `passed` has the names of the checks without one; `not_checked` maps the others to the
    reason. `assumed` holds the assumptions of the checks, and `notes` behaviour that is worth knowing and no bug.
    """

    subject: str
    findings: tuple[Finding, ...]
    passed: tuple[str, ...]
    not_checked: Mapping[str, str]
    assumed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not self.findings

    def raise_if_any(self) -> None:
        """Raise `AttentionBugError` with the whole report if there are findings."""
        if self.findings:
            raise AttentionBugError(str(self))

    def __str__(self) -> str:
        found = (
            f"{len(self.findings)} finding{'' if len(self.findings) == 1 else 's'}" if self.findings else "no finding"
        )
        lines = [f"{self.subject}: {found}, {len(self.passed)} passed, {len(self.not_checked)} not checked"]
        lines += [_row("assumed", text) for text in self.assumed]
        for finding in self.findings:
            lines += ["", f"FOUND  {finding}"]
        if self.passed:
            lines += ["", _row("passed", ", ".join(CHECKS[name] for name in self.passed))]
        if self.not_checked:
            lines += ["", "  not checked:"]
            reasons = dict.fromkeys(self.not_checked.values())
            for reason in reasons:
                names = [CHECKS[name] for name, each in self.not_checked.items() if each == reason]
                lines.append(_wrap(f"{', '.join(names)}: {reason}", "    "))
        if self.notes:
            lines += ["", *(_row("note", text) for text in self.notes)]
        return "\n".join(lines)

    __repr__ = __str__


def _row(label: str, text: str) -> str:
    return _wrap(f"{label}: {text}", "  ")


def _wrap(text: str, indent: str) -> str:
    return TextWrapper(100, initial_indent=indent, subsequent_indent=indent + "  ", break_long_words=False).fill(text)
