"""The memory store keeps the store contract."""

from __future__ import annotations

import pytest

from holdfast.checkpoint.store import Store
from holdfast.checkpoint.store.memory import MemoryStore
from holdfast.testing import StoreSuite


class TestMemoryStore(StoreSuite):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore()
