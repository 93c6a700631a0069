"""Files of a repository on the hub: all that a model needs, or its config and headers alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from lopa.errors import CheckpointError

_WANTED = ["*.json", "*.safetensors", "merges.txt", "*.jinja"]
# Small files, which are read as a whole where only headers are asked for.
_SMALL = ("config.json", "adapter_config.json", "tokenizer_config.json")
_INDEX = ".safetensors.index.json"


def download(name: str, what: str) -> Path:
    """The folder of a repository, downloaded when needed."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_WANTED))
    except Exception as error:  # the hub client raises a dozen unrelated kinds
        raise unreachable(name, what, error) from error


def cached(name: str) -> Path | None:
    """The folder of a repository that was downloaded before."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    return folder if any(folder.glob("*.safetensors")) else None


@contextmanager
def headers(name: str, what: str) -> Iterator[Path]:
    """A folder like the repository's, made from its small files and its safetensors headers.

    Safetensors files have their size, which takes no room on disk, and no content behind the
    header. Other files are empty. Some requests of 100 KB, whatever the size of the model.
    """
    from huggingface_hub import HfApi, hf_hub_download

    with TemporaryDirectory(prefix="lopa-") as made:
        folder = Path(made)
        try:
            api = HfApi()
            for file in (sibling.rfilename for sibling in api.model_info(name).siblings or ()):
                if "/" in file:
                    continue
                if file in _SMALL or file.endswith(_INDEX):
                    content = Path(hf_hub_download(name, file)).read_bytes()
                    (folder / file).write_bytes(content)
                elif file.endswith(".safetensors"):
                    tensors = api.parse_safetensors_file_metadata(name, file).tensors
                    _write_header(
                        folder / file,
                        {
                            key: {
                                "dtype": tensor.dtype,
                                "shape": tensor.shape,
                                "data_offsets": tensor.data_offsets,
                            }
                            for key, tensor in tensors.items()
                        },
                    )
                else:
                    (folder / file).touch()
        except Exception as error:  # as above
            raise unreachable(name, what, error) from error
        try:
            yield folder
        except CheckpointError as error:  # about the repository, not about this folder
            raise CheckpointError(str(error).replace(str(folder), name)) from None


def _write_header(path: Path, tensors: dict[str, dict[str, object]]) -> None:
    header = json.dumps(tensors).encode()
    ends = [t["data_offsets"][1] for t in tensors.values()]  # type: ignore[index]
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + max(ends, default=0))


def unreachable(name: str, what: str, error: Exception) -> CheckpointError:
    lines = str(error).strip().splitlines()
    reason = lines[0] if lines else type(error).__name__
    return CheckpointError(
        f"{what} {name} is no folder here and could not be fetched from the hub ({reason}): check "
        f"the name and the network; without a network, run hf download {name} --local-dir FOLDER "
        "where there is one, and give that folder"
    )
