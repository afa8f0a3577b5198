"""Messages between a trainer and its keeper, as frozen dataclasses encoded in JSON; pure."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.names import OfCheckpoint
from holdfast.checkpoint.format.run import EncodedMetric, encode_metric
from holdfast.checkpoint.home.metrics import SaveValues
from holdfast.checkpoint.keeper.config import KeeperConfig
from holdfast.system.documents import Count, decode_as, to_plain

MAX_MESSAGE_BYTES = 64 << 10
"""Limit on an encoded message. Messages are small: tensors and drafts are sent as descriptors."""
MAX_DETAIL = 5000
"""Characters of free text in a message. As JSON each takes at most 12 bytes."""

EncodedMetrics: TypeAlias = Mapping[str, EncodedMetric]

_WHAT = "a message between trainer and keeper"


class KindMessage(Struct, frozen=True, forbid_unknown_fields=True, tag=True, tag_field="kind"):
    """Base of the messages, which have the name of their class as the member `kind`."""


# -- from the trainer ----------------------------------------------------------------------------------------
class Configure(KindMessage, frozen=True):
    """Configuration of the keeper. Sent first, and once."""

    config: KeeperConfig


class Image(Struct, frozen=True):
    """File image in an arena. The arena may have been overwritten in part since: check hashes."""

    name: str
    offset: Count
    num_bytes: Count


def lay_out_images(sizes: Iterable[tuple[str, int]]) -> tuple[tuple[Image, ...], int]:
    """Return images of these names and sizes, each from the start of a page, and the size of all."""
    images, end = list[Image](), 0
    for name, num_bytes in sizes:
        images.append(Image(name, end, num_bytes))
        end += -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    return tuple(images), end


class ArenaLayout(Struct, frozen=True):
    """Positions of the file images of a save in its arena."""

    data_bytes: Count  # size of the data file, which begins at 0
    frozen_at: Count = 0
    frozen_bytes: Count = 0  # size of the file of frozen tensors; 0 without one
    is_frozen_unchanged: bool = False  # copied on the assumption that it equals that of the previous save

    def images(self, step: int, attempt: int, rank: int) -> tuple[Image, ...]:
        """Return the images of the files in their arena."""
        data = Image(names.data(step, attempt, rank), 0, self.data_bytes)
        if not self.frozen_bytes:
            return (data,)
        return data, Image(names.frozen(step, attempt, rank), self.frozen_at, self.frozen_bytes)


class SubmitSave(KindMessage, frozen=True):
    """Staged save, sent with the descriptors of its arena and its draft."""

    step: Count
    arena: Count
    arenas: tuple[Count, ...]  # all that exist, so that the keeper unmaps the others
    layout: ArenaLayout
    to_home: bool
    to_peers: bool = False
    is_resent: bool = False  # an earlier keeper of this rank received it, and has died since
    metrics: EncodedMetrics = {}  # on rank 0
    of_steps: Mapping[str, Count] = {}  # of metrics recorded for another step


class ResumeCommit(KindMessage, frozen=True):
    """Save that an earlier keeper of this rank has persisted; only its commit is left."""

    step: Count
    num_bytes: Count
    to_home: bool


class DropSave(KindMessage, frozen=True):
    """Save without a copy on this rank, so that no rank can commit it."""

    step: Count
    reason: str


class DrainCheckpoint(OfCheckpoint, KindMessage, frozen=True):
    """Checkpoint of the local tier to be sent home."""

    attempt: Count
    step: Count


class DrainBest(KindMessage, frozen=True):
    """Steps of this attempt's best saves. They stay in the local folder until they are in home."""

    steps: tuple[Count, ...]
    is_due: bool = False  # send them home now, beside a save that is due there


class DeleteStep(KindMessage, frozen=True):
    """Step whose checkpoints are deleted once a newer one is complete."""

    step: Count


class UpdateMetrics(KindMessage, frozen=True):
    """Metrics of a save, in place of those submitted with it."""

    step: Count
    metrics: EncodedMetrics
    of_steps: Mapping[str, Count] = {}


