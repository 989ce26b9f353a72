"""A page in a real browser, and what must not happen on it."""

from __future__ import annotations

import csv
import io
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

from regard.views import view

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
ARGUMENTS += ["--disable-component-update", "--disable-sync"]


class Watched:
    """A page, and what must not happen on it."""

    def __init__(self, page):
        self.page, self.asked, self.wrong = page, [], []
        page.on("console", lambda said: said.type in ("error", "warning") and self.wrong.append(said.text))
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("dialog", lambda dialog: (self.wrong.append(f"dialog {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda asked: self.asked.append(asked.url))
        page.add_init_script(
            "addEventListener('securitypolicyviolation', event => console.error('policy', event.violatedDirective))"
        )

    def go(self, **state):
        """Another state by its address, as a link would."""
        hash = "&".join(f"{name}={value}" for name, value in state.items())
        self.page.evaluate("hash => { location.hash = hash }", hash)
        self.settle()

    def settle(self):
        """Until nothing has been waited for in a while: colours follow 60 ms after the last tile."""
        calm = 0
        for _ in range(800):
            calm = 0 if self.page.evaluate("document.querySelector('.bar.waiting') !== null") else calm + 1
            if calm == 5:
                return
            self.page.wait_for_timeout(20)
        raise AssertionError("the page still waits for answers")

    def until(self, script, argument=None):
        """Until a script returns true; `wait_for_function` would evaluate it in the page, which its policy forbids."""
        for _ in range(1500):
            if self.page.evaluate(script, argument):
                return
            self.page.wait_for_timeout(20)
        raise AssertionError(f"still not true: {script}")

    def press(self, *keys):
        for key in keys:
            self.page.keyboard.press(key)
        self.settle()

    @property
    def state(self):
        return dict(part.split("=", 1) for part in self.page.url.partition("#")[2].split("&") if part)

    def text(self, selector):
        return self.page.locator(selector).first.inner_text()

    def numbers(self, selector):
        """Numbers as they stand on the page, with its own minus signs."""
        return [float(text.replace("−", "-")) for text in self.page.locator(selector).all_inner_texts()]

    def links(self, selector):
        """Tokens and weights of the links listed."""
        ends = self.page.locator(f"{selector} li button").evaluate_all("all => all.map(one => +one.dataset.n)")
        return ends, self.numbers(f"{selector} li .number")

    def point(self, panel=0):
        """Put the pointer on the middle of a map; the weights that its card shows."""
        box = self.page.locator(".panel .deep").nth(panel).bounding_box()
        self.page.mouse.move(box["x"], box["y"] - 30)
        self.page.mouse.move(box["x"] + box["width"] / 2 + 1, box["y"] + box["height"] / 2 + 1)
        self.page.wait_for_selector(".card .value[data-weight]")
        return self.page.locator(".card .value").evaluate_all("all => all.map(one => +one.dataset.weight)")

    def colours(self, selector):
        """The colours on a canvas, each once."""
        script = """canvas => {
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            return [...new Set(new Uint32Array(data.buffer))].map((one) => [one, one >> 8, one >> 16]);
        }"""
        return [tuple(part & 255 for part in one) for one in self.page.locator(selector).first.evaluate(script)]

    def picture(self):
        return self.page.evaluate("document.querySelector('.deep canvas').toDataURL()")

    def export(self, kind):
        self.page.keyboard.press("e")
        with self.page.expect_download() as waiting:
            self.page.click(f"[data-kind={kind}]")
        return Path(waiting.value.path()).read_bytes()

    def table(self):
        return list(csv.reader(io.StringIO(self.export("csv").decode())))


@contextmanager
def opened(chromium, url, *, scheme="light", width=1280, script=""):
    """A page on which nothing goes wrong and nothing is asked of anyone else; `script` runs before its own."""
    home = url.partition("?")[0]
    size = {"width": width, "height": 800}
    context = chromium.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce")
    try:
        watched = Watched(context.new_page())
        watched.page.add_init_script(script)
        watched.page.goto(url)
        watched.page.wait_for_selector(".stage > *")
        watched.settle()
        yield watched
        assert watched.wrong == []
        assert [asked for asked in watched.asked if not asked.startswith((home, "blob:", "data:"))] == []
    finally:
        context.close()


@contextmanager
def shown(chromium, *tapes, **window):
    with view(*tapes, open_browser=False) as viewer, opened(chromium, viewer.url, **window) as watched:
        yield watched
