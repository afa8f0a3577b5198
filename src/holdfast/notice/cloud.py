"""What each cloud's source of notices must do: answer one question, again and again, from a thread."""

from __future__ import annotations

from abc import ABC, abstractmethod

from holdfast.notice.word import Word


class Cloud(ABC):
    """A place to ask whether this machine goes."""

    name: str
    """As users write it."""
    pause_s: float
    """Between two questions; 0 where the service itself lets a question wait until there is news."""

    @abstractmethod
    def ask(self) -> Word | None:
        """The notice, if there is one.

        Raises:
            Unreachable: no answer now.

        Blocks: for one request, at most about `timeout_s` of it.
        """
