"""Recordings of consent: OpenAI's own client, the rules for voices made with them, and the files they lie in."""

import os
import stat

import httpx
import openai
import pytest

from tests.helpers import speech_like_wav
from tests.server_helpers import FakeService, LoopbackServer
from vivace.errors import VivaceError
from vivace.server.consents import MAX_LABEL_CHARACTERS
from vivace.voice.consent import Consent, ConsentNotFoundError, ConsentRegistry

WAV = speech_like_wav()
UNKNOWN = "cons_" + "0" * 24


@pytest.fixture
def server(tmp_path):
    with LoopbackServer(lambda: FakeService(tmp_path)) as running:
        yield running


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def _create(client, name="Anna agrees", audio=WAV):
    return client.audio.voice_consents.create(
        name=name, language="en-US", recording=("consent.wav", audio, "audio/wav")
    )


def _add_voice(client, consent, name="anna"):
    return client.audio.voices.create(name=name, audio_sample=("s.wav", WAV, "audio/wav"), consent=consent)


def test_the_life_of_a_consent(client):
    consents = client.audio.voice_consents
    made = _create(client)
    assert (made.object, made.name, made.language) == ("audio.voice_consent", "Anna agrees", "en-US")
    assert made.id.startswith("cons_")
    assert consents.retrieve(made.id) == made
    renamed = consents.update(made.id, name="Анна согласна")
    assert renamed == made.model_copy(update={"name": "Анна согласна"})
    assert list(consents.list()) == [renamed]
    deleted = consents.delete(made.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (made.id, True, "audio.voice_consent")
    for call in (consents.retrieve, consents.delete, lambda given: consents.update(given, name="x")):
        with pytest.raises(openai.NotFoundError) as caught:
            call(made.id)
        assert caught.value.code == "consent_not_found"


def test_pages(client):
    made = [_create(client, f"consent {number}").id for number in range(5)]
    first = client.audio.voice_consents.list(limit=2)
    assert len(first.data) == 2
    assert first.has_more
    assert sorted(consent.id for consent in client.audio.voice_consents.list(limit=2)) == sorted(made)


def test_a_voice_made_with_a_consent_remembers_it(client, server):
    consent = _create(client)
    assert _add_voice(client, consent.id).id == "anna"
    assert server.service.voices.get("anna").meta["consent_id"] == consent.id
    client.audio.voice_consents.delete(consent.id)
    assert server.service.voices.get("anna").meta["consent"] is True


@pytest.mark.parametrize("consent", [UNKNOWN, "cons_1234", "consent-1", "../consents/x", "maybe"])
def test_an_unknown_consent_is_not_accepted(client, server, consent):
    with pytest.raises(openai.NotFoundError) as caught:
        _add_voice(client, consent)
    assert (caught.value.code, caught.value.param) == ("consent_not_found", "consent")
    assert not server.service.uploads
    assert "anna" not in server.service.voices.names()


@pytest.mark.parametrize("consent", ["", " ", "no", "False", "0", "none"])
def test_without_consent_no_voice(client, server, consent):
    with pytest.raises(openai.PermissionDeniedError) as caught:
        _add_voice(client, consent)
    assert caught.value.code == "consent_required"
    assert not server.service.uploads


@pytest.mark.parametrize(
    ("fields", "audio", "status", "code", "param"),
    [
        ({"name": "a"}, WAV, 400, "missing_field", "language"),
        ({"language": "en"}, WAV, 400, "missing_field", "name"),
        ({"name": "a", "language": "en"}, None, 400, "missing_field", "recording"),
        ({"name": "a", "language": "english please"}, WAV, 400, "unsupported_value", "language"),
        ({"name": " ", "language": "en"}, WAV, 400, "invalid_name", "name"),
        ({"name": "a\x00b", "language": "en"}, WAV, 400, "invalid_name", "name"),
        ({"name": "a" * (MAX_LABEL_CHARACTERS + 1), "language": "en"}, WAV, 400, "invalid_name", "name"),
        ({"name": "a", "language": "en"}, b"words", 415, "unsupported_media_type", "recording"),
        ({"name": "a", "language": "en"}, speech_like_wav(0.5), 400, "audio_too_short", "recording"),
    ],
)
def test_wrong_uploads(server, tmp_path, fields, audio, status, code, param):
    files = {name: (None, value) for name, value in fields.items()}
    if audio is not None:
        files["recording"] = ("r.wav", audio)
    response = httpx.post(f"{server.url}/v1/audio/voice_consents", files=files, timeout=30)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param)
    assert not list(tmp_path.rglob("cons_*"))


