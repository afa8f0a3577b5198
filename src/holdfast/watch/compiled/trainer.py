"""Watch of compiled code: the output of torch.compile travels with the checkpoints."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from holdfast.checkpoint.keeper.save import Save
from holdfast.checkpoint.watch import SharedPlace, Watch, WatchedRun
from holdfast.system.units import parse_bytes, plural

if TYPE_CHECKING:
    from holdfast.watch.compiled.cache import CompiledCode
    from holdfast.watch.compiled.transfer import UploadResult


@dataclass
class CompileCache(Watch):
    """Cache in home for compiled code: a start on another machine loads it instead of compiling.

    Args:
        limit: largest size, in bytes or as "1GiB"; "off" for no cache. It is sent in the background after
            saves.
        trust: whether compiled code from this home may be loaded, and so run; by default only if
            `holdfast trust` or HOLDFAST_TRUST_HOMES names the home.

    Raises:
        InvalidInput: `limit` is not a size.
    """

    name: ClassVar[str] = "compile-cache"
    events: ClassVar[Mapping[str, str]] = {
        "compiled-loaded": "the compile cache from home, at the start",
        "compiled-sent": "the compile cache to home",
    }

    limit: int | str = "1GiB"
    _: KW_ONLY
    trust: bool | None = None

    def __post_init__(self) -> None:
        self._limit_bytes = 0 if self.limit == "off" else parse_bytes(self.limit, "CompileCache(limit=)")
        self._code: CompiledCode | None = None

    @override
    def applies(self, run: WatchedRun) -> bool:
        return self.limit != "off"

    @property
    @override
    def place(self) -> str | None:
        return None if self._code is None else self._code.place

    @override
    def begin(self, run: WatchedRun) -> None:
        from holdfast.watch.compiled.cache import CompiledCode  # it needs torch, which commands do without

        self._run = run
        self._code = CompiledCode(
            run.store, run.home, limit_bytes=self._limit_bytes, trust_home=self.trust, warn=run.warn
        )

    @override
    def prepare(self) -> None:
        assert self._code is not None
        began = time.perf_counter()
        loaded, line = self._code.load()
        if loaded.num_placed:
            self._run.note(
                "compiled-loaded",
                step=None,
                num_bytes=loaded.num_bytes,
                seconds=time.perf_counter() - began,
                detail=f"{loaded.num_placed} files",
                tier="home",
            )
        if line is not None:
            self._run.show(line)

    @override
    def claimed(self, attempt: int, place: SharedPlace) -> None:
        assert self._code is not None
        if place.is_first:
            self._code.begin(attempt=attempt, rank=self._run.rank, turn=place.turn, notify=self._note_sent)

    @override
    def saved(self, save: Save) -> None:
        assert self._code is not None
        self._code.upload_soon()

    @override
    def end(self, timeout_s: float | None) -> None:
        from holdfast.watch.compiled.cache import CLOSE_LIMIT_S

        if self._code is not None:
            self._code.close(CLOSE_LIMIT_S if timeout_s is None else min(CLOSE_LIMIT_S, timeout_s))

    def _note_sent(self, result: UploadResult, seconds: float) -> None:
        self._run.note(
            "compiled-sent",
            step=None,
            num_bytes=result.num_bytes,
            seconds=seconds,
            detail=plural(result.num_files, "file"),
            tier="home",
        )
