"""Python interface of the machines of all jobs."""

from __future__ import annotations

import time

from holdfast.errors import NotFound, RetryLater
from holdfast.jobs.machines.judgement import NodeStanding, judge
from holdfast.jobs.machines.record import MachineEvent, add_events, read_events
from holdfast.jobs.state_folder import state_dir


def nodes() -> list[NodeStanding]:
    """Return the machines of the jobs of the last 30 days, the most conspicuous first."""
    return judge(read_events(state_dir()))


def clear_node(name: str) -> None:
    """Forget the lost attempts and failed checks of a machine.

    Raises:
        NotFound: nothing is remembered about it.
        RetryLater: the record cannot be written.
    """
    state = state_dir()
    if name not in {one.machine for one in read_events(state)}:
        raise NotFound(f"Nothing is remembered about a node named {name!r}. See `holdfast nodes`.")
    try:
        add_events(state, [MachineEvent(time.time(), name)])
    except OSError as error:
        raise RetryLater(
            f"Cannot write the record of nodes in {state}: {error}. Nothing was changed."
        ) from error
