"""Tapes: what a trained model attends to, from a run of ours or from a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data import Pair
from ..data.pictures import read_image
from ..data.tokenizers import spelled
from ..lens import Tape, capture
from ..train import own_device
from . import captioning, classification, language, runs, translation


def tape_of(
    folder: str | Path,
    *,
    text: str | None = None,
    target: str | None = None,
    image: str | Path | None = None,
    device: torch.device | str | None = None,
) -> Tape:
    """Every attention of the model in a folder while it reads a text or sees an image.

    A translator writes its translation of each line, or the lines of `target`; a captioner its caption. The model runs
    on `device`, a GPU where there is one unless given.
    """
    folder = Path(folder)
    if (text is None) == (image is None):
        raise ValueError(f"give a text or an image, one of them, got {'neither' if text is None else 'both'}")
    if text is not None and not text.strip():
        raise ValueError("the text is empty; there is nothing to look at")
    if _is_hugging_face(folder):
        return _hugging_face(folder, text, image, own_device(device))
    task = runs.task_of(runs.opened(folder))
    if task not in TAPES:
        raise ValueError(f"{folder} is of the task {task!r}; expected a run of {', '.join(TAPES)}")
    return TAPES[task](folder, text, target, image, own_device(device))


def _translation(
    folder: Path, text: str | None, target: str | None, image: str | Path | None, device: torch.device
) -> Tape:
    lines = _lines("a translator", text)
    translator = translation.Translator.load(folder, device=device)
    if target is None:
        targets = [one.text for one in translator.translate(lines)]
    else:
        targets = target.splitlines()
        if len(targets) != len(lines):
            raise ValueError(f"text and target must have as many lines, got {len(lines)} and {len(targets)}")
    return translator.tape([Pair(*pair) for pair in zip(lines, targets, strict=True)])


def _language(
    folder: Path, text: str | None, target: str | None, image: str | Path | None, device: torch.device
) -> Tape:
    return language.LanguageModel.load(folder, device=device).tape("\n".join(_lines("a language model", text)))


def _classification(
    folder: Path, text: str | None, target: str | None, image: str | Path | None, device: torch.device
) -> Tape:
    classifier = classification.Classifier.load(folder, device=device)
    if image is not None:
        return classifier.tape([read_image(image)])
    lines = _lines("a classifier of texts", text)
    for number, long in enumerate(classifier.too_long(lines), start=1):
        if long:
            most = classifier.limit
            raise ValueError(f"line {number} of the text has more than the {most} tokens the model reads; shorten it")
    return classifier.tape(lines)


def _captioning(
    folder: Path, text: str | None, target: str | None, image: str | Path | None, device: torch.device
) -> Tape:
    if image is None:
        raise ValueError("a captioner sees images; give --image")
    describer = captioning.Describer.load(folder, device=device)
    pixels = read_image(image)
    caption = describer.describe([pixels])[0].text if target is None else target.strip()
    return describer.tape([pixels], [caption])


TAPES: dict[str, Callable[[Path, str | None, str | None, str | Path | None, torch.device], Tape]] = {
    translation.TASK: _translation,
    language.TASK: _language,
    classification.TASK: _classification,
    captioning.TASK: _captioning,
}


def _lines(who: str, text: str | None) -> list[str]:
    if text is None:
        raise ValueError(f"{who} reads text; give --text")
    return text.splitlines()


def _is_hugging_face(folder: Path) -> bool:
    config = folder / "config.json"
    if not config.is_file():
        return False
    try:
        found = json.loads(config.read_text("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise ValueError(f"{config} is no JSON; expected the config of a model") from None
    return isinstance(found, dict) and "model_type" in found


def _hugging_face(folder: Path, text: str | None, image: str | Path | None, device: torch.device) -> Tape:
    """By transformers, whatever the architecture; weights from safetensors alone, and no code from the folder."""
    try:
        import transformers
    except ImportError:
        raise ValueError("a Hugging Face folder is read by transformers; pip install 'regard[hf]'") from None
    if not list(folder.glob("*.safetensors")):
        raise ValueError(f"{folder} holds no .safetensors; other weights may run code when they are read")
    here: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(folder, **here)
    kind = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModel
    model = kind.from_pretrained(folder, use_safetensors=True, **here).eval().to(device)
    if image is not None:
        return _seen(transformers, model, folder, read_image(image), here)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **here)
    encoded = tokenizer(text, return_tensors="pt").to(device)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and encoded["input_ids"].shape[1] > limit:
        raise ValueError(
            f"the text has {encoded['input_ids'].shape[1]} tokens, and the model reads at most {limit}; shorten it"
        )
    source = _named(tokenizer, encoded["input_ids"][0])
    if not config.is_encoder_decoder:
        with capture(model, source) as tape, torch.no_grad():
            model(**encoded)
        return tape
    with torch.no_grad():
        written = model.generate(**encoded)
    target = _named(tokenizer, written[0])
    with capture(model, {"*": source, "*decoder*": target, **_crossing(target, source)}) as tape, torch.no_grad():
        model(**encoded, decoder_input_ids=written)
    return tape


def _named(tokenizer: Any, ids: Tensor) -> list[str]:
    """What each id is called, for showing."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    return spelled(tokenizer.convert_ids_to_tokens(ids), getattr(inner, "decoder", None))


def _crossing(target: Sequence[str], source: Sequence[str]) -> dict[str, tuple[list[str], list[str]]]:
    """The names architectures give to the layers between their two halves."""
    patterns = ("*decoder*encoder_attn*", "*decoder*EncDecAttention*", "*decoder*crossattention*")
    return dict.fromkeys(patterns, (list(target), list(source)))


def _seen(transformers: Any, model: Any, folder: Path, pixels: Any, here: dict[str, Any]) -> Tape:
    processor = transformers.AutoImageProcessor.from_pretrained(folder, use_fast=False, **here)
    values = processor(pixels, return_tensors="pt")["pixel_values"]
    with capture(model) as tape, torch.no_grad():
        model(values.to(model.device))
    patch = getattr(model.config, "patch_size", None)
    if patch is not None:
        rows, cols = values.shape[-2] // patch, values.shape[-1] // patch
        shown = (values - values.amin()) / (values.amax() - values.amin()).clamp(min=1e-6)
        special = tape[0].shape[-1] - rows * cols
        if special >= 0:
            tape.picture(shown, patches=(rows, cols), special=special)
    return tape
