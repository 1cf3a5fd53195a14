"""gnfuse's own options, and their separation from the inner backend's."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

INNER_BACKENDS = ("inductor", "aot_eager", "eager")


@dataclass(frozen=True)
class Options:
    """What ``torch.compile(..., backend="gnfuse", options={...})`` and `gnfuse.rewrite` take.

    Attributes:
        inner: the backend that compiles the rewritten graph: "inductor", "aot_eager", or "eager".
        only_gains: with inner="inductor", leave alone a site that Inductor would run faster (small ones, say). False
            rewrites every site that can be.
        mode: Inductor's mode, as ``torch.compile(mode=...)``, which torch does not allow together with options.

    Raises:
        ValueError: for another inner backend.
    """

    inner: str = "inductor"
    only_gains: bool = True
    mode: str | None = None

    def __post_init__(self) -> None:
        if self.inner not in INNER_BACKENDS:
            raise ValueError(f"inner={self.inner!r}: one of {', '.join(map(repr, INNER_BACKENDS))}")


def _own_names() -> tuple[str, ...]:
    return tuple(f.name for f in fields(Options))


def split(options: Mapping[str, Any] | None) -> tuple[Options, dict[str, Any]]:
    """gnfuse's options, and those that are Inductor's (``max_autotune``, ``triton.cudagraphs``, ...).

    Raises:
        ValueError: for a key that neither knows, with the nearest ones; for Inductor's with another inner backend.
    """
    own: dict[str, Any] = {}
    inner: dict[str, Any] = {}
    for key, value in (options or {}).items():
        (own if key in _own_names() else inner)[key] = value
    ours = Options(**own)
    if inner and ours.inner != "inductor":
        raise ValueError(f"option {next(iter(inner))!r} is not gnfuse's, and inner={ours.inner!r} takes no options")
    for key in inner:
        _check_inductor_key(key)
    return ours, inner


def own_options(options: Mapping[str, Any] | Options | None) -> Options:
    """Options for a rewrite alone, where there is no inner backend to hand anything to.

    Raises:
        ValueError: for an unknown key, with the nearest ones.
    """
    if isinstance(options, Options):
        return options
    for key in options or {}:
        if key not in _own_names():
            raise ValueError(unknown(key, _own_names()))
    return Options(**(options or {}))


def unknown(key: str, known: tuple[str, ...]) -> str:
    """The message for an unknown option."""
    near = difflib.get_close_matches(key.replace("-", "_"), known, n=3, cutoff=0.5)
    hint = f"; did you mean {', '.join(map(repr, near))}?" if near else f"; gnfuse's own are {', '.join(_own_names())}"
    return f"unknown option {key!r}{hint}"


def _check_inductor_key(key: str) -> None:
    from torch._inductor import config

    known = config.get_config_copy() if hasattr(config, "get_config_copy") else config.to_dict()
    if key.replace("-", "_") not in known:
        raise ValueError(unknown(key, (*_own_names(), *known)))
