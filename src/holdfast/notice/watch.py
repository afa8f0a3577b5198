"""Watches all sources of notices while a training runs, and gives one answer: does this machine go?"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable

from holdfast.notice.cloud import Cloud
from holdfast.notice.file import read_notice
from holdfast.notice.metadata import Unreachable
from holdfast.notice.signals import Signals
from holdfast.notice.sources import read_sources
from holdfast.notice.word import Word

_MAX_PAUSE_S = 60.0
"""The longest pause before a service that does not answer is asked again."""


class Notices:
    """Turns signals, files and the metadata of clouds into a notice that the training loop can ask for.

    Args:
        sources: beside signals, see `holdfast.notice.sources.read_sources`.

    Raises:
        InvalidInput: there is no such source.
    """

    def __init__(self, sources: str | Iterable[str] | None = None) -> None:
        self._signals = Signals()
        self._sources = read_sources(sources)
        self._word: Word | None = None
        self._advice: Word | None = None
        self._files_advised: set[str] = set()
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []

    def watch(self) -> bool:
        """Take over the signals; True if they are watched now."""
        return self._signals.watch()

    def listen(self) -> None:
        """Begin to ask the clouds, each in a thread of its own.

        On each host one process asks: LOCAL_RANK 0. Its notice reaches the other ranks with the next step.
        """
        if os.environ.get("LOCAL_RANK", "0") != "0" or self._threads:
            return
        for cloud in self._sources.clouds:
            name = f"holdfast-notice-{cloud.name}"
            thread = threading.Thread(target=self._ask, args=(cloud,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def rest(self) -> None:
        """Stop noting signals until the next `watch`: no loop is left that could stop because of them."""
        self._signals.unwatch()

    def unwatch(self) -> None:
        """Give the signals back to whoever had them before, and ask nobody any more.

        Not waited for: a request under way, whose thread ends when it is answered.
        """
        self._signals.unwatch()
        self._stopped.set()

    @property
    def word(self) -> Word | None:
        """The notice, if there is one; the first that came."""
        if self._word is None and self._signals.name is not None:
            self._word = Word(self._signals.name)
        if self._word is None:
            self._look_at_files()
        return self._word

    @property
    def reason(self) -> str | None:
        """The notice in a few words; None while there is none."""
        return None if self.word is None else self.word.reason

    def take_advice(self) -> Word | None:
        """Word that the machine may go soon, for which a save is enough; told once."""
        advice, self._advice = self._advice, None
        return advice

    def _look_at_files(self) -> None:
        """One `open` per file and step, which finds nothing: some microseconds."""
        for path in self._sources.files:
            word = read_notice(path)
            if word is not None and word.is_final:
                self._word = word
            elif word is not None and str(path) not in self._files_advised:
                self._files_advised.add(str(path))
                self._advice = word

    def _ask(self, cloud: Cloud) -> None:
        num_silent = 0
        while not self._stopped.is_set():
            try:
                word = cloud.ask()
                num_silent, pause_s = 0, cloud.pause_s
            except Unreachable as error:
                num_silent += 1
                pause_s = min(_MAX_PAUSE_S, 2.0**num_silent)
                if num_silent == 5:  # not at once: a service may be slow to come up with its machine
                    sys.stderr.write(f"holdfast: no notices from {cloud.name} for now: {error}\n")
                word = None
            if word is not None and word.is_final:
                self._word = self._word or word
                return
            self._advice = word or self._advice
            self._stopped.wait(pause_s)
