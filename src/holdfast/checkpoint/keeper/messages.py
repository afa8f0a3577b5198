"""Messages between a trainer and its keeper, as frozen dataclasses encoded in JSON; pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, TypeAlias, get_args

from holdfast.checkpoint.format.names import OfCheckpoint
from holdfast.checkpoint.format.run import encode_metric, read_metric
from holdfast.checkpoint.home.metrics import SaveValues
from holdfast.checkpoint.keeper.config import KeeperConfig
from holdfast.system.documents import Count, decode_object, read_dataclass

MAX_MESSAGE_BYTES = 64 << 10
"""Limit on an encoded message. Messages are small: tensors and drafts are sent as descriptors."""
MAX_DETAIL = 5000
"""Characters of free text in a message. As JSON each takes at most 12 bytes."""

EncodedMetrics: TypeAlias = Mapping[str, Annotated["float | str", read_metric]]
"""Metrics by name: finite numbers, "nan", "inf" and "-inf"; once they are parsed, numbers."""

_WHAT = "a message between trainer and keeper"
_KIND = "kind"


# -- from the trainer ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Configure:
    """Configuration of the keeper. Sent first, and once."""

    config: KeeperConfig


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """Positions of the file images of a save in its arena."""

    data_bytes: Count  # size of the data file, which begins at 0
    frozen_at: Count = 0
    frozen_bytes: Count = 0  # size of the file of frozen tensors; 0 without one
    is_frozen_unchanged: bool = False  # copied on the assumption that it equals that of the previous save


@dataclass(frozen=True, slots=True)
class SubmitSave:
    """Staged save, sent with the descriptors of its arena and its draft."""

    step: Count
    arena: Count
    arenas: tuple[Count, ...]  # all that exist, so that the keeper unmaps the others
    layout: ArenaLayout
    to_home: bool
    is_resent: bool = False  # an earlier keeper of this rank received it, and has died since
    metrics: EncodedMetrics = field(default_factory=dict[str, "float | str"])  # on rank 0
    of_steps: Mapping[str, Count] = field(
        default_factory=dict[str, int]
    )  # of metrics recorded for another step


@dataclass(frozen=True, slots=True)
class ResumeCommit:
    """Save that an earlier keeper of this rank has persisted; only its commit is left."""

    step: Count
    num_bytes: Count
    to_home: bool


@dataclass(frozen=True, slots=True)
class DropSave:
    """Save without a copy on this rank, so that no rank can commit it."""

    step: Count
    reason: str


@dataclass(frozen=True, slots=True)
class DrainCheckpoint(OfCheckpoint):
    """Checkpoint of the local tier to be sent home."""

    attempt: Count
    step: Count


@dataclass(frozen=True, slots=True)
class DrainBest:
    """Steps of this attempt's best saves. They stay in the local folder until they are in home."""

    steps: tuple[Count, ...]
    is_due: bool = False  # send them home now, beside a save that is due there


@dataclass(frozen=True, slots=True)
class DeleteStep:
    """Step whose checkpoints are deleted once a newer one is complete."""

    step: Count


@dataclass(frozen=True, slots=True)
class UpdateMetrics:
    """Metrics of a save, in place of those submitted with it."""

    step: Count
    metrics: EncodedMetrics
    of_steps: Mapping[str, Count] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True)
class MarkComplete(OfCheckpoint):
    """Checkpoint that is complete, though its files are in folders of several hosts."""

    attempt: Count
    step: Count


@dataclass(frozen=True, slots=True)
class RecordEvent:
    """Event of the trainer, for the history of the run."""

    event: str
    step: Count | None
    unix_s: float
    num_bytes: Count = 0
    seconds: float = 0.0
    detail: str = ""
    tier: str = ""
    members: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Ping:
    """Request for a `Pong`, to detect a keeper that is stopped or frozen."""


@dataclass(frozen=True, slots=True)
class TextShown:
    """Reply to a `ShowText`: the trainer has printed the text."""


