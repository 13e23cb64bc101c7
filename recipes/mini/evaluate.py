"""Judge speech on the held-out sentences: words, voice, predicted opinion, and defects.

With ``--model`` the engine speaks every sentence in every voice and clones the held-out speakers; with
``--wavs`` folders of ready speech are judged (``<folder>/<voice>/00.wav`` ..., or ``<folder>/00.wav`` ...).
``--reference`` is what ``python -m recipes.mini.generate heldout`` wrote: the teacher's speech, from which the
voices are known. Prints a table and writes all figures to a JSON file.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import soundfile
import soxr
import torch
from numpy.typing import NDArray

from recipes.mini.heldout import SPEAKERS, VOICES, sentences
from recipes.mini.judges import RATE, Dnsmos, SpeakerEncoder, Transcriber
from recipes.mini.speech import speech_bounds
from recipes.mini.words import count_errors

Samples = NDArray[np.float32]


@dataclass
class Speech:
    """Samples with the places where one chunk ended and the next began."""

    samples: Samples
    rate: int
    borders: list[int] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate

    def resampled(self) -> Samples:
        """At 16 kHz, which the judges want."""
        if self.rate == RATE:
            return self.samples
        resampled: Samples = soxr.resample(self.samples, self.rate, RATE).astype(np.float32)
        return resampled


class Speaking(Protocol):
    """What is judged: a function from text to speech, and one that copies a voice."""

    def synthesise(self, text: str, voice: str, seed: int) -> Speech | None: ...

    def clone(self, prompt: Path, prompt_text: str, text: str, seed: int) -> Speech | None: ...


class EngineSpeaking:
    """Vivace's engine through its public names."""

    def __init__(self, model: str, device: str, stream: bool) -> None:
        from vivace import Engine

        self._engine = Engine.open(model, device=device)
        self._stream = stream
        self._names = {entry.name for entry in self._engine.voices.list()}
        self.busy = 0.0
        self.spoken = 0.0

    def _speak(self, text: str, voice: Any, seed: int) -> Speech:
        from vivace import SamplingParams, SynthesisRequest

        request = SynthesisRequest(text, voice=voice, stream=self._stream, sampling=SamplingParams(seed=seed))
        started = time.perf_counter()
        chunks = [np.asarray(chunk.samples, dtype=np.float32) for chunk in self._engine.stream(request)]
        self.busy += time.perf_counter() - started
        samples = np.concatenate(chunks) if chunks else np.zeros(0, np.float32)
        self.spoken += len(samples) / self._engine.sample_rate_hz
        borders = np.cumsum([len(chunk) for chunk in chunks])[:-1].tolist()
        return Speech(samples, self._engine.sample_rate_hz, borders)

    def synthesise(self, text: str, voice: str, seed: int) -> Speech | None:
        """A sentence in a voice of the model, which may go by its short name there ("heart")."""
        return self._speak(text, voice if voice in self._names else voice.split("_")[-1], seed)

    def clone(self, prompt: Path, prompt_text: str, text: str, seed: int) -> Speech | None:
        """A sentence in the voice of a recording."""
        return self._speak(
            text, self._engine.make_voice(prompt, prompt_text, name="clone", consent=True), seed
        )


class FolderSpeaking:
    """Ready WAV files; ``chunk`` is the number of samples of a chunk, if clicks are to be looked for."""

    def __init__(self, folder: Path, chunk: int = 0) -> None:
        self._folder = folder
        self._chunk = chunk
        self._numbers = {sentence.text: index for index, sentence in enumerate(sentences())}

    def _read(self, path: Path) -> Speech | None:
        if not path.exists():
            return None
        samples, rate = soundfile.read(path, dtype="float32")
        borders = list(range(self._chunk, len(samples), self._chunk)) if self._chunk else []
        return Speech(samples, rate, borders)

    def synthesise(self, text: str, voice: str, seed: int) -> Speech | None:
        """The file of this sentence, if there is one."""
        name = f"{self._numbers[text]:02d}.wav"
        folder = self._folder / voice
        return self._read(folder / name if folder.is_dir() else self._folder / name)

    def clone(self, prompt: Path, prompt_text: str, text: str, seed: int) -> Speech | None:
        """The file of this speaker, if there is one."""
        return self._read(self._folder / f"{prompt.stem.removesuffix('_prompt')}_text.wav")


