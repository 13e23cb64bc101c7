"""The page in a real browser (headless Chromium), against a small server that says what each test needs."""

from __future__ import annotations

import io
import struct
import wave

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
from tests.page_fake import CHUNK, RATE, Fake, Running, make_app, tone

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def fake():
    return Fake()


@pytest.fixture(scope="module")
def server(fake):
    server = Running(make_app(fake))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = launch(driver)
        yield browser
        browser.close()


@pytest.fixture
def pages(browser, server, fake):
    fake.reset()
    pages = Pages(browser, server.url)
    yield pages
    for context in pages.contexts:
        context.close()
    assert pages.problems == []
    assert pages.hosts <= {f"127.0.0.1:{server.port}"}


# Hearing


def test_speaks_draws_and_measures(pages, fake):
    page = pages.open()
    assert page.is_visible("#empty")
    speak(page, "It speaks.")
    wait_for(page, SOUND)
    wait_for_words(page, "#state", "Speaking")
    assert page.inner_text("#speak") == "Stop"
    wait_for(page, IDLE)
    wait_for_words(page, "#state", "Done: 1.50 s of audio in 315 ms")
    figures = {name: page.inner_text(f"#figure-{name}") for name in ("ttfb", "heard", "rtf", "tps", "audio")}
    assert figures.pop("heard").endswith(" ms")
    assert figures == {"ttfb": "120 ms", "rtf": "0.21", "tps": "400", "audio": "1.5 s"}
    assert page.inner_text("#clock") == "0:01 / 0:01"
    assert page.inner_text("#chunk-note").startswith("Chunk 3: LM 30 ms, flow 50 ms, vocoder 15 ms")
    assert page.locator("#chunk-rows tr").count() == 3
    for canvas in ("wave", "spectrogram", "timeline"):
        assert page.evaluate(PAINTED, canvas) > 0.01
    assert page.get_attribute("#wave", "aria-label") == "Waveform of 1.5 seconds of audio"
    assert page.get_attribute("#timeline", "aria-label").startswith("Timeline: 3 chunks in 320 ms")
    config, text, done, *_ = fake.sessions[-1]
    assert config == {
        "type": "session.config",
        "response_format": "pcm",
        "timing": True,
        "speed": 1,
        "seed": 0,
        "voice": "heart",
    }
    assert text == {"type": "input.text", "text": "It speaks."}
    assert done == {"type": "input.done"}


PAINTED = """(id) => {
  const canvas = document.getElementById(id);
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let painted = 0;
  for (let i = 3; i < data.length; i += 4) painted += data[i] > 0;
  return painted / (canvas.width * canvas.height);
}"""


def test_figures_and_pictures_grow_while_audio_arrives(pages, fake):
    fake.chunks, fake.gap_s = 4, 0.3
    page = pages.open()
    speak(page)
    seen = []
    for count in (1, 2, 3):
        wait_for(page, f"document.querySelectorAll('#chunk-rows tr').length >= {count}")
        seen.append((float(page.inner_text("#figure-audio").split()[0]), page.evaluate(PAINTED, "wave")))
    assert seen == sorted(seen)
    assert seen[0] < seen[-1]
    page.keyboard.press("Escape")


def test_stop_is_silent_at_once_and_cancels(pages, fake):
    fake.endless, fake.gap_s = True, 0.02
    page = pages.open()
    speak(page, "Long.")
    wait_for(page, SOUND)
    wait_for(page, "document.querySelectorAll('#chunk-rows tr').length >= 30")  # far more than is heard below
    page.keyboard.press("Escape")
    wait_for(page, SILENCE, timeout=5_000)
    wait_for_words(page, "#state", "Stopped")
    assert page.inner_text("#speak") == "Speak"
    assert page.input_value("#text") == "Long."
    assert fake.cancelled == 1
    assert page.is_enabled("#download")  # what was made can be kept
    page.click("#speak")
    wait_for(page, SOUND)
    wait_for(page, "document.querySelectorAll('#chunk-rows tr').length >= 30")
    page.click("#speak")
    wait_for(page, SILENCE, timeout=5_000)
    assert fake.cancelled == 2


