"""`lopa models` and `lopa doctor`: available models, and a check of the installation."""

from __future__ import annotations

import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lopa.cli.device_report import device_report, report_lines, try_a_kernel
from lopa.cli.options import JsonOption, default_model
from lopa.cli.progress import Progress
from lopa.cli.terminal import bytes_text, count_text, plain_table, print_note, print_rich
from lopa.errors import ConfigError, LopaError
from lopa.kernels import triton_start
from lopa.models.files import BUILT_IN, read_json, safetensors_header
from lopa.version import VERSION

if TYPE_CHECKING:
    from rich.table import Table

_REQUIRED = ("torch", "numpy", "safetensors", "tokenizers", "huggingface_hub", "jinja2")
_OPTIONAL = ("triton",)
_BF16_BYTES = 2


models = typer.Typer(invoke_without_command=True)


@models.command("make-tiny")
def make_tiny(
    family: Annotated[str, typer.Argument(help="A family that `lopa models` lists.")],
    folder: Annotated[Path, typer.Argument(help="Output folder; must not exist yet.")],
) -> None:
    """Write a checkpoint of random weights, a few kilobytes, in the layout of a family."""
    from lopa.models.checkpoint import write_tiny
    from lopa.models.families import FAMILIES

    found = next((f for f in FAMILIES if f.name == family), None)
    if found is None:
        known = ", ".join(f.name for f in FAMILIES)
        raise ConfigError(f"no family {family!r}: choose from {known}")
    if folder.exists():
        raise ConfigError(f"{folder} exists already: choose another folder")
    write_tiny(found, folder)
    print_note(f"wrote a tiny {family} model to {folder}")


@models.callback()
def list_models(context: typer.Context, as_json: JsonOption = False) -> None:
    """List model families, published checkpoints and adapters, and dummy models."""
    if context.invoked_subcommand is not None:
        return
    from lopa.models.families import FAMILIES

    found: dict[str, Any] = {
        "families": [
            {
                "name": family.name,
                "architectures": list(family.architectures),
                "hub_ids": list(family.hub_ids),
                "adapters": dict(family.adapters),
                "decoders": list(family.decoders),
                "verified": family.verified,
            }
            for family in FAMILIES
        ],
        "dummies": [
            {
                "name": f"dummy:{name}",
                "family": family.name,
                "parameters": shape.parameters,
                "bf16_bytes": shape.parameters * _BF16_BYTES,
            }
            for family in FAMILIES
            for name, shape in family.shapes.items()
        ],
        "built_in": [
            {"name": name, "folder": str(folder), "installed": _installed(folder)}
            for name, folder in BUILT_IN.items()
        ],
        "default": default_model(),
    }
    if as_json:
        print(json.dumps(found, ensure_ascii=False))
        return
    families = plain_table("family", "decoders", "verified against")
    for entry in found["families"]:
        families.add_row(entry["name"], ", ".join(entry["decoders"]), entry["verified"])
    print_rich(families)
    print()
    published = plain_table("model", "family", "")
    for entry in found["built_in"]:
        state = "built in" if entry["installed"] else "built in, not installed"
        published.add_row(entry["name"], "", state)
    for family in found["families"]:
        for name in family["hub_ids"]:
            published.add_row(name, family["name"], "checkpoint")
        for name, base in family["adapters"].items():
            published.add_row(name, family["name"], f"adapter of {base}")
    random = plain_table("random weights", "family", "parameters", "in bf16")
    for entry in found["dummies"]:
        sizes = count_text(entry["parameters"]), bytes_text(entry["bf16_bytes"])
        random.add_row(entry["name"], entry["family"], *sizes)
    print_rich(published)
    print()
    print_rich(random)


def doctor(as_json: JsonOption = False) -> None:
    """Check this installation; fails only if something required is broken."""
    triton_start.begin_if_gpu()
    with Progress("looking at this machine"):
        found = _examine()
    if as_json:
        print(json.dumps(found, ensure_ascii=False))
    else:
        print_rich(_report(found))
    if found["broken"]:
        raise typer.Exit(1)


