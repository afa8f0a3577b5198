"""The worked example of docs/format.md, made again by the code and compared with the page."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import pytest

from holdfast.checkpoint.format import manifest, names, part, run, values
from holdfast.checkpoint.format.catalog import Catalog, Tensor, catalog_text
from holdfast.checkpoint.format.dtypes import ITEM_BYTES
from holdfast.checkpoint.format.hashes import chunk_bytes_for, hash_chunks
from holdfast.checkpoint.format.layout import EvenPartitioning, Shard, lay_out, whole
from holdfast.checkpoint.format.names import CheckpointId

PAGE = (Path(__file__).parent.parent.parent / "docs" / "format.md").read_text()
SHOWN: dict[str, str] = dict(re.findall(r"^`([\w./-]+)`, \d+ bytes:\n\n```\n(.*?)\n```", PAGE, re.M | re.S))
RUN_ID = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"


CATALOG = Catalog(
    {
        "model.bias": Tensor("F32", (3,), EvenPartitioning(((0, 2),), (0, 1)), (0, 1)),
        "model.base": Tensor("BF16", (2,), whole(1), (0, 1), True),
    },
    {"model.copy": "model.bias"},
)
ANCESTORS = (CheckpointId(attempt=1, step=2),)


def data_file(shards: list[Shard], rank: int, *tensors: bytes) -> tuple[tuple[int, ...], bytes]:
    """Places of shards and the image of a data file of the example."""
    layout = lay_out(shards, rank)
    image = bytearray(layout.file_bytes)
    image[: len(layout.header)] = layout.header
    for start, tensor in zip(layout.starts, tensors, strict=True):
        image[start : start + len(tensor)] = tensor
    return layout.starts, bytes(image)


def facts_of(image: bytes) -> part.DataFile:
    """Size and hashes of a file."""
    chunk_bytes = chunk_bytes_for(len(image))
    return part.DataFile(len(image), chunk_bytes, hash_chunks(memoryview(image), chunk_bytes))


def rank_of_example(rank: int) -> dict[str, bytes]:
    """Data files and part of a rank: its region of model.bias, its own mask, and model.base of rank 1."""
    regions = {name: (tensor, region) for name, tensor, region in CATALOG.written_by(rank)}
    tensor, region = regions["model.bias"]
    shards = [
        Shard("model.bias", tensor.dtype, tensor.shape, *region),
        Shard.whole("mask", "BOOL", (3,), per_rank=True),
    ]
    bias = struct.pack(f"<{region.num_items}f", *[1.0, -2.0, 0.5][region.offsets[0] :][: region.num_items])
    (start, mask_at), image = data_file(shards, rank, bias, struct.pack("<3?", True, False, rank == 0))
    found = {names.data(3, 2, rank): image}
    starts, frozen = [start], None
    if rank == 1:
        base = Shard("model.base", "BF16", (2,), (0,), (2,), frozen=True)
        (base_at,), frozen = data_file([base], rank, bytes.fromhex("803f00c0"))
        found[names.frozen(3, 2, rank)] = frozen
        starts.append(base_at)
    facts = part.PartFacts(
        run=RUN_ID,
        step=3,
        attempt=2,
        rank=rank,
        world_size=2,
        ancestors=ANCESTORS,
        values={"epoch": 1, "seen": values.encode({"b", "a"}, "seen")},
        own=(("mask", "BOOL", (3,), mask_at),),
    )
    draft = part.draft(facts, starts, catalog_text(CATALOG))
    found[names.part(3, 2, rank)] = part.finish(
        draft, facts_of(image), None if frozen is None else facts_of(frozen)
    )
    return found


def example() -> dict[str, bytes]:
    """All objects of the example's home that belong to step 3, and those of the run."""
    by_rank = [rank_of_example(rank) for rank in (0, 1)]
    documents = [found[names.part(3, 2, rank)] for rank, found in enumerate(by_rank)]
    merged = manifest.merge(
        [part.parse(document, "part") for document in documents],
        id="00112233445566778899aabbccddeeff",
        created_unix_s=1790000002.0,
    )
    return {
        names.RUN: run.document(run.Run(RUN_ID, 1790000000.0)),
        names.attempt(2): run.document(run.AttemptClaim(2, RUN_ID, 2, "kelp", 4242, 1790000001.0)),
        **by_rank[0],
        **by_rank[1],
        names.manifest(3, 2): manifest.document(merged),
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


def test_page_lists_every_tag() -> None:
    tags = set(re.findall(r"`(\$[a-z]+)`", PAGE))
    assert tags == set(values._DECODERS)


def test_page_lists_every_dtype_with_its_size() -> None:
    found = {}
    for dtypes, num_bytes in re.findall(r"`([A-Z0-9_ ]+)`\s+\((\d)(?: bytes)?\)", PAGE):
        found.update(dict.fromkeys(dtypes.split(), int(num_bytes)))
    assert found == ITEM_BYTES


def test_examples_of_the_page_are_split_as_in_the_code() -> None:
    """Each row of the tables of regions: the partitioning, the shape, and the region of each rank."""
    rows = re.findall(r"^\| `(\[.*?\])` \| `(\[.*?\])` \| `(\[.*?\])` \| (.*?) \|$", PAGE, re.M)
    assert len(rows) >= 6
    for shape_text, splits, ranks, found in rows:
        shape = tuple(json.loads(shape_text))
        partitioning = EvenPartitioning(tuple(map(tuple, json.loads(splits))), tuple(json.loads(ranks)))
        regions = []
        for rank, region in partitioning.regions(shape):
            sides = ", ".join(f"{at}:{at + length}" for at, length in zip(*region, strict=True))
            regions.append(f"{rank} `[{sides}]`")
        assert found == ", ".join(regions)
