"""Retain: delete checkpoints that policy no longer keeps, and what earlier work has left half done."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from holdfast.errors import Corrupt, Unsupported
from holdfast.format import manifest as manifests
from holdfast.format import names
from holdfast.format.part import Ancestors
from holdfast.killpoint import kill_point
from holdfast.policy import Keep, line_of
from holdfast.store import Store

Id = tuple[int, int]  # (attempt, step), the order of checkpoints


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
        files = self._files()
        complete = {
            found for found, its_names in files.items() if names.manifest(found[1], found[0]) in its_names
        }
        self._readable.add(newest)  # it need not be read back
        line = line_of((found for found in complete if self._is_readable(found)), newest, ancestors)
        kept = self.keep.kept(line.current) | {newest} | set(in_work)
        doomed = {found for found in line.current if found not in kept}
        doomed |= {found for found in line.superseded if found[1] <= newest[1]} - kept
        half_done = {found for found in files if found not in complete and found < newest} - kept
        for found in sorted(doomed | half_done):
            self._delete(found, files[found])
            yield Deleted(*found, was_complete=found in complete)

    def _files(self) -> dict[Id, list[str]]:
        files: dict[Id, list[str]] = {}
        for entry in self.store.list("step-"):
            facts = names.parse(entry.name)
            if facts and facts.kind in ("manifest", "part", "data", "frozen", "refusal"):
                files.setdefault((facts.attempt, facts.step), []).append(entry.name)
        return files

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
