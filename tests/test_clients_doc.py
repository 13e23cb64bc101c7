"""The blocks of ``docs/clients.md`` (and of the pages on HTTP and WebSocket), as they stand, against ``vivace serve``.

A block whose package is not installed is skipped; ``test_what_is_said_to_be_run_is_run`` keeps the page's table honest.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import soundfile

from tests.helpers import speech_like_wav

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "docs" / name for name in ("clients.md", "http.md", "protocol.md")]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
IN_DEV = {"elevenlabs", "openai", "websockets", "wyoming"}
BY_HAND = {"livekit", "pipecat"}


def blocks(kind: str, pages: list[Path] = PAGES):
    """(name, text) of the blocks of a kind."""
    found = []
    for page in pages:
        texts = [text for this, text in FENCE.findall(page.read_text(encoding="utf-8")) if this == kind]
        found += [pytest.param(text, id=f"{page.stem}-{number}") for number, text in enumerate(texts)]
    return found


def packages(code: str) -> set[str]:
    """Packages of clients that a block imports."""
    names = re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE)
    return set(names) & (IN_DEV | BY_HAND)


@pytest.fixture(scope="module")
def addresses(tmp_path_factory):
    """What stands on the pages → where the server is."""
    command = [sys.executable, "-m", "vivace.cli", "serve", "--port", "0", "--wyoming", "--wyoming-port", "0"]
    environment = {
        **os.environ,
        "VIVACE_VOICES": str(tmp_path_factory.mktemp("voices")),
        "VIVACE_API_KEYS": "",
    }
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        port = re.search(r":(\d+)/", process.stdout.readline())[1]
        wyoming = re.search(r":(\d+)$", process.stdout.readline())[1]
        yield {
            "127.0.0.1:8000": f"127.0.0.1:{port}",
            '"127.0.0.1", 10200': f'"127.0.0.1", {wyoming}',
        }
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(40) == 0
        process.stdout.close()


@pytest.fixture
def run(addresses, tmp_path):
    """Runs a program in a folder with the recordings that the pages speak of."""
    for name in ("me.wav", "i_agree.wav"):
        (tmp_path / name).write_bytes(speech_like_wav())

    def run_in_folder(program: list[str], text: str) -> str:
        done = subprocess.run(
            [*program, _placed(text, addresses)], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr[-2_000:]
        return done.stdout

    return run_in_folder


def _placed(text: str, addresses: dict[str, str]) -> str:
    for written, real in addresses.items():
        text = text.replace(written, real)
    assert ":8000" not in text
    return text


def _check_files(folder: Path) -> int:
    """How many files of audio a block has made; each holds speech."""
    made = [path for path in folder.iterdir() if path.name.startswith(("hello", "speech", "me.mp3"))]
    for path in made:
        if path.suffix == ".pcm":
            samples = np.frombuffer(path.read_bytes(), "<i2") / 32768
        elif path.suffix == ".aac":
            assert path.read_bytes()[0] == 0xFF
            continue
        else:
            with soundfile.SoundFile(path) as file:  # a streamed FLAC does not know where its end is
                samples = file.read(24_000 // 2)
                assert file.samplerate == 24_000
        assert len(samples) > 5_000, path.name
        assert np.abs(samples).max() > 0.03, path.name
    return len(made)


@pytest.mark.parametrize("code", blocks("py"))
def test_programs(run, tmp_path, code):
    needed = packages(code)
    assert needed
    absent = [name for name in needed if find_spec(name) is None]
    if absent:
        assert set(absent) <= BY_HAND
        pytest.skip(f"{absent[0]} is not installed")
    printed = run([sys.executable, "-W", "ignore", "-c"], code)
    has_files = _check_files(tmp_path)
    assert has_files or re.search(r"[1-9]", printed) or "pass" in code or "..." in code
    for number in re.findall(r"(\d+) bytes", printed):
        assert int(number) > 10_000


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("script", blocks("bash"))
def test_curl(run, tmp_path, script):
    if find_spec("av") is None:
        script = script.replace(" aac", "")
    printed = run(["bash", "-ec"], script)
    num_files = _check_files(tmp_path)
    if "for format" in script:
        assert num_files == script.split(";")[0].count(" ") - 2
    elif "sse" in script:
        events = (tmp_path / "events.txt").read_text().split("\n\n")
        assert '"speech.audio.delta"' in events[0]
        assert '"speech.audio.done"' in events[-2]
    elif "voices" in script:
        assert '"id": "anna"' in printed
        assert '"deleted": true' in printed
    else:
        assert num_files == 1


def test_a_browser(addresses):
    from tests.page_browser import CHROMIUM, launch, playwright

    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    [block] = blocks("js")
    code = _placed(block.values[0], addresses)
    with playwright.sync_playwright() as driver:
        browser = launch(driver)
        page = browser.new_page()
        page.goto(f"http://{addresses['127.0.0.1:8000']}/")
        seconds = page.evaluate(f"async () => {{ {code}\n return audio.duration; }}")
        browser.close()
    assert 0.3 < seconds < 10


def test_what_is_said_to_be_run_is_run():
    """Each client of the table has a block here, or is said to be not run."""
    page = PAGES[0].read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| (.+?) \|", page, re.MULTILINE)[1:]
    tried = {client: how for client, how in rows if "---" not in client}
    imported = set().union(*(packages(block.values[0]) for block in blocks("py", PAGES[:1])))
    assert imported == IN_DEV | BY_HAND
    assert list(tried.values()).count("run") == len(IN_DEV) + 2  # curl and the browser
    assert sum(how.startswith("run by hand") for how in tried.values()) == len(BY_HAND)
    assert all(find_spec(name) is not None for name in IN_DEV)
    assert "`tests/test_clients_doc.py`" in page
