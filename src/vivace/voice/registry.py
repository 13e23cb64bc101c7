"""Voices by name: those that a model brings, and those stored in a folder."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vivace.errors import InvalidVoiceError, VivaceError, VoiceExistsError, VoiceNotFoundError
from vivace.voice.file import (
    SUFFIX,
    TEMPORARY_SUFFIX,
    create_voice_file,
    from_bytes,
    identity,
    load_voice,
    read_regular_file,
    save_voice,
    sync_folder,
)
from vivace.voice.value import Voice, check_voice_name, invalid_voice

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vivace.config import ModelConfig

MAX_CACHED = 64
STALE_SECONDS = 3600.0
"""Age at which another process's temporary file must be what a crash left behind."""

_TEMPORARY_NAME = re.compile(rf"\..*{re.escape(SUFFIX)}\.[0-9a-f]+{re.escape(TEMPORARY_SUFFIX)}")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VoiceEntry:
    """One line of ``VoiceRegistry.list``.

    Attributes:
        kind: ``broken`` voices, and those ``unfit`` for this model, keep their name until they are removed;
            ``problem`` says what is wrong.
        seconds: length of the prompt.
    """

    name: str
    kind: Literal["built-in", "stored", "unfit", "broken"]
    seconds: float = 0.0
    prompt_text: str = ""
    created: str = ""
    consent: bool = False
    problem: str | None = None

    @property
    def can_speak(self) -> bool:
        """It may be offered."""
        return self.problem is None


