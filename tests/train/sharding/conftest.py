"""Process groups for the tests of sharding."""

from elastic.conftest import worlds

__all__ = ["worlds"]
