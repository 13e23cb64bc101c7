"""Tokens queued ahead, the prompt's last chunk before the first audio, launches in halves: on a CPU, plain kernels."""

import functools
import itertools
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.helpers import noise_voice, quiet_engine
from vivace import OverloadedError, SamplingParams, SynthesisRequest
from vivace.engine import decoder as decoder_module
from vivace.engine import loop
from vivace.engine.device_stages import DeviceStages
from vivace.engine.lm_device_session import DeviceLMSession

OPTIONS = {"num_steps": 2, "token_text_ratio": (3.0, 3.6)}
TEXT = "Once upon a time, a fox sang in the rain."
ROWS = 8


def open_engine(folder, **options):
    engine = quiet_engine(folder, **OPTIONS)
    assets = engine._assets
    engine.use_device(DeviceStages.build(assets.model, assets.limits, max_rows=ROWS, **options))
    return engine


@pytest.fixture(scope="module")
def engine(random_model_folder):
    with open_engine(random_model_folder) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(engine):
    """What the voice and the seed of this number give in an engine that has nothing else to do."""

    @functools.cache
    def result(seed):
        return engine.synthesize(request(noise_voice(engine._config, 50, seed=seed), seed))

    return result


def parts(engine):
    stages = engine._stages
    return stages._batch.decoder, stages._device


def held(engine):
    _, device = parts(engine)
    prompts = sum(len(prompt.pages) for prompt in device.flow._prompts.values())
    return (
        device.lm.rows.num_open_rows,
        device.flow.paged.pages_in_use - prompts,
        ROWS - len(device.vocoder._free),
    )


def request(voice, seed=0, text=TEXT):
    return SynthesisRequest(text, voice=voice, sampling=SamplingParams(seed=seed))


def run_to_the_end(engine):
    while engine.step():
        pass


def take_all(engine, live):
    found = []
    while (chunk := engine.take(live)) is not None:
        found.append(chunk.samples.tobytes())
    return b"".join(found)


def flow_calls(engine, monkeypatch):
    """Tokens of every call of the flow."""
    flow, calls = parts(engine)[1].flow.paged, []
    launch = flow.launch_batch
    monkeypatch.setattr(
        flow,
        "launch_batch",
        lambda items: calls.append([(len(tokens), is_last) for _, tokens, is_last in items]) or launch(items),
    )
    return calls


@pytest.mark.parametrize(
    ("prompt", "first"),
    [(50, [3, 25]), (51, [2, 25]), (52, [1, 25]), (53, [25]), (60, [18]), (3, [25])],
)
def test_the_last_chunk_of_the_prompt_comes_with_the_first_tokens(engine, monkeypatch, prompt, first):
    voice = noise_voice(engine._config, prompt, seed=prompt)
    decoder, _ = parts(engine)
    with monkeypatch.context() as patched:
        patched.setattr(decoder, "early_tokens", lambda live, segment: 0)
        together = engine.synthesize(request(voice)).samples.tobytes()
    calls = flow_calls(engine, monkeypatch)
    assert engine.synthesize(request(voice)).samples.tobytes() == together
    sizes = [call[0][0] for call in calls]
    assert sizes[: len(first)] == first
    assert sum(sizes) > 28
    assert held(engine) == (0, 0, 0)


@pytest.mark.parametrize("most", [2, 3, 4, 5, 27, 28, 29])
def test_an_utterance_that_ends_with_or_soon_after_the_early_tokens(engine, monkeypatch, most):
    voice = noise_voice(engine._config, 50, seed=4)
    decoder, _ = parts(engine)
    model, samples = engine._assets.model, []
    monkeypatch.setattr("vivace.engine.lm_rules.SHORTEST_LIMIT_TOKENS", most)
    monkeypatch.setattr(model, "config", replace(model.config, token_text_ratio=(10.0, 0.0)))
    for is_early in (False, True):
        with monkeypatch.context() as patched:
            if not is_early:
                patched.setattr(decoder, "early_tokens", lambda live, segment: 0)
            result = engine.synthesize(request(voice))
        assert result.num_speech_tokens == most
        samples.append(result.samples.tobytes())
    assert samples[0] == samples[1]
    assert held(engine) == (0, 0, 0)


