"""What a job's controller and the runners on its nodes tell each other through srun, as lines; pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from holdfast.documents import decode_object, read_dataclass
from holdfast.errors import Corrupt
from holdfast.jobs.outcome import Outcome, Phase


@dataclass(frozen=True, slots=True)
class Here:
    """A runner is there."""

    node: int


@dataclass(frozen=True, slots=True)
class Running:
    """The node has come to `run`."""

    node: int


@dataclass(frozen=True, slots=True)
class Noticed:
    """Slurm has told the node that its machine goes."""

    node: int
    source: str
    lead_s: float


@dataclass(frozen=True, slots=True)
class ToldNode:
    """The node's processes were told."""

    node: int
    num_listening: int


@dataclass(frozen=True, slots=True)
class EndedNode:
    """How the node ended."""

    node: int
    phase: str
    code: int | None
    killed_by: int | None
    is_stopped: bool

    @classmethod
    def of(cls, node: int, outcome: Outcome) -> EndedNode:
        """From an outcome."""
        return cls(node, outcome.phase.value, outcome.code, outcome.killed_by, outcome.is_stopped)

    def outcome(self) -> Outcome:
        """As the machine takes it."""
        return Outcome(Phase(self.phase), self.code, self.killed_by, self.is_stopped)


@dataclass(frozen=True, slots=True)
class TellNode:
    """To the nodes: give your processes a notice."""

    source: str
    deadline_unix_s: float


@dataclass(frozen=True, slots=True)
class KillNode:
    """To the nodes: leave no process."""

    with_keepers: bool


Message = Here | Running | Noticed | ToldNode | EndedNode | TellNode | KillNode
_KINDS: dict[str, type[Message]] = {
    kind.__name__: kind for kind in (Here, Running, Noticed, ToldNode, EndedNode, TellNode, KillNode)
}


def write(message: Message) -> bytes:
    """A message as a line."""
    return json.dumps({"holdfast": type(message).__name__, **asdict(message)}).encode() + b"\n"


class Inbox:
    """Takes bytes as they come, and gives messages; other lines are kept apart."""

    def __init__(self) -> None:
        self._rest = b""
        self.others: list[str] = []
        """Lines that are no messages: what srun or a site's own programs say in between."""

    def take(self, data: bytes) -> Iterator[Message]:
        """The messages that are whole with these bytes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            message = _read(line)
            if message is not None:
                yield message
            elif line.strip():
                self.others.append(line.decode("utf-8", "replace"))


def _read(line: bytes) -> Message | None:
    try:
        members = decode_object(line, "a line", any_text=True).members
        kind = _KINDS.get(str(members.pop("holdfast", "")))
        found = None if kind is None else read_dataclass(kind, members, "a message")
        if isinstance(found, EndedNode):
            found.outcome()
    except (Corrupt, ValueError):
        return None
    return found
