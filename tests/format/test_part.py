"""A part comes back as it was written."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import Corrupt, Unsupported
from holdfast.format import part
from holdfast.format.dtypes import ITEM_BYTES
from holdfast.format.hashes import chunk_bytes_for, chunk_ranges, digest
from holdfast.format.layout import Piece, lay_out
from holdfast.format.part import DataFile, Part
from holdfast.format.sealed import dumps, seal

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
names = text.filter(lambda name: name != "__metadata__" and "@" not in name)


@st.composite
def pieces(draw: st.DrawFn) -> Piece:
    lengths = tuple(draw(st.lists(st.integers(0, 1000), max_size=3)))
    offsets = tuple(draw(st.integers(0, 9)) for _ in lengths)
    shape = tuple(a + b + draw(st.integers(0, 9)) for a, b in zip(offsets, lengths, strict=True))
    return Piece(
        draw(names), draw(st.sampled_from(sorted(ITEM_BYTES))), shape, offsets, lengths, draw(st.booleans())
    )


@st.composite
def parts(draw: st.DrawFn) -> Part:
    held = draw(st.lists(pieces(), max_size=5, unique_by=lambda piece: piece.name))
    layout = lay_out(held, rank := draw(st.integers(0, 9)))
    chunk_bytes = chunk_bytes_for(layout.file_bytes)
    ranges = list(chunk_ranges(layout.file_bytes, chunk_bytes))
    return Part(
        run=draw(text),
        step=draw(st.integers(0, 10**9)),
        attempt=draw(st.integers(1, 99)),
        rank=rank,
        world_size=draw(st.integers(rank + 1, 20)),
        base_step=draw(st.none() | st.integers(0, 99)),
        pieces=tuple(held),
        starts=layout.starts,
        tied=draw(st.dictionaries(text, text, max_size=3)),
        values=draw(st.dictionaries(text, st.none() | st.integers() | text, max_size=3)),
        file=DataFile(layout.file_bytes, chunk_bytes, tuple(digest(b"%d" % start) for start, _ in ranges)),
    )


def document(value: Part) -> bytes:
    """The part's document, by the way that a trainer and its keeper write it."""
    draft = part.draft(
        run=value.run,
        step=value.step,
        attempt=value.attempt,
        rank=value.rank,
        world_size=value.world_size,
        base_step=value.base_step,
        pieces=part.pieces_text(list(value.pieces), value.starts),
        tied=value.tied,
        values=value.values,
    )
    return part.finish(draft, value.file)


@given(parts())
def test_a_part_comes_back(value: Part) -> None:
    assert part.parse(document(value), "part") == value


def example() -> Part:
    file = DataFile(100_000, 65536, (digest(b"a"), digest(b"b")))
    piece = Piece("w", "F32", (4, 2), (1, 0), (3, 2))
    return Part("run", 5, 1, 0, 2, None, (piece,), (4096,), {"v": "w"}, {"a": {"$tuple": [1]}}, file)


def test_every_flipped_bit_is_found() -> None:
    whole = document(example())
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(Corrupt, match="the-part"):
            part.parse(bytes(damaged), "the-part")


@pytest.mark.parametrize(
    "chunks", [(), (digest(b"a"),), (digest(b"a"),) * 3, (digest(b"a"), digest(b"b")[:31])]
)
def test_a_wrong_number_of_chunk_hashes_is_corrupt(chunks: tuple[str, ...]) -> None:
    """A byte that no hash covers could not be verified."""
    value = dataclasses.replace(example(), file=DataFile(100_000, 65536, chunks))
    with pytest.raises(Corrupt, match="digits of chunk hashes for 2 chunks"):
        part.parse(document(value), "part")


@pytest.mark.parametrize(
    "change",
    [
        *({"step": None}, {"pieces": [["w"]]}, {"pieces": 3}, {"pieces": [[]]}, {"file": None}, {"file": []}),
        *({"file": {"bytes": 1, "chunk_bytes": 0, "chunks": ""}}, {"file": {"bytes": "x"}}, {"pieces": [5]}),
    ],
)
def test_a_sealed_document_that_is_no_part_is_corrupt(change: dict[str, object]) -> None:
    """Whoever sealed it: what is not there raises Corrupt, never an error of the parser."""
    import json

    body = json.loads(document(example()))
    del body["xxh3_128"]
    body.update(change)
    body = {key: value for key, value in body.items() if value is not None}
    with pytest.raises(Corrupt, match="lacks what a part holds"):
        part.parse(seal(dumps(body)), "part")


def test_other_kinds_and_newer_versions_are_told_apart() -> None:
    with pytest.raises(Corrupt, match="expected 'holdfast-part'"):
        part.parse(seal(dumps({"format": "holdfast-manifest", "version": 1})), "part")
    with pytest.raises(Unsupported, match="version 2"):
        part.parse(seal(dumps({"format": "holdfast-part", "version": 2})), "part")