class VoiceRegistry:
    """Built-in voices and a folder of voice files. Safe for several threads and several processes.

    The folder itself is the truth: there is no index that a crash could leave wrong. A ``Voice`` once handed
    out is a value and keeps working after its file is removed. Links, directories, pipes and files of other
    owners are never read.

    Args:
        folder: where stored voices live; created with the first voice, readable by its owner only.
        builtin: names that can be neither replaced nor removed.
        max_voices: how many may be stored.
        default: the built-in voice that speaks where none is asked for; the first one unless given.
        config: of the model, for ``list`` to tell which stored voices were made for another one.
        takes_recordings: whether the model can read speech, to make a voice of it or to convert it.

    Attributes:
        folder, takes_recordings: as given.
    """

    def __init__(
        self,
        folder: Path,
        builtin: Mapping[str, Voice] | None = None,
        *,
        max_voices: int = 10_000,
        default: str | None = None,
        config: ModelConfig | None = None,
        takes_recordings: bool = True,
    ) -> None:
        self.folder = self._folder = folder
        self.takes_recordings = takes_recordings
        self._config = config
        self._default = default
        self._builtin = {check_voice_name(name): voice for name, voice in (builtin or {}).items()}
        self._max_voices = max_voices
        self._cache: dict[str, tuple[tuple[int, ...], Voice]] = {}
        self._lock = threading.Lock()
        self._usable: dict[str, tuple[tuple[int, ...], bool]] = {}
        self._usable_lock = threading.Lock()
        self._remove_stale_files()
        self._stored_names(warn=True)

    @property
    def builtin_names(self) -> tuple[str, ...]:
        """Names of the model's own voices, in order; costs nothing, unlike ``list``, which reads every file."""
        return tuple(sorted(self._builtin))

    @property
    def default_name(self) -> str | None:
        """The built-in voice that speaks where none is asked for; None without built-in voices."""
        names = self.builtin_names
        return self._default if self._default in names else next(iter(names), None)

    def names(self) -> list[str]:
        """Names of all voices, built-in ones first, each kind in order; reads the folder, but no file."""
        return [*self.builtin_names, *sorted(self._stored_names())]

    def usable_names(self) -> list[str]:
        """As ``names``, without the voices that cannot speak (``VoiceEntry.can_speak``).

        Reads the files that are new or have changed since it was called last.
        """
        with self._usable_lock:
            usable = {}
            for name in sorted(self._stored_names()):
                with contextlib.suppress(OSError):  # removed meanwhile
                    state = identity(os.lstat(self._path(name)))
                    known = self._usable.get(name)
                    if known is None or known[0] != state:
                        known = state, self._can_speak(name)
                    usable[name] = known
            self._usable = usable
            return [*self.builtin_names, *(name for name, (_, can_speak) in usable.items() if can_speak)]

    def get(self, name: str) -> Voice:
        """The voice of that name; the same object as long as its file does not change.

        Raises:
            VoiceNotFoundError: there is none; the same error for any name, however it is spelled.
            InvalidVoiceError: ``invalid_voice``: its file is damaged.
        """
        try:
            name = check_voice_name(name)
        except InvalidVoiceError:
            raise _not_found() from None
        builtin = self._builtin.get(name)
        if builtin is not None:
            return builtin
        path = self._path(name)
        if not self._is_ours(path):
            raise _not_found()
        with self._lock:
            try:
                cached = self._cache.pop(name, None)
                if cached is None or cached[0] != identity(os.lstat(path)):
                    data, state = read_regular_file(path)
                    cached = (state, from_bytes(data, name))
            except OSError:
                raise _not_found() from None
            self._cache[name] = cached  # last in the order: used most recently
            if len(self._cache) > MAX_CACHED:
                del self._cache[next(iter(self._cache))]
            return cached[1]

    def add(self, voice: Voice) -> None:
        """Store a voice. It is on disk when this returns.

        Raises:
            VoiceExistsError: the name is taken, by a built-in voice or in the folder.
            VivaceError: ``storage_full``.
        """
        if voice.name in self._builtin:
            raise VoiceExistsError("This is the name of a built-in voice. Take another name.")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise VivaceError("The folder for voices cannot be created.", code="storage_full") from error
        if len(self._stored_names()) >= self._max_voices:
            raise VivaceError(
                f"There are {self._max_voices} stored voices. Remove some first.", code="storage_full"
            )
        create_voice_file(voice, self._path(voice.name))

    def remove(self, name: str) -> None:
        """Delete a stored voice, also a broken one. Requests that use it go on.

        Raises:
            VoiceNotFoundError: there is none. InvalidVoiceError: ``builtin_voice``: it came with the model.
        """
        try:
            name = check_voice_name(name)
        except InvalidVoiceError:
            raise _not_found() from None
        if name in self._builtin:
            raise InvalidVoiceError("A built-in voice cannot be removed.", code="builtin_voice", param="name")
        path = self._path(name)
        if not self._is_ours(path):
            raise _not_found()
        with self._lock:
            self._cache.pop(name, None)
            try:
                path.unlink()
            except OSError:
                raise _not_found() from None
        sync_folder(self._folder)

    def list(self) -> list[VoiceEntry]:
        """All voices, built-in ones first, each kind by name."""
        entries = [_entry(voice, name, "built-in") for name, voice in sorted(self._builtin.items())]
        for name in sorted(self._stored_names()):
            try:
                entries.append(self._stored_entry(name))
            except VoiceNotFoundError:
                continue  # removed meanwhile
            except VivaceError as error:
                entries.append(VoiceEntry(name, "broken", problem=error.message))
        return entries

    def _can_speak(self, name: str) -> bool:
        try:
            return self._stored_entry(name).can_speak
        except VivaceError:
            return False

    def _stored_entry(self, name: str) -> VoiceEntry:
        voice = self.get(name)
        entry = _entry(voice, name, "stored")
        try:
            if self._config is not None:
                voice.check_fits(self._config)
        except InvalidVoiceError as error:
            return replace(entry, kind="unfit", problem=error.message)
        return entry

    def export(self, name: str, path: Path) -> Path:
        """Write a voice to a file of its own: ``path``, or ``NAME.safetensors`` in it if it is a folder.

        Returns:
            Where the voice is.

        Raises:
            VoiceNotFoundError: there is none. FileNotFoundError: the file's folder does not exist.
            FileExistsError: a device or a pipe has the name. VivaceError: ``storage_full``.
        """
        voice = self.get(name)
        if path.is_dir():
            path = path / f"{voice.name}{SUFFIX}"
        if not path.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, "its folder does not exist; make it first", str(path))
        if path.exists() and not path.is_file():  # a device or a pipe would be replaced by the file
            raise FileExistsError(errno.EEXIST, "is no regular file; name another", str(path))
        save_voice(voice, path)
        return path

    def import_voice(self, path: Path, name: str | None = None) -> Voice:
        """Store a voice that was exported elsewhere, under its own name or ``name``.

        Raises:
            InvalidVoiceError: the file is damaged or no voice. VoiceExistsError: the name is taken.
        """
        if not path.exists():
            raise invalid_voice(f"there is no file {path}")
        voice = load_voice(path)
        if name is not None:
            voice = replace(voice, name=name)
        self.add(voice)
        return voice

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{SUFFIX}"

    def _stored_names(self, *, warn: bool = False) -> set[str]:
        names: set[str] = set()
        try:
            with os.scandir(self._folder) as entries:
                found = [Path(entry) for entry in entries]
        except OSError:
            return names
        for path in found:
            if path.suffix != SUFFIX or path.name.startswith("."):
                continue
            if self._is_valid_name(path.stem) and self._is_ours(path):
                names.add(path.stem)
            elif warn:
                _log.warning("skipped in the folder of voices: %s", ascii(path.name)[:100])
        return names

    def _is_valid_name(self, stem: str) -> bool:
        try:
            return check_voice_name(stem) == stem and stem not in self._builtin
        except InvalidVoiceError:
            return False

    def _is_ours(self, path: Path) -> bool:
        """A regular file, not a link, owned by us or by the owner of the folder."""
        try:
            status = os.lstat(path)
            owners = (
                {os.lstat(self._folder).st_uid, os.geteuid()} if hasattr(os, "geteuid") else {status.st_uid}
            )
        except OSError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_uid in owners

    def _remove_stale_files(self) -> None:
        """Temporary files of writers that did not live to remove them."""
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                if _TEMPORARY_NAME.fullmatch(entry.name) is None or not self._is_ours(Path(entry)):
                    continue
                with contextlib.suppress(
                    OSError
                ):  # its writer may finish, or another process remove it, meanwhile
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > STALE_SECONDS:
                        os.unlink(entry)


def _entry(voice: Voice, name: str, kind: Literal["built-in", "stored"]) -> VoiceEntry:
    seconds, created = voice.meta.get("seconds"), voice.meta.get("created")
    return VoiceEntry(
        name,
        kind,
        seconds=float(seconds) if isinstance(seconds, int | float) else 0.0,
        prompt_text=voice.prompt_text,
        created=created if isinstance(created, str) else "",
        consent=voice.meta.get("consent") is True,
    )


def _not_found() -> VoiceNotFoundError:
    return VoiceNotFoundError(
        "There is no voice of this name; `vivace voice list`, or GET /v1/audio/voices of a server, shows all.",
        param="voice",
    )
