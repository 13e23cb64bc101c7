"""CosyVoice-300M's speech LM in paged rows, plain way: the tokens of ``LMSession``, alone and side by side."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.test_older_lms import ATOL, conformer, vectors  # noqa: F401  (fixture)
from vivace.datatypes import SamplingParams
from vivace.engine.lm_device import LMDevice
from vivace.engine.lm_runner import LMSession, PlainSequence
from vivace.errors import SynthesisError
from vivace.kernels.row_state import RING
from vivace.models.conformer_paged import PROMPT_BUCKETS, PagedConformer

RULES = {"token_text_ratio": (2.0, 20.0), "max_tokens": 90, "max_equal_tokens": 50}
SPEAKER = np.random.default_rng(0).standard_normal(192).astype(np.float32)


def make_device(lm, **settings):
    return LMDevice(lm, **({"max_rows": 4, "cache_tokens": 4000, "max_positions": 1000} | settings))


def sequence(lm, text=(3, 4, 5, 6), prompt=(7, 8, 9), speaker=SPEAKER):
    return PlainSequence(lm.for_speaker(speaker), (1, 2), text, prompt)


@torch.inference_mode()
def run(session, counts=(16, 1, 7, 16, 16, 16, 16, 16)):
    made = []
    for count in counts:
        made.append(session.decode(count))
        if session.finish_reason is not None:
            break
    return made, session.finish_reason, session.num_speech_tokens


def alone(lm, speaker=SPEAKER, sampling=None, rules=RULES, **given):
    spoken = sequence(lm, speaker=speaker, **given)
    return run(
        LMSession(lm.for_speaker(speaker), spoken, sampling or SamplingParams(seed=5), segment=0, **rules)
    )


@pytest.mark.parametrize("speaker", [SPEAKER, None])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(seed=5),
        SamplingParams(seed=6, top_p=1.0, top_k=200, temperature=1.4),
        SamplingParams(seed=7, temperature=0.0),
        SamplingParams(seed=8, win_size=64, tau_r=0.01),
    ],
)
@pytest.mark.parametrize("text", [(), (3,), tuple(range(40, 100))])
def test_session_gives_the_tokens_of_the_plain_session(conformer, speaker, sampling, text):  # noqa: F811
    device = make_device(conformer)
    session = device.open(sequence(conformer, text, speaker=speaker), sampling, segment=0, **RULES)
    assert run(session) == alone(conformer, speaker, sampling, text=text)
    session.close()
    device.rows.check()


def test_sessions_side_by_side(conformer):  # noqa: F811
    """Rows of other speakers and lengths that join and leave; slots are used again."""
    device = make_device(conformer)
    plans = [  # text, prompt, speaker, from which round on
        ((3, 4, 5), (7, 8), SPEAKER, 0),
        (tuple(range(30)), tuple(range(100)), -SPEAKER, 0),
        ((9,), (), None, 1),
        (tuple(range(5, 60)), (1,), 2 * SPEAKER[::-1].copy(), 2),
        ((8, 8, 8), (200, 201), SPEAKER, 4),
        ((3, 4, 5), (7, 8), SPEAKER, 6),
    ]
    sessions, made = {}, [[] for _ in plans]
    with torch.inference_mode():
        for turn in range(30):
            for number, (text, prompt, speaker, first) in enumerate(plans):
                if turn >= first and number not in sessions and device.rows.num_open_rows < 4:
                    spoken = sequence(conformer, text, prompt, speaker)
                    sessions[number] = device.open(spoken, SamplingParams(seed=number), segment=0, **RULES)
            running = {n: s for n, s in sessions.items() if s.finish_reason is None}
            assert not device.launch([(session, 3 + n) for n, session in running.items()])
            for number, session in running.items():
                made[number] += session.collect()
                if session.finish_reason is not None:
                    session.close()
    for number, (text, prompt, speaker, _) in enumerate(plans):
        expected, _, _ = alone(conformer, speaker, SamplingParams(seed=number), text=text, prompt=prompt)
        assert made[number] == [token for part in expected for token in part]
    device.rows.check()


@torch.inference_mode()
def test_the_recorded_logits(conformer):  # noqa: F811
    given = vectors(1)
    text = torch.cat((given["prompt_text"], given["text"]), dim=1)[0].tolist()
    prompt, forced = given["prompt_token"][0].tolist(), given["lm.forced_tokens"].tolist()
    device = make_device(conformer)
    spoken = PlainSequence(
        conformer.for_speaker(given["speaker_embedding"][0].numpy()), text[:1], text[1:], prompt
    )
    session = device.open(spoken, SamplingParams(seed=1), segment=0, **RULES)
    session.decode(1)
    assert isinstance(device.paged, PagedConformer)
    scores = device.paged.forced_scores(session._lease.slot, forced, 1)
    torch.testing.assert_close(scores, given["lm.logits"][1:], atol=ATOL, rtol=0)


def test_positions_behind_a_page_and_behind_the_first_prompt_bucket(conformer):  # noqa: F811
    for length in (25, 26, 27, 28, 57, 58, 59, 300, 700):
        prompt = tuple(int(token) for token in np.random.default_rng(length).integers(0, 256, length))
        rules = RULES | {"max_tokens": 40}
        device = make_device(conformer)
        session = device.open(sequence(conformer, prompt=prompt), SamplingParams(seed=1), segment=0, **rules)
        assert run(session) == alone(conformer, sampling=SamplingParams(seed=1), prompt=prompt, rules=rules)


def test_a_prompt_that_is_too_long(conformer):  # noqa: F811
    device = make_device(conformer, cache_tokens=6000, max_positions=5000)
    prompt = (1,) * PROMPT_BUCKETS[-1]
    session = device.open(sequence(conformer, prompt=prompt), SamplingParams(), segment=0, **RULES)
    with pytest.raises(SynthesisError, match="too long"):
        session.decode(1)
    session.close()
    assert device.rows.num_open_rows == 0


def test_not_a_number_ends_one_row_alone(conformer):  # noqa: F811
    device = make_device(conformer)
    bad = device.open(sequence(conformer), SamplingParams(seed=1), segment=0, **RULES)
    good = device.open(sequence(conformer), SamplingParams(seed=5), segment=0, **RULES)
    with torch.inference_mode():
        device.launch([(bad, 4), (good, 4)])
        made = bad.collect(), good.collect()
        device.paged.pool[:, :, bad._lease.pages] = torch.nan
        device.launch([(bad, 4), (good, 4)])
        with pytest.raises(SynthesisError, match="not finite"):
            bad.collect()
        rest = good.collect()
    expected, _, _ = alone(conformer)
    assert made[1] + rest == expected[0][:8]
    assert RING >= 64


def test_deterministic_rows_are_computed_alone(conformer):  # noqa: F811
    device = make_device(conformer, deterministic=True)
    sessions = [
        device.open(sequence(conformer), SamplingParams(seed=seed), segment=0, **RULES) for seed in (5, 6, 7)
    ]
    with torch.inference_mode():
        device.launch([(session, 16) for session in sessions])
        made = [session.collect() for session in sessions]
    for seed, tokens in zip((5, 6, 7), made, strict=True):
        assert tokens == alone(conformer, sampling=SamplingParams(seed=seed))[0][0]