def _examine() -> dict[str, Any]:
    broken: list[str] = []
    found: dict[str, Any] = {
        "versions": {"python": platform.python_version(), "lopa": VERSION},
        "platform": platform.platform(),
        "cpu_threads": _cpus(),
        "memory_bytes": _memory(),
    }
    for name in _REQUIRED + _OPTIONAL:
        try:
            __import__(name)
            found["versions"][name] = metadata.version(name)
        except Exception as error:  # a broken package can fail in any way
            found["versions"][name] = None
            if name in _REQUIRED:
                broken.append(f"{name}: {error}")
    if found["versions"]["torch"]:
        found |= _torch()
        try:
            _try_a_round()
            found["decodes"] = True
        except Exception as error:
            found["decodes"] = False
            broken.append(f"decoding: {type(error).__name__}: {error}")
        try:
            found["device"] = _device(found["default_device"])
        except Exception as error:  # such as Triton without a C compiler
            broken.append(f"kernels: {type(error).__name__}: {error}")
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    found["hub"] = "offline by HF_HUB_OFFLINE" if offline else "not tried"
    found["built_in"] = {name: _installed(folder) for name, folder in BUILT_IN.items()}
    for name, folder in BUILT_IN.items():
        if not _installed(folder):
            continue
        try:
            read_json(folder / "config.json")
            for path in folder.glob("*.safetensors"):
                safetensors_header(path)
        except LopaError as error:
            broken.append(f"built-in model {name}: {error}")
    found["default_model"] = default_model()
    found["broken"] = broken
    return found


def _report(found: dict[str, Any]) -> Table:
    table = plain_table("", "")
    for name, version in found["versions"].items():
        table.add_row(name, version or ("absent (optional)" if name in _OPTIONAL else "broken"))
    table.add_section()
    table.add_row("platform", found["platform"])
    table.add_row("CPU threads", str(found["cpu_threads"]))
    memory = found["memory_bytes"]
    table.add_row("memory", bytes_text(memory) if memory else "unknown")
    for device in found.get("devices", []):
        memory = f", {bytes_text(device['memory_bytes'])}" if device["memory_bytes"] else ""
        table.add_row(device["name"], device["description"] + memory)
    table.add_row("device used", found.get("default_device", "none"))
    table.add_row("dtype used", "the checkpoint's")
    table.add_row("a round decodes", "yes" if found.get("decodes") else "no")
    for line in report_lines(found["device"]) if "device" in found else []:
        table.add_row(*line)
    table.add_section()
    table.add_row("hub", found["hub"])
    for name, installed in found["built_in"].items():
        table.add_row(f"built-in {name}", "installed" if installed else "not installed")
    table.add_row("model used", found["default_model"])
    for fault in found["broken"]:
        table.add_row("broken", " ".join(fault.split()), style="red")
    return table


def _torch() -> dict[str, Any]:
    import torch

    from lopa.runner.device import available_devices, choose_device

    devices = []
    for name in available_devices():
        description, memory = platform.machine(), None
        if name.startswith("cuda"):
            properties = torch.cuda.get_device_properties(name)
            description, memory = properties.name, properties.total_memory
        devices.append({"name": name, "description": description, "memory_bytes": memory})
    return {
        "torch_threads": torch.get_num_threads(),
        "devices": devices,
        "default_device": str(choose_device("auto")),
        "default_dtype": "checkpoint",
    }


def _try_a_round() -> None:
    from lopa.config import DecodeConfig
    from lopa.engine.llm import LLM

    # Not by kernels, which would take long to compile
    llm = LLM("dummy:dream-tiny", backend="sdpa")
    llm.generate([1, 2, 3], DecodeConfig(max_rounds=1))


def _device(name: str) -> dict[str, Any]:
    import torch

    device = torch.device(name)
    found = device_report(device)
    if found["backend"] == "triton":
        try_a_kernel(device)
    return found


def _installed(folder: Path) -> bool:
    return (folder / "config.json").exists()


def _cpus() -> int:
    """Cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux has it
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):  # not on every system
        return None
