"""A manifest is made only of parts that agree, and lists the tensors of all of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from format.drawing import catalogs, run_ids, sections, text
from holdfast.checkpoint.format import manifest
from holdfast.checkpoint.format.catalog import Catalog, catalog_text
from holdfast.checkpoint.format.hashes import digest
from holdfast.checkpoint.format.layout import EvenPartitioning, ListedPartitioning, Region, whole
from holdfast.checkpoint.format.limits import MAX_ATTEMPT, MAX_STEP
from holdfast.checkpoint.format.manifest import EACH, SPLIT, Manifest, PartFile, Tensor
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.part import DataFile, Part
from holdfast.checkpoint.format.sealed import dumps, seal, unseal_lines
from holdfast.errors import Corrupt, InvalidInput
from making import resealed

Own = tuple[str, str, tuple[int, ...], int]


def parts_of(by_rank: Sequence[Catalog], own: Sequence[Sequence[Own]] = ()) -> list[Part]:
    """One part for each rank."""
    found = []
    for rank, catalog in enumerate(by_rank):
        line = catalog_text(catalog)
        one = Part(
            run="run", step=500, attempt=2, rank=rank, world_size=len(by_rank), values={},
            ancestors=(CheckpointId(1, 400),), own=tuple(own[rank]) if own else (),
            file=DataFile(1000 + rank, 65536, digest(b"")),
            frozen=DataFile(77, 65536, digest(b"")) if rank else None,
            catalog_digest=digest(line), catalog_text=line, what=f"part {rank}",
            seal=digest(b"%d" % rank), document_bytes=100 + rank,
            starts_text=dumps([0] * len(list(catalog.written_by(rank)))),
        )  # fmt: skip
        found.append(one)
    return found


def merge(parts: Sequence[Part]) -> Manifest:
    return manifest.merge(parts, id="id", created_unix_s=2.5)


def catalog(**tensors: Tensor) -> Catalog:
    return Catalog(tensors, {})


HALVES = ListedPartitioning(((0, Region((0,), (3,))), (1, Region((3,), (1,)))))
EXAMPLE = Catalog(
    {
        "a": Tensor("F32", (2, 2), whole(0), (0, 1)),
        "s": Tensor("F32", (4,), HALVES, (0, 1)),
        "c": Tensor("F32", (4,), EvenPartitioning(((0, 2),), (1, 0)), (0, 1), True),
        "none": Tensor("I8", (0,), whole(0), (0,)),
        "scalar": Tensor("BF16", (), whole(1), (0, 1)),
    },
    {"head": "a", "seed": "rng"},
)
OWN: list[list[Own]] = [[("rng", "U8", (16,), 4096)]] * 2


def lines_of(shared: Catalog, own: Sequence[Sequence[Own]] = OWN) -> list[bytes]:
    """The lines of the manifest of two ranks with one catalog, the first without its seal."""
    return unseal_lines(manifest.document(merge(parts_of([shared, shared], own))), "manifest")


def test_a_manifest_lists_owners_ties_and_files() -> None:
    own = [[("rng", "U8", (n,), 4096)] for n in (16, 24)]  # sizes may differ by rank
    ranks = parts_of([EXAMPLE, EXAMPLE], own)
    merged = merge(ranks)
    assert merged.tensors == {**EXAMPLE.tensors, "rng": Tensor("U8", (16,), None)}
    owners = {"a": 0, "s": SPLIT, "c": SPLIT, "none": 0, "scalar": 1, "rng": EACH}
    assert {name: tensor.owner for name, tensor in merged.tensors.items()} == owners
    assert merged.tied == {"head": "a", "seed": "rng"}
    assert merged.parts == (
        PartFile(0, 100, ranks[0].seal, 1000, None, 0),
        PartFile(1, 101, ranks[1].seal, 1001, 77, 0),
    )
    assert merged.data_bytes == 2078
    assert merged.catalogs == (catalog_text(EXAMPLE),)
    facts = merged.run, merged.step, merged.attempt, merged.world_size, merged.ancestors, merged.base_step
    assert facts == ("run", 500, 2, 2, ((1, 400),), 400)
    assert manifest.parse(manifest.document(merged), "manifest") == merged


def test_each_different_catalog_is_stored_once_unchanged() -> None:
    """Three stages of two ranks, which do not stand together."""
    stages = [catalog(**{f"w{i}": Tensor("F32", (4,), whole(i), (i, 5 - i))}) for i in range(3)]
    merged = merge(parts_of([stages[min(rank, 5 - rank)] for rank in range(6)]))
    assert merged.catalogs == tuple(map(catalog_text, stages))
    assert [part.catalog for part in merged.parts] == [0, 1, 2, 2, 1, 0]
    assert manifest.document(merged).split(b"\n")[1:] == list(merged.catalogs)
    assert sorted(merged.tensors) == ["w0", "w1", "w2"]


def test_a_checkpoint_may_have_values_only() -> None:
    merged = merge(parts_of([catalog(), catalog()]))
    assert merged.tensors == {}
    assert manifest.parse(manifest.document(merged), "manifest") == merged


def test_the_error_of_catalogs_that_disagree_names_the_step() -> None:
    a, b = (catalog(w=Tensor(dtype, (4,), whole(0), (0, 1))) for dtype in ("F32", "F64"))
    with pytest.raises(InvalidInput, match=r"rank 0 has F32\[4\], rank 1 has F64\[4\]") as caught:
        merge(parts_of([a, b]))
    assert (caught.value.key, caught.value.rank, caught.value.step) == ("w", 1, 500)
    assert str(caught.value).startswith("Step 500 was not committed: ")
    assert str(caught.value).endswith("Earlier checkpoints remain.")


def test_a_tensor_that_is_both_per_rank_and_shared_is_refused() -> None:
    shared = catalog(w=Tensor("F32", (4,), whole(0), (0,)))
    own: list[list[Own]] = [[], [("w", "F32", (4,), 4096)]]
    for ranks in (parts_of([shared, catalog()], own), parts_of([shared, shared], own)):
        with pytest.raises(InvalidInput, match="rank 1 has its own, but rank 0 lists it as shared") as caught:
            merge(ranks)
        assert (caught.value.key, caught.value.rank, caught.value.step) == ("w", 1, 500)


@pytest.mark.parametrize("num_starts", [0, 3, 5])
def test_a_part_with_a_wrong_number_of_starts_is_refused(num_starts: int) -> None:
    ranks = parts_of([EXAMPLE, EXAMPLE], OWN)
    assert merge(ranks).world_size == 2
    ranks[0] = replace(ranks[0], starts_text=dumps([0] * num_starts))
    with pytest.raises(InvalidInput, match=f"rank 0 wrote {num_starts} shards, but the catalogs list 4"):
        merge(ranks)


@pytest.mark.parametrize("fact", ["run", "step", "attempt", "world_size", "ancestors"])
def test_parts_of_different_checkpoints_are_not_merged(fact: str) -> None:
    ranks = parts_of([catalog(), catalog()])
    change = {"run": "x", "ancestors": ((1, 399),)}.get(fact, 3)
    other = replace(ranks[1], **{fact: change})
    with pytest.raises(InvalidInput, match=f"rank 1 has {fact}=") as caught:
        merge([ranks[0], other])
    assert (caught.value.rank, caught.value.step) == (1, 500)


def test_missing_and_repeated_parts_are_refused() -> None:
    ranks = parts_of([catalog()] * 3)
    for chosen, says in (
        (ranks[:2], "needs the parts of 3 ranks, found 2"),
        (ranks[1:], "the part of rank 0 is missing; found that of rank 1"),
        ([ranks[0], ranks[2], ranks[1]], "the part of rank 1 is missing; found that of rank 2"),
        ([*ranks, ranks[2]], "the part of rank 3 is missing; found that of rank 2"),
    ):
        with pytest.raises(InvalidInput, match=says):
            merge(chosen)


def test_an_invalid_catalog_is_corrupt() -> None:
    (one,) = parts_of([catalog()])
    broken = replace(one, catalog_text=b"[]", catalog_digest=digest(b"[]"))
    with pytest.raises(Corrupt, match="the catalog of rank 0"):
        merge([broken])


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Draw parts that fit together, and return their manifest."""
    ranks = list(range(draw(st.integers(1, 5))))
    common = draw(catalogs(ranks))
    free = text.filter(lambda name: name not in common.tensors)
    names = draw(st.lists(free, max_size=2, unique=True))
    shapes = st.lists(st.integers(0, 9), max_size=2).map(tuple)
    own = [[(name, "F32", draw(shapes), 0) for name in names] for _ in ranks]
    ancestors = tuple(draw(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 99)), max_size=3)))
    facts = {"run": draw(run_ids), "step": draw(st.integers(0, MAX_STEP))}
    facts["attempt"] = draw(st.integers(1, MAX_ATTEMPT))
    parts = [replace(part, ancestors=ancestors, **facts) for part in parts_of([common] * len(ranks), own)]
    merged = manifest.merge(parts, id=draw(text), created_unix_s=draw(st.floats(0, 1e12)))
    return replace(merged, watches=draw(sections))


