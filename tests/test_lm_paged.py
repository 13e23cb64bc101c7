"""The paged speech LM, plain way: sessions on it give the tokens of ``LMSession``, alone and side by side."""

from __future__ import annotations

import pytest
import torch

from vivace.config import SpeechLMConfig
from vivace.datatypes import SamplingParams
from vivace.engine.interleave import Interleaver
from vivace.engine.lm_device import LMDevice
from vivace.engine.lm_runner import LMSession, PlainSequence
from vivace.errors import OverloadedError, SynthesisError
from vivace.models.speech_lm import SpeechLM

CONFIG = SpeechLMConfig(
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    text_vocab_size=50,
    speech_token_size=61,
    num_special_rows=8,
)
RULES = {"token_text_ratio": (2.0, 20.0), "max_tokens": 90, "max_equal_tokens": 50}


def make_lm(config=CONFIG, seed=0, bias=0.0):
    """Random weights; ``bias`` lifts the special rows' scores, so that ends and fills come often."""
    torch.manual_seed(seed)
    lm = SpeechLM(config).eval()
    with torch.no_grad():
        for name, parameter in lm.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.0 if "embed" in name else 1.5 / parameter.shape[1] ** 0.5)
        lm.llm_decoder.weight[config.speech_token_size :] *= 1 + bias
    return lm


def make_device(lm, **settings):
    return LMDevice(lm, **({"max_rows": 4, "cache_tokens": 4000, "max_positions": 1000} | settings))


def plain(lm, text=(3, 4, 5, 6), prompt=(7, 8, 9)):
    return PlainSequence(lm, (1, 2), text, prompt)


def streamed(lm, prompt=(7, 8, 9)):
    return Interleaver(lm.config, instruction=(11, 12), prompt_text=(1, 2, 3), prompt_speech=prompt)


@torch.inference_mode()
def run(session, counts=(16, 1, 7, 16, 16, 16, 16, 16)):
    made = []
    for count in counts:
        made.append(session.decode(count))
        if session.finish_reason is not None:
            break
    return made, session.finish_reason, session.num_speech_tokens


def sampling_cases():
    return [
        SamplingParams(seed=5),
        SamplingParams(seed=6, top_p=1.0, top_k=69, temperature=1.4),
        SamplingParams(seed=7, temperature=0.0),
        SamplingParams(seed=8, win_size=3, tau_r=0.34),
        SamplingParams(seed=9, win_size=0),
        SamplingParams(seed=10, win_size=64, tau_r=0.01),
    ]


@pytest.mark.parametrize("sampling", sampling_cases())
@pytest.mark.parametrize(("segment", "attempt"), [(0, 0), (2, 1)])
def test_session_gives_the_tokens_of_the_plain_session(sampling, segment, attempt):
    lm = make_lm(bias=0.5)
    expected = run(LMSession(lm, plain(lm), sampling, segment=segment, attempt=attempt, **RULES))
    device = make_device(lm)
    session = device.open(plain(lm), sampling, segment=segment, attempt=attempt, **RULES)
    assert run(session) == expected
    session.close()
    device.rows.check()


@pytest.fixture(scope="module")
def mini_lm():
    from vivace.checkpoint import open_model
    from vivace.engine.loading import model_folder

    return open_model(model_folder("mini"), "cpu", torch.float32).lm


@pytest.mark.parametrize(("seed", "segment", "attempt"), [(0, 0, 0), (1, 3, 2)])
def test_embedded_model_gives_the_same_tokens(mini_lm, seed, segment, attempt):
    generator = torch.Generator().manual_seed(seed)
    config = mini_lm.config
    text = torch.randint(config.text_vocab_size, (40,), generator=generator).tolist()
    prompt = torch.randint(config.speech_token_size, (33,), generator=generator).tolist()
    rules = RULES | {"segment": segment, "attempt": attempt}
    device = make_device(mini_lm)
    outcomes = []
    for opened in (
        lambda *args: LMSession(mini_lm, *args, **rules),
        lambda *args: device.open(*args, **rules),
    ):
        plain_session = opened(
            PlainSequence(mini_lm, text[:9], text[9:20], prompt), SamplingParams(seed=seed)
        )
        sequence = Interleaver(config, prompt_text=text[:12], prompt_speech=prompt)
        session = opened(sequence, SamplingParams(seed=seed))
        with torch.inference_mode():
            pieces = [text[12:15], text[15:27], text[27:]]
            outcomes.append((run(plain_session), feed_and_decode(session, sequence, pieces, [5, 30, 9])))
    assert outcomes[0] == outcomes[1]


def test_runaway_speech_ends_at_the_same_token():
    lm = make_lm()
    rules = RULES | {"max_equal_tokens": 3}
    sampling = SamplingParams(temperature=0.0)
    with torch.no_grad():
        lm.llm_decoder.weight.zero_()  # every score is equal: the lowest id, over and over
    expected = run(LMSession(lm, plain(lm), sampling, segment=0, **rules))
    assert expected[1:] == ("length", 3)
    assert run(make_device(lm).open(plain(lm), sampling, segment=0, **rules)) == expected


