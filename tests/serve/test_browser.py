"""The web page in headless Chromium: both widths, light and dark, keyboard, API keys, and streams that end early."""

import asyncio
import contextlib
import functools
import re
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from serve_client import NEW, Client, serving

from kvjax.models import Params
from kvjax.serve.settings import digest

pytestmark = pytest.mark.slow
playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra `browser`")
uvicorn = pytest.importorskip("uvicorn", reason="needs the extra `serve`")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SIZES = {"desktop": {"width": 1280, "height": 800}, "phone": {"width": 390, "height": 844}}
KEY, TEXT = "secret", "abcdefghijklmnopqrstuvwxyz" * 2


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed, such as Debian's package `chromium`")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextlib.contextmanager
def on_a_socket(params: Params, **settings: Any) -> Iterator[tuple[Client, str]]:
    """A server with the page that listens, and its address. Its calls are slow enough to watch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvjax.serve.worker.LOOK_SECONDS", 0.0)
        with serving(params, steps=2, page=True, reports=True, **settings) as client:
            serve = client.server.batch.serve
            patch.setattr(client.server.batch, "serve", lambda *x, **y: (time.sleep(0.1), serve(*x, **y))[1])
            server = uvicorn.Server(uvicorn.Config(client.app, port=0, lifespan="off", log_level="warning"))
            server.capture_signals = contextlib.nullcontext
            work = asyncio.run_coroutine_threadsafe(server.serve(), client.loop)
            client.wait_until(lambda: server.started)
            port = server.servers[0].sockets[0].getsockname()[1]
            yield client, f"http://127.0.0.1:{port}/"
            server.should_exit = True
            work.result(60)


@pytest.fixture(scope="module")
def served(letters: Params, chromium: Any) -> Iterator[tuple[Client, str]]:
    with on_a_socket(letters) as found:
        yield found


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Opens pages. None of them may log anything but refusals, or ask another server for anything."""
    pages: list[Any] = []
    said: list[str] = []

    def opened(address: str, size: str = "desktop", scheme: str = "light") -> Any:
        page = chromium.new_page(viewport=SIZES[size], color_scheme=scheme)
        pages.append(page)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: request.url.startswith((address, "data:")) or said.append(request.url))
        page.goto(address)
        return page

    yield opened
    for page in pages:
        page.close()
    assert not [each for each in said if not each.startswith("Failed to load resource: the server responded")]


def say(page: Any, text: str) -> None:
    page.fill("#text", text)
    page.keyboard.press("Enter")


def wait_idle(page: Any) -> None:
    page.wait_for_selector("#send:visible")


def _fulfill(body: str, route: Any) -> None:
    route.fulfill(status=200, body=body)


def answer(page: Any) -> Any:
    return page.locator(".assistant").last


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_a_chat(served: tuple[Client, str], open_page: Any, size: str, scheme: str) -> None:
    client, address = served
    page = open_page(address, size, scheme)
    page.locator("#model", has_text="treekv").wait_for()
    page.fill("#temperature", "0")
    say(page, TEXT)
    page.wait_for_selector("#tokens span.gone")
    early = page.locator("#tokens span").count()
    wait_idle(page)
    expected = client.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}], "temperature": 0}
    ).json
    assert answer(page).locator(".text").text_content() == expected["choices"][0]["message"]["content"]
    drawn = page.locator("#tokens span").count()
    assert drawn == expected["usage"]["total_tokens"] - 1 > early  # it was redrawn while the model wrote
    assert page.locator("#tokens").text_content().startswith(TEXT)
    assert f"of {drawn} tokens kept" in page.locator("#share").text_content()
    assert page.locator("#speed").text_content().endswith(" ms")
    assert page.evaluate("ownbar.offsetWidth < fullbar.offsetWidth")
    # All is within the window, at any width, and the message can be typed at once.
    for selector in ("#send", "#fresh", "#tokens", "#own", "#row", "#temperature", "#most"):
        box = page.locator(selector).bounding_box()
        assert box["x"] >= 0
        assert box["y"] >= 0
        assert box["x"] + box["width"] <= SIZES[size]["width"]
        assert box["y"] + box["height"] <= SIZES[size]["height"]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("document.activeElement.id") == "text"
    colours = "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    ground, ink = (sum(map(int, each[4:-1].split(","))) for each in page.evaluate(colours))
    assert (ground > ink) == (scheme == "light")


