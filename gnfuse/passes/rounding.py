"""Numbers as a dtype holds them."""

from __future__ import annotations

import functools

import torch


def to_dtype(value: float, dtype: str | None) -> float:
    """The value rounded to the dtype; as it is where the dtype is not known."""
    return value if dtype is None else _rounded(value.hex(), dtype)


@functools.lru_cache(maxsize=4096)
def _rounded(value: str, dtype: str) -> float:
    """By the value's text: 0.0 and -0.0 are equal, and would share an entry."""
    return float(torch.tensor(float.fromhex(value), dtype=getattr(torch, dtype)).item())


def shortest(value: float, dtype: str | None) -> float:
    """The number with the fewest digits that the dtype rounds to this value: 0.3 for float32's 0.30000001192092896."""
    candidates = (float(f"{value:.{digits}g}") for digits in range(1, 17))
    return next((c for c in candidates if to_dtype(c, dtype) == value), value)