@pytest.fixture
def alone_in_turn(engine, monkeypatch):
    """Chunks of a stream share launches, and its tokens come in turn with them; on a clock that stands still."""
    _, device = parts(engine)
    monkeypatch.setattr(loop, "now_ms", lambda: 0)
    monkeypatch.setattr(device.lm.paged, "in_turn", True)
    engine._scheduler.use(replace(device.capacity, batch=16, wave=16, wave_ms=60, quiet_tokens=0))
    yield
    engine._scheduler.use(device.capacity)


@pytest.mark.parametrize(
    ("most", "launches"),
    [
        (250, [28, 222]),  # 1 chunk, then 9
        (255, [28, 227]),
        (29, [28, 1]),
        (20, [20]),
        (500, [28, 15 * 25, 97]),  # the first chunk has 0.92 s
    ],
)
@pytest.mark.usefixtures("alone_in_turn")
def test_a_stream_alone_has_its_first_chunk_and_then_all_others_in_large_launches(
    engine, monkeypatch, most, launches
):
    fixed_length(engine, monkeypatch, most)
    calls = flow_calls(engine, monkeypatch)
    assert engine.synthesize(request(noise_voice(engine._config, 50, seed=4))).num_speech_tokens == most
    assert [call[0][0] for call in calls[-len(launches) :]] == launches
    assert held(engine) == (0, 0, 0)


def lm_calls(engine, monkeypatch):
    """What the speech LM is asked in turn: tokens of a launch, -1 for the wait for one, 0 for a launch of the flow."""
    device, calls = parts(engine)[1], []
    paged, flow = device.lm.paged, device.flow.paged
    launch, collect, render = paged.launch, paged.collect, flow.launch_batch

    def note_launch(commands, steps):
        calls.append(steps)
        return launch(commands, steps)

    def note_collect(under_way):
        calls.append(-1)
        return collect(under_way)

    def note_render(items):
        calls.append(0)
        return render(items)

    # As the resident kernel: any number of tokens in one launch.
    monkeypatch.setattr(paged, "next_steps", lambda rows, left: left if rows == 1 else min(left, 8))
    monkeypatch.setattr(paged, "launch", note_launch)
    monkeypatch.setattr(paged, "collect", note_collect)
    monkeypatch.setattr(flow, "launch_batch", note_render)
    return calls


def fixed_length(engine, monkeypatch, tokens):
    """Every utterance has so many tokens."""
    model = engine._assets.model
    monkeypatch.setattr("vivace.engine.lm_rules.SHORTEST_LIMIT_TOKENS", tokens)
    monkeypatch.setattr(model, "config", replace(model.config, token_text_ratio=(1000.0, 0.0)))


@pytest.mark.usefixtures("alone_in_turn")
def test_tokens_of_a_row_alone_are_queued_while_others_are_under_way(engine, monkeypatch):
    """The device has the next part when it comes to the end of one; none is made beyond what the flow waits for."""
    fixed_length(engine, monkeypatch, 500)
    voice = noise_voice(engine._config, 50, seed=4)
    engine.synthesize(request(voice))  # with the voice's prompt
    calls = lm_calls(engine, monkeypatch)
    engine.synthesize(request(voice))
    prompt_and_first = [27, -1, -1, 0]
    # 375 tokens for the next launch of the flow, 8 at a time, and the rest
    wave = [8, 8, *[-1, 8] * 44, -1, 7, -1, -1, 0]
    end = [8, 8, *[-1, 8] * 10, -1, 1, -1, -1, 0]
    assert calls == prompt_and_first + wave + end


