"""Public suites of conformance: `StoreSuite` for a store, `WatchSuite` for a watch."""

from holdfast.testing.store_suite import StoreSuite
from holdfast.testing.watch_suite import WatchSuite

__all__ = ["StoreSuite", "WatchSuite"]
