"""The report: what its text, dict, JSON and page say."""

from __future__ import annotations

import dataclasses
import json
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gnfuse.report import ProofStep, Report, Site
from gnfuse.report_html import render_html
from gnfuse.report_text import human_bytes, ranges

FOLDED = Site(
    status="folded",
    node="group_norm",
    pattern="group_norm → minimum(0) → clamp(0, 1) → dropout(0.2)",
    result="constant 0.0 where not NaN",
    proof=(
        ProofStep("min-clamp", "clamp(min(x, a), a, b) = a where a <= b", "minimum(0) → clamp(0, 1)", "constant(0)"),
        ProofStep("dropout-zero", "dropout(0) = 0", "constant(0) → dropout(0.2)", "constant(0)", "the generator moves"),
    ),
    guard="local",
    source="model.py:31",
    bytes_before=5_000_000,
    bytes_after=1_500_000,
)
FUSED = Site(
    status="fused",
    node="group_norm_1",
    pattern="group_norm → silu",
    result="one kernel: silu",
    graph="wrap_body_0",
    source="model.py:40",
    reason="conv2d is not pointwise",
    stopped_at="conv2d_3",
    bytes_before=None,
    bytes_after=100,
)
REFUSED = Site(
    status="refused",
    node="group_norm_2",
    pattern="group_norm → add",
    result="unchanged",
    reason="add: the other operand is a tensor",
    stopped_at="add_1",
    notes=("training was True when the graph was traced",),
    bytes_before=700,
    bytes_after=700,
)
REPORT = Report((FOLDED, FUSED, REFUSED), ("a note on the graph",))


def test_a_report_is_true_only_where_a_site_was_rewritten():
    assert REPORT and Report((FUSED,))
    assert not Report() and not Report((REFUSED,))


def test_totals_count_each_status_and_the_bytes_of_rewritten_sites_of_known_size():
    assert [REPORT.count(status) for status in ("folded", "fused", "refused")] == [1, 1, 1]
    assert (REPORT.bytes_before, REPORT.bytes_after, REPORT.bytes_saved) == (5_000_000, 1_500_000, 3_500_000)


def test_text_starts_with_the_totals():
    first = REPORT.render(200).splitlines()[0]
    assert first == ("gnfuse: 3 sites: 1 folded, 1 fused, 1 refused; forward traffic 5.00 MB → 1.50 MB, 3.50 MB saved")


def test_text_has_one_row_a_site_then_proof_and_reasons():
    text = REPORT.render(140)
    rows = [line.split() for line in text.splitlines()]
    assert ["1", "folded"] in [row[:2] for row in rows]
    head, _, tail = text.partition("1  folded  model.py:31  (node group_norm)")
    assert FOLDED.pattern in head and "constant 0.0 where not NaN" in head and "model.py:31" in head
    assert "min-clamp: clamp(min(x, a), a, b) = a where a <= b" in tail
    assert "constant(0) → dropout(0.2)  ⇒  constant(0)" in tail and "the generator moves" in tail
    assert "guard    local" in tail
    assert "wrap_body_0: model.py:40" in tail and "stop     conv2d is not pointwise" in tail
    assert "refused  add: the other operand is a tensor" in tail and "node add_1" in tail
    assert "training was True when the graph was traced" in tail and tail.endswith("note: a note on the graph")


def test_text_of_a_graph_without_group_norm_says_so():
    assert str(Report()) == "gnfuse: no GroupNorm in the graph, nothing changed"


def test_text_of_a_graph_left_alone_for_another_reason_says_only_that():
    assert str(Report(notes=("internal fault, graph left alone",))).splitlines() == [
        "gnfuse: nothing changed",
        "",
        "note: internal fault, graph left alone",
    ]


def test_sites_of_which_the_same_is_said_are_told_together():
    again = [dataclasses.replace(FOLDED, node=f"group_norm_{i}", source=f"unet.py:{i}") for i in range(20)]
    text = Report((*again[:10], REFUSED, *again[10:])).render(140)
    assert text.count("min-clamp:") == 1
    assert f"1-10, 12-21  folded  {FOLDED.pattern}" in text
    assert all(f"unet.py:{i}" in text for i in range(20))


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
def test_text_fits_the_width(width: int):
    assert max(map(len, REPORT.render(width).splitlines())) <= width


