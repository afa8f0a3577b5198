"""A store that is only read: whatever would change it is refused, with the reason."""

from __future__ import annotations

from abc import abstractmethod
from typing import NoReturn

from holdfast.errors import Unsupported
from holdfast.store.contract import Buffer, Store


class ReadOnly(Store):
    """The half of a store that is alike in all that can only be read."""

    @property
    @abstractmethod
    def why(self) -> str:
        """Why nothing is written here, as a sentence."""

    def put(self, name: str, data: Buffer, *, if_absent: bool = False) -> None:
        """Refused."""
        self._refuse(name)

    def link(self, source: str, name: str) -> None:
        """Refused."""
        self._refuse(name)

    def append(self, name: str, data: bytes) -> None:
        """Refused."""
        self._refuse(name)

    def delete(self, name: str) -> None:
        """Refused."""
        self._refuse(name)

    def sweep(self, prefix: str = "") -> None:
        """Refused."""
        self._refuse(prefix)

    def _refuse(self, name: str) -> NoReturn:
        message = f"{name!r} in {self.url} cannot be changed: {self.why}"
        raise Unsupported(message, key=name)
