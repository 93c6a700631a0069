"""Files of a model: where they are (a folder, the hub, the package) and how they are read."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lopa.errors import CheckpointError
from lopa.models import hub
from lopa.models.unreadable import check_pointer, is_gguf

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
MAX_BYTES = 100_000_000  # of a JSON file, and of a header: the limit of safetensors itself
BUILT_IN = {"tiny": Path(__file__).parents[1] / "tiny"}


def resolve(name: str | Path, what: str = "model") -> Path:
    """The folder of a built-in name, a local folder or a hub id (downloaded when needed)."""
    return local_folder(name, what) or hub.download(str(name), what)


@contextmanager
def headers_of(name: str | Path, what: str = "model") -> Iterator[Path]:
    """A folder with the config and the headers at least; of a hub id nothing else is fetched."""
    folder = local_folder(name, what) or hub.cached(str(name))
    if folder is not None:
        yield folder
        return
    with hub.headers(str(name), what) as folder:
        yield folder


def local_folder(name: str | Path, what: str = "model") -> Path | None:
    """The folder of a built-in name or a local folder; None: a hub id."""
    if str(name) in BUILT_IN and (BUILT_IN[str(name)] / "config.json").exists():
        return BUILT_IN[str(name)]
    folder = Path(name)
    with suppress(RuntimeError):  # no such user: then there is no such folder either
        folder = folder.expanduser()
    if str(name) and folder.is_dir():
        return folder
    if folder.is_file():
        if folder.suffix == ".gguf":
            raise is_gguf(folder)
        raise CheckpointError(f"{what} {name} is a file: give the folder that holds it")
    if not _HUB_ID.match(str(name)):
        raise CheckpointError(
            f"{what} {name} does not exist: give a folder, a hub id such as "
            "Dream-org/Dream-v0-Instruct-7B, or dummy:dream-tiny"
        )
    return None


def file_size(path: Path) -> int:
    """The size of a regular file. Nothing else may be opened: a pipe would wait for a writer."""
    try:
        status = path.stat()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: is {path.parent} a model folder?") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", error)
        raise CheckpointError(f"{str(path)[:300]} cannot be read ({reason})") from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} cannot be read (it is no regular file): fetch it again")
    return status.st_size


def read_text(path: Path) -> str:
    if file_size(path) > MAX_BYTES:
        raise CheckpointError(f"{path} is larger than {MAX_BYTES} bytes: fetch it again")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as text ({error}): fetch it again") from None
    check_pointer(path, text[:64].encode())
    return text


def read_json(path: Path) -> dict[str, Any]:
    text = read_text(path)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}): fetch it again") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds no JSON object: fetch it again")
    return found


def safetensors_header(path: Path) -> dict[str, Any]:
    """The tensors a safetensors file declares, checked against its size."""
    size = file_size(path)
    try:
        with path.open("rb") as file:
            start = file.read(64)
            check_pointer(path, start)
            file.seek(8)
            length = int.from_bytes(start[:8], "little")
            if not 2 <= length <= size - 8:
                raise ValueError("its header is cut off")
            if length > MAX_BYTES:
                raise ValueError(f"its header is larger than {MAX_BYTES} bytes")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for key, value in header.items():
            for number in (*value["shape"], *value["data_offsets"]):
                if type(number) is not int or not 0 <= number < 2**63:
                    raise ValueError(f"tensor {key} has no valid shape or place")
        ends = {key: 8 + length + value["data_offsets"][1] for key, value in header.items()}
    except (
        *(OSError, ValueError, KeyError, TypeError, AttributeError),
        *(IndexError, RecursionError),
    ) as error:
        raise CheckpointError(
            f"{path} is not a valid safetensors file ({error}): fetch it again"
        ) from None
    for key, end in sorted(ends.items(), key=lambda item: item[1]):
        if end > size:
            raise CheckpointError(
                f"{path} is cut off within tensor {key} "
                f"({size} bytes where {max(ends.values())} are declared): fetch it again"
            )
    return dict(header)
