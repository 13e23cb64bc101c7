"""Sequences for the speech LM's training, built on the device in the formats that inference uses.

    plain:        start, prefix, text, task, speech                          → end
    interleaved:  start, prefix, [10 text, 12 speech] …, text left, task, speech left   → end

The prefix is an instruction and ``<|endofprompt|>``, as bytes: mostly the standard one, sometimes any other words,
so that instructions of any wording are ignored. Text and speech come from one utterance or from two to four
in a row, mostly of one voice: what precedes the last one is what a prompt is at inference (prompt text + text;
prompt speech + speech). Prompt text without its speech never occurs.

A batch is a grid ``[rows, positions]``. Which token stands at a place is arithmetic on a few numbers per row
(lengths, starts in flat arrays), so building costs a handful of kernels and no Python loop over tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vivace.config import SpeechLMConfig
from vivace.text.pronounce import EMBEDDED_LEXICON, Pronouncer
from vivace.text.tokenizer import TextTokenizer

STANDARD_PREFIX = "You are a helpful assistant.<|endofprompt|>"
INSTRUCTIONS = (
    "Please speak as loud as possible.", "Please speak very slowly.", "Speak fast.", "Please say it happily.",
    "Say it in a sad voice.", "Whisper.", "Speak like a robot.", "Please use a British accent.",
    "Read this like the evening news.", "请用广东话表达。", "请用尽可能快地语速说一句话。",
    "Sound angry and impatient.", "Speak softly, as if to a child.", "Be excited!", "You are a pirate.",
    "Use a deep and calm voice.",
)  # fmt: skip
IGNORE = -100
MOST_SPEECH_TOKENS = 450
JOINED = (0.2, 0.3, 0.3, 0.2)
"""Shares of rows with one utterance, two, three and four.

In use a prompt of a few seconds stands before one to three sentences, so most rows are long.
"""
CUT = 0.3
"""Share of utterances cut between two words in training, where it is known what is said when."""
SPACED = 0.5
"""How often a space parts two texts: between sentences there is one, after a prompt's text there is none."""


@dataclass
class Cuts:
    """Where utterances may be cut: before the text token ``text`` (a word's first) and the speech token ``speech``.

    Flat over all utterances; those of utterance ``i`` are ``start[i] … start[i] + count[i] - 1``.
    """

    text: np.ndarray
    speech: np.ndarray
    start: np.ndarray
    count: np.ndarray


@dataclass
class LMData:
    """Everything on the device as flat arrays; text ids first, speech rows after ``text_vocab_size``."""

    config: SpeechLMConfig
    items: list[dict[str, Any]]
    text: list[list[int]]
    speech: list[np.ndarray]
    prefixes: list[list[int]]
    flat: Tensor
    text_start: np.ndarray
    text_length: np.ndarray
    speech_start: np.ndarray
    speech_length: np.ndarray
    prefix_start: np.ndarray
    prefix_length: np.ndarray
    voice: np.ndarray
    space_start: int
    full_stop: int
    hints: Tensor | None = None
    """For each place of ``flat`` with speech: the phoneme said there and those after it, as classes ``[flat, 3]``
    (see ``add_hints``)."""
    num_hint_classes: int = 0
    cuts: Cuts | None = None

    @cached_property
    def ends_in_stop(self) -> np.ndarray:
        """Which utterances' texts end in a full stop."""
        last = torch.from_numpy(self.text_start + np.maximum(self.text_length, 1) - 1).to(self.device)
        return (self.flat[last] == self.full_stop).cpu().numpy()

    @property
    def device(self) -> torch.device:
        return self.flat.device


def front_end() -> tuple[Pronouncer, TextTokenizer]:
    """The embedded model's own."""
    return Pronouncer(), TextTokenizer.from_folder(EMBEDDED_LEXICON.parent / "CosyVoice-BlankEN")


def make_prefixes(
    tokenizer: TextTokenizer, texts: Sequence[str], seed: int, count: int = 600
) -> list[list[int]]:
    """The standard prefix first, then instructions and stray sentences, with and without the standard opening."""
    random = np.random.default_rng(seed)
    out = [STANDARD_PREFIX]
    for instruction in INSTRUCTIONS:
        out += [f"You are a helpful assistant. {instruction}<|endofprompt|>", f"{instruction}<|endofprompt|>"]
    for index in random.permutation(len(texts))[:count]:
        opening = "You are a helpful assistant. " if random.random() < 0.5 else ""
        out.append(f"{opening}{texts[index][:80]}<|endofprompt|>")
    out.append("<|endofprompt|>")
    return [tokenizer.encode(prefix) for prefix in out]


