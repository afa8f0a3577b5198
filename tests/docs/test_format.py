"""The worked example of docs/format.md, made again by the code and compared with the page."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from holdfast.format import manifest, names, part, run, values
from holdfast.format.dtypes import ITEM_BYTES
from holdfast.format.hashes import chunk_bytes_for, chunk_ranges, digest
from holdfast.format.layout import Piece, lay_out

PAGE = (Path(__file__).parent.parent.parent / "docs" / "format.md").read_text()
SHOWN = dict(re.findall(r"^`([\w./-]+)`, \d+ bytes:\n\n```\n(.*?)\n```", PAGE, re.M | re.S))
RUN_ID = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"


def data_file() -> tuple[list[Piece], tuple[int, ...], bytes]:
    """Pieces, their places and the bytes of the example's data file."""
    pieces = [Piece.whole("model.bias", "F32", (2,)), Piece.whole("mask", "BOOL", (3,), per_rank=True)]
    layout = lay_out(pieces, 0)
    image = bytearray(layout.file_bytes)
    image[: len(layout.header)] = layout.header
    struct.pack_into("<2f", image, layout.starts[0], 1.0, -2.0)
    struct.pack_into("<3?", image, layout.starts[1], True, False, True)
    return pieces, layout.starts, bytes(image)


def example() -> dict[str, bytes]:
    """All objects of the example's home."""
    pieces, starts, image = data_file()
    chunk_bytes = chunk_bytes_for(len(image))
    chunks = tuple(digest(image[start:stop]) for start, stop in chunk_ranges(len(image), chunk_bytes))
    draft = part.draft(
        run=RUN_ID,
        step=3,
        attempt=1,
        rank=0,
        world_size=1,
        base_step=None,
        pieces=part.pieces_text(pieces, starts),
        tied={"model.copy": "model.bias"},
        values={"epoch": 1, "seen": values.encode({"b", "a"}, "seen")},
    )
    document = part.finish(draft, part.DataFile(len(image), chunk_bytes, chunks))
    merged = manifest.merge(
        [(part.parse(document, "part"), document)],
        id="00112233445566778899aabbccddeeff",
        created_unix_s=1790000002.0,
    )
    return {
        names.RUN: run.document(run.Run(RUN_ID, 1790000000.0)),
        names.attempt(1): run.document(run.Attempt(1, RUN_ID, 1, "kelp", 4242, 1790000001.0)),
        names.data(3, 1, 0): image,
        names.part(3, 1, 0): document,
        names.manifest(3, 1): manifest.document(merged),
    }


def hexdump(data: bytes) -> str:
    """`data` as `hexdump -C` shows it."""
    lines, before, folded = [], b"", False
    for at in range(0, len(data), 16):
        row = data[at : at + 16]
        if row == before:
            lines += [] if folded else ["*"]
            folded = True
            continue
        before, folded = row, False
        left, right = (" ".join(f"{byte:02x}" for byte in half).ljust(23) for half in (row[:8], row[8:]))
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{at:08x}  {left}  {right}  |{text}|")
    return "\n".join([*lines, f"{len(data):08x}"])


def test_page_shows_every_object_of_the_example() -> None:
    assert list(SHOWN) == list(example())


@pytest.mark.parametrize("name", list(SHOWN))
def test_page_shows_the_bytes_that_the_code_writes(name: str) -> None:
    data = example()[name]
    assert SHOWN[name] == (hexdump(data) if name.endswith(".safetensors") else data.decode())
    assert f"`{name}`, {len(data)} bytes:" in PAGE


def test_page_tells_every_tag() -> None:
    tags = set(re.findall(r"`(\$[a-z]+)`", PAGE))
    assert tags == set(values._DECODERS)


def test_page_tells_every_dtype_with_its_size() -> None:
    told = {}
    for dtypes, num_bytes in re.findall(r"`([A-Z0-9_ ]+)`\s+\((\d)(?: bytes)?\)", PAGE):
        told.update(dict.fromkeys(dtypes.split(), int(num_bytes)))
    assert told == ITEM_BYTES
