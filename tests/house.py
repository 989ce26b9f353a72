"""Measure the layout of the source: python -m tests.house [ROOT] [--list MEASURE]

`tests/test_architecture.py` holds the same measures to their limits. With ROOT another checkout is measured.
"""

from __future__ import annotations

import argparse
import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]

# What each room may import of ours; a leaf is a file that every room may import, and that imports no room.
ROOMS = {
    "kernels": set(),
    "ops": {"kernels"},
    "nn": {"ops", "kernels"},
    "models": {"nn", "ops", "kernels"},
    "data": set(),
    "train": set(),
    "decode": set(),
    "lens": {"nn", "ops", "kernels"},
    "tasks": {"models", "nn", "ops", "kernels", "data", "train", "decode", "lens"},
    "views": {"lens", "nn", "ops", "kernels"},
    "serving": {"views", "tasks", "data"},
}
# Words that end like participles and are nouns, adjectives, or verbs as they are.
NOT_PARTICIPLES = set(
    """
    embed feed need seed speed shed shred exceed proceed succeed spread read red bed hundred fused unfused weighted
    gated linked nested shared tied sorted reversed nonfinite blocked masked given even seven open listen token then
    when often between children screen green hidden unseen attention left right split set put cut let hit sketch patched
    """.split()  # noqa: SIM905
)
IRREGULAR = set(
    """
    told led laid kept moved held made found seen shown said heard drawn written known taken given gone done begun built
    bound brought bought caught chosen cut felt got hidden left lent lost meant met paid read sent set sold spent split
    stood sunk taught thought thrown understood won worn woven
    """.split()  # noqa: SIM905
)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf8"))


def sources(root: Path) -> list[Path]:
    return sorted((root / "src" / "regard").rglob("*.py"))


def room(path: Path, root: Path) -> str:
    return path.relative_to(root / "src" / "regard").parts[0].removesuffix(".py")


def module_name(path: Path, root: Path) -> str:
    parts = list(path.relative_to(root / "src").with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_names(path: Path, root: Path, node: ast.Import | ast.ImportFrom) -> list[str]:
    """Absolute dotted names of a statement: the module, and the module with each name."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    package = path.relative_to(root / "src").parts[:-1]
    base = list(package[: len(package) - node.level + 1]) if node.level else []
    stem = ".".join([*base, *([node.module] if node.module else [])])
    return [stem, *(f"{stem}.{alias.name}" for alias in node.names)]


def imports(path: Path, root: Path) -> Iterator[tuple[ast.Import | ast.ImportFrom, list[str]]]:
    """All import statements of a file, those in functions and under TYPE_CHECKING included."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, import_names(path, root, node)


def files_by_name(root: Path) -> dict[str, list[Path]]:
    """File names that occur more than once, with their paths; `__init__.py` aside."""
    names = defaultdict(list)
    for path in sources(root):
        if path.stem not in ("__init__", "__main__"):
            names[path.name].append(path.relative_to(root / "src" / "regard"))
    return {name: paths for name, paths in names.items() if len(paths) > 1}


def classes_by_name(root: Path, *, public: bool) -> dict[str, list[Path]]:
    """Class names that occur more than once, with their files."""
    names = defaultdict(list)
    for path in sources(root):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef) and not (public and node.name.startswith("_")):
                names[node.name].append(path.relative_to(root / "src" / "regard"))
    return {name: paths for name, paths in names.items() if len(paths) > 1}


def participle_functions(root: Path) -> list[str]:
    """Functions and methods whose whole name is one participle."""
    found = []
    for path in sources(root):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and is_participle(node.name):
                place = f"{path.relative_to(root / 'src' / 'regard')}:{node.lineno}: {node.name}"
                found += [] if any("property" in ast.unparse(x) for x in node.decorator_list) else [place]
    return found


def is_participle(name: str) -> bool:
    word = name.strip("_")
    return "_" not in word and word not in NOT_PARTICIPLES and (word in IRREGULAR or word[3:].endswith("ed"))


def untested_files(root: Path) -> list[Path]:
    """Source files that no test file anywhere under tests/ is named after."""
    tests = {path.stem.removeprefix("test_") for path in (root / "tests").rglob("test_*.py")}
    return [
        path.relative_to(root / "src" / "regard")
        for path in sources(root)
        if path.stem not in ("__init__", "__main__") and path.stem.strip("_") not in tests
    ]


def circles(root: Path, *, type_checking: bool = True) -> list[list[str]]:
    """Modules that import each other at the top of the file, under TYPE_CHECKING too: strongly connected sets.

    Imports within functions are left out: they run when everything is loaded. `__init__` stands for what it re-exports
    and is no member of a circle.
    """
    modules = {module_name(path, root): path for path in sources(root) if path.stem != "__init__"}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        nodes = list(top_level(tree(path), type_checking=type_checking))
        named = {each for node in nodes for each in import_names(path, root, node)}
        graph[name] = (named & modules.keys()) - {name}
    return sorted(sorted(part) for part in strongly_connected(graph) if len(part) > 1)


