"""The documentation as a site: built without a warning, without dead links, and readable on a phone."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest

from dash.driver import Page, browsing, missing_browser

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
LINK = re.compile(r'(?:href|src)="([^"]+)"')
IDENTITY = re.compile(r'id="([^"]+)"')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "--quiet",
        "--fail-on-warning",
        "--keep-going",
        "-c",
        "docs",
        ".",
    ]
    done = subprocess.run([*command, str(folder)], cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    if reason := missing_browser():
        pytest.skip(reason)
    with browsing(tmp_path_factory.mktemp("profile")) as page:
        yield page


def test_every_link_leads_to_a_page_and_a_heading(site: Path) -> None:
    texts = {path: path.read_text() for path in site.rglob("*.html")}
    ids = {path: {unescape(one) for one in IDENTITY.findall(text)} for path, text in texts.items()}
    dead = []
    for path, text in texts.items():
        for link in map(unescape, LINK.findall(text)):
            if re.match(r"[a-z]+:", link):
                continue
            name, _, anchor = link.partition("#")
            name = unquote(name.partition("?")[0])
            target = (path.parent / name).resolve() if name else path
            if not target.exists() or (anchor and target in ids and unquote(anchor) not in ids[target]):
                dead.append(f"{path.relative_to(site)}: {link}")
    assert len(texts) > 50
    assert not dead


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    elsewhere = re.compile(r'<(?:script|img|iframe)[^>]+src="https?:|<link[^>]+href="https?:|url\(.?https?:')
    found = [
        str(path.relative_to(site))
        for path in site.rglob("*")
        if path.suffix in (".html", ".css") and elsewhere.search(path.read_text())
    ]
    assert not found


def test_each_page_fits_a_phone_and_reports_no_error(site: Path, browser: Page) -> None:
    browser.size(390, 844)
    wide, errors = [], []
    for path in sorted(site.rglob("*.html")):
        browser.open(path.as_uri())
        name = str(path.relative_to(site))
        room = "const page = document.documentElement; return page.scrollWidth - page.clientWidth"
        if browser.run(room) > 0:
            wide.append(name)
        errors += [f"{name}: {line}" for line in browser.console()]
    assert not wide
    assert not errors


def test_the_search_finds_a_guide_without_a_server(site: Path, browser: Page) -> None:
    browser.size(1280, 900)
    browser.open((site / "search.html").as_uri() + "?q=preemption")
    browser.wait("return document.querySelectorAll('#search-results li a').length > 0")
    assert "preemption" in browser.text("#search-results").lower()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_light_or_dark_as_the_reader_prefers(site: Path, browser: Page, scheme: str) -> None:
    browser.scheme(scheme)
    browser.open((site / "docs" / "index.html").as_uri())
    color = browser.run("return getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", color)[:3]))
    assert (brightness > 382) is (scheme == "light")
