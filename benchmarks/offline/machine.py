"""What a machine is and has."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
from dataclasses import dataclass
from typing import Any

LEGACY = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
"""Older names of wheels for a minor version of glibc."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A Linux machine that wheels are wanted for.

    Args:
        python: "3.12".
        arch: "x86_64", "aarch64".
        glibc: "2.39".
        installed: normalised names of its packages; None: unknown.
    """

    python: str
    arch: str
    glibc: str
    installed: tuple[str, ...] | None = None

    @property
    def platforms(self) -> list[str]:
        """Tags of the wheels it takes, best first."""
        minors = range(int(self.glibc.split(".")[1]), 4, -1)
        pairs = ([f"manylinux_2_{minor}", *([LEGACY[minor]] if minor in LEGACY else [])] for minor in minors)
        return [f"{tag}_{self.arch}" for pair in pairs for tag in pair]


def survey() -> dict[str, Any]:
    """The arguments of ``Machine`` for this one."""
    names = {found.metadata["Name"] for found in importlib.metadata.distributions()}
    return {
        "python": "{}.{}".format(*sys.version_info),
        "arch": platform.machine(),
        "glibc": platform.libc_ver()[1],
        "installed": sorted({normalised(name) for name in names if name}),
    }


def normalised(name: str) -> str:
    """A package's name as it is compared: ``typing_extensions`` and ``Typing-Extensions`` are one."""
    return re.sub(r"[-_.]+", "-", name).lower()
