"""The viewer in a real browser: every view opened and read; nothing runs, is fetched or reported that should not be."""

from __future__ import annotations

import hashlib
import io
import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

import regard.views
from regard import Causal, weights
from regard.lens import Tape, rollout
from regard.views import view
from tests.views.browser import opened, shown

pytestmark = pytest.mark.browser

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "the", "quick", "cat", "looks"]
WORDS += ["at", "the", "dog", "while", "the", "fox", "sleeps"]
SOURCE, TARGET = ["the", "house", "is", "small", "."], ["das", "Haus", "ist", "sehr", "klein", "."]
HEADS, DEPTH = 4, 3
WEB = Path(regard.views.__file__).parent / "web"
NO_NUMBER = (159, 180, 192)  # as `regard.views.figures.canvas` draws it


def text_tape(tokens=WORDS, *, depth=DEPTH, heads=HEADS, seed=0):
    torch.manual_seed(seed)
    n = len(tokens)
    entries = {
        (f"layers.{layer}.attention", 0): weights(*1.5 * torch.randn(2, 1, heads, n, 8), mask=Causal())
        for layer in range(depth)
    }
    tape = Tape(entries)
    tape.tokens = tokens
    return tape


def translation_tape(source=SOURCE, target=TARGET):
    torch.manual_seed(1)
    q, k = torch.randn(1, 2, len(target), 8), 2 * torch.randn(1, 2, len(source), 8)
    tape = Tape({("decoder.cross", 0): weights(q, k)})
    tape.tokens = {"*": (target, source)}
    return tape


def picture_tape(words=()):
    """A layer of a ViT, or of a captioner with a query for each word; the picture has 4 x 6 patches."""
    torch.manual_seed(2)
    q, k = torch.randn(1, 3, len(words) or 25, 8), torch.randn(1, 3, 25, 8)
    tape = Tape({("blocks.0.attention", 0): weights(q, k)})
    tape.picture(torch.rand(40, 60, 3), patches=(4, 6), special=1)
    if words:
        tape.tokens = {"*": (words, [str(n) for n in range(25)])}
    return tape


def dense(tape, layer):
    return tape[layer].dense("10MB")[0]


@pytest.fixture(scope="module")
def tape():
    return text_tape()


@pytest.fixture(scope="module")
def viewer(tape):
    with view(tape, open_browser=False) as viewer:
        yield viewer


@pytest.fixture
def watched(chromium, viewer):
    with opened(chromium, viewer.url) as watched:
        yield watched


def test_the_bundle_was_built_from_its_sources():
    names = sorted([*(f"src/{path.name}" for path in (WEB / "src").iterdir()), "build.mjs", "package-lock.json"])
    digest = hashlib.sha256(b"".join((WEB / name).read_bytes() for name in names)).hexdigest()
    assert (WEB / "dist" / "sources.sha256").read_text().strip() == digest, "run `npm ci && npm run build` in views/web"


def test_the_bundle_is_small_plain_and_holds_nothing_inline():
    page, script, view = ((WEB / "dist" / name).read_bytes() for name in ("index.html", "app.js", "app.css"))
    assert len(script) + len(view) < 450_000
    assert (page + script + view).isascii()  # the same bytes, and hash, whatever encoding a page is read in
    assert page.count(b'<link rel="stylesheet" href="app.css">') == 1
    assert re.findall(rb"<script[^>]*>", page) == [b'<script src="app.js" defer>']
    assert not re.search(rb"<style| style=| on\w+=", page)
    assert not re.search(rb"\beval\(|new Function\(|import\(", script)


def test_the_overview_shows_every_head_sorted_and_filtered(watched, tape):
    heads = watched.page.locator("button.head")
    assert heads.count() == DEPTH * HEADS
    watched.go(sort="entropy")
    order = heads.evaluate_all("all => all.map(one => [+one.dataset.layer, +one.dataset.head])")
    entropy = torch.stack([A.entropy()[0].mean(-1) for A in tape.values()])
    assert order == sorted(order, key=lambda at: -float(entropy[*at]))
    watched.page.fill("[data-control=filter]", f"layers.1 head>0 entropy<{float(entropy[1, 1:].max()) - 1e-3:.4f}")
    assert heads.count() == HEADS - 2
    heads.first.click()
    assert watched.state["view"] == "map"
    assert watched.state["layer"] == "1"