@pytest.mark.usefixtures("alone_in_turn")
def test_the_vocoder_gets_all_frames_of_a_large_launch_at_once(engine, monkeypatch):
    """But of a stream that has company, whose launches depend on the others, chunk by chunk."""
    fixed_length(engine, monkeypatch, 255)
    _, device = parts(engine)
    voices = [noise_voice(engine._config, 50, seed=seed) for seed in (4, 5)]
    launch, frames = device.vocoder.launch_batch, []
    monkeypatch.setattr(
        device.vocoder,
        "launch_batch",
        lambda items: frames.append([mel.shape[1] for _, mel, _ in items]) or launch(items),
    )
    cut = engine.synthesize(request(voices[0])).samples
    assert frames == [[50]] * 10 + [[10]]
    frames.clear()
    monkeypatch.setattr(device, "capacity", engine._scheduler.capacity)
    whole = engine.synthesize(request(voices[0])).samples
    assert frames == [[50], [460]]
    np.testing.assert_allclose(whole, cut, atol=1e-5)
    frames.clear()
    lives = [engine.submit(request(voice)) for voice in voices]
    run_to_the_end(engine)
    assert frames[0] == [50, 50]
    np.testing.assert_allclose(np.concatenate([chunk.samples for chunk in lives[0].chunks]), cut, atol=1e-5)


@pytest.mark.usefixtures("alone_in_turn")
@pytest.mark.parametrize("part", [1, 5, 100])
def test_parts_change_nothing(engine, monkeypatch, part):
    voice = noise_voice(engine._config, 33, seed=3)
    want = engine.synthesize(request(voice)).samples.tobytes()
    monkeypatch.setattr(decoder_module, "TURN_TOKENS", part)
    assert engine.synthesize(request(voice)).samples.tobytes() == want


@pytest.mark.usefixtures("alone_in_turn")
def test_a_launch_of_the_flow_comes_behind_the_tokens_that_are_under_way(engine, monkeypatch):
    """They need the whole device: who comes while a row decodes alone is rendered behind its tokens."""
    fixed_length(engine, monkeypatch, 300)
    decoder, device = parts(engine)
    voices = [noise_voice(engine._config, 50, seed=seed) for seed in (4, 5)]
    wanted = [engine.synthesize(request(voice)).samples.tobytes() for voice in voices]
    held_back, seen, render = [], [], device.flow.paged.launch_batch

    def note(items):
        seen.append((any(session.tokens_under_way for session in decoder._decoding), bool(held_back)))
        held_back.clear()
        return render(items)

    monkeypatch.setattr(device.lm, "hold_back", lambda: held_back.append(1))
    monkeypatch.setattr(device.flow.paged, "launch_batch", note)
    lives = [engine.submit(request(voices[0]))]
    for _ in range(6):
        engine.step()
    lives.append(engine.submit(request(voices[1])))
    run_to_the_end(engine)
    assert [take_all(engine, live) for live in lives] == wanted
    assert all(under_way == is_behind for under_way, is_behind in seen)
    assert held(engine) == (0, 0, 0)


@pytest.mark.usefixtures("alone_in_turn")
def test_a_row_whose_text_is_not_known_to_its_end_is_not_decoded_in_parts(engine, monkeypatch):
    """Nothing can be queued behind its tokens: they may call for text."""
    live = engine.submit(SynthesisRequest((), sampling=SamplingParams(seed=4)), is_pushed=True)
    calls = lm_calls(engine, monkeypatch)
    engine.push_text(live, "Once upon a time, a fox sang in the rain and ran on and on and on")
    run_to_the_end(engine)
    assert not any(first > 0 and second > 0 for first, second in itertools.pairwise(calls))
    engine.push_text(live, " and on.")
    engine.finish_text(live)
    run_to_the_end(engine)
    assert live.error is None
    assert held(engine) == (0, 0, 0)


@pytest.mark.usefixtures("alone_in_turn")
def test_a_request_that_leaves_with_parts_under_way_disturbs_nobody(engine, monkeypatch):
    fixed_length(engine, monkeypatch, 300)
    voice = noise_voice(engine._config, 50, seed=6)
    want = engine.synthesize(request(voice, 1)).samples.tobytes()
    decoder, _ = parts(engine)
    with engine.stream(request(voice, 2)) as stream:
        next(stream)
        for _ in range(3):
            engine.step()
        assert any(session.tokens_under_way == 16 for session in decoder._decoding)
    assert held(engine) == (0, 0, 0)
    assert engine.synthesize(request(voice, 1)).samples.tobytes() == want


