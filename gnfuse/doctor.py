"""What gnfuse finds on this machine: versions, compiler, GPUs, caches, kernels, and how eager PyTorch behaves here.

Nothing here raises: what cannot be found out is a finding too.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table

import gnfuse
from gnfuse import kernels
from gnfuse.kernelbench import first_line
from gnfuse.kernels import build, probes
from gnfuse.report_text import plain, text

SCHEMA = 1  # of `Examination.to_dict`


@dataclass(frozen=True)
class Finding:
    """One line: ``ok`` is False for what keeps gnfuse from doing its work here, or could not be found out."""

    label: str
    value: str
    ok: bool = True
    note: str = ""


@dataclass(frozen=True)
class Examination:
    """The findings by section ("versions", "machine", "build", "kernels", "eager PyTorch here")."""

    sections: dict[str, tuple[Finding, ...]]

    @property
    def healthy(self) -> bool:
        """Whether the kernels can be used."""
        return all(finding.ok for finding in self.sections["kernels"])

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and booleans. ``schema`` grows when a key changes its meaning or goes away."""
        sections = {name: [asdict(finding) for finding in findings] for name, findings in self.sections.items()}
        return {"schema": SCHEMA, "healthy": self.healthy, "sections": sections}

    def to_json(self, indent: int | None = 2) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False)

    def __str__(self) -> str:
        return plain(self.__rich__())

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = []
        for name, findings in self.sections.items():
            grid = Table.grid(padding=(0, 2))
            grid.add_column(no_wrap=True)
            grid.add_column(overflow="fold")
            grid.add_column(overflow="fold", style="dim")
            for finding in findings:
                value = text(finding.value, "" if finding.ok else "yellow")
                grid.add_row(text(f"  {finding.label}"), value, text(finding.note))
            parts += [*([text("")] if parts else []), text(name, "bold"), grid]
        return Group(*parts)


def examine() -> Examination:
    """Looks at this machine. The first call may build the kernels, which takes up to half a minute."""
    return Examination(
        {
            "versions": tuple(_versions()),
            "machine": tuple(_machine()),
            "build": tuple(_build()),
            "kernels": tuple(_kernels()),
            "eager PyTorch here": tuple(_probes()),
        }
    )


def _find(label: str, look: Callable[[], str], note: str = "") -> Finding:
    try:
        return Finding(label, look(), note=note)
    except Exception as error:
        return Finding(label, first_line(error), ok=False, note=note)


def _versions() -> Iterable[Finding]:
    yield Finding("python", f"{platform.python_version()} ({sys.executable})")
    yield Finding("gnfuse", gnfuse.__version__)
    yield Finding("torch", torch.__version__)
    yield Finding("CUDA of torch", torch.version.cuda or "none")
    for package in ("triton", "sympy", "ninja"):
        try:
            yield Finding(package, metadata.version(package))
        except metadata.PackageNotFoundError:
            yield Finding(package, "not installed", ok=package == "triton")


def _machine() -> Iterable[Finding]:
    yield Finding("system", platform.platform())
    yield _find("CPU", lambda: f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads")
    if not torch.cuda.is_available():
        yield Finding("GPU", "none that torch can use")
        return
    for index in range(torch.cuda.device_count()):
        yield _find(f"GPU {index}", partial(_gpu, index))


def _gpu(index: int) -> str:
    gpu = torch.cuda.get_device_properties(index)
    size = f"{gpu.multi_processor_count} multiprocessors, {gpu.total_memory >> 20} MiB"
    return f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {size}"


def _build() -> Iterable[Finding]:
    yield _find("C++ compiler", _compiler)
    for folder in build.cache_folders():
        yield _find("kernel cache", partial(_folder, folder))
    yield _find("Inductor cache", lambda: _folder(_inductor_cache()))


def _compiler() -> str:
    path = build.find_compiler()
    if path is None:
        raise FileNotFoundError("none on the path")
    said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    return f"{path}: {said.splitlines()[0]}"


def _inductor_cache() -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


def _folder(path: Path) -> str:
    """The path, and whether it can be written: a shared, read-only cache is fine where it holds what is needed."""
    if not path.exists():
        return f"{path} (not there yet)"
    return f"{path} ({'writable' if os.access(path, os.W_OK) else 'read-only'})"


def _kernels() -> Iterable[Finding]:
    reason = kernels.available()
    yield Finding("CPU kernels", "can be used" if reason is None else reason, ok=reason is None)
    yield _find("torch.compile", _registered)


def _registered() -> str:
    if "gnfuse" not in torch._dynamo.list_backends(exclude_tags=None):
        raise LookupError('backend="gnfuse" is not registered: is the package installed?')
    return 'backend="gnfuse" is registered'


def _probes() -> Iterable[Finding]:
    for name, probe in probes.PROBES.items():
        said = (probe.__doc__ or "").strip().splitlines()
        yield _find(name, partial(_outcome, probe), note=said[0] if said else "")


def _outcome(probe: Callable[[], object]) -> str:
    return str(probe())