@dataclass(frozen=True, slots=True)
class Close:
    """End of the conversation. The keeper completes what it has, and exits."""

    frees_memory: bool  # no later attempt needs the contents of its memory


# -- from the keeper -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pong:
    """Reply to a `Ping`."""


@dataclass(frozen=True, slots=True)
class ArenaReleased:
    """Arena that may be used again."""

    arena: Count


@dataclass(frozen=True, slots=True)
class SavePersisted:
    """Save whose files of this rank are durable."""

    step: Count


@dataclass(frozen=True, slots=True)
class SaveDurable:
    """Save that is committed, or as durable as a node-local one becomes."""

    step: Count


@dataclass(frozen=True, slots=True)
class ArrivedHome:
    """Checkpoint that is complete in home."""

    step: Count


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """Save that will not be committed, or not be sent home. After a Conflict, a newer attempt has the run."""

    step: Count
    error: str  # class of the error
    detail: str
    in_home: bool = False  # it is committed in the local tier


@dataclass(frozen=True, slots=True)
class SaveDelayed:
    """Save that waits, and its reason. The keeper tries again."""

    step: Count
    detail: str


@dataclass(frozen=True, slots=True)
class WarnOf:
    """Text that the trainer warns of at its next call."""

    text: str
    is_of_watch: bool = False


@dataclass(frozen=True, slots=True)
class ShowText:
    """Text for the trainer to print."""

    text: str
    must_reply: bool  # with a `TextShown`; it is an error then, else a warning


# -- between a keeper and a later attempt --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestImages:
    """Request for all file images that the keeper has in memory."""


@dataclass(frozen=True, slots=True)
class FreeImages:
    """Request to free the memory. The keeper then exits."""


@dataclass(frozen=True, slots=True)
class Image:
    """File image in an arena. The arena may have been overwritten in part since: check hashes."""

    name: str
    offset: Count
    num_bytes: Count


@dataclass(frozen=True, slots=True)
class ArenaImages:
    """Images in one arena, sent with its descriptor. After the last one the connection is closed."""

    images: tuple[Image, ...]


PlainMessage: TypeAlias = (
    ResumeCommit
    | DropSave
    | DrainCheckpoint
    | DrainBest
    | DeleteStep
    | UpdateMetrics
    | MarkComplete
    | RecordEvent
)
"""Message that the worker of a keeper handles as it is."""
TrainerMessage: TypeAlias = Configure | SubmitSave | PlainMessage | Ping | TextShown | Close
KeeperMessage: TypeAlias = (
    Pong
    | ArenaReleased
    | SavePersisted
    | SaveDurable
    | ArrivedHome
    | SaveFailed
    | SaveDelayed
    | WarnOf
    | ShowText
)
MemoryMessage: TypeAlias = RequestImages | FreeImages | ArenaImages
Message: TypeAlias = TrainerMessage | KeeperMessage | MemoryMessage

_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """Return a message as JSON."""
    body = {_KIND: type(message).__name__, **asdict(message)}
    return json.dumps(body, separators=(",", ":")).encode()


def parse(text: bytes) -> Message:
    """Return the message in a JSON text."""
    body = decode_object(text, _WHAT, max_bytes=MAX_MESSAGE_BYTES, any_text=True)  # paths may not be UTF-8
    name = body.choice(_KIND, _KINDS)
    members = {member: value for member, value in body.members.items() if member != _KIND}
    return read_dataclass(_KINDS[name], members, f"{_WHAT}, {name}")


def encode_metrics(metrics: Mapping[str, float]) -> EncodedMetrics:
    """Return metrics for a message."""
    return {name: encode_metric(value) for name, value in metrics.items()}


def decode_metrics(message: SubmitSave | UpdateMetrics) -> SaveValues:
    """Return the metrics in a message that was parsed."""
    return SaveValues({name: float(value) for name, value in message.metrics.items()}, message.of_steps)
