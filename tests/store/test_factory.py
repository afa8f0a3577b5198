"""Opening of stores from paths and URLs; the memory store keeps the store contract."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.checkpoint.store import Store, open_store
from holdfast.checkpoint.store.bucket import ObjectStore
from holdfast.checkpoint.store.local import LocalStore
from holdfast.checkpoint.store.memory import MemoryStore
from holdfast.errors import InvalidInput
from holdfast.testing import StoreSuite
from programs import run_python


class TestMemoryStore(StoreSuite):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore()


def test_a_path_is_a_local_store_and_nothing_is_created_yet(tmp_path: Path) -> None:
    for place in (tmp_path / "home", str(tmp_path / "home"), f"file://{tmp_path}/home"):
        store = open_store(place)
        assert isinstance(store, LocalStore)
        assert store.url == str(tmp_path / "home")
    assert not (tmp_path / "home").exists()


def test_the_url_of_a_store_opens_the_same_store(tmp_path: Path) -> None:
    for place in (str(tmp_path), "memory://back"):
        store = open_store(place)
        store.put("a", b"x")
        assert open_store(store.url).get("a") == b"x"


def test_paths_are_resolved_when_a_store_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    places = "runs/gpt", "~/runs", f"file://localhost{tmp_path}/with%20space"
    stores = [open_store(place) for place in places]
    monkeypatch.chdir("/")
    expected = "runs/gpt", "me/runs", "with space"
    assert [store.url for store in stores] == [str(tmp_path / name) for name in expected]


def test_memory_stores_are_shared_by_name() -> None:
    first = open_store("memory://one")
    assert isinstance(first, MemoryStore)
    first.put("a", b"x")
    assert open_store("memory://one") is first
    assert open_store("memory://two").size("a") is None


@pytest.mark.parametrize(
    "url", ["s3://bucket/run", "gs://bucket/run", "az://container/run", "S3://bucket?region=x"]
)
def test_opening_a_bucket_sends_no_request(url: str) -> None:
    pytest.importorskip("obstore", reason="needs the extra `remote`, which needs Python 3.11")
    store = open_store(url)
    assert isinstance(store, ObjectStore)
    assert store.url.lower() == url.lower()
    assert open_store(store.url).url == store.url
    assert store.properties.survives_host


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("minio://bucket/run", r"s3://BUCKET/PREFIX\?endpoint_url="),
        *((f"{kind}://host/run", "a path, file:///PATH, memory://NAME") for kind in ("ftp", "http", "hf")),
    ],
)
def test_the_error_for_another_scheme_shows_the_right_ones(url: str, match: str) -> None:
    with pytest.raises(InvalidInput, match=match):
        open_store(url)


def test_the_error_for_a_refused_url_hides_secrets() -> None:
    with pytest.raises(InvalidInput) as caught:
        open_store("https://me:HIDE@account.blob.core.windows.net/box?sig=HIDE")
    assert "HIDE" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["", "memory://", "file://host/path", "file://", "file:///", Path("s3://bucket/x")]
)
def test_empty_and_impossible_places_are_refused(url: str | Path) -> None:
    with pytest.raises(InvalidInput):
        open_store(url)


def test_stores_do_not_import_torch_or_numpy() -> None:
    script = "import sys, holdfast.checkpoint.store; print({'torch', 'numpy'} & set(sys.modules))"
    env = {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    assert run_python(script, env=env) == "set()"
