"""Jobs, and the lines of a jobs file: one JSON object each."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vivace import strict_json
from vivace.audio.encoders import StreamFormat, check_stream_format
from vivace.config import Limits
from vivace.datatypes import SamplingParams
from vivace.engine.request import SynthesisRequest, check_request
from vivace.errors import InvalidRequestError, InvalidTextError, VivaceError
from vivace.voice import Voice

OF_REQUEST = ("voice", "instruction", "cross_lingual", "language", "speed", "stream")
OF_SAMPLING = ("seed", "temperature", "top_p", "top_k")
OF_JOB = ("id", "text", "format", "prompt_audio", "prompt_text", "consent")
MEMBERS = (*OF_JOB, *OF_REQUEST, *OF_SAMPLING)
"""What a line may say; the names are those of ``SynthesisRequest``, ``SamplingParams`` and ``BatchJob``."""

MAX_ID_BYTES = 200
"""In UTF-8: with a suffix, and that of a temporary file, still a file name everywhere."""

_ID = re.compile(r"\w[\w.-]*")
_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class BatchJob:
    """One utterance of a batch.

    Attributes:
        id: names the job and its file: letters, digits, "_", "-" and ".", beginning with a letter, digit or "_".
        request: what to say; its text is a str. ``voice`` is None where ``prompt_audio`` is given.
        format: one of the HTTP interface's formats; also the file's suffix.
        prompt_audio, prompt_text: a recording to speak like, and what it says; consent: of its speaker.
        line: where it stands in a jobs file.
    """

    id: str
    request: SynthesisRequest
    format: StreamFormat = "wav"
    prompt_audio: Path | None = None
    prompt_text: str = ""
    consent: bool = False
    line: int | None = None

    @property
    def file_name(self) -> str:
        """Name of its audio file."""
        return f"{self.id}.{self.format}"

    @property
    def key(self) -> str:
        """Equal for ids whose files would be the same one on some file systems."""
        return unicodedata.normalize("NFC", self.id).casefold()

    def check(self) -> None:
        """Finds what can be found before any work.

        Raises:
            InvalidRequestError: names the field.
        """
        if (
            not isinstance(self.id, str)
            or _ID.fullmatch(self.id) is None
            or len(self.id.encode()) > MAX_ID_BYTES
        ):
            raise InvalidRequestError(
                f"id must be a file name of letters, digits, '_', '-' and '.', at most {MAX_ID_BYTES} bytes long",
                code="invalid_name",
                param="id",
            )
        if not isinstance(self.request.text, str):
            raise InvalidTextError("text must be a string", code="invalid_type", param="text")
        check_request(self.request, _LIMITS)
        check_stream_format(self.format, "format")
        if self.prompt_text and self.prompt_audio is None:
            raise InvalidRequestError(
                "prompt_text says what prompt_audio holds; give both", param="prompt_text"
            )
        if self.prompt_audio is None:
            return
        if self.request.voice is not None:
            raise InvalidRequestError("give voice or prompt_audio, not both", param="prompt_audio")
        if self.consent is not True:
            raise InvalidRequestError(
                "cloning a voice needs the consent of its speaker: say so with consent",
                code="consent_required",
                param="consent",
            )

    def fingerprint(self, model: str = "") -> str:
        """The same for the same job spoken by the same model: tells whether a finished job is this one."""
        request = self.request
        voice = request.voice.name if isinstance(request.voice, Voice) else request.voice
        parts = {name: getattr(request, name) for name in ("text", *OF_REQUEST)} | {"voice": voice}
        prompt = None if self.prompt_audio is None else str(self.prompt_audio)
        rest = [asdict(request.sampling), self.format, prompt, self.prompt_text, model]
        return hashlib.sha256(json.dumps([parts, *rest], sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class BadJob:
    """A line that is no job.

    Attributes:
        id: as far as the line has one.
    """

    line: int
    error: VivaceError
    id: str | None = None


def read_jobs(
    source: Path | str | Iterable[bytes], defaults: Mapping[str, Any] | None = None
) -> Iterator[BatchJob | BadJob]:
    """The jobs of a file, read while they are asked for. Empty lines are left out.

    Args:
        source: its path, from whose folder paths in it are seen; or its lines, where that is the current folder.
        defaults: members for lines that do not have them. A line's own ``prompt_audio`` replaces ``voice``.

    Raises:
        InvalidRequestError: a default that no job may have. OSError (while reading): the file cannot be read.
    """
    known = dict(defaults or {})
    folder = Path(source).parent if isinstance(source, Path | str) else Path()
    _job("defaults", known, {"text": "Text."}, 0, folder).check()
    return _read(source, folder, known)


def _read(
    source: Path | str | Iterable[bytes], folder: Path, defaults: Mapping[str, Any]
) -> Iterator[BatchJob | BadJob]:
    with open(source, "rb") if isinstance(source, Path | str) else nullcontext(source) as lines:
        for number, line in enumerate(lines, 1):
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if text.strip():
                yield _parse(text, number, folder, defaults)


def _parse(line: bytes, number: int, folder: Path, defaults: Mapping[str, Any]) -> BatchJob | BadJob:
    job_id: str | None = None
    try:
        members = _members(line)
        given = members.get("id", f"{number:06d}")
        # Numbers are taken as written; True is none.
        job_id = str(given) if isinstance(given, str) or type(given) is int else None
        return _job(job_id, defaults, members, number, folder)
    except VivaceError as error:
        return BadJob(number, error, job_id and job_id[:MAX_ID_BYTES])


def _members(line: bytes) -> dict[str, Any]:
    """What the line says; a member that is null counts as absent."""
    try:
        document = strict_json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise InvalidRequestError("the line is not valid UTF-8", code="invalid_utf8") from None
    except (ValueError, RecursionError):
        raise InvalidRequestError(
            "the line is not valid JSON, or it names something twice", code="invalid_json"
        ) from None
    if not isinstance(document, dict):
        raise InvalidRequestError("the line must be a JSON object", code="invalid_type")
    if not document.keys() <= set(MEMBERS):
        raise InvalidRequestError(
            f"the line has a member that is none of {', '.join(MEMBERS)}", code="unsupported_value"
        )
    return {name: value for name, value in document.items() if value is not None}


def _job(
    job_id: str | None, defaults: Mapping[str, Any], members: dict[str, Any], number: int, folder: Path
) -> BatchJob:
    if job_id is None:
        raise InvalidRequestError("id must be a string or an integer", code="invalid_type", param="id")
    if "text" not in members:
        raise InvalidTextError("text is missing", code="missing_field", param="text")
    own = {"prompt_audio": ("voice",), "voice": ("prompt_audio", "prompt_text")}
    dropped = {name for member, others in own.items() if member in members for name in others}
    known = {name: value for name, value in defaults.items() if name not in dropped} | members
    for name in ("voice", "format", "prompt_audio", "prompt_text"):
        if name in known and not isinstance(known[name], str):
            raise InvalidRequestError(f"{name} must be a string", code="invalid_type", param=name)
    if not isinstance(known.get("consent", False), bool):
        raise InvalidRequestError("consent must be true or false", code="invalid_type", param="consent")
    prompt = known.get("prompt_audio")
    return BatchJob(
        id=job_id,
        request=SynthesisRequest(
            text=known["text"],
            sampling=SamplingParams(**{name: known[name] for name in OF_SAMPLING if name in known}),
            **{name: known[name] for name in OF_REQUEST if name in known},
        ),
        format=known.get("format", "wav"),
        prompt_audio=None if prompt is None else folder / prompt,
        prompt_text=known.get("prompt_text", ""),
        consent=known.get("consent", False),
        line=number,
    )
