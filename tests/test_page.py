"""The page's files and how they are served."""

from __future__ import annotations

import asyncio
import re

import httpx
import pytest

from tests.page_fake import Fake, make_app
from vivace.server.page import CONTENT_SECURITY_POLICY, FOLDER, read_page

LANGUAGES = ("en", "zh", "ru")


@pytest.fixture(scope="module")
def app():
    return make_app(Fake())


@pytest.fixture
def get(app):
    def send(path, method="GET", **headers):
        names = {name.replace("_", "-"): value for name, value in headers.items()}

        async def ask():
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://page") as client:
                return await client.request(method, path, headers=names)

        return asyncio.run(ask())

    return send


def test_index_and_its_headers(get):
    answer = get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert "microphone=(self)" in answer.headers["permissions-policy"]
    assert "<h1" in answer.text


def test_policy_allows_nothing_inline_and_no_other_host():
    assert "unsafe" not in CONTENT_SECURITY_POLICY
    assert "default-src 'none'" in CONTENT_SECURITY_POLICY
    assert not re.search(r"https?:|\*|data:", CONTENT_SECURITY_POLICY)


@pytest.mark.parametrize("name", sorted(read_page()))
def test_each_file_has_its_type_and_is_not_sent_twice(get, name):
    answer = get(f"/static/{name}")
    kind = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    assert answer.headers["content-type"].startswith(kind[name.rsplit(".", 1)[1]])
    assert answer.content == (FOLDER / name).read_bytes()
    assert answer.headers["cache-control"] == "no-cache"
    etag = answer.headers["etag"]
    for known in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        again = get(f"/static/{name}", if_none_match=known)
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == etag
    assert get(f"/static/{name}", if_none_match='"other"').status_code == 200


def test_head(get):
    answer = get("/", method="HEAD")
    assert (answer.status_code, answer.content) == (200, b"")
    assert int(answer.headers["content-length"]) == len(read_page()["index.html"].body)


@pytest.mark.parametrize(
    "path",
    [
        "/static/",
        "/static/../page.py",
        "/static/..%2fpage.py",
        "/static/%2e%2e/page.py",
        "/static/js/../../page.py",
        "/static/js%5c..%5c..%5cpage.py",
        "/static//etc/passwd",
        "/static/%2fetc%2fpasswd",
        "/static/js",
        "/static/js/",
        "/static/index.html%00.js",
        "/static/INDEX.HTML",
    ],
)
def test_nothing_else_can_be_reached(get, path):
    answer = get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


def test_etag_follows_content(tmp_path):
    (tmp_path / "a.js").write_text("1")
    (tmp_path / "secret.txt").write_text("no part of the page")
    before = read_page(tmp_path)
    (tmp_path / "a.js").write_text("2")
    after = read_page(tmp_path)
    assert list(before) == ["a.js"]
    assert before["a.js"].etag != after["a.js"].etag


def test_page_is_small():
    assert sum(len(file.body) for file in read_page().values()) < 140_000


def test_html_has_no_inline_code_and_names_no_other_host():
    html = (FOLDER / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)", html)
    assert not re.search(r"\s(on[a-z]+|style)=", html)
    for name, file in read_page().items():
        found = re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]+[^\s\"']*", file.body.decode())
        assert [url for url in found if "www.w3.org" not in url] == [], name


def test_package_brings_every_file():
    text = (FOLDER.parents[3] / "pyproject.toml").read_text()
    assert '"server/static/**/*"' in text
    assert {path.suffix for path in FOLDER.rglob("*") if path.is_file()} <= {".html", ".css", ".js", ".svg"}


def dictionary(language: str) -> dict[str, str]:
    text = (FOLDER / "js" / "lang" / f"{language}.js").read_text()
    return dict(re.findall(r'^  "?([\w.]+)"?: "(.*)",$', text, re.M))


def test_languages_have_the_same_words():
    words = {language: dictionary(language) for language in LANGUAGES}
    for language in LANGUAGES[1:]:
        assert words[language].keys() == words["en"].keys()
        for key, value in words["en"].items():
            other = words[language][key]
            assert other.strip()
            assert sorted(re.findall(r"{\w+}", other)) == sorted(re.findall(r"{\w+}", value)), key


def test_words_that_the_page_uses_exist():
    words = dictionary("en")
    html = (FOLDER / "index.html").read_text()
    used = set(re.findall(r'data-t(?:-\w+)?="(\w+)"', html))
    for path in FOLDER.glob("js/*.js"):
        used |= set(re.findall(r'\bt\("([\w.]+)"', path.read_text()))
        used |= {f"error.{code}" for code in re.findall(r'new ApiError\("(\w+)"', path.read_text())}
    assert used <= words.keys()


ERRORS = """
    empty_input input_too_long unpronounceable_input invalid_utf8 special_token_not_allowed voice_not_found
    voice_exists invalid_name invalid_voice builtin_voice invalid_audio audio_too_short audio_too_long audio_silent
    audio_clipped unsupported_media_type payload_too_large consent_required invalid_api_key forbidden_origin
    unknown_host rate_limited overloaded draining engine_restarting starting request_timeout deadline_exceeded
    storage_full synthesis_failed internal_error value_out_of_range unsupported_value not_found model_not_found
    not_implemented
"""
"""What a person at the page can meet; codes that only hand-made requests can cause are shown as "other"."""


@pytest.mark.parametrize("language", LANGUAGES)
def test_errors_have_words(language):
    words = dictionary(language)
    assert [code for code in [*ERRORS.split(), "other"] if f"error.{code}" not in words] == []