def test_wrong_calls(server):
    url = f"{server.url}/v1/audio/voice_consents"
    for limit in ("0", "101", "x", "-1", "9" * 50):
        response = httpx.get(f"{url}?limit={limit}")
        assert (response.status_code, response.json()["error"]["param"]) == (400, "limit")
    for name in ("..%2f..%2fetc%2fpasswd", UNKNOWN, "cons_", "%00"):
        for method in ("GET", "DELETE"):
            response = httpx.request(method, f"{url}/{name}")
            assert (response.status_code, response.json()["error"]["code"]) == (404, "consent_not_found")
    response = httpx.post(f"{url}/{UNKNOWN}", json={"name": 5})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_type")


def test_no_more_than_so_many(tmp_path):
    consents = ConsentRegistry(tmp_path, max_consents=2)
    first = consents.create("a", "en", b"sound")
    consents.create("b", "en", b"sound")
    with pytest.raises(VivaceError) as caught:
        consents.create("c", "en", b"sound")
    assert caught.value.code == "storage_full"
    consents.remove(first.id)
    consents.create("c", "en", b"sound")
    assert sorted(consent.name for consent in consents.list()) == ["b", "c"]


def test_files_are_for_their_owner_only_and_keep_the_recording(tmp_path):
    consents = ConsentRegistry(tmp_path / "voices")
    assert consents.list() == []
    made = consents.create("a\n", "en", b"\n\x00sound")
    [path] = (tmp_path / "voices" / "consents").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert consents.rename(made.id, "b") == Consent(made.id, "b", "en", made.created_at)
    assert path.read_bytes().partition(b"\n")[2] == b"\n\x00sound"
    assert ConsentRegistry(tmp_path / "voices").get(made.id).name == "b"


@pytest.mark.skipif(os.name != "posix", reason="links and pipes of POSIX")
def test_what_is_no_file_of_ours_is_not_read(tmp_path):
    consents = ConsentRegistry(tmp_path)
    good = consents.create("good", "en", b"sound")
    folder = tmp_path / "consents"
    (folder / f"{UNKNOWN}.consent").symlink_to(folder / f"{good.id}.consent")
    os.mkfifo(folder / f"cons_{'1' * 24}.consent")
    (folder / f"cons_{'2' * 24}.consent").write_bytes(b"{}\n")
    (folder / f"cons_{'3' * 24}.consent").write_bytes(b"\xff" * 9000)
    (folder / "notes.txt").write_text("mine")
    assert consents.list() == [good]
    for digit in "0123":
        with pytest.raises(ConsentNotFoundError):
            consents.get(f"cons_{digit * 24}")


def test_what_a_crash_left_behind_is_removed(tmp_path):
    made = ConsentRegistry(tmp_path).create("a", "en", b"sound")
    old, new = (tmp_path / "consents" / f".{made.id}.consent.{digit * 16}.tmp" for digit in "01")
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    assert ConsentRegistry(tmp_path).list() == [made]
    assert (old.exists(), new.exists()) == (False, True)


def test_a_full_disk_keeps_the_old_label(tmp_path, monkeypatch):
    consents = ConsentRegistry(tmp_path)
    made = consents.create("a", "en", b"sound")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for change in (lambda: consents.rename(made.id, "b"), lambda: consents.create("c", "en", b"sound")):
        with pytest.raises(VivaceError) as caught:
            change()
        assert caught.value.code == "storage_full"
    assert consents.list() == [made]
    assert len(list((tmp_path / "consents").iterdir())) == 1
