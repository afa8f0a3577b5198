"""Servers for the tests of this folder, started when first needed."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from servers import Server

numbers = itertools.count()


@pytest.fixture
def home(s3: Server) -> Callable[..., str]:
    """Return a function that makes a URL that no other test uses; within one test it is always the same."""
    number = next(numbers)
    return lambda **options: s3.home(f"t{number}", **{"timeout": "20", **options})