@given(manifests())
def test_a_manifest_round_trips(value: Manifest) -> None:
    assert manifest.parse(manifest.document(value), "manifest") == value


@pytest.mark.parametrize(
    "change",
    [
        *(
            {"each": {"w": []}},
            {"each": []},
            {"each": {"w": 3}},
            {"each": {"w": ["F32", "4"]}},
            {"each": None},
        ),
        *({"each": {"w": [["F32"], [4]]}}, {"each": {"w": ["F32", [4.0]]}}),
        *({"parts": [[1]]}, {"parts": None}, {"parts": []}, {"parts": [[0, 1, "x", 1, None, 1]] * 2}),
        *({"watches": {"a": 1}}, {"watches": []}, {"watches": {"a": [1, 4, [], {}]}}),
        *({"watches": {"A b": [1, 1, [], {}]}}, {"watches": {"a": [1, 1, [3], {}]}}),
        *({"watches": {"a": [1, 1, [], 3]}}, {"watches": {f"a{i}": [1, 1, [], {}] for i in range(33)}}),
        {"watches": {"a": [1, 1, [], {"text": "x" * (64 << 10)}]}},
        *({"id": None}, {"ancestors": None}, {"ancestors": [1]}, {"ancestors": [["a", {}]]}),
    ],
)
def test_other_sealed_documents_are_not_manifests(change: dict[str, object]) -> None:
    """Whoever sealed it."""
    with pytest.raises(Corrupt, match="is not a valid manifest"):
        manifest.parse(resealed(lines_of(EXAMPLE), change), "manifest")


