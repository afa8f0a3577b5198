"""Cuts a stream of buffers into the parts of an upload, all of the same length but the last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from holdfast.store.contract import Buffer, wrong_length


class Segments:
    """Iterated once; each segment is memory of its own, since several are sent while the next is filled.

    What the buffers' maker raises is raised, and kept in `error`: who iterates may wrap it.

    Args:
        name: the object, for the error.
        parts: its bytes in order, however cut.
        num_bytes: of all together.
        segment_bytes: of each segment but the last.
    """

    def __init__(self, name: str, parts: Iterable[Buffer], num_bytes: int, segment_bytes: int) -> None:
        self._name = name
        self._parts = parts
        self._num_bytes = num_bytes
        self._segment_bytes = segment_bytes
        self.error: BaseException | None = None

    def __iter__(self) -> Iterator[bytearray]:
        try:
            yield from self._cut()
        except GeneratorExit:
            raise
        except BaseException as error:
            self.error = error
            raise

    def _cut(self) -> Iterator[bytearray]:
        segment, done = bytearray(), 0
        for part in self._parts:
            view = memoryview(part)
            rest = view.cast("B") if view.nbytes else memoryview(b"")
            done += len(rest)
            if done > self._num_bytes:
                break
            while rest:
                room = self._segment_bytes - len(segment)
                segment += rest[:room]
                rest = rest[room:]
                if len(segment) == self._segment_bytes:
                    yield segment
                    segment = bytearray()
        if done != self._num_bytes:
            raise wrong_length(self._name, self._num_bytes, done)
        if segment:
            yield segment
