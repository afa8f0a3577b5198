"""The servers that the tests of this folder share, started when first needed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator

import pytest

from holdfast.testing.faultproxy import FaultProxy
from holdfast.testing.servers import Server, ministack

AWS_VARIABLES = [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))]
numbers = itertools.count()


@pytest.fixture(scope="session")
def s3() -> Iterator[Server]:
    """An S3 server; its keys are in the environment."""
    pytest.importorskip("obstore", reason="needs the extra `remote`, which needs Python 3.11")
    with ministack() as server, pytest.MonkeyPatch.context() as patch:
        for name in AWS_VARIABLES:
            patch.delenv(name)
        for name, value in server.env.items():
            patch.setenv(name, value)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
        patch.setenv("AWS_CONFIG_FILE", "/nowhere")
        yield server


@pytest.fixture
def home(s3: Server) -> Callable[..., str]:
    """Makes the URL of a place that no other test uses; always the same one in one test."""
    number = next(numbers)
    return lambda **options: s3.home(f"t{number}", **{"timeout": "20", **options})


@pytest.fixture
def proxy(s3: Server) -> Iterator[FaultProxy]:
    """A proxy before the S3 server."""
    with FaultProxy("127.0.0.1", s3.port) as proxy:
        yield proxy
