"""What `lopa doctor` says of the device in use: its kernels, its rounds, the speed to expect.

Nothing is measured here, which would take minutes: what rounds cost is what was kept of earlier
runs. A speed is projected from it, with the tokens that rounds bring on the built-in tasks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from lopa.decoding.round_cost import RoundCost

_FP8 = (8, 9)  # compute capability from which there is fp8
_USUAL = "dummy:dream-7b"  # the shape of a usual model, for which there are kernels
_SURE = 0.6  # probability of a lookahead token, for the choice of branches
# Milliseconds of rounds of a 7B model on an H200, in bf16 and in fp8, by tokens:
# measurements/h200/rounds_bf16.json and rounds_fp8.json
H200_ROUNDS = {64: (3.93, 3.67), 512: (12.00, 7.89)}


def device_report(device: torch.device) -> dict[str, Any]:
    import torch

    from lopa.engine import kept_cost
    from lopa.models import checkpoint
    from lopa.runner.backend import why_not_triton

    reason = why_not_triton(checkpoint.model_config(_USUAL), device)
    found: dict[str, Any] = {
        "backend": "triton" if reason is None else "sdpa",
        "kernels": f"torch's own: the backend triton {reason}",
        "fp8": "no: it needs an NVIDIA GPU of compute capability 8.9",
        "rounds": [
            {**_rounds(cost), "model": about["model"], "kind": about.get("quantize", _kind(about))}
            for about, cost in kept_cost.kept_for(device)
        ],
    }
    if device.type == "cuda":
        found["fp8"] = _fp8(torch.cuda.get_device_capability(device))
    if reason is None:
        from lopa.kernels.compilation import triton_folder
        from lopa.kernels.hopper import common as hopper

        found["kernels"] = "Triton's"
        if hopper.available(device):
            found["kernels"] += "; in bf16 also CUDA's for Hopper (wgmma, compressed weights)"
        folder = triton_folder()
        found["compiled_in"] = str(folder)
        found["compiled"] = folder.is_dir() and any(folder.iterdir())
    return found


def try_a_kernel(device: torch.device) -> None:
    """Compile the smallest kernel and run it."""
    import torch

    from lopa.kernels.compilation import ensure_triton_folder
    from lopa.kernels.triton.kv_write import gather

    ensure_triton_folder()
    rows = torch.arange(64.0, device=device).view(4, 16)
    found = gather(rows, rows, torch.tensor([2, -1], dtype=torch.int32, device=device))
    if not torch.equal(found, rows[[2, 0]]):
        raise RuntimeError("a kernel gave a wrong result")


def report_lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [("kernels", found["kernels"])]
    if "compiled" in found:
        state = "kept in" if found["compiled"] else "none yet: lopa warmup compiles them, kept in"
        lines.append(("compiled kernels", f"{state} {found['compiled_in']}"))
    lines.append(("fp8", found["fp8"]))
    for one in found["rounds"]:
        times = f"{one['one_row_ms']:.2f} ms with one row, {one['eight_rows_ms']:.2f} with eight"
        speed = f"about {one['tokens_per_second']:.0f} tokens/s for one answer (projected)"
        choice = f"auto begins with k = {one['branches']}"
        text = f"{one['kind']}: {times} (measured); {choice}; {speed}"
        lines.append((f"rounds of {one['model']}", text))
    if not found["rounds"]:
        lines.append(("rounds", "not measured yet: lopa warmup does it, or the first use of auto"))
    return lines


def _rounds(cost: RoundCost) -> dict[str, Any]:
    """Of one answer, in the middle of it."""
    from lopa.config import AUTO_BRANCHES, DecodeConfig
    from lopa.decoding.branch_budget import BranchBudget
    from lopa.decoding.round_cost import USUAL_ROW
    from lopa.decoding.row_budget import RowBudget

    offer = BranchBudget(DecodeConfig().accept).offer(USUAL_ROW, AUTO_BRANCHES[-1], _SURE)
    (branches,) = RowBudget(cost).first_numbers([offer])
    tokens = offer.usual + offer.steps.gain_of(branches)
    seconds = cost((1 + branches) * USUAL_ROW, (branches,))
    return {
        "one_row_ms": 1e3 * cost(USUAL_ROW),
        "eight_rows_ms": 1e3 * cost(8 * USUAL_ROW, (7,)),
        "branches": branches,
        "tokens_per_second": tokens / seconds,
    }


def _fp8(capability: tuple[int, int]) -> str:
    if capability < _FP8:
        have = ".".join(map(str, capability))
        return f"no: it needs compute capability 8.9, and this GPU has {have}; --quantize int8 runs"
    (few, (bf16, fp8)), (many, (more_bf16, more_fp8)) = sorted(H200_ROUNDS.items())
    return (
        f"yes, --quantize fp8: it helps rounds of many tokens, little those of few (a 7B model on "
        f"an H200: {more_fp8:.1f} ms instead of {more_bf16:.1f} with {many} tokens, {fp8:.1f} "
        f"instead of {bf16:.1f} with {few}; measured there)"
    )


def _kind(about: Any) -> str:
    return str(about["dtype"]).removeprefix("torch.")
