"""The life of a job as a pure machine: (life, event) -> (life, orders). No clock, no process, no disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.jobs.outcome import Outcome, Phase
from holdfast.jobs.status import Status

MAX_BARREN = 5
"""With so many attempts in a row that ended by themselves without a newer checkpoint the job has failed."""
MAX_WAIT_S = 60.0
"""The longest pause between two attempts."""
PEERS_S = 5.0
"""How long the other nodes may go on after one has failed: they have something to say about it too."""
GRACE_S = 30.0
"""How long a job that is told to stop may take for its last save, if nobody says otherwise."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What is allowed to a job."""

    num_nodes: int = 1
    max_restarts: int = 0  # after errors of its own
    free_codes: frozenset[int] = frozenset()  # exit statuses after which it is started again, free
    max_barren: int = MAX_BARREN
    grace_s: float = GRACE_S


@dataclass(frozen=True, slots=True)
class Life:
    """Where a job stands; all that decides what comes next."""

    status: Status = Status.PENDING
    attempt: int = 0  # number of the newest attempt
    is_active: bool = False  # processes of that attempt may be there
    recoveries: int = 0  # attempts that were begun because the one before ended early
    num_errors: int = 0  # of these, after errors of the job's own
    num_barren: int = 0  # attempts in a row that ended by themselves without a newer checkpoint
    num_hurried: int = 0  # attempts in a row, whatever ended them, without a newer checkpoint
    is_noticed: bool = False  # the attempt was told that its machine goes
    outcomes: Mapping[int, Outcome] = field(default_factory=dict)  # of the attempt, by node
    reason: str = ""  # why the job stands there, for people


# -- events ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """Somebody looks after the job now."""


@dataclass(frozen=True, slots=True)
class Ran:
    """Every node has come to `run`."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The shell of a node has ended, or the node was lost."""

    attempt: int
    node: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Drains:
    """All nodes have ended, and what they wrote into write-back directories is not all in its place."""

    attempt: int
    what: str  # what is not, for people


@dataclass(frozen=True, slots=True)
class Gone:
    """No process of the attempt is left."""

    attempt: int
    has_advanced: bool | None  # a newer checkpoint is known than when it began; None: never heard of any


@dataclass(frozen=True, slots=True)
class Notice:
    """The machine goes."""

    lead_s: float
    source: str = "holdfast preempt"


@dataclass(frozen=True, slots=True)
class Told:
    """The notice was given to all nodes."""

    attempt: int
    num_listening: int  # processes that have a handler for it


@dataclass(frozen=True, slots=True)
class Cancel:
    """A person does not want the job any more."""


@dataclass(frozen=True, slots=True)
class Waited:
    """The pause before the next attempt is over."""


@dataclass(frozen=True, slots=True)
class Broke:
    """What looks after the job cannot go on."""

    why: str


Event = Begin | Ran | Ended | Drains | Gone | Notice | Told | Cancel | Waited | Broke


# -- orders ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Start an attempt on all nodes."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Give all nodes of the attempt a preemption notice."""

    lead_s: float
    source: str


@dataclass(frozen=True, slots=True)
class Kill:
    """Have no process of the attempt left after a while; the earliest of several such orders counts."""

    after_s: float
    with_keepers: bool = False  # also those that still finish what was staged: the machine is gone


@dataclass(frozen=True, slots=True)
class Pause:
    """Say `Waited` after a while."""

    seconds: float


Order = Start | Tell | Kill | Pause
Next = tuple[Life, tuple[Order, ...]]


# -- the machine -----------------------------------------------------------------------------------------


def advance(life: Life, event: Event, terms: Terms) -> Next:
    """What an event makes of a job.

    Events of attempts that are over, and whatever happens to a job that has ended, change nothing.
    """
    if life.status.is_final or _is_stale(life, event):
        return life, ()
    if isinstance(event, Begin):
        return _begin(life)
    if isinstance(event, Waited):
        return _start(life) if life.status is Status.RECOVERING and not life.is_active else (life, ())
    if isinstance(event, Ran):
        return _ran(life)
    if isinstance(event, (Ended, Drains, Gone)):
        return _end(life, event, terms)
    if isinstance(event, Notice):
        return _notice(life, event)
    if isinstance(event, Told):
        return _told(life, event)
    if isinstance(event, Cancel):
        return _cancel(life, terms)
    return _broke(life, event)


def _is_stale(life: Life, event: Event) -> bool:
    """True for word of an attempt that is over."""
    return isinstance(event, (Ran, Ended, Drains, Gone, Told)) and (
        event.attempt != life.attempt or not life.is_active
    )


def _begin(life: Life) -> Next:
    return _start(life) if life.status is Status.PENDING else (life, ())


def _start(life: Life) -> Next:
    number = life.attempt + 1
    status = Status.STARTING if number == 1 else Status.RECOVERING
    life = dataclasses.replace(
        life,
        status=status,
        attempt=number,
        is_active=True,
        is_noticed=False,
        outcomes={},
        recoveries=life.recoveries + (number > 1),
    )
    return life, (Start(number),)


def _ran(life: Life) -> Next:
    if life.status in (Status.STARTING, Status.RECOVERING):
        return dataclasses.replace(life, status=Status.RUNNING, reason=""), ()
    return life, ()


def _end(life: Life, event: Ended | Drains | Gone, terms: Terms) -> Next:
    if isinstance(event, Ended):
        return _ended(life, event, terms)
    if isinstance(event, Drains):
        return _drains(life, event, terms)
    return _gone(life, has_advanced=event.has_advanced, terms=terms)


