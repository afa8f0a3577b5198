"""The clouds' notices: each protocol is spoken as its service wants it, and what it says is understood."""

from __future__ import annotations

import datetime
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import InvalidInput
from holdfast.notice import Notices, Word
from holdfast.notice.aws import Aws
from holdfast.notice.azure import Azure
from holdfast.notice.gcp import GcpMaintenance, GcpPreemption
from holdfast.notice.metadata import Unreachable
from holdfast.notice.sources import read_sources
from notice.clouds import AwsService, AzureService, GcpService

WHEN = datetime.datetime(2026, 6, 23, 2, 30, tzinfo=datetime.timezone.utc).timestamp()


@pytest.fixture
def aws() -> Iterator[AwsService]:
    service = AwsService()
    yield service
    service.close()


@pytest.fixture
def gcp() -> Iterator[GcpService]:
    service = GcpService()
    yield service
    service.close()


@pytest.fixture
def azure() -> Iterator[AzureService]:
    service = AzureService()
    yield service
    service.close()


# -- AWS -------------------------------------------------------------------------------------------------


def test_aws_interruptions_are_told_with_their_time(aws: AwsService) -> None:
    source = Aws(aws.url)
    assert source.ask() is None
    aws.documents["spot/instance-action"] = json.dumps(
        {"action": "terminate", "time": "2026-06-23T02:30:00Z"}
    )
    assert source.ask() == Word("aws", "spot terminate", WHEN)
    assert aws.asked.count(("PUT", "/latest/api/token")) == 1, "a token serves many questions"


def test_aws_tokens_are_renewed_when_they_are_refused(aws: AwsService) -> None:
    source = Aws(aws.url)
    assert source.ask() is None
    aws.token = "token-2"
    aws.documents["spot/instance-action"] = '{"action": "stop", "time": "2026-06-23T02:30:00Z"}'
    assert source.ask() == Word("aws", "spot stop", WHEN)


def test_aws_rebalance_is_advice_and_told_once(aws: AwsService) -> None:
    source = Aws(aws.url)
    aws.documents["events/recommendations/rebalance"] = '{"noticeTime": "2026-06-23T02:30:00Z"}'
    word = source.ask()
    assert word is not None
    assert not word.is_final
    assert source.ask() is None


@pytest.mark.parametrize("text", ["", "[]", "{", '{"action": null}'])
def test_an_aws_document_that_cannot_be_read_is_a_notice_all_the_same(aws: AwsService, text: str) -> None:
    aws.documents["spot/instance-action"] = text
    word = Aws(aws.url).ask()
    assert word is not None
    assert word.is_final


# -- Google Cloud ----------------------------------------------------------------------------------------


def test_gcp_preemption_is_told_as_soon_as_it_changes(gcp: GcpService) -> None:
    source = GcpPreemption(gcp.url)
    assert source.ask() is None
    heard: list[Word | None] = []
    asking = threading.Thread(target=lambda: heard.append(source.ask()))
    asking.start()
    with gcp.changed:
        assert gcp.changed.wait_for(lambda: gcp.num_waiting == 1, 10), "the question waits at the service"
    gcp.change("preempted", "TRUE")
    asking.join(10)
    assert heard
    assert heard[0] is not None
    assert heard[0].detail == "preempted"


def test_gcp_preemption_that_came_before_anybody_asked_is_told(gcp: GcpService) -> None:
    gcp.change("preempted", "TRUE")
    assert GcpPreemption(gcp.url).ask() is not None


def test_gcp_questions_that_wait_in_vain_are_answered_with_nothing(gcp: GcpService) -> None:
    source = GcpPreemption(gcp.url, wait_s=0)
    assert [source.ask(), source.ask(), source.ask()] == [None, None, None]
    assert "last_etag=" in gcp.asked[-1][1]


@pytest.mark.parametrize(
    ("value", "is_notice"),
    [("NONE", False), ("MIGRATE_ON_HOST_MAINTENANCE", False), ("TERMINATE_ON_HOST_MAINTENANCE", True)],
)
def test_gcp_maintenance_is_a_notice_only_if_it_ends_the_machine(
    gcp: GcpService, value: str, is_notice: bool
) -> None:
    gcp.change("maintenance-event", value)
    assert (GcpMaintenance(gcp.url).ask() is not None) == is_notice


# -- Azure -----------------------------------------------------------------------------------------------


def test_azure_events_of_this_machine_are_told_with_their_time(azure: AzureService) -> None:
    source = Azure(azure.url)
    assert source.ask() is None
    azure.events = [
        {"EventType": "Preempt", "Resources": ["vm-8"], "NotBefore": ""},
        {"EventType": "Freeze", "Resources": ["vm-7"], "NotBefore": ""},
    ]
    assert source.ask() is None, "another machine's, and one that a process survives"
    azure.events.append(
        {"EventType": "Preempt", "Resources": ["vm-7"], "NotBefore": "Tue, 23 Jun 2026 02:30:00 GMT"}
    )
    assert source.ask() == Word("azure", "Preempt", WHEN)


# -- all of them -----------------------------------------------------------------------------------------


def test_a_service_that_is_not_there_is_unreachable_and_no_notice() -> None:
    for source in (
        Aws("http://127.0.0.1:9"),
        GcpPreemption("http://127.0.0.1:9"),
        Azure("http://127.0.0.1:9"),
    ):
        with pytest.raises(Unreachable):
            source.ask()


def test_what_a_cloud_says_reaches_whoever_asks(aws: AwsService) -> None:
    notices = Notices(f"aws={aws.url}")
    aws.documents["spot/instance-action"] = '{"action": "terminate", "time": "2026-06-23T02:30:00Z"}'
    notices.listen()
    for thread in [one for one in threading.enumerate() if one.name == "holdfast-notice-aws"]:
        thread.join(10)  # it ends with the notice
    assert notices.word == Word("aws", "spot terminate", WHEN)
    assert notices.reason == "aws: spot terminate"
    notices.unwatch()


def test_only_the_first_rank_of_a_host_asks(monkeypatch: pytest.MonkeyPatch, aws: AwsService) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    Notices(f"aws={aws.url}").listen()
    assert "holdfast-notice-aws" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize(
    ("file", "text", "names"),
    [
        ("sys_vendor", "Amazon EC2\n", ["aws"]),
        ("product_name", "Google Compute Engine\n", ["gcp", "gcp-maintenance"]),
        ("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77\n", ["azure"]),
        ("sys_vendor", "QEMU\n", []),
    ],
)
def test_a_cloud_s_own_machine_asks_that_cloud(
    tmp_path: Path, file: str, text: str, names: list[str]
) -> None:
    (tmp_path / file).write_text(text)
    assert [cloud.name for cloud in read_sources("auto", make=tmp_path).clouds] == names
    assert read_sources("none", make=tmp_path).clouds == ()


def test_sources_come_from_the_environment_unless_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_NOTICES", "aws, file:/tmp/notice")
    found = read_sources(None)
    assert [cloud.name for cloud in found.clouds] == ["aws"]
    assert found.files == (Path("/tmp/notice"),)
    assert read_sources("none").files == ()


def test_an_unknown_source_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidInput, match=r"no source of notices called 'awz'. Expected: auto, none, aws"):
        read_sources("awz")
