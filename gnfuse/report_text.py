"""A report for a terminal: one line of totals, a table of the sites, and under it each site's proof and reasons."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from io import StringIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gnfuse.report import ProofStep, Report, Site, Status

STYLES: dict[Status, str] = {"folded": "bold green", "fused": "bold cyan", "refused": "yellow"}
GUARDS = {
    "none": "",
    "local": "local: a NaN check of each group's input stands in for the computation",
}
OF_ONE_SITE = ("at", "memory")  # labels left out where several sites are told together
WIDTH_WITHOUT_TERMINAL = 100
NARROWEST = 40  # a narrower table breaks words into letters


def render_text(report: Report, width: int | None = None) -> str:
    """The report as plain text; ``width`` as in `Report.render`."""
    return plain(renderable(report), width)


def plain(shown: RenderableType, width: int | None = None) -> str:
    """What rich prints, without colour codes and trailing blanks."""
    if width is None:
        width = shutil.get_terminal_size((WIDTH_WITHOUT_TERMINAL, 24)).columns
    out = StringIO()
    console = Console(
        file=out, width=max(width, NARROWEST), color_system=None, force_terminal=False, force_jupyter=False
    )
    console.print(shown)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def renderable(report: Report) -> RenderableType:
    """The report as something that rich prints, in the colours of the terminal it is printed to."""
    parts: list[RenderableType] = [text(summary(report), "bold")]
    if report.sites:
        parts += [text(""), _table(report)]
    for group in alike(report).values():
        parts += [text(""), _details(group)]
    if report.notes:
        parts += [text(""), *(text(f"note: {note}") for note in report.notes)]
    return Group(*parts)


def summary(report: Report) -> str:
    """The totals in one line."""
    if not report.sites:
        return f"gnfuse: {'' if report.notes else 'no GroupNorm in the graph, '}nothing changed"
    count = len(report.sites)
    line = f"gnfuse: {count} site{'s' * (count != 1)}: "
    line += ", ".join(f"{report.count(status)} {status}" for status in STYLES)
    if report.bytes_before:
        line += f"; forward traffic {traffic(report.bytes_before, report.bytes_after)}"
    return line


def traffic(before: int, after: int) -> str:
    """``2.10 GB → 441 MB, 1.66 GB saved``."""
    return f"{human_bytes(before)} → {human_bytes(after)}, {human_bytes(before - after)} saved"


def human_bytes(count: int) -> str:
    """Three digits and a decimal unit: ``1.64 GB``."""
    value = float(abs(count))
    sign = "-" if count < 0 else ""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5 or unit == "GB":
            break
        value /= 1000
    digits = 0 if unit == "B" or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{sign}{value:.{digits}f} {unit}"


def where(site: Site) -> str:
    """Where the GroupNorm stands: its source line if known, else its node, with the path of an inner graph."""
    place = site.source or site.node
    return f"{site.graph}: {place}" if site.graph else place


def details(site: Site) -> Iterator[tuple[str, str | ProofStep]]:
    """The labelled lines under the table, each a text or a step of the proof, in their order."""
    for step in site.proof:
        yield "proof", step
    if GUARDS[site.guard]:
        yield "guard", GUARDS[site.guard]
    if site.reason:
        yield "refused" if site.status == "refused" else "stop", site.reason
    if site.stopped_at:
        yield "at", f"node {site.stopped_at}"
    if site.status != "refused" and site.bytes_before is not None and site.bytes_after is not None:
        yield "memory", traffic(site.bytes_before, site.bytes_after)
    for note in site.notes:
        yield "note", note


def alike(report: Report) -> dict[object, list[tuple[int, Site]]]:
    """The numbered sites, those of which the same is to be said together: a U-Net repeats one chain many times."""
    groups: dict[object, list[tuple[int, Site]]] = {}
    for number, site in enumerate(report.sites, 1):
        said = tuple(line for line in details(site) if line[0] not in OF_ONE_SITE)
        groups.setdefault((site.status, site.pattern, site.result, said), []).append((number, site))
    return groups


def ranges(numbers: list[int]) -> str:
    """``[1, 2, 3, 7]`` as ``1-3, 7``."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def text(content: str, style: str = "") -> Text:
    """Text that rich prints as it is: no markup, and no control codes that the content may bring along."""
    return Text("".join(char if char.isprintable() else " " for char in content), style=style)


def _table(report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("", justify="right")
    table.add_column("status", no_wrap=True)
    table.add_column("chain", overflow="fold")
    table.add_column("becomes", overflow="fold")
    table.add_column("where", overflow="fold")
    for number, site in enumerate(report.sites, 1):
        style = STYLES[site.status]
        table.add_row(
            text(str(number)), text(site.status, style), text(site.pattern), text(site.result), text(where(site))
        )
    return table


def _details(group: list[tuple[int, Site]]) -> RenderableType:
    site = group[0][1]
    title = text(f"{ranges([number for number, _ in group])}  ")
    title.append_text(text(site.status, STYLES[site.status]))
    alone = len(group) == 1
    node = f"  (node {site.node})" if site.source else ""
    title.append_text(text(f"  {where(site)}{node}" if alone else f"  {site.pattern}"))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="dim", min_width=len("refused"))
    grid.add_column(overflow="fold")
    last = ""
    for label, content in details(site):
        if alone or label not in OF_ONE_SITE:
            shown = _proof_step(content) if isinstance(content, ProofStep) else text(content)
            grid.add_row(text("" if label == last else label), shown)
            last = label
    return Group(title, Padding(grid, (0, 0, 0, 3)))


def _proof_step(step: ProofStep) -> Text:
    lines = [text(step.rule, "bold")]
    lines[0].append_text(text(f": {step.equation}" if step.equation else ""))
    lines.append(text(f"  {step.before}  ⇒  {step.after}"))
    if step.note:
        lines.append(text(f"  {step.note}", "dim"))
    return Text("\n").join(lines)
