"""Frames: numbers on their way to a browser, arrays behind a JSON header that says what they are.

A frame is the header's length as four bytes, the header, and the arrays one after the other, each at a multiple of
eight bytes, little-endian. Weights range over many powers of ten, so where they are coded it is by their logarithm: the
error is relative and known, and the browser chooses its colours without asking again.
"""

from __future__ import annotations

import json
import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

FINE, COARSE = 512, 12  # steps an octave: of 16-bit codes, which have a sign, and of 8-bit codes
TYPES = {"f4": "<f4", "i2": "<i2", "u1": "|u1", "u2": "<u2", "u4": "<u4"}


class Coded(NamedTuple):
    """An array, and how to read it."""

    values: npt.NDArray[Any]
    code: dict[str, Any]


def plain(x: Tensor, kind: str = "f4") -> Coded:
    """The numbers themselves."""
    return Coded(x.detach().cpu().contiguous().numpy().astype(TYPES[kind]), {"type": kind})


def fine(x: Tensor) -> Coded:
    """sign(c) 2 ** ((abs(c) - 32767) / 512): numbers from -1 to 1 within 0.07 %, below 2 ** -64 as 0."""
    values = np.nan_to_num(x.detach().cpu().double().numpy())
    return Coded((np.sign(values) * _steps(values, FINE, 32767)).astype("<i2"), {"type": "i2", "steps": FINE})


def coarse(x: Tensor) -> Coded:
    """2 ** ((c - 255) / 12): numbers from 0 to 1 within 3 %, below 4.2e-7 as 0."""
    values = np.nan_to_num(x.detach().cpu().double().numpy())
    return Coded(_steps(values, COARSE, 255).astype("u1"), {"type": "u1", "steps": COARSE})


def linear(x: Tensor) -> Coded:
    """low + (high - low) c / 255: numbers within a 510th of their range."""
    values = np.nan_to_num(x.detach().cpu().double().numpy())
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
    steps = np.rint((values - low) * (255 / (high - low))) if high > low else np.zeros_like(values)
    return Coded(steps.astype("u1"), {"type": "u1", "range": [low, high]})


def error(steps: int) -> float:
    """The largest relative error of a logarithmic code."""
    return 2 ** (0.5 / steps) - 1


def frame(arrays: dict[str, Coded], **header: Any) -> bytes:
    """The bytes of a frame."""
    described = [{"name": name, **x.code, "shape": list(x.values.shape)} for name, x in arrays.items()]
    text = json.dumps({**header, "arrays": described}, separators=(",", ":")).encode()
    text += b" " * (-(4 + len(text)) % 8)
    parts = [struct.pack("<I", len(text)), text]
    for x in arrays.values():
        raw = x.values.tobytes()
        parts += [raw, bytes(-len(raw) % 8)]
    return b"".join(parts)


def parsed(raw: bytes) -> tuple[dict[str, Any], dict[str, npt.NDArray[np.float64]]]:
    """The header and the arrays of a frame, codes undone: what a browser does with it."""
    (n,) = struct.unpack_from("<I", raw)
    header = json.loads(raw[4 : 4 + n])
    arrays, at = {}, 4 + n
    for x in header["arrays"]:
        count = int(np.prod(x["shape"], dtype=np.int64))
        codes = np.frombuffer(raw, TYPES[x["type"]], count, at).reshape(x["shape"])
        arrays[x["name"]] = _values(codes, x)
        at += -(-codes.nbytes // 8) * 8
    return header, arrays


def _steps(values: npt.NDArray[np.float64], steps: int, top: int) -> npt.NDArray[np.float64]:
    size = np.abs(values)
    codes = np.rint(np.log2(size, where=size > 0, out=np.full_like(size, -np.inf)) * steps) + top
    return np.where(codes >= 1, np.minimum(codes, top), 0)


def _values(codes: npt.NDArray[Any], code: dict[str, Any]) -> npt.NDArray[np.float64]:
    c = codes.astype(np.float64)
    if "steps" in code:
        top = 32767 if code["type"] == "i2" else 255
        return np.where(c == 0, 0.0, np.sign(c) * 2 ** ((np.abs(c) - top) / code["steps"]))
    if "range" in code:
        low, high = code["range"]
        return low + (high - low) * c / 255
    return c
