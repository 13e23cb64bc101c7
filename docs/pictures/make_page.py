"""Takes the pictures of the page from a running server, in headless Chromium.

vivace serve &
python docs/pictures/make_page.py http://127.0.0.1:8000/
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

FLAGS = ["--no-sandbox", "--disable-gpu", "--autoplay-policy=no-user-gesture-required"]
TEXT = "Hello! It is 8:05, and I can speak while I think. Type anything you like, and press Speak."
PICTURES: list[tuple[str, dict[str, Any]]] = [
    (
        "page-light.png",
        {"color_scheme": "light", "locale": "en-US", "viewport": {"width": 1160, "height": 960}},
    ),
    (
        "page-dark.png",
        {"color_scheme": "dark", "locale": "zh-CN", "viewport": {"width": 1160, "height": 960}},
    ),
    (
        "page-phone.png",
        {"color_scheme": "light", "locale": "ru-RU", "viewport": {"width": 390, "height": 960}},
    ),
]


def take(page: Page, url: str, path: Path) -> None:
    """Speaks twice (the first request warms the engine) and takes the picture while the second one is heard."""
    page.goto(url)
    page.wait_for_selector("#dot[data-state=ready]")
    page.fill("#text", TEXT)
    page.click("#speak")
    page.wait_for_selector("#download:enabled")
    page.click("#speak")  # stop
    page.click("#speak")
    page.wait_for_selector("#download:disabled")
    page.wait_for_selector("#download:enabled")
    page.mouse.move(0, 0)
    page.wait_for_timeout(800)
    page.screenshot(path=path, full_page=True)


def main(url: str) -> None:
    """All pictures, beside this file."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        for name, options in PICTURES:
            page = browser.new_page(**options)
            take(page, url, Path(__file__).parent / name)
            page.close()
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1])
