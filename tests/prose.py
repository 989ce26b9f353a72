"""Count sentences that are hard to read: python -m tests.prose [--list PATTERN] [--kind KIND] [ROOM ...]

Five kinds of text are read: messages (every string of four words or more in the code), help (of the command line, and
of fields), docstrings, comments, and pages (README.md, CONTRIBUTING.md, docs/). Code in any of them is left out.
`tests/test_prose.py` holds the counts to the ceilings of `tests/prose.toml`.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
BE = "(?:is|are|was|were|be|been|being)"
EVERYWHERE = "message help docstring comment page"


class Pattern(NamedTuple):
    regex: re.Pattern[str]
    kinds: str
    advice: str


def pattern(text: str, kinds: str, advice: str) -> Pattern:
    return Pattern(re.compile(text), kinds, advice)


PATTERNS = {
    "headless": pattern(
        r"\A\s*(What|Where|Who|Whose|Which|Of|Those|These|Such|Over|With|From|Whatever|Whoever|what|of|those)\b"
        r"(?!-| to do\b)",
        "docstring help",
        "begin with an imperative verb or with the noun of the thing",
    ),
    "question": pattern(
        r"\A\s*(Is|Are|Does|Do|Has|Have|May|Can|Was|Were|Would|Could|Did|Must|Should)\b[^.]*\?",
        "docstring",
        "say 'Return whether ...' or 'True if ...'",
    ),
    "nobody": pattern(
        r"\b(some|no|any|every)body\b|\bwhoever\b",
        EVERYWHERE,
        "name the actor: the user, the model, autograd, the caller",
    ),
    "told": pattern(
        r"\b(told|tells?|telling)\b(?! (apart|you)\b)|\bsaid to\b|"
        rf"\b{BE} (said|heard|handed)\b|\b(is|are|was|were) asked\b|\basked for\b|"
        r"\b(let|lets) \w+ hear\b|\bforetell\w*",
        EVERYWHERE,
        "use the verb of the field: report, warn, return, request, pass, predict",
    ),
    "what-is-done": pattern(
        r"\b[Ww]hat (is|was|are|were|has been|have been) \w+(ed|en|n|t|ld|ept|een|ade)\b(?<!not)(?<!in)(?<!often)",
        EVERYWHERE,
        "name the noun: the recorded calls, the copied rows",
    ),
    "of-which": pattern(
        r"\bof (whom|whose)\b|(?<!\bone )\bof (those|these)\b(?! [a-z-]*[a-z]s\b)|(?<!, )(?<!\d )\bof which\b",
        EVERYWHERE,
        "repeat the noun",
    ),
    "understood": pattern(
        rf"\b({BE}|not) understood\b|\bleads? (somewhere|nowhere)\b",
        EVERYWHERE,
        "say what is not supported or not recognized",
    ),
    "orphan": pattern(
        r"\A#\s*(of|which|as|whose|where|those|that|and|or|but|so|for it|by)\b",
        "comment",
        "write a clause with a subject, or put the unit in the name",
    ),
    "so-many": pattern(
        r"\b[Ss]o (many|much|few)\b(?! that)|(?<!twice )(?<!times )\b[Aa]s (many|much|few)\b(?!( [\w-]+){0,2} as\b)",
        EVERYWHERE,
        "say the number, the variable or the bound",
    ),
    "let": pattern(
        r"[;:,.] (let|lets) (it|them|the|that|what|each|those|[a-z_]+) [a-z]+\b|\bmust be of\b(?! the same)",
        "message help",
        "tell the reader what to write: pass, use, set",
    ),
}
KINDS = tuple(EVERYWHERE.split())


class Text(NamedTuple):
    kind: str
    path: Path
    line: int
    text: str

    @property
    def room(self) -> str:
        """The folder below src/regard; README.md, docs; `top` for files beside the rooms."""
        parts = self.path.parts
        if parts[0] != "src":
            return parts[0]
        return parts[2] if len(parts) > 3 else "top"


class Match(NamedTuple):
    pattern: str
    text: Text


def literal(node: ast.expr) -> str | None:
    """A string, or an f-string with `{}` for each value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return None


