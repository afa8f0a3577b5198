"""Reader of safetensors files and Hugging Face model folders: headers now, bytes on demand."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct, field

from holdfast.checkpoint.exchange.source import RegionReader, Source, SourceTensor, file_reader, read_range
from holdfast.checkpoint.format.agreement import covers_once
from holdfast.checkpoint.format.catalog import check_tensor
from holdfast.checkpoint.format.dtypes import ITEM_BYTES
from holdfast.checkpoint.format.layout import MAX_HEADER_BYTES, Region, parse_header
from holdfast.checkpoint.format.limits import Sizes
from holdfast.errors import Corrupt, InvalidInput, NotFound, Unsupported
from holdfast.system.documents import Count, decode_as, read_as, shown

SHARDING = "DCP_SHARDING_INFO"
INDEX_SUFFIX = ".safetensors.index.json"
_MAX_FILE_NAME_BYTES = 255  # the limit of Linux
_WeightMap = dict[str, Annotated[str, Meta(max_length=1024)]]


class _Entry(Struct):
    """Entry of a tensor in the header of a safetensors file."""

    dtype: Annotated[str, Meta(max_length=64)]
    shape: Sizes
    data_offsets: tuple[Count, Count]


class _Metadata(Struct):
    """Metadata of a safetensors file; `sharding` is JSON with the `_Place` of each tensor."""

    sharding: str = field(default="{}", name=SHARDING)


class _Place(Struct):
    """Position of a file's tensor in the whole one."""

    saved_offsets: Sizes


def open_folder(folder: Path) -> Source:
    """Open the safetensors files of a folder: those in its index, or all if it has no index.

    Regions of one tensor in several files are joined, if the files' metadata describe them. DCP's Hugging
    Face writer and Holdfast write such metadata.
    """
    index = find_index(folder, INDEX_SUFFIX)
    if index is None:
        return open_files(sorted(folder.glob("*.safetensors")))
    return open_index(index)


def open_index(index: Path) -> Source:
    """Open the files in an index."""
    weight_map = read_index(index)
    return open_files([index.parent / name for name in dict.fromkeys(weight_map.values())], weight_map)


def find_index(folder: Path, suffix: str) -> Path | None:
    """Return the only index in a folder with a suffix, or None."""
    found = sorted(path for path in folder.iterdir() if path.name.endswith(suffix))
    if len(found) > 1:
        shown = ", ".join(path.name for path in found)
        raise InvalidInput(
            f"{folder} contains several models ({shown}). Pass one of these files, or a folder with one "
            "model.",
            key=str(folder),
        )
    return found[0] if found else None


def read_index(path: Path) -> dict[str, str]:
    """Return the file name of each tensor in a Hugging Face index."""
    try:
        size = path.stat().st_size
        text = bytes(read_range(path, 0, min(size, MAX_HEADER_BYTES + 1)))
        found = decode_as(dict[str, Any], text, str(path), max_bytes=MAX_HEADER_BYTES)
        weight_map = read_as(_WeightMap, found.get("weight_map"), "weight_map")
    except Corrupt as error:
        raise Corrupt(f"{path} is not an index with a weight_map: {error}", key=str(path)) from error
    files = set(weight_map.values())
    sizes = {name: len(name.encode("utf-8", "surrogateescape")) for name in files}
    outside = [name for name in files if "\0" in name or Path(name).name != name]
    outside += [name for name, num_bytes in sizes.items() if not 0 < num_bytes <= _MAX_FILE_NAME_BYTES]
    if outside:
        raise Corrupt(f"{path} names {outside[0]!r}, which is not a file of its folder.", key=str(path))
    for name in files:
        if not (path.parent / name).is_file():
            raise NotFound(
                f"{path.parent / name} is missing, but {path.name} lists it. Download it again.", key=name
            )
    return weight_map


