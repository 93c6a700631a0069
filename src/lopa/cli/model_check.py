"""`lopa models check`: what a checkpoint would run as, or what is in its way."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from lopa.cli.options import JsonOption
from lopa.cli.progress import Progress
from lopa.cli.terminal import bytes_text, count_text, plain_table, print_rich, visible
from lopa.errors import LopaError

if TYPE_CHECKING:
    from lopa.engine.model_check import Fit, ModelCheck


def check(
    model: Annotated[str, typer.Argument(help="A folder, a hub id, tiny, or dummy:NAME.")],
    adapter: Annotated[
        str | None, typer.Option(help="PEFT LoRA to check with it: a folder or a hub id.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, float16, float64; auto: the checkpoint's.")
    ] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Say what a checkpoint would run as, or what is in its way. Reads no weights.

    Of a hub id that is not in the local cache only the config and the headers are fetched.
    """
    with Progress("reading the config and the headers"):
        from lopa.engine.model_check import check_model

        try:
            found = check_model(model, adapter=adapter, dtype=dtype)
        except LopaError as error:
            if not as_json:
                raise
            print(json.dumps({"model": model, "runs": False, "problem": str(error)}))
            raise typer.Exit(1) from None
    if as_json:
        print(json.dumps({"runs": True, **asdict(found)}, ensure_ascii=False))
        return
    _report(found)


def _report(found: ModelCheck) -> None:
    settings = found.settings
    print(f"{visible(found.model)}: runs")
    about = plain_table("", "")
    rows = {
        "family": f"{found.family}, verified against {found.verified}",
        "parameters": count_text(found.parameters),
        "weights": f"{bytes_text(found.weight_bytes)} in {found.dtype}",
        "KV cache": f"{bytes_text(found.kv_bytes_per_1k)} for 1,024 tokens; context "
        f"{found.context:,}",
        "decoder": f"{settings['decoder']}, window {settings.get('window', 'fixed')}, blocks of "
        f"{settings.get('block_size', '–')}; also "
        + ", ".join(name for name in found.decoders if name != settings["decoder"]),
        "presets": ", ".join(found.presets) or "none fits it",
        "adapter": _adapter(found),
        "tokenizer": ("yes" if found.tokenizer else "no: prompts are token ids")
        + (", with a chat template" if found.chat_template else ""),
        "backend": f"{found.backend} on {found.device}"
        + (f"; {found.gpu_backend} on a CUDA GPU" if found.gpu_backend else ""),
    }
    for name, value in rows.items():
        about.add_row(name, value)
    print_rich(about)
    print()
    fits = plain_table("memory", "devices", "tokens that the KV cache holds")
    for fit in (found.here, *found.fits):
        fits.add_row(f"{bytes_text(fit.memory_bytes)} ({fit.device})", *_needs(fit))
    print_rich(fits)


def _adapter(found: ModelCheck) -> str:
    if found.adapter is not None:
        return f"{found.adapter} fits"
    if found.adapters:
        return f"none; published for d2f and lopa: {', '.join(found.adapters)}"
    return "none"


def _needs(fit: Fit) -> tuple[str, str]:
    if fit.tensor_parallel is None:
        return "does not fit", ""
    split = f" (--tensor-parallel {fit.tensor_parallel})" if fit.tensor_parallel > 1 else ""
    return f"{fit.tensor_parallel}{split}", f"{fit.cache_tokens:,}"