def test_pause_seek_and_play_again(pages, fake):
    fake.chunks = 8
    page = pages.open()
    speak(page)
    wait_for(page, SOUND)
    page.click("#play")
    wait_for_words(page, "#state", "Paused")
    wait_for(page, SILENCE)
    page.focus("#position")
    wait_for(
        page, "document.querySelector('#position').getAttribute('aria-valuetext').includes('of 4.0 seconds')"
    )
    page.keyboard.press("End")
    page.keyboard.press("PageDown")
    assert 1 < float(page.input_value("#position")) < 4
    assert "of 4.0 seconds" in page.get_attribute("#position", "aria-valuetext")
    page.click("#play")
    wait_for(page, IDLE)
    wait_for(page, SILENCE)
    page.click("#play")
    wait_for(page, SOUND)
    assert page.get_attribute("#play", "aria-label") == "Pause"
    assert len(fake.sessions) == 1  # heard again without being made again


def test_slow_server_gives_gaps_that_are_named(pages, fake):
    fake.chunks, fake.gap_s = 2, 0.9
    page = pages.open()
    speak(page)
    wait_for_words(page, "#gaps", "Pauses in playback: 1.")
    wait_for(page, IDLE)


def test_page_without_a_worklet_plays_too(pages, fake):
    """Browsers offer no AudioWorklet where the page comes over plain http from another machine."""
    page = pages.open(
        script="Object.defineProperty(BaseAudioContext.prototype, 'audioWorklet', { get: () => undefined });"
    )
    speak(page)
    wait_for(page, SOUND)
    wait_for_words(page, "#figure-heard", " ms")
    wait_for(page, IDLE)
    wait_for(page, SILENCE)
    page.click("#play")
    wait_for(page, SOUND)
    page.keyboard.press("Escape")
    wait_for(page, SILENCE)


def test_long_text_is_spoken_in_parts_that_follow_each_other(pages, fake):
    fake.chunks = 1
    page = pages.open()
    text = "".join(f"This is sentence number {n} of a very long text. " for n in range(400))
    speak(page, text)
    wait_for(page, IDLE)
    assert "".join(m["text"] for s in fake.sessions for m in s if m["type"] == "input.text") == text
    assert len(fake.sessions) == 3
    assert all(len(session[1]["text"].encode()) <= 32 * 1024 for session in fake.sessions)
    assert page.inner_text("#clock").endswith("0:01")  # 3 × 0.5 s


def test_stop_before_the_connection_stands(pages, fake):
    fake.endless = True
    page = pages.open()
    page.fill("#text", "Never mind.")
    page.evaluate("document.getElementById('speak').click(), document.getElementById('speak').click()")
    wait_for_words(page, "#state", "Stopped")
    speak(page, "This one.")
    wait_for(page, SOUND)
    assert sent(fake) == ["This one."]
    page.keyboard.press("Escape")


# Settings, voices, files


def test_settings_reach_the_server(pages, fake):
    page = pages.open()
    wait_for(page, "document.querySelector('input[value=heart]')?.checked")  # the model's own choice
    page.click("#more summary")
    page.check("input[value=puck]")
    page.fill("#speed", "1.5")
    page.fill("#seed", "7")
    page.fill("#instructions", "Softly")
    page.select_option("#language", "de")
    page.focus("#text")
    page.fill("#text", "Guten Tag.")
    page.keyboard.press("Control+Enter")
    wait_for(page, SOUND)
    wanted = {"voice": "puck", "speed": 1.5, "seed": 7, "instructions": "Softly", "language": "de"}
    assert wanted.items() <= fake.sessions[-1][0].items()
    page.reload()
    assert page.is_checked("input[value=puck]")
    assert page.input_value("#speed") == "1.5"
    assert page.input_value("#text") == "Guten Tag."


def recording() -> dict:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, RATE, 0, "NONE", ""))
        out.writeframes(tone(2.0))
    return {"name": "me.wav", "mimeType": "audio/wav", "buffer": file.getvalue()}


