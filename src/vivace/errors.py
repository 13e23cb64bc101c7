"""The exception tree.

    VivaceError                      everything that Vivace raises on purpose
    ├── InvalidRequestError          the caller's input; 400; raised before any model work
    │   ├── InvalidTextError         text: empty, too long, nothing to speak, not valid Unicode, ...
    │   ├── InvalidAudioError        prompt audio: not audio, too short, too long, silent, ...
    │   └── InvalidVoiceError        voice names and voice files
    ├── VoiceNotFoundError           no voice of that name; 404
    ├── VoiceExistsError             the name is taken; 409
    ├── ModelFolderError             a model folder that is missing, damaged, or of another kind; exit code 2
    ├── ServeError                   the server cannot start as it was told; exit code 2
    ├── OverloadedError              queue full; 503 with a time to come back
    ├── CancelledRequestError        the caller or the engine ended the request early
    └── SynthesisError               a stage failed for this request (non-finite values, no speech made); 500

Each error has a ``code`` of the error contract (a short stable word), an optional ``param`` (which input)
and a message that says what to do. Messages never echo the caller's input. Users read them as ``sentence``.
"""

from __future__ import annotations

import re

_PLAIN_WORD = re.compile(r"[a-z][a-z']*(?= )")


class VivaceError(Exception):
    """Base of all errors raised on purpose.

    Args:
        message: one line; says what is wrong and what to do.
        code: stable word of the error contract, such as ``empty_input``.
        param: name of the input at fault, if one is.
    """

    http_status = 500
    default_code = "internal_error"

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.param = param

    @property
    def sentence(self) -> str:
        """``message`` as every interface shows it: one line, a capital letter, a full stop.

        A name at its beginning (a file, an option, the input at fault) stays as it is written.
        """
        text = " ".join(self.message.split())
        first = _PLAIN_WORD.match(text)
        if first and first.group() != self.param:
            text = text[0].upper() + text[1:]
        return text if text.endswith((".", "!", "?")) else text + "."


class InvalidRequestError(VivaceError, ValueError):
    """Wrong input. Raised by ``engine.request`` and whoever checks an input."""

    http_status = 400
    default_code = "value_out_of_range"


class InvalidTextError(InvalidRequestError):
    """Raised by ``text``: codes ``empty_input``, ``input_too_long``, ``unpronounceable_input``, ``invalid_type``,
    ``invalid_utf8``, ``special_token_not_allowed``."""

    default_code = "unpronounceable_input"


class InvalidAudioError(InvalidRequestError):
    """Raised by ``audio.decode`` and ``voice``: codes ``invalid_audio``, ``audio_too_short``,
    ``audio_too_long``, ``audio_silent``, ``audio_clipped``, ``non_finite_samples``, ``unsupported_sample_rate``,
    ``unsupported_channels``, ``unsupported_media_type``, ``payload_too_large``."""

    default_code = "invalid_audio"


class InvalidVoiceError(InvalidRequestError):
    """Raised by ``voice``: code ``invalid_name`` or ``invalid_voice`` (a damaged voice file)."""

    default_code = "invalid_name"


class VoiceNotFoundError(VivaceError, LookupError):
    """Raised by the voice registry."""

    http_status = 404
    default_code = "voice_not_found"


class VoiceExistsError(VivaceError):
    """Raised by the voice registry when a name is taken."""

    http_status = 409
    default_code = "voice_exists"


class ModelFolderError(VivaceError):
    """Raised by ``checkpoint``. The command line ends with exit code 2 and prints the message."""

    default_code = "invalid_model_folder"


class ServeError(VivaceError):
    """Raised by ``vivace serve`` before it takes requests: a busy port, missing keys."""

    default_code = "cannot_serve"


class OverloadedError(VivaceError):
    """Raised at submit when the queue is full, and by a server that takes no requests now: codes ``overloaded``,
    ``draining``, ``engine_restarting``.

    Args:
        retry_after_s: seconds after which trying again makes sense.
    """

    http_status = 503
    default_code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class CancelledRequestError(VivaceError):
    """The request was cancelled before its end; what was produced so far stays valid."""

    http_status = 499
    default_code = "cancelled"


class SynthesisError(VivaceError):
    """One request failed inside a stage: codes ``synthesis_failed`` (non-finite values, a fault of ours) and
    ``no_speech`` (the model made none, or near silence, whatever was drawn; another seed may do better)."""

    default_code = "synthesis_failed"