def literals(node: ast.AST, *, skip: set[int]) -> Iterator[tuple[ast.expr, str]]:
    """Strings below a node, outermost first; a string within an f-string's value stands for itself too."""
    if id(node) in skip:
        return
    if isinstance(node, ast.expr) and (text := literal(node)) is not None:
        yield node, text
        if isinstance(node, ast.JoinedStr):
            for part in node.values:
                if isinstance(part, ast.FormattedValue):
                    yield from literals(part.value, skip=skip)
        return
    for child in ast.iter_child_nodes(node):
        yield from literals(child, skip=skip)


def help_texts(tree: ast.Module) -> Iterator[tuple[ast.expr, str]]:
    """The argument `help=` of any call, and the strings of `Annotated[type, "..."]`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg == "help":
                    yield from literals(keyword.value, skip=set())
        if (
            isinstance(node, ast.Subscript)
            and ast.unparse(node.value).endswith("Annotated")
            and isinstance(node.slice, ast.Tuple)
        ):
            for element in node.slice.elts[1:]:
                if (text := literal(element)) is not None:
                    yield element, text


def docstring_node(node: ast.AST) -> ast.expr | None:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            return first.value
    return None


def without_code(text: str) -> str:
    """Prose alone: no doctest with its output, no fenced block, no code in backticks."""
    text = re.sub(r"^ *>>> .*?(?:\n\s*\n|\Z)", "\n\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"``?[^`]+``?", "`code`", text)


def source_texts(path: Path) -> Iterator[Text]:
    source, relative = path.read_text(encoding="utf8"), path.relative_to(ROOT)
    tree = ast.parse(source)
    seen: set[int] = set()
    for node in ast.walk(tree):
        if (doc := docstring_node(node)) is not None:
            seen.add(id(doc))
            yield Text("docstring", relative, doc.lineno, without_code(ast.literal_eval(doc)))
    for node, text in help_texts(tree):
        if id(node) not in seen:
            seen.add(id(node))
            yield Text("help", relative, node.lineno, without_code(text))
    for node, text in literals(tree, skip=seen):
        if len(text.split()) >= 4:
            yield Text("message", relative, node.lineno, without_code(text))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text("comment", relative, token.start[0], re.sub(r"`[^`]+`", "`code`", token.string))


def page_texts(path: Path) -> Iterator[Text]:
    """Paragraphs with the line they begin on."""
    text = path.read_text(encoding="utf8")
    text = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)
    line = 1
    for paragraph in re.split(r"(\n\s*\n)", text):
        if paragraph.strip():
            yield Text("page", path.relative_to(ROOT), line, without_code(paragraph))
        line += paragraph.count("\n")


def texts() -> Iterator[Text]:
    for path in sorted((ROOT / "src" / "regard").rglob("*.py")):
        yield from source_texts(path)
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))):
        yield from page_texts(path)


def matches() -> list[Match]:
    """Every place of every pattern."""
    return [
        Match(name, text)
        for text in texts()
        for name, each in PATTERNS.items()
        if text.kind in each.kinds.split()
        for _ in each.regex.finditer(" ".join(text.text.split()))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rooms", nargs="*", help="only paths that contain one of these")
    parser.add_argument("--list", choices=[*PATTERNS, "all"], help="print each place of one pattern, or of all")
    parser.add_argument("--kind", choices=KINDS, help="only this kind of text")
    arguments = parser.parse_args()
    selected = [
        match
        for match in matches()
        if (not arguments.rooms or any(room in str(match.text.path) for room in arguments.rooms))
        and arguments.kind in (None, match.text.kind)
    ]
    for match in selected:
        if arguments.list in (match.pattern, "all"):
            advice = PATTERNS[match.pattern].advice
            print(f"{match.text.path}:{match.text.line}: {match.pattern} ({advice}): {excerpt(match)}")
    for name in PATTERNS:
        print(line(name, [match for match in selected if match.pattern == name]))
    for kind in KINDS:
        print(line(kind, [match for match in selected if match.text.kind == kind]))
    print(line("all", selected))


def excerpt(match: Match) -> str:
    text = " ".join(match.text.text.split())
    found = PATTERNS[match.pattern].regex.search(text)
    start = max(0, found.start() - 60) if found else 0
    return text[start : start + 140]


def line(name: str, selected: list[Match]) -> str:
    rooms = Counter(match.text.room for match in selected)
    return f"{name:14}{len(selected):6}  " + "  ".join(f"{room} {n}" for room, n in rooms.most_common())


if __name__ == "__main__":
    main()
