"""Public suites of conformance, for tests of what others write: `StoreSuite` for a store."""

from holdfast.testing.store_suite import StoreSuite

__all__ = ["StoreSuite"]
