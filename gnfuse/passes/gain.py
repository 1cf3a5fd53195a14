"""Where a fused site would be slower than what Inductor makes of it.

Measured on the CPU by `benchmarks/gain.py` (`benchmarks/results/gain.txt`): a call costs about 25 us more than one of
Inductor's own kernels, and Inductor's contiguous forward is hard to beat while its output fits in memory that the
allocator uses again. channels_last and outputs that are fresh memory gain.

A site that draws a mask is never left alone for speed, since Inductor would draw another one; nor is a constant.
"""

from __future__ import annotations

from dataclasses import dataclass

from gnfuse.chain import FLOAT_DTYPES

_BYTES = dict(zip(FLOAT_DTYPES, (2, 2, 4, 8), strict=True))
_FRESH = 32 << 20  # bytes: glibc maps larger blocks anew for each allocation

_CHANNELS_LAST = 1 << 18  # elements from which on the layout gains


@dataclass(frozen=True)
class Work:
    """What decides: a site's size and kind.

    Attributes:
        elements: of the GroupNorm's output.
        dtype: of it.
        channels_last: its layout.
        draws: whether a dropout is active.
        constant: whether it is folded to one.
    """

    elements: int
    dtype: str
    channels_last: bool = False
    draws: bool = False
    constant: bool = False


def why_slower(work: Work) -> str:
    """Why the site would not gain over Inductor, or ""."""
    if work.draws or work.constant or work.elements * _BYTES[work.dtype] >= _FRESH:
        return ""
    if work.channels_last and work.dtype != "float64":
        enough = work.elements >= _CHANNELS_LAST
        return "" if enough else f"no gain over Inductor: {work.elements} elements, it takes {_CHANNELS_LAST}"
    return "no gain over Inductor: nothing is drawn, and its output is under 32 MiB"
