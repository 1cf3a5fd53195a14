"""A site that Inductor would run faster is left alone, says why, and can be had all the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import gnfuse
from gnfuse.passes.gain import Work, why_slower

SMALL = Work(2048, "float32")
LARGE = Work(5 << 20, "float32")


@pytest.mark.parametrize("kind", [{}, {"channels_last": True}])
def test_small_sites_do_not_gain(kind: dict[str, bool]) -> None:
    assert "no gain" in why_slower(replace(SMALL, **kind))


@pytest.mark.parametrize("kind", [{"draws": True}, {"constant": True}])
def test_a_mask_or_a_constant_is_never_given_up_for_speed(kind: dict[str, bool]) -> None:
    assert why_slower(replace(SMALL, **kind)) == ""


def test_large_sites_gain_where_there_is_something_to_gain() -> None:
    assert why_slower(replace(LARGE, channels_last=True)) == ""
    assert "under 32 MiB" in why_slower(LARGE)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_outputs_of_fresh_memory_gain_in_every_dtype(dtype: str) -> None:
    assert why_slower(Work(16 << 20, dtype)) == ""


def test_the_backend_refuses_a_small_site_unless_it_is_asked_for() -> None:
    model = nn.Sequential(nn.GroupNorm(2, 4), nn.SiLU()).eval()
    x = torch.randn(2, 4, 3, 3)
    with torch.no_grad():
        want = model(x)
        for only_gains, status in ((True, "refused"), (False, "fused")):
            torch._dynamo.reset()
            gnfuse.clear_reports()
            got = torch.compile(model, backend="gnfuse", options={"only_gains": only_gains})(x)
            torch.testing.assert_close(got, want)
            assert [s.status for r in gnfuse.reports() for s in r.sites] == [status]
