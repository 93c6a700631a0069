"""How often a router chooses other experts in bf16 than in fp32: the table of docs/models.md.

    PYTHONPATH=src python measurements/router_precision.py tests/golden/models/llada2_a …

Over every layer and token of a random sequence, the share of tokens whose set of experts is not the
same: in a bf16 model with its router in fp32, as here, and with the router's product in bf16 too,
against an fp32 model; and between these two routers on the same bf16 activations.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from lopa import LLM
from lopa.models import checkpoint
from lopa.models.mixture import Router

TOKENS = 448


def chosen(folder: Path, ids: list[int], dtype: str, *, narrow: bool = False) -> list[Tensor]:
    """The sets of experts, [layers, T, k], and those that the other router would have chosen.

    narrow: whether the model goes by a router in bf16.
    """
    llm = LLM(folder, device="cpu", dtype=dtype, mask_token_id=0)
    found: list[Tensor] = []
    others: list[Tensor] = []

    def observe(router: Router, inputs: tuple[Tensor, ...], out: tuple[Tensor, Tensor]) -> object:
        other = in_bf16(router, inputs[0])
        own = other if narrow else out
        found.append(own[0].sort(-1).values)
        others.append(other[0].sort(-1).values)
        return own

    for module in llm.model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(observe)
    llm.forward(ids, attention="block", block_size=llm.config.trained_block or 32)
    return [torch.stack(found), torch.stack(others)]


def in_bf16(router: Router, x: Tensor) -> tuple[Tensor, Tensor]:
    """The same choice with the product rounded to bf16, as where it is a plain layer."""
    plain = Router.forward
    levels = torch.nn.functional.linear(x.bfloat16(), router.weight.bfloat16()).float()
    # A router of unit weights takes the levels as they are.
    twin = Router.__new__(Router)
    torch.nn.Module.__init__(twin)
    twin.config, twin.dtype, twin.bias = router.config, router.dtype, router.bias
    twin.weight = torch.nn.Parameter(torch.eye(levels.shape[1]), requires_grad=False)
    return plain(twin, levels)


def main() -> None:
    print(
        "| checkpoint | choices | router in fp32 | router in bf16 | of the two, same activations |"
        "\n|---|---|---|---|---|"
    )
    for name in sys.argv[1:]:
        folder = Path(name)
        vocab = checkpoint.read_config(folder).vocab_size
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(1, vocab, (TOKENS,), generator=generator).tolist()
        truth, _ = chosen(folder, ids, "float32")
        wide, beside = chosen(folder, ids, "bfloat16")
        narrow, _ = chosen(folder, ids, "bfloat16", narrow=True)
        shares = [
            (a != b).any(-1).float().mean().item()
            for a, b in ((wide, truth), (narrow, truth), (beside, wide))
        ]
        counts = " | ".join(f"{share:.1%}" for share in shares)
        print(f"| {folder.name} | {truth[..., 0].numel()} | {counts} |")


if __name__ == "__main__":
    main()
