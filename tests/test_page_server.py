"""The page in a browser against the real server with the embedded model."""

from __future__ import annotations

import asyncio
import io
import socket
import threading
import wave

import httpx
import numpy as np
import pytest

from tests.page_browser import (
    IDLE,
    SILENCE,
    SOUND,
    Pages,
    launch,
    needs_chromium,
    playwright,
    speak,
    wait_for,
    wait_for_words,
)
from vivace.config import ServerConfig
from vivace.engine import AsyncEngine
from vivace.server.app import create_app
from vivace.server.local import LocalService
from vivace.server.run import make_server

pytestmark = needs_chromium
KEY = "a-key-for-tests"


class RealServer:
    """The application over the embedded model, in a thread with an event loop of its own."""

    def __init__(self, voices_folder) -> None:
        self._voices_folder = voices_folder
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._ready.wait(60)
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error
            self._ready.set()

    async def _serve(self) -> None:
        config = ServerConfig(api_keys=(KEY,))
        engine = await AsyncEngine.open("mini", voices_folder=self._voices_folder)
        service = LocalService(engine)
        app = create_app(service, config)
        self._server = make_server(app, config, app.state.metrics)
        startup = self._server.startup

        async def tell(sockets=None):
            await startup(sockets)
            self._ready.set()

        self._server.startup = tell
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
            try:
                await self._server.serve(sockets=[listener])
            finally:
                await service.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = RealServer(tmp_path_factory.mktemp("voices"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = launch(driver)
        yield browser
        browser.close()


@pytest.fixture
def page(browser, server):
    """The page with the key entered."""
    pages = Pages(browser, server.url)
    page = pages.open(wait=False)
    wait_for_words(page, "#state", "API key needed")
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    wait_for_words(page, "#state", "Ready · vivace-mini")
    pages.problems.clear()  # the browser notes the 401
    yield page
    pages.contexts[0].close()
    assert pages.problems == []
    assert pages.hosts == {server.url.split("/")[2]}


def test_headers_of_the_document_and_its_files(server):
    for path in ("", "static/js/main.js"):
        answer = httpx.get(server.url + path)
        assert answer.status_code == 200
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["etag"]
    assert "content-security-policy" in httpx.get(server.url).headers
    assert httpx.get(server.url + "static/..%2fpage.py").json()["error"]["code"] == "not_found"
    assert httpx.get(server.url + "v1/audio/voices").status_code == 401


def downloaded(page):
    with page.expect_download() as found:
        page.click("#download")
    return found.value.path().read_bytes()


def test_embedded_model_is_heard_measured_and_kept(page):
    speak(page, "Hello there, this is a test.")
    wait_for(page, SOUND, timeout=20_000)
    wait_for(page, IDLE, timeout=20_000)
    wait_for_words(page, "#state", "Done: ")
    figures = {name: page.inner_text(f"#figure-{name}") for name in ("ttfb", "heard", "rtf", "tps", "audio")}
    assert all(words[0].isdigit() for words in figures.values()), figures
    assert page.locator("#chunk-rows tr").count() >= 2
    with wave.open(io.BytesIO(downloaded(page))) as file:
        heard = np.frombuffer(file.readframes(file.getnframes()), np.int16)
        assert abs(len(heard) / file.getframerate() - float(figures["audio"].split()[0])) < 0.06
    page.select_option("#format", "flac")
    assert downloaded(page)[:4] == b"fLaC"


def test_stop_ends_the_request_and_errors_are_explained(page):
    speak(page, "This is a long sentence, and it goes on and on, until somebody stops it. " * 3)
    wait_for(page, SOUND, timeout=20_000)
    page.keyboard.press("Escape")
    wait_for(page, SILENCE, timeout=3_000)
    speak(page, "!!!")
    wait_for_words(page, "#alert", "This text holds nothing that the model can speak.")
    wait_for_words(page, "#alert-advice", "Server: ")


def test_typed_words_are_heard(page):
    page.fill("#text", "")
    page.check("#typing")
    page.keyboard.type("Hello there, my friend. ")
    page.keyboard.press("Enter")
    wait_for(page, SOUND, timeout=20_000)
    wait_for(page, IDLE, timeout=20_000)
    wait_for_words(page, "#state", "Done: ")


def test_voice_from_a_recording(page):
    speak(page, "My voice is my passport, and this is a copy of it.")
    wait_for(page, "!document.getElementById('download').disabled", timeout=20_000)
    page.keyboard.press("Escape")
    recording = {"name": "copy.wav", "mimeType": "audio/wav", "buffer": downloaded(page)}
    page.click("#new-voice")
    page.fill("#voice-name", "copy")
    page.set_input_files("#voice-file", recording)
    page.fill("#voice-text", "My voice is my passport, and this is a copy of it.")
    page.check("#consent")
    page.click("#voice-save")
    wait_for(page, "document.querySelector('input[value=copy]')?.checked", timeout=20_000)
    speak(page, "Yes.")
    wait_for(page, SOUND, timeout=20_000)
    page.keyboard.press("Escape")
    page.click("#delete-voice")
    page.click("#confirm button[value=yes]")
    wait_for_words(page, "#state", "The voice was deleted.")
