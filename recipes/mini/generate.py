"""Make the speech that the embedded model is trained on (teacher: Kokoro-82M, Apache-2.0)."""

from __future__ import annotations

import argparse
import io
import json
import lzma
import multiprocessing
import tarfile
import time
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from recipes.mini.corpus import CorpusWriter, Item
from recipes.mini.speech import SAMPLE_RATE, prepare


def read_items(path: Path, language: str | None = None, limit: int | None = None) -> list[Item]:
    """Read an item list (JSON lines, plain or .xz), optionally one language and the first few."""
    data = path.read_bytes()
    lines = (lzma.decompress(data) if path.suffix == ".xz" else data).decode().splitlines()
    items = [json.loads(line) for line in lines if line.strip()]
    if language:
        items = [item for item in items if item["lang"] == language]
    return items[:limit]


def opus_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Every ``(id, Opus file)`` of the tar shards in ``folder``."""
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as archive:
            for member in archive:
                opened = archive.extractfile(member)
                if opened is not None and member.name.endswith(".opus"):
                    yield Path(member.name).stem, opened.read()


def unpack(args: argparse.Namespace) -> None:
    """Turn Opus shards that exist already into a corpus folder."""
    import soundfile

    known = {item["id"]: item for item in read_items(args.shards / "items.jsonl.xz", args.language)}
    with CorpusWriter(args.out) as writer:
        for name, data in opus_files(args.shards):
            if args.limit and len(writer.done) >= args.limit:
                break
            if name not in known or name in writer.done:
                continue
            samples, rate = soundfile.read(io.BytesIO(data), dtype="float32")
            if rate != SAMPLE_RATE:
                raise ValueError(f"{name}: {rate} Hz instead of {SAMPLE_RATE}")
            writer.add({"mix": None} | known[name], prepare(samples))
        print(f"{len(writer.done)} utterances, {writer.num_samples / SAMPLE_RATE / 3600:.3f} h in {args.out}")


def phonemes_command(args: argparse.Namespace) -> None:
    """Write the items with their phonemes, ready for ``speak`` on a machine without espeak-ng."""
    from recipes.mini.phonemes import is_british, phonemes, tokens

    items = read_items(args.items, args.language, args.limit)
    longest = 0
    with lzma.open(args.out, "wt", encoding="utf-8") as out:
        for item in items:
            mix = item.get("mix")
            accent = max(mix, key=lambda name: mix[name]) if mix else item["voice"]
            item["phonemes"] = phonemes(item["text"], is_british(accent))
            longest = max(longest, len(tokens(item["phonemes"])))
            out.write(json.dumps(item, ensure_ascii=False) + "\n")
    print(f"{len(items)} items in {args.out}, at most {longest} phonemes each")


def pack_command(args: argparse.Namespace) -> None:
    """Write the teacher's weights and the voices that the items need into the folders to carry."""
    from recipes.mini.phonemes import tokens
    from recipes.mini.teacher import pack

    items = read_items(args.items)
    voices = {name for item in items for name in (item.get("mix") or {item["voice"]: 1.0})}
    rows = 1 + max(len(tokens(item["phonemes"])) for item in items)
    pack(args.onnx, args.voices, voices, rows, args.out)


def _work(jobs: Any, results: Any, folder: Path, device: str, threads: int, options: dict[str, Any]) -> None:
    """One worker: speak the chunks of the queue until there are none; an error is told as a text."""
    try:
        import torch

        from recipes.mini.teacher import Teacher

        torch.set_num_threads(threads)
        teacher = Teacher(folder, device)
        while (job := jobs.get()) is not None:
            number, items = job
            for item, samples in teacher.speak(items, seed=options["seed"] + number, noise=options["noise"]):
                results.put((item, samples))
        results.put(None)
    except Exception as error:
        results.put(f"{type(error).__name__}: {error}")
        raise


def speak(args: argparse.Namespace) -> None:
    """Synthesise the items into a corpus folder with several worker processes; can be continued."""
    from recipes.mini.teacher import assemble

    started = time.perf_counter()
    assemble(args.teacher)
    context = multiprocessing.get_context("spawn")
    with CorpusWriter(args.out) as writer:
        items = [item for item in read_items(args.items, None, args.limit) if item["id"] not in writer.done]
        jobs, results = context.Queue(), context.Queue(maxsize=4096)
        for number, start in enumerate(range(0, len(items), args.chunk)):
            jobs.put((number, items[start : start + args.chunk]))
        for _ in range(args.workers):
            jobs.put(None)
        options = {"seed": args.seed, "noise": not args.no_noise}
        work = (jobs, results, args.teacher, args.device, args.threads, options)
        workers = [context.Process(target=_work, args=work, daemon=True) for _ in range(args.workers)]
        for worker in workers:
            worker.start()
        busy, count, told = len(workers), 0, started
        before = writer.num_samples
        while busy:
            result = results.get(timeout=600)
            if result is None:
                busy -= 1
            elif isinstance(result, str):
                raise RuntimeError(f"a worker failed: {result}")
            else:
                item, samples = result
                writer.add({"mix": None} | item, samples)
                count += 1
            now = time.perf_counter()
            if now - told > 5 or not busy:
                told = now
                writer.flush()
                seconds = (writer.num_samples - before) / SAMPLE_RATE
                print(
                    f"{count}/{len(items)} items, {seconds / 3600:.3f} h of speech in {now - started:.1f} s "
                    f"({seconds / (now - started):.0f} x real time)",
                    flush=True,
                )
        for worker in workers:
            worker.join()


