"""The page in a headless browser. Needs selenium, Debian's chromium and chromium-driver."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.remote.webelement import WebElement

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1280,800",
)  # fmt: skip


class Page:
    """The page in a browser, with the actions of a user."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str, width: int = 1280, height: int = 800, *, dark: bool = False, still: bool = False) -> None:
        """Opens a URL with empty storage and logs. `still`: the user prefers reduced motion."""
        media = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"},
        ]
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.get("about:blank")
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        self.requested_urls()
        self.console_messages()
        self.driver.get(url)
        self.driver.execute_script("sessionStorage.clear()")
        self.driver.refresh()

    def at(self, name: str) -> WebElement:
        """The element with an id."""
        return self.driver.find_element("id", name)

    def text(self, name: str) -> str:
        return self.at(name).text

    def data(self, name: str) -> int:
        """A data attribute of the tree's canvas; -1: not set yet."""
        return int(self.at("tree").get_attribute(f"data-{name}") or -1)

    def click(self, *names: str) -> None:
        for name in names:
            self.at(name).click()

    def keys(self, name: str, *keys: str) -> None:
        self.at(name).send_keys(*keys)

    def run(self, script: str) -> Any:
        """Returns the result of a script."""
        return self.driver.execute_script(script)

    def picture(self) -> str:
        """The picture of the tree, two frames later."""
        drawn = "done(document.getElementById('tree').toDataURL())"
        frames = f"requestAnimationFrame(() => requestAnimationFrame(() => {drawn}))"
        return self.driver.execute_async_script(f"const done = arguments[0]; {frames}")

    def wait(self, condition: Callable[[], Any], seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "the condition did not become true"
            time.sleep(0.05)  # each poll costs browser time

    def wait_for_text(self, name: str, words: str, seconds: float = 30.0) -> None:
        """Waits until an element contains a text."""
        self.wait(lambda: words in self.text(name), seconds)

    def requested_urls(self) -> set[str]:
        """The URLs that were requested since the last call, without the browser's own pages."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"]
        return {url for url in sent if not url.startswith(("chrome:", "chrome-", "data:", "about:", "blob:"))}

    def console_messages(self) -> list[str]:
        """The messages of the browser's console since the last call, without failed requests."""
        messages = [entry["message"] for entry in self.driver.get_log("browser")]
        return [one for one in messages if "Failed to load resource" not in one]


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[webdriver.Chrome]:
    """A new browser with its profile and downloads in `folder`. Skips the test if no browser is installed."""
    found, control = shutil.which("chromium"), shutil.which("chromedriver")
    if found is None or control is None:
        pytest.skip("no browser: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = found
    for flag in (*FLAGS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(flag)
    options.add_experimental_option("prefs", {"download.default_directory": str(folder)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    made = webdriver.Chrome(options, webdriver.ChromeService(control))
    try:
        yield made
    finally:
        made.quit()