def test_zooming_to_a_pair_reads_its_exact_weight(watched, tape):
    A = dense(tape, "layers.1.attention")[2]
    for row, col in ((12, 3), (18, 18), (5, 0)):
        watched.go(view="map", layer=1, head=2, at=f"{row + 0.5},{col + 0.5},8")
        assert watched.point() == pytest.approx([float(A[row, col])], rel=1e-6)
        assert watched.text(".card dd >> nth=0").split() == [WORDS[row], str(row)]
        assert watched.text(".card dd >> nth=1").split() == [WORDS[col], str(col)]
    labels = watched.page.locator(".axis.left .tick text").all_text_contents()
    assert sorted(labels) == sorted(WORDS[4:7])


def test_the_wheel_zooms_in_to_single_weights(watched):
    watched.go(view="map", layer=1, head=2)
    box = watched.page.locator(".deep").bounding_box()
    watched.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    for _ in range(12):
        watched.page.mouse.wheel(0, -200)
        watched.page.wait_for_timeout(30)
    watched.settle()
    assert float(watched.state["at"].split(",")[2]) < 20
    watched.press("0")
    assert "at" not in watched.state


def test_cells_of_a_long_text_show_the_mean_of_their_weights(chromium):
    torch.manual_seed(3)
    tape = Tape({("layer", 0): weights(*torch.randn(2, 1, 1, 1111, 4))})
    A = dense(tape, "layer")[0]
    with shown(chromium, tape) as watched:
        watched.go(view="map")
        [found] = watched.point()
        sides = [re.search(r"(\d+)–(\d+)$", watched.text(f".card dd >> nth={n}")).groups() for n in (0, 1)]
        (top, bottom), (left, right) = (map(int, side) for side in sides)
        assert found == pytest.approx(float(A[top : bottom + 1, left : right + 1].mean()), rel=2e-3)


