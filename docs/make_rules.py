"""Writes docs/rules.md from the table of rules: ``python docs/make_rules.py``. A test compares the two."""

from __future__ import annotations

from pathlib import Path

from gnfuse.passes.fold import RULES

HEAD = """# The rules

What gnfuse may conclude about a chain, one rule a heading (`gnfuse/passes/fold.py`). Each equation holds in real
numbers and is proved by sympy (`gnfuse/passes/prove.py`); the domain says when it holds in floats, and every rule is
run on all 65,536 fp16 and all 65,536 bf16 values against eager, gradients included (`tests/test_fold.py`). Ranges come
from the interval analysis of `gnfuse/passes/intervals.py`, which starts from everything: the output of a GroupNorm has
no useful bound in floats, except in fp16 without affine parameters.

Where the gradient of the reduced chain differs, the fused op still takes the gradient of the chain as it was written.
"""


def rendered() -> str:
    """The document."""
    parts = [
        f"## {rule.name}\n\n`{rule.equation}`\n\n- Domain: {rule.domain}.\n- Gradient: {rule.gradient}.\n"
        for rule in RULES
    ]
    return "\n".join([HEAD, *parts])


if __name__ == "__main__":
    Path(__file__).with_name("rules.md").write_text(rendered(), encoding="utf-8")
