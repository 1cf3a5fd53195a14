"""The documents say what the code says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from gnfuse import cli

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_rules_document_lists_the_rules_as_they_are() -> None:
    rendered = runpy.run_path(str(ROOT / "docs" / "make_rules.py"))["rendered"]()
    assert (ROOT / "docs" / "rules.md").read_text(encoding="utf-8") == rendered


def test_the_readme_shows_the_report_as_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    cli.main(["explain", str(ROOT / "examples" / "kernelbench_83.py")])
    printed = [line.rstrip() for line in capsys.readouterr().out.strip().splitlines()]
    assert "\n".join(printed) in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_of_the_document_leads_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text(encoding="utf-8")):
        assert target.startswith("http") or (document.parent / target).exists(), target


def test_every_environment_variable_is_documented() -> None:
    used = {
        name
        for path in (ROOT / "gnfuse").rglob("*.py")
        for name in re.findall(r"\bGNFUSE_[A-Z_]+\b", path.read_text(encoding="utf-8"))
    }
    documented = set(re.findall(r"\bGNFUSE_[A-Z_]+\b", (ROOT / "docs" / "options.md").read_text(encoding="utf-8")))
    assert used == documented
