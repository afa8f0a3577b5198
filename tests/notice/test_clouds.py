"""Notices of clouds and Ray Train: requests follow each service's protocol, and its responses are parsed."""

from __future__ import annotations

import contextlib
import http.client
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.errors import InvalidInput
from holdfast.watch.preemption.sources import (
    Aws,
    Azure,
    Gcp,
    Notice,
    Ray,
    Unreachable,
    parse_sources,
    ray_context,
)
from notice.cloud_services import AwsService, AzureService, GcpService


@pytest.fixture
def aws() -> Iterator[AwsService]:
    with contextlib.closing(AwsService()) as service:
        yield service


@pytest.fixture
def gcp() -> Iterator[GcpService]:
    with contextlib.closing(GcpService()) as service:
        yield service


@pytest.fixture
def azure() -> Iterator[AzureService]:
    with contextlib.closing(AzureService()) as service:
        yield service


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests wait for as long as a busy machine takes."""
    connection = http.client.HTTPConnection

    def connect(host: str, port: int, *, timeout: float) -> http.client.HTTPConnection:
        return connection(host, port, timeout=timeout + 600)

    monkeypatch.setattr(http.client, "HTTPConnection", connect)


# -- AWS -------------------------------------------------------------------------------------------------


def test_an_aws_interruption_is_a_notice(aws: AwsService) -> None:
    source = Aws(aws.url)
    assert source.poll() is None
    aws.documents["spot/instance-action"] = '{"action": "terminate", "time": "2026-06-23T02:30:00Z"}'
    assert source.poll() == Notice("aws", "spot terminate")
    assert aws.asked.count(("PUT", "/latest/api/token")) == 1, "one token serves many requests"


def test_a_rejected_aws_token_is_renewed(aws: AwsService) -> None:
    source = Aws(aws.url)
    assert source.poll() is None
    aws.token = "token-2"
    aws.documents["spot/instance-action"] = '{"action": "stop", "time": "2026-06-23T02:30:00Z"}'
    assert source.poll() == Notice("aws", "spot stop")


def test_an_aws_rebalance_recommendation_is_not_final_and_returned_once(aws: AwsService) -> None:
    source = Aws(aws.url)
    aws.documents["events/recommendations/rebalance"] = '{"noticeTime": "2026-06-23T02:30:00Z"}'
    notice = source.poll()
    assert notice is not None
    assert not notice.is_final
    assert source.poll() is None


@pytest.mark.parametrize("text", ["", "[]", "{", '{"action": null}'])
def test_an_invalid_aws_document_is_a_notice_too(aws: AwsService, text: str) -> None:
    aws.documents["spot/instance-action"] = text
    notice = Aws(aws.url).poll()
    assert notice is not None
    assert notice.is_final


# -- Google Cloud ----------------------------------------------------------------------------------------


def test_a_gcp_preemption_is_returned_as_soon_as_the_value_changes(gcp: GcpService) -> None:
    source = Gcp("gcp", gcp.url)
    assert source.poll() is None
    received: list[Notice | None] = []
    polling = threading.Thread(target=lambda: received.append(source.poll()))
    polling.start()
    with gcp.changed:
        assert gcp.changed.wait_for(lambda: gcp.num_waiting == 1, 600), "the service holds the request"
    gcp.change("preempted", "TRUE")
    polling.join(600)
    assert [one and one.detail for one in received] == ["preempted"]


def test_a_gcp_preemption_before_the_first_request_is_returned(gcp: GcpService) -> None:
    gcp.change("preempted", "TRUE")
    assert Gcp("gcp", gcp.url).poll() is not None


def test_a_gcp_request_that_waits_in_vain_returns_none(gcp: GcpService) -> None:
    source = Gcp("gcp", gcp.url, wait_s=0)
    assert [source.poll(), source.poll(), source.poll()] == [None, None, None]
    assert "last_etag=" in gcp.asked[-1][1]


@pytest.mark.parametrize(
    ("value", "is_notice"),
    [("NONE", False), ("MIGRATE_ON_HOST_MAINTENANCE", False), ("TERMINATE_ON_HOST_MAINTENANCE", True)],
)
def test_gcp_maintenance_is_a_notice_only_if_it_ends_the_machine(
    gcp: GcpService, value: str, is_notice: bool
) -> None:
    gcp.change("maintenance-event", value)
    assert (Gcp("gcp-maintenance", gcp.url).poll() is not None) == is_notice


# -- Azure -----------------------------------------------------------------------------------------------


def test_an_azure_event_of_this_machine_is_a_notice(azure: AzureService) -> None:
    source = Azure(azure.url)
    assert source.poll() is None
    azure.events = [
        {"EventType": "Preempt", "Resources": ["vm-8"], "NotBefore": ""},
        {"EventType": "Freeze", "Resources": ["vm-7"], "NotBefore": ""},
    ]
    assert source.poll() is None, "one names another machine, the other leaves processes alive"
    azure.events.append(
        {"EventType": "Preempt", "Resources": ["vm-7"], "NotBefore": "Tue, 23 Jun 2026 02:30:00 GMT"}
    )
    assert source.poll() == Notice("azure", "Preempt")


# -- all of them -----------------------------------------------------------------------------------------


def test_polling_a_service_that_does_not_exist_raises_unreachable() -> None:
    for source in (Aws("http://127.0.0.1:9"), Gcp("gcp", "http://127.0.0.1:9"), Azure("http://127.0.0.1:9")):
        with pytest.raises(Unreachable):
            source.poll()


@pytest.mark.parametrize(
    ("file", "text", "names"),
    [
        ("sys_vendor", "Amazon EC2\n", ["aws"]),
        ("product_name", "Google Compute Engine\n", ["gcp", "gcp-maintenance"]),
        ("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77\n", ["azure"]),
        ("sys_vendor", "QEMU\n", []),
    ],
)
def test_auto_selects_the_cloud_of_the_machine_s_vendor(
    tmp_path: Path, file: str, text: str, names: list[str]
) -> None:
    (tmp_path / file).write_text(text)
    assert [cloud.name for cloud in parse_sources("auto", dmi_folder=tmp_path).clouds] == names
    assert parse_sources("none", dmi_folder=tmp_path).clouds == ()


def test_sources_default_to_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_PREEMPTION", "aws, file:/tmp/notice")
    found = parse_sources(None)
    assert [cloud.name for cloud in found.clouds] == ["aws"]
    assert found.files == (Path("/tmp/notice"),)
    assert parse_sources("none").files == ()


def test_an_unknown_source_is_rejected_with_the_valid_names() -> None:
    said = r"source of preemption notices: 'awz'.* Expected: auto, none, aws"
    with pytest.raises(InvalidInput, match=said):
        parse_sources("awz")


def info(*nodes: str) -> Any:
    return SimpleNamespace(preempted_node_to_ranks={node: [0] for node in nodes})


def worker(monkeypatch: pytest.MonkeyPatch, context: Any) -> None:
    """Make this process one that runs a training function of Ray's."""
    name = "ray.train.v2._internal.execution.context"
    module: Any = types.ModuleType(name)
    module._train_context = context
    monkeypatch.setitem(sys.modules, name, module)


def test_each_node_asks_for_one_save() -> None:
    found = iter([None, info("a"), info("a"), info("a", "b"), info("a", "b")])
    source = Ray(lambda: next(found))
    assert source.poll() is None
    assert source.poll() == Notice("ray", "a node is reclaimed", is_final=False)
    assert source.poll() is None
    assert source.poll() == Notice("ray", "a node is reclaimed", is_final=False)
    assert source.poll() is None


def test_a_worker_of_ray_polls_ray_and_no_cloud(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ray_context() is None
    assert parse_sources("ray").clouds[0].poll() is None
    worker(monkeypatch, SimpleNamespace(preemption_context=SimpleNamespace(preemption_info=info("a"))))
    (source,) = parse_sources("auto").clouds
    assert source.name == "ray"
    notice = source.poll()
    assert notice is not None
    assert not notice.is_final


def test_a_version_of_ray_without_notices_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    worker(monkeypatch, SimpleNamespace())
    with pytest.raises(Unreachable, match="no preemption info"):
        Ray().poll()
