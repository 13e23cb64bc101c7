"""What the tests of the page in a browser share."""

from __future__ import annotations

import shutil

import pytest

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None
)
playwright = pytest.importorskip("playwright.sync_api", reason="Playwright's Python package is not installed")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--autoplay-policy=no-user-gesture-required",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
]

LISTEN = """
(() => {
  const connect = AudioNode.prototype.connect;
  AudioNode.prototype.connect = function (target, ...rest) {
    if (target instanceof AudioDestinationNode) {
      const analyser = new AnalyserNode(this.context, { fftSize: 2048 });
      connect.call(this, analyser);
      (window.analysers ??= []).push(analyser);
    }
    return connect.call(this, target, ...rest);
  };
  window.loudness = () => Math.max(0, ...(window.analysers ?? []).map((analyser) => {
    if (analyser.context.state !== "running") return 0;
    const samples = new Float32Array(analyser.fftSize);
    analyser.getFloatTimeDomainData(samples);
    return Math.max(...samples.map(Math.abs));
  }));
})();
"""
"""Measures what goes to the sound device, without the page's own help."""


def launch(driver):
    """A browser without connections of its own."""
    return driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)


class Pages:
    """Opens the page, and collects what must not happen."""

    def __init__(self, browser, url):
        self._browser, self._url = browser, url
        self.problems: list[str] = []
        self.hosts: set[str] = set()
        self.contexts = []

    def open(self, *, script="", wait=True, **options):
        options = {"locale": "en-US", "viewport": {"width": 1280, "height": 900}} | options
        context = self._browser.new_context(**options)
        context.set_default_timeout(30_000)
        context.add_init_script(LISTEN + script)
        self.contexts.append(context)
        page = context.new_page()
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))
        page.goto(self._url)
        if wait:
            page.wait_for_selector("#dot[data-state=ready]")
        return page

    def _on_console(self, message):
        own = "willReadFrequently" in message.text  # these tests read the pictures
        if message.type in ("error", "warning") and not own:
            self.problems.append(message.text)


def wait_for(page, condition, timeout=30_000):
    """Playwright's own ``wait_for_function`` evaluates strings in the page, which the page's policy forbids."""
    held = page.evaluate(f"""async () => {{
      const end = performance.now() + {timeout};
      while (!({condition})) {{
        if (performance.now() > end) return false;
        await new Promise((done) => setTimeout(done, 10));
      }}
      return true;
    }}""")
    assert held, condition


def wait_for_words(page, selector, words):
    playwright.expect(page.locator(selector)).to_contain_text(words, timeout=30_000)


def speak(page, text="Some words."):
    page.fill("#text", text)
    page.click("#speak")


SOUND = "loudness() > 0.05"
SILENCE = "loudness() < 0.001"
IDLE = "document.querySelector('#speak').dataset.busy === 'false'"
