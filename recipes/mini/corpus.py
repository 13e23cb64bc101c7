"""Reading and writing the corpus folder that the trainings of the embedded model share.

A corpus folder holds two files:

``items.jsonl``
    One line per utterance, in the order of the audio: ``id``, ``lang``, ``text``, ``voice``, ``mix``
    (weights over base voices, or null), ``phonemes`` (where known), ``num_samples`` and ``offset``
    (both counted in samples).
``audio.i16``
    All utterances one after the other: raw little-endian int16, mono, 24 kHz.

The training programs map the audio into memory, so that many processes read one copy of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

SAMPLE_RATE = 24000
ITEMS_NAME = "items.jsonl"
AUDIO_NAME = "audio.i16"

Item = dict[str, Any]


class Corpus:
    """A corpus folder, opened for reading; the audio stays on disk and is mapped into memory."""

    sample_rate = SAMPLE_RATE

    def __init__(self, folder: str | Path, indices: Iterable[int] | None = None) -> None:
        """Open ``folder``; ``indices`` keeps only those lines of its item list."""
        self.folder = Path(folder)
        with open(self.folder / ITEMS_NAME, encoding="utf-8") as lines:
            items: list[Item] = [json.loads(line) for line in lines if line.strip()]
        self.items: list[Item] = items if indices is None else [items[index] for index in indices]
        audio_path = self.folder / AUDIO_NAME
        if audio_path.stat().st_size:
            self._samples: np.ndarray = np.memmap(audio_path, dtype="<i2", mode="r")
        else:
            self._samples = np.zeros(0, dtype=np.int16)
        for item in self.items:
            if item["offset"] + item["num_samples"] > len(self._samples):
                raise ValueError(f"{audio_path} is too short for item {item['id']!r}")

    def __len__(self) -> int:
        return len(self.items)

    def audio(self, index: int) -> np.ndarray:
        """The samples of one utterance, int16 ``[num_samples]``: a view of the mapped file."""
        item = self.items[index]
        return self._samples[item["offset"] : item["offset"] + item["num_samples"]]

    def waveform(self, index: int) -> np.ndarray:
        """The samples of one utterance as float32 between -1 and 1 (a copy)."""
        return self.audio(index).astype(np.float32) / 32768.0

    def voices(self) -> list[str]:
        """The speaker of every item: the name of the voice, or the id of the mixture."""
        return [str(item["voice"]) for item in self.items]

    def hours(self) -> float:
        """The length of all speech in hours."""
        return float(sum(item["num_samples"] for item in self.items)) / self.sample_rate / 3600

    def subset(self, indices: Iterable[int]) -> Corpus:
        """The same corpus with some of its items only; the audio is shared."""
        part = Corpus.__new__(Corpus)
        part.folder = self.folder
        part.items = [self.items[index] for index in indices]
        part._samples = self._samples
        return part

    def split(self, held_out: set[str]) -> tuple[Corpus, Corpus]:
        """Training and held-out parts: an item is held out when its id or its voice is in ``held_out``."""
        held = [item["id"] in held_out or item["voice"] in held_out for item in self.items]
        return (
            self.subset(index for index, out in enumerate(held) if not out),
            self.subset(index for index, out in enumerate(held) if out),
        )


class CorpusWriter:
    """Appends utterances to a corpus folder, which it creates; an interrupted run can be continued.

    The audio of an item is written before its line, so a line never promises samples that are not there;
    samples without a line, left by an interruption, are cut off when the folder is opened again.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        items_path, audio_path = self.folder / ITEMS_NAME, self.folder / AUDIO_NAME
        self.done: set[str] = set()
        self.num_samples = 0
        kept_bytes = 0
        if items_path.exists():
            for line in items_path.read_bytes().splitlines(keepends=True):
                if not line.endswith(b"\n"):
                    break
                item = json.loads(line)
                self.done.add(item["id"])
                self.num_samples = max(self.num_samples, item["offset"] + item["num_samples"])
                kept_bytes += len(line)
        items_path.touch()
        audio_path.touch()
        self._items = open(items_path, "r+b")  # noqa: SIM115
        self._items.truncate(kept_bytes)
        self._items.seek(kept_bytes)
        self._audio = open(audio_path, "r+b")  # noqa: SIM115
        self._audio.truncate(self.num_samples * 2)
        self._audio.seek(self.num_samples * 2)

    def add(self, item: Mapping[str, Any], samples: np.ndarray) -> None:
        """Append one utterance; ``samples`` is int16, or float between -1 and 1."""
        if samples.dtype != np.int16:
            samples = np.round(np.clip(samples, -1.0, 1.0) * 32767.0).astype(np.int16)
        self._audio.write(samples.astype("<i2").tobytes())
        record = dict(item) | {"num_samples": len(samples), "offset": self.num_samples}
        self._items.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self.done.add(str(item["id"]))
        self.num_samples += len(samples)

    def flush(self) -> None:
        """Bring what was added to disk, audio first."""
        self._audio.flush()
        self._items.flush()

    def close(self) -> None:
        """Flush and close both files."""
        self.flush()
        self._audio.close()
        self._items.close()

    def __enter__(self) -> CorpusWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
