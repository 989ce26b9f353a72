"""Tapes: what a trained model attends to, from a run of ours or from a Hugging Face folder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from ..data import Pair
from ..data.image_files import read_image
from ..data.text import lines_in
from ..data.tokenizers import readable_pieces
from ..lens import Tape, capture
from ..train import own_device
from . import captioning, classification, language, run_folder, translation
from .image_inputs import ImageTransform
from .seq2seq_task import length_limit

# What comes after the last layer and looks at nothing; models trained on masked words have none.
POOLER = re.compile(r"(^|\.)pooler\.(?!.*att)")


def tape_of(
    folder: str | Path,
    *,
    text: str | None = None,
    target: str | None = None,
    image: str | Path | None = None,
    device: torch.device | str | None = None,
) -> Tape:
    """Every attention of the model in a folder while it reads a text or sees an image.

    A translator writes its translation of each line, or the lines of `target`; a captioner its caption, and a Hugging
    Face model with a decoder its own text, or `target`. The model runs on `device`, a GPU where there is one unless
    given.
    """
    folder = Path(folder)
    if (text is None) == (image is None):
        raise ValueError(f"give a text or an image, one of them, got {'neither' if text is None else 'both'}")
    if text is not None and not text.strip():
        raise ValueError("the text is empty; there is nothing to look at")
    if _is_hugging_face(folder):
        return _hugging_face(folder, text, target, image, own_device(device))
    try:
        checkpoint = run_folder.open_run(folder)
    except ValueError as error:
        raise ValueError(f"{error}, or the folder of a Hugging Face model, with its config.json") from None
    task = run_folder.task_of(checkpoint)
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
        targets = lines_in(target)
        if len(targets) != len(lines):
            raise ValueError(f"text and target must have as many lines, got {len(lines)} and {len(targets)}")
    return translator.tape([Pair(*pair) for pair in zip(lines, targets, strict=True)])


def _language(
    folder: Path, text: str | None, target: str | None, image: str | Path | None, device: torch.device
) -> Tape:
    _check_not_forced("a language model", target)
    return language.LanguageModel.load(folder, device=device).tape("\n".join(_lines("a language model", text)))


def _classification(
    folder: Path, text: str | None, target: str | None, image: str | Path | None, device: torch.device
) -> Tape:
    _check_not_forced("a classifier", target)
    classifier = classification.Classifier.load(folder, device=device)
    if isinstance(classifier.reads, ImageTransform):
        if image is None:
            raise ValueError("a classifier of images sees images; give --image")
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
    return lines_in(text)


def _check_not_forced(who: str, target: str | None) -> None:
    if target is not None:
        raise ValueError(f"{who} writes no text beside what it reads; leave out --target")


def _is_hugging_face(folder: Path) -> bool:
    config = folder / "config.json"
    if not config.is_file():
        return False
    try:
        found = json.loads(config.read_text("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise ValueError(f"{config} is no JSON; expected the config of a model") from None
    return isinstance(found, dict) and "model_type" in found


def _hugging_face(
    folder: Path, text: str | None, target: str | None, image: str | Path | None, device: torch.device
) -> Tape:
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
    if not config.is_encoder_decoder:
        _check_not_forced(f"a model of type {config.model_type}", target)
    kind = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModel
    model = _filled(kind, folder, here).eval().to(device)
    if image is not None:
        return _seen(transformers, model, folder, read_image(image), here)
    tokenizer = _part(transformers.AutoTokenizer, "tokenizer", "sees images give --image", folder, here)
    encoded = tokenizer(text, return_tensors="pt").to(device)
    _check_is_read("text", encoded["input_ids"], model)
    source = _named(tokenizer, encoded["input_ids"][0])
    if not config.is_encoder_decoder:
        with capture(model, source) as tape, torch.no_grad():
            model(**encoded)
        return tape
    if target is None:
        with torch.no_grad():
            written = model.generate(**encoded, **_most_written(model, len(source)))
    else:
        written = _forced(model, tokenizer, target).to(device)
        _check_is_read("target", written, model)
    names = _named(tokenizer, written[0])
    with capture(model, {"*": source, "*decoder*": names, **_crossing(names, source)}) as tape, torch.no_grad():
        model(**encoded, decoder_input_ids=written)
    return tape


def _filled(kind: Any, folder: Path, here: dict[str, Any]) -> Any:
    """The model with all its weights; transformers would make up those that the folder does not have."""
    try:
        model, told = kind.from_pretrained(folder, use_safetensors=True, output_loading_info=True, **here)
    except SafetensorError as error:
        raise ValueError(f"{folder} holds weights that cannot be read: {error}; get them again") from None
    except RuntimeError as error:
        if "mismatch" not in str(error):
            raise
        raise ValueError(f"{folder} holds weights of other shapes than its config.json says; get both again") from None
    missing = sorted(name for name in told["missing_keys"] if not POOLER.search(name))
    if missing:
        first = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise ValueError(
            f"{folder} lacks {len(missing)} of the tensors of a {type(model).__name__}: {first}; get all its files"
        )
    return model


def _part(kind: Any, what: str, otherwise: str, folder: Path, here: dict[str, Any]) -> Any:
    """What makes numbers of a text or an image for the model of a folder."""
    lacking = f"{folder} holds no {what} that transformers can read: if its model {otherwise}, else get all its files"
    try:
        part = kind.from_pretrained(folder, **here)
    except (OSError, ValueError) as error:
        raise ValueError(f"{lacking} ({error})") from None
    if hasattr(part, "get_vocab") and len(part.get_vocab().keys() - set(part.all_special_tokens)) < 2:
        raise ValueError(lacking)  # transformers makes one up, to which every word is unknown
    return part


def _most_written(model: Any, read: int) -> dict[str, int]:
    """How many tokens a model may write where its folder does not say; transformers would end every text at 20."""
    told = model.generation_config
    if told.max_length is not None or told.max_new_tokens is not None:
        return {}
    places = _most_tokens(model)
    return {"max_new_tokens": length_limit(read) if places is None else min(length_limit(read), places - 1)}


def _forced(model: Any, tokenizer: Any, target: str) -> Tensor:
    """What a decoder reads that is to write the target: the token it starts with, then those of the target."""
    settings = (model.generation_config, model.config)
    names = ("decoder_start_token_id", "bos_token_id")
    start = next((x for name in names for of in settings if (x := getattr(of, name, None)) is not None), None)
    if start is None:
        raise ValueError("the config names no token that decoding starts with; add decoder_start_token_id to it")
    ids = tokenizer(text_target=target.strip(), return_tensors="pt")["input_ids"]
    return torch.cat([torch.full_like(ids[:, :1], start), ids], 1)


def _check_is_read(what: str, ids: Tensor, model: Any) -> None:
    limit, n = _most_tokens(model), ids.shape[1]
    if limit is not None and n > limit:
        raise ValueError(f"the {what} has {n} tokens, and the model reads at most {limit}; shorten it")


def _most_tokens(model: Any) -> int | None:
    """How many tokens it has positions for, if it says so; some count them from that of padding on."""
    limit: int | None = getattr(model.config, "max_position_embeddings", None)
    places = (part for name, part in model.named_modules() if name.endswith("position_embeddings"))
    padded = [part for part in places if getattr(part, "padding_idx", None) is not None]
    return padded[0].num_embeddings - padded[0].padding_idx - 1 if limit is not None and padded else limit


def _named(tokenizer: Any, ids: Tensor) -> list[str]:
    """What each id is called, for showing."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    return readable_pieces(tokenizer.convert_ids_to_tokens(ids), getattr(inner, "decoder", None))


def _crossing(target: Sequence[str], source: Sequence[str]) -> dict[str, tuple[list[str], list[str]]]:
    """The names architectures give to the layers between their two halves."""
    patterns = ("*decoder*encoder_attn*", "*decoder*EncDecAttention*", "*decoder*crossattention*")
    return dict.fromkeys(patterns, (list(target), list(source)))


def _seen(transformers: Any, model: Any, folder: Path, pixels: Any, here: dict[str, Any]) -> Tape:
    model = getattr(model, "vision_model", model)  # one that reads texts as well has a part that sees
    fitted = {"use_fast": False, **here}
    processor = _part(transformers.AutoImageProcessor, "image processor", "reads text give --text", folder, fitted)
    values = processor(pixels, return_tensors="pt")["pixel_values"]
    with capture(model) as tape, torch.no_grad():
        model(pixel_values=values.to(model.device))
    patch = getattr(model.config, "patch_size", None)
    if patch is not None:
        rows, cols = values.shape[-2] // patch, values.shape[-1] // patch
        shown = (values - values.amin()) / (values.amax() - values.amin()).clamp(min=1e-6)
        special = tape[0].shape[-1] - rows * cols
        if special >= 0:
            tape.picture(shown, patches=(rows, cols), special=special)
    return tape
