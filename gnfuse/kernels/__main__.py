"""``python -m gnfuse.kernels``: builds the C++ library with visible progress and prints its path."""

from __future__ import annotations

import sys

from gnfuse.kernels.build import KernelsUnavailable, ensure_built

if __name__ == "__main__":
    try:
        print(ensure_built(verbose=True))
    except KernelsUnavailable as error:
        sys.exit(f"gnfuse: {error}")