class MarkComplete(OfCheckpoint, KindMessage, frozen=True):
    """Checkpoint that is complete, though its files are in folders of several hosts."""

    attempt: Count
    step: Count


class KeepCopies(KindMessage, frozen=True):
    """Steps whose copies in memory are still needed, here and on peers."""

    steps: tuple[Count, ...]


class RecordEvent(KindMessage, frozen=True):
    """Event of the trainer, for the history of the run."""

    event: str
    step: Count | None
    unix_s: float
    num_bytes: Count = 0
    seconds: float = 0.0
    detail: str = ""
    tier: str = ""
    members: Mapping[str, Any] | None = None


class Ping(KindMessage, frozen=True):
    """Request for a `Pong`, to detect a keeper that is stopped or frozen."""


class TextShown(KindMessage, frozen=True):
    """Reply to a `ShowText`: the trainer has printed the text."""


class Close(KindMessage, frozen=True):
    """End of the conversation. The keeper completes what it has, and exits."""

    frees_memory: bool  # no later attempt needs the contents of its memory


# -- from the keeper -----------------------------------------------------------------------------------------
class Pong(KindMessage, frozen=True):
    """Reply to a `Ping`."""


class ArenaReleased(KindMessage, frozen=True):
    """Arena that may be used again."""

    arena: Count


Stage: TypeAlias = Literal["persisted", "durable", "in home"]
"""Stage of a save: this rank's files are durable; it is committed, or as durable as a node-local one becomes;
it is complete in home."""


class SaveReached(KindMessage, frozen=True):
    """Save that has reached a stage."""

    step: Count
    stage: Stage


class SaveFailed(KindMessage, frozen=True):
    """Save that will not be committed, or not be sent home. After a Conflict, a newer attempt has the run."""

    step: Count
    error: str  # class of the error
    detail: str
    in_home: bool = False  # it is committed in the local tier


class CopyEnded(KindMessage, frozen=True):
    """Save that all peers hold now, or one of them never will."""

    step: Count
    failure: str = ""  # why a peer does not hold it


class SaveDelayed(KindMessage, frozen=True):
    """Save that waits, and its reason. The keeper tries again."""

    step: Count
    detail: str


class WarnOf(KindMessage, frozen=True):
    """Text that the trainer warns of at its next call."""

    text: str
    is_of_watch: bool = False


class ShowText(KindMessage, frozen=True):
    """Text for the trainer to print."""

    text: str
    must_reply: bool  # with a `TextShown`; it is an error then, else a warning


# -- between a keeper and a later attempt --------------------------------------------------------------------
class RequestImages(KindMessage, frozen=True):
    """Request for all file images that the keeper has in memory."""


class FreeImages(KindMessage, frozen=True):
    """Request to free the memory. The keeper then exits."""


class ArenaImages(KindMessage, frozen=True):
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
TrainerMessage: TypeAlias = Configure | SubmitSave | PlainMessage | KeepCopies | Ping | TextShown | Close
KeeperMessage: TypeAlias = (
    Pong | ArenaReleased | SaveReached | SaveFailed | CopyEnded | SaveDelayed | WarnOf | ShowText
)
MemoryMessage: TypeAlias = RequestImages | FreeImages | ArenaImages
Message: TypeAlias = TrainerMessage | KeeperMessage | MemoryMessage


def encode(message: Message) -> bytes:
    """Return a message as JSON."""
    return json.dumps(to_plain(message), separators=(",", ":")).encode()


def parse(text: bytes) -> Message:
    """Return the message in a JSON text, whose paths may not be UTF-8."""
    return decode_as(Message, text, _WHAT, max_bytes=MAX_MESSAGE_BYTES, any_text=True)


def encode_metrics(metrics: Mapping[str, float]) -> EncodedMetrics:
    """Return metrics for a message."""
    return {name: encode_metric(value) for name, value in metrics.items()}


def decode_metrics(message: SubmitSave | UpdateMetrics) -> SaveValues:
    """Return the metrics in a message that was parsed."""
    return SaveValues({name: float(value) for name, value in message.metrics.items()}, message.of_steps)
