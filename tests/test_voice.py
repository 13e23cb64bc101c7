"""Voices: the value, its file, the registry. Ids V1 … are rows of the table of bad names and paths."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

import vivace.voice.file as voice_file
from vivace.config import DiTConfig, FlowConfig, Limits, ModelConfig, SpeechLMConfig, VocoderConfig
from vivace.errors import (
    InvalidAudioError,
    InvalidTextError,
    InvalidVoiceError,
    VivaceError,
    VoiceExistsError,
    VoiceNotFoundError,
)
from vivace.voice import (
    Voice,
    VoiceRegistry,
    check_voice_name,
    from_spk2info,
    load_voice,
    make_voice,
    save_voice,
)

CONFIG = ModelConfig(
    generation=3,
    name="tiny",
    lm=SpeechLMConfig(
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        text_vocab_size=10,
        speech_token_size=729,
    ),
    flow=FlowConfig(dit=DiTConfig(dim=8, depth=1, heads=1, dim_head=8, ff_mult=1), vocab_size=729),
    vocoder=VocoderConfig(),
)


def voice(name: str = "anna", seed: int = 0, num_tokens: int = 10, **meta: object) -> Voice:
    random = np.random.default_rng(seed)
    return Voice(
        name,
        "Hello there.",
        random.integers(0, 729, num_tokens).astype(np.int32),
        random.normal(size=(2 * num_tokens, 80)).astype(np.float32),
        random.normal(size=192).astype(np.float32),
        {"speech_token_size": 729, "generation": 3, "seconds": num_tokens / 25} | meta,
    )


def same(a: Voice, b: Voice) -> bool:
    return (
        (a.name, a.prompt_text, dict(a.meta)) == (b.name, b.prompt_text, dict(b.meta))
        and np.array_equal(a.speech_tokens, b.speech_tokens)
        and np.array_equal(a.mel, b.mel)
        and np.array_equal(a.embedding, b.embedding)
    )


@pytest.fixture
def registry(tmp_path) -> VoiceRegistry:
    return VoiceRegistry(tmp_path / "voices", {"mini": voice("mini", seed=9)})


def stored_file(tmp_path: Path, name: str) -> Path:
    return tmp_path / "voices" / f"{name}.safetensors"


# --- the value ----------------------------------------------------------------------------------------------------


def test_voice_is_a_value_that_nobody_can_change():
    tokens = np.arange(3, dtype=np.int32)
    made = Voice("a", "x", tokens, np.zeros((6, 80), np.float32), np.ones(192, np.float32), {"k": 1})
    tokens[0] = 99
    assert made.speech_tokens.tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="read-only"):
        made.mel[0, 0] = 1
    with pytest.raises(TypeError):
        made.meta["k"] = 2
    with pytest.raises(FrozenInstanceError):
        made.name = "b"


@pytest.mark.parametrize(
    "change",
    [
        {"speech_tokens": np.zeros(10, np.int64)},
        {"speech_tokens": np.zeros((1, 10), np.int32)},
        {"speech_tokens": np.full(10, -1, np.int32)},
        {"speech_tokens": np.zeros(0, np.int32)},
        {"mel": np.zeros((9, 80), np.float32)},
        {"mel": np.zeros((0, 80), np.float32)},
        {"mel": np.full((20, 80), np.nan, np.float32)},
        {"mel": np.zeros((20, 80), np.float64)},
        {"embedding": np.full(192, np.inf, np.float32)},
        {"embedding": np.zeros((1, 192), np.float32)},
        {"embedding": np.zeros(0, np.float32)},
        {"embedding": [0.0] * 192},
        {"meta": {"a": [1]}},
    ],
)
def test_voice_refuses_wrong_arrays(change):
    with pytest.raises(InvalidVoiceError) as caught:
        replace(voice(), **change)
    assert caught.value.code == "invalid_voice"


def test_A22_prompt_text_bounds():
    assert replace(voice(), prompt_text="").prompt_text == ""
    assert replace(voice(), prompt_text=" 你好。<|endofprompt|>\n").prompt_text == "你好。<|endofprompt|>"
    for text, code in (("a" * 2_001, "input_too_long"), ("a\ud800b", "invalid_utf8")):
        with pytest.raises(InvalidTextError) as caught:
            replace(voice(), prompt_text=text)
        assert caught.value.code == code


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"meta": {"speech_token_size": 6561}}, "6561 speech tokens"),
        ({"meta": {"generation": 2}}, "generation 2"),
        ({"speech_tokens": np.full(10, 729, np.int32)}, "beyond"),
        ({"mel": np.zeros((30, 80), np.float32)}, "frames per token"),
        ({"mel": np.zeros((20, 100), np.float32)}, "bands"),
        ({"embedding": np.ones(512, np.float32)}, "embedding"),
    ],
)
def test_voice_of_another_model_is_refused_with_advice(change, reason):
    voice().check_fits(CONFIG)
    with pytest.raises(InvalidVoiceError, match=reason) as caught:
        replace(voice(), **change).check_fits(CONFIG)
    assert caught.value.code == "invalid_voice"
    assert "vivace voice add" in caught.value.message


@pytest.mark.parametrize("name", ["a", "0", "anna-2_b", "x" * 64])
def test_V4_valid_names(name):
    assert check_voice_name(name) == name
    assert check_voice_name(name.upper()) == name


BAD_NAMES = [
    *(
        "../../etc/passwd",
        "..%2f..",
        "%2e%2e/",
        "..\\..",
        "/etc/passwd",
        "C:\\x",
        "\\\\host\\share",
    ),  # V1, V2
    *("file:///x", "~root", "-rf", "_a", ".hidden"),
    *(
        "a\0b",
        "a\nb",
        "a/b",
        "a:b",
        "CON",
        "con",
        "nul",
        "Com1",
        "nul.wav",
        "a::$DATA",
        "a.",
        "a ",
        "a\n",
    ),  # V3
    *("", "x" * 65, "x" * 10_000, "é" * 10, "ａ", "你好", "а"),  # V4; the last is Cyrillic
]


@pytest.mark.parametrize("name", BAD_NAMES, ids=ascii)
def test_V1_V2_V3_V4_bad_names(name, registry, tmp_path):
    with pytest.raises(InvalidVoiceError) as caught:
        voice(name)
    assert caught.value.code == "invalid_name"
    errors = []
    for call in (registry.get, registry.remove):
        with pytest.raises(VoiceNotFoundError) as not_found:
            call(name)
        errors.append(not_found.value.message)
    with pytest.raises(VoiceNotFoundError) as unknown:
        registry.get("unknown")
    assert set(errors) == {unknown.value.message}
    assert list(tmp_path.iterdir()) == []


# --- the file -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [10, 0])
def test_save_and_load(tmp_path, num_tokens):
    original = voice(num_tokens=num_tokens, consent=True, created="2025-01-01T00:00:00+00:00", note="ü")
    save_voice(original, tmp_path / "v.safetensors")
    loaded = load_voice(tmp_path / "v.safetensors")
    assert same(original, loaded)
    assert loaded.meta["consent"] is True
    assert os.listdir(tmp_path) == ["v.safetensors"]
    assert (tmp_path / "v.safetensors").stat().st_mode & 0o077 == 0


def with_header(change) -> bytes:
    """A voice file whose JSON was changed."""
    data = voice_file.to_bytes(voice())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    packed = json.dumps(header).encode()
    return len(packed).to_bytes(8, "little") + packed + data[8 + length :]


def with_document(**changes: object) -> bytes:
    def change(header) -> None:
        document = json.loads(header["__metadata__"]["vivace_voice"]) | changes
        header["__metadata__"]["vivace_voice"] = json.dumps(document)

    return with_header(change)


def with_tensor(name: str, array: np.ndarray) -> bytes:
    tensors = {"speech_tokens": voice().speech_tokens, "mel": voice().mel, "embedding": voice().embedding}
    metadata = {"vivace_voice": json.dumps({"format": 1, "name": "anna", "prompt_text": "", "meta": {}})}
    return safetensors.numpy.save(tensors | {name: array}, metadata)


DAMAGED = {
    "empty": b"",
    "cut-in-header": voice_file.to_bytes(voice())[:100],
    "cut-in-tensors": voice_file.to_bytes(voice())[:-1],
    "header-of-2-exabytes": b"\xff" * 7 + b"\x1f" + b"x" * 100,
    "no-json": with_header(lambda header: header.pop("__metadata__")),
    "newer-format": with_document(format=2),
    "name-missing": with_document(name=None),
    "meta-list": with_document(meta=[1]),
    "meta-nested": with_document(meta={"a": {"b": 1}}),
    "nan-embedding": with_tensor("embedding", np.full(192, np.nan, np.float32)),
    "wrong-shape": with_tensor("mel", np.zeros((7, 80), np.float32)),
    "wrong-type": with_tensor("speech_tokens", np.zeros(10, np.float32)),
    "extra-tensor": with_tensor("more", np.zeros(1, np.float32)),
    "pickle": b"\x80\x04cposix\nsystem\n",
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_V11_damaged_voice_is_quarantined_and_the_others_work(kind, registry, tmp_path):
    registry.add(voice("good"))
    stored_file(tmp_path, "bad").write_bytes(DAMAGED[kind])
    fresh = VoiceRegistry(tmp_path / "voices", {"mini": voice("mini")})
    entries = {entry.name: entry for entry in fresh.list()}
    assert {name: entry.kind for name, entry in entries.items()} == {
        "mini": "built-in",
        "good": "stored",
        "bad": "broken",
    }
    assert entries["bad"].problem
    with pytest.raises(InvalidVoiceError) as caught:
        fresh.get("bad")
    assert caught.value.code == "invalid_voice"
    with pytest.raises(VoiceExistsError):
        fresh.add(voice("bad"))
    fresh.remove("bad")
    fresh.add(voice("bad"))
    assert same(fresh.get("bad"), voice("bad"))


def test_V11_huge_file_is_not_read(registry, tmp_path):
    registry.add(voice())
    with open(stored_file(tmp_path, "huge"), "wb") as file:
        file.truncate(1 << 40)  # sparse
    assert [entry.kind for entry in registry.list()] == ["built-in", "stored", "broken"]


@pytest.mark.parametrize("moment", ["fsync", "link", "replace"])
def test_crash_while_writing_leaves_the_old_state(registry, tmp_path, monkeypatch, moment):
    registry.add(voice("old"))
    exported = registry.export("old", tmp_path / "copy")

    class Crash(BaseException):
        pass

    def crash(*_: object) -> None:
        raise Crash

    monkeypatch.setattr(os, moment, crash)
    if moment != "replace":
        with pytest.raises(Crash):
            registry.add(voice("new"))
    if moment != "link":
        with pytest.raises(Crash):
            save_voice(voice("old", seed=5), exported)
    monkeypatch.undo()
    assert [entry.name for entry in registry.list()] == ["mini", "old"]
    assert same(load_voice(exported), voice("old"))
    assert same(registry.get("old"), voice("old"))


def test_data_is_synced_before_the_name_appears_and_the_folder_after(registry, monkeypatch):
    events = []
    real_fsync, real_link = os.fsync, os.link

    def fsync(descriptor: int) -> None:
        events.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "data")
        real_fsync(descriptor)

    def link(source: Path, target: Path) -> None:
        events.append("name")
        real_link(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", link)
    registry.add(voice())
    assert events == ["data", "name", "folder"]


def test_full_disk_is_a_named_error(registry, tmp_path, monkeypatch):
    registry.add(voice("old"))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(VivaceError) as caught:
        registry.add(voice("new"))
    assert caught.value.code == "storage_full"
    assert str(tmp_path) not in caught.value.message
    assert os.listdir(tmp_path / "voices") == ["old.safetensors"]


def test_file_system_without_hard_links(registry, monkeypatch):
    def no_links(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    registry.add(voice())
    assert same(registry.get("anna"), voice())
    with pytest.raises(VoiceExistsError):
        registry.add(voice(seed=1))
    assert same(registry.get("anna"), voice())


# --- the registry -------------------------------------------------------------------------------------------------


def test_voices_survive_a_restart(registry, tmp_path):
    registry.add(voice("anna", consent=True, created="2025-01-01"))
    registry.add(voice("bob", seed=1))
    fresh = VoiceRegistry(tmp_path / "voices", {"mini": voice("mini", seed=9)})
    assert [(entry.name, entry.kind) for entry in fresh.list()] == [
        ("mini", "built-in"),
        ("anna", "stored"),
        ("bob", "stored"),
    ]
    entry = fresh.list()[1]
    assert (entry.seconds, entry.prompt_text, entry.created, entry.consent) == (
        0.4,
        "Hello there.",
        "2025-01-01",
        True,
    )
    assert same(fresh.get("ANNA"), registry.get("anna"))
    assert same(fresh.get("mini"), voice("mini", seed=9))
    assert (tmp_path / "voices").stat().st_mode & 0o077 == 0


def test_get_gives_the_same_object_until_the_file_changes(registry, tmp_path):
    registry.add(voice())
    first = registry.get("anna")
    assert registry.get("anna") is first
    save_voice(voice(seed=3), stored_file(tmp_path, "anna"))
    assert same(registry.get("anna"), voice(seed=3))


def test_the_file_name_is_the_voice_name(registry, tmp_path):
    registry.add(voice("anna"))
    stored_file(tmp_path, "anna").rename(stored_file(tmp_path, "bob"))
    assert registry.get("bob").name == "bob"
    with pytest.raises(VoiceNotFoundError):
        registry.get("anna")


def test_V5_same_name_twice(registry):
    registry.add(voice(seed=0))
    with pytest.raises(VoiceExistsError):
        registry.add(voice("Anna", seed=1))
    assert same(registry.get("anna"), voice(seed=0))


def _add(folder: Path, seed: int) -> bool:
    try:
        VoiceRegistry(folder).add(voice(seed=seed))
    except VoiceExistsError:
        return False
    return True


def test_V5_many_threads_at_once_one_wins(tmp_path):
    folder = tmp_path / "voices"
    results: dict[int, bool] = {}
    barrier = threading.Barrier(20)

    def add(seed: int) -> None:
        barrier.wait(10)
        results[seed] = _add(folder, seed)

    threads = [threading.Thread(target=add, args=(seed,)) for seed in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    (winner,) = [seed for seed, won in results.items() if won]
    assert len(results) == 20
    assert same(VoiceRegistry(folder).get("anna"), voice(seed=winner))
    assert os.listdir(folder) == ["anna.safetensors"]


def test_V6_builtin_names_cannot_be_shadowed(registry, tmp_path):
    with pytest.raises(VoiceExistsError):
        registry.add(voice("Mini"))
    registry.add(voice("other"))
    stored_file(tmp_path, "other").rename(stored_file(tmp_path, "mini"))
    assert registry.builtin_names == ("mini",)
    assert same(registry.get("mini"), voice("mini", seed=9))
    assert [(entry.name, entry.kind) for entry in registry.list()] == [("mini", "built-in")]


def test_V7_remove(registry):
    with pytest.raises(VoiceNotFoundError):
        registry.remove("unknown")
    with pytest.raises(InvalidVoiceError) as caught:
        registry.remove("mini")
    assert caught.value.code == "builtin_voice"
    registry.add(voice())
    in_use = registry.get("anna")
    registry.remove("anna")
    with pytest.raises(VoiceNotFoundError):
        registry.get("anna")
    assert same(in_use, voice())
    registry.add(voice(seed=2))
    assert same(registry.get("anna"), voice(seed=2))


def test_V8_quota(tmp_path):
    registry = VoiceRegistry(tmp_path, max_voices=2)
    registry.add(voice("a"))
    registry.add(voice("b"))
    with pytest.raises(VivaceError) as caught:
        registry.add(voice("c"))
    assert caught.value.code == "storage_full"


def test_export_into_a_folder_that_is_not_there(registry, tmp_path):
    with pytest.raises(FileNotFoundError, match="make it first"):
        registry.export("mini", tmp_path / "nowhere" / "mini")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with names")
def test_export_replaces_no_pipe(registry, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileExistsError, match="no regular file"):
        registry.export("mini", tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


def test_a_voice_of_another_model_is_listed_as_unfit(tmp_path):
    """It is not offered, but its name is taken, and it can be removed."""
    folder = VoiceRegistry(tmp_path)
    folder.add(voice("ours"))
    folder.add(replace(voice("theirs"), meta={"generation": 1}))
    registry = VoiceRegistry(tmp_path, config=CONFIG)
    ours, theirs = registry.list()
    assert (ours.kind, ours.can_speak, theirs.kind, theirs.can_speak) == ("stored", True, "unfit", False)
    assert "generation 1" in theirs.problem
    registry.remove("theirs")
    assert [entry.name for entry in registry.list()] == ["ours"]


def test_usable_names_are_those_that_can_speak_and_cost_no_second_look(tmp_path, monkeypatch):
    folder = VoiceRegistry(tmp_path)
    folder.add(voice("ours"))
    folder.add(replace(voice("theirs"), meta={"generation": 1}))
    (tmp_path / "broken.safetensors").write_bytes(b"no voice")
    registry = VoiceRegistry(tmp_path, {"own": voice("own")}, config=CONFIG)
    looked_at = []
    look = registry._stored_entry
    monkeypatch.setattr(registry, "_stored_entry", lambda name: looked_at.append(name) or look(name))
    assert registry.names() == ["own", "broken", "ours", "theirs"]
    for _ in range(2):
        assert registry.usable_names() == ["own", "ours"]
    assert looked_at == ["broken", "ours", "theirs"]
    registry.remove("broken")
    folder.add(voice("broken"))  # another file of the same name
    assert registry.usable_names() == ["own", "broken", "ours"]
    assert looked_at[3:] == ["broken"]


@pytest.mark.parametrize("kind", ["symlink", "folder", "fifo", "dangling", "name"])
def test_V10_strange_entries_are_skipped_with_a_warning(kind, tmp_path, caplog):
    folder = tmp_path / "voices"
    VoiceRegistry(folder).add(voice("good"))
    path = folder / "evil.safetensors"
    if kind == "symlink":
        save_voice(voice("evil"), tmp_path / "outside.safetensors")
        path.symlink_to(tmp_path / "outside.safetensors")
    elif kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "dangling":
        path.symlink_to(tmp_path / "nowhere")
    else:
        save_voice(voice("evil"), folder / "Evil\n[ERROR] fake.safetensors")
    with caplog.at_level(logging.WARNING):
        registry = VoiceRegistry(folder)
    (record,) = caplog.records
    assert "vil" in record.getMessage()
    assert "\n" not in record.getMessage()
    assert [entry.name for entry in registry.list()] == ["good"]
    for call in (registry.get, registry.remove):
        with pytest.raises(VoiceNotFoundError):
            call("evil")


def test_V10_files_of_other_owners_are_skipped(registry, tmp_path):
    registry.add(voice())
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(stored_file(tmp_path, "anna"), 12_345, -1)
    assert [entry.name for entry in registry.list()] == ["mini"]
    with pytest.raises(VoiceNotFoundError):
        registry.get("anna")


def test_temporary_files_of_a_crash_disappear_but_not_those_of_a_writer(registry, tmp_path):
    registry.add(voice())
    folder = tmp_path / "voices"
    old, young = folder / ".a.safetensors.0123abcd.tmp", folder / ".b.safetensors.0123abcd.tmp"
    for path in (old, young):
        path.write_bytes(b"x")
    os.utime(old, (time.time() - 7_200,) * 2)
    assert [entry.name for entry in VoiceRegistry(folder).list()] == ["anna"]
    assert not old.exists()
    assert young.exists()


def test_a_temporary_file_that_vanishes_meanwhile_keeps_none_of_the_others(tmp_path, monkeypatch):
    folder = tmp_path / "voices"
    folder.mkdir()
    for letter in "abc":
        path = folder / f".{letter}.safetensors.0123abcd.tmp"
        path.touch()
        os.utime(path, (time.time() - 7_200,) * 2)
    original, gone = os.unlink, []

    def unlink(entry):
        original(entry)
        gone.append(entry)
        if len(gone) == 1:
            raise FileNotFoundError

    monkeypatch.setattr(os, "unlink", unlink)
    assert VoiceRegistry(folder).list() == []
    assert len(gone) == 3
    assert not list(folder.iterdir())


def test_export_and_import(registry, tmp_path):
    registry.add(voice("anna", consent=True))
    path = registry.export("anna", tmp_path / "anna.v1.voice")
    assert path == tmp_path / "anna.v1.voice"
    assert path.is_file(), "the file that was named is the file that was written"
    assert registry.export("anna", tmp_path / "bare") == tmp_path / "bare"
    assert (tmp_path / "bare").read_bytes() == path.read_bytes()
    assert registry.export("mini", tmp_path) == tmp_path / "mini.safetensors"
    other = VoiceRegistry(tmp_path / "elsewhere")
    assert other.import_voice(path).name == "anna"
    assert other.import_voice(path, "Copy").name == "copy"
    assert same(other.get("anna"), registry.get("anna"))
    with pytest.raises(VoiceExistsError):
        other.import_voice(path)
    path.write_bytes(b"x" * 100)
    with pytest.raises(InvalidVoiceError):
        other.import_voice(path, "third")
    with pytest.raises(InvalidVoiceError, match=r"there is no file .*anna-file$"):
        other.import_voice(tmp_path / "anna-file")


def test_empty_registry_makes_no_folder(tmp_path):
    registry = VoiceRegistry(tmp_path / "voices")
    assert registry.list() == []
    assert not (tmp_path / "voices").exists()


# --- from prompt audio and spk2info -------------------------------------------------------------------------------


class Encoders:
    """Stand-ins for the ONNX encoders; remember what they were given."""

    def __init__(self, tokens_per_second: float = 25.0) -> None:
        self.rate = tokens_per_second
        self.given: list[np.ndarray] = []

    def encode(self, samples: np.ndarray) -> np.ndarray:
        self.given.append(samples)
        return np.arange(int(len(samples) / 16_000 * self.rate), dtype=np.int32)

    def embed(self, samples: np.ndarray) -> np.ndarray:
        self.given.append(samples)
        return np.full(192, 0.5, np.float32)


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory) -> Path:
    import soundfile

    path = tmp_path_factory.mktemp("prompt") / "prompt.flac"
    soundfile.write(path, 0.3 * np.sin(np.arange(int(44_100 * 2.03)) / 30), 44_100)
    return path


def make(source: bytes | Path, encoders: Encoders, text: str = "Hi.", name: str = "new") -> Voice:
    return make_voice(
        source,
        text,
        name=name,
        config=CONFIG,
        speech_tokenizer=encoders,
        speaker_encoder=encoders,
        limits=Limits(),
        consent=True,
    )


@pytest.mark.parametrize(("tokens_per_second", "num_tokens"), [(25.0, 50), (26.0, 50), (20.0, 40)])
def test_make_voice_cuts_tokens_and_mel_to_the_same_duration(prompt_file, tokens_per_second, num_tokens):
    encoders = Encoders(tokens_per_second)
    made = make(prompt_file, encoders)
    # 2.03 s: 101 mel frames, of which an odd one is dropped.
    assert (len(made.speech_tokens), made.mel.shape) == (num_tokens, (2 * num_tokens, 80))
    assert {len(samples) for samples in encoders.given} == {round(2.03 * 16_000)}
    assert (made.meta["consent"], made.meta["speech_token_size"], made.meta["generation"]) == (True, 729, 3)
    assert made.meta["seconds"] == num_tokens / 25
    assert str(made.meta["created"]).endswith("+00:00")


def test_make_voice_checks_everything_before_any_model(prompt_file):
    encoders = Encoders()
    with pytest.raises(InvalidVoiceError):
        make(prompt_file, encoders, name="../x")
    with pytest.raises(InvalidTextError):
        make(prompt_file, encoders, text="a" * 3_000)
    with pytest.raises(InvalidAudioError):
        make(b"no audio", encoders)
    assert encoders.given == []


def test_make_voice_refuses_tokens_of_another_codebook(prompt_file):
    encoders = Encoders()
    encoders.encode = lambda samples: np.full(50, 6_000, np.int32)
    with pytest.raises(InvalidVoiceError, match="beyond"):
        make(prompt_file, encoders)


def test_spk2info_entry_of_a_stored_prompt():
    entry = {
        "prompt_text": torch.tensor([[5, 6, 7]], dtype=torch.int32),
        "prompt_text_len": torch.tensor([3], dtype=torch.int32),
        "flow_prompt_speech_token": torch.arange(10, dtype=torch.int32)[None],
        "prompt_speech_feat": torch.randn(1, 21, 80),
        "llm_embedding": torch.full((1, 192), 0.25),
        "flow_embedding": torch.full((1, 192), 0.5),
    }
    made = from_spk2info("boy", entry, config=CONFIG, decode_text=lambda ids: "-".join(map(str, ids)))
    assert made.prompt_text == "5-6-7"
    assert made.speech_tokens.tolist() == list(range(10))
    np.testing.assert_array_equal(made.mel, entry["prompt_speech_feat"][0, :20].numpy())
    assert made.embedding[0] == 0.5
    assert from_spk2info("boy", entry, config=CONFIG).prompt_text == ""


def test_spk2info_entry_with_an_embedding_alone():
    made = from_spk2info("boy", {"embedding": np.ones((1, 192))}, config=CONFIG)
    assert (len(made.speech_tokens), made.mel.shape) == (0, (0, 80))


@pytest.mark.parametrize(
    "entry",
    [
        {},
        {"embedding": np.ones(100)},
        {"embedding": np.full(192, np.nan)},
        {"embedding": "text"},
        {
            "embedding": np.ones(192),
            "llm_prompt_speech_token": np.zeros(5),
            "prompt_speech_feat": np.ones((10, 81)),
        },
    ],
)
def test_spk2info_entries_that_do_not_fit(entry):
    with pytest.raises(InvalidVoiceError) as caught:
        from_spk2info("boy", entry, config=CONFIG)
    assert caught.value.code == "invalid_voice"


@pytest.mark.parametrize(
    "meta",
    [
        {"seconds": 10**400},
        {"seconds": float("nan")},
        {"seconds": float("inf")},
        {"note": "x" * 100_000},
        {str(index): 1 for index in range(1000)},
    ],
    ids=["huge", "nan", "infinite", "long", "many"],
)
def test_metadata_that_no_voice_has_is_refused(registry, meta):
    registry.add(voice("anna"))
    path = registry._folder / "eve.safetensors"
    path.write_bytes(with_document(voice("eve"), meta=meta))
    with pytest.raises(InvalidVoiceError) as raised:
        registry.get("eve")
    assert raised.value.code == "invalid_voice"
    assert [entry.kind for entry in registry.list() if entry.name in ("anna", "eve")] == ["stored", "broken"]


@pytest.mark.parametrize("prompt_text", ["x" * 3000, "half \ud800"])
def test_a_file_whose_prompt_text_is_none_is_a_damaged_voice(tmp_path, prompt_text):
    path = tmp_path / "eve.safetensors"
    path.write_bytes(with_document(voice("eve"), prompt_text=prompt_text))
    with pytest.raises(InvalidVoiceError) as raised:
        load_voice(path)
    assert raised.value.code == "invalid_voice"


def with_document(whole: Voice, **changes: object) -> bytes:
    """A voice file whose JSON says something else."""
    document = {"format": 1, "name": whole.name, "prompt_text": "", "meta": {}} | changes
    tensors = {"speech_tokens": whole.speech_tokens, "mel": whole.mel, "embedding": whole.embedding}
    return safetensors.numpy.save(tensors, metadata={"vivace_voice": json.dumps(document)})
