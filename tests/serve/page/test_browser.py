"""The page in a real browser, with the demo models, scripted engines and recordings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from swiftspec.serve import replay
from swiftspec.serve.middleware.security import SecurityMiddleware
from swiftspec.text.codec import TextCodec
from swiftspec.text.template import TemplateRenderer
from tests.support import synthetic_traces
from tests.support.http import Player, application, serving
from tests.support.server_process import ServerProcess
from tests.support.toy_pair import TEMPLATE, byte_level_tokenizer, write_tokenizer

pytest.importorskip("selenium", reason="selenium is not installed; the extra `test` has it")

from selenium.webdriver.common.keys import Keys

from tests.support.browser import Page, browser

pytestmark = pytest.mark.slow
HOSTILE = '<img src=x onerror="window.hurt=1"><script>window.hurt=1</script>\u202etxet &amp; \x1b[31m'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the browser's profile."""
    return tmp_path_factory.mktemp("browser")


@pytest.fixture(scope="module")
def window(folder: Path) -> Iterator[Page]:
    with browser(folder) as driver:
        yield Page(driver)


@pytest.fixture
def page(window: Page) -> Iterator[Page]:
    """The browser. Checks that its console has no messages and that all requests stay on this machine."""
    yield window
    urls = window.requested_urls()
    assert urls and all(url.startswith(("http://127.0.0.1:", "blob:http://127.0.0.1:")) for url in urls), urls
    assert window.console_messages() == []


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server of the demo models, started by its command. Every round has a tree: no policy that follows measured
    times shrinks it or does without it on a busy machine.
    """
    with ServerProcess(["--no-adapt"]) as server:
        yield server.url


@pytest.fixture(scope="module")
def race(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A recorded race, replayed."""
    file = synthetic_traces.write(
        tmp_path_factory.mktemp("trace") / "race.jsonl", [synthetic_traces.head(), *synthetic_traces.race()]
    )
    with serving(replay.replay_app(file)) as address:
        yield address


def player(folder: Path, **plays: Any) -> FastAPI:
    """A server that plays a scripted text and has no template."""
    made = Player(TextCodec(write_tokenizer(folder, byte_level_tokenizer(), None)), **plays)
    return application(made)


def open_recording(page: Page, name: str) -> None:
    page.driver.find_element("css selector", "#files summary").click()
    page.click(name)


def test_the_page_begins_with_an_empty_chat_and_examples(page: Page, url: str) -> None:
    page.open(url)
    page.wait_for_text("hint", "Python")
    page.wait_for_text("empty", "Send a prompt or choose an example.")
    assert page.text("messages") == page.text("talk-title") == page.text("caption").strip() == ""
    assert not page.at("strip").is_displayed() and not page.at("play").is_displayed()
    assert not page.at("tokens-now").is_displayed() and not page.at("request").is_displayed()
    page.driver.find_element("css selector", "#examples button").click()
    page.wait(lambda: page.data("nodes") > 5 and page.at("play").is_displayed())
    assert page.run("return document.getElementById('lanes').width") > 0
    page.wait_for_text("caption", "from one pass")
    page.wait(lambda: page.at("tokens-now").is_displayed() and page.text("per-round") != "–")


def test_a_tree_expands_and_re_roots_on_the_page(page: Page, url: str) -> None:
    page.open(url)
    page.wait_for_text("hint", "Python")
    open_recording(page, "open-large")
    page.wait_for_text("caption", "Round 1.")
    page.wait(lambda: page.data("nodes") > 20 and page.data("proposed") > 1)
    page.wait_for_text("caption", "Round 3.")
    page.wait_for_text("caption", "from one pass")  # the target has verified: some draft tokens are rejected
    assert "A recording" in page.text("talk-title") and page.at("play").get_attribute("aria-label") == "Pause"
    page.click("play")
    paused = page.picture()
    page.click("back", "on")
    assert page.picture() == paused  # without a transition
    painted = page.run("return performance.getEntriesByName('first-contentful-paint')[0].startTime")
    assert painted > 0  # its speed is measured elsewhere
    assert page.run("return document.documentElement.scrollWidth") <= 1280


def test_a_chat_is_streamed_and_its_rounds_are_shown(page: Page, url: str) -> None:
    page.open(url)
    page.wait_for_text("hint", "Python")
    page.click("tab-race")
    page.keys("composer-text", "def read_lines(path):", Keys.ENTER)
    assert page.at("panel-tree").is_displayed()
    page.wait(lambda: "tokens per second" in page.text("messages") and page.data("nodes") > 5)
    assert "def read_lines(path):" in page.text("messages") and page.text("talk-title") == ""
    assert page.run("return document.querySelectorAll('.message .guessed').length") > 5
    page.run("const s = document.getElementById('scrub'); s.value = 1000; s.dispatchEvent(new Event('input'))")
    page.wait(lambda: page.text("tokens-now") == "256")
    before = page.text("round")
    page.click("back", "back")
    page.wait(lambda: page.text("round") != before)


