"""Run by a test without Triton's interpreter: the products of experts as compiled for Hopper.

Prints a line of JSON for each: its name, wgmma and asynchronous copies, bytes of shared memory and of
stack (which spilled registers need).
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lopa.kernels.scaled import LARGEST
from lopa.kernels.triton import experts

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
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in sizes:
            signature[name], constants[(index,)] = "constexpr", sizes[name]
            continue
        signature[name] = types[name]
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
        "name": f"{kernel.__name__} {kind} {tile}",
        "wgmma": found.asm["ptx"].count("wgmma.mma_async"),
        "copies": found.asm["ptx"].count("cp.async.cg"),
        "shared": found.metadata.shared,
        "stack": int(stack[1]),
    }


if __name__ == "__main__":
    for tile in (16, 64):
        for kind in KINDS:
            for kernel in (experts._gate_up, experts._down):
                print(json.dumps(compiled(kernel, kind, tile)), flush=True)
