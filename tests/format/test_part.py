"""Parts round-trip, and every damage is detected."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from format.drawing import catalogs, dtypes, run_ids, sections, tensor_names, text
from holdfast.checkpoint.format import part
from holdfast.checkpoint.format.catalog import Catalog, Tensor, catalog_text
from holdfast.checkpoint.format.hashes import chunk_bytes_for, chunk_ranges, digest
from holdfast.checkpoint.format.layout import EvenPartitioning, Region, Shard, lay_out, whole
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.part import DataFile, Part
from holdfast.checkpoint.format.sealed import dumps, facts_of, seal, unseal_lines
from holdfast.checkpoint.format.sections import Section
from holdfast.errors import Corrupt
from making import resealed

RANKS = list(range(5))


UNWRITTEN: Any = {"seal": "", "document_bytes": 0, "what": "part"}
"""Members that a part has once it is a document."""


@st.composite
def parts(draw: st.DrawFn) -> Part:
    """Return the part of a rank: its shards of the catalog, its own tensors, and their positions."""
    common = draw(catalogs(RANKS))
    rank = draw(st.sampled_from(RANKS))
    held = [
        Shard(name, tensor.dtype, tensor.shape, *region, frozen=tensor.frozen)
        for name, tensor, region in common.written_by(rank)
    ]
    shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
    own = draw(st.dictionaries(tensor_names, st.tuples(dtypes, shapes), max_size=2))
    alone = own.keys() - common.tensors.keys()
    own_shards = [Shard.whole(name, *own[name], per_rank=True) for name in sorted(alone)]
    file = lay_out([shard for shard in held if not shard.frozen] + own_shards, rank)
    frozen = lay_out([shard for shard in held if shard.frozen], rank)
    places = {False: iter(file.starts), True: iter(frozen.starts)}
    starts = [next(places[shard.frozen]) for shard in held]
    line = catalog_text(common)
    ids = st.builds(CheckpointId, st.integers(1, 9), st.integers(0, 99))
    return Part(
        run=draw(run_ids), step=draw(st.integers(0, 10**9)), attempt=draw(st.integers(1, 99)), rank=rank,
        world_size=len(RANKS), ancestors=tuple(draw(st.lists(ids, max_size=3))),
        values=draw(st.dictionaries(text, st.none() | st.integers(-(2**53), 2**53) | text, max_size=3)),
        own=tuple((p.name, p.dtype, p.shape, next(places[False])) for p in own_shards),
        file=data_file(file.file_bytes),
        frozen=data_file(frozen.file_bytes) if any(shard.frozen for shard in held) else None,
        catalog_digest=digest(line), catalog_text=line, starts_text=dumps(starts), **UNWRITTEN,
        watches=draw(sections),
    )  # fmt: skip


def data_file(num_bytes: int) -> DataFile:
    """A file of this size; of its hashes only the number matters."""
    chunk_bytes = chunk_bytes_for(num_bytes)
    ranges = chunk_ranges(num_bytes, chunk_bytes)
    return DataFile(num_bytes, chunk_bytes, "".join(digest(b"%d" % start) for start, _ in ranges))


def document(value: Part) -> bytes:
    """The part's document, by the way that a trainer and its keeper write it."""
    facts = part.PartFacts(**facts_of(value, part.PartFacts))
    draft = part.draft(facts, value.catalog_starts, value.catalog_text)
    draft = part.add_findings(draft, value.watches, {"replicas": ((64, 8),)})
    assert part.findings_of(draft, "draft") == (value.watches, {"replicas": ((64, 8),)})
    return part.finish(draft, value.file, value.frozen, value.watches)


def lines_of(value: Part) -> list[bytes]:
    """The lines of its document, the first without its seal; the catalog is the last one."""
    text, _, line = document(value).rpartition(b"\n")
    return [*unseal_lines(text, "part"), line]


@given(parts(), sections)
def test_parts_with_other_findings_have_the_same_files(value: Part, others: dict[str, Section]) -> None:
    other = replace(value, watches=others)
    assert part.differ_in_watches_only(document(value), document(other), "part")
    moved = replace(value, step=value.step + 1)
    assert not part.differ_in_watches_only(document(value), document(moved), "part")


