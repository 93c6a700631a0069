"""Run by tests without Triton's interpreter: kernels as compiled for Hopper.

Prints a line of JSON for each: its name, wgmma and copy instructions, bytes of shared memory and of
stack (which spilled registers need). Which: `experts` (their products) or `lattice` (what the
statistics of answers that have to fit are computed by, and of gaps).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lopa.kernels.scaled import LARGEST
from lopa.kernels.triton import bundle_weights, confidence, experts, lattice

KINDS = {"bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn}
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


def compiled(kernel: Any, kind: str, tile: int) -> dict[str, Any]:
    is_first = kernel is experts._gate_up
    choose = experts.gate_up_tiling if is_first else experts.down_tiling
    tiling = choose(tile, KINDS[kind])
    sizes = {
        "CHOICES": 9,
        "LARGEST": LARGEST.get(KINDS[kind], 0.0),
        "WIDE": False,
        "EVEN": True,
        "BLOCK_M": tile,
        "BLOCK_N": tiling.columns,
        "BLOCK_K": tiling.inner,
    }
    types = dict.fromkeys(kernel.arg_names, "*i32")
    types |= dict.fromkeys(("x", "w"), f"*{kind}") | dict.fromkeys(("size", "inner", "rows"), "i32")
    types |= dict.fromkeys(("x_scale", "w_scale", "out_scale"), "*fp32")
    types |= {"out": f"*{kind}" if is_first else "*bf16"}
    return resources(kernel, f"{kernel.__name__} {kind} {tile}", types, sizes, tiling)


def resources(
    kernel: Any,
    name: str,
    types: dict[str, str],  # of the arguments
    sizes: dict[str, Any],  # of the constants
    tiling: Any,
    unknown: Sequence[str] = (),  # arguments of which is not known whether 16 divides them
) -> dict[str, Any]:
    signature, constants, attributes = {}, {}, {}
    for index, argument in enumerate(kernel.arg_names):
        if argument in sizes:
            signature[argument], constants[(index,)] = "constexpr", sizes[argument]
            continue
        signature[argument] = types[argument]
        if argument not in unknown:
            attributes[(index,)] = [["tt.divisibility", 16]]
    found = triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": tiling.warps, "num_stages": tiling.stages},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(found.asm["cubin"])
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    stack = re.search(r"STACK:(\d+)", usage)
    assert stack is not None
    return {
        "name": name,
        "wgmma": found.asm["ptx"].count("wgmma.mma_async"),
        "copies": found.asm["ptx"].count("cp.async.cg"),
        "shared": found.metadata.shared,
        "stack": int(stack[1]),
    }


def of_experts() -> Iterator[dict[str, Any]]:
    for tile in (16, 64):
        for kind in KINDS:
            for kernel in (experts._gate_up, experts._down):
                yield compiled(kernel, kind, tile)


def of_lattice() -> Iterator[dict[str, Any]]:
    tiling = lattice.Tiling()
    groups = {"GROUPS": bundle_weights.GROUPS, "NARROW": bundle_weights.NARROW}
    chunks = {**groups, "CHUNK": tiling.chunk, "POSITIONS": tiling.positions}
    nodes = {"LANES": tiling.lanes, "INPUTS": tiling.inputs}
    block = {"CHUNKS": 19, "BLOCK": confidence.BLOCK, "SAMPLING": False, "NEVER": 2}
    several = {"STATES": 1024, "BLOCK": 256, "AT_ONCE": tiling.states}
    bundles = {**groups, "CLASSES": 512, "WIDE": bundle_weights.WIDE}
    onward = {"ONWARD": lattice.ONWARD}
    for kernel, sizes, warps in (
        (confidence._scan, block, confidence.WARPS),
        (bundle_weights._class_scores, {**chunks, "SAMPLING": False}, tiling.chunk_warps),
        (bundle_weights._class_scores, {**chunks, "SAMPLING": True}, tiling.chunk_warps),
        (bundle_weights._bundle_weights, bundles, 4),
        (lattice._passes, nodes, tiling.lanes // 32),
        (lattice._walk, onward, 1),
        (lattice._statistics, several, tiling.statistics_warps),
    ):
        types = dict.fromkeys(kernel.arg_names, "*i32") | {"logits": "*bf16", "settings": "*i64"}
        floats = ("temperature", "scores", "tops", "weights", "values", "scale")
        types |= dict.fromkeys(floats, "*fp32")
        own = ("first_id", "first_chunk") if kernel is confidence._scan else ()
        if kernel is confidence._scan:
            types |= {"found": "*fp32"}
        if kernel is bundle_weights._bundle_weights:
            types |= {"members": "*i8"}
        types |= dict.fromkeys((*bundle_weights.SIZES, "vocab", "stride", "mask_id", *own), "i32")
        yield resources(
            kernel, kernel.__name__, types, sizes, SimpleNamespace(warps=warps, stages=3)
        )


if __name__ == "__main__":
    for line in {"experts": of_experts, "lattice": of_lattice}[sys.argv[1]]():
        print(json.dumps(line), flush=True)
