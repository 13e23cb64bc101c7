"""Recordings in which speakers agree to the use of their voice, kept beside the voices.

One file each, ``consents/<id>.consent`` in the folder of voices: a line of JSON, then the recording as it came.
Readable by their owner only; never sent to anybody.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vivace.errors import VivaceError
from vivace.voice.file import TEMPORARY_SUFFIX, sync_folder, temporary_file

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX = "cons_"
MAX_CONSENTS = 1_000
MAX_HEAD_BYTES = 4 * 1024
SUBFOLDER = "consents"
SUFFIX = ".consent"
STALE_SECONDS = 3600.0

_ID = re.compile(rf"{PREFIX}[0-9a-f]{{24}}")


@dataclass(frozen=True, slots=True)
class Consent:
    """What is known of one recording.

    Attributes:
        name: the label that its owner gave it.
        language: BCP 47 tag of what is said.
        created_at: seconds since 1970, UTC.
    """

    id: str
    name: str
    language: str
    created_at: int


class ConsentNotFoundError(VivaceError):
    """``consent_not_found``."""

    http_status = 404

    def __init__(self) -> None:
        super().__init__("There is no consent of this id.", code="consent_not_found", param="consent")


class ConsentRegistry:
    """The recordings of one folder. Safe for several threads; of two writers the last one's label stays.

    Args:
        voices_folder: of the voices; the recordings lie in a folder below it, made with the first one.
    """

    def __init__(self, voices_folder: Path, *, max_consents: int = MAX_CONSENTS) -> None:
        self._folder = voices_folder / SUBFOLDER
        self._max_consents = max_consents
        self._lock = threading.Lock()
        self._remove_stale_files()

    def create(self, name: str, language: str, recording: bytes) -> Consent:
        """Stores a recording. It is on disk when this returns.

        Raises:
            VivaceError: ``storage_full``.
        """
        consent = Consent(f"{PREFIX}{secrets.token_hex(12)}", name, language, int(time.time()))
        with self._lock:
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise VivaceError(
                    "The folder for consents cannot be created.", code="storage_full"
                ) from error
            if sum(1 for _ in self._paths()) >= self._max_consents:
                raise VivaceError(
                    f"There are {self._max_consents} consents. Remove some first.", code="storage_full"
                )
            self._write(consent, recording)
        return consent

    def get(self, consent_id: str) -> Consent:
        """Raises ``ConsentNotFoundError``; the same error for any id, however it is spelled."""
        return self._read(self._path(consent_id))[0]

    def rename(self, consent_id: str, name: str) -> Consent:
        """Gives it another label.

        Raises:
            ConsentNotFoundError: there is none. VivaceError: ``storage_full``.
        """
        path = self._path(consent_id)
        with self._lock:
            consent, recording = self._read(path)
            consent = replace(consent, name=name)
            self._write(consent, recording)
        return consent

    def remove(self, consent_id: str) -> None:
        """Deletes the recording. Voices made with it stay. Raises ``ConsentNotFoundError``."""
        path = self._path(consent_id)
        with self._lock:
            try:
                path.unlink()
            except OSError:
                raise ConsentNotFoundError from None
        sync_folder(self._folder)

    def list(self) -> list[Consent]:
        """All of them, the oldest first; damaged files are left out."""
        found = []
        for path in self._paths():
            try:
                found.append(self._read(path, max_bytes=MAX_HEAD_BYTES)[0])
            except ConsentNotFoundError:
                continue
        return sorted(found, key=lambda consent: (consent.created_at, consent.id))

    def _remove_stale_files(self) -> None:
        """Temporary files of writers that did not live to remove them."""
        with contextlib.suppress(OSError):
            for path in self._folder.glob(f".{PREFIX}*{TEMPORARY_SUFFIX}"):
                with contextlib.suppress(OSError):  # its writer may finish meanwhile
                    if time.time() - path.lstat().st_mtime > STALE_SECONDS:
                        path.unlink()

    def _path(self, consent_id: str) -> Path:
        if _ID.fullmatch(consent_id) is None:
            raise ConsentNotFoundError
        return self._folder / f"{consent_id}{SUFFIX}"

    def _paths(self) -> Iterator[Path]:
        try:
            with os.scandir(self._folder) as entries:
                names = [entry.name for entry in entries]
        except OSError:
            return
        yield from (self._folder / name for name in names if self._is_name(name))

    def _is_name(self, name: str) -> bool:
        return name.endswith(SUFFIX) and _ID.fullmatch(name.removesuffix(SUFFIX)) is not None

    def _write(self, consent: Consent, recording: bytes) -> None:
        path = self._path(consent.id)
        head = json.dumps(asdict(consent), ensure_ascii=False).encode()
        with temporary_file(path, head + b"\n" + recording) as temporary:
            os.replace(temporary, path)
        sync_folder(self._folder)

    def _read(self, path: Path, max_bytes: int = -1) -> tuple[Consent, bytes]:
        """Never follows a link, never waits for a pipe."""
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        try:
            with open(os.open(path, flags | getattr(os, "O_BINARY", 0)), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise ConsentNotFoundError
                head = file.readline(MAX_HEAD_BYTES)
                recording = file.read() if max_bytes < 0 else b""
            document = json.loads(head)
            consent = Consent(
                path.name.removesuffix(SUFFIX),
                str(document["name"]),
                str(document["language"]),
                int(document["created_at"]),
            )
        except (OSError, ValueError, KeyError, TypeError):
            raise ConsentNotFoundError from None
        return consent, recording
