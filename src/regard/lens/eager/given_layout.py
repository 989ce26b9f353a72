"""Parse `layout=`, by which the caller of `capture` says which batch dims of a layer are the batch and its heads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..layer_names import list_names, matches

LAYOUTS = ("b h i j", "h b i j", "(b h) i j", "(h b) i j", "b i j")
PATTERN = re.compile(r"\(b h(?:=(\d+))?\) i j|\(h(?:=(\d+))? b\) i j|h b i j|b h i j|b i j")


class LayoutMismatch(ValueError):
    """A given layout does not fit the matrices of a layer."""


@dataclass(frozen=True)
class GivenLayout:
    """The batch dims of the weights of a layer.

    >>> GivenLayout.parse("(h=4 b) i j")
    '(h=4 b) i j'
    """

    text: str
    heads: int | None = None  # their number, for folded dims

    @classmethod
    def parse(cls, text: object) -> GivenLayout:
        """Read a layout such as "(b h) i j"; raises for any other text."""
        shown = ", ".join(map(repr, LAYOUTS))
        if not isinstance(text, str):
            raise TypeError(f"a layout is one of {shown}, got {text!r}")
        found = PATTERN.fullmatch(" ".join(text.split()))
        if found is None:
            raise ValueError(f"a layout is one of {shown}, or '(b h=4) i j' with the number of heads, got {text!r}")
        number = found[1] or found[2]
        if number is not None and int(number) < 1:
            raise ValueError(f"the number of heads must be at least 1, got {text!r}")
        return cls(found[0], None if number is None else int(number))

    @property
    def is_batch(self) -> bool:
        """Whether all matrices are of the batch, with one head."""
        return self.text == "b i j"

    @property
    def is_folded(self) -> bool:
        """Whether batch and heads are one dim."""
        return self.text.startswith("(")

    @property
    def at(self) -> int:
        """The place of the heads: 0 before the batch, 1 behind it."""
        return int(self.text.lstrip("(").startswith("b"))

    @property
    def example(self) -> str:
        """The layout with a number of heads."""
        return "(b h=4) i j" if self.at else "(h=4 b) i j"

    def __repr__(self) -> str:
        return repr(self.text)


class GivenLayouts:
    """The given layouts of a model, by pattern of layer names; the last pattern that matches a layer applies to it.

    >>> GivenLayouts.parse({"decoder.*": "(b h) i j"}, ["encoder", "decoder.0"]).of("decoder.0")
    '(b h) i j'
    """

    def __init__(self, by_pattern: Mapping[str, GivenLayout]) -> None:
        self._by_pattern = dict(by_pattern)

    @classmethod
    def parse(cls, layout: str | Mapping[str, str], names: Iterable[str]) -> GivenLayouts:
        """Read the argument `layout` for a model whose modules have these names."""
        if not isinstance(layout, Mapping):
            return cls({"*": GivenLayout.parse(layout)})
        names = list(names)
        for pattern in layout:
            if not isinstance(pattern, str):
                raise TypeError(f"the keys of layout must be patterns of layer names, got {pattern!r}")
            if not any(matches(name, pattern) for name in names):
                raise ValueError(f"no layer matches {pattern!r} of layout; there are {list_names(names)}")
        return cls({pattern: GivenLayout.parse(text) for pattern, text in layout.items()})

    def of(self, name: str) -> GivenLayout | None:
        """Return the layout of a layer; None if none was given."""
        found = [layout for pattern, layout in self._by_pattern.items() if matches(name, pattern)]
        return found[-1] if found else None


NO_LAYOUTS = GivenLayouts({})
