"""Bodies of multipart uploads: a stream of buffers split into parts of equal length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from holdfast.checkpoint.store.contract import Buffer, as_bytes, length_error


class MultipartBody:
    """Iterable over an upload's segments, for one iteration.

    Each segment has memory of its own, because several are sent while the next is filled. An exception of the
    buffers' producer is raised and also kept in `error`, in case the consumer wraps it.

    Args:
        parts: its bytes in order, split in any way.
        segment_bytes: size of each segment except the last.
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
            rest = as_bytes(part)
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
            raise length_error(self._name, self._num_bytes, done)
        if segment:
            yield segment