def test_str_takes_the_width_of_the_terminal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "70")
    assert str(REPORT) == REPORT.render(70) != REPORT.render(140)


def test_text_has_no_colour_codes_even_where_they_are_forced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in str(REPORT)


def test_a_terminal_gets_colours():
    out = StringIO()
    Console(file=out, force_terminal=True, color_system="standard", width=120).print(REPORT)
    assert "\x1b[" in out.getvalue() and "min-clamp" in out.getvalue()


def test_markup_and_control_codes_in_names_are_shown_as_text():
    hostile = dataclasses.replace(REFUSED, reason="[bold]x[/bold] :smile: [/]", source="a\x1b[31mb.py:1")
    text = Report((hostile,)).render(120)
    assert "[bold]x[/bold] :smile: [/]" in text and "\x1b" not in text


def test_dict_has_the_documented_keys():
    found = REPORT.to_dict()
    assert list(found) == ["schema", "totals", "sites", "notes"]
    assert found["schema"] == 1
    assert list(found["totals"]) == [
        *("sites", "folded", "fused", "refused"),
        *("bytes_before", "bytes_after", "bytes_saved"),
    ]
    assert set(found["sites"][0]) == {field.name for field in dataclasses.fields(Site)}
    assert set(found["sites"][0]["proof"][0]) == {"rule", "equation", "before", "after", "note"}


def test_json_reads_back_as_the_same_report():
    assert Report.from_dict(json.loads(REPORT.to_json())) == REPORT
    assert Report.from_dict(json.loads(Report().to_json(indent=None))) == Report()


def test_another_schema_is_not_read():
    with pytest.raises(ValueError, match="schema 1 is needed, got 2"):
        Report.from_dict({**REPORT.to_dict(), "schema": 2})


def test_page_is_self_contained_and_escaped():
    hostile = dataclasses.replace(FOLDED, pattern="<script>alert(1)</script>", source='"><img src=x>.py:1')
    page = render_html(Report((hostile, REFUSED), ("a < b",)))
    assert "<script" not in page and "<img" not in page and "http" not in page
    assert "&lt;script&gt;" in page and "a &lt; b" in page
    assert page.count("<tr>") == 3 and "min-clamp" in page and REFUSED.reason in page


def test_page_replaces_the_file_and_leaves_nothing_else(tmp_path: Path):
    path = tmp_path / "report.html"
    path.write_text("old")
    REPORT.save_html(path)
    assert path.read_text(encoding="utf-8") == render_html(REPORT)
    assert list(tmp_path.iterdir()) == [path]


def test_a_page_that_cannot_be_written_leaves_no_temporary_file(tmp_path: Path):
    (tmp_path / "report.html").mkdir()
    with pytest.raises(OSError):
        REPORT.save_html(tmp_path / "report.html")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_bytes_are_shown_with_three_digits():
    shown = [human_bytes(n) for n in (0, 999, 1000, 12_345, 999_499, 999_500, 2_345_678_901, 3 * 10**12, -5000)]
    assert shown == ["0 B", "999 B", "1.00 kB", "12.3 kB", "999 kB", "1.00 MB", "2.35 GB", "3000 GB", "-5.00 kB"]


def test_numbers_are_shown_as_ranges():
    assert ranges([1, 2, 3, 7, 9, 10]) == "1-3, 7, 9-10"


texts = st.text(max_size=30)
sizes = st.none() | st.integers(0, 10**13)
sites = st.builds(
    Site,
    status=st.sampled_from(["folded", "fused", "refused"]),
    node=texts,
    pattern=texts,
    result=texts,
    graph=texts,
    proof=st.lists(st.builds(ProofStep, texts, texts, texts, texts, texts), max_size=2).map(tuple),
    guard=st.sampled_from(["none", "local"]),
    source=texts,
    reason=texts,
    stopped_at=texts,
    notes=st.lists(texts, max_size=2).map(tuple),
    bytes_before=sizes,
    bytes_after=sizes,
)


@given(st.lists(sites, max_size=3).map(tuple), st.lists(texts, max_size=2).map(tuple))
def test_any_report_can_be_shown_and_read_back(some: tuple[Site, ...], notes: tuple[str, ...]):
    report = Report(some, notes)
    assert max(map(len, report.render(80).splitlines())) <= 80
    assert "<!DOCTYPE html>" in render_html(report)
    assert Report.from_dict(json.loads(report.to_json())) == report
