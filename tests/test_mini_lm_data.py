"""The speech LM's training sequences are those that the engine feeds at inference."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from recipes.mini.config import mini_lm_config
from recipes.mini.lm_check import Row, decode, sequence
from recipes.mini.lm_data import IGNORE, batches, build, disturb, load, plan
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
