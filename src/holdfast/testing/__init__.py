"""Public helpers for tests: the store conformance suite, and stores and servers that fail on command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.testing.faulty_store import Call, FaultyStore, Gate

if TYPE_CHECKING:
    from holdfast.testing.store_suite import StoreSuite

__all__ = ["Call", "FaultyStore", "Gate", "StoreSuite"]


def __getattr__(name: str) -> Any:  # the suite needs pytest, the rest does not
    if name == "StoreSuite":
        from holdfast.testing.store_suite import StoreSuite

        return StoreSuite
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
