"""A part comes back as it was written."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from format.drawing import catalogs, dtypes, run_ids, tensor_names, text
from holdfast.errors import Corrupt, Unsupported
from holdfast.format import part
from holdfast.format.catalog import Catalog, Tensor, catalog_text
from holdfast.format.cuts import Box, Cut, whole
from holdfast.format.hashes import chunk_bytes_for, chunk_ranges, digest
from holdfast.format.layout import Piece, lay_out
from holdfast.format.part import DataFile, Part
from holdfast.format.sealed import dumps, seal

RANKS = list(range(5))


@st.composite
def parts(draw: st.DrawFn) -> Part:
    """The part of a rank: what a catalog says that it wrote, its own tensors, the places of both."""
    common = draw(catalogs(RANKS))
    rank = draw(st.sampled_from(RANKS))
    held = [
        Piece(name, tensor.dtype, tensor.shape, *box, frozen=tensor.frozen)
        for name, tensor, box in common.written_by(rank)
    ]
    shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
    own = draw(st.dictionaries(tensor_names, st.tuples(dtypes, shapes), max_size=2))
    own_pieces = [
        Piece.whole(name, *facts, per_rank=True) for name, facts in own.items() if name not in common.tensors
    ]
    file = lay_out([piece for piece in held if not piece.frozen] + own_pieces, rank)
    frozen = lay_out([piece for piece in held if piece.frozen], rank)
    places = {False: iter(file.starts), True: iter(frozen.starts)}
    starts = [next(places[piece.frozen]) for piece in held]
    line = catalog_text(common)
    return Part(
        run=draw(run_ids),
        step=draw(st.integers(0, 10**9)),
        attempt=draw(st.integers(1, 99)),
        rank=rank,
        world_size=len(RANKS),
        ancestors=tuple(draw(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 99)), max_size=3))),
        values=draw(st.dictionaries(text, st.none() | st.integers(-(2**53), 2**53) | text, max_size=3)),
        own=tuple((p.name, p.dtype, p.shape, next(places[False])) for p in own_pieces),
        catalog_starts=tuple(starts),
        file=data_file(file.file_bytes),
        frozen=data_file(frozen.file_bytes) if any(piece.frozen for piece in held) else None,
        catalog_digest=digest(line),
        catalog_text=line,
        what="part",
    )


def data_file(num_bytes: int) -> DataFile:
    """A file of this size; of its hashes only the number matters."""
    chunk_bytes = chunk_bytes_for(num_bytes)
    ranges = chunk_ranges(num_bytes, chunk_bytes)
    return DataFile(num_bytes, chunk_bytes, "".join(digest(b"%d" % start) for start, _ in ranges))


def document(value: Part) -> bytes:
    """The part's document, by the way that a trainer and its keeper write it."""
    draft = part.draft(
        run=value.run,
        step=value.step,
        attempt=value.attempt,
        rank=value.rank,
        world_size=value.world_size,
        ancestors=value.ancestors,
        values=value.values,
        own=value.own,
        starts=value.catalog_starts,
        catalog=value.catalog_text,
    )
    return part.finish(draft, value.file, value.frozen)


@settings(max_examples=50)
@given(parts())
def test_a_part_comes_back(value: Part) -> None:
    found = part.parse(document(value), "part")
    assert found == value
    assert found.catalog == value.catalog


@settings(max_examples=50)
@given(parts())
def test_pieces_are_what_the_catalog_says_that_the_rank_wrote_and_its_own(value: Part) -> None:
    """In this order, each with its place; the bytes of a file's pieces fill it without hole or overlap."""
    found = part.parse(document(value), "part")
    shared = [(name, tensor.frozen, box) for name, tensor, box in value.catalog.written_by(value.rank)]
    own = [(name, False, Box.whole(shape)) for name, _, shape, _ in value.own]
    assert [(p.name, p.frozen, Box(p.offsets, p.lengths)) for p in found.pieces] == shared + own
    assert [p.per_rank for p in found.pieces] == [False] * len(shared) + [True] * len(own)
    for name, file in found.files.items():
        placed = [
            (start, piece.num_bytes)
            for piece, start in zip(found.pieces, found.starts, strict=True)
            if found.file_name(frozen=piece.frozen) == name
        ]
        ends = [start + num_bytes for start, num_bytes in sorted(placed)]
        assert [start for start, _ in sorted(placed)][1:] == ends[:-1]
        assert ends[-1:] in ([], [file.num_bytes])


def test_the_second_line_is_the_catalog_as_it_was_handed_over() -> None:
    """So equal catalogs of a thousand ranks can be told by their digest, and be copied without parsing."""
    value = example()
    first, second, *_ = document(value).split(b"\n")
    assert second == value.catalog_text
    assert json.loads(first)["catalog"] == digest(second)


def test_frozen_pieces_are_in_a_file_of_their_own() -> None:
    found = part.parse(document(example()), "part")
    assert list(found.files) == [
        "step-00000005/rank-00000-a0001.safetensors",
        "step-00000005/rank-00000-a0001-frozen.safetensors",
    ]
    assert [(p.name, found.files[found.file_name(frozen=p.frozen)].num_bytes) for p in found.pieces] == [
        ("w", 100_000),
        ("base", 4128),
        ("rng", 100_000),
    ]


