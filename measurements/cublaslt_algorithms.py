"""The fastest cuBLASLt algorithm for each product of a model: writes the table of the package.

    python measurements/cublaslt_algorithms.py [--model dream-7b] \\
        [--tokens 32,64,96,128,192,256,384,512] [--header cublasLt.h --seconds 4]

Tries what cuBLASLt proposes. With the header, which names its tiles, it also tries other settings
of its algorithms for some seconds per shape, those first that keep all multiprocessors busy. Each
is timed in a graph over weights that do not fit the L2 cache, and the best few once more, in turn
with torch's own choice. One that is at least 1.5 % faster goes into
src/lopa/kernels/cublaslt_algorithms.json, beside the entries of other devices and versions.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from graph_time import microseconds
from lopa.atomic_write import write_lines
from lopa.kernels.cublaslt import WORKSPACE, Algorithm, CublasLt, HeuristicResult, Shape
from lopa.models.families import dummy_shapes

TABLE = Path(__file__).parent.parent / "src/lopa/kernels/cublaslt_algorithms.json"
LEAST_GAIN = 0.015
MOST_SPLITS = 6
# cublasLt.h: what an algorithm can be set to
ID, TILE, SPLITS, REDUCTION, SWIZZLE, CUSTOM, STAGES = range(7)
TILE_IDS, CUSTOM_MOST = 6, 7
MAX_WORKSPACE = 1  # of a preference


def shapes_of(model: str, tokens: list[int]) -> list[Shape]:
    config = dummy_shapes()[model]
    heads = config.heads + 2 * config.kv_heads
    width = config.hidden_size
    products = [
        (2 * config.intermediate_size, width, False),
        (width, config.intermediate_size, False),
        (heads * config.head_dim, width, config.qkv_bias),
        (width, config.heads * config.head_dim, False),
        (config.vocab_size, width, False),
    ]
    return [Shape(t, *product) for product in products for t in tokens]


class Searched(CublasLt):
    """With the calls that list algorithms and set them by hand."""

    def proposals(self, shape: Shape, most: int = 64) -> list[Algorithm]:
        """What cuBLASLt proposes, its own choice first."""
        preference = ctypes.c_void_p()
        self._call("MatmulPreferenceCreate", ctypes.byref(preference))
        size = ctypes.c_uint64(WORKSPACE)
        self._call(
            "MatmulPreferenceSetAttribute",
            preference,
            MAX_WORKSPACE,
            ctypes.byref(size),
            ctypes.c_size_t(8),
        )
        found, count = (HeuristicResult * most)(), ctypes.c_int()
        what, w, x, out = self._describe(shape)
        self._call(
            "MatmulAlgoGetHeuristic",
            *(self._handle, what, w, x, out, out, preference),
            most,
            found,
            ctypes.byref(count),
        )
        self._call("MatmulPreferenceDestroy", preference)
        return [tuple(one.algorithm) for one in found[: count.value]]

    def settings(
        self, shape: Shape, like: Algorithm, tiles: dict[int, tuple[int, int]]
    ) -> Iterator[Algorithm]:
        """That algorithm with other tiles, splits and options, the promising first."""
        sizes = []
        for tile in self._able(like, TILE_IDS):
            height, width = tiles.get(tile, (0, 0))  # of columns, of tokens
            if not height or width > 2 * shape.tokens or height * width > 256 * 256:
                continue
            count = math.ceil(shape.columns / height) * math.ceil(shape.tokens / width)
            for splits in range(1, MOST_SPLITS + 1):
                waves = math.ceil(count * splits / 132)
                # What the busiest multiprocessor has to read and to multiply.
                work = waves * shape.inner / splits * (height * width + 60 * (height + width))
                if splits == 1 or count < 264:
                    sizes.append((work, tile, splits))
        options = range(self._able(like, CUSTOM_MOST)[0] + 1)
        for _, tile, splits in sorted(sizes):
            for option in options:
                one = (ctypes.c_uint64 * 8)(*like)
                values = {TILE: tile, SPLITS: splits, CUSTOM: option}
                values[REDUCTION] = 2 if splits > 1 else 0  # in fp32
                able = all(self._put(one, name, value) for name, value in values.items())
                if able and self.supports(shape, tuple(one)):
                    yield tuple(one)

    def described(self, algorithm: Algorithm) -> dict[str, int]:
        names = {"tile": TILE, "splits": SPLITS, "custom": CUSTOM, "stages": STAGES}
        return {name: self._get(algorithm, what) for name, what in names.items()}

    def _get(self, algorithm: Algorithm, what: int) -> int:
        value, size = ctypes.c_uint32(), ctypes.c_size_t()
        self._call(
            "MatmulAlgoConfigGetAttribute",
            ctypes.byref((ctypes.c_uint64 * 8)(*algorithm)),
            what,
            ctypes.byref(value),
            ctypes.c_size_t(4),
            ctypes.byref(size),
        )
        return value.value

    def _put(self, algorithm: Any, what: int, value: int) -> bool:
        call = self._calls.cublasLtMatmulAlgoConfigSetAttribute
        given = ctypes.c_uint32(value)
        return call(ctypes.byref(algorithm), what, ctypes.byref(given), ctypes.c_size_t(4)) == 0

    def _able(self, algorithm: Algorithm, what: int) -> list[int]:
        given, size = ctypes.byref((ctypes.c_uint64 * 8)(*algorithm)), ctypes.c_size_t()
        self._call(
            "MatmulAlgoCapGetAttribute", given, what, None, ctypes.c_size_t(0), ctypes.byref(size)
        )
        values = (ctypes.c_uint32 * (size.value // 4))()
        room = ctypes.c_size_t(size.value)
        self._call("MatmulAlgoCapGetAttribute", given, what, values, room, ctypes.byref(size))
        return list(values)


def search(
    library: Searched, shape: Shape, seconds: float, tiles: dict[int, tuple[int, int]]
) -> dict[str, Any]:
    """The best algorithm for a shape and the times of it and of torch's choice."""
    tokens, columns, inner, has_bias = shape
    count = max(3, math.ceil(4e8 / (2 * columns * inner)))  # 0.4 GB: several times the cache
    weights = [
        torch.randn(columns, inner, device="cuda").mul_(0.02).bfloat16() for _ in range(count)
    ]
    bias = torch.randn(columns, device="cuda").bfloat16() if has_bias else None
    x = torch.randn(tokens, inner, device="cuda").bfloat16()
    expected = F.linear(x.float(), weights[0].float(), None if bias is None else bias.float())

    def time_of(algorithm: Algorithm | None, repeats: int) -> float:
        def work(index: int) -> Tensor:
            if algorithm is None:
                return F.linear(x, weights[index], bias)
            return library.linear(x, weights[index], bias, algorithm)

        return microseconds(work, count, repeats)

    proposed = library.proposals(shape)
    found = {algorithm: time_of(algorithm, 3) for algorithm in proposed}
    began, tried = time.perf_counter(), 0
    for algorithm in library.settings(shape, proposed[0], tiles) if tiles else ():
        if time.perf_counter() - began > seconds:
            break
        tried += 1
        if algorithm not in found:
            found[algorithm] = time_of(algorithm, 3)
    finalists: list[Algorithm | None] = [None, *sorted(found, key=found.__getitem__)[:4]]
    again: dict[Algorithm | None, list[float]] = {one: [] for one in finalists}
    for _ in range(5):
        for one in finalists:
            again[one].append(time_of(one, 4))
    times = {one: statistics.median(some) for one, some in again.items()}
    best = min(times, key=times.__getitem__)
    line: dict[str, Any] = {"shape": list(shape), "torch_us": round(times[None], 1), "tried": tried}
    line["us"] = round(times[best], 1)
    line["proposed_us"] = round(min(found[p] for p in proposed), 1)
    if best is not None:
        ours = library.linear(x, weights[0], bias, best).float()
        line["error"] = float((ours - expected).norm() / expected.norm())
        line["set_to"] = library.described(best)
        if times[best] < (1 - LEAST_GAIN) * times[None] and line["error"] < 5e-3:
            line["algorithm"] = list(best)
    return line


