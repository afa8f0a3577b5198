"""Watch of replicas: the tensors that several ranks hold, compared at each save some of them. No torch."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct
from typing_extensions import override

from holdfast.checkpoint.copies import Copies, SharedTensor
from holdfast.checkpoint.format.limits import MAX_RANKS
from holdfast.checkpoint.format.sections import Mark, Section
from holdfast.checkpoint.home.judges import CompleteSave
from holdfast.checkpoint.keeper.watch import KeeperRun, KeeperWatch, PersistedSave
from holdfast.checkpoint.watch import CopiedSave, Watch, WatchedRun
from holdfast.errors import InvalidInput
from holdfast.system.documents import Count, read_as, to_plain
from holdfast.system.units import plural


@dataclass
class Replicas(Watch):
    """Comparison of the tensors that several ranks hold, at each save some of them.

    Args:
        within: number of saves within which every tensor is compared. "auto" bounds the cost instead: at each
            save 64 MiB, or an eighth of the bytes that the rank writes, and every tensor within 64 saves.
            "off" to compare nothing.

    Raises:
        InvalidInput: a value cannot be used.
    """

    name: ClassVar[str] = "replicas"
    keeper: ClassVar[str | None] = "holdfast.watch.replicas:ReplicasKeeper"
    events: ClassVar[Mapping[str, str]] = {
        "replica-check": "the share of replicated tensors that each save compares",
        "replicas-differ": "in a checkpoint; with the member `difference`",
    }

    within: int | str = "auto"

    def __post_init__(self) -> None:
        is_count = isinstance(self.within, int) and not isinstance(self.within, bool) and self.within >= 1
        if self.within not in ("auto", "off") and not is_count:
            raise InvalidInput(
                f"Replicas(within=) must be 'auto', 'off' or a whole number from 1, got {self.within!r:.100}."
            )
        self._noted = ""  # what the history has about the comparison

    @override
    def applies(self, run: WatchedRun) -> bool:
        return self.within != "off" and run.world_size > 1

    @override
    def begin(self, run: WatchedRun) -> None:
        self._run = run
        self._num_tensors = self._num_saves = 0

    @override
    def planned(self, tensors: Sequence[SharedTensor]) -> Copies | None:
        within = self.within if isinstance(self.within, int) else None
        turns = turns_of(tensors, within=within)
        self._num_tensors, self._num_saves = len(tensors), turns.num_saves
        return turns if tensors else None

    @override
    def saving(self, save: CopiedSave) -> Section | None:
        tensors = plural(self._num_tensors, "replicated tensor")
        text = f"{tensors}, each compared once in {plural(self._num_saves, 'save')}"
        if not save.has_room:
            text = "only the tensors that this rank writes are hashed: memory= has no room for others"
        if self._num_tensors and text != self._noted:  # at the first save, and when that changes
            self._noted = text
            self._run.note("replica-check", step=None, detail=text)
        rows = [[one.number, one.region, int(one.is_trained)] for one in save.copies]
        return Section(1, {"rows": rows}) if rows else None


MAX_TURNS = 64  # saves within which every tensor is compared, at most, unless the user chooses a number
FREE_BYTES = 64 << 20
"""Bytes of a rank that are compared at every save in any case: some 20 ms of processor time."""
_TURNS_PER_COPY = 8
"""A turn has an eighth of the bytes that a rank writes: it writes one of the copies' share."""


