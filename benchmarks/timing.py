"""Medians of functions timed in turn, so that a slow minute of the machine slows all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch


def medians(functions: Mapping[str, Callable[[], object]], seconds: float, least: int = 5) -> dict[str, float]:
    """Milliseconds a call, the median for each function.

    Args:
        functions: by name; each is called twice first, which compiles what is to be compiled.
        seconds: how long the timed rounds may take together; a round calls every function once.
        least: rounds at least.
    """
    for function in functions.values():
        function()
        function()
    samples: dict[str, list[float]] = {name: [] for name in functions}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(samples.values()))) < least:
        for name, function in functions.items():
            samples[name].append(_milliseconds(function))
    return {name: statistics.median(values) for name, values in samples.items()}


def _milliseconds(function: Callable[[], object]) -> float:
    _wait_for_the_gpu()
    begin = time.perf_counter()
    function()
    _wait_for_the_gpu()
    return (time.perf_counter() - begin) * 1000


def _wait_for_the_gpu() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
