"""Voices: made from prompt audio, checked, saved, and looked up by name.

``value``     ``Voice``, an immutable value, and the rule for names
``prompt``    prompt audio → ``Voice``; entries of an official ``spk2info.pt`` → ``Voice``
``file``      one voice = one safetensors file whose header carries the JSON; a crash cannot damage it
``registry``  ``VoiceRegistry``: the built-in voices of a model and those in a folder
"""

from vivace.voice.file import load_voice, save_voice
from vivace.voice.prompt import (
    SpeakerEncoding,
    SpeechEncoding,
    from_spk2info,
    make_voice,
    official_name,
)
from vivace.voice.registry import VoiceEntry, VoiceRegistry
from vivace.voice.value import Voice, check_voice_name

__all__ = [
    "SpeakerEncoding",
    "SpeechEncoding",
    "Voice",
    "VoiceEntry",
    "VoiceRegistry",
    "check_voice_name",
    "from_spk2info",
    "load_voice",
    "make_voice",
    "official_name",
    "save_voice",
]
