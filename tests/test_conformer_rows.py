"""Rows of CosyVoice-300M's speech LM in step: the scores of each are those that it gets alone.

Tolerance as in ``test_older_lms``.
"""

import pytest
import torch

from tests.test_older_lms import conformer, decode, prefill, vectors  # noqa: F401  (fixture)
from vivace.models.conformer_graph import GraphView
from vivace.models.conformer_rows import ConformerRows

ATOL = 1e-4


def alone(lm, embeds, tokens):
    """Scores after the prompt and after each token."""
    cache = lm.new_cache(1, 8)
    scores = [lm.logits(lm(embeds, cache)[:, -1])]
    scores += [lm.logits(lm(lm.embed_speech(torch.tensor([[t]])), cache)[:, -1]) for t in tokens]
    return torch.cat(scores)


def prompt(seed, length):
    return torch.randn(1, length, 64, generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def test_the_recorded_logits(conformer):  # noqa: F811
    given = vectors(1)
    speaking = conformer.for_speaker(given["speaker_embedding"][0].numpy())
    rows = ConformerRows(conformer, rows=3)
    rows.add(1, prefill(speaking, given))
    got = [rows.scores[1].clone()]
    for token in given["lm.forced_tokens"]:
        rows.tokens[1] = token
        rows.step()
        got.append(rows.scores[1].clone())
    torch.testing.assert_close(torch.stack(got), given["lm.logits"], atol=ATOL, rtol=0)


@torch.inference_mode()
@pytest.mark.parametrize("capacity", [16, 64, 512])
def test_rows_that_come_and_go_equal_rows_alone(conformer, capacity):  # noqa: F811
    """A small storage is moved and grows on the way; a long prompt joins when little has been written."""
    plan = {  # row: (joins at step, length of its prompt, steps)
        0: (0, 5, 40),
        1: (3, 30, 20),
        2: (10, 2, 60),
        3: (25, 17, 9),
    }
    second = (30, 50, 30)  # row 1 again
    tokens = torch.randint(0, 256, (5, 100), generator=torch.Generator().manual_seed(0))
    rows = ConformerRows(conformer, rows=4, capacity=capacity)
    got = {key: [] for key in (0, 1, 2, 3, 4)}
    for now in range(75):
        for key, (start, length, steps) in (*plan.items(), (4, second)):
            row = 1 if key == 4 else key
            if now == start:
                rows.add(row, prompt(key, length))
                got[key].append(rows.scores[row].clone())
            if now == start + steps:
                rows.remove(row)
            if start <= now < start + steps:
                rows.tokens[row] = tokens[key, now - start]
        rows.step()
        for key, (start, _, steps) in (*plan.items(), (4, second)):
            if start <= now < start + steps:
                got[key].append(rows.scores[1 if key == 4 else key].clone())
    assert bool(rows.scores.isfinite().all())
    for key, (_, length, steps) in (*plan.items(), (4, second)):
        wanted = alone(conformer, prompt(key, length), tokens[key, :steps].tolist())
        torch.testing.assert_close(torch.stack(got[key]), wanted, atol=ATOL, rtol=0)
    if capacity == 512:
        assert rows.capacity == 512


@torch.inference_mode()
def test_memory_does_not_grow_with_time(conformer):  # noqa: F811
    """One sequence after the other: what has ended is moved out."""
    rows = ConformerRows(conformer, rows=1, capacity=32)
    for turn in range(12):
        rows.add(0, prompt(turn, 6))
        for _ in range(15):
            rows.tokens[0] = turn
            rows.step()
        rows.remove(0)
    assert rows.capacity == 32
    wanted = alone(conformer, prompt(99, 6), [7])
    rows.add(0, prompt(99, 6))
    rows.tokens[0] = 7
    rows.step()
    torch.testing.assert_close(rows.scores[0], wanted[1], atol=ATOL, rtol=0)


@torch.inference_mode()
def test_one_sequence_after_the_other_by_graphs(conformer, monkeypatch):  # noqa: F811
    """The way of a GPU, here without graphs: the recorded logits, and rows that are used again."""
    monkeypatch.setattr(type(conformer), "use_graphs", True)
    given = vectors(1)
    for _ in range(2):
        speaking = conformer.for_speaker(given["speaker_embedding"][0].numpy())
        assert isinstance(speaking, GraphView)
        scores = decode(speaking, prefill(speaking, given), given["lm.forced_tokens"])
        torch.testing.assert_close(scores, given["lm.logits"], atol=ATOL, rtol=0)
    assert len(conformer.idle_rows) == 1
    plain = prefill(conformer.for_speaker(None), given)
    assert plain.shape[1] == given["lm.input"].shape[1] - 1
    conformer.train().eval()
    assert not conformer.idle_rows
