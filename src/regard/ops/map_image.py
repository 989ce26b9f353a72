"""Small pictures of maps as HTML, for notebooks: one `<img>` with its PNG inside, made without an image library."""

from __future__ import annotations

import base64
import html
import struct
import zlib

import torch
from torch import Tensor

LIGHT, DARK = (255, 255, 255), (59, 15, 112)  # the colours of no weight and of the largest
GAP_PIXELS = 3  # between maps
GAP_COLOUR = (225, 225, 230)


def image_of_maps(maps: Tensor, *, cell_pixels: int, alt: str) -> str:
    """Return an image of maps `rows cols i j`, a grid: the square root of each value, each map to its own largest."""
    pixels = _pixels(maps.detach().float().cpu())
    encoded = base64.b64encode(_png(pixels)).decode()
    size = f"width:{pixels.shape[1] * cell_pixels}px;max-width:100%;image-rendering:pixelated"
    return f'<img alt="{html.escape(alt)}" style="{size}" src="data:image/png;base64,{encoded}">'


def _pixels(maps: Tensor) -> Tensor:
    """Return the grid as `height width 3` of bytes."""
    rows, cols, n_i, n_j = maps.shape
    largest = maps.nan_to_num().flatten(2).amax(-1)[..., None, None].clamp(min=1e-30)
    share = (maps.nan_to_num() / largest).clamp(0, 1).sqrt()[..., None]
    light, dark = (torch.tensor(colour, dtype=torch.float32) for colour in (LIGHT, DARK))
    height, width = rows * (n_i + GAP_PIXELS) - GAP_PIXELS, cols * (n_j + GAP_PIXELS) - GAP_PIXELS
    pixels = torch.tensor(GAP_COLOUR, dtype=torch.uint8).repeat(height, width, 1)
    painted = (light + share * (dark - light)).round().to(torch.uint8)
    for row in range(rows):
        for col in range(cols):
            top, left = row * (n_i + GAP_PIXELS), col * (n_j + GAP_PIXELS)
            pixels[top : top + n_i, left : left + n_j] = painted[row, col]
    return pixels


def _png(pixels: Tensor) -> bytes:
    """Encode `height width 3` of bytes."""
    height, width = pixels.shape[:2]
    lines = torch.cat([pixels.new_zeros(height, 1), pixels.flatten(1)], 1)  # each line begins with its filter, none

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits a channel, RGB
    data = zlib.compress(lines.contiguous().numpy().tobytes(), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
