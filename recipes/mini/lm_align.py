"""Which phoneme of its text each speech token belongs to: a hint for the speech LM's training.

A small model finds out late that it must follow the text from left to right, above all where two sentences stand
in one sequence. A second loss, which asks it to name the phoneme that is being said and the two after it, shows
it the way. Where each phoneme is said comes from the tokenizer's recogniser: the likeliest path of the teacher's
phonemes through its CTC scores. Teacher and front end write words differently, so words are matched in order, and
their phonemes by their share of the word.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from recipes.mini.lm_data import LMData
from recipes.mini.symbols import numbers, teacher_phonemes
from recipes.mini.tokenizer_model import TokenRecogniser, to_levels

IMPOSSIBLE = -1e4


def first_frames(scores: Tensor, frames: Tensor, symbols: Tensor, lengths: Tensor) -> Tensor:
    """When each symbol of a row begins, on the likeliest CTC path.

    Args:
        scores: log-probabilities ``[B, F, classes]``, class 0 is the blank; ``frames`` ``[B]`` how many count.
        symbols: ``[B, S]``, padded; ``lengths`` ``[B]``, at least 1.

    Returns:
        ``[B, S]`` frame numbers, the number of all frames for padding.
    """
    batch, most, _ = scores.shape
    states = 2 * symbols.shape[1] + 1
    labels = torch.zeros(batch, states, dtype=torch.long, device=scores.device)
    labels[:, 1::2] = symbols
    skips = torch.zeros_like(labels, dtype=torch.bool)
    skips[:, 3::2] = symbols[:, 1:] != symbols[:, :-1]
    best = torch.full((batch, states), IMPOSSIBLE, device=scores.device)
    best[:, :2] = scores[:, 0].gather(1, labels[:, :2])
    came = torch.zeros(most, batch, states, dtype=torch.uint8, device=scores.device)
    for frame in range(1, most):
        one = nn.functional.pad(best[:, :-1], (1, 0), value=IMPOSSIBLE)
        two = nn.functional.pad(best[:, :-2], (2, 0), value=IMPOSSIBLE).masked_fill(~skips, IMPOSSIBLE)
        found, step = torch.stack([best, one, two]).max(0)
        going = (frame < frames)[:, None]
        best = torch.where(going, found + scores[:, frame].gather(1, labels), best)
        came[frame] = torch.where(going, step, 0)
    last = torch.stack([2 * lengths, 2 * lengths - 1], 1)
    state = last.gather(1, best.gather(1, last).argmax(1, keepdim=True)).squeeze(1)
    begins = torch.full((batch, states), most, dtype=torch.long, device=scores.device)
    for frame in range(most - 1, -1, -1):
        begins.scatter_(1, state[:, None], frame)
        state = state - came[frame].gather(1, state[:, None]).squeeze(1).long()
    return begins[:, 1::2]


def text_places(text: Sequence[int], space: int, marks: frozenset[int], words: Sequence[int]) -> np.ndarray:
    """For each phoneme of the teacher, in order, the place of the text token that it answers to.

    Args:
        text: ids of one utterance. ``space``, ``marks``: ids of the space and of punctuation.
        words: how many phonemes each word of the teacher has.
    """
    places: list[list[int]] = [[]]
    for place, token in enumerate(text):
        if token == space:
            places.append([])
        elif token not in marks:
            places[-1].append(place)
    mine = [np.array(word) for word in places if word]
    theirs = [count for count in words if count]
    if len(mine) != len(theirs):
        mine, theirs = [np.concatenate(mine)], [sum(theirs)]
    parts = [word[np.arange(count) * len(word) // count] for word, count in zip(mine, theirs, strict=True)]
    return np.concatenate(parts)


@torch.inference_mode()
def follow(
    data: LMData, recogniser: Path, space: int, marks: frozenset[int], batch: int = 1024
) -> np.ndarray:
    """For every speech token of the corpus, in order, the place in its utterance's text; -1 = not known."""
    found = TokenRecogniser(str(recogniser), data.device)
    if found.kind != "teacher":
        raise ValueError("the recogniser knows other symbols than the teacher's phonemes")
    meant = [numbers(teacher_phonemes(item), found.names) for item in data.items]
    first = data.speech_start[0]
    out = np.full(int(data.speech_length.sum()), -1, dtype=np.int64)
    usable = [i for i in range(len(meant)) if 1 < len(meant[i]) <= 2 * data.speech_length[i] and data.text[i]]
    usable.sort(key=lambda i: int(data.speech_length[i]))
    for begin in range(0, len(usable), batch):
        rows = usable[begin : begin + batch]
        tokens = [torch.from_numpy(data.speech[i]) for i in rows]
        counts = torch.tensor([len(row) for row in tokens], device=data.device)
        padded = nn.utils.rnn.pad_sequence(tokens, batch_first=True).to(data.device)
        scores = found.model.read(to_levels(padded, found.model.encoder.sizes.levels), counts)
        symbols = nn.utils.rnn.pad_sequence([torch.tensor(meant[i]) for i in rows], batch_first=True)
        lengths = torch.tensor([len(meant[i]) for i in rows], device=data.device)
        begins = first_frames(scores.float().log_softmax(-1), 2 * counts, symbols.to(data.device), lengths)
        # A token covers two frames; the phoneme that began last by its end is the one being said.
        ends = 2 * torch.arange(padded.shape[1], device=data.device) + 1
        said = torch.searchsorted(begins.contiguous(), ends.expand(len(rows), -1).contiguous(), right=True)
        said = (said - 1).clamp_min(0).cpu().numpy()
        for row, i in enumerate(rows):
            words = [
                len(numbers(teacher_phonemes({"phonemes": word}), found.names))
                for word in str(data.items[i]["phonemes"]).split()
            ]
            if sum(words) != len(meant[i]):
                continue
            places = text_places(data.text[i], space, marks, words)
            start = int(data.speech_start[i] - first)
            out[start : start + len(tokens[row])] = places[said[row, : len(tokens[row])]]
    return out
