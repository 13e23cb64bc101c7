"""The speech LM's training sequences are those that the engine feeds at inference."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from recipes.mini.config import mini_lm_config
from recipes.mini.lm_align import first_frames, text_places
from recipes.mini.lm_check import Row, decode, sequence
from recipes.mini.lm_data import (
    IGNORE,
    DeviceRows,
    add_hints,
    assemble,
    batches,
    build,
    disturb,
    load,
    plan,
    silent_ids,
)
from recipes.mini.lm_step import Trainer, bucketed
from vivace.config import SamplingConfig
from vivace.datatypes import SamplingParams
from vivace.engine.interleave import Feed, Interleaver
from vivace.engine.lm_runner import LMSession, PlainSequence
from vivace.models.speech_lm import SpeechLM

CONFIG = mini_lm_config(243)
TEXTS = (
    "Hello, world!",
    "The old man sat by the sea.",
    "No.",
    "What is it, then? I do not know",
    "Seven times two.",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    random = np.random.default_rng(1)
    lines, rows = [], []
    for i in range(20):
        lines.append(json.dumps({"id": f"i{i}", "text": TEXTS[i % 5], "voice": f"v{i % 3}"}))
        rows.append(random.integers(0, 243, random.integers(30, 90)))
    (folder / "items.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    np.savez(folder / "tokens.npz", tokens=np.concatenate(rows).astype(np.uint16), offsets=offsets, codes=243)
    return load(folder, folder / "tokens.npz", CONFIG, torch.device("cpu"))


def fed_at_inference(machine, speech):
    """Ids in the joint numbering and targets, with ``speech`` given as if the model had drawn it."""
    ids, targets, left = [], [], list(speech)
    while True:
        action = machine.next_action()
        assert isinstance(action, Feed)
        fed = [i if p.kind == "text" else i + CONFIG.text_vocab_size for p in action.pieces for i in p.ids]
        ids += fed
        targets += [IGNORE] * (len(fed) - 1)
        if not left:
            targets.append(CONFIG.eos_id)
            return ids, targets
        targets.append(left[0])
        machine.accept(left.pop(0))


@pytest.mark.parametrize("interleaved", [True, False])
def test_rows_are_the_sequences_of_the_engine(data, interleaved):
    random = np.random.default_rng(3)
    rows = plan(data, np.arange(20), random, interleaved=interleaved)
    assert rows.interleaved.any() == interleaved
    ids, targets = build(data, rows, np.arange(20))
    lm = SpeechLM(mini_lm_config(243))
    for row in range(20):

        def run(starts, lengths):
            return [int(i) for s, n in zip(starts, lengths, strict=True) for i in data.flat[s : s + n]]

        text = run(rows.text_starts[row], rows.text_lengths[row])
        speech = [i - CONFIG.text_vocab_size for i in run(rows.speech_starts[row], rows.speech_lengths[row])]
        prefix = data.prefixes[rows.prefix[row]]
        if rows.interleaved[row]:
            machine = Interleaver(CONFIG, instruction=prefix)
            machine.push_text(text)
            machine.finish()
        else:
            machine = PlainSequence(lm, prefix, text, [])
        want_ids, want_targets = fed_at_inference(machine, speech)
        length = len(want_ids)
        assert ids[row, :length].tolist() == want_ids
        assert not ids[row, length:].any()
        # The engine does not draw fill where a group is full, so only training names it there.
        got = [IGNORE if t == CONFIG.fill_id else t for t in targets[row, :length].tolist()]
        assert got == want_targets
        assert (targets[row, length:] == IGNORE).all()
        groups = len(text) // CONFIG.mix_ratio[0] if rows.interleaved[row] else 0
        assert (targets[row] == CONFIG.fill_id).sum() == groups


def test_batches_hold_every_row_once(data):
    rows = plan(data, np.arange(20), np.random.default_rng(4))
    parts = list(batches(data, rows, 1000, np.random.default_rng(5)))
    assert sorted(np.concatenate(parts).tolist()) == list(range(20))
    for part in parts:
        assert len(part) == 1 or build(data, rows, part)[0].numel() <= 1000


def test_noise_touches_speech_only(data):
    rows = plan(data, np.arange(20), np.random.default_rng(6))
    ids, _ = build(data, rows, np.arange(20))
    noisy = disturb(ids, CONFIG, 0.5, torch.Generator().manual_seed(0))
    changed = ids != noisy
    speech = (ids >= CONFIG.text_vocab_size) & (ids < CONFIG.text_vocab_size + 243)
    assert changed.any()
    assert not (changed & ~speech).any()
    assert 0.1 < changed[speech].float().mean() < 0.4


@pytest.mark.parametrize(("prompt", "streamed"), [(None, False), (3, False), (3, True)])
def test_decoding_without_a_cache_draws_what_the_engine_draws(data, prompt, streamed):
    """The check's grid of many rows against the engine's one row with a cache; float32, fixed seeds."""
    torch.manual_seed(0)
    small = replace(CONFIG, hidden_size=64, intermediate_size=64, num_layers=2, num_heads=1, num_kv_heads=1)
    lm = SpeechLM(small).eval()
    torch.nn.init.normal_(lm.llm_decoder.weight, std=0.2)
    rows = [
        Row(sequence(lm, data, item, prompt, streamed), 2, item, CONFIG.text_vocab_size) for item in (0, 1, 4)
    ]
    decode(lm, rows, SamplingConfig())
    for item, row in zip((0, 1, 4), rows, strict=True):
        assert row.made
        session = LMSession(
            lm,
            sequence(lm, data, item, prompt, streamed),
            SamplingParams(seed=item, top_p=0.8, top_k=25, win_size=10, tau_r=0.1),
            segment=0,
            token_text_ratio=(1.5 / len(data.text[item]), 1000.0),
            max_tokens=len(row.made),
        )
        with torch.inference_mode():
            assert session.decode(10_000) == row.made


def hinted(data):
    """The data with invented places: each utterance's speech runs evenly through its text."""
    space, marks = silent_ids()
    places = [
        np.arange(speech) * text // speech
        for speech, text in zip(data.speech_length, data.text_length, strict=True)
    ]
    other = replace(data)
    add_hints(other, np.concatenate(places), [space, *marks])
    return other, space, marks