def load(data: Path, tokens: Path, config: SpeechLMConfig, device: torch.device, seed: int = 1) -> LMData:
    """Read a corpus folder's item list and the tokens file made from it, and pronounce every text."""
    with open(data / "items.jsonl", encoding="utf-8") as lines:
        items = [json.loads(line) for line in lines if line.strip()]
    with np.load(tokens) as packed:
        flat_speech, offsets = packed["tokens"].astype(np.int64), packed["offsets"]
    if len(offsets) != len(items) + 1:
        raise ValueError(f"{tokens} has {len(offsets) - 1} utterances, {data} has {len(items)}")
    if len(flat_speech) and flat_speech.max() >= config.speech_token_size:
        raise ValueError(f"{tokens} holds codes beyond {config.speech_token_size}")
    pronouncer, tokenizer = front_end()
    text = [tokenizer.encode(pronouncer(str(item["text"])).strip()) for item in items]
    prefixes = make_prefixes(tokenizer, [str(item["text"]) for item in items], seed)
    lengths = [len(ids) for ids in text]
    prefix_lengths = [len(ids) for ids in prefixes]
    marks = tokenizer.encode(" ")
    joined = [i for ids in (*text, *prefixes, marks) for i in ids]
    flat = np.concatenate([np.array(joined, dtype=np.int64), flat_speech + config.text_vocab_size])
    text_start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    prefix_start = text_start[-1] + np.concatenate([[0], np.cumsum(prefix_lengths)]).astype(np.int64)
    return LMData(
        config=config,
        items=items,
        text=text,
        speech=[flat_speech[offsets[i] : offsets[i + 1]] for i in range(len(items))],
        prefixes=prefixes,
        flat=torch.from_numpy(flat).to(device),
        text_start=text_start[:-1],
        text_length=np.array(lengths),
        speech_start=len(joined) + offsets[:-1],
        speech_length=np.diff(offsets),
        prefix_start=prefix_start[:-1],
        prefix_length=np.array(prefix_lengths),
        voice=np.unique([str(item["voice"]) for item in items], return_inverse=True)[1],
        space_start=int(prefix_start[-1]),
        full_stop=tokenizer.encode(".")[0],
    )


@dataclass
class Plan:
    """Rows to build: where each run of text (utterance, space, utterance, …) and speech lies."""

    prefix: np.ndarray
    text_starts: np.ndarray
    text_lengths: np.ndarray
    speech_starts: np.ndarray
    speech_lengths: np.ndarray
    interleaved: np.ndarray

    def totals(self, data: LMData) -> np.ndarray:
        """Positions of each row: start, prefix, text, task, speech."""
        lengths = self.text_lengths.sum(1) + self.speech_lengths.sum(1)
        return np.asarray(2 + data.prefix_length[self.prefix] + lengths)


