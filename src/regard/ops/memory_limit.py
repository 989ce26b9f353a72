"""Memory limits: parse and print sizes such as "1GB", and refuse answers that are larger."""

from __future__ import annotations

import torch

LIMIT = "1GB"  # default limit for one answer


def parse_size(text: str) -> int:
    """Bytes of a size such as "512MB", "1.5GB" or "100KB"."""
    if not isinstance(text, str):
        raise TypeError(f"a size must be a string such as '1GB', got {text!r} ({type(text).__name__})")
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "B": 1}
    for unit, factor in units.items():
        number = text.strip().upper().removesuffix(unit).strip()
        if number != text.strip().upper():
            try:
                return int(float(number) * factor)
            except (ValueError, OverflowError):
                break
    raise ValueError(f"a size must be a number with KB, MB, GB or TB, such as '1GB', got {text!r}")


def format_size(count: float, unit: str = "B") -> str:
    """A number of bytes, or of another unit, with a prefix that fits, such as "30.2 kB"."""
    for prefix in ("", "k", "M", "G"):
        if count < 999.5:
            return f"{count:.3g} {prefix}{unit}"
        count /= 1000
    return f"{count:.3g} T{unit}"


def check_fits(what: str, n: int, dtype: torch.dtype, limit: str = LIMIT) -> None:
    """Raise if n numbers take more memory than the limit."""
    need = n * dtype.itemsize
    if need > parse_size(limit):
        raise ValueError(
            f"{what} takes {need / 1e9:.3g} GB, more than limit={limit!r}; "
            "ask for a tile A[..., rows, cols], a map A.pool(512, 512), or raise the limit of A.dense(limit=...)"
        )
