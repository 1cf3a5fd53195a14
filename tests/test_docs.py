"""The documents say what the code says."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def test_the_rules_document_lists_the_rules_as_they_are() -> None:
    rendered = runpy.run_path(str(DOCS / "make_rules.py"))["rendered"]()
    assert (DOCS / "rules.md").read_text(encoding="utf-8") == rendered