def test_upload_of_a_voice_and_its_removal(pages, fake):
    page = pages.open()
    page.click("#new-voice")
    assert page.evaluate("document.activeElement.id") == "voice-name"
    for words, step in [
        ("Give the voice a name", lambda: page.fill("#voice-name", "Me")),
        ("Record something or choose", lambda: page.set_input_files("#voice-file", recording())),
        ("Write what is said", lambda: page.fill("#voice-text", "My own words.")),
        ("only with the consent", lambda: page.check("#consent")),
    ]:
        page.click("#voice-save")
        wait_for_words(page, "#voice-problem", words)
        step()
    assert fake.uploads == []
    page.click("#voice-save")
    wait_for_words(page, "#state", "The voice “me” is ready.")
    assert not page.is_visible("#voice-dialog")
    upload = fake.uploads[0]
    assert upload.pop("audio") == recording()["buffer"]
    assert upload == {"name": "me", "ref_text": "My own words.", "consent": "true"}
    assert page.is_checked("input[value=me]")
    page.click("#delete-voice")
    wait_for_words(page, "#confirm-text", "“me”")
    page.click("#confirm button[value=yes]")
    wait_for_words(page, "#state", "The voice was deleted.")
    assert page.locator("#voice-pills input").count() == 4


def test_refused_upload_says_why_and_keeps_what_was_entered(pages, fake):
    fake.upload_error = (400, "audio_silent")
    page = pages.open()
    page.click("#new-voice")
    page.fill("#voice-name", "me")
    page.set_input_files("#voice-file", recording())
    page.fill("#voice-text", "Words.")
    page.check("#consent")
    page.click("#voice-save")
    wait_for_words(page, "#voice-problem", "The recording is silent. Check the microphone.")
    wait_for_words(page, "#voice-problem", "Server: The server's advice.")
    assert page.input_value("#voice-text") == "Words."
    pages.problems.clear()  # the browser itself notes the status 400


def test_recording_of_a_voice(pages, fake):
    page = pages.open()
    page.click("#new-voice")
    page.fill("#voice-name", "me")
    page.click("#record")
    wait_for_words(page, "#source-note", "Recording: 1 of 30 seconds")
    page.click("#record")
    wait_for_words(page, "#source-note", "Recorded: 1")
    assert page.input_value("#voice-text").startswith("The quick brown fox")
    page.check("#consent")
    page.click("#voice-save")
    wait_for_words(page, "#state", "is ready")
    with wave.open(io.BytesIO(fake.uploads[0]["audio"])) as file:
        samples = struct.unpack(f"<{file.getnframes()}h", file.readframes(file.getnframes()))
        assert (file.getnchannels(), file.getsampwidth()) == (1, 2)
        assert len(samples) >= file.getframerate()
    assert max(map(abs, samples)) > 1_000  # the fake microphone beeps once a second


def test_many_voices_are_a_list(pages, fake):
    fake.voices += [{"id": f"voice-{n}", "kind": "stored"} for n in range(20)]
    page = pages.open()
    page.select_option("#voice-select", "voice-7")
    assert page.is_visible("#delete-voice")
    assert page.locator("#voice-select optgroup").evaluate_all("all => all.map(g => g.label)") == [
        "Built-in",
        "Your voices",
    ]


def test_download(pages, fake):
    fake.chunks = 2
    page = pages.open()
    assert not page.is_visible("#download")
    page.click("#more summary")
    page.fill("#seed", "5")
    speak(page, "Keep this.")
    wait_for(page, IDLE)
    with page.expect_download() as found:
        page.click("#download")
    assert found.value.suggested_filename == "vivace.wav"
    with wave.open(str(found.value.path())) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE, 1, 2)
        assert file.readframes(file.getnframes()) == CHUNK * 2
    page.fill("#text", "Something else.")
    page.select_option("#format", "flac")
    with page.expect_download() as found:
        page.click("#download")
    assert found.value.suggested_filename == "vivace.flac"
    assert found.value.path().read_bytes().startswith(b"fLaC")
    wanted = {"input": "Keep this.", "response_format": "flac", "seed": 5, "voice": "heart"}
    assert wanted.items() <= fake.speech[0].items()


# Typing


