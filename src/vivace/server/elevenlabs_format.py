"""ElevenLabs' output formats: ``codec_rate_bitrate``, such as ``mp3_44100_128``, ``pcm_16000`` or ``ulaw_8000``.

Codec and rate are kept; the bit rate is the encoder's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vivace.audio.encoders import ResamplingEncoder, open_encoder
from vivace.audio.telephony import AlawEncoder, UlawEncoder
from vivace.server.errors import ServerError

if TYPE_CHECKING:
    from vivace.audio.encoders import StreamEncoder

DEFAULT_FORMAT = "mp3_44100_128"
OUTPUT_FORMATS = (
    *(f"pcm_{rate_hz}" for rate_hz in (8_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)),
    *("mp3_22050_32", "mp3_24000_48", "mp3_44100_32", "mp3_44100_64", "mp3_44100_96"),
    *("mp3_44100_128", "mp3_44100_192"),
    *("opus_48000_32", "opus_48000_64", "opus_48000_96", "opus_48000_128", "opus_48000_192"),
    *("ulaw_8000", "alaw_8000"),
)
_MEDIA_TYPES = {
    "pcm": "audio/pcm",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "ulaw": "audio/basic",
    "alaw": "audio/x-alaw-basic",
}


def check_output_format(name: str | None) -> str:
    """The format of that name, ElevenLabs' default for None. Raises ``unsupported_value``."""
    if name is None:
        return DEFAULT_FORMAT
    if name not in OUTPUT_FORMATS:
        raise ServerError(
            f"output_format must be one of {', '.join(OUTPUT_FORMATS)}.",
            code="unsupported_value",
            param="output_format",
        )
    return name


def media_type_of(name: str) -> str:
    """For ``Content-Type``."""
    return _MEDIA_TYPES[name.split("_")[0]]


def open_output(name: str, rate_hz: int) -> StreamEncoder:
    """An encoder for samples of the model's rate."""
    codec, rate = name.split("_")[:2]
    rate_out_hz = int(rate)
    if codec in ("mp3", "opus", "pcm"):
        return open_encoder(codec, rate_hz, rate_out_hz)
    encoder = {"ulaw": UlawEncoder, "alaw": AlawEncoder}[codec]()
    return encoder if rate_out_hz == rate_hz else ResamplingEncoder(encoder, rate_hz, rate_out_hz)
