"""One voice, one file: safetensors, with the voice's JSON in the file's own header.

One file, not two, because a single rename then makes a voice appear whole or not at all. Nothing in such
a file is executed. The header is ``{"__metadata__": {"vivace_voice": JSON}, ...}``, where the JSON is
``{"format": 1, "name", "prompt_text", "meta"}``; the tensors are ``speech_tokens`` (int32), ``mel`` and
``embedding`` (float32).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
from typing import TYPE_CHECKING

import safetensors.numpy

from vivace.errors import InvalidTextError, VivaceError, VoiceExistsError
from vivace.voice.value import Voice, invalid_voice

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FORMAT = 1
MAX_FILE_BYTES = 16 * 1024 * 1024
"""A 30 s prompt takes 0.5 MB."""
SUFFIX = ".safetensors"
TEMPORARY_SUFFIX = ".tmp"

_KEY = "vivace_voice"
_TENSORS = {"speech_tokens", "mel", "embedding"}


def to_bytes(voice: Voice) -> bytes:
    """The file's content."""
    document = {
        "format": FORMAT,
        "name": voice.name,
        "prompt_text": voice.prompt_text,
        "meta": dict(voice.meta),
    }
    tensors = {"speech_tokens": voice.speech_tokens, "mel": voice.mel, "embedding": voice.embedding}
    return safetensors.numpy.save(tensors, metadata={_KEY: json.dumps(document, ensure_ascii=False)})


def from_bytes(data: bytes, name: str | None = None) -> Voice:
    """The voice in a file's content, under ``name`` if given.

    Raises:
        InvalidVoiceError: ``invalid_voice``: not such a file, damaged, or of a newer format.
    """
    try:
        header_bytes = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + header_bytes])
        document = json.loads(header["__metadata__"][_KEY])
        tensors = safetensors.numpy.load(data)
        file_format, stored_name = document["format"], document["name"]
        prompt_text, meta = document["prompt_text"], document["meta"]
    except Exception as error:  # JSON, Unicode, safetensors and type errors alike: it is not a file of ours
        raise invalid_voice("the file is damaged or not a Vivace voice") from error
    if file_format != FORMAT:
        raise invalid_voice("the file has another format version; update Vivace or make the voice again")
    well_formed = isinstance(stored_name, str) and isinstance(prompt_text, str) and isinstance(meta, dict)
    if not well_formed or set(tensors) != _TENSORS:
        raise invalid_voice("the file is damaged or not a Vivace voice")
    speech_tokens, mel, embedding = tensors["speech_tokens"], tensors["mel"], tensors["embedding"]
    try:
        return Voice(name or stored_name, prompt_text, speech_tokens, mel, embedding, meta)
    except InvalidTextError as error:  # here the text is part of a file, and nothing that a caller gave
        raise invalid_voice(error.message) from error


def load_voice(path: Path, name: str | None = None) -> Voice:
    """Read a voice file.

    Raises:
        InvalidVoiceError: ``invalid_voice``; also for a symbolic link, a directory, a pipe or a huge file.
    """
    try:
        return from_bytes(read_regular_file(path)[0], name)
    except OSError as error:
        raise invalid_voice("its file cannot be read") from error


def save_voice(voice: Voice, path: Path) -> None:
    """Write a voice file, replacing what is there in one step: at any crash the old or the new file is whole.

    Raises:
        VivaceError: ``storage_full`` or another failure to write.
    """
    with temporary_file(path, to_bytes(voice)) as temporary:
        os.replace(temporary, path)
    sync_folder(path.parent)


def create_voice_file(voice: Voice, path: Path) -> None:
    """Write a voice file that must not exist yet. Of several processes that try, exactly one succeeds.

    Raises:
        VoiceExistsError: the file exists.
        VivaceError: ``storage_full`` or another failure to write.
    """
    with temporary_file(path, to_bytes(voice)) as temporary:
        try:
            try:
                os.link(temporary, path)
            except FileExistsError:
                raise
            except OSError:
                # No hard links on this file system: claim the name with an empty file, then move ours over it.
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
                os.replace(temporary, path)
        except FileExistsError:
            raise VoiceExistsError("The name is taken; remove that voice or take another.") from None
    sync_folder(path.parent)


def read_regular_file(path: Path) -> tuple[bytes, tuple[int, ...]]:
    """Content and identity (inode, time, size, owner) of a regular file; never follows a link, never waits.

    Raises:
        OSError: it cannot be opened. InvalidVoiceError: it is no regular file, or too large.
    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    with open(os.open(path, flags | getattr(os, "O_BINARY", 0)), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise invalid_voice("its file is not a regular file")
        # The size first, to read nothing of a huge file; then what was read, as the file may have grown.
        data = file.read(MAX_FILE_BYTES + 1) if status.st_size <= MAX_FILE_BYTES else None
        if data is None or len(data) > MAX_FILE_BYTES:
            raise invalid_voice("its file is too large")
        return data, identity(status)


def identity(status: os.stat_result) -> tuple[int, ...]:
    """What changes when a file is replaced."""
    return (status.st_ino, status.st_mtime_ns, status.st_size)


def sync_folder(folder: Path) -> None:
    """Make renames in ``folder`` survive a power cut (where the system can)."""
    with contextlib.suppress(OSError, AttributeError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def temporary_file(target: Path, data: bytes, mode: int = 0o600) -> Iterator[Path]:
    """``data``, safely on disk, in a file next to ``target`` that is gone afterwards unless it was moved.

    Args:
        mode: permissions, as far as the process's mask leaves them.

    Raises:
        VivaceError: ``storage_full`` or another failure to write, also within the block.
    """
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")
    try:
        descriptor = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), mode
        )
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    except OSError as error:
        raise VivaceError(
            f"The file could not be written ({error.strerror}). Check the folder's space and rights.",
            code="storage_full",
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
