"""Retain: delete checkpoints that policy no longer keeps, and what earlier work has left half done."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from holdfast.errors import Corrupt, NotFound, Unsupported
from holdfast.format import manifest as manifests
from holdfast.format import names
from holdfast.format import part as parts
from holdfast.format.part import Ancestors
from holdfast.keeper.terms import Terms
from holdfast.killpoint import kill_point
from holdfast.policy import Keep, line_of
from holdfast.store import Store

Id = tuple[int, int]  # (attempt, step), the order of checkpoints
_MAX_PASSED_ATTEMPTS = 3  # attempts whose passed-over checkpoints stay, the newest of those that have any


@dataclass(frozen=True, slots=True)
class Deleted:
    """One checkpoint that retention has removed."""

    attempt: int
    step: int
    was_complete: bool


class Retention:
    """Applies one policy to one home. Remembers which manifests it could read, so that each is read once."""

    def __init__(self, store: Store, keep: Keep) -> None:
        self.store = store
        self.keep = keep
        self._readable: set[Id] = set()

    def apply(self, newest: Id, ancestors: Ancestors, in_work: Collection[Id]) -> Iterator[Deleted]:
        """Delete what need not stay now that `newest` is complete.

        Args:
            newest: the checkpoint just committed; it always stays.
            ancestors: its ancestors.
            in_work: what may still become complete, or is still needed; it stays.

        Raises:
            RetryLater: the store failed; what was not deleted yet is found again next time.
        """
        files = files_of(self.store)
        complete = {
            found for found, its_names in files.items() if names.manifest(found[1], found[0]) in its_names
        }
        passed = passed_over(files)
        self._readable.add(newest)  # it need not be read back
        counted = (found for found in complete - passed if self._is_readable(found))
        line = line_of(counted, newest, ancestors)
        kept = self.keep.kept(line.current) | {newest} | set(in_work) | passed
        doomed = {found for found in line.current if found not in kept}
        doomed |= {found for found in line.superseded if found[1] <= newest[1]} - kept
        half_done = {found for found in files if found not in complete and found < newest} - kept
        for found in sorted(doomed | half_done):
            self._delete(found, files[found])
            yield Deleted(*found, was_complete=found in complete)

    def _is_readable(self, found: Id) -> bool:
        """A manifest that cannot be read is neither counted nor deleted: a person should see it."""
        if found not in self._readable:
            name = names.manifest(found[1], found[0])
            try:
                manifests.parse(self.store.get(name), name)
            except (Corrupt, Unsupported):
                return False
            self._readable.add(found)
        return True

    def _delete(self, found: Id, its_names: list[str]) -> None:
        manifest = names.manifest(found[1], found[0])
        if manifest in its_names:
            self.store.delete(manifest)  # first: a checkpoint without its files must never look complete
            kill_point("keeper.retain")
        for name in its_names:
            if name != manifest:
                self.store.delete(name)
        self._readable.discard(found)


class ShareRetention:
    """Applies one policy to this rank's share of a local folder that gets the files of some ranks only.

    No manifest tells there what is complete. What is known: the newest checkpoint of which all ranks have
    said that they have their files, or that has come home. It stays, and so does all that is newer, since it
    may become complete, or be so already.
    """

    def __init__(self, store: Store, keep: Keep, terms: Terms) -> None:
        self.store = store
        self.keep = keep
        self._terms = terms

    def apply(self, complete: Id, needed: Collection[Id]) -> Iterator[Deleted]:
        """Delete what need not stay, now that `complete` is known to be so.

        Args:
            complete: the newest checkpoint that is known to be complete, wherever its files are.
            needed: what stays whatever its age: it is on its way home, or the newest there.

        Raises:
            RetryLater: the store failed; what was not deleted yet is found again next time.
        """
        files = files_of(self.store, self._is_mine)
        passed = passed_over(files)
        saved = {one for one, its_names in files.items() if any(name.endswith(".json") for name in its_names)}
        older = [one for one in saved - passed if one <= complete]
        line = line_of(older, complete, self._ancestors(files.get(complete, [])))
        kept = self.keep.kept(line.current) | {complete} | set(needed) | passed
        doomed = set(line.current) | {one for one in line.superseded if one[1] <= complete[1]}
        half_done = {one for one in files if one not in saved and one < complete}
        for one in sorted((doomed | half_done) - kept):
            for name in sorted(files[one], key=_document_first):
                self.store.delete(name)
                kill_point("keeper.retain")
            yield Deleted(*one, was_complete=one in saved)

    def _is_mine(self, facts: names.Parsed) -> bool:
        if facts.kind == "passed":
            return True
        rank = 0 if facts.kind in ("manifest", "refusal") else facts.rank  # left by one host on its own
        return self._terms.is_mine(rank)

    def _ancestors(self, its_names: list[str]) -> Ancestors:
        """What a part of the checkpoint says of them; () where this folder has none to read."""
        for name in its_names:
            facts = names.parse(name)
            if facts and facts.kind == "part":
                with contextlib.suppress(Corrupt, NotFound, Unsupported):
                    return parts.parse(self.store.get(name), name).ancestors
        return ()


def passed_over(files: Mapping[Id, Sequence[str]]) -> set[Id]:
    """Return the checkpoints that a restore has passed over, and that nobody has decided about since.

    Those of the newest `_MAX_PASSED_ATTEMPTS` attempts that have any, so that a disk that damages one
    checkpoint after the other is not filled by them. An attempt leaves no more of them than were kept.

    Args:
        files: names of all files of checkpoints, see `files_of`.
    """
    found = {
        one for one, its_names in files.items() if names.passed(one[1], one[0]) in its_names and its_names[1:]
    }
    attempts = sorted({attempt for attempt, _ in found}, reverse=True)[:_MAX_PASSED_ATTEMPTS]
    return {one for one in found if one[0] in attempts}


def files_of(store: Store, chosen: Callable[[names.Parsed], bool] = lambda _: True) -> dict[Id, list[str]]:
    """Names of all files of checkpoints, complete or not, by checkpoint.

    Args:
        store: where.
        chosen: tells of the facts of a name whether it counts.
    """
    files: dict[Id, list[str]] = {}
    for entry in store.list("step-"):
        facts = names.parse(entry.name)
        if facts and facts.kind not in ("attempt", "step-other") and chosen(facts):
            files.setdefault((facts.attempt, facts.step), []).append(entry.name)
    return files


def _document_first(name: str) -> tuple[bool, bool]:
    """First the manifest, then the part: a document must never stand without what it describes."""
    facts = names.parse(name)
    kind = facts.kind if facts else ""
    return kind != "manifest", kind != "part"