def example() -> Part:
    tensors = {
        "w": Tensor("F32", (4, 2), Cut(((0, 2),), (0, 1)), (0, 1)),
        "base": Tensor("F32", (8,), whole(0), (0, 1), True),
    }
    line = catalog_text(Catalog(tensors, {"v": "w"}))
    return Part(
        run="run",
        step=5,
        attempt=1,
        rank=0,
        world_size=2,
        ancestors=((1, 3),),
        values={"a": {"$tuple": [1]}},
        own=(("rng", "U8", (16,), 4112),),
        catalog_starts=(4096, 4096),
        file=DataFile(100_000, 65536, digest(b"a") + digest(b"b")),
        frozen=DataFile(4128, 65536, digest(b"c")),
        catalog_digest=digest(line),
        catalog_text=line,
        what="part",
    )


def test_every_flipped_bit_is_found() -> None:
    whole = document(example())
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(Corrupt, match="the-part"):
            part.parse(bytes(damaged), "the-part")


@pytest.mark.parametrize("hashes", ["", digest(b"a"), digest(b"a") * 3, digest(b"a") + digest(b"b")[:31]])
def test_a_wrong_number_of_chunk_hashes_is_corrupt(hashes: str) -> None:
    """A byte that no hash covers could not be verified."""
    value = dataclasses.replace(example(), file=DataFile(100_000, 65536, hashes))
    with pytest.raises(Corrupt, match="digits of chunk hashes for 2 chunks"):
        part.parse(document(value), "part")


@pytest.mark.parametrize(
    "change",
    [
        *({"step": None}, {"step": "5"}, {"rank": [0]}, {"world_size": 1.5}, {"attempt": True}),
        *({"ancestors": None}, {"ancestors": [[1]]}, {"ancestors": [["a", "b"]]}, {"ancestors": 3}),
        *(
            {"own": 3},
            {"own": [5]},
            {"own": [["w"]]},
            {"own": [["w", "F13", [1], 0]]},
            {"own": [[5, "U8", [1], 0]]},
        ),
        *({"own": [["w", "U8", "1", 0]]}, {"own": [["w", "U8", [1], "0"]]}, {"own": [["w", ["U8"], [1], 0]]}),
        *({"starts": None}, {"starts": 3}, {"starts": ["4096"]}, {"starts": [4096.0, 4096]}),
        *({"file": None}, {"file": []}, {"file": {"bytes": "x"}}, {"frozen": []}, {"frozen": {"bytes": 1}}),
        *({"file": {"bytes": 1, "chunk_bytes": size, "chunks": ""}} for size in (0, -1, None, float("inf"))),
        {"file": {"bytes": 10**30, "chunk_bytes": 1, "chunks": ""}},
        {"file": {"bytes": -1, "chunk_bytes": 4096, "chunks": ""}},
    ],
)
def test_a_sealed_document_that_is_no_part_is_corrupt(change: dict[str, object]) -> None:
    """Whoever sealed it: what is not there raises Corrupt, never an error of the parser."""
    with pytest.raises(Corrupt, match=r"is not a valid part|is not JSON that can be read"):
        part.parse(resealed(document(example()), change), "part")


def resealed(text: bytes, change: dict[str, object]) -> bytes:
    """A document whose first line has other members; None takes one away."""
    first, _, rest = text.partition(b"\n")
    body = {**json.loads(first), **change}
    del body["xxh3_128"]
    body = {key: value for key, value in body.items() if value is not None}
    return seal(json.dumps(body).encode() + b"\n" + rest)


def test_a_part_with_another_catalog_than_it_names_is_corrupt() -> None:
    first, line, *hashes = document(example()).split(b"\n")
    body = b"{" + first[first.index(b",") + 1 :]
    for lines in (
        [body],
        [body, line + b" ", *hashes],
        [body, line, line, *hashes],
        [body, b"{}", *hashes],
        [body, *hashes],
        [body, line],
        [body, line, *hashes, hashes[0]],
        [body, line, *reversed(hashes)],
    ):
        with pytest.raises(Corrupt, match="part is sealed but is not a valid part"):
            part.parse(seal(b"\n".join(lines)), "part")


@pytest.mark.parametrize("starts", [(), (4096,), (4096,) * 3])
def test_more_or_fewer_places_than_pieces_are_corrupt(starts: tuple[int, ...]) -> None:
    found = part.parse(document(dataclasses.replace(example(), catalog_starts=starts)), "part")
    with pytest.raises(
        Corrupt, match=f"the starts of {len(starts)} pieces, but by its catalog rank 0 wrote 2"
    ):
        _ = found.pieces


def test_a_catalog_that_cannot_be_read_is_corrupt_when_it_is_asked_for() -> None:
    broken = dataclasses.replace(example(), catalog_text=b"{}")
    found = part.parse(document(broken), "the-part")
    with pytest.raises(Corrupt, match="the-part"):
        _ = found.catalog


def test_other_kinds_and_newer_versions_are_told_apart() -> None:
    with pytest.raises(Corrupt, match="expected 'holdfast-part'"):
        part.parse(seal(dumps({"format": "holdfast-manifest", "version": 1})), "part")
    with pytest.raises(Unsupported, match="version 2"):
        part.parse(seal(dumps({"format": "holdfast-part", "version": 2})), "part")
