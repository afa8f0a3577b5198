"""Lightning's checkpoints in a home: the state that a save gives to the Checkpointer, and its reader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from holdfast.adapters.kit.run import open_loaded
from holdfast.adapters.lightning.pickled import Pickled
from holdfast.checkpoint.exchange.export_selection import ExportSelection
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.restore.checkpoint import Checkpoint
from holdfast.checkpoint.restore.checkpoint import open as open_checkpoint
from holdfast.errors import Corrupt, Unsupported
from holdfast.system.documents import Fields, is_text, refuse

_TENSORS, _FACTS, _PICKLE = "checkpoint", "lightning", "pickle"
_FORMAT = 1
_NUM_THREADS = 2
_MAX_PATH_CHARS = 1 << 16


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about one save of Lightning.

    Attributes:
        path: file that it was saved as, relative to the folder of the home if it is in there.
        global_step: Lightning's count of optimizer steps; None for other dictionaries, as Fabric's.
        epoch: Lightning's count of epochs.
        is_full: training can resume from it; False with `save_weights_only`.
    """

    path: str
    global_step: int | None
    epoch: int | None
    is_full: bool


def make_state(pickled: Pickled, facts: Facts) -> dict[str, Any]:
    """Return the state that the Checkpointer saves: tensors by name, the pickle, and facts."""
    return {
        _TENSORS: {one.name: one.tensor for one in pickled.storages},
        _FACTS: {
            "format": _FORMAT,
            "names": [one.name for one in pickled.storages],
            _PICKLE: torch.frombuffer(bytearray(pickled.data), dtype=torch.uint8),
            **asdict(facts),
        },
    }


def _read_facts(facts: Fields) -> Facts:
    path = facts.text("path", max_chars=_MAX_PATH_CHARS)
    if "\0" in path or not is_text(path):
        refuse(facts.what, "path", "the path of a file", path)
    global_step = facts.integer("global_step") if "global_step" in facts else None
    epoch = facts.integer("epoch") if "epoch" in facts else None
    return Facts(path, global_step, epoch, facts.flag("is_full"))


class HomeContent:
    """One of Lightning's checkpoints in a home, opened for reading. Every byte is verified."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        values = checkpoint.values().get(_FACTS)
        if not isinstance(values, dict) or values.get("format") != _FORMAT:
            raise Unsupported(
                f"{checkpoint!r} was not saved through Lightning, or by a newer version of Holdfast. It was "
                "left alone. Use another home for this training, or upgrade.",
                step=checkpoint.step,
            )
        facts = Fields(values, f"Lightning's part of {checkpoint!r}")
        self.facts = _read_facts(facts)
        self._names = [f"{_TENSORS}.{name}" for name in facts.texts("names")]
        for name in (*self._names, f"{_FACTS}.{_PICKLE}"):
            if name not in checkpoint:
                raise Corrupt(f"{facts.what} lacks the tensor {name!r}.", key=facts.what)

    @classmethod
    def open(cls, home: str, step: int | None = None, attempt: int | None = None) -> HomeContent:
        """Open a checkpoint of a home, by default the newest.

        With its attempt, it may lack its manifest: its keeper was killed before it was written.

        Raises:
            NotFound: it does not exist.
            Corrupt: it is damaged, or its facts are not of the expected types.
            Unsupported: it was not saved through Lightning.
            RetryLater: the store failed.
        """
        return cls(open_checkpoint(home) if step is None else open_loaded(home, step, attempt))

    @property
    def run(self) -> str:
        """Id of the run."""
        return self._checkpoint.run

    @property
    def checkpoint_id(self) -> CheckpointId:
        """Its attempt and step."""
        return self._checkpoint.manifest.checkpoint_id

    @property
    def step(self) -> int:
        """Its step in the home."""
        return self._checkpoint.step

    def pickled(self) -> bytes:
        """Return the pickle, which refers to the storages. It is not loaded here."""
        return self._checkpoint[f"{_FACTS}.{_PICKLE}"].numpy().tobytes()

    def storages(self) -> Iterator[tuple[int, Callable[[], Iterator[memoryview]]]]:
        """Yield the size and the reader of each storage, in the order of their keys.

        Each is read before the next one is asked for.
        """
        selection = ExportSelection.choose(
            self._checkpoint, rank=0, only=None, rename=None, num_threads=_NUM_THREADS
        )
        stream = selection.stream(self._names)
        for name in self._names:
            num_bytes = selection.tensors[name].num_bytes
            yield num_bytes, partial(stream.read, num_bytes)