def test_tokens_are_under_way_while_a_chunk_is_made(engine, monkeypatch):
    """And only those that the next chunk needs, and a few: the end may come at any of them."""
    decoder, device = parts(engine)
    collect, seen = device.vocoder.collect, []

    def note(pending):
        seen.extend(session.tokens_under_way for session in decoder._decoding)
        return collect(pending)

    monkeypatch.setattr(device.vocoder, "collect", note)
    voice = noise_voice(engine._config, 50, seed=5)
    engine.synthesize(request(voice))
    assert seen[0] == 25 + decoder.lead_tokens
    assert all(count <= 25 + decoder.lead_tokens for count in seen)


@pytest.mark.parametrize("lead", [0, 1, 4, 8, 40])
def test_tokens_ahead_change_nothing(engine, monkeypatch, lead):
    decoder, device = parts(engine)
    voices = [noise_voice(engine._config, count, seed=count) for count in (50, 33)]
    with monkeypatch.context() as patched:
        patched.setattr(device.lm.paged, "in_turn", True)
        want = [engine.synthesize(request(voice)).samples.tobytes() for voice in voices]
    monkeypatch.setattr(decoder, "lead_tokens", lead)
    assert [engine.synthesize(request(voice)).samples.tobytes() for voice in voices] == want


def test_many_rows_are_taken_launch_by_launch(engine, monkeypatch):
    """So that the host has the rows of one launch behind it when the device comes to the end of the next one."""
    _, device = parts(engine)
    paged, made, kept, taken = device.lm.paged, [], [], []
    launch, collect = paged.launch, paged.collect

    def note_launch(commands, steps):
        under_way = launch(commands, steps)
        made.append(id(under_way))
        kept.append(under_way)  # or another one may get its id
        return under_way

    def note_collect(under_way):
        if id(under_way) in made:
            taken.append(made.index(id(under_way)))
        return collect(under_way)

    voice = noise_voice(engine._config, 40, seed=7)
    want = [engine.synthesize(request(voice, seed)).samples.tobytes() for seed in range(5)]
    monkeypatch.setattr(paged, "in_turn", True)
    monkeypatch.setattr(paged, "launch", note_launch)
    monkeypatch.setattr(paged, "collect", note_collect)
    lives = [engine.submit(request(voice, seed)) for seed in range(5)]
    run_to_the_end(engine)
    assert [take_all(engine, live) for live in lives] == want
    assert len(set(taken)) > 10
    assert any(taken.count(number) == 5 for number in taken)
    assert taken == sorted(taken)


def test_a_request_that_leaves_with_tokens_under_way_disturbs_nobody(engine):
    voice = noise_voice(engine._config, 50, seed=6)
    want = engine.synthesize(request(voice, 1)).samples.tobytes()
    with engine.stream(request(voice, 2)) as stream:
        next(stream)
        decoder, _ = parts(engine)
        assert any(session.tokens_under_way for session in decoder._decoding)
    assert held(engine) == (0, 0, 0)
    assert engine.synthesize(request(voice, 1)).samples.tobytes() == want


# -- memory ----------------------------------------------------------------------------------------------------------


def out_of_memory(monkeypatch, owner, name, most):
    """Calls with more than ``most`` rows fail, and what they have taken is free when the next one comes."""
    original, refused, taken = getattr(owner, name), [], []

    def launch(rows, *rest):
        assert not any(memory() is not None for memory in taken), "the failed launch still holds its memory"
        memory = torch.empty(1)
        taken.append(weakref.ref(memory))
        if len(rows) > most:
            refused.append(len(rows))
            raise torch.OutOfMemoryError("no memory")
        return original(rows, *rest)

    monkeypatch.setattr(owner, name, launch)
    return refused


