"""A checkpoint larger than the memory a rank may have, loaded by two: `make test-parallel`."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import Ranks

from lopa.distributed.mesh import Mesh
from lopa.distributed.rank_llm import RankLLM
from lopa.models import llada2
from lopa.models.family import Target

pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux"),
]

SHARDS = 12
BESIDE = 256 * 2**20  # bytes that a rank may have beside its part
CONFIG = {
    **llada2.FAMILY.tiny,
    "num_hidden_layers": 25,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_experts": 32,
    "moe_intermediate_size": 512,
    "torch_dtype": "bfloat16",
}


def write_sparse(folder: Path) -> int:
    """Shards of zeros that take no space on the disk, but for norms; returns their bytes."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    targets = llada2.weight_targets(llada2.read_config(CONFIG))
    keys = list(targets)
    weight_map: dict[str, str] = {}
    total = 0
    for shard in range(SHARDS):
        name = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        own = keys[shard * len(keys) // SHARDS : (shard + 1) * len(keys) // SHARDS]
        weight_map |= dict.fromkeys(own, name)
        total += write_shard(folder / name, {key: targets[key] for key in own})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return total


def write_shard(path: Path, targets: dict[str, Target]) -> int:
    header: dict[str, Any] = {}
    end = 0
    for key, target in targets.items():
        begin, end = end, end + 2 * int(np.prod(target.shape))
        header[key] = {
            "dtype": "BF16",
            "shape": list(target.shape),
            "data_offsets": [begin, end],
        }
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for key, target in targets.items():
            if len(target.shape) == 1:
                file.seek(8 + len(raw) + header[key]["data_offsets"][0])
                file.write(b"\x80\x3f" * target.shape[0])  # 1.0
        file.truncate(8 + len(raw) + end)
    return end


def memory(name: str) -> int:
    """Of this process: VmSize is what RLIMIT_AS limits, VmHWM the most that was in use."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def load_under_limit(mesh: Mesh, folder: str, part: int, beside: int) -> dict[str, Any]:
    before = memory("VmHWM")
    limit = memory("VmSize") + part + beside
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limits[1]))
    seen: list[tuple[int, int]] = []
    llm = RankLLM(folder, mesh=mesh, cache_tokens=256, progress=lambda *done: seen.append(done))
    # Threads that compute reserve more addresses than they use.
    resource.setrlimit(resource.RLIMIT_AS, limits)
    held = sum(p.numel() * p.element_size() for p in llm.model.parameters())
    tokens = llm.generate([1, 2, 3], max_new_tokens=8, threshold=0.0).token_ids
    return {
        "limit": limit,
        "held": held,
        "beside": memory("VmHWM") - before - held,
        "progress": seen[-1],
        "reports": len(seen),
        "tokens": tokens,
    }


def test_a_rank_needs_memory_for_its_part_alone(tmp_path: Path) -> None:
    total = write_sparse(tmp_path)
    ranks = Ranks(2)
    try:
        found = ranks.run(
            load_under_limit, str(tmp_path), total // 2, BESIDE, branches=1, tensors=2
        )
    finally:
        ranks.close()
    for answer in found:
        assert total > answer["limit"]
        assert answer["held"] < 0.51 * total
        assert answer["beside"] < BESIDE
        assert answer["progress"] == (answer["reports"],) * 2
    assert found[0]["tokens"] == found[1]["tokens"] != []
