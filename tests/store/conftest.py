"""The servers that the tests of this folder share, started when first needed."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from servers import Server

numbers = itertools.count()


@pytest.fixture
def home(s3: Server) -> Callable[..., str]:
    """Makes the URL of a place that no other test uses; always the same one in one test."""
    number = next(numbers)
    return lambda **options: s3.home(f"t{number}", **{"timeout": "20", **options})
