"""The doctor: it names every part, says what is wrong, and never raises."""

from __future__ import annotations

import json

import pytest

from gnfuse import doctor, kernels
from gnfuse.cli import main
from gnfuse.kernels import probes

SECTIONS = ["versions", "machine", "build", "kernels", "eager PyTorch here"]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """No phrase that a test looks for is broken over two lines."""
    monkeypatch.setenv("COLUMNS", "200")


def test_every_section_and_every_probe_is_reported(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["schema", "healthy", "sections"] and found["healthy"] is True
    assert list(found["sections"]) == SECTIONS
    listed = found["sections"]["eager PyTorch here"]
    assert [finding["label"] for finding in listed] == list(probes.PROBES)
    assert all(finding["ok"] and finding["value"] and finding["note"] for finding in listed)


def test_the_text_names_torch_the_compiler_and_the_kernels(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "torch" in out and "C++ compiler" in out and "Inductor cache" in out
    assert "CPU kernels" in out and "can be used" in out
    assert 'backend="gnfuse" is registered' in out
    assert "\x1b" not in out


def test_kernels_that_cannot_be_used_are_reported_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(kernels, "available", lambda: "no C++ compiler")
    assert main(["doctor"]) == 1
    assert "no C++ compiler" in capsys.readouterr().out


def test_a_probe_that_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch):
    def broken() -> float:
        """What a broken probe asks."""
        raise RuntimeError("no answer\nmore")

    monkeypatch.setitem(probes.PROBES, "broken", broken)
    findings = doctor.examine().sections["eager PyTorch here"]
    assert findings[-1] == doctor.Finding(
        "broken", "RuntimeError: no answer", ok=False, note="What a broken probe asks."
    )


def test_a_missing_compiler_is_a_finding(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = {finding.label: finding for finding in doctor.examine().sections["build"]}
    assert not found["C++ compiler"].ok and "none on the path" in found["C++ compiler"].value
