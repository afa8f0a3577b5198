"""The page in a real headless browser, with real jobs: live, as text, and for everyone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dash.conftest import WAITS
from dash.driver import Page, browsing, missing_browser, wait_until
from dash.serving import serving
from holdfast.checkpoint.store import open_store
from holdfast.jobs.dash import pages
from holdfast.jobs.dash.pages import RunPlace
from holdfast.jobs.engine import Job
from holdfast.jobs.status import JobStatus
from jobs.harness import JobHarness
from making import make_home

pytest.importorskip("waitress", reason="needs the extra `dash`")
pytest.importorskip("vl_convert", reason="needs the extra `report`")
MISSING = missing_browser()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=MISSING or "not skipped")]

TRAINING = Path(__file__).parent.parent / "jobs" / "training.py"
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
# The least contrast of a text's colour and its background, by the formula of WCAG 2.
CONTRAST = """
const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
const part = (value) => linear(value / 255);
const light = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
const ground = (element) => {
  for (; element; element = element.parentElement) {
    const found = numbers(getComputedStyle(element).backgroundColor);
    if (found.length < 4 || found[3] > 0) return found;
  }
  return [255, 255, 255];
};
let least = [99, ""];
for (const element of document.querySelectorAll("body *:not(svg *)")) {
  const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  if (!own || element.checkVisibility?.() === false || element.closest("noscript, .unseen, .skip")) continue;
  const pair = [numbers(getComputedStyle(element).color), ground(element)].map(light).sort((a, b) => b - a);
  const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
  if (ratio < least[0]) least = [ratio, element.outerHTML];
}
return least;
"""
FOCUSED = """
const seen = [];
for (const one of document.querySelectorAll('a, input, button, select, summary, [tabindex="0"]')) {
  one.focus();
  if (document.activeElement === one) seen.push(one.tagName);
}
return seen;
"""
LABELLED = """
return [...document.querySelectorAll('.line')].map((one) => one.innerText.replace(/\\s+/g, ' '));
"""
SET = """
const [id, value, event] = arguments;
document.getElementById(id).value = value;
document.getElementById(id).dispatchEvent(new Event(event));
"""
AT_END = """
const box = document.querySelector('.lines');
return box.scrollHeight - box.scrollTop - box.clientHeight < 40;
"""
NAMED = {
    *("link", "button", "checkbox", "textbox", "searchbox", "combobox"),
    *("table", "region", "log", "img", "image"),
}
"""Roles of elements that a screen reader can only present by a name."""


@dataclass(frozen=True)
class Story:
    """A page in a browser, the server behind it, and the jobs that it shows."""

    page: Page
    jobs: JobHarness
    stop: Callable[[], object]

    def launch(self, run: str, *, name: str, num_nodes: int = 1) -> Job:
        """Start a job with `holdfast launch`."""
        path = self.jobs.folder / "task.json"  # JSON is YAML
        path.write_text(json.dumps({"name": name, "num_nodes": num_nodes, "run": run}))
        words = [sys.executable, "-m", "holdfast.cli", "launch", str(path), "--json"]
        done = subprocess.run(words, check=True, capture_output=True, text=True)
        return self.jobs.engine.job(json.loads(done.stdout)["id"])

    def show(self, job: Job) -> None:
        """Show the page of a job, as a click on its link does."""
        self.page.run("location.hash = arguments[0]", f"#/jobs/{job.id}")
        is_shown = "return document.querySelector('h1')?.innerText.startsWith(arguments[0])"
        self.page.wait(is_shown, f"{job.id}: ")


@pytest.fixture
def story(jobs: JobHarness, tmp_path: Path) -> Iterator[Story]:
    """Open the printed URL."""
    with serving(jobs.state) as (url, process), browsing(tmp_path / "profile") as page:
        page.size(1200, 900)
        page.open(url)
        page.wait("return document.querySelector('.note')?.innerText.startsWith('There are no jobs')")
        assert page.url() == url.partition("?")[0], "the token is not in the URL any more"
        yield Story(page, jobs, process.kill)


def test_a_training_is_seen_live_from_its_launch_to_its_end(story: Story, tmp_path: Path) -> None:
    page = story.page
    page.run("window.isSamePage = true")
    home = tmp_path / "run"
    train = f"{sys.executable} {TRAINING} {home} 30 --every 10"
    job = story.launch(f"echo begins; {train}; echo trained; {WAITS}", name="gpt")
    page.wait("return document.querySelector('tbody a')?.innerText === arguments[0]", f"{job.id} gpt")
    page.wait("return document.querySelector('tbody .status').innerText === 'RUNNING'")
    story.show(job)
    page.wait("return document.querySelector('.lines').innerText.includes('trained')")
    assert "begins" in page.text(".lines")
    is_drawn = "document.querySelector('[data-drawn]')"
    page.wait(f"return document.querySelector('.note')?.innerText !== '' && {is_drawn}")
    assert page.text("figcaption") == "loss, step by step"
    paths = "[...document.querySelectorAll('.drawing path')]"
    lines = page.run(f"return {paths}.map((one) => one.getAttribute('d'))")
    assert any(line.count("L") >= 20 for line in lines if line), "a line through the steps"
    assert str(home) in page.text("h2.place")
    with story.jobs.files(job).log(0).open("a") as log:
        log.write("a later line\n")
    page.wait("return document.querySelector('.lines').innerText.includes('a later line')")
    (story.jobs.files(job).workdir(0) / "go").touch()
    page.wait("return document.querySelector('.title .status').innerText === 'SUCCEEDED'")
    assert page.text("#news") == f"Job {job.id} is SUCCEEDED now."
    page.wait("return document.querySelector('.lines').dataset.complete === 'true'")
    page.run("location.hash = '#/'")
    page.wait("return document.querySelector('tbody .status')?.innerText === 'SUCCEEDED'")
    assert page.run("return window.isSamePage")
    assert page.console() == []


def test_the_report_opens_with_its_charts_and_without_rights(story: Story, tmp_path: Path) -> None:
    page = story.page
    job = story.launch(f"{sys.executable} {TRAINING} {tmp_path / 'run'} 10 --every 5", name="gpt")
    story.jobs.wait(job)
    story.show(job)
    url = page.wait("return document.querySelector('.runs a')?.href")
    # If the reading takes longer than 3 s, the server asks the reader to come again.
    wait_until(lambda: page.open(url) or "Ask again later." not in page.text(), page.text)
    page.wait("return document.body.dataset.drawn")
    assert (page.run("return document.body.dataset.failed"), page.text("h1")) == ("0", "run")
    assert page.run("return self.origin") == "null", "an origin of its own"
    assert page.run("try { return document.cookie } catch (error) { return error.name }") == "SecurityError"


def test_texts_of_strangers_are_shown_as_text(story: Story) -> None:
    page = story.page
    progress = json.dumps({"home": f"/runs/{HOSTILE}", "step": 3})
    script = f"cat >> $HOLDFAST_PROGRESS <<'END'\n{progress}\nEND\ncat <<'END'\n{HOSTILE}\nEND\nexit 4"
    job = story.launch(script, name=HOSTILE)
    story.jobs.wait(job)
    page.wait("return document.querySelector('tbody a')?.innerText === arguments[0]", f"{job.id} {HOSTILE}")
    story.show(job)
    page.wait("return document.querySelector('.lines').innerText.includes(arguments[0])", HOSTILE)
    assert page.text("h1") == f"{job.id}: {HOSTILE}"
    page.wait("return document.querySelector('.lead').innerText.includes(arguments[0])", HOSTILE)
    assert page.text("h2.place") == f"/runs/{HOSTILE}"
    for tag in ("img", "body script"):
        assert page.run("return document.querySelectorAll(arguments[0]).length", tag) == 0
    assert "owned" not in page.run("return document.title").removeprefix(f"FAILED - {HOSTILE}")
    assert not [line for line in page.console() if "Security Policy" in line]


def test_nodes_are_labelled_and_one_can_be_chosen(story: Story) -> None:
    page = story.page
    job = story.launch("echo from $SKYPILOT_NODE_RANK", name="two", num_nodes=2)
    story.jobs.wait(job)
    story.show(job)
    page.wait("return document.querySelector('.lines').innerText.includes('from 1')")
    assert {"node 0 from 0", "node 1 from 1"} <= set(page.run(LABELLED))
    page.run(SET, "node", "1", "change")
    page.wait("return document.querySelector('.line') && !document.querySelector('.lines [data-node=\"0\"]')")
    assert "from 1" in page.text(".lines")


def test_a_long_output_keeps_the_page_small(story: Story) -> None:
    page = story.page
    job = story.launch(f"seq 30000; {WAITS}; seq 30000; echo the end", name="long")
    story.jobs.wait(job, JobStatus.RUNNING)
    story.jobs.wait_for_output(job, "\n30000\n")
    story.show(job)
    page.wait("return [...document.querySelectorAll('.line')].at(-1)?.innerText === '30000'")
    assert page.run("return document.querySelector('.gap').innerText").endswith(f": holdfast logs {job.id}")
    for _ in range(4):
        with story.jobs.files(job).log(0).open("a") as log:
            log.write("".join(f"more {number}\n" for number in range(1999)) + "mark\n")
        page.wait("return [...document.querySelectorAll('.line')].at(-1)?.innerText === 'mark'")
        page.run("[...document.querySelectorAll('.line')].at(-1).lastElementChild.append('ed')")
    assert 5000 <= page.run("return document.querySelectorAll('.lines > *').length") <= 5001
    assert page.run(AT_END), "it follows"
    page.run("document.querySelector('.lines').scrollTop = 0")
    page.wait("return !document.getElementById('follow').checked")
    story.jobs.finish(job)
    page.wait("return document.querySelector('.lines').dataset.complete === 'true'")
    assert not page.run(AT_END), "scrolling up stops following"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_usable_on_a_phone_by_keyboard_and_by_a_screen_reader(
    story: Story, tmp_path: Path, scheme: str
) -> None:
    page = story.page
    page.scheme(scheme)
    page.size(390, 800)
    run = f"{sys.executable} {TRAINING} {tmp_path / 'run'} 10 --every 5; echo {'x' * 500}; exit 3"
    failed = story.launch(run, name="a-name-that-is-much-too-long-for-a-phone")
    story.launch(WAITS, name="second")
    story.jobs.wait(failed)
    page.wait("return document.querySelectorAll('tbody tr').length === 2")
    fits = "return document.documentElement.scrollWidth <= innerWidth"
    assert page.run(fits)
    ratio, element = page.run(CONTRAST)
    assert ratio >= 4.5, element
    assert {"A", "INPUT", "DIV"} <= set(page.run(FOCUSED))
    story.show(failed)
    page.wait("return document.querySelector('[data-drawn]')")
    assert page.run("return document.activeElement.id") == "main", "a screen reader begins with the new place"
    assert page.run(fits)
    cut = "return [...document.querySelectorAll('.scroll')].some((one) => one.scrollWidth > one.clientWidth)"
    assert not page.run(cut), "no column of a table is cut"
    ratio, element = page.run(CONTRAST)
    assert ratio >= 4.5, element
    nodes = page.cdp("Accessibility.getFullAXTree")["nodes"]
    heard = [node for node in nodes if not node["ignored"]]
    named = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in heard]
    assert {"main", "banner", "navigation", "log", "table", "status"} <= {role for role, _ in named}
    assert any(role in ("img", "image") and name.startswith("loss") for role, name in named)
    assert not [role for role, name in named if role in NAMED and not name]


def test_a_server_that_has_ended_is_reported(story: Story) -> None:
    story.stop()
    said = "The server does not answer. The page asks again."
    story.page.wait("return document.getElementById('connection').innerText === arguments[0]", said)


def test_many_jobs_are_filtered(story: Story) -> None:
    assert pages.MAX_ENDED == 200
    for name in ("alpha", "beta"):
        story.jobs.wait(story.launch("true", name=name))
    page = story.page
    page.wait("return document.querySelectorAll('tbody tr').length === 2")
    page.run(SET, "filter", "ALP", "input")
    names = page.run("return [...document.querySelectorAll('tbody .name')].map((one) => one.innerText)")
    assert names == ["alpha"]
    page.run(SET, "filter", "nothing", "input")
    assert page.text(".note") == "No job matches."


def test_a_home_of_the_command_line_is_shown_and_a_bucket_on_request(jobs: JobHarness, tmp_path: Path):
    home = tmp_path / "a run"
    train = f"{sys.executable} {TRAINING} '{home}' 10 --every 5"
    jobs.wait(jobs.submit(train))
    words = (str(home), "s3://bucket/runs/other")
    with serving(jobs.state, *words) as (url, _), browsing(tmp_path / "profile") as page:
        page.open(url)
        page.wait("return document.querySelectorAll('.homes a').length === 2")
        page.wait("return document.querySelector('.homes tr td')?.innerText === 'finished'")
        cells = page.run("return [...document.querySelectorAll('.homes td')].map((one) => one.innerText)")
        assert cells[1] == "10"
        assert cells[2].endswith(" ago")
        assert cells[3:] == ["in a bucket, which its page reads", "-", "-"]
        page.run("location.hash = document.querySelectorAll('.homes a')[0].hash")
        page.wait("return document.querySelector('[data-drawn]')")
        assert (page.text("h1"), page.text("h2.place")) == ("a run", str(home))
        assert "step 10" in page.text(".numbers")
        assert "Drawing" not in page.text(".chart")
        page.run("location.hash = '#/'")
        page.wait("return document.querySelectorAll('.homes a').length === 2")
        page.run("location.hash = document.querySelectorAll('.homes a')[1].hash")
        page.wait("return document.querySelector('.runs button')")
        asked = page.run("return performance.getEntriesByType('resource').map((one) => one.name)")
        assert len({name for name in asked if name.endswith("/curves")}) == 1, "of the first home"
        assert page.text("h1") == "other"
        assert page.console() == []


def test_the_printed_url_leads_to_the_place_that_is_added_to_it(jobs: JobHarness, tmp_path: Path) -> None:
    """Although its token is exchanged first. A run without metrics has its numbers there."""
    home = tmp_path / "run"
    make_home(open_store(home), attempts=(1,))
    with serving(jobs.state, str(home)) as (url, _), browsing(tmp_path / "profile") as page:
        place = f"#/runs/{RunPlace(str(home)).id}"
        page.open(url + place)
        page.wait("return document.querySelector('h1')?.innerText === 'run'")
        assert page.url() == url.partition("?")[0] + place
        page.wait("return document.querySelectorAll('.numbers div').length === 6")
        assert "Newest checkpoint" in page.text(".numbers")
        assert page.text(".runs p.note").endswith("It has not recorded a metric yet.")
        assert page.console() == []
