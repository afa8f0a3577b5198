"""Tells of what kind a source is, and opens it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import InvalidInput, NotFound, RetryLater
from holdfast.exchange import dcp_folder, safetensors_files, torch_files
from holdfast.exchange.offer import Offered, read_range
from holdfast.format import names
from holdfast.format.values import TensorRef

KINDS = ("torch", "dcp", "safetensors", "hf")
"""What can be read; `hf` is a model folder as Hugging Face lays it out."""

_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # torch before 1.6 begins a file with this number
_BIN_INDEX, _BIN = ".bin.index.json", "*.bin"
_LOOKED_FOR = (
    "a file of torch.save (a zip archive, or torch's older pickle), a .safetensors file, a folder of "
    "torch.distributed.checkpoint (with a file .metadata), and a Hugging Face model folder (*.safetensors or "
    "*.bin, with or without an index)"
)


def tell_kind(path: Path) -> str:
    """Of which of `KINDS` a source is, by what is in it and not by its name.

    Raises:
        NotFound: there is nothing.
        InvalidInput: none of them.
        RetryLater: it could not be read.
    """
    try:
        if path.is_dir():
            found = _kind_of_folder(path)
        elif path.exists():
            found = _kind_of_file(path)
        else:
            raise NotFound(f"{path} does not exist.", key=str(path))
    except PermissionError as error:
        raise RetryLater(f"{path} could not be read: {error.strerror}.", key=str(path)) from error
    if found is None:
        message = f"{path} is nothing that can be imported. Looked for: {_LOOKED_FOR}."
        raise InvalidInput(message, key=str(path))
    return found


def _kind_of_file(path: Path) -> str | None:
    if path.name.endswith((safetensors_files.INDEX_SUFFIX, _BIN_INDEX)):
        return "hf"
    if not path.is_file():
        return None  # a FIFO would be waited for
    head = bytes(read_range(path, 0, min(16, path.stat().st_size)))
    if head.startswith((b"PK\x03\x04", _LEGACY)):
        return "torch"
    size = int.from_bytes(head[:8], "little")
    return "safetensors" if head[8:9] == b"{" and size < 1 << 32 else None


def _kind_of_folder(path: Path) -> str | None:
    if (path / names.RUN).exists():
        message = f"{path} is a home of Holdfast already; copy it as it is, or export from it."
        raise InvalidInput(message, key=str(path))
    if (path / dcp_folder.METADATA).is_file():
        return "dcp"
    return "hf" if any(path.glob("*.safetensors")) or any(path.glob(_BIN)) else None


@dataclass(frozen=True, slots=True)
class Asked:
    """What is wanted of a source: names under any of `only` (None: all), put under the key `under`."""

    only: tuple[str, ...] | None = None
    under: str | None = None


def open_source(path: Path, kind: str, asked: Asked) -> Offered:
    """What a source of a known kind offers.

    Raises:
        InvalidInput: an unknown kind, or not a source of that kind.
        Unsupported: it needs code that is not safe to load, or a dtype that no checkpoint can hold.
        Corrupt: it is damaged.
        NotFound: a file of it is missing.
    """
    readers: dict[str, Callable[[], Offered]] = {
        "torch": lambda: torch_files.offer_files([path], under=asked.under),
        "dcp": lambda: _put_under(dcp_folder.offer_folder(path, only=asked.only), asked.under),
        "safetensors": lambda: _put_under(safetensors_files.offer_file(path), asked.under),
        "hf": lambda: _open_hf(path, asked.under),
    }
    if kind not in readers:
        raise InvalidInput(f"{kind!r} is no kind of source; there are: {', '.join(KINDS)}.")
    _check_shape(path, kind)
    return readers[kind]()


def _check_shape(path: Path, kind: str) -> None:
    """Refuse a file where a folder is needed and the other way round, in words."""
    if not path.exists():
        raise NotFound(f"{path} does not exist.", key=str(path))
    if path.is_dir() != (kind in ("dcp", "hf")) and not path.name.endswith(".index.json"):
        needed = "a folder" if kind in ("dcp", "hf") else "a file"
        raise InvalidInput(f"{path} is not a source of the kind {kind!r}, which is {needed}.", key=str(path))
    if kind == "dcp" and not (path / dcp_folder.METADATA).is_file():
        message = (
            f"{path} has no file {dcp_folder.METADATA}: it is no DCP checkpoint, or its save never ended."
        )
        raise InvalidInput(message, key=str(path))


def _open_hf(path: Path, under: str | None) -> Offered:
    folder = path if path.is_dir() else path.parent
    if path.is_dir() and any(path.glob("*.safetensors")):
        return _put_under(safetensors_files.offer_folder(folder), under)
    if path.name.endswith(safetensors_files.INDEX_SUFFIX):
        return _put_under(safetensors_files.offer_index(path), under)
    index = path if path.is_file() else safetensors_files.find_index(folder, _BIN_INDEX)
    if index is not None:
        files: Iterable[str] = dict.fromkeys(safetensors_files.read_index(index).values())
        return torch_files.offer_files([folder / name for name in files], under=under)
    weights = sorted(folder.glob("pytorch_model*.bin")) or sorted(folder.glob(_BIN))
    if not weights:
        raise InvalidInput(f"{path} holds no *.safetensors and no *.bin file: no model.", key=str(path))
    return torch_files.offer_files(weights, under=under)


def _put_under(offered: Offered, under: str | None) -> Offered:
    """The same, below one top-level key."""
    if under is None:
        return offered
    tensors = tuple(
        type(offer)(f"{under}.{offer.name}", offer.dtype, offer.shape, offer.regions) for offer in offered
    )
    tied = {f"{under}.{alias}": f"{under}.{name}" for alias, name in offered.tied.items()}
    if not offered.values:
        return Offered(tensors, tied, {under: {}})
    values = {key: _moved(value, under) for key, value in offered.values.items()}
    return Offered(tensors, tied, {under: values})


def _moved(value: object, under: str) -> object:
    if isinstance(value, TensorRef):
        return TensorRef(f"{under}.{value.name}")
    if isinstance(value, dict):
        return type(value)((key, _moved(item, under)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(item, under) for item in value)
    return value