def clicks(speech: Speech, reach: int = 2) -> tuple[float, float] | None:
    """How much rougher the signal is at chunk borders than elsewhere.

    The measure is the largest second difference within ``reach`` samples of a place. Returns its mean at the
    borders over its mean elsewhere (1 = no difference), and the share of borders that are rougher than
    99 % of the places within 40 ms of them (0.01 = no difference).
    """
    bend = np.abs(np.diff(speech.samples, n=2))
    width = 2 * reach + 1
    near = speech.rate // 25
    inside = [border for border in speech.borders if near < border < len(bend) - near]
    if not inside:
        return None
    here: list[float] = []
    around: list[float] = []
    beyond = 0
    for border in inside:
        # bend[k] is about sample k + 1; the step from one chunk to the next touches bend[border - 2 : border].
        value = float(bend[border - 1 - reach : border - 1 + reach + 1].max())
        pieces = np.concatenate([bend[border - near : border - width], bend[border + width : border + near]])
        other = np.lib.stride_tricks.sliding_window_view(pieces, width).max(axis=1)
        here.append(value)
        around.append(float(other.mean()))
        beyond += bool(value > np.quantile(other, 0.99))
    return float(np.mean(here)) / max(float(np.mean(around)), 1e-7), beyond / len(inside)


def longest_pause(speech: Speech) -> float:
    """Seconds of the longest silence between the first and the last sound."""
    start, stop = speech_bounds(speech.samples, speech.rate)
    hop = speech.rate // 100
    count = (stop - start) // hop
    if count <= 0:
        return speech.seconds
    level = np.sqrt((speech.samples[start : start + count * hop].reshape(count, hop) ** 2).mean(axis=1))
    longest = run = 0
    for quiet in level < level.max() * 0.01:
        run = run + 1 if quiet else 0
        longest = max(longest, run)
    return longest / 100