def test_a_conversation_continues_and_can_be_stopped(page: Page, tmp_path: Path) -> None:
    renderer = TemplateRenderer(Path("model"))
    made = Player(TextCodec(write_tokenizer(tmp_path, byte_level_tokenizer(), TEMPLATE), renderer))
    app = application(made)
    try:
        with serving(app) as address:
            page.open(address)
            page.wait(lambda: page.run("return document.querySelectorAll('#examples button').length"))
            page.keys("composer-text", "one", Keys.ENTER)
            page.wait_for_text("messages", "return a + b")
            page.wait(lambda: page.at("send").is_displayed())
            made.hold = 1
            page.keys("composer-text", "two", Keys.SHIFT, Keys.ENTER, Keys.NULL, "lines", Keys.ENTER)
            page.wait(made.holding.is_set)
            page.click("stop")
            page.wait(lambda: made.cancelled.is_set() and page.at("send").is_displayed())
            page.wait_for_text("messages", "Stopped by you.")
    finally:
        renderer.close()
    prompt = made.codec.token_text(made.requests[1].prompt)
    assert prompt.index("one") < prompt.index("return a + b") < prompt.index("two\nlines")


def test_a_race_shows_that_the_texts_are_equal(page: Page, url: str) -> None:
    page.open(url)
    page.wait_for_text("hint", "Python")
    open_recording(page, "open-large")
    page.wait_for_text("strip-text", "Recording: 70B target, step times emulated")
    assert not page.at("strip-back").is_displayed()
    assert "ms of emulated step times: 212 tokens per second" in page.text("messages")
    page.click("race-this")
    page.wait_for_text("trouble", "Write a text first")
    page.keys("composer-text", "class Stack:")
    page.click("race-this")
    page.wait_for_text("race-result", "The text is the same: all 256 tokens compared, one by one.")
    assert page.at("race-result").get_attribute("data-equal") == "true"
    assert page.text("plain-text") == page.text("fast-text") != ""
    page.click("race-large")
    page.wait_for_text("race-result", "(emulated)")
    page.click("strip-back")
    assert not page.at("strip").is_displayed() and page.at("panel-race").is_displayed()


def test_settings_are_sent_and_errors_are_shown(page: Page, url: str) -> None:
    page.open(url)
    page.wait_for_text("hint", "Python")
    page.driver.find_element("css selector", "#settings summary").click()
    page.run("document.getElementById('max_tokens').value = '12'; document.getElementById('verify_batch').value = '1'")
    page.keys("composer-text", "def f", Keys.ENTER)
    page.wait_for_text("messages", "12 tokens in")
    page.wait_for_text("caption", "Without a draft")
    page.run("document.getElementById('temperature').value = 'hot'")
    page.keys("composer-text", "def f", Keys.ENTER)
    page.wait_for_text("trouble", "Temperature: “hot” is not a number")
    page.wait_for_text("settings-trouble", "“hot”")
    assert page.text("messages").upper().count("YOUR TEXT") == 1 and "wrong" in str(
        page.at("temperature").get_attribute("class")
    )
    page.run("document.getElementById('temperature').value = '-1'")
    page.keys("composer-text", Keys.ENTER)
    page.wait_for_text("trouble", "Temperature:")
    assert page.at("composer-text").get_attribute("value") == "def f"


def test_a_recording_is_played_without_a_model(page: Page, race: str) -> None:
    page.open(race, still=True)
    page.wait_for_text("connection", "a recording")
    page.wait(lambda: page.data("nodes") > 20)
    assert not page.at("composer").is_displayed() and page.at("play").get_attribute("aria-label") == "Play"
    page.click("on")
    page.wait_for_text("caption", "from one pass.")
    page.click("tab-race", "race-again")
    page.wait_for_text("race-result", "times as fast")
    assert "The text is the same" in page.text("race-result")
    assert page.at("panel-race").get_attribute("data-winner") == "fast"


def test_the_page_can_be_used_by_keyboard(page: Page, race: str) -> None:
    page.open(race, still=True)
    page.wait(lambda: page.data("nodes") > 20)
    page.keys("tree", ".")
    page.wait_for_text("caption", "Round 1.")
    page.keys("tree", Keys.ARROW_LEFT, Keys.ARROW_RIGHT)
    page.wait_for_text("tip", "the draft found it")
    tip = page.text("tip")
    page.keys("tree", Keys.ARROW_DOWN, Keys.ARROW_UP, Keys.ARROW_UP)
    page.wait(lambda: page.text("tip") != tip)
    page.keys("tree", " ")
    page.wait(lambda: page.at("play").get_attribute("aria-label") == "Pause")
    page.keys("tab-tree", Keys.ARROW_RIGHT)
    assert page.at("panel-race").is_displayed() and page.run("return document.activeElement.id") == "tab-race"
    names = page.run(
        "return [...document.querySelectorAll('button, input, select, textarea, canvas')]"
        ".filter(e => e.checkVisibility())"
        ".filter(e => !(e.ariaLabel || e.textContent.trim() || e.labels?.length)).map(e => e.id)"
    )
    assert names == []