@settings(max_examples=50)
@given(parts(), parts())
def test_a_part_is_the_same_if_its_catalog_comes_from_another(value: Part, other: Part) -> None:
    text, _, line = document(value).rpartition(b"\n")
    found = part.parse_without_catalog(text, "part", {other.catalog_digest: b"", digest(line): line})
    assert found == part.parse(document(value), "part")
    with pytest.raises(Corrupt, match="its catalog does not match its digest"):
        part.parse_without_catalog(text, "part", {digest(line + b" "): line})
    if other.catalog_text != line:
        with pytest.raises(Corrupt, match="its catalog does not match its digest"):
            part.parse(text + b"\n" + other.catalog_text, "part")


@settings(max_examples=50)
@given(parts())
def test_a_part_round_trips(value: Part) -> None:
    written = document(value)
    found = part.parse(written, "part")
    assert found == replace(value, seal=found.seal, document_bytes=len(written))
    assert found.seal == digest(b"{" + written.rpartition(b"\n")[0].partition(b",")[2])
    assert found.num_shards == len(found.catalog_starts) == len(found.shards) - len(value.own)
    assert found.catalog == value.catalog


@settings(max_examples=50)
@given(parts())
def test_shards_are_those_of_the_catalog_then_its_own(value: Part) -> None:
    """In this order, each with its place; the bytes of a file's shards fill it without hole or overlap."""
    found = part.parse(document(value), "part")
    shared = [(name, tensor.frozen, region) for name, tensor, region in value.catalog.written_by(value.rank)]
    own = [(name, False, Region.whole(shape)) for name, _, shape, _ in value.own]
    assert [(p.name, p.frozen, Region(p.offsets, p.sizes)) for p in found.shards] == shared + own
    assert [p.per_rank for p in found.shards] == [False] * len(shared) + [True] * len(own)
    for name, file in found.files.items():
        placed = [
            (start, shard.num_bytes)
            for shard, start in zip(found.shards, found.starts, strict=True)
            if found.file_name(frozen=shard.frozen) == name
        ]
        ends = [start + num_bytes for start, num_bytes in sorted(placed)]
        assert [start for start, _ in sorted(placed)][1:] == ends[:-1]
        assert ends[-1:] in ([], [file.num_bytes])


def test_frozen_shards_have_their_own_file() -> None:
    found = part.parse(document(example()), "part")
    assert list(found.files) == [
        "step-00000005/rank-00000-a0001.safetensors",
        "step-00000005/rank-00000-a0001-frozen.safetensors",
    ]
    assert [(p.name, found.files[found.file_name(frozen=p.frozen)].num_bytes) for p in found.shards] == [
        ("w", 100_000),
        ("base", 4128),
        ("rng", 100_000),
    ]


STARTS = b"[4096,4096]"


def example() -> Part:
    tensors = {
        "w": Tensor("F32", (4, 2), EvenPartitioning(((0, 2),), (0, 1)), (0, 1)),
        "base": Tensor("F32", (8,), whole(0), (0, 1), True),
    }
    line = catalog_text(Catalog(tensors, {"v": "w"}))
    return Part(
        run="run", step=5, attempt=1, rank=0, world_size=2, ancestors=(CheckpointId(1, 3),),
        values={"a": {"$tuple": [1]}}, own=(("rng", "U8", (16,), 4112),),
        file=DataFile(100_000, 65536, digest(b"a") + digest(b"b")),
        frozen=DataFile(4128, 65536, digest(b"c")), starts_text=STARTS, **UNWRITTEN,
        catalog_digest=digest(line), catalog_text=line,
    )  # fmt: skip


@pytest.mark.parametrize("hashes", ["", digest(b"a"), digest(b"a") * 3, digest(b"a") + digest(b"b")[:31]])
def test_a_wrong_number_of_chunk_hashes_is_corrupt(hashes: str) -> None:
    """A byte that no hash covers could not be verified."""
    value = replace(example(), file=DataFile(100_000, 65536, hashes))
    with pytest.raises(Corrupt, match="digits of chunk hashes for 2 chunks"):
        part.parse(document(value), "part")


