"""Capture the attention of a trained model, from a run or from a Hugging Face folder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
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

# Weights after the last layer without attention, which masked language models do not save.
POOLER = re.compile(r"(^|\.)pooler\.(?!.*att)")


def tape_of(
    folder: str | Path,
    *,
    text: str | None = None,
    target: str | None = None,
    image: str | Path | None = None,
    device: torch.device | str | None = None,
) -> Tape:
    """Capture all attention of the model in a folder while it reads a text or an image.

    A translator writes its translation of each line, or the lines of `target`; a captioner writes its caption, and a
    Hugging Face model with a decoder its own text, or `target`. `device` is by default a GPU if there is one.
    """
    folder = Path(folder)
    if (text is None) == (image is None):
        raise ValueError(f"give either a text or an image, got {'neither' if text is None else 'both'}")
    if text is not None and not text.strip():
        raise ValueError("the text is empty")
    if _is_hugging_face(folder):
        return _hugging_face(folder, text, target, image, own_device(device))
    try:
        checkpoint = run_folder.open_run(folder)
    except ValueError as error:
        raise ValueError(f"{error}, or the folder of a Hugging Face model, with its config.json") from None
    task = run_folder.task_of(checkpoint)
    if task not in TAPES:
        raise ValueError(f"{folder} is a run of the task {task!r}; expected one of {', '.join(TAPES)}")
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
            raise ValueError(f"text and target must have the same number of lines, got {len(lines)} and {len(targets)}")
    return translator.tape([Pair(*pair) for pair in zip(lines, targets, strict=True)])


def _language(
    folder: Path, text: str | None, target: str | None, image: str | Path | None, device: torch.device
) -> Tape:
    _check_no_target("a language model", target)
    return language.LanguageModel.load(folder, device=device).tape("\n".join(_lines("a language model", text)))


def _classification(
    folder: Path, text: str | None, target: str | None, image: str | Path | None, device: torch.device
) -> Tape:
    _check_no_target("a classifier", target)
    classifier = classification.Classifier.load(folder, device=device)
    if isinstance(classifier.reads, ImageTransform):
        if image is None:
            raise ValueError("this classifier reads images; give --image")
        return classifier.tape([read_image(image)])
    lines = _lines("a classifier of texts", text)
    for number, long in enumerate(classifier.too_long(lines), start=1):
        if long:
            most = classifier.limit
            raise ValueError(
                f"line {number} of the text has more than {most} tokens, the maximum of the model; shorten it"
            )
    return classifier.tape(lines)


def _captioning(
    folder: Path, text: str | None, target: str | None, image: str | Path | None, device: torch.device
) -> Tape:
    if image is None:
        raise ValueError("a captioner reads images; give --image")
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


def _check_no_target(who: str, target: str | None) -> None:
    if target is not None:
        raise ValueError(f"{who} has no decoder to write a target; leave out --target")


def _is_hugging_face(folder: Path) -> bool:
    config = folder / "config.json"
    if not config.is_file():
        return any(folder.glob("*.gguf"))
    try:
        found = json.loads(config.read_text("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise ValueError(f"{config} is not valid JSON; expected the config of a model") from None
    return isinstance(found, dict) and "model_type" in found


def _hugging_face(
    folder: Path, text: str | None, target: str | None, image: str | Path | None, device: torch.device
) -> Tape:
    """Capture a model of any architecture by transformers; reads safetensors or GGUF, runs no code of a folder."""
    try:
        import transformers
    except ImportError:
        raise ValueError("reading a Hugging Face folder needs transformers; pip install 'regard[hf]'") from None
    here: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False, **_weights_file(folder)}
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(folder, **here)
    if not config.is_encoder_decoder:
        _check_no_target(f"a model of type {config.model_type}", target)
    writes = any(name.endswith("ForCausalLM") for name in config.architectures or ())
    kind: Any = transformers.AutoModelForCausalLM if writes and image is None else transformers.AutoModel
    kind = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else kind
    model = _load_complete(kind, folder, here).eval().to(device)
    if image is not None:
        return _capture_image(transformers, model, folder, read_image(image), here)
    tokenizer = _load_processor(transformers.AutoTokenizer, "tokenizer", "reads images, give --image", folder, here)
    encoded = tokenizer(text, return_tensors="pt").to(device)
    _check_length("text", encoded["input_ids"], model)
    source = _labels(tokenizer, encoded["input_ids"][0])
    if not config.is_encoder_decoder:
        with capture(model.base_model, source) as tape, torch.no_grad():
            out = model(**encoded)
        if "logits" in out and out.logits.shape[:2] == encoded["input_ids"].shape:
            tape.predict(out.logits, encoded["input_ids"], lambda ids: _labels(tokenizer, ids))
        return tape
    if target is None:
        with torch.no_grad():
            written = model.generate(**encoded, **_generation_limit(model, len(source)))
    else:
        written = _decoder_input(model, tokenizer, target).to(device)
        _check_length("target", written, model)
    names = _labels(tokenizer, written[0])
    with capture(model, {"*": source, "*decoder*": names, **_cross_labels(names, source)}) as tape, torch.no_grad():
        out = model(**encoded, decoder_input_ids=written)
    tape.predict(out.logits, written, lambda ids: _labels(tokenizer, ids), layers="*decoder*")
    return tape


def _weights_file(folder: Path) -> dict[str, str]:
    """Return the GGUF file that a folder without safetensors has, as an argument of transformers."""
    if any(folder.glob("*.safetensors")):
        return {}
    found = sorted(path.name for path in folder.glob("*.gguf"))
    if not found:
        raise ValueError(
            f"{folder} has no .safetensors or .gguf file; other formats are not read, since they may run code"
        )
    if len(found) > 1:
        raise ValueError(
            f"{folder} has {len(found)} models, {', '.join(found[:3])}; put the one to read in its own folder"
        )
    if find_spec("gguf") is None:
        raise ValueError(f"reading {found[0]} needs the package gguf; pip install gguf")
    return {"gguf_file": found[0]}


def _load_complete(kind: Any, folder: Path, here: dict[str, Any]) -> Any:
    """Load a model; raise if the folder lacks weights, which transformers would initialize at random."""
    try:
        model, info = kind.from_pretrained(folder, use_safetensors=True, output_loading_info=True, **here)
    except SafetensorError as error:
        raise ValueError(f"cannot read the weights in {folder}: {error}; download them again") from None
    except RuntimeError as error:
        if "mismatch" not in str(error):
            raise
        raise ValueError(
            f"the weights in {folder} have other shapes than its config.json says; download both again"
        ) from None
    missing = sorted(name for name in info["missing_keys"] if not POOLER.search(name))
    if missing:
        first = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise ValueError(
            f"{folder} lacks {len(missing)} tensors of a {type(model).__name__}: {first}; download all its files"
        )
    return model


def _load_processor(kind: Any, what: str, otherwise: str, folder: Path, here: dict[str, Any]) -> Any:
    """Load the tokenizer or the image processor of a folder."""
    lacking = (
        f"{folder} has no {what} that transformers can read: if its model {otherwise}, else download all its files"
    )
    try:
        part = kind.from_pretrained(folder, **here)
    except (OSError, ValueError) as error:
        raise ValueError(f"{lacking} ({error})") from None
    if hasattr(part, "get_vocab") and len(part.get_vocab().keys() - set(part.all_special_tokens)) < 2:
        raise ValueError(lacking)  # transformers returned an empty one, to which every word is unknown
    return part


def _generation_limit(model: Any, read: int) -> dict[str, int]:
    """Return the length limit of generation if the folder sets none; transformers would stop at 20 tokens."""
    settings = model.generation_config
    if settings.max_length is not None or settings.max_new_tokens is not None:
        return {}
    places = _max_positions(model)
    return {"max_new_tokens": length_limit(read) if places is None else min(length_limit(read), places - 1)}


def _decoder_input(model: Any, tokenizer: Any, target: str) -> Tensor:
    """Return the decoder input that forces the target: its start token, then the tokens of the target."""
    settings = (model.generation_config, model.config)
    names = ("decoder_start_token_id", "bos_token_id")
    start = next((x for name in names for of in settings if (x := getattr(of, name, None)) is not None), None)
    if start is None:
        raise ValueError("the config has no start token for decoding; add decoder_start_token_id to it")
    ids = tokenizer(text_target=target.strip(), return_tensors="pt")["input_ids"]
    return torch.cat([torch.full_like(ids[:, :1], start), ids], 1)


def _check_length(what: str, ids: Tensor, model: Any) -> None:
    limit, n = _max_positions(model), ids.shape[1]
    if limit is not None and n > limit:
        raise ValueError(f"the {what} has {n} tokens, but the model reads at most {limit}; shorten it")


def _max_positions(model: Any) -> int | None:
    """Return the number of positions, None if unknown; some models number them from the padding index on."""
    limit: int | None = getattr(model.config, "max_position_embeddings", None)
    places = (part for name, part in model.named_modules() if name.endswith("position_embeddings"))
    padded = [part for part in places if getattr(part, "padding_idx", None) is not None]
    return padded[0].num_embeddings - padded[0].padding_idx - 1 if limit is not None and padded else limit


def _labels(tokenizer: Any, ids: Tensor | list[int]) -> list[str]:
    """Return the text of each token."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    return readable_pieces(tokenizer.convert_ids_to_tokens(ids), getattr(inner, "decoder", None))


def _cross_labels(target: Sequence[str], source: Sequence[str]) -> dict[str, tuple[list[str], list[str]]]:
    """Return the labels of cross-attention layers, by the names that architectures give them."""
    patterns = ("*decoder*encoder_attn*", "*decoder*EncDecAttention*", "*decoder*crossattention*")
    return dict.fromkeys(patterns, (list(target), list(source)))


def _capture_image(transformers: Any, model: Any, folder: Path, pixels: Any, here: dict[str, Any]) -> Tape:
    model = getattr(model, "vision_model", model)  # models that also read text have a vision part
    fitted = {"use_fast": False, **here}
    processor = _load_processor(
        transformers.AutoImageProcessor, "image processor", "reads text, give --text", folder, fitted
    )
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