def turns_of(tensors: Sequence[SharedTensor], *, within: int | None) -> Copies:
    """Distribute the tensors that other ranks hold too over turns of about the same bytes.

    Every tensor is compared `within` so many saves; None bounds the cost instead: a turn has an eighth of the
    bytes that the rank writes, or 64 MiB, and there are at most 64 turns.

    Ranks: not collective; ranks that hold the same tensors compute the same turns for them.
    """
    by_object: dict[int, list[SharedTensor]] = {}
    for tensor in tensors:
        by_object.setdefault(id(tensor.holders), []).append(tensor)
    by_holders: dict[tuple[tuple[int, ...], ...], list[SharedTensor]] = {}
    for members in by_object.values():  # few: hashing a thousand ranks for each tensor would take long
        by_holders.setdefault(members[0].holders, []).extend(members)
    found: list[tuple[tuple[str, ...], ...]] = []
    for holders, members in by_holders.items():
        num_bytes = sum(one.num_bytes for one in members)
        most = min(-(-num_bytes // FREE_BYTES), _TURNS_PER_COPY * len(holders), MAX_TURNS)
        found.append(_turns(members, max(1, most) if within is None else within))
    return Copies(tuple(found))


def _turns(members: Sequence[SharedTensor], num_turns: int) -> tuple[tuple[str, ...], ...]:
    """Distribute tensors, the largest first, each to the turn with the fewest bytes so far."""
    loads = [(0, turn) for turn in range(num_turns)]
    turns: list[list[str]] = [[] for _ in range(num_turns)]
    for tensor in sorted(members, key=lambda tensor: (-tensor.num_bytes, tensor.name)):
        load, turn = loads[0]
        turns[turn].append(tensor.name)
        heapq.heapreplace(loads, (load + tensor.num_bytes, turn))
    return tuple(map(tuple, turns))


REPLICA_DIGITS = 16  # length of the hash of a replica: xxh3-64
_MAX_HOST_CHARS = 256
MAX_TENSORS = 8  # tensors that are named in a difference; the others are only counted
_Key = tuple[str, int]  # a tensor's name and the number of its region


class Replica(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One rank's copy of a region of a tensor."""

    tensor: Count  # number of the tensor in the catalog of the rank
    region: Annotated[int, Meta(ge=0, lt=MAX_RANKS)]  # its number, in the order of the partitioning
    is_trained: Literal[0, 1]  # 1: only an optimizer's step changes it, so all copies must be equal


class RankReplicas(Struct, frozen=True):
    """Section of a part: the replicas of a rank, and their hashes in one text, xxh3-64 in hex digits."""

    host: Annotated[str, Meta(max_length=_MAX_HOST_CHARS)]
    rows: tuple[Replica, ...]
    hashes: str

    def __post_init__(self) -> None:
        if len(self.hashes) != REPLICA_DIGITS * len(self.rows):
            raise InvalidInput(f"{len(self.hashes)} digits of hashes for {len(self.rows)} replicas")


class ReplicaDifference(Struct, frozen=True):
    """Tensors with other bytes on some ranks, the same for all of them."""

    step: int  # of the first checkpoint that showed it
    tensors: tuple[str, ...]  # names of the first of them
    num_tensors: int  # their number
    ranks: tuple[int, ...]  # those with other bytes; all of them if no bytes have a majority
    others: tuple[int, ...]  # the ranks with the bytes of the majority; empty without one
    hosts: tuple[str, ...]  # of `ranks`, in their order
    equal_at: int | None
    """Step of the newest checkpoint of this attempt at which all ranks had the same bytes; None if they were
    not compared before."""

    @property
    def text(self) -> str:
        """The difference as a sentence without its end."""
        more = self.num_tensors - len(self.tensors[:3])
        tensors = ", ".join(name[:200] for name in self.tensors[:3]) + (f" and {more} more" if more else "")
        before = "not compared before" if self.equal_at is None else f"equal at step {self.equal_at}"
        ranks = _ranks_text(self.ranks, self.hosts)
        if self.others:
            verb = "has" if len(self.ranks) == 1 else "have"
            return f"{ranks} {verb} other bytes than {_ranks_text(self.others)} in {tensors} ({before})"
        return f"{ranks} differ in {tensors} ({before}); no bytes have a majority"


class Comparison(Struct, frozen=True):
    """Comparison of the replicas in one checkpoint."""

    num_equal: int = 0  # regions of tensors that were compared and are equal on all ranks
    differences: tuple[ReplicaDifference, ...] = ()
    """Of this checkpoint, and of earlier ones whose tensors were not found equal since."""


class ReplicaHashes(Struct):
    """Hashes of one checkpoint, collected from the parts of all ranks."""

    hosts: dict[int, str] = {}
    trained: set[_Key] = set()
    hashes: dict[_Key, dict[int, str]] = {}

    def add(self, rank: int, found: RankReplicas, names: Sequence[str]) -> None:
        """Add the replicas of one rank. Raises ValueError if they do not fit the names in its catalog."""
        self.hosts[rank] = found.host
        for i, replica in enumerate(found.rows):
            if replica.tensor >= len(names):
                raise ValueError(f"a replica of tensor {replica.tensor}, but the catalog has {len(names)}")
            key = names[replica.tensor], replica.region
            at = i * REPLICA_DIGITS
            self.hashes.setdefault(key, {})[rank] = found.hashes[at : at + REPLICA_DIGITS]
            if replica.is_trained:
                self.trained.add(key)


class _Split(Struct, frozen=True):
    """Ranks with other bytes, and those with the bytes of the majority."""

    ranks: tuple[int, ...]
    others: tuple[int, ...]


class _Seen(Struct):
    """The two newest audits of one region, and the difference that is not settled."""

    audits: list[tuple[int, dict[int, str]]] = []
    equal_at: int | None = None
    split: tuple[int, _Split] | None = None  # with the step that first showed it


class ReplicaWatch:
    """Memory of one attempt's audits.

    All copies of what only optimizers change must be equal. Other tensors, such as buffers, may differ by
    nature. Such a difference counts only against the two audits before, in which all copies were equal: if
    the bytes stayed the same between these, a rank that changed them while another one did not; if they
    changed, any rank.
    """

    def __init__(self) -> None:
        self._seen: dict[_Key, _Seen] = {}
        self._reported: set[tuple[_Key, tuple[int, ...]]] = set()
        self._hosts: dict[int, str] = {}
        self._late: dict[_Key, tuple[int, _Split]] = {}  # of the checkpoint that is compared, if it is older

    def compare(self, step: int, found: ReplicaHashes) -> Comparison:
        """Compare the replicas of a checkpoint. A second call for the same step replaces the first."""
        self._hosts.update(found.hosts)
        self._late = {}
        num_equal = 0
        for key, hashes in found.hashes.items():
            if len(hashes) > 1:
                num_equal += self._compare(key, step, hashes, is_trained=key in found.trained)
        since = {key: one for key, one in self._unsettled().items() if one[0] <= step}
        return Comparison(num_equal, self._differences(since | self._late))

    def take_new(self) -> tuple[ReplicaDifference, ...]:
        """Return the differences that were not returned before."""
        found = self._unsettled() | self._late
        new = {key: one for key, one in found.items() if (key, one[1].ranks) not in self._reported}
        self._reported |= {(key, split.ranks) for key, (_, split) in new.items()}
        return self._differences(new)

    def _unsettled(self) -> dict[_Key, tuple[int, _Split]]:
        return {key: seen.split for key, seen in self._seen.items() if seen.split is not None}

    def _compare(self, key: _Key, step: int, hashes: dict[int, str], *, is_trained: bool) -> bool:
        """Compare one region; return True if all copies are equal."""
        seen = self._seen.setdefault(key, _Seen())
        is_equal = len(set(hashes.values())) == 1
        if seen.audits and seen.audits[-1][0] > step:
            # A newer checkpoint, which is committed already, has decided.
            if is_equal:
                seen.equal_at = max(step, seen.equal_at or 0)
            elif seen.split is not None:
                seen.split = min(step, seen.split[0]), seen.split[1]
            elif is_trained:
                self._late[key] = step, _split(hashes)  # equal again by now
            return is_equal
        seen.audits = [one for one in seen.audits if one[0] < step]  # not of an earlier try to commit
        if is_equal:
            seen.split, seen.equal_at = None, step
        else:
            split = _split(hashes) if is_trained else _split_by_history(hashes, seen.audits)
            if split is not None and (seen.split is None or seen.split[1] != split):
                seen.split = step, split
        seen.audits = [*seen.audits, (step, hashes)][-2:]
        return is_equal

    def _differences(self, found: Mapping[_Key, tuple[int, _Split]]) -> tuple[ReplicaDifference, ...]:
        """Return the differences of some regions, those of the same ranks together."""
        together: dict[tuple[int, _Split, int | None], list[str]] = {}
        for key, (step, split) in sorted(found.items(), key=lambda item: item[0]):
            equal_at = self._seen[key].equal_at
            before = equal_at if equal_at is not None and equal_at < step else None
            together.setdefault((step, split, before), []).append(key[0])
        made: list[ReplicaDifference] = []
        for (step, split, equal_at), names in together.items():
            shown, hosts = tuple(names[:MAX_TENSORS]), tuple(self._hosts.get(one, "") for one in split.ranks)
            facts = split.ranks, split.others, hosts, equal_at
            made.append(ReplicaDifference(step, shown, len(names), *facts))
        return tuple(made)


def _split(hashes: Mapping[int, str]) -> _Split:
    """Return the minority, or all ranks without a majority."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(hashes):
        groups.setdefault(hashes[rank], []).append(rank)
    first, second, *_ = sorted(groups.values(), key=len, reverse=True)
    if len(first) == len(second):
        return _Split(tuple(sorted(hashes)), ())
    return _Split(tuple(sorted(set(hashes).difference(first))), tuple(first))


def _split_by_history(
    hashes: Mapping[int, str], audits: Sequence[tuple[int, Mapping[int, str]]]
) -> _Split | None:
    """Return the ranks with other bytes than they should have by the two audits before; None if unknown."""
    if len(audits) < 2 or any(len(set(one.values())) > 1 for _, one in audits):
        return None
    earlier, before = (next(iter(one.values())) for _, one in audits)
    if earlier != before:
        return _split(hashes)
    changed = tuple(rank for rank in sorted(hashes) if hashes[rank] != before)
    same = tuple(rank for rank in sorted(hashes) if hashes[rank] == before)
    return _Split(changed, same) if same else None


def _ranks_text(ranks: Collection[int], hosts: Sequence[str] = ()) -> str:
    """Return ranks in words, such as "ranks 0, 1 and 3"; those of one host with its name."""
    words = [f"{rank} ({hosts[i]})" if hosts and hosts[i] else str(rank) for i, rank in enumerate(ranks)]
    if len(words) > 8:
        words = [*words[:7], f"{plural(len(words) - 7, 'other')}"]
    listed = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    return f"rank {listed}" if len(words) == 1 else f"ranks {listed}"


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
            replicas = read_as(RankReplicas, dict(section.data), "the section of replicas")
            found.add(rank, replicas, save.tensor_names(rank))
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
            members = to_plain(difference)
            del members["step"]
            detail, found_here = difference.text, {"difference": members}
            self._run.history.record("replicas-differ", step=step, detail=detail, members=found_here)
        if found:
            texts = "\n".join(f"  {one.text}" for one in found)
            self._run.warn(_DIFFERENCE.format(step, texts, self._run.config.home))
