"""Settings of the whole test run: a clean environment for every process that a test starts."""

from __future__ import annotations

import gc
import os
import re
import signal
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

import slow_tests
from fault_proxy import FaultProxy
from holdfast.checkpoint.store import endpoints
from servers import Server, ministack

ROOT = Path(__file__).parent.parent
_numbers = count()
CLOUD_VARIABLES = [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))]

# No deadline: these machines are shared, and a slow example is no failure. The same examples in every run: a
# change must not fail by what it did not touch. `pytest --hypothesis-profile explore` draws new ones.
settings.register_profile(
    "suite",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
    database=None,
    max_examples=50,
)
settings.register_profile(
    "explore", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=1000, print_blob=True
)
settings.load_profile("suite")


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the environment before any test module is imported; child processes inherit it."""
    for name in [name for name in os.environ if name.startswith("HOLDFAST_")]:
        del os.environ[name]  # a developer's own settings, or a failpoint left in the shell
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell starts background commands like this
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Or each of the thousand processes that tests start compiles Holdfast again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["HOLDFAST_PREEMPTION"] = "none"  # this machine may be a cloud's, which tests must not ask
    os.environ["HOLDFAST_KEEP_IN_MEMORY"] = "0"  # a test that wants a keeper to stay says so
    # Workers, ranks and keepers share few cores: more threads only make them wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    paths = [str(ROOT / "src"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is in the list of slow tests, and skip what this version of torch cannot do."""
    slow = slow_tests.read()
    for item in items:
        if item.nodeid in slow and not item.get_closest_marker("essential"):
            item.add_marker(pytest.mark.slow)
    _skip_sharded_training(items)


def _skip_sharded_training(items: list[pytest.Item]) -> None:
    """Skip what trains a sharded model on CPUs where torch cannot, as torch 2.6 cannot."""
    if hasattr(torch.cpu.Stream, "record_event"):
        return
    skip = pytest.mark.skip(reason=f"FSDP2 of torch {torch.__version__} does not run on CPUs")
    for item in items:
        if item.get_closest_marker("fsdp2_on_cpu"):
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Exempt imported modules and collected tests from every later garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the test. Pytest's own fixture lists the folders of all earlier tests to number it."""
    name = re.sub(r"\W", "_", request.node.name)[:16]  # the path of a Unix socket has at most 107 bytes
    path = tmp_path_factory.getbasetemp() / f"{name}-{next(_numbers)}"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture(autouse=True)
def own_runtime_dir(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every test its own folder for keepers' traces: tests must not wait for each other's keepers."""
    path = tmp_path_factory.getbasetemp() / f"runtime-{next(_numbers)}"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(path))


@pytest.fixture(autouse=True)
def unbounded_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Print tables as wide as they are: pytest-xdist tells its workers the width of its own terminal."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def no_endpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """No environment variable names the endpoint of a cloud."""
    named = (names for (_, option), names in endpoints.SET_BY.items() if option == "endpoint_url")
    for name in (endpoints.VARIABLE, *chain.from_iterable(named)):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def s3() -> Iterator[Server]:
    """An S3 server; its keys are in the environment, for processes that a test starts too."""
    pytest.importorskip("obstore", reason="needs the extra `remote`, which needs Python 3.11")
    with ministack() as server, pytest.MonkeyPatch.context() as patch:
        for name in CLOUD_VARIABLES:
            patch.delenv(name)
        for name, value in server.env.items():
            patch.setenv(name, value)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
        patch.setenv("AWS_CONFIG_FILE", "/nowhere")
        yield server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """An S3 server whose keys are in no environment."""
    with ministack() as found:
        yield found


@pytest.fixture
def proxy(s3: Server) -> Iterator[FaultProxy]:
    """A proxy before the S3 server."""
    with FaultProxy("127.0.0.1", s3.port) as proxy:
        yield proxy
