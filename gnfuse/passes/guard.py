"""Where a NaN can enter a folded chain, and the cheapest place to catch it."""

from __future__ import annotations

from gnfuse.passes.fold import Folded
from gnfuse.report import Guard


def guard_of(folded: Folded) -> Guard:
    """ "local" where a constant stands in for a GroupNorm: its input is still read, once, for what makes a group NaN.

    A fused chain computes the GroupNorm, so NaNs go where eager's go by themselves.
    """
    return "local" if folded.constant is not None else "none"