def test_speaks_as_words_are_typed(pages, fake):
    fake.chunks = 1
    page = pages.open()
    page.fill("#text", "")
    page.check("#typing")
    assert page.evaluate("document.activeElement.id") == "text"
    page.keyboard.type("Hello wor")
    wait_for(page, SOUND)
    assert sent(fake) == ["Hello "]
    page.keyboard.type("ld, it is 3.5 now")
    wait_for_words(page, "#spoken", "Hello world, it is 3.5 ")
    assert page.input_value("#text") == "now"
    page.keyboard.press("Enter")
    wait_for(page, IDLE)
    assert sent(fake) == ["Hello ", "world,", " ", "it ", "is ", "3.5 ", "now"]
    assert [message["type"] for message in fake.sessions[-1]].count("input.done") == 1
    wait_for(page, SILENCE)
    page.keyboard.type("Again. ")
    wait_for(page, SOUND)
    page.keyboard.press("Escape")
    page.uncheck("#typing")
    assert page.input_value("#text") == "Hello world, it is 3.5 now\nAgain. "
    assert len(fake.sessions) == 2


def sent(fake):
    return [message["text"] for message in fake.sessions[-1] if message["type"] == "input.text"]


def test_composed_letters_are_sent_when_they_are_chosen(pages, fake):
    fake.chunks = 1
    page = pages.open()
    page.fill("#text", "")
    page.check("#typing")
    page.evaluate("""() => {
      const text = document.getElementById("text");
      text.dispatchEvent(new CompositionEvent("compositionstart"));
      text.value = "ni hao";
      text.dispatchEvent(new InputEvent("input", { isComposing: true }));
    }""")
    assert fake.sessions == []
    page.evaluate("""() => {
      const text = document.getElementById("text");
      text.value = "你好";
      text.dispatchEvent(new CompositionEvent("compositionend"));
    }""")
    wait_for(page, SOUND)
    assert sent(fake) == ["你好"]


# Errors and restarts


@pytest.mark.parametrize(
    ("locale", "words", "advice"),
    [
        ("en-GB", "This text holds nothing that the model can speak.", "Server: Write words."),
        ("zh-CN", "文本中没有模型能读出的内容。", "服务器：Write words."),
        ("ru-RU", "В тексте нет ничего, что модель может произнести.", "Сервер: Write words."),
    ],
)
def test_errors_are_words_of_the_page_with_the_server_s_advice(pages, fake, locale, words, advice):
    fake.speech_error = {"code": "unpronounceable_input", "message": "Write words."}
    page = pages.open(locale=locale)
    speak(page, "!!!")
    wait_for_words(page, "#alert[role=alert]", words)
    wait_for_words(page, "#alert-advice", advice)
    assert page.input_value("#text") == "!!!"
    assert page.get_attribute("#speak", "data-busy") == "false"
    page.click("#alert-close")
    assert not page.is_visible("#alert")


def test_words_that_were_not_spoken_are_named(pages, fake):
    fake.skipped_text = ["你好", "мир"]
    page = pages.open()
    speak(page, "Hello, 你好 and мир.")
    wait_for_words(page, "#alert-text", "Some words were not spoken: this model cannot read them.")
    wait_for_words(page, "#alert-advice", "Server: 你好 | мир")


def test_empty_text_and_unknown_errors(pages, fake):
    page = pages.open()
    speak(page, "  ")
    wait_for_words(page, "#alert", "There is no text to speak.")
    assert fake.sessions == []
    fake.speech_error = {"code": "something_new", "message": "Turn it off and on."}
    speak(page, "Words.")
    wait_for_words(page, "#alert", "Something went wrong.")
    wait_for_words(page, "#alert", "Turn it off and on.")


def test_audio_that_breaks_off_is_named_and_kept(pages, fake):
    fake.chunks, fake.cut_after = 4, 2
    page = pages.open()
    speak(page)
    wait_for_words(page, "#alert", "The audio ended early")
    wait_for(page, IDLE)
    assert page.inner_text("#clock").endswith("0:01")
    assert page.is_enabled("#download")


