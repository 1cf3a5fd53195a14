"""Numbers as a dtype holds them."""

from __future__ import annotations

import functools

import torch


@functools.lru_cache(maxsize=4096)
def to_dtype(value: float, dtype: str | None) -> float:
    """The value rounded to the dtype; as it is where the dtype is not known."""
    return value if dtype is None else float(torch.tensor(value, dtype=getattr(torch, dtype)).item())


def shortest(value: float, dtype: str | None) -> float:
    """The number with the fewest digits that the dtype rounds to this value: 0.3 for float32's 0.30000001192092896."""
    candidates = (float(f"{value:.{digits}g}") for digits in range(1, 17))
    return next((c for c in candidates if to_dtype(c, dtype) == value), value)
