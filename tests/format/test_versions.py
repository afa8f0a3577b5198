"""Each version of a document has its own parser; older versions stay readable."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch
from msgspec import field
from msgspec.structs import replace

from holdfast.checkpoint.format import manifest, names, part, run
from holdfast.checkpoint.format.limits import WorldSize
from holdfast.checkpoint.format.sealed import Versions, dumps, seal, unseal_lines
from holdfast.checkpoint.restore.checkpoint import open as open_checkpoint
from holdfast.checkpoint.store.memory import MemoryStore
from holdfast.errors import Corrupt, Unsupported
from making import make_checkpoint, make_home


class MembersV2(manifest._ManifestMembers, frozen=True, kw_only=True):
    """Members of a made-up version 2 of the manifest, which calls the world size `num_ranks`."""

    world_size: WorldSize = field(name="num_ranks")


def rewrite_as_v2(store: MemoryStore, name: str) -> None:
    head, *catalogs = unseal_lines(store.get(name), name)
    body = json.loads(head)
    members = {"num_ranks" if key == "world_size" else key: value for key, value in body.items()}
    store.put(name, seal(b"\n".join((dumps(members | {"version": 2}), *catalogs))))


@pytest.fixture
def store() -> MemoryStore:
    """Return a home with step 1 in version 1 and step 2 in version 2."""
    made = MemoryStore()
    make_home(made)
    for step in (1, 2):
        make_checkpoint(made, step, tensors=[{"w": torch.full((2,), float(step))}])
    rewrite_as_v2(made, names.manifest(2, 1))
    return made


def test_added_members_are_those_of_their_version(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_v2 = replace(manifest.VERSIONS, types={**manifest.VERSIONS.types, 2: MembersV2})
    monkeypatch.setattr(manifest, "VERSIONS", with_v2)
    for step in (1, 2):
        opened = open_checkpoint(store, step)
        assert opened.manifest.world_size == 1
        assert opened.tensor("w").tolist() == [step, step]
    assert open_checkpoint(store).step == 2


def test_a_version_without_members_is_unsupported(store: MemoryStore) -> None:
    with pytest.raises(Unsupported, match=r"format version 2; this Holdfast reads up to 1\. Upgrade it"):
        open_checkpoint(store, 2)


VERSIONS: Versions[Any] = Versions(
    "holdfast-egg", written=2, types={1: dict[str, Any], 2: dict[str, int | str]}
)


def test_the_version_of_a_document_selects_the_type_of_its_members() -> None:
    line = VERSIONS.line({"size": None})
    assert line == b'{"format":"holdfast-egg","version":2,"size":null}'
    with pytest.raises(Corrupt, match="egg: Expected"):
        VERSIONS.read(line, "egg")
    assert VERSIONS.read(line.replace(b"2", b"1"), "egg.json")["size"] is None


@pytest.mark.parametrize("version", [0, 3, "1", True, None])
def test_an_unknown_version_is_unsupported(version: object) -> None:
    with pytest.raises(Unsupported, match="reads up to 2"):
        VERSIONS.read(dumps({"format": "holdfast-egg", "version": version}), "egg.json")


@pytest.mark.parametrize(
    ("parse", "kind"),
    [
        (part.parse, "holdfast-part"),
        (manifest.parse, "holdfast-manifest"),
        (partial(run.parse, run.Run), "holdfast-run"),
        (partial(run.parse, run.Done), "holdfast-done"),
    ],
)
def test_another_kind_is_corrupt_and_a_newer_version_is_unsupported(parse: Any, kind: str) -> None:
    with pytest.raises(Corrupt, match=f"expected '{kind}'"):
        parse(seal(dumps({"format": "holdfast-egg", "version": 1})), "doc")
    with pytest.raises(Unsupported, match="version 2"):
        parse(seal(dumps({"format": kind, "version": 2})), "doc")
