"""The teacher's files (weights, voices) and its synthesis in batches of equal length."""

from __future__ import annotations

import io
import lzma
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from recipes.mini import kokoro
from recipes.mini.corpus import Item
from recipes.mini.phonemes import tokens
from recipes.mini.speech import prepare

WEIGHTS_NAME = "teacher.npz"
VOICES_NAME = "voices.npz"
STYLE_ROWS, STYLE_WIDTH = 510, 256
T = TypeVar("T")


def pack(
    onnx_path: Path, voices_folder: Path, names: Iterable[str], rows: int, folders: Sequence[Path]
) -> None:
    """Write the teacher compactly: one part of its integer weights a folder, the voices in the first.

    A voice has one style for each number of phonemes; ``rows`` of them are kept, as float16.
    """
    weights = kokoro.convert(onnx_path)
    for name, values in weights.items():
        if values.dtype == np.float32 and values.size > 100000:  # what the ONNX file left unquantised
            weights[name] = values.astype(np.float16)
    whole = io.BytesIO()
    np.savez(whole, **weights)  # type: ignore[arg-type]
    packed = lzma.compress(whole.getvalue(), preset=6)
    size = -(-len(packed) // len(folders))
    for index, folder in enumerate(folders):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{WEIGHTS_NAME}.xz.{index}").write_bytes(packed[index * size : (index + 1) * size])
    styles = {
        name: np.fromfile(voices_folder / f"{name}.bin", dtype="<f4")
        .reshape(STYLE_ROWS, STYLE_WIDTH)[:rows]
        .astype(np.float16)
        for name in sorted(names)
    }
    np.savez_compressed(folders[0] / VOICES_NAME, **styles)  # type: ignore[arg-type]


def assemble(folder: Path) -> Path:
    """Put the parts that ``pack`` wrote, gathered in one folder, together again (once)."""
    path = folder / WEIGHTS_NAME
    if not path.exists():
        parts = sorted(folder.glob(f"{WEIGHTS_NAME}.xz.*"), key=lambda part: int(part.suffix[1:]))
        if not parts:
            raise FileNotFoundError(f"no {WEIGHTS_NAME}.xz.* in {folder}")
        unfinished = path.with_suffix(".tmp")
        unfinished.write_bytes(lzma.decompress(b"".join(part.read_bytes() for part in parts)))
        unfinished.rename(path)
    return path


@dataclass
class _Read:
    """One item after the first step: how long its phonemes last, and its features."""

    frames: int
    index: int
    durations: torch.Tensor
    prosody: torch.Tensor
    text: torch.Tensor
    style: torch.Tensor


class Teacher:
    """Kokoro with its voices, speaking many items at a time."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        self.device = torch.device(device)
        if self.device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = True
            torch.backends.cudnn.allow_tf32 = True
        with np.load(assemble(folder)) as weights:
            self.model = kokoro.load(dict(weights), self.device)
        with np.load(folder / VOICES_NAME) as styles:
            self.styles = {name: styles[name].astype(np.float32) for name in styles.files}

    def style(self, voice: str, mix: Mapping[str, float] | None, length: int) -> np.ndarray:
        """The style ``[256]`` of a voice, or of a mixture, for a text of ``length`` phonemes."""
        parts = mix or {voice: 1.0}
        total = sum(parts.values())
        rows = (self.styles[name][length] * (weight / total) for name, weight in parts.items())
        mixed: np.ndarray = np.sum(list(rows), axis=0).astype(np.float32)
        return mixed

    def speak(
        self, items: Sequence[Item], noise: bool = True, batch_frames: int = 12000, seed: int = 0
    ) -> Iterator[tuple[Item, np.ndarray]]:
        """Every item with its samples (int16, trimmed), in the order of their lengths."""
        torch.manual_seed(seed)
        texts = [tokens(item["phonemes"]) for item in items]
        read: list[_Read] = []
        order = sorted(range(len(items)), key=lambda index: len(texts[index]))
        for length, group in groupby(order, key=lambda index: len(texts[index])):
            for batch in _batches(list(group), max(1, batch_frames // (4 * length + 4))):
                styles = [self.style(items[at]["voice"], items[at].get("mix"), length) for at in batch]
                style = torch.from_numpy(np.stack(styles)).to(self.device)
                padded = torch.tensor([[0, *texts[at], 0] for at in batch], device=self.device)
                result = self.model.read(padded, style)
                frames = result.durations.sum(dim=1).tolist()
                parts = (frames, batch, result.durations, result.prosody, result.text, style)
                read += [_Read(*row) for row in zip(*parts, strict=True)]
        read.sort(key=lambda entry: (entry.frames, entry.index))
        for total, same in groupby(read, key=lambda entry: entry.frames):
            for rows in _batches(list(same), max(1, batch_frames // total)):
                prosody, text = (
                    torch.stack([getattr(row, name).repeat_interleave(row.durations, dim=0) for row in rows])
                    for name in ("prosody", "text")
                )
                samples = self.model.speak(prosody, text, torch.stack([row.style for row in rows]), noise)
                for row, spoken in zip(rows, samples.cpu().numpy(), strict=True):
                    yield items[row.index], prepare(spoken)


def _batches(entries: list[T], size: int) -> Iterator[list[T]]:
    """Split a list into pieces of ``size``."""
    for start in range(0, len(entries), size):
        yield entries[start : start + size]
