"""Wire format: a frame is a JSON header and the arrays that it describes, encoded for a browser.

A frame is the length of the header as four bytes, the header, and the arrays one after the other, each aligned to eight
bytes, little-endian. Weights range over many powers of ten, so codes of 8 and 16 bits are logarithmic: the relative
error is bounded, and the browser can change its colours without another request. NaN has a code of its own.
"""

from __future__ import annotations

import json
import struct
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

FINE, COARSE = 512, 12  # steps per octave of 16-bit codes, which are signed, and of 8-bit codes
LARGEST = {"i2": 32767, "u1": 254}  # the code of the largest number
NO_NUMBER = {"i2": -32768, "u1": 255}  # the code of NaN
TYPES = {"f4": "<f4", "i2": "<i2", "u1": "|u1", "u2": "<u2", "u4": "<u4"}


class Certainty(NamedTuple):
    """How far the numbers of an answer can be trusted; every frame carries it, and the browser shows it beside them.

    The states: "exact", but for `error`; "pooled", from the means of larger cells; "sampled", from some queries;
    "partial", at least this much, from the strongest links alone.
    """

    state: Literal["exact", "pooled", "sampled", "partial"] = "exact"
    error: float = 0.0  # the largest relative error of how the numbers are coded
    retry: float | None = None  # seconds until better numbers may be ready, None if none will come
    of: tuple[int, int] | None = None  # how many queries of how many were sampled, or links of each token are held


EXACT = Certainty()


class Coded(NamedTuple):
    """An encoded array, and how to decode it."""

    values: npt.NDArray[Any]
    code: dict[str, Any]


def plain(x: Tensor, kind: str = "f4") -> Coded:
    """Encode the numbers as they are."""
    return Coded(x.detach().cpu().contiguous().numpy().astype(TYPES[kind]), {"type": kind})


def fine(x: Tensor) -> Coded:
    """Encode by sign(c) 2 ** ((abs(c) - 32767) / 512): numbers from -1 to 1 within 0.07 %, below 2 ** -64 as 0."""
    values = _numbers(x)
    return _with_nan_code(values, np.sign(values) * _steps(values, FINE, LARGEST["i2"]), {"type": "i2", "steps": FINE})


def coarse(x: Tensor) -> Coded:
    """Encode by 2 ** ((c - 254) / 12): numbers from 0 to 1 within 3 %, below 4.4e-7 as 0."""
    values = _numbers(x)
    return _with_nan_code(values, _steps(values, COARSE, LARGEST["u1"]), {"type": "u1", "steps": COARSE})


def linear(x: Tensor) -> Coded:
    """Encode by low + (high - low) c / 254: numbers within a 508th of their range."""
    values = _numbers(x)
    known = values[~np.isnan(values)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 0.0)
    steps = np.rint((values - low) * (LARGEST["u1"] / (high - low))) if high > low else np.zeros_like(values)
    return _with_nan_code(values, steps, {"type": "u1", "range": [low, high]})


def error(steps: int) -> float:
    """Return the largest relative error of a logarithmic code."""
    return 2 ** (0.5 / steps) - 1


def frame(arrays: dict[str, Coded], certainty: Certainty = EXACT, **header: Any) -> bytes:
    """Return the bytes of a frame."""
    described = [{"name": name, **x.code, "shape": list(x.values.shape)} for name, x in arrays.items()]
    text = json.dumps({**certainty._asdict(), **header, "arrays": described}, separators=(",", ":")).encode()
    text += b" " * (-(4 + len(text)) % 8)
    parts = [struct.pack("<I", len(text)), text]
    for x in arrays.values():
        raw = x.values.tobytes()
        parts += [raw, bytes(-len(raw) % 8)]
    return b"".join(parts)


def parse_frame(raw: bytes) -> tuple[dict[str, Any], dict[str, npt.NDArray[np.float64]]]:
    """Return the header and the decoded arrays of a frame, as the browser does."""
    (n,) = struct.unpack_from("<I", raw)
    header = json.loads(raw[4 : 4 + n])
    arrays, at = {}, 4 + n
    for x in header["arrays"]:
        count = int(np.prod(x["shape"], dtype=np.int64))
        codes = np.frombuffer(raw, TYPES[x["type"]], count, at).reshape(x["shape"])
        arrays[x["name"]] = _values(codes, x)
        at += -(-codes.nbytes // 8) * 8
    return header, arrays


def _numbers(x: Tensor) -> npt.NDArray[np.float64]:
    """Return float64 numbers, with infinities as the largest finite ones."""
    return np.nan_to_num(x.detach().cpu().double().numpy(), nan=np.nan)


def _with_nan_code(values: npt.NDArray[np.float64], codes: npt.NDArray[np.float64], code: dict[str, Any]) -> Coded:
    """Return codes, with the code of NaN where a value is NaN."""
    kind = code["type"]
    return Coded(np.where(np.isnan(values), NO_NUMBER[kind], codes).astype(TYPES[kind]), code)


def _steps(values: npt.NDArray[np.float64], steps: int, top: int) -> npt.NDArray[np.float64]:
    size = np.abs(values)
    codes = np.rint(np.log2(size, where=size > 0, out=np.full_like(size, -np.inf)) * steps) + top
    return np.where(codes >= 1, np.minimum(codes, top), 0)


def _values(codes: npt.NDArray[Any], code: dict[str, Any]) -> npt.NDArray[np.float64]:
    c = codes.astype(np.float64)
    if not {"steps", "range"} & code.keys():
        return c
    top = LARGEST[code["type"]]
    if "steps" in code:
        values = np.where(c == 0, 0.0, np.sign(c) * 2 ** ((np.abs(c) - top) / code["steps"]))
    else:
        low, high = code["range"]
        values = low + (high - low) * c / top
    return np.where(c == NO_NUMBER[code["type"]], np.nan, values)
