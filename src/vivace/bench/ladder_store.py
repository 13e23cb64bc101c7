"""The folder of a ladder: finished rungs, so that a second run goes on; the whole as JSON and CSV."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vivace.bench.ladder_compare import ADDED
from vivace.errors import InvalidRequestError

if TYPE_CHECKING:
    from vivace.bench.ladder_rungs import Plan

FIGURES = (
    "ttfb_ms_p50",
    "rtf",
    "tps",
    "lm_ms",
    "flow_ms",
    "vocoder_ms",
    "peak_memory_bytes",
    "host_us_per_step",
    "lm_kl",
    "mel_snr_db",
    "wer",
)
"""What a rung is measured by: the members of its row that are None where it was not."""


class Store:
    """A folder with one file per finished rung.

    Raises:
        InvalidRequestError: it holds rungs that were measured with other settings.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self._folder, self._rows = folder, folder / "rows"
        self._rows.mkdir(parents=True, exist_ok=True)
        path = folder / "settings.json"
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            other = [name for name, value in settings.items() if found.get(name) != value]
            if other:
                raise InvalidRequestError(
                    f"the ladder in {folder} was measured with another setting ({other[0]}); take another folder",
                    param="out",
                )
        path.write_text(json.dumps(settings), encoding="utf-8")

    def read(self, plan: Plan) -> dict[str, Any] | None:
        """The figures of a rung that was finished with the same switches."""
        path = self._path(plan)
        if not path.exists():
            return None
        figures: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return figures

    def keep(self, plan: Plan, figures: dict[str, Any]) -> None:
        """Writes a finished rung; a half-written file is never read."""
        path = self._path(plan)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(figures), encoding="utf-8")
        part.replace(path)

    @contextmanager
    def begun(self, plan: Plan) -> Iterator[None]:
        """Around a measurement: where it ends with the process, the next run knows."""
        mark = self._path(plan).with_suffix(".begun")
        mark.write_text(str(self.cuts(plan) + 1), encoding="utf-8")
        yield
        mark.unlink(missing_ok=True)

    def cuts(self, plan: Plan) -> int:
        """How many earlier runs ended with their process in the middle of this rung."""
        mark = self._path(plan).with_suffix(".begun")
        return int(mark.read_text(encoding="utf-8") or 1) if mark.exists() else 0

    def floors(self, measure: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """What the machine allows, measured once for all rungs of the folder."""
        path = self._folder / "floors.json"
        if not path.exists():
            path.write_text(json.dumps(measure()), encoding="utf-8")
        found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def write(self, document: dict[str, Any]) -> None:
        """The whole ladder as JSON and CSV."""
        text = json.dumps(document, ensure_ascii=False, indent=1)
        (self._folder / "ladder.json").write_text(text, encoding="utf-8")
        (self._folder / "ladder.csv").write_text(csv_text(document), encoding="utf-8")

    def _path(self, plan: Plan) -> Path:
        switches = json.dumps(asdict(plan.switches), sort_keys=True)
        return self._rows / f"{plan.rung.name}-{hashlib.sha256(switches.encode()).hexdigest()[:8]}.json"


def csv_text(document: dict[str, Any]) -> str:
    """One line a measurement."""
    file = io.StringIO()
    names = ["rung", "title", "kind", "reason", *FIGURES, *ADDED]
    writer = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(document["rows"])
    return file.getvalue()
