"""Object stores keep the store contract, also when the bucket fails."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ceph import ceph_rgw
from fault_proxy import FaultProxy
from holdfast.checkpoint.store import ObjectInfo, Store, open_store
from holdfast.checkpoint.store.bucket import CREATE_BYTES, READ_BYTES, ObjectStore, cut_segments, exactly
from holdfast.errors import Conflict, Corrupt, Denied, InvalidInput, NotFound, RetryLater, Unsupported
from holdfast.testing import StoreSuite
from programs import run_python
from servers import Server, azurite, install_azurite

PART_BYTES = 5 << 20
Home = Callable[..., str]


class TestObjectStoreOnS3(StoreSuite):
    @pytest.fixture
    def store(self, home: Home) -> Store:
        return open_store(home())


@pytest.fixture(scope="session")
def azure() -> Iterator[Server]:
    """Azure's emulator; its keys are in the environment."""
    pytest.importorskip("obstore", reason="needs the extra `remote`, which needs Python 3.11")
    try:
        install_azurite()
    except (RetryLater, Unsupported) as error:
        pytest.skip(f"no azurite: {error}")
    with azurite() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.env.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture
def azure_store(azure: Server) -> Store:
    """A place that no other test uses."""
    return open_store(azure.home(f"t{secrets.token_hex(4)}", timeout="10m"))


class TestEssentialsOnAzure:
    """The essentials for a run; the slow tests run the whole suite."""

    @pytest.fixture
    def store(self, azure_store: Store) -> Store:
        return azure_store

    check_round_trip = StoreSuite.check_round_trip
    test_bytes = StoreSuite.test_a_large_object_is_read_back_unchanged
    test_missing = StoreSuite.test_a_missing_object_is_not_found
    test_past_end = StoreSuite.test_a_read_past_the_end_is_corrupt
    test_create = StoreSuite.test_if_absent_does_not_replace_an_object
    test_race = StoreSuite.test_one_of_several_threads_creates_an_object
    test_link = StoreSuite.test_a_link_has_the_same_bytes_under_another_name
    test_list = StoreSuite.test_list_returns_names_and_sizes_by_prefix
    test_append = StoreSuite.test_append_adds_at_the_end
    test_delete = StoreSuite.test_delete_removes_one_object
    test_names = StoreSuite.test_names_may_have_parts_and_unusual_characters
    test_parts = StoreSuite.test_parts_are_joined_into_one_object

    def test_check(self, store: Store) -> None:
        store.check()
        assert list(store.list()) == []

    def test_a_missing_container_raises(self, azure: Server) -> None:
        store = open_store(azure.home("run").replace("az://test/", "az://none-such/"))
        with pytest.raises(NotFound, match="bucket 'none-such' does not exist"):
            store.check()


@pytest.mark.slow
class TestObjectStoreOnAzure(StoreSuite):
    @pytest.fixture
    def store(self, azure_store: Store) -> Store:
        return azure_store


@pytest.fixture(scope="session")
def ceph(s3: Server) -> Iterator[Server]:
    """Ceph's gateway; it has the same keys as the other S3 server, and checks them."""
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(ceph_rgw())
        except Unsupported as error:
            pytest.skip(str(error))
        assert server.env == s3.env
        yield server


@pytest.mark.slow
class TestObjectStoreOnCeph(StoreSuite):
    @pytest.fixture
    def store(self, ceph: Server) -> Store:
        return open_store(ceph.home(f"t{secrets.token_hex(4)}", timeout="10m"))

    def test_other_keys_are_refused(self, ceph: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "HIDE")
        with pytest.raises(Denied, match="credentials") as caught:
            open_store(ceph.home("t")).get("a")
        assert "HIDE" not in str(caught.value)


@pytest.fixture
def store(home: Home, proxy: FaultProxy) -> Store:
    """A store behind the proxy, with small parts."""
    return open_store(home(port=proxy.port, part_bytes=str(PART_BYTES)))


def big(num_bytes: int) -> memoryview:
    """Memory of an arena's size, with bytes that differ everywhere."""
    memory = memoryview(mmap.mmap(-1, num_bytes))
    tile = os.urandom(1 << 20)
    for start in range(0, num_bytes, len(tile)):
        memory[start : start + len(tile)] = tile[: num_bytes - start]
        memory[start : start + 8] = start.to_bytes(8, "little")[: num_bytes - start]
    return memory


