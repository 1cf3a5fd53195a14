"""gnfuse: a ``torch.compile`` backend and FX pass that folds and fuses GroupNorm → pointwise → dropout chains."""

from __future__ import annotations

from gnfuse.api import explain, rewrite
from gnfuse.backend import clear_reports, reports
from gnfuse.options import Options
from gnfuse.report import ProofStep, Report, Site

__version__ = "0.1.0"

__all__ = ["Options", "ProofStep", "Report", "Site", "clear_reports", "explain", "reports", "rewrite"]