def plan(
    data: LMData,
    chosen: np.ndarray,
    random: np.random.Generator,
    *,
    joined: bool = True,
    varied: bool = True,
    interleaved: bool | None = None,
) -> Plan:
    """One row for each of the ``chosen`` items, others in front of it where ``joined``.

    Args:
        varied: other prefixes than the standard one, full stops left out, with and without space at a joint.
        interleaved: all rows or none; None = half.
    """
    rows = len(chosen)
    others = [_companions(data, chosen, random) for _ in JOINED[1:]]
    utterances = np.stack([*others, chosen], axis=1)
    most = len(JOINED)
    count = random.choice(most, size=rows, p=JOINED) if joined else np.zeros(rows, dtype=np.int64)
    used = np.arange(most - 1, -1, -1) <= count[:, None]
    pieces = _whole(data, utterances)
    if varied and data.cuts is not None:
        pieces = _cut(data.cuts, pieces, utterances, random)
    speech_lengths = pieces.speech_length * used
    for column in range(most - 1):
        too_long = speech_lengths.sum(1) > MOST_SPEECH_TOKENS
        used[:, column] &= ~too_long
        speech_lengths = pieces.speech_length * used
    words = pieces.text_length * used
    if varied:
        bare = (
            (random.random((rows, most)) < 0.12)
            & data.ends_in_stop[utterances]
            & pieces.has_end
            & (words > 1)
        )
        words = words - bare
    spaces = random.random((rows, most - 1)) < np.where(pieces.has_end[:, :-1], SPACED, 0.8) * varied
    spaces &= used[:, :-1]
    text_lengths = np.zeros((rows, 2 * most - 1), dtype=np.int64)
    text_lengths[:, 0::2], text_lengths[:, 1::2] = words, spaces
    text_starts = np.full((rows, 2 * most - 1), data.space_start, dtype=np.int64)
    text_starts[:, 0::2] = pieces.text_start
    prefix = np.zeros(rows, dtype=np.int64)
    if varied:
        other = random.random(rows) < 0.35
        prefix[other] = random.integers(0, len(data.prefix_length), int(other.sum()))
    group_text, group_speech = data.config.mix_ratio
    groups = text_lengths.sum(1) // group_text
    # As in the reference: only where the speech lasts beyond the last full group.
    eligible = (speech_lengths.sum(1) > groups * group_speech) & (groups > 0)
    wanted = random.random(rows) < 0.5 if interleaved is None else np.full(rows, interleaved)
    return Plan(
        prefix=prefix,
        text_starts=text_starts,
        text_lengths=text_lengths,
        speech_starts=pieces.speech_start,
        speech_lengths=speech_lengths,
        interleaved=eligible & wanted,
    )


@dataclass
class _Pieces:
    """The parts of the utterances ``[rows, utterances]`` that a plan uses."""

    text_start: np.ndarray
    text_length: np.ndarray
    speech_start: np.ndarray
    speech_length: np.ndarray
    has_end: np.ndarray


def _whole(data: LMData, utterances: np.ndarray) -> _Pieces:
    return _Pieces(
        data.text_start[utterances],
        data.text_length[utterances],
        data.speech_start[utterances],
        data.speech_length[utterances],
        np.ones(utterances.shape, dtype=bool),
    )


def _cut(cuts: Cuts, whole: _Pieces, utterances: np.ndarray, random: np.random.Generator) -> _Pieces:
    """Leave a beginning or an end of some utterances: more joints than the corpus has, and no sentence by heart.

    The last utterance keeps its end, which is where the model learns to stop.
    """
    count = cuts.count[utterances]
    chosen = (random.random(utterances.shape) < CUT) & (count > 0)
    which = np.minimum(
        cuts.start[utterances] + (random.random(utterances.shape) * count).astype(np.int64),
        len(cuts.text) - 1,
    )
    text, speech = cuts.text[which], cuts.speech[which]
    keeps_end = random.random(utterances.shape) < 0.5
    keeps_end[:, -1] = True
    late, early = chosen & keeps_end, chosen & ~keeps_end
    return _Pieces(
        whole.text_start + text * late,
        np.where(late, whole.text_length - text, np.where(early, text - 1, whole.text_length)),
        whole.speech_start + speech * late,
        np.where(late, whole.speech_length - speech, np.where(early, speech, whole.speech_length)),
        ~early,
    )