def test_hints_name_the_phoneme_of_the_target(data):
    other, space, marks = hinted(data)
    rows = plan(data, np.arange(20), np.random.default_rng(7), joined=False, varied=False, interleaved=False)
    _, targets, hints = assemble(other, DeviceRows.of(other, rows), torch.arange(20), 320)
    sounds = sorted({i for text in data.text for i in text} - {space, *marks})
    for row in range(20):
        text = data.text[row]
        said = hints[row][targets[row] >= 0][:-1]  # the end of the sequence has none
        assert (hints[row][targets[row] < 0] == IGNORE).all()
        for step, classes in enumerate(said.tolist()):
            place = step * len(text) // len(data.speech[row])
            coming = [i for i in text[place:] if i in sounds][:3]
            want = [sounds.index(i) + 1 for i in coming]
            assert classes == want + [0] * (3 - len(want))


def test_cut_utterances_keep_words_and_their_speech_together(data):
    other, space, _ = hinted(data)
    rows = plan(other, np.arange(20).repeat(20), np.random.default_rng(8), interleaved=False)
    starts, lengths = rows.text_starts[:, 0::2], rows.text_lengths[:, 0::2]
    cut = 0
    for row, last in enumerate(np.arange(20).repeat(20)):
        spoken = data.text_start[last] + data.text_length[last] - starts[row, -1]
        assert 0 <= spoken - lengths[row, -1] <= 1  # the end is always there, but for its full stop
        begun = starts[row, -1] - data.text_start[last]
        skipped = rows.speech_starts[row, -1] - data.speech_start[last]
        assert skipped + rows.speech_lengths[row, -1] == data.speech_length[last]
        if begun:
            cut += 1
            assert data.text[last][begun - 1] == space
            assert skipped == -(-begun * data.speech_length[last] // data.text_length[last]) - 1
        else:
            assert skipped == 0
    assert cut


def test_batches_of_fixed_widths(data):
    totals = np.random.default_rng(0).integers(90, 500, 300)
    met = []
    shapes = {}
    for which, width in bucketed(totals, 2048, np.random.default_rng(1)):
        assert totals[which].max() <= width
        assert shapes.setdefault(width, len(which)) == len(which)
        met += which.tolist()
    assert set(met) == set(range(300))


def test_alignment_finds_where_symbols_begin():
    scores = torch.full((2, 9, 3), -5.0)
    scores[0, range(9), torch.tensor([0, 1, 1, 0, 1, 0, 2, 2, 0])] = 0.0
    scores[1, range(9), torch.tensor([2, 0, 1, 0, 0, 0, 0, 0, 0])] = 0.0
    symbols = torch.tensor([[1, 1, 2], [2, 1, 0]])
    begins = first_frames(scores, torch.tensor([9, 4]), symbols, torch.tensor([3, 2]))
    assert begins.tolist() == [[1, 4, 6], [0, 2, 9]]


def test_words_of_teacher_and_front_end_are_matched():
    text = [7, 8, 0, 9, 7, 8, 9, 1]  # two words and a full stop
    assert text_places(text, 0, frozenset({1}), [1, 2]).tolist() == [0, 3, 5]
    assert text_places(text, 0, frozenset({1}), [6]).tolist() == [0, 1, 3, 4, 5, 6]


def test_training_steps_lower_the_loss(data):
    torch.manual_seed(0)
    other, _, _ = hinted(data)
    small = replace(CONFIG, hidden_size=64, intermediate_size=64, num_layers=2, num_heads=1, num_kv_heads=1)
    trainer = Trainer(
        SpeechLM(small), other, mode="compiled", decay=0.05, smoothing=0.03, most_noise=0.0
    )  # a CPU runs eagerly, whatever is asked for
    losses = []
    random = np.random.default_rng(2)
    for _ in range(6):
        rows = plan(other, np.arange(20), random)
        trainer.new_plan(rows)
        trainer.set_rate(3e-3)
        for which, width in bucketed(rows.totals(other), 4096, random):
            trainer.step(torch.from_numpy(which), width)
        losses.append(trainer.mean_loss())
    assert losses[-1] < losses[0] - 0.5