def top_level(module: ast.Module, *, type_checking: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in module.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If | ast.Try) and (type_checking or "TYPE_CHECKING" not in ast.unparse(node)):
            yield from (x for x in ast.walk(node) if isinstance(x, ast.Import | ast.ImportFrom))


def strongly_connected(graph: dict[str, set[str]]) -> list[set[str]]:
    """Sets of nodes each of which is reachable from each other."""

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        stack = [start]
        while stack:
            for following in graph[stack.pop()] - seen:
                seen.add(following)
                stack.append(following)
        return seen

    reach = {name: reachable(name) for name in graph}
    parts = []
    for name in graph:
        if name in reach[name] and not any(name in part for part in parts):
            parts.append({other for other in reach[name] if name in reach[other]})
    return parts


def upward_imports(root: Path) -> list[str]:
    """Imports of a room above, and names of a room above that are reached as attributes, `regard.views.view`."""
    found = []
    for path in sources(root):
        own = room(path, root)
        if own not in ROOMS:
            continue
        above = (ROOMS.keys() | {"cli"}) - ROOMS[own] - {own}
        where = path.relative_to(root / "src" / "regard")
        for node, names in imports(path, root):
            rooms = {name.split(".")[1] for name in names if name.startswith("regard.")}
            found += [f"{where}:{node.lineno}: {name}" for name in sorted(rooms & above)]
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and node.attr in above and ast.unparse(node.value) == "regard":
                found.append(f"{where}:{node.lineno}: {ast.unparse(node)}")
    return found


def private_torch(root: Path) -> dict[str, set[Path]]:
    """Private names of PyTorch (`torch._C`, `from torch._dynamo import ...`), each with the files that use it."""
    found: dict[str, set[Path]] = defaultdict(set)
    for path in sources(root):
        where = path.relative_to(root / "src" / "regard")
        for _, names in imports(path, root):
            for name in names:
                if name.startswith("torch") and is_private(name):
                    found[name].add(where)
        inner = set()
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute):
                if isinstance(node.value, ast.Attribute):
                    inner.add(node.value)
                name = ast.unparse(node)
                if node not in inner and name.startswith("torch.") and is_private(name):
                    found[name].add(where)
    longest = {name for name in found if not any(other.startswith(f"{name}.") for other in found)}
    return {name: found[name] for name in sorted(longest)}


def is_private(dotted: str) -> bool:
    parts = dotted.split(".")
    return all(map(str.isidentifier, parts)) and any(x.startswith("_") and not x.startswith("__") for x in parts)


def measures(root: Path) -> dict[str, tuple[str, list[str]]]:
    """Each measure with its value and its places."""
    files = sources(root)
    lines = sorted(len(path.read_text(encoding="utf8").splitlines()) for path in files)
    folders: dict[Path, int] = defaultdict(int)
    for path in files:
        folders[path.parent.relative_to(root / "src" / "regard")] += 1
    crowded = {folder: n for folder, n in folders.items() if n > 15}
    names, classes = files_by_name(root), classes_by_name(root, public=False)
    public = classes_by_name(root, public=True)
    private, unnamed = private_torch(root), untested_files(root)
    within = {name: paths for name, paths in names.items() if len({path.parts[0] for path in paths}) < len(paths)}
    participles, rings, up = participle_functions(root), circles(root), upward_imports(root)
    private_files = {path for paths in private.values() for path in paths}

    def places(table: dict[str, list[Path]]) -> list[str]:
        return [f"{name}: {', '.join(map(str, paths))}" for name, paths in sorted(table.items())]

    return {
        "files": (str(len(files)), []),
        "lines": (f"{sum(lines):,}", []),
        "median": (f"{lines[len(lines) // 2]} lines", []),
        "longest": (f"{lines[-1]} lines", []),
        "short": (f"{sum(n < 60 for n in lines)} files below 60 lines", []),
        "crowded": (
            f"{len(crowded)} folders of more than 15 files",
            [f"{folder}: {n}" for folder, n in sorted(crowded.items())],
        ),
        "file-names": (f"{len(names)} names, {sum(map(len, names.values()))} files", places(names)),
        "within-a-room": (f"{len(within)} names", places(within)),
        "classes": (f"{len(classes)} names", places(classes)),
        "public-classes": (f"{len(public)} names", places(public)),
        "participles": (f"{len(participles)} functions", participles),
        "untested": (f"{len(unnamed)} of {len(files)}", [str(path) for path in unnamed]),
        "circles": (f"{len(rings)}", [" <-> ".join(part) for part in rings]),
        "upward": (f"{len(up)}", up),
        "private-torch": (
            f"{len(private)} names in {len(private_files)} files",
            [f"{name}: {', '.join(sorted(map(str, paths)))}" for name, paths in private.items()],
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="a checkout, this one if left out")
    parser.add_argument("--list", metavar="MEASURE", help="print the places of one measure")
    arguments = parser.parse_args()
    for name, (value, places) in measures(arguments.root.resolve()).items():
        if arguments.list in (None, name):
            print(f"{name:16}{value}")
        if arguments.list == name:
            print("\n".join(f"  {place}" for place in places))


if __name__ == "__main__":
    main()
