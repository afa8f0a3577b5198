"""A real headless browser, driven by the W3C WebDriver protocol, if this machine has one."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from report.browser import find_browser

LIMIT_S = 120.0
_POLL_S = 0.05
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_ARGUMENTS = [
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


class Page:
    """The page of a headless browser."""

    def __init__(self, base: str) -> None:
        self._base = base

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Call one command of the session."""
        return _call(method, f"{self._base}{path}", body)

    def open(self, url: str) -> None:
        """Open a URL."""
        self.call("POST", "/url", {"url": url})

    def url(self) -> str:
        """Return the present URL."""
        return self.call("GET", "/url")

    def run(self, script: str, *args: Any) -> Any:
        """Run a script, and return what it returns."""
        return self.call("POST", "/execute/sync", {"script": script, "args": list(args)})

    def text(self, selector: str = "body") -> str:
        """Return the text of an element as it is shown, or "" if there is none."""
        return self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)

    def wait(self, script: str, *args: Any) -> Any:
        """Wait until a script returns something true, and return it."""
        return wait_until(lambda: self.run(script, *args), lambda: f"{script}\n{self.text()}")

    def size(self, width: int, height: int) -> None:
        """Set the size of the page."""
        size = {"width": width, "height": height}
        self.cdp("Emulation.setDeviceMetricsOverride", **size, deviceScaleFactor=1, mobile=width < 600)

    def scheme(self, value: str) -> None:
        """Set the reader's choice of colours: light or dark."""
        self.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def cdp(self, command: str, **params: Any) -> Any:
        """Call a command of Chromium's own protocol."""
        return self.call("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def console(self) -> list[str]:
        """Return what was written to the console since the last call: errors, and refusals by the policy."""
        return [one["message"] for one in self.call("POST", "/se/log", {"type": "browser"})]


def wait_until(what: Callable[[], Any], describe: Callable[[], str]) -> Any:
    """Wait until something is true, and return it. Polls, as the page does."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        if found := what():
            return found
        assert time.monotonic() < deadline, f"waited in vain for {describe()}"
        time.sleep(_POLL_S)


def missing_browser() -> str:
    """Return why this machine cannot run the tests, or ""."""
    if find_browser() is None:
        return "no Chromium on this machine"
    return "" if shutil.which("chromedriver") else "no chromedriver on this machine"


@contextlib.contextmanager
def browsing(profile: Path) -> Iterator[Page]:
    """Start a browser with an empty profile for the block."""
    driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout is not None
        found = next(filter(None, (re.search(r"successfully on port (\d+)", line) for line in driver.stdout)))
        base = f"http://127.0.0.1:{found[1]}/session"
        options = {"binary": find_browser(), "args": [*_ARGUMENTS, f"--user-data-dir={profile}"]}
        always = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = _call("POST", base, {"capabilities": {"alwaysMatch": always}})
        page = Page(f"{base}/{session['sessionId']}")
        try:
            yield page
        finally:
            page.call("DELETE", "")
    finally:
        driver.terminate()
        driver.communicate()


def _call(method: str, url: str, body: Any = None) -> Any:
    data = None if method != "POST" else json.dumps(body or {}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data=data, method=method, headers=headers)
    try:
        with _DIRECT.open(request, timeout=LIMIT_S) as response:
            return json.load(response)["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(json.load(error)["value"]["message"]) from error
