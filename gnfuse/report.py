"""The rewrite report: one `Site` for each GroupNorm, with what was done there, or why nothing was."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from rich.console import RenderableType

Status = Literal["folded", "fused", "refused"]
Guard = Literal["none", "local"]

SCHEMA = 1  # of `Report.to_dict`


@dataclass(frozen=True)
class ProofStep:
    """One application of a rule of `gnfuse.passes.fold`: ``before`` became ``after``."""

    rule: str
    equation: str
    before: str
    after: str
    note: str = ""


@dataclass(frozen=True)
class Site:
    """One GroupNorm and the chain that follows it.

    Attributes:
        status: "folded" (the chain is a constant where not NaN), "fused" (one kernel), or "refused" (left alone).
        graph: path of the graph the site is in: "" for the top one, else the submodule ("wrap_body_0").
        node: the GroupNorm's node name.
        pattern: the chain as written, for people.
        result: what runs now ("constant 0.0 where not NaN", "one kernel: silu → dropout(0.1)"), or "unchanged".
        proof: the rules applied, in order.
        guard: "local" where a NaN check of the GroupNorm's input stands in for the computation.
        source: "file.py:12" where the chain's GroupNorm was called, or the module path, or "".
        reason: why the site was refused or, for a rewritten one, why its chain ends where it does.
        stopped_at: the node at which the walk ended or, of a refusal, the node that is its cause.
        notes: further facts a user should know (a training flag frozen at trace time, an ill-conditioned consumer).
        bytes_before, bytes_after: memory traffic estimate of the chain's forward, op by op in eager and after the
            rewrite; None where a shape is unknown.
    """

    status: Status
    node: str
    pattern: str
    result: str
    graph: str = ""
    proof: tuple[ProofStep, ...] = ()
    guard: Guard = "none"
    source: str = ""
    reason: str = ""
    stopped_at: str = ""
    notes: tuple[str, ...] = ()
    bytes_before: int | None = None
    bytes_after: int | None = None


@dataclass(frozen=True)
class Report:
    """What one rewrite did. Falsy when no site was rewritten.

    ``str(report)`` is for people, `to_dict` and `to_json` for programs, `save_html` for a page to send around; a
    terminal gets colours through ``rich.print(report)``.
    """

    sites: tuple[Site, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def __bool__(self) -> bool:
        return any(site.status != "refused" for site in self.sites)

    def count(self, status: Status) -> int:
        """How many sites ended in this status."""
        return sum(site.status == status for site in self.sites)

    @property
    def bytes_before(self) -> int:
        """Forward memory traffic, in bytes, of the rewritten chains as eager runs them, where the shapes are known."""
        return sum(before for before, _ in self._traffic())

    @property
    def bytes_after(self) -> int:
        """The same traffic after the rewrite."""
        return sum(after for _, after in self._traffic())

    @property
    def bytes_saved(self) -> int:
        """``bytes_before - bytes_after``."""
        return self.bytes_before - self.bytes_after

    def _traffic(self) -> Iterator[tuple[int, int]]:
        for site in self.sites:
            if site.status != "refused" and site.bytes_before is not None and site.bytes_after is not None:
                yield site.bytes_before, site.bytes_after

    def __str__(self) -> str:
        return self.render()

    def render(self, width: int | None = None) -> str:
        """The report as plain text.

        Args:
            width: columns to fit into; by default the terminal's (or ``COLUMNS``), and 100 where there is none.
        """
        from gnfuse.report_text import render_text

        return render_text(self, width)

    def __rich__(self) -> RenderableType:
        from gnfuse.report_text import renderable

        return renderable(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and ints. ``schema`` grows when a key changes its meaning or goes away."""
        totals = {
            "sites": len(self.sites),
            **{status: self.count(status) for status in get_args(Status)},
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "bytes_saved": self.bytes_saved,
        }
        sites = [asdict(site) for site in self.sites]
        found: dict[str, Any] = _plain({"schema": SCHEMA, "totals": totals, "sites": sites, "notes": self.notes})
        return found

    def to_json(self, indent: int | None = 2) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """The inverse of `to_dict`. Raises ValueError for another schema."""
        if data.get("schema") != SCHEMA:
            raise ValueError(f"a report of schema {SCHEMA} is needed, got {data.get('schema')!r}")
        sites = []
        for entry in data["sites"]:
            proof = tuple(ProofStep(**step) for step in entry["proof"])
            sites.append(Site(**{**entry, "proof": proof, "notes": tuple(entry["notes"])}))
        return cls(tuple(sites), tuple(data["notes"]))

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Writes the report as one self-contained page. The file is complete or as it was before: never half."""
        from gnfuse.report_html import render_html

        write_atomically(Path(path), render_html(self))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def write_atomically(path: Path, text: str) -> None:
    """Writes UTF-8 text under a temporary name in the same folder, then renames it over ``path``."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