@pytest.mark.parametrize("n", [6, 600])
def test_what_is_no_number_has_a_colour_of_its_own(chromium, tmp_path, n):
    torch.manual_seed(3)
    q, k = torch.randn(2, 1, 1, n, 4)
    q[:, :, n // 2 :] = torch.nan
    tape = Tape({("layer", 0): weights(q, k)})
    tape.page().save(tmp_path / "page.html")
    with shown(chromium, tape) as live, opened(chromium, (tmp_path / "page.html").as_uri()) as printed:
        for watched in (live, printed):
            assert NO_NUMBER in watched.colours(".sheet canvas")
            watched.go(view="map")
            assert NO_NUMBER in watched.colours(".deep canvas")
            watched.page.locator(".legend-label", has_text=" (grey: not a number)").wait_for()


def test_scale_and_colours_change_without_asking_again(watched):
    watched.go(view="map")
    asked, picture = len(watched.asked), watched.picture()
    for key in ("s", "s", "c", "t"):
        watched.press(key)
        before, picture = picture, watched.picture()
        assert picture != before
    assert len(watched.asked) == asked
    assert watched.state | {"scale": "linear", "palette": "viridis", "theme": "dark"} == watched.state


def test_an_address_restores_the_exact_view(watched, tape):
    watched.go(view="map", layer=2, head="max", at="10.5,4.5,9", scale="log", chosen="3,5")
    card, state, picture = watched.point(), watched.state, watched.picture()
    assert card == pytest.approx([float(dense(tape, "layers.2.attention").amax(0)[10, 4])], rel=1e-6)
    watched.page.reload()
    watched.page.wait_for_selector(".deep canvas")
    watched.settle()
    assert watched.state == state
    assert watched.point() == card
    assert watched.picture() == picture


def test_another_head_is_drawn_in_place_of_the_one_before(watched):
    at = "10.5,4.5,9"
    watched.go(view="map", layer=2, head=1, at=at)
    wanted = watched.picture()
    for other in ({"layer": 0, "head": 3}, {"layer": 2, "head": 2, "against": "head.0", "layout": "difference"}):
        watched.go(view="map", at=at, **other)
        watched.page.wait_for_timeout(500)
        assert watched.picture() != wanted
        watched.go(view="map", layer=2, head=1, at=at)
        watched.page.wait_for_timeout(500)
        assert watched.picture() == wanted


@pytest.mark.parametrize("hash", ["view=nonsense&layer=999&head=-1&at=x", "head=1e9&chosen=5&__proto__=1", "%%%&a=<b>"])
def test_a_nonsense_address_shows_what_can_be_shown(watched, hash):
    watched.page.evaluate("hash => { location.hash = hash }", hash)
    watched.settle()
    assert watched.page.locator("button.head").count() == DEPTH * HEADS


def test_keys_reach_views_heads_layers_and_help(watched):
    for number, name in ((2, "map"), (3, "text"), (4, "lines"), (5, "flow"), (1, "overview")):
        watched.press(str(number))
        assert watched.page.get_attribute(".stage", "data-view") == name
    watched.press("ArrowRight", "ArrowRight", "ArrowDown", "Enter")
    assert watched.state == {"view": "map", "layer": "1", "head": "1"}
    watched.press("]", "}")
    assert watched.state == {"view": "map", "layer": "2", "head": "2"}
    watched.press("m")
    assert watched.state["head"] == "mean"
    watched.press("?")
    assert watched.page.locator("dialog.help").is_visible()
    watched.press("Escape")
    assert not watched.page.locator("dialog.help").is_visible()


@pytest.mark.parametrize("view", ["overview", "map", "text", "lines", "flow"])
def test_narrow_windows_hold_the_whole_page(chromium, viewer, view):
    with opened(chromium, viewer.url, width=400) as watched:
        watched.go(view=view, chosen="7,7")
        reach = "all => Math.max(...all.map(one => one.getBoundingClientRect().right))"
        assert watched.page.locator("body, header, .right button, .bar > *, .links, .panel").evaluate_all(reach) <= 400
        assert watched.page.locator("[aria-current=page]").evaluate_all(reach) <= 400  # the list of views is scrolled


def test_every_control_has_a_name(watched):
    for name in ("overview", "map", "text", "lines", "flow"):
        watched.go(view=name, chosen="3,3")
        nameless = watched.page.evaluate(
            """[...document.querySelectorAll("button, input, select, [role=button]")]
                .filter(one => !one.getAttribute("aria-label") && !one.textContent.trim()).map(one => one.outerHTML)"""
        )
        assert nameless == []
        headings = watched.page.locator("h1, h2, h3, h4").evaluate_all("all => all.map(one => +one.tagName[1])")
        assert all(later <= one + 1 for one, later in pairwise(headings)), name  # no level is left out


def test_search_finds_words_phrases_and_numbers(watched):
    watched.go(view="map")
    watched.press("/")
    watched.page.keyboard.type("the quick")
    watched.settle()
    assert watched.text(".count") == "2"
    watched.press("Enter", "Enter")
    assert watched.text(".count") == "2 of 2"
    assert watched.state["chosen"] == "10,11"
    watched.page.fill(".search", "#7")
    watched.press("Enter")
    assert watched.state["chosen"] == "7,7"


def test_the_text_lists_the_strongest_links_and_follows_them(watched, tape):
    A = dense(tape, "layers.1.attention")[2]
    watched.go(view="text", layer=1, head=2)
    watched.page.click(".tok[data-n='12']")
    watched.settle()
    for side, values in (("query", A[12]), ("key", A[:, 12])):
        best = values.sort(descending=True)
        ends, found = watched.links(f"section[data-side={side}]")
        assert ends[:3] == best.indices[:3].tolist()
        assert found[:3] == pytest.approx(best.values[:3].tolist(), rel=6e-3)
    watched.press("Enter")
    follows = int(A[12].argmax())
    assert watched.state["chosen"] == f"{follows},{follows}"
    watched.page.go_back()
    watched.settle()
    assert watched.state["chosen"] == "12,12"


def test_a_sentence_is_chosen_as_a_whole(chromium):
    tape = text_tape(["Look", "there", ".", "Who", "is", "it", "?", "Nobody", "."])
    A = dense(tape, "layers.0.attention")[0]
    with shown(chromium, tape) as watched:
        watched.go(view="text", unit="sentences")
        watched.page.click(".tok[data-n='4']")
        watched.settle()
        assert watched.state["chosen"] == "3,6"
        given = {int(row[1]): float(row[3]) for row in watched.table() if row[0] == "looks at"}
        assert [given[n] for n in range(7)] == pytest.approx(A[3:7, :7].mean(0).tolist(), rel=1e-5)


def test_lines_draw_the_weights_of_every_head(watched, tape):
    A = dense(tape, "layers.1.attention")
    links = watched.page.locator("path.link")
    watched.go(view="lines", layer=1)
    assert links.count() == int((A > 0.02).sum())
    for head, i, _, j, _, weight, *_ in watched.table()[1::37]:
        assert float(weight) == pytest.approx(float(A[int(head), int(i), int(j)]), rel=1e-5)
    watched.page.click(".swatch >> nth=3")
    watched.settle()
    assert links.count() == int((A[3] > 0.02).sum())
    watched.go(view="lines", lines="model")
    assert watched.page.locator(".lines .thumb canvas").count() == DEPTH * HEADS


def test_flow_lists_the_rollout_of_a_token(watched, tape):
    best = rollout(tape.values(), token=14)[0].sort(descending=True)
    watched.go(view="flow", chosen="14,14")
    ends, found = watched.links(".flow aside")
    assert ends[:4] == best.indices[:4].tolist()
    assert found[:4] == pytest.approx(best.values[:4].tolist(), rel=6e-3)
    assert watched.page.locator(".charts circle").count() == 2 * DEPTH * HEADS


def test_alignment_joins_source_and_target(chromium):
    tape = translation_tape()
    A = dense(tape, "decoder.cross")[1]
    with shown(chromium, tape) as watched:
        watched.go(view="alignment", head=1, links="strongest")
        assert watched.page.locator("path.link").count() == len(TARGET)
        assert watched.page.locator(".columns .word text").all_text_contents() == [*SOURCE, *TARGET]
        cells = watched.page.locator(".matrix .cell").evaluate_all("cells => cells.map(cell => +cell.dataset.weight)")
        assert cells == pytest.approx(A.flatten().tolist(), rel=1e-5)


def test_a_patch_shows_where_it_looks(chromium):
    tape = picture_tape()
    A = dense(tape, "blocks.0.attention")[0]
    with shown(chromium, tape) as watched:
        watched.go(view="images")
        box = watched.page.locator("canvas.picture").bounding_box()

        def middle(row, col):
            return box["x"] + (col + 0.5) * box["width"] / 6, box["y"] + (row + 0.5) * box["height"] / 4

        watched.page.mouse.click(*middle(2, 1))
        watched.settle()
        assert watched.state["chosen"] == "14,14"  # 1 special token, 2 rows of 6 patches, 1 patch
        watched.page.mouse.move(*middle(3, 5))
        place, _, weight = watched.text(".subject output").partition(": ")
        assert place == "patch 3, 5"
        assert float(weight) == pytest.approx(float(A[14, 24]), rel=6e-4)
        assert watched.page.locator(".images .heads canvas").count() == 1 + 3  # the picture, and each head
        assert any(len(set(colour)) > 1 for colour in watched.colours(".images .heads canvas"))  # in its colours


def test_two_captures_stand_side_by_side_with_their_difference(chromium, tape):
    other = text_tape(seed=5)
    a, b = (float(dense(one, "layers.1.attention")[2, 12, 3]) for one in (tape, other))
    with shown(chromium, tape, other) as watched:
        watched.go(against="capture", sort="difference")
        watched.page.locator("button.head").nth(DEPTH * HEADS - 1).wait_for()
        assert watched.page.locator("button.head").count() == DEPTH * HEADS
        watched.go(view="map", layer=1, head=2, against="capture", at="12.5,3.5,8")
        assert watched.page.locator(".panel").count() == 3
        for panel in range(3):
            assert watched.point(panel) == pytest.approx([a, b, a - b], rel=1e-5)


def test_a_head_is_compared_with_another(watched, tape):
    A = dense(tape, "layers.1.attention")
    watched.go(view="map", layer=1, head=2, against="head.0", layout="difference", at="12.5,3.5,8")
    assert watched.point() == pytest.approx([float(A[2, 12, 3] - A[0, 12, 3])], rel=1e-5)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_follows_the_scheme_of_the_system(chromium, viewer, scheme):
    with opened(chromium, viewer.url, scheme=scheme) as watched:
        assert watched.page.get_attribute("html", "data-theme") == scheme


def test_the_map_is_exported_as_pixels_drawing_and_numbers(watched, tape):
    A = dense(tape, "layers.1.attention")[2]
    watched.go(view="map", layer=1, head=2)
    pixels = np.asarray(Image.open(io.BytesIO(watched.export("png"))).convert("RGB"))
    assert pixels.shape[1] == 2 * 1280
    assert len(np.unique(pixels[::7, ::7].reshape(-1, 3), axis=0)) > 50
    assert {"fox", "dog"} <= {text.strip() for text in ElementTree.fromstring(watched.export("svg")).itertext()}
    table = watched.table()[1:]
    assert len(table) == len(WORDS) ** 2
    for i, query, j, key, _, weight, *_ in table[::17]:
        assert (query, key) == (WORDS[int(i)], WORDS[int(j)])
        assert float(weight) == pytest.approx(float(A[int(i), int(j)]), rel=1e-6)


def test_the_text_is_exported_line_by_line_as_it_stands(watched):
    watched.go(view="text", chosen="3,3")
    drawing = ElementTree.fromstring(watched.export("svg"))
    texts = {}
    for element in drawing.findall(".//{http://www.w3.org/2000/svg}text[@x]"):  # without the ticks of the legend
        texts.setdefault(element.text, []).append((float(element.get("x")), float(element.get("y"))))
    boxes = watched.page.locator(".tok").evaluate_all(
        """all => all.map(one => { const box = one.querySelector("bdi").getBoundingClientRect();
            const stage = document.querySelector(".stage").getBoundingClientRect();
            return [one.textContent, box.left - stage.left, box.top - stage.top, box.bottom - stage.top]; })"""
    )
    for word, left, top, bottom in boxes:
        assert any(abs(x - left) < 1 and top < y < bottom for x, y in texts[word])


def test_the_offline_page_holds_the_same_views(chromium, tape, tmp_path):
    A = dense(tape, "layers.1.attention")
    path = tmp_path / "page.html"
    tape.page().save(path)
    with opened(chromium, path.as_uri()) as watched:
        assert watched.page.locator("button.head").count() == DEPTH * HEADS
        watched.go(view="map", layer=1, head=2, at="12.5,3.5,8")
        assert watched.point() == pytest.approx([float(A[2, 12, 3])], rel=1e-5)
        watched.go(view="text", layer=1, head="mean", chosen="12,12")
        assert watched.links("section[data-side=query]")[0][0] == int(A.mean(0)[12].argmax())
        watched.go(view="flow", chosen="14,14")
        assert watched.links(".flow aside")[0][0] == int(rollout(tape.values(), token=14)[0].argmax())
        watched.go(view="lines", layer=1)
        assert watched.page.locator("path.link").count() == pytest.approx(int((A > 0.02).sum()), abs=12)


def test_characters_without_a_look_are_shown_as_escapes(chromium):
    looks = {
        "<script>alert(1)</script>": "<script>alert(1)</script>",
        "\0": "␀",
        "\x1b[31m": "␛[31m",
        "a\u202eb": "aU+202Eb",
        "\u200b": "U+200B",
        "\ufeff": "U+FEFF",
        "\n": "↵",
        "👩‍👩‍👧‍👦": "👩‍👩‍👧‍👦",
        "שלום": "שלום",
        "日本語": "日本語",
        "": "∅",
    }
    with shown(chromium, text_tape([*looks])) as watched:
        watched.go(view="text")
        assert watched.page.locator(".tok").all_text_contents() == [*looks.values()]
        watched.go(view="lines")
        assert {"␀", "aU+202Eb", "↵"} <= set(watched.page.locator(".columns .word text").all_text_contents())


RUN, FETCH = "window.hit=1", "//elsewhere.test/x"
MARKUP = f"""<script>{RUN}</script>|</script><script>{RUN}//|<img src=x onerror={RUN}>|<svg onload={RUN}>
<svg/onload={RUN}>|<body onload={RUN}>|<iframe srcdoc='<script>parent.{RUN}</script>'>
<iframe src={FETCH}>|<img src={FETCH}>|<?xml?>|<|>|&|'|<link rel=stylesheet href={FETCH}>
<object data={FETCH}>|<style>@import '{FETCH}';*{{background:url({FETCH})}}</style>
<a href='javascript:{RUN}'>x</a>|<details open ontoggle={RUN}>|<input autofocus onfocus={RUN}>
<embed src={FETCH}>|&amp;|<math><mtext><script>{RUN}</script></mtext></math>
<template><script>{RUN}</script></template>|<marquee onstart={RUN}>
<noscript><img src=x onerror={RUN}>|<base href={FETCH}>
<meta http-equiv=refresh content='0;{FETCH}'>|<!--|-->|<![CDATA[
<foreignObject><script>{RUN}</script></foreignObject>|<use href={FETCH}#x>|<image href={FETCH}>
<form action={FETCH}>|]]>|<!DOCTYPE x [<!ENTITY e 'x'>]>|&e;|&lt;script&gt;|&#60;script&#62;
<video src=x onerror={RUN}>|"|`|\\|\\'|\\"|a"b|%00|%s|0|-1|'-{RUN}-'|";{RUN}//|${{{RUN}}}
{{{{{RUN}}}}}|javascript:{RUN}|data:text/html,<script>{RUN}</script>|*/{RUN}/*|" onclick="{RUN}
' onclick='{RUN}|__proto__|constructor|toString|hasOwnProperty|null|undefined|NaN|=1+1|+1|-1+1
@SUM(1)|=HYPERLINK("{FETCH}")|a,b|a;b|#view=map|http:{FETCH}|../../../etc/passwd|file:///etc/passwd
שלום|مرحبا|日本語|中文字|한국어|ไทย|हिन्दी|ᚠᚢᚦ|🙂|👩‍👩‍👧‍👦|🏳️‍🌈|🇫🇷"""
HIDDEN = [
    *range(33),
    0x7F,
    0x85,
    0xA0,
    0xAD,
    0x34F,
    0x61C,
    0x115F,
    0x180E,
    *range(0x2000, 0x2010),
    *range(0x2028, 0x2030),
]
HIDDEN += [*range(0x2060, 0x206A), 0x3000, 0x3164, 0xD800, 0xFEFF, 0xFFF9, 0xE0041]
HOSTILE = [*re.split(r"[|\n]", MARKUP), *map(chr, HIDDEN), "", "x" * 5000, "<b>" * 1000, "\u202e" * 300, "a\nb", "\t=1"]
HOSTILE += [f"a{char}b" for char in "\u202e\u2066\u200b\0\x1b"]
HOSTILE += [text + text for text in HOSTILE[: 200 - len(HOSTILE)]]
TAGS = {"svg", "g", "rect", "text", "tspan", "path", "line", "circle", "image", "clipPath", "title"}


def must_be_inert(drawing):
    """No element, attribute or address of a drawing can run or fetch anything."""
    for element in ElementTree.fromstring(drawing).iter():
        assert element.tag.removeprefix("{http://www.w3.org/2000/svg}") in TAGS
        for name, value in element.attrib.items():
            assert not name.lower().startswith("on")
            assert "href" not in name or value.startswith("data:image/png")


@pytest.mark.parametrize("scene", ["text", "translation", "caption"])
def test_hostile_texts_are_shown_and_exported_and_never_run(chromium, scene):
    assert len(HOSTILE) == 200
    tape, views = {
        "text": (text_tape(HOSTILE, depth=1, heads=2), ("overview", "map", "text", "lines", "flow")),
        "translation": (translation_tape(HOSTILE[:100], HOSTILE[100:]), ("text", "alignment")),
        "caption": (picture_tape(HOSTILE), ("images",)),
    }[scene]
    with shown(chromium, tape) as watched:
        for name in views:
            watched.go(view=name, chosen="3,3", find="script", at="20,20,24", window="40,40,64")
            watched.page.mouse.move(640, 420)
            must_be_inert(watched.export("svg"))
            Image.open(io.BytesIO(watched.export("png"))).verify()
            assert not any(field[:1] in ("=", "@") for row in watched.table() for field in row)
        assert watched.page.evaluate("window.hit") is None
        assert watched.page.locator("body script, body iframe, body img, body style").count() == 0


def test_hostile_texts_are_inert_in_the_offline_page(chromium, tmp_path):
    path = tmp_path / "page.html"
    text_tape(HOSTILE, depth=1, heads=1).page().save(path)
    with opened(chromium, path.as_uri()) as watched:
        for name in ("map", "text", "lines", "flow"):
            watched.go(view=name, chosen="3,3", find="script")
        assert watched.page.evaluate("window.hit") is None
