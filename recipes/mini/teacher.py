"""The teacher's files (weights, voices) and its synthesis in batches of equal length."""

from __future__ import annotations

import io
import lzma
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    whole = io.BytesIO()
    np.savez(whole, **kokoro.convert(onnx_path))  # type: ignore[arg-type]
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
        return np.sum(list(rows), axis=0).astype(np.float32)

    def speak(
        self, items: Sequence[Item], noise: bool = True, batch_frames: int = 12000, seed: int = 0
    ) -> Iterator[tuple[Item, np.ndarray]]:
        """Every item with its samples (int16, trimmed), in the order of their lengths."""
        torch.manual_seed(seed)
        texts = [tokens(item["phonemes"]) for item in items]
        read: list[tuple[int, int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        order = sorted(range(len(items)), key=lambda index: len(texts[index]))
        for length, group in groupby(order, key=lambda index: len(texts[index])):
            for batch in _batches(list(group), max(1, batch_frames // (4 * length + 4))):
                styles = np.stack(
                    [self.style(items[index]["voice"], items[index].get("mix"), length) for index in batch]
                )
                style = torch.from_numpy(styles).to(self.device)
                padded = torch.tensor([[0, *texts[index], 0] for index in batch], device=self.device)
                result = self.model.read(padded, style)
                frames = result.durations.sum(dim=1).tolist()
                read += zip(frames, batch, result.durations, result.prosody, result.text, style, strict=True)  # type: ignore[arg-type]
        read.sort(key=lambda entry: entry[:2])
        for total, same in groupby(read, key=lambda entry: entry[0]):
            for part in _batches(list(same), max(1, batch_frames // total)):
                spread = [
                    torch.stack(
                        [entry[field].repeat_interleave(entry[2], dim=0, output_size=total) for entry in part]
                    )
                    for field in (3, 4)
                ]
                samples = self.model.speak(*spread, torch.stack([entry[5] for entry in part]), noise)
                for entry, row in zip(part, samples.float().cpu().numpy(), strict=True):
                    yield items[entry[1]], prepare(row)


def _batches(entries: list[T], size: int) -> Iterator[list[T]]:
    """Split a list into pieces of ``size``."""
    for start in range(0, len(entries), size):
        yield entries[start : start + size]