@dataclass
class Judges:
    """All that judges, loaded once, and what the teacher's voices sound like."""

    transcribe: Transcriber
    embed: SpeakerEncoder
    opinion: Dnsmos
    voices: dict[str, NDArray[np.float32]]
    speakers: dict[str, NDArray[np.float32]]
    seconds: dict[tuple[str, str], float]

    @classmethod
    def load(cls, reference: Path, threads: int) -> Judges:
        """Load the models, and listen to the teacher's speech in ``reference``."""
        embed = SpeakerEncoder()
        voices, seconds = {}, {}
        for folder in sorted(path for path in reference.iterdir() if path.is_dir()):
            teacher = FolderSpeaking(reference)
            heard = []
            for sentence in sentences():
                speech = teacher.synthesise(sentence.text, folder.name, 0)
                if speech is not None:
                    seconds[folder.name, sentence.text] = speech.seconds
                    heard.append(embed(speech.resampled()))
            if heard:
                voices[folder.name] = _unit(np.mean(heard, axis=0))
        speakers = {}
        for speaker in SPEAKERS:
            files = [reference / f"{speaker.name}_{kind}.wav" for kind in ("prompt", "text")]
            found = [FolderSpeaking(reference)._read(path) for path in files]
            if all(found):
                speakers[speaker.name] = _unit(
                    np.mean([embed(speech.resampled()) for speech in found if speech], axis=0)
                )
        return cls(Transcriber(threads), embed, Dnsmos(threads), voices, speakers, seconds)

    def judge(self, speech: Speech, text: str, voice: str) -> dict[str, Any]:
        """All figures of one utterance."""
        figures: dict[str, Any] = {"voice": voice, "text": text, "seconds": round(speech.seconds, 2)}
        figures["errors"], figures["words"] = count_errors(text, "")
        usual = self.seconds.get((voice, text), 0.3 + 0.065 * len(text))
        figures["length_ratio"] = round(speech.seconds / usual, 2)
        start, stop = speech_bounds(speech.samples, speech.rate) if len(speech.samples) else (0, 0)
        figures["empty"] = (stop - start) / speech.rate < 0.3
        figures["runaway"] = speech.seconds > 2.0 * usual + 0.5
        figures["cut"] = not figures["empty"] and (stop - start) / speech.rate < 0.45 * usual
        figures["peak"] = round(float(np.abs(speech.samples).max(initial=0.0)), 3)
        figures["clipped"] = int((np.abs(speech.samples) >= 0.999).sum())
        figures["pause"] = round(longest_pause(speech), 2)
        figures["clicks"] = clicks(speech)
        if figures["empty"] or not np.isfinite(speech.samples).all():
            return figures | {"heard": "", "empty": True}
        samples = speech.resampled()
        figures["heard"] = self.transcribe(samples)
        figures["errors"], _ = count_errors(text, figures["heard"])
        embedding = self.embed(samples)
        likeness = {name: float(embedding @ centre) for name, centre in self.voices.items()}
        figures["likeness"] = {name: round(value, 4) for name, value in likeness.items()}
        if voice in likeness:
            figures["similarity"] = likeness[voice]
            figures["rank"] = 1 + sum(value > likeness[voice] for value in likeness.values())
        overall, opinion = self.opinion(np.clip(samples, -1, 1))
        figures["dnsmos"], figures["p808"] = round(overall, 3), round(opinion, 3)
        return figures

    def judge_clone(self, speech: Speech, text: str, speaker: str) -> dict[str, Any]:
        """As ``judge``, and whether the speaker is nearer than every voice of the model."""
        figures = self.judge(speech, text, speaker)
        if figures["empty"] or speaker not in self.speakers:
            return figures | {"cloned": False}
        similarity = float(self.embed(speech.resampled()) @ self.speakers[speaker])
        nearest = max(figures["likeness"], key=lambda name: figures["likeness"][name])
        return figures | {
            "similarity": similarity,
            "nearest_voice": nearest,
            "nearest_similarity": figures["likeness"][nearest],
            "cloned": similarity > figures["likeness"][nearest],
        }


