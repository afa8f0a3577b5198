"""A manifest is made only of parts that cover every tensor exactly once."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import Corrupt, InvalidInput, Unsupported
from holdfast.format import manifest
from holdfast.format.hashes import digest
from holdfast.format.layout import Piece
from holdfast.format.manifest import EACH, SPLIT, Manifest, PartFile, Tensor
from holdfast.format.part import DataFile, Part
from holdfast.format.sealed import dumps, seal

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, lengths


def parts_of(pieces_by_rank: Sequence[Sequence[Piece]]) -> list[tuple[Part, bytes]]:
    """One part for each rank, with a document that only its hash matters of."""
    world_size = len(pieces_by_rank)
    return [
        (
            Part(
                run="run",
                step=500,
                attempt=2,
                rank=rank,
                world_size=world_size,
                base_step=400,
                pieces=tuple(pieces),
                starts=(0,) * len(pieces),
                tied={},
                values={},
                file=DataFile(1000 + rank, 65536, (digest(b""),)),
            ),
            b"document of rank %d" % rank,
        )
        for rank, pieces in enumerate(pieces_by_rank)
    ]


def merge(pieces_by_rank: Sequence[Sequence[Piece]]) -> Manifest:
    return manifest.merge(parts_of(pieces_by_rank), id="id", created_unix_s=1.5)


def region(box: Box, shape: tuple[int, ...], name: str = "w", dtype: str = "F32") -> Piece:
    return Piece(name, dtype, shape, *box)


@st.composite
def partitions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape and boxes that cover it exactly, made by cutting boxes again and again, in any order."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 8))):
        offsets, lengths = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, lengths[dim]))  # 0 leaves an empty box, as uneven sharding does
        upper = tuple(o + at * (d == dim) for d, o in enumerate(offsets))
        lower_lengths = tuple(at if d == dim else n for d, n in enumerate(lengths))
        upper_lengths = tuple(n - at * (d == dim) for d, n in enumerate(lengths))
        boxes += [(offsets, lower_lengths), (upper, upper_lengths)]
    return shape, draw(st.permutations(boxes))


@given(partitions())
def test_any_partition_is_accepted(cut: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = cut
    merged = merge([[region(box, shape)] for box in boxes])
    assert merged.tensors == {"w": Tensor("F32", shape, 0 if len(boxes) == 1 else SPLIT)}


@given(partitions(), st.data())
def test_a_partition_with_a_missing_piece_is_refused(
    cut: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = cut
    held = [box for box in boxes if all(box[1])]
    held.pop(data.draw(st.integers(0, len(held) - 1)))
    with pytest.raises(InvalidInput, match="cover") as caught:
        merge([[region(box, shape)] for box in [*held, ((0,) * len(shape), (0,) * len(shape))]])
    assert (caught.value.key, caught.value.step) == ("w", 500)


@given(partitions(), st.data())
def test_a_partition_with_a_piece_held_twice_is_refused(
    cut: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = cut
    held = [box for box in boxes if all(box[1])]
    twice = data.draw(st.integers(0, len(held) - 1))
    with pytest.raises(InvalidInput, match=rf"Ranks {twice} and {len(held)} both hold"):
        merge([[region(box, shape)] for box in [*held, held[twice]]])


@given(st.lists(st.tuples(*[st.tuples(st.integers(0, 4), st.integers(1, 4))] * 2), min_size=2, max_size=5))
def test_coverage_agrees_with_counting_elements(cuts: list[tuple[tuple[int, int], tuple[int, int]]]) -> None:
    """Boxes drawn at random are accepted exactly if every element is in one of them."""
    shape = (5, 5)
    boxes: list[Box] = [((a, b), (min(n, shape[0] - a), min(m, shape[1] - b))) for (a, n), (b, m) in cuts]
    counts = dict.fromkeys(itertools.product(range(5), range(5)), 0)
    for (a, b), (n, m) in boxes:
        for place in itertools.product(range(a, a + n), range(b, b + m)):
            counts[place] += 1
    pieces = [[region(box, shape)] for box in boxes]
    if set(counts.values()) == {1}:
        assert merge(pieces).tensors["w"].owner == SPLIT
    else:
        with pytest.raises(InvalidInput):
            merge(pieces)


def test_thousands_of_pieces_are_checked_in_a_moment() -> None:
    """A mesh of 64 x 32 ranks: all pairs of 2048 pieces for many tensors would hold up the commit."""
    shape = (640, 320)
    boxes = [((10 * row, 10 * column), (10, 10)) for row in range(64) for column in range(32)]
    random.Random(1).shuffle(boxes)
    names = [f"w{number}" for number in range(5)]
    ranks = [[region(box, shape, name) for name in names] for box in boxes]
    assert {tensor.owner for tensor in merge(ranks).tensors.values()} == {SPLIT}
    ranks[7][3] = dataclasses.replace(ranks[7][3], offsets=boxes[8][0])
    with pytest.raises(InvalidInput, match="both hold the region") as caught:
        merge(ranks)
    assert caught.value.key == "w3"


def test_a_manifest_knows_owners_ties_and_files() -> None:
    """Who holds all of a tensor, which tensors every rank has, which are split; hashes of all parts."""
    rng = [Piece.whole("rng", "U8", (n,), per_rank=True) for n in (16, 24)]  # sizes may differ by rank
    ranks = parts_of(
        [
            [
                Piece.whole("a", "F32", (2, 2)),
                rng[0],
                region(((0,), (3,)), (4,), "s"),
                Piece.whole("none", "I8", (0,)),
            ],
            [Piece.whole("scalar", "BF16", ()), rng[1], region(((3,), (1,)), (4,), "s")],
        ]
    )
    ranks[0] = (dataclasses.replace(ranks[0][0], tied={"head": "a"}), ranks[0][1])
    merged = manifest.merge(ranks, id="id", created_unix_s=2.5)
    assert merged.tensors == {
        "a": Tensor("F32", (2, 2), 0),
        "rng": Tensor("U8", (16,), EACH),
        "s": Tensor("F32", (4,), SPLIT),
        "none": Tensor("I8", (0,), 0),
        "scalar": Tensor("BF16", (), 1),
    }
    assert merged.tied == {"head": "a"}
    assert merged.parts == tuple(
        PartFile(rank, len(doc), digest(doc), part.file.num_bytes) for rank, (part, doc) in enumerate(ranks)
    )
    assert merged.data_bytes == 2001
    assert (merged.run, merged.step, merged.attempt, merged.world_size, merged.base_step) == (
        "run",
        500,
        2,
        2,
        400,
    )
    assert manifest.parse(manifest.document(merged), "manifest") == merged


@pytest.mark.parametrize(
    ("second", "says"),
    [
        (Piece.whole("w", "F64", (4,)), r"rank 0 has F32\[4\], rank 1 has F64\[4\]"),
        (Piece.whole("w", "F32", (5,)), r"rank 0 has F32\[4\], rank 1 has F32\[5\]"),
        (Piece.whole("w", "F32", (4,)), "Ranks 0 and 1 both hold"),
        (Piece.whole("w", "F32", (4,), per_rank=True), "for rank 1 every rank has its own"),
        (Piece("w", "F32", (4,), (3,), (2,)), "not inside it"),
        (Piece("w", "F32", (4,), (-1,), (1,)), "not inside it"),
        (Piece("w", "F32", (4,), (0, 0), (1,)), "not inside it"),
        (Piece("w", "F32", (4,), (4,), (0,)), None),
    ],
)
def test_ranks_that_disagree_are_named(second: Piece, says: str | None) -> None:
    pieces = [[Piece.whole("w", "F32", (4,))], [second]]
    if says is None:  # an empty region beside the whole does no harm
        assert merge(pieces).tensors["w"] == Tensor("F32", (4,), SPLIT)
        return
    for order in (pieces, pieces[::-1]):
        with pytest.raises(InvalidInput) as caught:
            merge(order)
        assert caught.value.key == "w"
        assert "500 was not committed" in str(caught.value)
    with pytest.raises(InvalidInput, match=says):
        merge(pieces)


def test_a_piece_outside_the_shape_cannot_stand_for_a_missing_one() -> None:
    """The number of elements alone is right here."""
    pieces = [[region(((0,), (2,)), (4,))], [region(((3,), (2,)), (4,))]]
    with pytest.raises(InvalidInput, match="not inside"):
        merge(pieces)


def test_scalars_held_twice_are_refused() -> None:
    with pytest.raises(InvalidInput, match="Ranks 0 and 1 both hold"):
        merge([[Piece.whole("s", "F32", ())], [Piece.whole("s", "F32", ())]])


@pytest.mark.parametrize("fact", ["run", "step", "attempt", "world_size", "base_step"])
def test_parts_of_different_checkpoints_are_not_merged(fact: str) -> None:
    ranks = parts_of([[], []])
    other = dataclasses.replace(ranks[1][0], **{fact: "x" if fact == "run" else 3})
    with pytest.raises(InvalidInput, match=f"Rank 1 says {fact}=") as caught:
        manifest.merge([ranks[0], (other, ranks[1][1])], id="id", created_unix_s=0.0)
    assert caught.value.rank == 1


def test_missing_and_repeated_parts_are_refused() -> None:
    ranks = parts_of([[], [], []])
    for chosen in (ranks[:2], ranks[1:], [ranks[0], ranks[2], ranks[1]], [*ranks, ranks[2]]):
        with pytest.raises(InvalidInput, match="needs the parts of ranks 0 to 2"):
            manifest.merge(chosen, id="id", created_unix_s=0.0)


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
shapes = st.lists(st.integers(0, 99), max_size=3).map(tuple)
owners = st.integers(0, 9) | st.sampled_from([EACH, SPLIT])
manifests = st.builds(
    Manifest,
    id=text,
    run=text,
    step=st.integers(0),
    attempt=st.integers(0),
    world_size=st.integers(1),
    base_step=st.none() | st.integers(0),
    created_unix_s=st.floats(0, 1e12),
    parts=st.lists(st.builds(PartFile, st.integers(0), st.integers(0), text, st.integers(0)), max_size=3).map(
        tuple
    ),
    tensors=st.dictionaries(text, st.builds(Tensor, text, shapes, owners), max_size=3),
    tied=st.dictionaries(text, text, max_size=3),
)


@given(manifests)
def test_a_manifest_comes_back(value: Manifest) -> None:
    assert manifest.parse(manifest.document(value), "manifest") == value


@given(manifests, st.data())
def test_a_changed_byte_is_found(value: Manifest, data: st.DataObject) -> None:
    damaged = bytearray(manifest.document(value))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Corrupt):
        manifest.parse(bytes(damaged), "manifest")


@pytest.mark.parametrize(
    "change",
    [
        {"tensors": {"w": []}},
        {"tensors": []},
        {"tensors": {"w": 3}},
        {"parts": [[1]]},
        {"parts": None},
        {"id": None},
    ],
)
def test_a_sealed_document_that_is_no_manifest_is_corrupt(change: dict[str, object]) -> None:
    body = json.loads(manifest.document(merge([[]])))
    del body["xxh3_128"]
    body.update(change)
    body = {key: value for key, value in body.items() if value is not None}
    with pytest.raises(Corrupt, match="lacks what a manifest holds"):
        manifest.parse(seal(dumps(body)), "manifest")


def test_other_kinds_and_newer_versions_are_told_apart() -> None:
    with pytest.raises(Corrupt, match="expected 'holdfast-manifest'"):
        manifest.parse(seal(dumps({"format": "holdfast-part", "version": 1})), "m")
    with pytest.raises(Unsupported, match="version 2"):
        manifest.parse(seal(dumps({"format": "holdfast-manifest", "version": 2})), "m")
