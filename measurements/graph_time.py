"""How long work on a GPU takes, launched as the engine launches it: many calls in one graph."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


def microseconds(work: Callable[[int], object], count: int, repeats: int = 12) -> float:
    """Median time of one of `count` calls: work(0), work(1), …"""
    for _ in range(2):  # kernels are compiled
        work(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(count):
            work(index)
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / count)
    return statistics.median(times)
