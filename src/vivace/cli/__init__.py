"""The ``vivace`` command: ``entry`` puts it together, the other modules hold its commands."""

from vivace.cli.entry import app, main

__all__ = ["app", "main"]
