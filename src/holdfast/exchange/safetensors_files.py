"""Reads safetensors files and Hugging Face model folders: headers now, bytes when asked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from holdfast.documents import Fields, decode_object, shown
from holdfast.errors import Corrupt, InvalidInput, NotFound, Unsupported
from holdfast.exchange.offer import FileRegion, Offer, Offered, read_range
from holdfast.format.catalog import columns
from holdfast.format.cuts import Box
from holdfast.format.dtypes import ITEM_BYTES
from holdfast.format.layout import MAX_HEADER_BYTES, parse_header
from holdfast.format.limits import MAX_DIMS

SHARDING = "DCP_SHARDING_INFO"
INDEX_SUFFIX = ".safetensors.index.json"
_MAX_FILE_NAME_BYTES = 255  # what Linux takes


def offer_file(path: Path) -> Offered:
    """What a safetensors file offers.

    Raises:
        Corrupt: it is damaged or truncated.
        Unsupported: it holds a dtype that no checkpoint can.
    """
    return _offered([path])


def offer_folder(folder: Path) -> Offered:
    """What the safetensors files of a folder offer: those that its index names, else all.

    Files whose metadata say which region of a tensor they hold (as DCP's Hugging Face writer and Holdfast
    itself do) are put together.

    Raises:
        Corrupt: a file is damaged or truncated, or a shard is missing.
        NotFound: the index names a file that is not there.
        Unsupported: a dtype that no checkpoint can hold.
    """
    index = find_index(folder, INDEX_SUFFIX)
    if index is None:
        return _offered(sorted(folder.glob("*.safetensors")))
    return offer_index(index)


def offer_index(index: Path) -> Offered:
    """What the files that an index names offer.

    Raises:
        Corrupt: a file is damaged or truncated.
        NotFound: a file is missing.
        Unsupported: a dtype that no checkpoint can hold.
    """
    weight_map = read_index(index)
    return _offered([index.parent / name for name in dict.fromkeys(weight_map.values())], weight_map)


def find_index(folder: Path, suffix: str) -> Path | None:
    """The one index in a folder that ends so, if there is one.

    Raises:
        InvalidInput: there are several.
    """
    found = sorted(path for path in folder.iterdir() if path.name.endswith(suffix))
    if len(found) > 1:
        shown = ", ".join(path.name for path in found)
        message = f"{folder} holds several models ({shown}); give one of these files, or a folder with one."
        raise InvalidInput(message, key=str(folder))
    return found[0] if found else None


def read_index(path: Path) -> dict[str, str]:
    """File name by tensor, as a Hugging Face index says.

    Raises:
        Corrupt: it is no such index, or names files outside its folder.
    """
    try:
        size = path.stat().st_size
        text = bytes(read_range(path, 0, min(size, MAX_HEADER_BYTES + 1)))
        found = decode_object(text, str(path), max_bytes=MAX_HEADER_BYTES).fields("weight_map")
    except Corrupt as error:
        raise Corrupt(f"{path} is not an index with a weight_map: {error}", key=str(path)) from error
    weight_map = {name: found.text(name, max_chars=1024) for name in found.members}
    files = set(weight_map.values())
    outside = [name for name in files if "\0" in name or Path(name).name != name or not _is_file_name(name)]
    if outside:
        message = f"{path} names {outside[0]!r}, which is not a file of its folder."
        raise Corrupt(message, key=str(path))
    for name in files:
        if not (path.parent / name).is_file():
            message = f"{path.parent / name} is missing, though {path.name} names it: download it again."
            raise NotFound(message, key=name)
    return weight_map


def _is_file_name(name: str) -> bool:
    return 0 < len(name.encode("utf-8", "surrogateescape")) <= _MAX_FILE_NAME_BYTES


def _offered(paths: Iterable[Path], weight_map: Mapping[str, str] | None = None) -> Offered:
    found: dict[str, list[tuple[str, FileRegion]]] = {}
    for path in paths:
        for name, dtype, region in _regions(path):
            if weight_map is None or weight_map.get(name) == path.name:
                found.setdefault(name, []).append((dtype, region))
    missing = [name for name in weight_map or () if name not in found]
    if missing and weight_map:
        message = f"{weight_map[missing[0]]} does not hold {missing[0]}, though the index says so."
        raise Corrupt(message, key=missing[0])
    return Offered(tuple(_joined(name, rows) for name, rows in found.items()))


def _joined(name: str, rows: list[tuple[str, FileRegion]]) -> Offer:
    dtypes = {dtype for dtype, _ in rows}
    ranks = {len(region.box.offsets) for _, region in rows}
    if len(dtypes) > 1 or len(ranks) > 1:
        raise Corrupt(f"Files disagree about dtype or dimensions of {name}: {sorted(dtypes)}.", key=name)
    boxes = [region.box for _, region in rows]
    ends = zip(*(map(int.__add__, box.offsets, box.lengths) for box in boxes), strict=True)
    shape = tuple(map(max, ends)) if ranks != {0} else ()
    if sum(box.num_items for box in boxes) != math.prod(shape):
        message = (
            f"{len(boxes)} files hold {name}, and together not each element of {list(shape)} once: a shard "
            "is missing, or two files hold the same tensor. Give a folder with an index or with one model."
        )
        raise Corrupt(message, key=name)
    return Offer(name, rows[0][0], shape, tuple(region for _, region in rows))


def _regions(path: Path) -> list[tuple[str, str, FileRegion]]:
    """(name, dtype, region) of each tensor of a file."""
    entries, data_start = _header(path)
    metadata = entries.pop("__metadata__", {})
    try:
        facts = Fields(metadata, "its metadata")
        sharding = None
        if SHARDING in facts:
            text = facts.text(SHARDING, max_chars=MAX_HEADER_BYTES)
            sharding = decode_object(text, SHARDING, max_bytes=MAX_HEADER_BYTES)
        rows = [
            _row(path, name, Fields(entry, shown(name)), sharding, data_start)
            for name, entry in entries.items()
        ]
        end = _check_places(entries) + data_start
    except (Corrupt, ValueError) as error:
        message = f"{path} is not a safetensors file: an entry of its header is wrong ({error})."
        raise Corrupt(message, key=str(path)) from error
    if path.stat().st_size < end:
        message = f"{path} is truncated: expected {end} bytes, found {path.stat().st_size}."
        raise Corrupt(message, key=str(path))
    return rows


def _check_places(entries: dict[str, Any]) -> int:
    """Return where the last tensor ends.

    Raises:
        ValueError: tensors share bytes, which the format forbids.
    """
    end = 0
    for start, stop in sorted(tuple(entry["data_offsets"]) for entry in entries.values()):
        if start < end and start < stop:
            raise ValueError(f"two tensors share the bytes from {start} on")
        end = max(end, stop)
    return end


def _header(path: Path) -> tuple[dict[str, Any], int]:
    size = int.from_bytes(read_range(path, 0, 8), "little")
    num_bytes = min(size, MAX_HEADER_BYTES, path.stat().st_size - 8)  # parse_header tells what is wrong
    return parse_header(bytes(read_range(path, 0, 8 + num_bytes)), str(path))


def _row(
    path: Path, name: str, entry: Fields, sharding: Fields | None, data_start: int
) -> tuple[str, str, FileRegion]:
    dtype, lengths = entry.text("dtype", max_chars=64), entry.integers("shape", max_items=MAX_DIMS)
    start, stop = columns(list(entry.integers("data_offsets")), 2, "the offsets")
    if dtype not in ITEM_BYTES:
        message = f"{name} in {path} has dtype {dtype}, which no checkpoint can hold."
        raise Unsupported(message, key=name)
    offsets = (0,) * len(lengths)
    if sharding is not None and sharding.members:
        offsets = sharding.fields(name).integers("saved_offsets", max_items=MAX_DIMS)
    if len(offsets) != len(lengths) or stop - start != math.prod(lengths) * ITEM_BYTES[dtype]:
        raise ValueError(f"{name} has {stop - start} bytes for {dtype}{list(lengths)}")
    return name, dtype, FileRegion(path, data_start + start, Box(offsets, lengths), ITEM_BYTES[dtype])