def test_reconnects_after_the_server_went_away(pages, fake, server):
    page = pages.open()
    page.fill("#text", "Precious words.")
    server.stop()
    try:
        page.click("#speak")
        wait_for_words(page, "#alert", "The connection to the server broke. Your text is kept")
        wait_for_words(page, "#state", "No answer from the server")
    finally:
        server.start()
    wait_for_words(page, "#state", "The engine is back.")
    assert not page.is_visible("#alert")
    assert page.input_value("#text") == "Precious words."
    page.click("#speak")
    wait_for(page, SOUND)
    assert sent(fake) == ["Precious words."]
    page.keyboard.press("Escape")
    pages.problems[:] = [words for words in pages.problems if "ERR_CONNECTION" not in words]


def test_engine_restarts(pages, fake):
    fake.ready = False
    fake.speech_error = {"code": "engine_restarting", "message": "Try again in a second."}
    page = pages.open(wait=False)
    wait_for_words(page, "#state", "The engine restarts. Your text is kept.")
    speak(page, "Kept.")
    wait_for_words(page, "#alert", "The engine restarts.")
    fake.ready, fake.speech_error = True, None
    wait_for_words(page, "#state", "The engine is back.")
    assert page.input_value("#text") == "Kept."
    pages.problems[:] = [words for words in pages.problems if "503" not in words]


def test_engine_restarts_in_the_midst_of_speech(pages, fake):
    fake.chunks, fake.cut_after, fake.ready = 4, 2, False
    fake.cut_error = {"type": "error", "code": "engine_restarting", "message": "Again, please."}
    page = pages.open(wait=False)
    speak(page)
    wait_for_words(page, "#alert-text", "The engine restarts. Your text is kept. The audio ended early")
    fake.ready = True
    wait_for_words(page, "#state", "The engine is back.")
    wait_for_words(page, "#alert", "The audio ended early; what you hear is not complete.")
    assert "restarts" not in page.inner_text("#alert")
    pages.problems[:] = [words for words in pages.problems if "503" not in words]


def test_key_is_asked_for_and_stays_in_the_tab(pages, fake):
    fake.key = "geheim-ключ"
    page = pages.open(wait=False)
    wait_for_words(page, "#state", "API key needed")
    wait_for(page, "document.activeElement.id === 'key'")
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    wait_for_words(page, "#alert", "does not know this one")
    page.set_extra_http_headers({})
    page.fill("#key", "geheim-ключ")
    page.keyboard.press("Enter")
    page.wait_for_selector("#dot[data-state=ready]")
    assert not page.is_visible("#key-form")
    speak(page)
    wait_for(page, SOUND)
    assert page.evaluate("JSON.stringify({ ...localStorage })").count("geheim") == 0
    assert page.evaluate("sessionStorage.getItem('vivace.key')") == "geheim-ключ"
    pages.problems[:] = [words for words in pages.problems if "401" not in words]


# Languages, colours, access


def test_language_switch(pages):
    page = pages.open(locale="ru-RU")
    assert page.evaluate("document.documentElement.lang") == "ru"
    assert page.inner_text("#speak") == "Озвучить"
    page.select_option("#page-language", "zh")
    assert page.evaluate("document.documentElement.lang") == "zh-Hans"
    assert page.inner_text("#speak") == "朗读"
    assert page.title() == "Vivace – 语音合成"
    assert page.get_attribute("#theme", "aria-label") == "深色"
    assert page.locator("#language option").nth(1).text_content() == "中文"
    page.reload()
    page.wait_for_selector("#dot[data-state=ready]")
    assert page.inner_text("#speak") == "朗读"
    other = pages.open(locale="fr-FR")
    assert other.inner_text("#speak") == "Speak"


def test_colours_follow_the_system_until_the_switch_is_used(pages):
    page = pages.open(color_scheme="dark")
    theme = "document.documentElement.dataset.theme"
    assert page.evaluate(theme) == "dark"
    page.emulate_media(color_scheme="light")
    wait_for(page, f"{theme} === 'light'")
    page.click("#theme")
    assert page.evaluate(theme) == "dark"
    assert page.get_attribute("#theme", "aria-pressed") == "true"
    page.emulate_media(color_scheme="light")
    page.reload()
    assert page.evaluate(theme) == "dark"