@pytest.mark.parametrize(
    "change",
    [
        *({"step": None}, {"step": "5"}, {"rank": [0]}, {"world_size": 1.5}, {"attempt": True}),
        *({"ancestors": None}, {"ancestors": [[1]]}, {"ancestors": [["a", "b"]]}, {"ancestors": 3}),
        *({"own": 3}, {"own": [5]}, {"own": [["w"]]}),
        *({"own": [["w", "F13", [1], 0]]}, {"own": [[5, "U8", [1], 0]]}),
        *({"own": [["w", "U8", "1", 0]]}, {"own": [["w", "U8", [1], "0"]]}, {"own": [["w", ["U8"], [1], 0]]}),
        *({"file": None}, {"file": []}, {"file": {"bytes": "x"}}, {"frozen": []}, {"frozen": {"bytes": 1}}),
        *({"file": {"bytes": 1, "chunk_bytes": size, "chunks": ""}} for size in (0, -1, None, float("inf"))),
        {"file": {"bytes": 10**30, "chunk_bytes": 1, "chunks": ""}},
        {"file": {"bytes": -1, "chunk_bytes": 4096, "chunks": ""}},
    ],
)
def test_other_sealed_documents_are_not_parts(change: dict[str, object]) -> None:
    """Whoever sealed it: what is not there raises Corrupt, never an error of the parser."""
    *lines, line = lines_of(example())
    with pytest.raises(Corrupt, match=r"is not a valid part|is not valid JSON"):
        part.parse(resealed(lines, change) + b"\n" + line, "part")


def test_a_catalog_with_another_hash_is_corrupt() -> None:
    body, starts, *hashes, line = lines_of(example())
    for *lines, last in (
        [body, line],
        [body, starts, *hashes, line + b" "],
        [body, line, starts, *hashes, line],
        [body, starts, *hashes, b"{}"],
        [body, starts, *hashes],
        [body, *hashes, line],
        [body, starts, line],
        [body, starts, *hashes, hashes[0], line],
        [body, starts, *reversed(hashes), line],
    ):
        with pytest.raises(Corrupt, match="part is sealed but is not a valid part"):
            part.parse(seal(b"\n".join(lines)) + b"\n" + last, "part")


@pytest.mark.parametrize(
    "starts",
    [
        *(b"", b"3", b"null", b"[-8]", b"[1.5]", b"[[1]]", b'["4096"]', b"[1, 2]", b"[1"),
        *(b"[,]", b"[1,]", b"[,1]", b"[1,,2]", b"5[,]", b"[]7", b"[", b"]"),
    ],
)
def test_starts_that_are_not_an_array_of_integers_are_corrupt(starts: bytes) -> None:
    body, _, *hashes, line = lines_of(example())
    with pytest.raises(Corrupt, match="part is sealed but is not a valid part"):
        part.parse(seal(b"\n".join([body, starts, *hashes])) + b"\n" + line, "part")


@pytest.mark.parametrize("starts", [b"[01,2]", b"[1,%d]" % 2**53, b"[1," + b"9" * 5000 + b"]"])
def test_starts_that_cannot_be_parsed_raise_when_they_are_used(starts: bytes) -> None:
    body, _, *hashes, line = lines_of(example())
    found = part.parse(seal(b"\n".join([body, starts, *hashes])) + b"\n" + line, "the-part")
    assert found.num_shards == 2
    with pytest.raises(Corrupt, match="the-part is sealed, but its starts cannot be parsed: ") as caught:
        _ = found.shards
    assert (caught.value.step, caught.value.rank) == (found.step, found.rank)


@pytest.mark.parametrize("starts", [(), (4096,), (4096,) * 3])
def test_more_or_fewer_starts_than_shards_are_corrupt(starts: tuple[int, ...]) -> None:
    found = part.parse(document(replace(example(), starts_text=dumps(starts))), "part")
    match = f"the starts of {len(starts)} shards, but by its catalog rank 0 wrote 2"
    with pytest.raises(Corrupt, match=match):
        _ = found.shards


def test_an_invalid_catalog_raises_when_it_is_used() -> None:
    broken = replace(example(), catalog_text=b"{}")
    found = part.parse(document(broken), "the-part")
    with pytest.raises(Corrupt, match="the-part"):
        _ = found.catalog