def test_a_manifest_without_findings_of_watches_has_no_known_health() -> None:
    """As earlier versions have written it, byte for byte."""
    text_before = manifest.document(merge(parts_of([EXAMPLE, EXAMPLE], OWN)))
    assert b"watches" not in text_before
    assert manifest.parse(text_before, "manifest").health.healthy is None


@pytest.mark.parametrize("lines", [0, 2])
def test_a_manifest_with_a_wrong_number_of_catalogs_is_corrupt(lines: int) -> None:
    body, rest = lines_of(EXAMPLE)
    with pytest.raises(Corrupt, match="is not a valid manifest"):
        manifest.parse(seal(b"\n".join([body, *[rest] * lines])), "manifest")


def test_a_manifest_whose_catalogs_disagree_is_corrupt() -> None:
    """Otherwise a reader would search for regions that no rank wrote."""
    halves = EvenPartitioning(((0, 2),), (0, 1))
    body, rest = lines_of(catalog(w=Tensor("F32", (4,), halves, (0, 1))), own=())
    ranks = b'"ranks":[0,1]'
    for old, new in ((ranks, b'"ranks":[0,2]'), (ranks, b'"ranks":[0]'), (b"[0,2]", b"[0,3]")):
        assert rest.count(old) == 1
        with pytest.raises(Corrupt, match="is not a valid manifest"):
            manifest.parse(seal(body + b"\n" + rest.replace(old, new)), "manifest")


def test_an_alias_of_a_missing_tensor_is_refused() -> None:
    """Otherwise a reader would search for a tensor that does not exist."""
    with pytest.raises(InvalidInput, match="head is an alias of w, but no rank has") as caught:
        merge(parts_of([Catalog({}, {"head": "w"})]))
    assert (caught.value.key, caught.value.step) == ("head", 500)
    good = merge(parts_of([Catalog({"w": Tensor("F32", (), whole(0), (0,))}, {"head": "w"})]))
    text = manifest.document(good)[48:].replace(b'"tied":{"head":"w"}', b'"tied":{"head":"x"}')
    with pytest.raises(Corrupt, match="head is an alias of x"):
        manifest.parse(seal(b'{"' + text), "manifest")
