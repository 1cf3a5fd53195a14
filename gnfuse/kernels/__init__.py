"""The fused ops ``torch.ops.gnfuse.*`` and their kernels. Importing this package builds and loads nothing.

``load()`` registers the ops and builds the C++ library on its first use on a machine; ``available()`` says whether that
can work.
"""

from __future__ import annotations

from gnfuse.kernels.build import KernelsUnavailable
from gnfuse.kernels.ops import available, load

__all__ = ["KernelsUnavailable", "available", "load"]
