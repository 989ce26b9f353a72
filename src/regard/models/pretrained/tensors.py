"""The safetensors files of a folder; headers are checked before anything is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 10_000_000
FLOATS = ("F64", "F32", "F16", "BF16")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, by its name there."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


def list_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor of the folder by name; only headers are read."""
    found: dict[str, StoredTensor] = {}
    for file in _files(folder):
        _check_header(file)
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118  not a mapping
                    if name in found:
                        raise ValueError(f"{file} and {found[name].file} both hold {name!r}")
                    part = opened.get_slice(name)
                    found[name] = StoredTensor(file, name, tuple(part.get_shape()), part.get_dtype())
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is damaged: {error}") from None
    return found


def read_tensors(wanted: list[StoredTensor]) -> Iterator[tuple[StoredTensor, Tensor]]:
    """Yield each of the tensors, file by file."""
    for file in dict.fromkeys(one.file for one in wanted):
        with safe_open(file, "pt") as opened:
            for one in wanted:
                if one.file == file:
                    yield one, opened.get_tensor(one.name)


def check_floating_point(one: StoredTensor) -> None:
    """Raise unless a tensor holds floating-point numbers as models compute with them."""
    if one.dtype not in FLOATS:
        raise ValueError(f"{one.file}: {one.name} must have dtype {', '.join(FLOATS)}, got {one.dtype}")


def _files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        try:
            names = sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ValueError(f"{folder / INDEX} must hold a weight_map from tensors to files") from None
        for name in names:
            if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
                raise ValueError(f"{folder / INDEX} must name safetensors files of the same folder, got {name!r}")
            if not (folder / name).is_file():
                raise ValueError(f"{folder / INDEX} names {name}, which is not in the folder")
        return [folder / name for name in names]
    for pattern in PICKLES:
        for file in folder.glob(pattern):
            raise ValueError(
                f"{file} is a pickle, and opening it would run its code; "
                f"if you trust it, save the model as {WEIGHTS} with save_pretrained of transformers"
            )
    raise ValueError(f"{folder} must hold {WEIGHTS} or {INDEX}; expected a Hugging Face folder")


def _check_header(file: Path) -> None:
    size = file.stat().st_size
    with file.open("rb") as opened:
        header = int.from_bytes(opened.read(8), "little")
    if header > min(MAX_HEADER_BYTES, size):
        limit = f"at most {MAX_HEADER_BYTES} are accepted, and the file has {size}"
        raise ValueError(f"{file} is damaged: its header claims {header} bytes; {limit}")
