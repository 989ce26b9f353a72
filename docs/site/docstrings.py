"""A griffe extension that reads this package as it is written.

The `>>>` examples of docstrings, which Markdown would take for quotes, become fenced blocks, and the classes under
`term` show the fields they are made from.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^ *>>> .*(?:\n(?!\s*\n).+)*", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Fences examples and signs terms."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each object, its members included."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)
        if isinstance(obj, griffe.Class) and any(str(x.value) == "term" for x in obj.decorators):
            obj["__init__"] = griffe.Function("__init__", parameters=griffe.Parameters(*_fields(obj)))


def _fields(cls: griffe.Class) -> list[griffe.Parameter]:
    found = [x for x in cls.members.values() if isinstance(x, griffe.Attribute) and "property" not in x.labels]
    kind = griffe.ParameterKind.positional_or_keyword
    fields = [griffe.Parameter(x.name, annotation=x.annotation, kind=kind, default=x.value) for x in found]
    return [griffe.Parameter("self", kind=kind), *fields]