def test_the_keyboard_is_enough(served: tuple[Client, str], open_page: Any) -> None:
    page = open_page(served[1])
    page.keyboard.type("ab")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("cd")
    assert page.input_value("#text") == "ab\ncd"
    page.keyboard.press("Control+a")
    page.keyboard.type("abcd")
    page.keyboard.press("Enter")
    wait_idle(page)
    assert page.locator(".user .text").text_content() == "abcd"
    order = [page.evaluate("document.activeElement.id")]
    for _ in range(4):
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.id"))
    assert order == ["text", "send", "temperature", "most", "tokens"]
    assert page.evaluate("parseFloat(getComputedStyle(document.activeElement).outlineWidth)") >= 2
    page.focus("#fresh")
    page.keyboard.press("Enter")
    assert page.locator(".turn").count() == page.locator("#tokens span").count() == 0


def test_an_answer_that_is_stopped_is_kept_and_frees_its_row(served: tuple[Client, str], open_page: Any) -> None:
    client, address = served
    page = open_page(address)
    page.fill("#temperature", "0")
    body = {"messages": [{"role": "user", "content": TEXT}], "temperature": 0}
    whole = client.post("/v1/chat/completions", body).json["choices"][0]["message"]["content"]
    assert len(whole) > NEW - 4
    say(page, TEXT)
    answer(page).locator(".text", has_text=re.compile("..")).wait_for()
    page.keyboard.press("Escape")
    wait_idle(page)
    assert "Stopped." in answer(page).text_content()
    text = answer(page).locator(".text").text_content()
    assert whole.startswith(text)
    assert 0 < len(text) < len(whole)
    client.wait_until(lambda: client.server.admitted == 0 and not client.server.worker.scheduler.busy)
    say(page, "d")
    wait_idle(page)
    assert page.locator("#tokens").text_content().startswith(f"{TEXT} {text} d ")


def test_a_stream_that_breaks_off_and_one_that_fails(served: tuple[Client, str], open_page: Any) -> None:
    _, address = served
    page = open_page(address)
    head = 'data: {"choices": [{"index": 0, "delta": {"content": "ab"}, "finish_reason": null}]}\n\n'
    for body, words in (
        (head, "the connection ended before the answer did"),
        (head + 'data: {"error": {"message": "the server failed"}}\n\n', "the server failed"),
    ):
        page.route("**/v1/chat/completions", functools.partial(_fulfill, body))
        say(page, "a")
        wait_idle(page)
        assert words in answer(page).locator(".end.wrong").text_content()
        assert answer(page).locator(".text").text_content() == "ab"
        page.unroute("**/v1/chat/completions")
    say(page, "d" * 1000)  # refused before a stream begins: the message comes back
    wait_idle(page)
    assert "characters, which are more than" in answer(page).text_content()
    assert page.input_value("#text") == "d" * 1000


def test_a_server_with_keys_asks_for_one(letters: Params, open_page: Any) -> None:
    with on_a_socket(letters, keys=frozenset({digest(KEY)})) as (_, address):
        page = open_page(address, "phone")
        page.wait_for_selector("#key:visible")
        page.fill("#key", "wrong")
        say(page, "a")
        wait_idle(page)
        assert "no valid API key" in answer(page).text_content()
        page.fill("#key", KEY)
        say(page, "a")
        wait_idle(page)
        assert not answer(page).locator(".wrong").count()
        assert "treekv" in page.locator("#model").text_content()