def _unit(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    return vector / np.linalg.norm(vector)


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of many utterances in one line."""

    def mean(name: str) -> float | None:
        values = [row[name] for row in rows if row.get(name) is not None]
        return round(float(np.mean(values)), 4) if values else None

    borders = [row["clicks"] for row in rows if row.get("clicks")]
    return {
        "utterances": len(rows),
        "wer": round(sum(row["errors"] for row in rows) / max(1, sum(row["words"] for row in rows)), 4),
        "faultless": round(float(np.mean([row["errors"] == 0 for row in rows])), 4),
        "similarity": mean("similarity"),
        "rank1": round(float(np.mean([row.get("rank") == 1 for row in rows])), 4),
        "dnsmos": mean("dnsmos"),
        "p808": mean("p808"),
        "length_ratio": mean("length_ratio"),
        "pause": max(row["pause"] for row in rows),
        "empty": sum(row["empty"] for row in rows),
        "cut": sum(row["cut"] for row in rows),
        "runaway": sum(row["runaway"] for row in rows),
        "clipped": sum(row["clipped"] > 0 for row in rows),
        "click_ratio": round(float(np.mean([pair[0] for pair in borders])), 3) if borders else None,
        "click_share": round(float(np.mean([pair[1] for pair in borders])), 4) if borders else None,
    }


def table(summaries: dict[str, dict[str, Any]]) -> str:
    """The summaries as aligned columns."""
    names = list(next(iter(summaries.values())))
    rows = [["", *names]]
    for title, summary in summaries.items():
        rows.append([title, *("-" if summary[name] is None else str(summary[name]) for name in names)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    )


def evaluate(
    speaking: Speaking,
    judges: Judges,
    reference: Path,
    voices: Sequence[str],
    limit: int | None,
    seeds: int,
    keep: Callable[[str, Speech], None],
) -> dict[str, Any]:
    """Judge everything; the result holds a summary for each voice, the clones, and all single figures."""
    results: dict[str, Any] = {"summary": {}, "clones": {}, "items": []}
    for voice in voices:
        rows = []
        for index, sentence in enumerate(sentences()[:limit]):
            for seed in range(seeds):
                speech = speaking.synthesise(sentence.text, voice, seed)
                if speech is None:
                    continue
                keep(f"{voice}/{index:02d}" + (f"_{seed}" if seeds > 1 else ""), speech)
                rows.append(judges.judge(speech, sentence.text, voice) | {"number": index, "seed": seed})
        if rows:
            results["summary"][voice] = summarise(rows)
            results["items"] += rows
            print(f"{voice}: WER {results['summary'][voice]['wer']:.2%}", file=sys.stderr, flush=True)
    if results["items"]:
        results["summary"]["all"] = summarise(results["items"])
    for speaker in SPEAKERS:
        prompt = reference / f"{speaker.name}_prompt.wav"
        if not prompt.exists():
            continue
        try:
            speech = speaking.clone(prompt, speaker.prompt, speaker.text, 0)
        except Exception as error:  # a model without cloning still has its other figures
            results["clones"][speaker.name] = {"cloned": False, "error": f"{type(error).__name__}: {error}"}
            continue
        if speech is not None:
            keep(f"{speaker.name}_text", speech)
            results["clones"][speaker.name] = judges.judge_clone(speech, speaker.text, speaker.name)
    return results


def main(argv: list[str] | None = None) -> None:
    """Judge one model or one folder."""
    parser = argparse.ArgumentParser(prog="python -m recipes.mini.evaluate", description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="model folder, or 'mini' for the embedded model")
    source.add_argument("--wavs", type=Path, help="folder of WAV files to judge instead")
    parser.add_argument("--reference", type=Path, required=True, help="the teacher's held-out speech")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--save", type=Path, help="folder for what the model spoke")
    parser.add_argument("--voices", nargs="*", default=list(VOICES), help=f"default: {' '.join(VOICES)}")
    parser.add_argument("--limit", type=int, help="only the first so many sentences")
    parser.add_argument("--seeds", type=int, default=1, help="how often each sentence is spoken (default: 1)")
    parser.add_argument("--device", default="cpu", help="where the engine runs (default: cpu)")
    parser.add_argument(
        "--offline", action="store_true", help="the engine renders whole sentences, no chunks"
    )
    parser.add_argument(
        "--chunk-samples", type=int, default=0, help="with --wavs: samples of a chunk, for clicks"
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    args = parser.parse_args(argv)

    torch.set_num_threads(args.threads)
    judges = Judges.load(args.reference, args.threads)
    engine = EngineSpeaking(args.model, args.device, not args.offline) if args.model else None
    speaking: Speaking = engine or FolderSpeaking(args.wavs, args.chunk_samples)

    def keep(name: str, speech: Speech) -> None:
        if args.save:
            path = args.save / f"{name}.wav"
            path.parent.mkdir(parents=True, exist_ok=True)
            soundfile.write(path, speech.samples, speech.rate, subtype="PCM_16")

    results = evaluate(speaking, judges, args.reference, args.voices, args.limit, args.seeds, keep)
    if engine is not None and engine.spoken:
        results["real_time_factor"] = round(engine.busy / engine.spoken, 4)
    if results["summary"]:
        print(table(results["summary"]))
    for name, figures in results["clones"].items():
        if "error" in figures:
            print(f"{name}: {figures['error']}")
        else:
            print(
                f"{name}: {'cloned' if figures['cloned'] else 'NOT cloned'}, similarity "
                f"{figures.get('similarity', 0):.3f}, nearest voice {figures.get('nearest_voice')} "
                f"{figures.get('nearest_similarity', 0):.3f}, {figures['errors']} of {figures['words']} words wrong"
            )
    for row in results["items"]:
        if row["errors"]:
            print(
                f"  {row['voice']}/{row['number']:02d} {row['errors']}: {row['text']!r} heard {row['heard']!r}"
            )
    if args.json:
        args.json.write_text(
            json.dumps(results, ensure_ascii=False, indent=1, default=float), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
