"""Vivace: fast, exact, streaming CosyVoice text-to-speech."""

__version__ = "0.1.0"