def test_a_large_object_is_sent_in_parts_and_read_in_ranges(store: Store, proxy: FaultProxy) -> None:
    data = big(2 * PART_BYTES + READ_BYTES + 17)
    store.put("a/large", data)
    parts = [one for one in proxy.requests("PUT") if "partNumber" in one.target]
    assert len(parts) == 4
    proxy.clear_requests()
    room = memoryview(bytearray(len(data) - 5))
    store.read_into("a/large", 5, room)
    assert room == data[5:]
    assert len(proxy.requests("GET")) == -(-len(room) // READ_BYTES)
    assert store.get("a/large") == data


def test_a_small_object_is_one_request(store: Store, proxy: FaultProxy) -> None:
    store.put("a", b"x" * 100_000)
    assert len(proxy.requests()) == 1


def test_parts_of_a_large_object_are_streamed(store: Store, proxy: FaultProxy) -> None:
    data = bytes(big(3 * PART_BYTES + 5))
    room = bytearray(1_000_003)  # used again for each part, and no divisor of anything

    def parts() -> Iterator[memoryview]:
        for start in range(0, len(data), len(room)):
            part = data[start : start + len(room)]
            room[: len(part)] = part
            yield memoryview(room)[: len(part)]

    store.put_parts("a", parts(), len(data))
    assert store.get("a") == data
    assert sum("partNumber" in one.target for one in proxy.requests("PUT")) == 4


@pytest.mark.parametrize("found", [2 * PART_BYTES, 4 * PART_BYTES])
def test_streamed_parts_of_another_length_leave_nothing(home: Home, found: int) -> None:
    store = open_store(home(part_bytes=str(PART_BYTES)))
    with pytest.raises(InvalidInput, match=f"{3 * PART_BYTES} bytes long"):
        store.put_parts("a", iter([bytes(PART_BYTES)] * (found // PART_BYTES)), 3 * PART_BYTES)
    assert list(store.list()) == []


def test_a_streams_own_error_is_raised_and_the_upload_aborted(store: Store, proxy: FaultProxy) -> None:
    damage = Corrupt("the source is damaged")

    def parts() -> Iterator[bytes]:
        yield bytes(2 * PART_BYTES)
        raise damage

    with pytest.raises(Corrupt) as caught:
        store.put_parts("a", parts(), 3 * PART_BYTES)
    assert caught.value is damage
    assert any("uploadId" in one.target for one in proxy.requests("DELETE"))
    assert list(store.list()) == []


def test_a_large_object_leaves_a_taken_name_alone(home: Home) -> None:
    store = open_store(home())
    store.put("a", b"first")
    data = memoryview(mmap.mmap(-1, CREATE_BYTES + 1))
    with pytest.raises(Conflict):
        store.put("a", data, if_absent=True)
    with pytest.raises(Conflict):
        store.put_parts("a", iter([data]), len(data), if_absent=True)
    assert store.get("a") == b"first"


def test_an_object_with_the_same_bytes_counts_as_our_own(home: Home) -> None:
    """This is how a lost answer looks. Documents of other writers differ, because they carry random ids."""
    store = open_store(home())
    store.put("a", b"id 1", if_absent=True)
    open_store(home()).put("a", b"id 1", if_absent=True)
    with pytest.raises(Conflict):
        store.put("a", b"id 2", if_absent=True)


def test_many_objects_are_listed_over_pages(home: Home) -> None:
    store = open_store(home())
    names = [f"step-{number // 100:02}/{number}" for number in range(1100)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: store.put(name, b"x"), names))
    assert {entry.name for entry in store.list()} == set(names)
    assert len(list(store.list("step-03/3"))) == 100


def test_folder_objects_of_consoles_are_ignored(home: Home, s3: Server) -> None:
    import urllib.request

    store = open_store(home())
    assert isinstance(store, ObjectStore)
    prefix = home().partition("?")[0].rpartition("/")[2]
    for name in (f"{prefix}/", f"{prefix}/steps/"):
        url = f"{s3.endpoint_url}/test/{name}"
        urllib.request.urlopen(urllib.request.Request(url, method="PUT", data=b""), timeout=600).close()
    store.put("steps/a", b"x")
    assert ObjectInfo("steps/a", 1) in list(store.list())
    assert "" not in {entry.name for entry in store.list()}


def test_a_home_is_the_whole_bucket_or_a_prefix_of_it(s3: Server, home: Home) -> None:
    below = open_store(home())
    below.put("a", b"x")
    prefix = home().partition("?")[0].rpartition("/")[2]
    whole = open_store(s3.home())
    assert whole.get(f"{prefix}/a") == b"x"
    assert ObjectInfo(f"{prefix}/a", 1) in list(whole.list(f"{prefix}/"))
    open_store(s3.home(f"{prefix}/runs-2")).put("b", b"x")
    assert list(open_store(s3.home(f"{prefix}/runs")).list()) == []


def test_a_missing_bucket_raises(s3: Server) -> None:
    store = open_store(s3.home("run").replace("s3://test/", "s3://none-such/"))
    with pytest.raises(NotFound, match="bucket 'none-such' does not exist"):
        list(store.list())
    with pytest.raises(NotFound, match="bucket 'none-such' does not exist"):
        store.check()
    with pytest.raises(RetryLater, match="bucket 'none-such' does not exist"):
        store.put("a", b"x")


def test_names_that_the_client_refuses_raise_invalid_input(home: Home) -> None:
    with pytest.raises(InvalidInput):
        open_store(home()).put("line\nbreak", b"x")


def test_check_detects_a_server_that_ignores_create_if_absent(store: Store, proxy: FaultProxy) -> None:
    proxy.stripped = frozenset({"if-none-match"})
    with pytest.raises(Unsupported, match="If-None-Match") as caught:
        store.check()
    assert "s3://test/" in str(caught.value)
    assert list(store.list()) == []


def test_appended_lines_reach_others_at_flush(home: Home) -> None:
    store, other = open_store(home(parallel="2")), open_store(home())
    store.append("history/a.jsonl", b"one\n")
    store.flush()
    assert other.get("history/a.jsonl") == b"one\n"
    store.append("history/a.jsonl", b"two\n")
    store.close()
    assert other.get("history/a.jsonl") == b"one\ntwo\n"
    store.append("history/a.jsonl", b"three\n")  # a closed store can be used again
    assert store.size("history/a.jsonl") == len(b"one\ntwo\nthree\n")


def test_stores_of_one_place_append_to_one_log(home: Home) -> None:
    for line in (b"one\n", b"two\n", b"three\n"):
        open_store(home()).append("log", line)
    assert open_store(home()).get("log") == b"one\ntwo\nthree\n"


def test_a_deleted_log_starts_empty(home: Home) -> None:
    store = open_store(home())
    store.append("log", b"one\n")
    store.delete("log")
    assert store.size("log") is None
    store.append("log", b"two\n")
    assert store.get("log") == b"two\n"


def test_appended_data_survives_a_normal_exit(home: Home) -> None:
    """Neither by a process that never flushes, nor after an earlier process's lines."""
    script = (
        "import sys; from holdfast.checkpoint.store import open_store; "
        "open_store(sys.argv[1]).append('log', b'line\\n')"
    )
    for _ in range(2):
        run_python(script, home())
    assert open_store(home()).get("log") == b"line\nline\n"


FORKING = """
import os, sys
from holdfast.errors import Unsupported
from holdfast.checkpoint.store import open_store

def is_refused(store):
    try:
        store.get("a")
    except Unsupported as error:
        return "forked" in str(error)
    return False

def in_child(act):
    pid = os.fork()
    if not pid:
        os._exit(0 if act() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

store = open_store(sys.argv[1])
assert in_child(lambda: store.size("a") == 1) == 0, "a store that was not used yet works after a fork"
assert store.get("a") == b"x"
assert in_child(lambda: is_refused(store)) == 0, "a used one is refused"
assert in_child(lambda: is_refused(open_store(sys.argv[1]))) == 0, "and so is a new one"
assert store.get("a") == b"x", "the parent continues"
"""


def test_a_fork_after_use_is_refused_and_does_not_hang(home: Home) -> None:
    open_store(home()).put("a", b"x")
    run_python(FORKING, home())


def test_a_spawned_process_uses_the_same_url(home: Home) -> None:
    """As the keeper does: with the URL and the environment, without torch."""
    script = (
        "import sys; from holdfast.checkpoint.store import open_store; "
        "open_store(sys.argv[1]).put('a', b'a child');"
        "print({'torch', 'numpy'} & set(sys.modules))"
    )
    assert run_python(script, open_store(home()).url) == "set()"
    assert open_store(home()).get("a") == b"a child"


MEASURING = """
import mmap, sys
from pathlib import Path
from holdfast.checkpoint.store import open_store

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) << 10

num_bytes = int(sys.argv[2])
arena = memoryview(mmap.mmap(-1, num_bytes))
for at in range(0, num_bytes, 4096):
    arena[at] = 1
store = open_store(sys.argv[1])
store.put("warm", b"x")
before = status("VmRSS:")
if sys.argv[3] == "put":
    store.put("a", arena)
else:
    store.put_parts("a", (arena[at : at + 1000000] for at in range(0, num_bytes, 1000000)), num_bytes)
print(status("VmHWM:") - before)
"""


@pytest.mark.parametrize("way", ["put", "put_parts"])
def test_an_upload_takes_little_memory_beyond_its_buffer(home: Home, way: str) -> None:
    """A few parts at most, never the whole object."""
    num_bytes = 96 << 20
    url = home(part_bytes=str(PART_BYTES), parallel="2")
    assert int(run_python(MEASURING, url, num_bytes, way)) < 64 << 20
    assert open_store(url).size("a") == num_bytes


@given(st.lists(st.binary(max_size=30), max_size=10), st.integers(1, 40))
def test_segments_have_equal_length_and_the_same_bytes(parts: list[bytes], length: int) -> None:
    whole = b"".join(parts)
    room = bytearray(30)

    def reused() -> Iterator[memoryview]:
        for part in parts:
            room[: len(part)] = part
            yield memoryview(room)[: len(part)]

    found = list(cut_segments(reused(), length))
    assert b"".join(found) == whole
    assert all(len(one) == length for one in found[:-1])
    assert all(found)


@given(st.lists(st.binary(max_size=30), max_size=5), st.integers(0, 100))
def test_a_wrong_total_length_is_refused(parts: list[bytes], num_bytes: int) -> None:
    if sum(map(len, parts)) == num_bytes:
        return
    with pytest.raises(InvalidInput):
        list(exactly("a", parts, num_bytes))