def _ended(life: Life, event: Ended, terms: Terms) -> Next:
    if event.node in life.outcomes:
        return life, ()
    outcome = event.outcome
    life = dataclasses.replace(life, outcomes={**life.outcomes, event.node: outcome})
    if len(life.outcomes) == terms.num_nodes:
        return life, (Kill(0.0),)
    if outcome.is_success or outcome.is_stopped:
        return life, ()
    return life, (Kill(_peers_s(life, outcome, terms)),)


def _peers_s(life: Life, outcome: Outcome, terms: Terms) -> float:
    """How long the other nodes may go on after one has ended so."""
    if outcome.is_lost or outcome.killed_by is not None:
        return 0.0  # they wait for a node that never answers
    if outcome.is_preempted or life.is_noticed or life.status is Status.CANCELLING:
        return terms.grace_s  # they are at the same last save
    return PEERS_S


def _drains(life: Life, event: Drains, terms: Terms) -> Next:
    if life.status is Status.CANCELLING or not _is_done(life, terms):
        return life, ()
    return dataclasses.replace(life, status=Status.WINDING_DOWN, reason=event.what), ()


def _is_done(life: Life, terms: Terms) -> bool:
    """True if every node has done its work."""
    return len(life.outcomes) == terms.num_nodes and all(one.is_success for one in life.outcomes.values())


def _notice(life: Life, event: Notice) -> Next:
    if not life.is_active or life.status in (Status.CANCELLING, Status.WINDING_DOWN):
        return life, ()
    reason = f"preemption notice ({event.source})"
    life = dataclasses.replace(life, is_noticed=True, reason=reason)
    return life, (Tell(event.lead_s, event.source), Kill(event.lead_s, with_keepers=True))


def _cancel(life: Life, terms: Terms) -> Next:
    if life.status is Status.CANCELLING:
        return life, ()
    if not life.is_active:
        return dataclasses.replace(life, status=Status.CANCELLED, reason="cancelled"), ()
    life = dataclasses.replace(life, status=Status.CANCELLING, reason="cancelled")
    return life, (Tell(terms.grace_s, "holdfast cancel"), Kill(terms.grace_s))


def _told(life: Life, event: Told) -> Next:
    """A job that is to stop, and has nobody who would save, need not be waited for."""
    in_vain = life.status is Status.CANCELLING and not event.num_listening
    return life, (Kill(0.0),) if in_vain else ()


def _broke(life: Life, event: Broke) -> Next:
    orders = (Kill(0.0),) if life.is_active else ()
    return dataclasses.replace(life, status=Status.FAILED_CONTROLLER, reason=event.why), orders


# -- what comes after an attempt -------------------------------------------------------------------------


def _gone(life: Life, *, has_advanced: bool | None, terms: Terms) -> Next:
    life = dataclasses.replace(life, is_active=False)
    if life.status is Status.CANCELLING:
        return dataclasses.replace(life, status=Status.CANCELLED), ()
    outcomes = {node: life.outcomes.get(node, Outcome(Phase.RUN)) for node in range(terms.num_nodes)}
    if all(one.is_success for one in outcomes.values()):
        return dataclasses.replace(life, status=Status.SUCCEEDED, reason=""), ()
    own = [one for one in outcomes.values() if not one.is_success and not one.is_stopped]
    told = _say(outcomes)
    if life.is_noticed or any(one.is_lost for one in own):
        why = life.reason if life.is_noticed else told
        return _recover(life, why, has_advanced=has_advanced, is_barren=False, is_external=True, terms=terms)
    if any(one.is_preempted or one.code in terms.free_codes for one in own):
        # Nothing else bounds these: a job that never says how far it is gets no endless loop either.
        return _recover(life, told, has_advanced=has_advanced, is_barren=True, is_external=False, terms=terms)
    if life.num_errors >= terms.max_restarts:
        in_setup = any(one.phase is Phase.SETUP for one in own)
        status = Status.FAILED_SETUP if in_setup else Status.FAILED
        return dataclasses.replace(life, status=status, reason=told + _spent(terms)), ()
    life = dataclasses.replace(life, num_errors=life.num_errors + 1)
    is_known = has_advanced is not None
    return _recover(life, told, has_advanced=has_advanced, is_barren=is_known, is_external=False, terms=terms)


def _recover(
    life: Life, why: str, *, has_advanced: bool | None, is_barren: bool, is_external: bool, terms: Terms
) -> Next:
    num_barren = 0 if has_advanced else life.num_barren + is_barren
    num_hurried = 0 if has_advanced else life.num_hurried + 1
    life = dataclasses.replace(life, num_barren=num_barren, num_hurried=num_hurried, reason=why)
    if is_barren and num_barren >= terms.max_barren:
        reason = (
            f"{why}; {num_barren} attempts in a row ended by themselves and brought no newer checkpoint, so "
            "it is not started again"
        )
        return dataclasses.replace(life, status=Status.FAILED, reason=reason), ()
    return dataclasses.replace(life, status=Status.RECOVERING), (Pause(pause_s(num_hurried, is_external)),)


def pause_s(num_hurried: int, is_external: bool) -> float:
    """How long to wait before the next attempt, in seconds.

    Args:
        num_hurried: attempts in a row without a newer checkpoint.
        is_external: the last one was taken away, so the first time nothing is gained by waiting.
    """
    exponent = num_hurried - 1 - is_external
    return 0.0 if exponent < 0 else min(MAX_WAIT_S, 2.0 ** min(exponent, 10))


def _say(outcomes: Mapping[int, Outcome]) -> str:
    """Why the attempt ended, in words."""
    own = {node: one for node, one in outcomes.items() if not one.is_success and not one.is_stopped}
    return "; ".join(f"node {node} {one.say()}" for node, one in sorted(own.items()))


def _spent(terms: Terms) -> str:
    if not terms.max_restarts:
        return ""
    return f"; all {terms.max_restarts} restarts after errors are used up"
