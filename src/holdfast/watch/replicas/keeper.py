"""Half of the watch of replicas in a keeper: adds hashes to each part, and compares those of all parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace
from typing_extensions import override

from holdfast.checkpoint.format.catalog import columns
from holdfast.checkpoint.format.limits import MAX_RANKS
from holdfast.checkpoint.format.sections import Mark, Section
from holdfast.checkpoint.home.judges import CompleteSave
from holdfast.checkpoint.keeper.watch import KeeperRun, KeeperWatch, PersistedSave
from holdfast.system.documents import Fields, read_integers
from holdfast.system.units import plural
from holdfast.watch.replicas.comparison import Replica, ReplicaHashes, ReplicaWatch

REPLICA_DIGITS = 16  # length of the hash of a replica: xxh3-64
_MAX_HOST_CHARS = 256
_DIFFERENCE = (
    "THE RANKS' COPIES DIFFER in the checkpoint of step {}, which is marked as unhealthy:\n{}\n"
    "The checkpoint has one rank's copy of each tensor, and a restore gives it to all. Training continues. "
    "Resume from a step at which they were equal, and leave out the host if it happens there again. If the "
    "ranks differ on purpose, mark the object with per_rank(), or switch the comparison off with "
    'watches=[Replicas("off")]. See `holdfast history {}`.'
)


class ReplicasKeeper(KeeperWatch):
    """Comparison of the tensors that several ranks hold."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._watch = ReplicaWatch()

    @override
    def start(self, run: KeeperRun) -> None:
        self._run = run

    @override
    def persisted(self, save: PersistedSave) -> Section | None:
        if save.section is None:
            return None
        data = {**save.section.data, "host": save.host[:_MAX_HOST_CHARS], "hashes": "".join(save.hashes)}
        return replace(save.section, data=data)

    @override
    def committing(self, save: CompleteSave) -> Section | None:
        found = ReplicaHashes()
        for rank, section in save.sections.items():
            found.add(rank, *_read(section), save.tensor_names(rank))
        compared = self._watch.compare(save.step, found)
        texts = [f"at step {one.step} {one.text}" for one in compared.differences]
        mark = Mark.AGAINST if texts else Mark.NONE
        if compared.num_equal and not texts:
            texts = [f"{plural(compared.num_equal, 'replicated tensor')} compared and equal on all ranks"]
        return Section(1, {"num_equal": compared.num_equal}, mark, tuple(texts))

    @override
    def committed(self, step: int, section: Section | None) -> None:
        found = self._watch.take_new()
        for difference in found:
            members = {"difference": difference.members()}
            self._run.history.record("replicas-differ", step=step, detail=difference.text, members=members)
        if found:
            texts = "\n".join(f"  {one.text}" for one in found)
            self._run.warn(_DIFFERENCE.format(step, texts, self._run.config.home))


def _read(section: Section) -> tuple[str, list[Replica]]:
    """Return the host and the replicas of a rank."""
    body = Fields(dict(section.data), "the section of replicas")
    rows = body.array("rows")
    text = body.text("hashes", max_chars=REPLICA_DIGITS * len(rows))
    if len(text) != REPLICA_DIGITS * len(rows):
        raise ValueError(f"{len(text)} digits of hashes for {len(rows)} replicas")
    hashes = (text[i : i + REPLICA_DIGITS] for i in range(0, len(text), REPLICA_DIGITS))
    replicas = [_replica(row, found) for row, found in zip(rows, hashes, strict=True)]
    return body.text("host", max_chars=_MAX_HOST_CHARS), replicas


def _replica(row: Any, found: str) -> Replica:
    tensor, region, is_trained = columns(row, 3, "a replica")
    read_integers([tensor])
    read_integers([region], at_most=MAX_RANKS - 1)
    read_integers([is_trained], at_most=1)
    return Replica(tensor, region, bool(is_trained), found)