def open_files(paths: Iterable[Path], weight_map: Mapping[str, str] | None = None) -> Source:
    """Open safetensors files as one source, with the file name of each tensor if they have an index."""
    found: dict[str, list[tuple[str, RegionReader]]] = {}
    for path in paths:
        for name, dtype, reader in _readers(path):
            if weight_map is None or weight_map.get(name) == path.name:
                found.setdefault(name, []).append((dtype, reader))
    missing = [name for name in weight_map or () if name not in found]
    if missing and weight_map:
        raise Corrupt(
            f"{weight_map[missing[0]]} does not contain {missing[0]}, although the index lists it there.",
            key=missing[0],
        )
    return Source(tuple(_join(name, readers) for name, readers in found.items()))


def _join(name: str, readers: list[tuple[str, RegionReader]]) -> SourceTensor:
    dtypes = {dtype for dtype, _ in readers}
    ranks = {len(reader.region.offsets) for _, reader in readers}
    if len(dtypes) > 1 or len(ranks) > 1:
        raise Corrupt(f"Files have different dtypes or dimensions for {name}: {sorted(dtypes)}.", key=name)
    regions = [reader.region for _, reader in readers]
    ends = zip(*(map(int.__add__, region.offsets, region.sizes) for region in regions), strict=True)
    shape = tuple(map(max, ends)) if ranks != {0} else ()
    if not covers_once(name, shape, regions):
        raise Corrupt(
            f"{len(regions)} files contain {name}, but they do not cover the shape {list(shape)} exactly "
            "once: a shard is missing, or two files contain the same tensor. Pass a folder with an "
            "index, or with one model.",
            key=name,
        )
    return SourceTensor(name, readers[0][0], shape, tuple(reader for _, reader in readers))


def _readers(path: Path) -> list[tuple[str, str, RegionReader]]:
    """Return each tensor in a file: its name, its dtype and a reader."""
    size = int.from_bytes(read_range(path, 0, 8), "little")
    num_bytes = min(size, MAX_HEADER_BYTES, path.stat().st_size - 8)  # parse_header reports a wrong size
    entries, data_start = parse_header(bytes(read_range(path, 0, 8 + num_bytes)), str(path))
    metadata = entries.pop("__metadata__", {})
    try:
        text = read_as(_Metadata, metadata, "its metadata").sharding
        sharding = decode_as(dict[str, Any], text, SHARDING, max_bytes=MAX_HEADER_BYTES)
        readers = [
            _parse_entry(path, name, read_as(_Entry, entry, shown(name)), sharding, data_start)
            for name, entry in entries.items()
        ]
        end = _check_overlap(entries) + data_start
    except (Corrupt, ValueError) as error:
        raise Corrupt(
            f"{path} is not a safetensors file: an entry of its header is wrong ({error}).", key=str(path)
        ) from error
    if path.stat().st_size < end:
        raise Corrupt(
            f"{path} is truncated: expected {end} bytes, found {path.stat().st_size}.", key=str(path)
        )
    return readers


def _check_overlap(entries: dict[str, Any]) -> int:
    """Check that tensors do not overlap; return the end of the last one."""
    end = 0
    for start, stop in sorted(tuple(entry["data_offsets"]) for entry in entries.values()):
        if start < end and start < stop:
            raise ValueError(f"two tensors share the bytes from {start} on")
        end = max(end, stop)
    return end


def _parse_entry(
    path: Path, name: str, entry: _Entry, sharding: dict[str, Any], data_start: int
) -> tuple[str, str, RegionReader]:
    dtype, sizes, (start, stop) = entry.dtype, entry.shape, entry.data_offsets
    if dtype not in ITEM_BYTES:
        raise Unsupported(f"{name} in {path} has dtype {dtype}, which no checkpoint can hold.", key=name)
    offsets = (0,) * len(sizes)
    if sharding:
        offsets = read_as(_Place, sharding.get(name), f"{SHARDING} of {shown(name)}").saved_offsets
    check_tensor(name, dtype, sizes)
    if len(offsets) != len(sizes) or stop - start != math.prod(sizes) * ITEM_BYTES[dtype]:
        raise ValueError(f"{name} has {stop - start} bytes for {dtype}{list(sizes)}")
    return name, dtype, file_reader(path, data_start + start, Region(offsets, sizes), ITEM_BYTES[dtype])
