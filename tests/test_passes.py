"""The pass as a whole: a fault of its own never reaches the program."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gnfuse
from gnfuse import passes
from gnfuse.passes import rewrite


def block() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.SiLU(), nn.Dropout(0.2), nn.Conv2d(8, 3, 3))


def fail_after_surgery(*args: object) -> None:
    rewrite.apply(*args)  # type: ignore[arg-type]
    raise LookupError("planted")


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that fails once the graph has been edited."""
    monkeypatch.delenv("GNFUSE_RAISE", raising=False)

    class Broken:
        apply = staticmethod(fail_after_surgery)
        next_site = staticmethod(rewrite.next_site)

    monkeypatch.setattr(passes, "rewrite", Broken)


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_an_internal_fault_leaves_a_compiled_program_as_it_was(faulty: None, inner: str) -> None:
    model, x = block(), torch.randn(2, 3, 6, 6)
    torch.manual_seed(3)
    want = torch.compile(model, backend=inner)(x)
    torch.manual_seed(3)
    got = torch.compile(model, backend="gnfuse", options={"inner": inner})(x)
    assert torch.equal(want, got)
    (report,) = gnfuse.reports()
    assert report.sites == () and "LookupError: planted" in report.notes[0]


def test_an_internal_fault_leaves_a_traced_graph_as_it_was(faulty: None) -> None:
    gm = torch.fx.symbolic_trace(block())
    before = gm.code
    again, report = gnfuse.rewrite(gm, (torch.randn(2, 3, 6, 6),))
    assert again is gm and gm.code == before and report.notes
    gm.graph.lint()


def test_whoever_looks_for_the_fault_gets_it(faulty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GNFUSE_RAISE", "1")
    with pytest.raises(LookupError, match="planted"):
        gnfuse.rewrite(torch.fx.symbolic_trace(block()), (torch.randn(2, 3, 6, 6),))
