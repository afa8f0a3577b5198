"""Read-only stores: every change is refused, with the reason."""

from __future__ import annotations

from abc import abstractmethod
from typing import NoReturn

from typing_extensions import override

from holdfast.checkpoint.store.contract import Buffer, Store
from holdfast.errors import Unsupported


class ReadOnlyStore(Store):
    """A store whose changing methods all raise `Unsupported`."""

    @property
    @abstractmethod
    def reason(self) -> str:
        """The reason why this store is read-only, as a sentence."""

    @override
    def put(self, name: str, data: Buffer, *, if_absent: bool = False) -> None:
        self._refuse(name)

    @override
    def link(self, source: str, name: str) -> None:
        self._refuse(name)

    @override
    def append(self, name: str, data: bytes) -> None:
        self._refuse(name)

    @override
    def delete(self, name: str) -> None:
        self._refuse(name)

    @override
    def sweep(self, prefix: str = "") -> None:
        self._refuse(prefix)

    def _refuse(self, name: str) -> NoReturn:
        raise Unsupported(f"{name!r} in {self.url} is read-only: {self.reason}", key=name)
