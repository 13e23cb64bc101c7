"""Lets ``vivace.engine`` be imported on a training machine that has no audio libraries.

The trainings use the engine's sampler and sequence machines, which need torch alone; but the package imports all
of its modules, and those the audio libraries. Importing this module first puts empty ones in the place of those
that are missing; nothing here calls them.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

for _name in ("soundfile", "soxr", "wetext", "kaldi_native_fbank", "yaml"):
    if _name not in sys.modules and importlib.util.find_spec(_name) is None:
        sys.modules[_name] = ModuleType(_name)
