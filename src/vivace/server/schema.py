"""What ``/openapi.json`` says of bodies that we read ourselves."""

from __future__ import annotations

from typing import Any

from vivace.audio.encoders import STREAM_FORMATS

_STRING = {"type": "string"}
_SPEECH: dict[str, Any] = {
    "type": "object",
    "required": ["input"],
    "properties": {
        "model": {"type": "string", "minLength": 1, "maxLength": 256},
        "input": {"type": "string", "minLength": 1, "maxLength": 4096},
        "voice": {
            "anyOf": [
                {"type": "string", "maxLength": 256},
                {"type": "object", "required": ["id"], "properties": {"id": _STRING}},
            ]
        },
        "instructions": {"type": "string", "maxLength": 1000},
        "response_format": {"type": "string", "enum": list(STREAM_FORMATS)},
        "speed": {"type": "number", "minimum": 0.25, "maximum": 4.0},
        "stream_format": {"type": "string", "enum": ["audio", "sse"]},
        "stream": {"type": "boolean"},
        "seed": {"type": "integer", "minimum": 0, "maximum": 2**63 - 1},
        "language": {"type": "string", "maxLength": 256},
        "cross_lingual": {"type": "boolean"},
        "temperature": {"type": "number", "minimum": 0, "maximum": 10},
        "top_p": {"type": "number", "minimum": 1e-6, "maximum": 1},
        "top_k": {"type": "integer", "minimum": 1, "maximum": 100_000},
        "ref_audio": {"type": "string", "contentEncoding": "base64"},
        "ref_text": {"type": "string", "maxLength": 2000},
        "consent": {"type": "boolean"},
    },
}
_ERROR: dict[str, Any] = {
    "description": "An error: a code of the contract, and words",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["error"],
                "properties": {
                    "error": {
                        "type": "object",
                        "required": ["message", "type", "param", "code"],
                        "properties": {
                            "message": _STRING,
                            "type": _STRING,
                            "code": _STRING,
                            "param": {"type": ["string", "null"]},
                        },
                    }
                },
            }
        }
    },
}
ERRORS: dict[str, Any] = {"default": _ERROR}

SPEECH_OPERATION: dict[str, Any] = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": _SPEECH}}},
    "responses": {
        "200": {
            "description": "Audio, or server-sent events",
            "content": {
                name: {"schema": {"type": "string", "format": "binary"}}
                for name in (
                    "audio/mpeg",
                    "audio/ogg",
                    "audio/aac",
                    "audio/flac",
                    "audio/wav",
                    "audio/pcm",
                    "text/event-stream",
                )
            },
        },
        **ERRORS,
    },
}
VOICE_OPERATION: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["name", "audio_sample", "consent"],
                    "properties": {
                        "name": {"type": "string", "pattern": "^[a-z0-9][a-z0-9_-]{0,63}$"},
                        "audio_sample": {"type": "string", "format": "binary"},
                        "consent": _STRING,
                        "ref_text": {"type": "string", "maxLength": 2000},
                    },
                }
            }
        },
    },
    "responses": {"200": {"description": "The voice"}, **ERRORS},
}

TRANSFORM_OPERATION: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["audio"],
                    "properties": {
                        "audio": {"type": "string", "format": "binary"},
                        **{
                            name: _SPEECH["properties"][name]
                            for name in ("model", "response_format", "speed")
                        },
                        **{name: _SPEECH["properties"][name] for name in ("stream_format", "stream")},
                        "voice": {"type": "string", "maxLength": 256},
                    },
                }
            }
        },
    },
    "responses": SPEECH_OPERATION["responses"],
}

CONSENT_OPERATION: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["name", "language", "recording"],
                    "properties": {
                        "name": {"type": "string", "minLength": 1, "maxLength": 256},
                        "language": {"type": "string", "pattern": "^[A-Za-z]{2,8}(-[A-Za-z0-9]{1,8}){0,4}$"},
                        "recording": {"type": "string", "format": "binary"},
                    },
                }
            }
        },
    },
    "responses": {"200": {"description": "The consent"}, **ERRORS},
}
CONSENT_UPDATE_OPERATION: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {"name": {"type": "string", "minLength": 1, "maxLength": 256}},
                }
            }
        },
    },
    "responses": {"200": {"description": "The consent"}, **ERRORS},
}