def feed_and_decode(session, sequence, pieces, counts):
    """Text in pieces, a burst of tokens after each; then the rest."""
    made = []
    for piece, count in zip(pieces, counts, strict=True):
        sequence.push_text(piece)
        made.append(session.decode(count))
        made.append(session.waits_for_text)
    sequence.finish()
    return made, run(session)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("prompt", [(), tuple(range(20)), tuple(range(15))])
def test_streamed_text_gives_the_tokens_of_the_plain_session(seed, prompt):
    lm = make_lm(seed=seed, bias=0.4)
    pieces = [[1], [2, 3, 4, 5, 6, 7, 8], [9, 10], [11, 12, 13, 14], [15] * 11, [16, 17]]
    counts = [4, 9, 40, 3, 16, 1]
    outcomes = []
    for open_session in (LMSession, lambda lm, *args, **rules: make_device(lm).open(*args, **rules)):
        sequence = streamed(lm, prompt)
        session = open_session(lm, sequence, SamplingParams(seed=seed), segment=1, **RULES)
        with torch.inference_mode():
            outcomes.append(feed_and_decode(session, sequence, pieces, counts))
    assert outcomes[0] == outcomes[1]


def test_rows_side_by_side_do_not_touch_each_other():
    lm = make_lm(bias=0.3)
    samplings = [SamplingParams(seed=seed) for seed in range(4)]
    texts = [(3, 4), (5, 6, 7, 8, 9), (10,), (11, 12, 13)]
    alone = [
        run(LMSession(lm, plain(lm, text), sampling, segment=0, **RULES), counts=[16] * 6)
        for text, sampling in zip(texts, samplings, strict=True)
    ]
    device = make_device(lm)
    sessions = [
        device.open(plain(lm, text), sampling, segment=0, **RULES)
        for text, sampling in zip(texts, samplings, strict=True)
    ]
    made = [[] for _ in sessions]
    with torch.inference_mode():
        for _ in range(6):
            device.launch([(session, 16) for session in sessions])
            for index, session in enumerate(sessions):
                made[index] += session.collect()
    for (tokens, reason, count), session, ours in zip(alone, sessions, made, strict=True):
        assert [token for burst in tokens for token in burst] == ours
        assert session.num_speech_tokens == count
        if reason is not None:
            assert session.finish_reason in (reason, None)


def test_broken_row_fails_alone():
    lm = make_lm()
    with torch.no_grad():
        lm.embed_tokens.weight[40] = torch.nan
    device = make_device(lm)
    good = device.open(plain(lm), SamplingParams(seed=1), segment=0, **RULES)
    bad = device.open(plain(lm, text=(40, 3, 4)), SamplingParams(seed=1), segment=0, **RULES)
    with torch.inference_mode():
        device.launch([(bad, 8), (good, 8)])
        with pytest.raises(SynthesisError, match="not finite"):
            bad.collect()
        made = good.collect()
        expected = LMSession(lm, plain(lm), SamplingParams(seed=1), segment=0, **RULES).decode(8)
    assert made == expected


def test_rows_that_are_closed_make_room():
    lm = make_lm()
    device = make_device(lm, max_rows=2, cache_tokens=300)
    first = device.open(plain(lm), SamplingParams(), segment=0, **RULES)
    device.open(plain(lm), SamplingParams(), segment=0, **RULES)
    with pytest.raises(OverloadedError):
        device.open(plain(lm), SamplingParams(), segment=0, **RULES)
    with torch.inference_mode():
        first.launch(4)
        first.close()
        first.close()
        third = device.open(plain(lm), SamplingParams(seed=3), segment=0, **RULES)
        expected = LMSession(lm, plain(lm), SamplingParams(seed=3), segment=0, **RULES).decode(9)
        assert third.decode(9) == expected
    device.rows.check()


@pytest.mark.parametrize("fails", ["set_pages", "set_speaker"])
def test_a_row_that_does_not_open_keeps_nothing(monkeypatch, fails):
    device = make_device(make_lm(), max_rows=1)
    with monkeypatch.context() as patched:
        patched.setattr(device.paged, fails, lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            device.open(plain(device.lm), SamplingParams(), segment=0, **RULES)
    assert device.rows.num_open_rows == 0
    device.rows.check()
    device.open(plain(device.lm), SamplingParams(), segment=0, **RULES).close()


def test_settings_beyond_the_row_state_are_not_served():
    device = make_device(make_lm())
    assert device.serves(SamplingParams(win_size=64))
    assert not device.serves(SamplingParams(win_size=65))


def test_packed_weights_leave_the_model_as_it_was():
    lm = make_lm()
    embeds = torch.randn(1, 7, CONFIG.hidden_size)
    with torch.inference_mode():
        before = lm.logits(lm(embeds))
        make_device(lm)
        torch.testing.assert_close(lm.logits(lm(embeds)), before)