def test_a_hostile_text_is_not_interpreted_as_markup(page: Page, tmp_path: Path) -> None:
    with serving(player(tmp_path, text=HOSTILE)) as address:
        page.open(address)
        page.wait_for_text("hint", "no chat template")
        page.keys("composer-text", "<b>bold</b>", Keys.ENTER)
        page.wait_for_text("messages", "<script>window.hurt=1</script>")
        assert "<b>bold</b>" in page.text("messages") and "⟨202E⟩txet &amp; ⟨1B⟩[31m" in page.text("messages")
    lines = [
        synthetic_traces.head(texts={str(at): HOSTILE for at in range(len(synthetic_traces.WORDS))}),
        *synthetic_traces.race(4),
    ]
    with serving(replay.replay_app(synthetic_traces.write(tmp_path / "h.jsonl", lines))) as address:
        page.open(address, still=True)
        page.wait(lambda: page.data("nodes") > 20)
        page.keys("tree", ".", Keys.ARROW_LEFT)
        page.wait_for_text("tip", "<img")
        assert page.run("return [window.hurt, document.querySelectorAll('main img, main script').length]") == [None, 0]


def test_the_api_key_is_requested_and_stored_only_for_the_tab(page: Page, tmp_path: Path) -> None:
    with serving(SecurityMiddleware(player(tmp_path), ["secret"])) as address:
        page.open(address)
        page.wait(lambda: page.at("key-dialog").is_displayed())
        page.keys("key", "wrong", Keys.ENTER)
        page.wait_for_text("key-why", "does not accept that key")
        page.keys("key", "secret", Keys.ENTER)
        page.wait_for_text("hint", "no chat template")
        page.keys("composer-text", "def", Keys.ENTER)
        page.wait_for_text("messages", "return a + b")
        assert page.run("return [localStorage.length, document.cookie, location.href]") == [0, "", f"{address}/"]


def test_a_server_that_restarts(page: Page, tmp_path: Path) -> None:
    app = player(tmp_path)
    with serving(app) as address:
        page.open(address)
        page.wait_for_text("connection", "connected")
    page.wait_for_text("connection", "server lost")
    page.keys("composer-text", "def", Keys.ENTER)
    page.wait_for_text("trouble", "The server does not answer.")
    assert page.at("composer-text").get_attribute("value") == "def"
    with serving(player(tmp_path), int(address.rpartition(":")[2])):
        page.wait_for_text("connection", "connected")
        page.wait(lambda: page.text("trouble") == "")
        page.keys("composer-text", Keys.ENTER)
        page.wait_for_text("messages", "return a + b")
        page.wait_for_text("messages", "Ended by itself.")
        page.keys("composer-text", "left")
        page.driver.refresh()
        page.wait_for_text("messages", "return a + b")
        assert page.at("composer-text").get_attribute("value") == "left"


def test_traces_are_opened_and_saved(page: Page, url: str, folder: Path, tmp_path: Path) -> None:
    page.open(url)
    page.wait_for_text("hint", "Python")
    file = synthetic_traces.write(tmp_path / "mine.jsonl", [synthetic_traces.head(), *synthetic_traces.race(6)])
    page.keys("file", str(file))
    page.wait_for_text("talk-title", "mine.jsonl")
    page.driver.find_element("css selector", "#files summary").click()
    page.click("save")
    saved = folder / "swiftspec-trace.jsonl"
    page.wait(saved.exists)
    replay.check_trace(saved)
    assert len(saved.read_text().splitlines()) == len(file.read_text().splitlines())
    page.keys("file", str(synthetic_traces.write(tmp_path / "bad.jsonl", [{"no": "trace"}])))
    page.wait_for_text("trouble", "bad.jsonl cannot be shown: line 1: this is not a trace")


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
@pytest.mark.parametrize("dark", [False, True])
def test_the_layout_fits_both_screen_sizes_and_colour_schemes(
    page: Page, race: str, width: int, height: int, dark: bool
) -> None:
    page.open(race, width, height, dark=dark, still=True)
    page.wait(lambda: page.data("nodes") > 20)
    assert page.run("return document.documentElement.scrollWidth") <= width
    page.click("tab-race")
    assert page.run("return document.documentElement.scrollWidth") <= width
    colour = page.run("return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (sum(colour) < 200) is dark