@pytest.mark.parametrize("stage", ["flow", "vocoder", "lm"])
@pytest.mark.parametrize("most", [1, 2])
def test_launches_that_do_not_fit_are_halved(engine, alone, monkeypatch, stage, most):
    _, device = parts(engine)
    voices = [noise_voice(engine._config, 50, seed=seed) for seed in range(5)]
    wanted = [alone(seed) for seed in range(len(voices))]
    limit, halved = engine._scheduler.limit, device.launches_halved
    limit.chunks = limit.most
    owner, name = {
        "flow": (device.flow.paged, "_run"),
        "vocoder": (device.vocoder, "_launch_rows"),
        "lm": (device.lm.paged, "launch"),
    }[stage]
    refused = out_of_memory(monkeypatch, owner, name, most)
    lives = [engine.submit(request(voice, seed)) for seed, voice in enumerate(voices)]
    run_to_the_end(engine)
    assert max(refused) > most
    assert device.launches_halved == halved + len(refused)
    assert limit.chunks < limit.most
    for live, want in zip(lives, wanted, strict=True):
        assert live.error is None
        assert live.num_speech_tokens == want.num_speech_tokens
        if stage != "lm":  # other numbers of rows round differently
            assert take_all(engine, live) == want.samples.tobytes()
    assert held(engine) == (0, 0, 0)


@pytest.mark.parametrize("stage", ["flow", "vocoder", "lm", "prompt"])
def test_only_the_row_that_does_not_fit_alone_fails(engine, alone, monkeypatch, stage):
    _, device = parts(engine)
    voices = [noise_voice(engine._config, 50, seed=seed) for seed in range(4)]
    wanted = [alone(seed).samples.tobytes() for seed in range(len(voices))]
    lives = [engine.submit(request(voice, seed)) for seed, voice in enumerate(voices)]
    victim = lives[2]

    def is_victim(row):
        segment, vocoder = victim.segment, victim.vocoder
        if stage == "flow":
            return segment is not None and row.stream is segment.flow
        if stage == "vocoder":
            return vocoder is not None and row[0] is vocoder._stream
        return segment is not None and row.slot == segment.lm._lease.slot

    owner, name = {
        "flow": (device.flow.paged, "_run"),
        "vocoder": (device.vocoder, "_launch_rows"),
        "lm": (device.lm.paged, "launch"),
        "prompt": (device.lm, "launch"),
    }[stage]
    original = getattr(owner, name)

    def launch(rows, *rest):
        if any(is_victim(row) for row in rows):
            raise torch.OutOfMemoryError("no memory")
        return original(rows, *rest)

    def start(session, count, original=DeviceLMSession.start):
        if session is not None and victim.segment is not None and victim.segment.lm is session:
            raise torch.OutOfMemoryError("no memory")
        return original(session, count)

    if stage == "prompt":
        monkeypatch.setattr(DeviceLMSession, "start", start)
    else:
        monkeypatch.setattr(owner, name, launch)
    run_to_the_end(engine)
    assert isinstance(victim.error, OverloadedError)
    assert "memory" in str(victim.error)
    for live, want in zip(lives, wanted, strict=True):
        if live is not victim:
            assert live.error is None
            if stage in ("flow", "vocoder"):
                assert take_all(engine, live) == want
    assert held(engine) == (0, 0, 0)
    assert engine.synthesize(request(voices[2], 2)).samples.tobytes() == wanted[2]


def test_a_flow_that_did_not_fit_leaves_its_stream_as_it_was(engine, monkeypatch):
    voice = noise_voice(engine._config, 50, seed=9)
    flow = parts(engine)[1].flow
    with torch.inference_mode():
        tokens = voice.speech_tokens.tolist()
        good, bad = (flow.open(voice) for _ in range(2))
        mels = [
            flow.paged.launch(good, tokens[:28], False).check(),
            flow.paged.launch(good, tokens[28:], True).check(),
        ]
        run, calls = flow.paged._run, itertools.count()

        def fails_the_second_time(works):
            if next(calls) == 1:
                raise torch.OutOfMemoryError("no memory")
            run(works)

        with monkeypatch.context() as patched:
            patched.setattr(flow.paged, "_run", fails_the_second_time)
            pages = flow.paged.pages_in_use
            handle = flow.paged.launch_batch([(bad, tokens[:28], False)])[0]
            assert isinstance(handle.error, torch.OutOfMemoryError)
            assert flow.paged.pages_in_use == pages
        assert torch.equal(flow.paged.launch(bad, tokens[:28], False).check(), mels[0])
        assert torch.equal(flow.paged.launch(bad, tokens[28:], True).check(), mels[1])
        flow.close(good)
        flow.close(bad)
    assert held(engine) == (0, 0, 0)
