"""A folder of audio files and ``results.jsonl``: what was done, whatever ended the run before.

An audio file gets its name only once it is whole and on disk, and its line of result only after that. A job counts as
done if its last line says so, the job is still the same, and the file has the size that the line names.
"""

from __future__ import annotations

import json
import os
import re
import threading
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from vivace.audio.pcm import write_all
from vivace.errors import InvalidRequestError
from vivace.voice.file import TEMPORARY_SUFFIX, temporary_file

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from vivace.batch.jobs import BatchJob
    from vivace.errors import VivaceError

RESULTS = "results.jsonl"

_TEMPORARY = re.compile(rf"\..+\.[0-9a-f]+{re.escape(TEMPORARY_SUFFIX)}")


@dataclass(frozen=True, slots=True)
class JobResult:
    """One line of ``results.jsonl``. The figures are those of ``SynthesisResult``; None where the job failed.

    Attributes:
        id: None only for a line of the jobs file that has none.
        line: of the jobs file.
        file: name in the folder; bytes: its size.
        skipped_text: what the model cannot read and did not speak; None if it spoke all.
        seed: the one that spoke, or was tried last; attempts: how many were tried.
        code, message: why the job failed; None if it did not.
        fingerprint: of the job (``BatchJob.fingerprint``).
    """

    id: str | None
    line: int | None = None
    file: str | None = None
    bytes: int | None = None
    audio_seconds: float | None = None
    ttfb_ms: float | None = None
    wall_ms: float | None = None
    rtf: float | None = None
    tps: float | None = None
    num_text_tokens: int | None = None
    num_speech_tokens: int | None = None
    finish_reason: str | None = None
    skipped_text: list[str] | None = None
    seed: int | None = None
    attempts: int = 0
    code: str | None = None
    message: str | None = None
    fingerprint: str | None = None

    @classmethod
    def failed(
        cls,
        job_id: str | None,
        line: int | None,
        error: VivaceError,
        seed: int | None = None,
        attempts: int = 0,
    ) -> JobResult:
        """Of a job that ended with ``error``."""
        return cls(job_id, line, seed=seed, attempts=attempts, code=error.code, message=error.sentence)


_NAMES = tuple(each.name for each in fields(JobResult))


class ResultsFolder:
    """Opens a folder for one run at a time, and reads what earlier runs did there. Any thread may write.

    Args:
        folder: made if it is missing.

    Raises:
        OSError: it cannot be made or written. InvalidRequestError: another run writes there.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._path = self.folder / RESULTS
        self._file = cast("BinaryIO", self._path.open("ab+", buffering=0))
        self._lines = threading.Lock()
        self._done: dict[str, tuple[str, int]] = {}
        try:
            _lock(self._file)
            self._read()
        except BaseException:
            self._file.close()
            raise
        self._remove_leftovers()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Lets another run in."""
        self._file.close()

    def has(self, job: BatchJob, fingerprint: str) -> bool:
        """Whether the job is done."""
        known = self._done.get(job.id)
        if known is None or known[0] != fingerprint:
            return False
        try:
            return (self.folder / job.file_name).stat().st_size == known[1]
        except OSError:
            return False

    def save(self, job: BatchJob, data: bytes) -> None:
        """The job's audio file: there with its whole content, or as it was before.

        Raises:
            VivaceError: ``storage_full`` or another failure to write.
        """
        target = self.folder / job.file_name
        with temporary_file(target, data, mode=0o666) as temporary:
            os.replace(temporary, target)

    def append(self, result: JobResult) -> None:
        """One more line.

        Raises:
            OSError: the disk is full.
        """
        document = {name: getattr(result, name) for name in _NAMES}
        line = json.dumps(document, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        with self._lines:
            try:
                write_all(self._file, line)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._path)) from error
            self._note(document)

    def _read(self) -> None:
        """Fingerprint and size by id, of the jobs whose last line says that they are done."""
        last = b"\n"
        with self._path.open("rb") as lines:
            for last in lines:
                with suppress(ValueError, RecursionError):  # what a crash, or somebody else, left behind
                    self._note(json.loads(last))
        if not last.endswith(b"\n"):
            write_all(self._file, b"\n")

    def _note(self, document: Any) -> None:
        match document:
            case {"id": str(job_id), "code": None, "fingerprint": str(fingerprint), "bytes": int(size)}:
                self._done[job_id] = fingerprint, size
            case {"id": str(job_id), "fingerprint": str()}:  # it was tried, and failed
                self._done.pop(job_id, None)

    def _remove_leftovers(self) -> None:
        """Temporary files of a run that was killed. Ours alone: the folder is locked."""
        for path in self.folder.iterdir():
            if _TEMPORARY.fullmatch(path.name) is not None:
                with suppress(OSError):
                    path.unlink()


def _lock(file: BinaryIO) -> None:
    """Until the file is closed, or its process ends, nobody else gets it; where there are no locks: nothing."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InvalidRequestError(
            "another run writes into this folder; wait for its end or take another folder",
            code="folder_in_use",
            param="out",
        ) from None
    except OSError:
        return  # some network file systems have no locks
