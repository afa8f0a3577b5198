"""Named places between two effects where a crash test can have this process killed.

A test sets HOLDFAST_KILL_AT to "NAME" or "NAME:N"; the process then sends itself SIGKILL when it reaches
that place for the Nth time (default first). HOLDFAST_KILL_MARK may name a file that is made by the kill: one
that is there already prevents it, so that of several processes with this environment only one is killed.
Unset, a failpoint costs one comparison.
"""

from __future__ import annotations

import os
import signal

POINTS = (
    "store.written",  # data in a temporary file, not yet fsynced
    "store.synced",  # temporary file durable, not yet under its name
    "store.linked",  # under its name, directory not yet fsynced
    "keeper.received",  # a staged save has reached the keeper
    "keeper.data",  # data file durable, part not written
    "keeper.part",  # part durable, manifest not written
    "keeper.manifest",  # manifest durable, not reported yet
    "keeper.retain",  # an object of a deleted checkpoint gone, first its manifest, the others still there
    "keeper.drained-file",  # a file is in home, others of its checkpoint not
    "keeper.drained",  # all files are in home, the manifest not
    "trainer.staging",  # copy under way
    "trainer.staged",  # copy complete, not submitted
    "trainer.handed",  # submitted to the keeper
    "rollback.restored",  # an earlier checkpoint is restored because of a spike, without a record
    "rollback.noted",  # the record is durable, the checkpoint is not saved anew
    "compiled.packed",  # a pack of compiled files is in home, no index lists it
    "writeback.fetched",  # an object is in a temporary file, not yet in the directory
    "writeback.captured",  # the version of a closed file is kept, not in the journal yet
    "writeback.noted",  # the upload is in the journal
    "writeback.sent",  # the bucket has it, not in the journal yet
    "writeback.done",  # uploaded in the journal, the kept version still exists
    "jobs.recorded",  # a new status is recorded, its notification is not
    "jobs.notified",  # a notification was sent, which is not recorded
    "jobs.ended",  # the end of a job is recorded, its secrets are still in its folder
    "jobs.venv",  # the virtual environment of a node is written, not yet under its name
    "jobs.plans",  # the secrets of its nodes are removed, its own are not
)
"""All failpoints; a crash test runs each."""

_name, _, _count = os.environ.get("HOLDFAST_KILL_AT", "").partition(":")
_left = int(_count or 1)
_mark = os.environ.get("HOLDFAST_KILL_MARK")


def failpoint(name: str) -> None:
    """Kill this process if the environment asks for it here."""
    global _left
    if name != _name:
        return
    _left -= 1
    if _left == 0 and _consume_mark():
        os.kill(os.getpid(), signal.SIGKILL)


def _consume_mark() -> bool:
    if _mark is None:
        return True
    try:
        os.close(os.open(_mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
