"""A report as one self-contained page: no script, no outside resource, everything escaped."""

from __future__ import annotations

from html import escape

from gnfuse.report import ProofStep, Report, Site
from gnfuse.report_text import details, summary, where

STYLE = """
:root { color-scheme: light dark; --line: #8884; --folded: #1a7f37; --fused: #0969da; --refused: #9a6700; }
@media (prefers-color-scheme: dark) { :root { --folded: #3fb950; --fused: #58a6ff; --refused: #d29922; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.2rem; }
code { font: 13px/1.5 ui-monospace, monospace; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .35rem .8rem .35rem 0; border-bottom: 1px solid var(--line); }
.folded, .fused, .refused { font-weight: 600; }
.folded { color: var(--folded); } .fused { color: var(--fused); } .refused { color: var(--refused); }
details { border-bottom: 1px solid var(--line); padding: .5rem 0; }
dl { display: grid; grid-template-columns: 6rem 1fr; gap: .25rem 1rem; margin: .5rem 0 .5rem 1rem; }
dt { opacity: .65; } dd { margin: 0; }
"""


def render_html(report: Report) -> str:
    """The whole page."""
    heads = "".join(f"<th>{title}</th>" for title in ("", "status", "chain", "becomes", "where"))
    rows = "".join(_row(number, site) for number, site in enumerate(report.sites, 1))
    table = f'<div class="scroll"><table><thead><tr>{heads}</tr></thead>\n<tbody>{rows}</tbody></table></div>'
    blocks = "".join(_block(number, site) for number, site in enumerate(report.sites, 1))
    notes = "".join(f"<p>{escape(note)}</p>" for note in report.notes)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>gnfuse report</title><style>{STYLE}</style></head>\n<body><h1>{escape(summary(report))}</h1>\n"
        f"{table if report.sites else ''}\n{blocks}\n{notes}\n</body></html>\n"
    )


def _row(number: int, site: Site) -> str:
    return (
        f'<tr><td><a href="#site-{number}">{number}</a></td><td class="{site.status}">{site.status}</td>'
        f"<td><code>{escape(site.pattern)}</code></td><td>{escape(site.result)}</td>"
        f"<td><code>{escape(where(site))}</code></td></tr>\n"
    )


def _block(number: int, site: Site) -> str:
    lines = "".join(f"<dt>{label}</dt><dd>{_content(content)}</dd>" for label, content in details(site))
    return (
        f'<details id="site-{number}" open><summary>{number} <span class="{site.status}">{site.status}</span> '
        f"<code>{escape(where(site))}</code> (node <code>{escape(site.node)}</code>)</summary>"
        f"<dl>{lines}</dl></details>\n"
    )


def _content(content: str | ProofStep) -> str:
    if isinstance(content, str):
        return escape(content)
    note = f"<br>{escape(content.note)}" if content.note else ""
    return (
        f"<b>{escape(content.rule)}</b>: {escape(content.equation)}<br>"
        f"<code>{escape(content.before)} ⇒ {escape(content.after)}</code>{note}"
    )