CONTRAST = """() => {
  const light = (c) => {
    const [r, g, b] = c.map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const c = rgb(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] === 1) return c;
    }
  };
  const found = [];
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!(own || e.matches("select, input, textarea")) || !e.checkVisibility() || e.closest(":disabled")) continue;
    const [a, b] = [light(rgb(getComputedStyle(e).color)), light(behind(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    found.push([ratio, `${e.tagName}#${e.id}.${e.className} ${e.textContent.slice(0, 30)}`]);
  }
  return found.sort((x, y) => x[0] - y[0]);
}"""

UNNAMED = """() => [...document.querySelectorAll(
    "button, input, select, textarea, meter, audio, canvas, summary, dialog")]
  .filter((e) => !(e.ariaLabel || e.labels?.[0]?.textContent.trim() || e.textContent.trim() && !e.matches("select")
    || e.getAttribute("aria-labelledby") || e.querySelector("[id]")?.textContent.trim()))
  .map((e) => `${e.tagName}#${e.id}`)"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_contrast(pages, fake, theme):
    fake.chunks = 1
    page = pages.open(color_scheme=theme)
    page.click("#more summary")
    speak(page)
    wait_for(page, IDLE)
    page.click(".chunks summary")
    page.fill("#text", "")
    page.click("#speak")
    page.mouse.move(0, 0)
    for dialog in (None, "#new-voice"):
        if dialog:
            page.click(dialog)
            page.click("#voice-save")
        found = page.evaluate(CONTRAST)
        assert len(found) > 30
        assert found[0][0] >= 4.5, found[:3]


def test_everything_has_a_name_and_a_place_in_the_order(pages, fake):
    fake.chunks = 1
    page = pages.open()
    speak(page)
    wait_for(page, IDLE)
    page.click("#more summary")
    assert page.evaluate(UNNAMED) == []
    page.focus("#page-language")
    page.keyboard.press("Shift+Tab")
    order = []
    while (name := page.evaluate(FOCUSED)) != "BODY":
        order.append(name)
        assert page.evaluate(FOCUS_IS_SEEN), " ".join(order)
        page.keyboard.press("Tab")
    assert order == [
        *(
            "A.skip",
            "page-language",
            "theme",
            "text",
            "speak",
            "typing",
            "INPUT.heart",
            "new-voice",
            "speed",
        ),
        *("SUMMARY", "instructions", "language", "seed", "dice"),
        *("play", "format", "download", "position", "SUMMARY"),
    ]
    assert page.locator("[role=status]").count() >= 1
    assert page.locator("[role=alert]").count() >= 1
    assert page.locator("h1").count() == 1
    assert page.locator("main").count() == 1


FOCUSED = """() => {
  const e = document.activeElement;
  return e.id || [e.tagName, e.value || e.className].filter(Boolean).join(".");
}"""

FOCUS_IS_SEEN = """() => {
  for (let e = document.activeElement; e && e !== document.body; e = e.parentElement) {
    const style = getComputedStyle(e);
    if (style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2) return true;
  }
  return false;
}"""


def test_skip_link_dialog_and_focus(pages):
    page = pages.open()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.keyboard.type("x")
    assert "x" in page.input_value("#text")
    page.focus("#new-voice")
    page.keyboard.press("Enter")
    assert page.is_visible("#voice-dialog")
    page.keyboard.press("Escape")
    assert not page.is_visible("#voice-dialog")
    assert page.evaluate("document.activeElement.id") == "new-voice"


def test_reduced_motion(pages, fake):
    fake.endless = True
    page = pages.open(reduced_motion="reduce")
    speak(page)
    wait_for(page, SOUND)
    assert page.evaluate("document.getAnimations().length") == 0
    page.emulate_media(reduced_motion="no-preference")
    assert page.evaluate("document.getAnimations().length") > 0
    page.keyboard.press("Escape")


@pytest.mark.parametrize("locale", ["en-US", "zh-CN", "ru-RU"])
def test_fits_a_phone(pages, fake, locale):
    page = pages.open(locale=locale, viewport={"width": 320, "height": 640}, has_touch=True)
    page.click("#more summary")
    speak(page)
    wait_for(page, SOUND)
    page.click(".chunks summary")
    assert page.evaluate("document.documentElement.scrollWidth") == 320
    page.keyboard.press("Escape")
    page.click("#new-voice")
    assert page.evaluate("document.querySelector('dialog[open]').getBoundingClientRect().right") <= 320
    small = page.evaluate(
        "[...document.querySelectorAll('button, select, .pill')].filter(e => e.checkVisibility() "
        "&& e.getBoundingClientRect().height < 32).map(e => e.id)"
    )
    assert small == []


# Parts by themselves


def test_parts_in_javascript(pages):
    page = pages.open()
    result = page.evaluate("""async () => {
      const load = (name) => import(new URL(`static/js/${name}.js`, location.href));
      const { fft, Spectrum } = await load("fft");
      const { finishedLength } = await load("typing");
      const { pieces } = await load("utterance");
      const { Overview } = await load("overview");
      const { bars, tick } = await load("timeline");
      const { span } = await load("pictures");

      const n = 64;
      const re = Float64Array.from({ length: n }, (_, i) => Math.sin(0.3 * i * i) + i % 5);
      const im = new Float64Array(n);
      const x = [...re];
      fft(re, im);
      let worst = 0;
      for (let k = 0; k < n; k++) {
        let [a, b] = [0, 0];
        for (let i = 0; i < n; i++) {
          a += x[i] * Math.cos((2 * Math.PI * i * k) / n);
          b -= x[i] * Math.sin((2 * Math.PI * i * k) / n);
        }
        worst = Math.max(worst, Math.abs(a - re[k]), Math.abs(b - im[k]));
      }

      const peakBand = (hertz) => {
        const tone = Int16Array.from({ length: 512 }, (_, i) => 9000 * Math.sin((2 * Math.PI * hertz * i) / 24000));
        const column = new Spectrum(24000, 72).column(tone);
        return column.indexOf(Math.max(...column));
      };

      const overview = new Overview(24000);
      const minute = new Int16Array(24000 * 60).fill(1000);
      overview.push(minute.subarray(0, 12345));
      overview.push(minute.subarray(12345));
      while (overview.queue.length) overview.work(1000);

      const times = (lm, flow, vocoder) => ({ lm_ms: lm, flow_ms: flow, vocoder_ms: vocoder });
      return {
        worst,
        bands: [200, 1000, 4000, 11000].map(peakBand),
        finished: ["", "Hel", "Hello ", "Hello wor", "3.", "3. ", "3.5", "3.14 is", "你好", "你好wor", "Да, к"]
          .map(finishedLength),
        pieces: [pieces("aaa bbb ccc", 5), pieces("aaaaaaaa", 3), pieces("😀😀😀", 3), pieces(""),
          pieces("One. Two words more", 12), pieces("你好。再见吧", 5), pieces("a b\\nc d e", 6)],
        overview: [overview.columns, overview.merged, overview.secondsPerColumn * overview.columns,
          overview.peaks[100], overview.peaks[overview.columns - 1]],
        bars: bars({ elapsed_ms: 300, times: times(60, 100, 30) }, { elapsed_ms: 150, times: times(30, 50, 15) }),
        ticks: [tick(1000, 5), tick(1234, 5), tick(90, 4)],
        spans: [span(0), span(6), span(6.1), span(9), span(100), span(0, true), span(7.5, true)].map(Math.round),
      };
    }""")
    assert result["worst"] < 1e-9
    assert result["bands"] == sorted(set(result["bands"]))
    assert result["finished"] == [0, 0, 6, 6, 0, 3, 0, 5, 2, 2, 4]
    assert result["pieces"] == [
        ["aaa ", "bbb ", "ccc"],
        ["aaa", "aaa", "aa"],
        ["😀", "😀", "😀"],
        [],
        ["One. Two ", "words more"],
        ["你好。", "再见吧"],
        ["a b\n", "c d e"],
    ]
    assert result["overview"] == [3000, 2, 60.0, 1000, 1000]
    assert result["bars"] == {
        "lm": {"start": 205, "ms": 30},
        "flow": {"start": 235, "ms": 50},
        "vocoder": {"start": 285, "ms": 15},
    }
    assert result["ticks"] == [200, 500, 50]
    assert result["spans"] == [6, 6, 8, 12, 128, 6, 8]