def written(entries: list[dict[str, Any]]) -> list[str]:
    """The table as JSON, one algorithm per line."""
    texts = []
    for entry in entries:
        head = {name: value for name, value in entry.items() if name != "algorithms"}
        lines = ",\n  ".join(map(json.dumps, entry["algorithms"]))
        texts.append(f'{json.dumps(head)[:-1]}, "algorithms": [\n  {lines}\n]}}')
    return ["[" + ",\n".join(texts) + "]"]


def tile_sizes(header: Path | None) -> dict[int, tuple[int, int]]:
    """The tiles that the header names."""
    if header is None:
        return {}
    named = re.findall(r"CUBLASLT_MATMUL_TILE_(\d+)x(\d+) = (\d+)", header.read_text())
    return {int(number): (int(height), int(width)) for height, width, number in named}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="dream-7b")
    parser.add_argument("--tokens", default="32,64,96,128,192,256,384,512,1024")
    parser.add_argument("--seconds", type=float, help="for a shape, beyond proposals (4)")
    parser.add_argument("--header", type=Path, help="cublasLt.h, which names the tiles")
    parser.add_argument("--table", type=Path, default=TABLE)
    options = parser.parse_args()
    if options.seconds is not None and options.header is None:
        parser.error("--seconds needs --header, which names the tiles to try")
    torch.manual_seed(0)
    library = Searched.on(torch.device("cuda"))
    if library is None:
        sys.exit("torch links cuBLASLt statically: its algorithms cannot be chosen")
    device = torch.cuda.get_device_name()
    tiles = tile_sizes(options.header)
    entries = json.loads(options.table.read_text()) if options.table.exists() else []
    here = {"device": device, "version": library.version}
    entry = next((e for e in entries if e.items() >= here.items()), None)
    if entry is None:
        entry = here | {"algorithms": []}
        entries.append(entry)
    for shape in shapes_of(options.model, [int(t) for t in options.tokens.split(",")]):
        line = search(library, shape, options.seconds or 4.0, tiles)
        print(json.dumps({k: v for k, v in line.items() if k != "algorithm"}), flush=True)
        others = [a for a in entry["algorithms"] if a["shape"] != line["shape"]]
        if "algorithm" in line:
            kept = {k: line[k] for k in ("shape", "us", "torch_us", "algorithm")}
            others.append(kept)
        entry["algorithms"] = sorted(others, key=lambda a: a["shape"])
        write_lines(options.table, written(entries))


if __name__ == "__main__":
    main()