def _companions(data: LMData, chosen: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """For each item another of the chosen: of the same voice four times in five."""
    order = np.lexsort((random.random(len(chosen)), data.voice[chosen]))
    place = np.empty(len(chosen), dtype=np.int64)
    place[order] = np.arange(len(chosen))
    neighbour = order[(place + 1) % len(chosen)]
    anyone = random.integers(0, len(chosen), len(chosen))
    return np.asarray(chosen[np.where(random.random(len(chosen)) < 0.8, neighbour, anyone)])


def _from_runs(index: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    """Places in the flat array of the ``index``-th token ``[B, L]`` of runs laid end to end (clamped)."""
    ends = lengths.cumsum(1)
    run = (index[:, :, None] >= ends[:, None, :]).sum(2).clamp_max(lengths.shape[1] - 1)
    begin = (ends - lengths).gather(1, run)
    return starts.gather(1, run) + index - begin


@dataclass
class DeviceRows:
    """A plan on the device, so that rows can be drawn from it without the host."""

    prefix_start: Tensor
    prefix_length: Tensor
    text_starts: Tensor
    text_lengths: Tensor
    speech_starts: Tensor
    speech_lengths: Tensor
    interleaved: Tensor

    @classmethod
    def of(cls, data: LMData, rows: Plan) -> DeviceRows:
        """Copy a plan over."""

        def move(values: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(data.device, non_blocking=True)

        return cls(
            prefix_start=move(data.prefix_start[rows.prefix]),
            prefix_length=move(data.prefix_length[rows.prefix]),
            text_starts=move(rows.text_starts),
            text_lengths=move(rows.text_lengths),
            speech_starts=move(rows.speech_starts),
            speech_lengths=move(rows.speech_lengths),
            interleaved=move(rows.interleaved),
        )

    def copy_(self, other: DeviceRows) -> None:
        """Take another plan of as many rows into the same memory."""
        for field in fields(self):
            getattr(self, field.name).copy_(getattr(other, field.name))


def build(data: LMData, rows: Plan, which: np.ndarray, multiple: int = 32) -> tuple[Tensor, Tensor]:
    """Inputs and targets ``[B, L]``: inputs in the joint numbering, targets speech rows or ``IGNORE``."""
    width = -(-int(rows.totals(data)[which].max()) // multiple) * multiple
    return assemble(data, DeviceRows.of(data, rows), torch.from_numpy(which).to(data.device), width)[:2]


def assemble(
    data: LMData, rows: DeviceRows, which: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same as ``build`` for row numbers and a plan on the device and a given width; never waits for it.

    Third: hints ``[B, L, 3]`` about the target of each place, ``IGNORE`` where there are none; None without hints.
    """
    config, device = data.config, data.device
    text_lengths, speech_lengths = rows.text_lengths[which], rows.speech_lengths[which]
    text_starts, speech_starts = rows.text_starts[which], rows.speech_starts[which]
    prefix_start, prefix_length = rows.prefix_start[which][:, None], rows.prefix_length[which][:, None]
    group_text, group_speech = config.mix_ratio
    size = group_text + group_speech
    words = text_lengths.sum(1, keepdim=True)
    total = 2 + prefix_length + words + speech_lengths.sum(1, keepdim=True)
    groups = words // group_text * rows.interleaved[which][:, None]

    place = torch.arange(width, device=device)[None]
    after = place - 1 - prefix_length
    grouped = (after >= 0) & (after < groups * size)
    group, inside = after // size, after % size
    tail = after - groups * size
    words_left = words - groups * group_text
    is_text = torch.where(grouped, inside < group_text, (tail >= 0) & (tail < words_left))
    text_index = torch.where(grouped, group * group_text + inside, groups * group_text + tail)
    speech_index = torch.where(
        grouped, group * group_speech + inside - group_text, groups * group_speech + tail - words_left - 1
    )
    is_task = ~grouped & (tail == words_left)
    is_speech = torch.where(grouped, inside >= group_text, tail > words_left) & (place < total)

    source = torch.where(is_text, _from_runs(text_index.clamp_min(0), text_starts, text_lengths), 0)
    source = torch.where(
        is_speech, _from_runs(speech_index.clamp_min(0), speech_starts, speech_lengths), source
    )
    is_prefix = (place >= 1) & (after < 0)
    source = torch.where(is_prefix, prefix_start + place - 1, source)
    ids = data.flat[source]
    ids = torch.where(place == 0, config.text_vocab_size + config.sos_id, ids)
    ids = torch.where(is_task, config.text_vocab_size + config.task_id, ids)
    ids = torch.where(place < total, ids, 0)

    speech = torch.where(is_speech, ids - config.text_vocab_size, IGNORE)
    targets = torch.cat([speech[:, 1:], torch.full_like(speech[:, :1], IGNORE)], dim=1)
    targets = torch.where(grouped & (inside == size - 1), config.fill_id, targets)
    targets = torch.where(place == total - 1, config.eos_id, targets)
    targets = torch.where(place < total, targets, IGNORE)
    if data.hints is None:
        return ids, targets, None
    hints = torch.where(is_speech.unsqueeze(-1), data.hints[source], IGNORE)
    return ids, targets, torch.cat([hints[:, 1:], torch.full_like(hints[:, :1], IGNORE)], dim=1)


def add_hints(data: LMData, places: np.ndarray, silent: Sequence[int], ahead: int = 3) -> None:
    """Give ``data`` its hints.

    Args:
        places: for every speech token of the corpus the place in its utterance's text, -1 = not known.
        silent: ids of the space (first) and of punctuation, which are no phonemes.
    """
    text = np.concatenate([np.array(ids, dtype=np.int64) for ids in data.text])
    sounds = ~np.isin(text, silent)
    known, classes = np.unique(text[sounds], return_inverse=True)
    classes = np.concatenate([classes + 1, np.zeros(ahead, dtype=np.int64)])
    rank = np.concatenate([[0], np.cumsum(sounds)])  # how many phonemes stand before a place
    owner = np.repeat(np.arange(len(data.speech_length)), data.speech_length)
    at = rank[data.text_start[owner] + np.maximum(places, 0)]
    end = rank[(data.text_start + data.text_length)[owner]]
    hints = np.full((len(data.flat), ahead), IGNORE, dtype=np.int64)
    spoken = slice(int(data.speech_start[0]), int(data.speech_start[0]) + len(owner))
    for step in range(ahead):
        wanted = np.where(at + step < end, classes[np.minimum(at + step, len(classes) - 1)], 0)
        hints[spoken, step] = np.where(places >= 0, wanted, IGNORE)
    data.cuts = _find_cuts(data, places, text, silent[0])
    data.hints, data.num_hint_classes = torch.from_numpy(hints).to(data.device), len(known) + 1


def _find_cuts(data: LMData, places: np.ndarray, text: np.ndarray, space: int, least: int = 15) -> Cuts:
    """Cuts between words with at least ``least`` speech tokens to either side."""
    first = int(data.speech_start[0])
    texts: list[np.ndarray] = []
    speeches: list[np.ndarray] = []
    for i, length in enumerate(data.speech_length):
        said = places[data.speech_start[i] - first :][:length]
        words = (text[data.text_start[i] :][: data.text_length[i]] == space).nonzero()[0] + 1
        # CTC names a sound when it is well under way: the word begins a token earlier.
        begins = np.searchsorted(said, words) - 1 if length and said[0] >= 0 else np.full(len(words), -1)
        good = (begins >= least) & (begins <= length - least)
        texts.append(words[good])
        speeches.append(begins[good])
    count = np.array([len(part) for part in texts])
    return Cuts(np.concatenate(texts), np.concatenate(speeches), np.cumsum(count) - count, count)


def silent_ids() -> tuple[int, list[int]]:
    """The ids of the space and of the punctuation that the front end writes."""
    tokenizer = front_end()[1]
    return tokenizer.encode(" ")[0], [tokenizer.encode(mark)[0] for mark in ",.?!"]


def batches(
    data: LMData, rows: Plan, most_positions: int, random: np.random.Generator
) -> Iterator[np.ndarray]:
    """Row numbers of like length, each batch at most ``most_positions`` with its padding; in random order."""
    totals = rows.totals(data)
    order = np.argsort(totals * (1 + 0.1 * random.random(len(totals))))
    parts, begin, longest = [], 0, 0
    for place, row in enumerate(order):
        longest = max(longest, int(totals[row]))
        if place > begin and (place + 1 - begin) * (longest + 32) > most_positions:
            parts.append(order[begin:place])
            begin, longest = place, int(totals[row])
    parts.append(order[begin:])
    for index in random.permutation(len(parts)):
        yield parts[index]


def disturb(
    ids: Tensor, config: SpeechLMConfig, most: float, generator: torch.Generator | None = None
) -> Tensor:
    """Replace speech tokens of the input by random ones; each row has its own share, 0 … ``most``.

    The model then leans on the text and forgives its own slips.
    """
    share = torch.rand(len(ids), 1, device=ids.device, generator=generator) * most
    is_speech = (ids >= config.text_vocab_size) & (ids < config.text_vocab_size + config.speech_token_size)
    hit = is_speech & (torch.rand(ids.shape, device=ids.device, generator=generator) < share)
    other = torch.randint(
        config.text_vocab_size,
        config.text_vocab_size + config.speech_token_size,
        ids.shape,
        device=ids.device,
        generator=generator,
    )
    return torch.where(hit, other, ids)