def write_wav(path: Path, samples: np.ndarray) -> None:
    """Write int16 samples as a WAV file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(SAMPLE_RATE)
        out.writeframes(samples.astype("<i2").tobytes())


def heldout_command(args: argparse.Namespace) -> None:
    """Let the teacher speak the held-out sentences, and the speakers for judging cloning."""
    import torch

    from recipes.mini.heldout import SPEAKERS, TEACHER_VOICES, seen, sentences
    from recipes.mini.phonemes import is_british, phonemes
    from recipes.mini.teacher import Teacher

    if args.items:
        training = read_items(args.items)
        known = seen(
            [item["text"] for item in training], [item["mix"] for item in training if item.get("mix")]
        )
        if known:
            raise SystemExit(f"in the training items: {known}")
        print(f"none of the held-out texts and mixtures is among {len(training)} training items")
    wanted: list[Item] = []
    for voice in TEACHER_VOICES:
        for index, sentence in enumerate(sentences()):
            wanted.append(
                {"id": f"{voice}/{index:02d}", "voice": voice, "mix": None, "text": sentence.spoken}
            )
    for speaker in SPEAKERS:
        for kind, text in (("prompt", speaker.prompt), ("text", speaker.text)):
            name = f"{speaker.name}_{kind}"
            wanted.append({"id": name, "voice": speaker.name, "mix": speaker.mix, "text": text})
    for item in wanted:
        mix = item["mix"]
        accent = max(mix, key=lambda name: mix[name]) if mix else item["voice"]
        item["phonemes"] = phonemes(item["text"], is_british(accent))
    todo = [item for item in wanted if not (args.out / f"{item['id']}.wav").exists()]
    torch.set_num_threads(args.threads)
    teacher = Teacher(args.teacher, args.device)
    for item, samples in teacher.speak(todo, batch_frames=600, seed=args.seed):
        write_wav(args.out / f"{item['id']}.wav", samples)
    lines = [json.dumps(item, ensure_ascii=False) for item in wanted]
    (args.out / "items.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(wanted)} files in {args.out}")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m recipes.mini.generate", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    command = commands.add_parser("phonemes", help="add phonemes to an item list (needs espeak-ng)")
    command.add_argument("items", type=Path, help="item list, JSON lines, plain or .xz")
    command.add_argument("--out", type=Path, required=True, help="file to write (.jsonl.xz)")
    command.add_argument("--language", default="en", help="language to take (default: en)")
    command.add_argument("--limit", type=int, help="take only the first so many items")
    command.set_defaults(run=phonemes_command)

    command = commands.add_parser("pack", help="convert the teacher's ONNX weights and voices (needs onnx)")
    command.add_argument("items", type=Path, help="item list with phonemes: which voices are needed")
    command.add_argument("--onnx", type=Path, required=True, help="kokoro-v1.0.int8.onnx")
    command.add_argument("--voices", type=Path, required=True, help="folder with the voices' *.bin")
    command.add_argument("--out", type=Path, nargs="+", required=True, help="folders, one part each")
    command.set_defaults(run=pack_command)

    command = commands.add_parser("speak", help="synthesise an item list into a corpus folder")
    command.add_argument("items", type=Path, help="item list with phonemes")
    command.add_argument("--teacher", type=Path, required=True, help="folder with all that pack wrote")
    command.add_argument("--out", type=Path, required=True, help="corpus folder to write")
    command.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    command.add_argument("--workers", type=int, default=1, help="processes (default: 1)")
    command.add_argument("--threads", type=int, default=1, help="CPU threads a process (default: 1)")
    command.add_argument("--chunk", type=int, default=1600, help="items a process takes at a time")
    command.add_argument("--seed", type=int, default=0, help="seed of the excitation's noise")
    command.add_argument("--no-noise", action="store_true", help="no noise in the excitation")
    command.add_argument("--limit", type=int, help="take only the first so many items")
    command.set_defaults(run=speak)

    command = commands.add_parser(
        "heldout", help="teacher speech for the held-out sentences (needs espeak-ng)"
    )
    command.add_argument("--teacher", type=Path, required=True, help="folder with all that pack wrote")
    command.add_argument("--out", type=Path, required=True, help="folder for the WAV files")
    command.add_argument("--items", type=Path, help="training items, to check that nothing held out is there")
    command.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    command.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    command.add_argument("--seed", type=int, default=1, help="seed of the excitation's noise")
    command.set_defaults(run=heldout_command)

    command = commands.add_parser("unpack", help="turn ready Opus shards into a corpus folder")
    command.add_argument("shards", type=Path, help="folder with *.tar and items.jsonl.xz")
    command.add_argument("--out", type=Path, required=True, help="corpus folder to write")
    command.add_argument("--language", default="en", help="language to take (default: en)")
    command.add_argument("--limit", type=int, help="stop after so many utterances")
    command.set_defaults(run=unpack)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Run one subcommand."""
    args = parse_arguments(argv)
    args.run(args)


if __name__ == "__main__":
    main()
