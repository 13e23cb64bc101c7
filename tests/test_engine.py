"""The engine with a tiny random model: the same audio in any company, every end of a request, every kind of request."""

import gc
import itertools
import json
import threading
import weakref
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from tests.helpers import noise_voice, quiet_engine, speech_like_wav
from vivace import (
    CancelledRequestError,
    Engine,
    InvalidAudioError,
    InvalidRequestError,
    InvalidTextError,
    InvalidVoiceError,
    OverloadedError,
    SamplingParams,
    SynthesisError,
    SynthesisRequest,
    Voice,
    VoiceNotFoundError,
)
from vivace.config import Limits
from vivace.engine import frontend, stages, text_feed
from vivace.engine.flow_runner import FlowRunner
from vivace.engine.lm_runner import LMSession
from vivace.engine.request import check_request, check_speed
from vivace.engine.scheduler import Scheduler
from vivace.errors import ModelFolderError
from vivace.layers.stretch import MelStretch
from vivace.models.speech_lm import SpeechLM
from vivace.text import library

BRIEF = "Hi."
"""Its speech ends before the first chunk border."""

SHORT = "Hello there."
LONG = "Once upon a time, a fox sang in the rain."
SEVERAL = "One fox ran. Two dogs sat. A cat sang a song."
OPTIONS = {"num_steps": 2, "token_text_ratio": (2.0, 2.6)}
PROMPT_TOKENS = 40
FIRST_TOKENS = 50 - PROMPT_TOKENS + 3
FIRST_SAMPLES = ((50 - PROMPT_TOKENS) * 2 - 4) * 480 - 4
"""Two frames a token; the vocoder keeps four frames and four samples back."""


@pytest.fixture(scope="module")
def voices_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("voices")


@pytest.fixture(scope="module")
def engine(random_model_folder, voices_folder):
    with quiet_engine(random_model_folder, voices=voices_folder, **OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module")
def config(engine):
    return engine._config


@pytest.fixture(scope="module")
def voice(config):
    return noise_voice(config, PROMPT_TOKENS)


@pytest.fixture
def ask(voice):
    """Makes requests in the test voice."""

    def make(text=SHORT, seed=0, **options):
        return SynthesisRequest(text, **{"voice": voice, "sampling": SamplingParams(seed=seed)} | options)

    return make


@pytest.fixture(autouse=True)
def _nothing_left(engine):
    yield
    assert engine.num_running == 0
    assert len(engine._scheduler) == 0


def other_engine(folder, **options):
    return quiet_engine(folder, **OPTIONS | options)


def samples_of(stream):
    return np.concatenate([chunk.samples for chunk in stream])


def drained(engine, live):
    """The chunks that the engine can make of the text that has come."""
    chunks = []
    while engine.step():
        while (chunk := engine.take(live)) is not None:
            chunks.append(chunk)
    return chunks


def round_robin(streams):
    """Takes a chunk of each in turn, in one thread; the samples of each."""
    taken = [[] for _ in streams]
    left = set(range(len(streams)))
    while left:
        for index in sorted(left):
            chunk = next(streams[index], None)
            if chunk is None:
                left.discard(index)
            else:
                taken[index].append(chunk.samples)
    return [np.concatenate(parts) for parts in taken]


# -- the same request is the same audio ------------------------------------------------------------------------


def test_same_seed_same_samples_and_another_seed_others(engine, ask):
    first = engine.synthesize(ask(seed=3))
    again = engine.synthesize(ask(seed=3))
    other = engine.synthesize(ask(seed=4))
    np.testing.assert_array_equal(first.samples, again.samples)
    assert not np.array_equal(first.samples, other.samples)
    assert first.finish_reason in ("stop", "length")
    assert np.abs(first.samples).max() > 0


def test_every_way_of_consuming_gives_the_same(engine, ask):
    collected = engine.stream(ask(LONG)).collect().samples
    by_hand = []
    with engine.stream(ask(LONG)) as stream:
        while (chunk := next(stream, None)) is not None:
            by_hand.append(chunk.samples)
    live = engine.submit(ask(LONG))
    while engine.step():
        pass
    at_the_end = []
    while (chunk := engine.take(live)) is not None:
        at_the_end.append(chunk.samples)
    np.testing.assert_array_equal(collected, np.concatenate(by_hand))
    np.testing.assert_array_equal(collected, np.concatenate(at_the_end))


def test_requests_side_by_side_do_not_touch_each_other(engine, ask):
    requests = [ask(LONG, 1), ask(SHORT, 2, speed=1.5), ask(SHORT, 3, stream=False)]
    alone = [engine.synthesize(request).samples for request in requests]
    together = round_robin([engine.stream(request) for request in requests])
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)


def test_requests_in_several_threads(engine, ask):
    requests = [ask(LONG, 1), ask(SHORT, 2), ask(SHORT, 3)]
    alone = [engine.synthesize(request).samples for request in requests]
    together = [None] * len(requests)

    def speak(index):
        together[index] = engine.synthesize(requests[index]).samples

    threads = [threading.Thread(target=speak, args=(index,)) for index in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)


def test_who_comes_while_tokens_are_waited_for_is_in_the_next_plan(engine, ask, monkeypatch):
    """Not in the one behind it: a request must not wait for a whole step."""
    lives, planned = [], []
    collect, plan = engine._stages.collect, engine._scheduler.plan

    def slow():
        monkeypatch.setattr(engine._stages, "collect", collect)
        caller = threading.Thread(target=lambda: lives.append(engine.submit(ask())))
        caller.start()
        callers.append(caller)
        while not engine._loop.turn._messages:
            caller.join(0.001)
        return collect()

    def note(now_ms):
        planned.append(len(engine._scheduler))
        return plan(now_ms)

    callers = []
    monkeypatch.setattr(engine._stages, "collect", slow)
    monkeypatch.setattr(engine._scheduler, "plan", note)
    assert engine.step()
    callers[0].join(60)
    assert planned == [1]
    engine.cancel(lives[0])


def test_threads_that_come_and_go(engine, ask):
    """Some listen to the end, some leave at any moment; who stays hears what he would hear alone."""
    texts = ["Go.", "Hi you.", LONG]
    alone = [engine.synthesize(ask(text)).samples for text in texts]
    wrong = []

    def visit(seed):
        rng = np.random.default_rng(seed)
        for _ in range(5):
            which, patience = int(rng.integers(3)), int(rng.integers(4))
            stream = engine.stream(ask(texts[which]))
            parts = []
            for chunk in stream:
                parts.append(chunk.samples)
                if len(parts) > patience:
                    break
            if stream.summary().finish_reason in ("stop", "length") and chunk.is_last:
                if not np.array_equal(np.concatenate(parts), alone[which]):
                    wrong.append((seed, which))
            elif rng.random() < 0.5:
                stream.close()

    threads = [threading.Thread(target=visit, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


# -- chunks -------------------------------------------------------------------------------------------------------


def test_chunks_carry_their_place_and_times(engine, ask):
    stream = engine.stream(ask(LONG))
    chunks = list(stream)
    result = stream.summary()
    assert len(chunks) >= 3
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert [chunk.is_last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    starts = np.cumsum([0, *(len(chunk.samples) for chunk in chunks)]) / 24_000
    np.testing.assert_allclose([chunk.start_s for chunk in chunks], starts[:-1])
    for before, after in itertools.pairwise(chunks):
        assert after.elapsed_ms > before.elapsed_ms
        for name in ("text_ms", "prompt_ms", "lm_ms", "flow_ms", "vocoder_ms", "waiting_ms"):
            assert getattr(after.times, name) >= getattr(before.times, name)
    times = result.times
    assert min(times.lm_ms, times.flow_ms, times.vocoder_ms) > 0
    # No stage is counted twice: together they fit into the wall time (of which the consumer's is waiting).
    busy = times.text_ms + times.prompt_ms + times.lm_ms + times.flow_ms + times.vocoder_ms + times.waiting_ms
    assert busy <= result.wall_ms * 1.001
    assert result.ttfb_ms == chunks[0].elapsed_ms
    assert result.audio_seconds == pytest.approx(starts[-1])


def test_first_audio_comes_at_the_first_absolute_border_every_time(engine, ask):
    for seed in range(3):
        with engine.stream(ask(LONG, seed)) as stream:
            chunk = next(stream)
            # Not one token more was decoded than the border and its look-ahead need.
            assert stream.summary().num_speech_tokens == FIRST_TOKENS
        assert len(chunk.samples) == FIRST_SAMPLES


def test_long_text_every_segment_once_in_order(random_model_folder, ask):
    with other_engine(random_model_folder, limits=Limits(segment_text_tokens=14)) as engine:
        stream = engine.stream(ask(SEVERAL))
        chunks = list(stream)
        result = stream.summary()
    assert result.spoken_text == ["One fox ran.", "Two dogs sat.", "A cat sang a song."]
    assert result.num_segments == 3
    segments = [chunk.segment for chunk in chunks]
    assert segments == sorted(segments)
    assert set(segments) == {0, 1, 2}
    assert result.num_speech_tokens >= 2 * result.num_text_tokens
    # Every speech token is heard: 960 samples each, across the joints too.
    assert len(np.concatenate([chunk.samples for chunk in chunks])) == 960 * result.num_speech_tokens


def test_speed(engine, ask, voice):
    plain = engine.synthesize(ask()).audio_seconds
    assert engine.synthesize(ask(speed=2.0)).audio_seconds == pytest.approx(plain / 2, abs=0.02)
    assert engine.synthesize(ask(speed=0.5)).audio_seconds == pytest.approx(plain * 2, abs=0.02)


def test_speed_while_streaming_equals_the_whole_mel_stretched(engine, voice):
    tokens = np.random.default_rng(0).integers(0, 729, 45).tolist()
    model = engine._assets.model
    prompt = voice.speech_tokens.tolist()
    for speed in (0.5, 1.7):
        streamed = samples_of(engine.render_tokens(tokens, voice, speed=speed))
        with torch.inference_mode():
            mel = model.flow.generate(
                torch.tensor(prompt + tokens),
                torch.tensor(voice.mel),
                torch.tensor(voice.embedding),
                streaming=True,
            )
            whole = model.vocoder(MelStretch(speed).step(mel, is_last=True)[None])[0].numpy()
        # Float32 rounding, through the vocoder's running phase (see test_hift_stream).
        np.testing.assert_allclose(streamed, whole, atol=1e-3)


def test_offline_mode_is_one_chunk_a_segment(engine, ask):
    chunks = list(engine.stream(ask(LONG, stream=False)))
    assert len(chunks) == 1
    assert chunks[0].is_last
    assert len(chunks[0].samples) == engine.synthesize(ask(LONG)).samples.size


# -- ends of a request ------------------------------------------------------------------------------------------------


def state_of(live):
    """Weak references to what a running request holds."""
    return [
        weakref.ref(live.vocoder),
        weakref.ref(live.segment.lm),
        weakref.ref(live.segment.flow.dit.caches[0]),
    ]


@pytest.mark.parametrize("end", ["cancel", "close", "with", "drop"])
@pytest.mark.parametrize("chunks", [0, 1])
def test_leaving_early_frees_everything_at_once(engine, ask, end, chunks):
    stream = engine.stream(ask(LONG))
    for _ in range(chunks):
        next(stream)
    live = stream._live
    state = state_of(live) if chunks else [weakref.ref(live.vocoder)]
    assert engine.num_running == len(engine._scheduler) == 1
    gc.disable()  # freed by leaving, not by the collector
    try:
        if end == "cancel":
            engine.cancel(live)
        elif end == "close":
            stream.close()
        elif end == "with":
            with stream:
                pass
        else:
            del stream
        assert engine.num_running == len(engine._scheduler) == 0
        assert [reference() for reference in state] == [None] * len(state)
    finally:
        gc.enable()
    assert live.finish_reason == "cancelled"
    with pytest.raises(CancelledRequestError):
        engine.take(live)


def test_a_finished_request_stays_finished(engine, ask):
    stream = engine.stream(ask())
    result = stream.collect()
    stream.close()
    assert next(stream, None) is None
    assert stream.summary().finish_reason == result.finish_reason != "cancelled"


def test_cancelling_in_the_middle_of_a_step(engine, ask, monkeypatch):
    """As the garbage collector may: the step ends well, then both requests are gone."""
    own, other = engine.stream(ask()), engine.stream(ask(LONG))
    original = stages.Stages.render

    def render(self, live):
        engine.cancel(own._live)
        engine.cancel(other._live)
        return original(self, live)

    monkeypatch.setattr(stages.Stages, "render", render)
    with pytest.raises(CancelledRequestError):
        list(own)
    with pytest.raises(CancelledRequestError):
        next(other)
    assert engine.num_running == 0


def plant_nan(live, stage):
    """Spoils one stage's state of a running request."""
    with torch.inference_mode():
        if stage == "lm":
            cache = live.segment.lm._cache
            for tensor in (
                vars(cache).values()
                if hasattr(cache, "__dict__")
                else map(cache.__getattribute__, cache.__slots__)
            ):
                if isinstance(tensor, torch.Tensor):
                    tensor.fill_(float("nan"))
        elif stage == "flow":
            live.segment.flow.dit.contexts[0].fill_(float("nan"))
        else:
            live.vocoder._stream.last.fill_(float("nan"))


@pytest.mark.parametrize("stage", ["lm", "flow", "vocoder"])
def test_nan_fails_that_request_only_and_never_looks_complete(engine, ask, stage):
    alone = engine.synthesize(ask(SHORT, 5)).samples
    broken, healthy = engine.stream(ask(LONG, 1)), engine.stream(ask(SHORT, 5))
    chunks = [next(broken)]
    state = state_of(broken._live)
    plant_nan(broken._live, stage)
    with pytest.raises(SynthesisError, match="not finite") as caught:
        chunks.extend(broken)
    # Not even the error that the caller keeps holds on to tensors.
    assert [reference() for reference in state] == [None] * len(state), caught.value
    assert not any(chunk.is_last for chunk in chunks)
    with pytest.raises(SynthesisError):
        next(broken)  # again: it does not end like a stream that succeeded
    assert broken.summary().finish_reason == "error"
    assert broken._live.request_id not in engine._loop.live
    np.testing.assert_array_equal(samples_of(healthy), alone)


def test_an_internal_error_stays_with_its_request(engine, ask, monkeypatch, caplog):
    broken, healthy = engine.stream(ask(LONG, 1)), engine.stream(ask(SHORT, 5))
    original = stages.Stages.render

    def render(self, live):
        if live is broken._live:
            raise ZeroDivisionError("secret words of the text")
        return original(self, live)

    monkeypatch.setattr(stages.Stages, "render", render)
    assert len(samples_of(healthy))  # steps both
    with pytest.raises(SynthesisError, match=r"ZeroDivisionError") as caught:
        next(broken)
    assert "secret" not in str(caught.value)
    assert "internal error" in caplog.text


def test_ctrl_c_in_the_middle_of_a_step_ends_that_request(engine, ask, monkeypatch):
    stream = engine.stream(ask())

    def interrupted(self, live):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(stages.Stages, "render", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(stream)
    with pytest.raises(CancelledRequestError, match="interrupted"):
        next(stream)
    assert engine.synthesize(ask()).audio_seconds > 0


def test_a_model_that_makes_no_speech_is_an_error(engine, ask, monkeypatch):
    attempts = []

    def silent(self, count):
        attempts.append(self._offset)
        self._rules.finish_reason = "stop"
        return []

    monkeypatch.setattr(LMSession, "decode", silent)
    with pytest.raises(SynthesisError, match="no speech"):
        engine.synthesize(ask())
    assert len(set(attempts)) == 4  # other draws each time


@pytest.fixture
def hasty(monkeypatch):
    """A model that ends as soon as it may."""
    original = SpeechLM.logits

    def logits(self, hidden):
        result = original(self, hidden)
        result[..., self.config.speech_token_size :] += 1e3
        return result

    monkeypatch.setattr(SpeechLM, "logits", logits)


@pytest.fixture
def hush(hasty, monkeypatch):
    """Makes the flow's first whole segments silent; the list gets the tokens of each segment, silent or not."""

    def silence(count):
        seen = []
        step, generate = FlowRunner.step, FlowRunner.generate

        def muted(tokens, mel):
            seen.append(list(tokens))
            return torch.full_like(mel, -8.0) if len(seen) <= count else mel

        def quiet_step(self, stream, tokens, *, is_last):
            return muted(tokens, step(self, stream, tokens, is_last=is_last))

        def quiet_generate(self, voice, tokens):
            return muted(tokens, generate(self, voice, tokens))

        monkeypatch.setattr(FlowRunner, "step", quiet_step)
        monkeypatch.setattr(FlowRunner, "generate", quiet_generate)
        return seen

    return silence


@pytest.mark.parametrize("mode", ["stream", "offline", "streamed text"])
def test_near_silence_is_decoded_again(engine, ask, hush, mode):
    def spoken():
        return engine.synthesize(
            ask(iter([BRIEF]) if mode == "streamed text" else BRIEF, stream=mode != "offline")
        )

    plain = spoken()
    results = []
    for _ in range(2):
        seen = hush(2)
        results.append(spoken())
        assert len(seen) == 3
        assert len({tuple(tokens) for tokens in seen}) == 3  # other draws each time
        assert [len(tokens) for tokens in seen] == [2 * plain.num_text_tokens, 8, 16]
    np.testing.assert_array_equal(results[0].samples, results[1].samples)
    result = results[0]
    assert result.num_speech_tokens == len(seen[2])
    assert len(result.samples) == 960 * result.num_speech_tokens
    assert result.spoken_text == plain.spoken_text
    assert (result.num_segments, result.num_text_tokens) == (1, plain.num_text_tokens)
    assert result.finish_reason == plain.finish_reason


def test_near_silence_every_time_is_an_error(engine, ask, hush):
    seen = hush(100)
    stream = engine.stream(ask(BRIEF))
    with pytest.raises(SynthesisError, match="near silence") as raised:
        stream.collect()
    assert raised.value.code == "no_speech"
    assert len(seen) == 4
    assert stream.summary().num_speech_tokens == 0


def test_near_silence_is_told_from_finished_audio(engine, voice):
    rate_hz = engine.sample_rate_hz
    tone = np.sin(2 * np.pi * 440 * np.arange(rate_hz) / rate_hz).astype(np.float32)
    assert engine.is_near_silent(np.zeros(0, np.float32), voice)
    assert engine.is_near_silent(1e-4 * tone, voice)
    assert not engine.is_near_silent(1e-2 * tone, voice)
    silence = np.zeros(rate_hz, np.float32)
    assert not engine.is_near_silent(np.concatenate([silence, 0.1 * tone[: rate_hz // 10], silence]), voice)
    click = np.concatenate([0.1 * tone[:100], silence, 0.1 * tone[:100]])  # as vocoders begin and end
    assert engine.is_near_silent(click, voice)


def test_near_silence_of_given_tokens_is_rendered(engine, voice, hush):
    """Voice conversion says what its source says; there is nothing to draw again."""
    seen = hush(100)
    result = engine.render_tokens([5] * 9, voice).collect()
    assert len(result.samples) == 9 * 960
    assert len(seen) == 1


def test_near_silence_in_a_later_segment_leaves_the_first_alone(random_model_folder, ask, monkeypatch):
    with other_engine(random_model_folder, limits=Limits(segment_text_tokens=6)) as engine:
        plain = list(engine.stream(ask(SEVERAL)))
        judged = []

        def silent_once(mel, voice):
            judged.append(mel.shape[1])
            return len(judged) == 2

        monkeypatch.setattr(stages, "is_near_silent", silent_once)
        stream = engine.stream(ask(SEVERAL))
        again = list(stream)
    assert len(judged) > 2
    assert plain[-1].segment == again[-1].segment
    np.testing.assert_array_equal(plain[0].samples, again[0].samples)
    first, second = (np.concatenate([chunk.samples for chunk in chunks]) for chunks in (plain, again))
    assert first.shape != second.shape or not np.array_equal(first, second)
    assert len(second) == 960 * stream.summary().num_speech_tokens


@pytest.mark.parametrize("is_streamed", [False, True])
def test_one_token_over_and_over_ends_the_segment(engine, ask, monkeypatch, is_streamed):
    monkeypatch.setattr(LMSession, "_sample", lambda self, action: 7)
    text = "a " * 40
    result = engine.synthesize(ask(iter([text]) if is_streamed else text))
    assert (result.finish_reason, result.num_speech_tokens) == ("length", 50)  # two seconds


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.usefixtures("hasty")
def test_no_text_ends_before_its_shortest_length(engine, ask, is_streamed):
    """Also if the model would rather end at once: a short text is never a file without audio."""
    result = engine.synthesize(ask(iter([SHORT]) if is_streamed else SHORT))
    assert result.num_speech_tokens == 2 * result.num_text_tokens
    assert result.finish_reason == "stop"


def test_closed_engine(random_model_folder, ask):
    engine = other_engine(random_model_folder)
    stream = engine.stream(ask(LONG))
    next(stream)
    engine.close()
    assert engine.num_running == 0
    with pytest.raises(CancelledRequestError, match="closed"):
        next(stream)
    for call in (
        lambda: engine.stream(ask()),
        lambda: engine.transform(speech_like_wav()),
        lambda: engine.make_voice(speech_like_wav()),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            call()
        assert caught.value.code == "engine_closed"
    engine.close()


@pytest.mark.parametrize("number", [0, 257])
def test_streams_side_by_side_are_bounded(random_model_folder, number):
    with pytest.raises(InvalidRequestError, match="max_streams"):
        other_engine(random_model_folder, max_streams=number)


def test_overload_is_refused_and_passes(random_model_folder, ask):
    with other_engine(random_model_folder, scheduler=Scheduler(max_requests=2)) as engine:
        first, second = engine.stream(ask()), engine.stream(ask())
        with pytest.raises(OverloadedError) as caught:
            engine.stream(ask())
        assert caught.value.retry_after_s > 0
        first.close()
        assert engine.synthesize(ask()).audio_seconds > 0
        second.close()


def test_a_reader_that_lags_pauses_alone(random_model_folder, ask):
    with other_engine(random_model_folder, scheduler=Scheduler(max_pending_chunks=1)) as engine:
        alone = engine.synthesize(ask(LONG, 1)).samples
        lagging = engine.stream(ask(LONG, 1))
        parts = [next(lagging).samples]
        assert engine.synthesize(ask(LONG, 2)).finish_reason != "error"
        assert len(lagging._live.chunks) <= 1
        assert not lagging._live.is_done
        parts.extend(chunk.samples for chunk in lagging)
        np.testing.assert_array_equal(np.concatenate(parts), alone)


def test_memory_is_flat(engine, ask):
    def live_tensors():
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    texts = ["Go.", "Hi you.", "No, no."]
    counts = []
    for index in range(30):
        if index % 5 == 4:
            with engine.stream(ask(texts[index % 3], index)) as stream:
                next(stream)
        else:
            engine.synthesize(ask(texts[index % 3], index))
        if index in (3, 29):
            counts.append(live_tensors())
    assert counts[1] <= counts[0]


# -- text, prompts, instructions -----------------------------------------------------------------------------------


@pytest.fixture
def encode(engine):
    return engine._assets.frontend.tokens


@pytest.fixture
def end_of_prompt(engine):
    return engine._assets.frontend._tokenizer.end_of_prompt_id


def test_zero_shot_sequence(engine, ask, voice, sequences, encode, end_of_prompt):
    engine.synthesize(ask())
    ((prefix, text, speech),) = sequences
    assert prefix == [*encode("You are a helpful assistant."), end_of_prompt, *encode("A noisy prompt.")]
    assert text == encode(SHORT)
    assert speech == voice.speech_tokens.tolist()


@pytest.mark.parametrize(
    "instruction",
    ["Speak softly, please.", "You are a helpful assistant. Speak softly, please.<|endofprompt|>"],
)
def test_instruction_is_in_front_of_every_segment_and_never_spoken(
    random_model_folder, ask, sequences, encode, end_of_prompt, instruction
):
    with other_engine(random_model_folder, limits=Limits(segment_text_tokens=14)) as engine:
        result = engine.synthesize(ask(SEVERAL, instruction=instruction))
    assert len(sequences) == 3
    for (prefix, text, speech), words in zip(sequences, result.spoken_text, strict=True):
        assert prefix == [*encode("You are a helpful assistant. Speak softly, please."), end_of_prompt]
        assert text == encode(words)
        assert speech == []
    assert "".join(result.spoken_text).replace(" ", "") == SEVERAL.replace(" ", "")


def test_cross_lingual_shows_the_model_no_prompt(engine, ask, sequences, encode, end_of_prompt):
    engine.synthesize(ask(cross_lingual=True))
    ((prefix, text, speech),) = sequences
    assert (prefix, text, speech) == (
        [*encode("You are a helpful assistant."), end_of_prompt],
        encode(SHORT),
        [],
    )


def test_a_voice_without_prompt_text_works_as_cross_lingual(engine, config, ask, sequences):
    engine.synthesize(ask(voice=noise_voice(config, PROMPT_TOKENS, text="")))
    engine.synthesize(ask(cross_lingual=True))
    assert sequences[0] == sequences[1]


def test_a_voice_known_by_its_embedding_alone_speaks(engine, config, ask):
    voice = noise_voice(config, 0)
    assert engine.synthesize(ask(voice=voice)).audio_seconds > 0.3
    assert engine.synthesize(ask(voice=voice, stream=False)).audio_seconds > 0.3


def test_tags_reach_the_model_as_one_token(engine, ask, sequences):
    tokenizer = engine._assets.frontend._tokenizer
    engine.synthesize(ask("Ha [laughter] ha."))
    engine.synthesize(ask("No period at the end"))
    assert tokenizer.special_id("[laughter]") in sequences[0][1]
    assert tokenizer.decode(sequences[1][1]) == "No period at the end."


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "empty_input"),
        (" \n", "empty_input"),
        ("!!!", "unpronounceable_input"),
        ("a" * 100_001, "input_too_long"),
        ("say <|endofprompt|> it", "special_token_not_allowed"),
        (b"bytes", "invalid_type"),
        (7, "invalid_type"),
    ],
)
def test_wrong_text_is_refused_before_any_work(engine, ask, text, code):
    with pytest.raises(InvalidTextError) as caught:
        engine.stream(ask(text))
    assert caught.value.code == code


def test_asynchronous_text_is_told_where_it_belongs(engine, ask):
    async def pieces():
        yield "Hello."

    with pytest.raises(InvalidTextError, match=r"AsyncEngine\.stream\(request, text=pieces\)") as caught:
        engine.stream(ask(pieces()))
    assert (caught.value.code, caught.value.param) == ("invalid_type", "text")


@pytest.mark.parametrize(
    "options",
    [
        {"speed": 0.1},
        {"speed": float("nan")},
        {"speed": "2"},
        {"sampling": SamplingParams(seed=-1)},
        {"sampling": SamplingParams(seed=2**63)},
        {"sampling": SamplingParams(top_k=0)},
        {"sampling": SamplingParams(temperature=-1.0)},
        {"instruction": "x" * 1001},
        {"voice": 7},
        {"language": 7},
        {"instruction": b"softly"},
        {"sampling": {"seed": 1}},
        {"sampling": SamplingParams(seed=True)},
        {"sampling": SamplingParams(seed=np.True_)},
        {"sampling": SamplingParams(seed=torch.tensor(True))},
        {"sampling": SamplingParams(seed=np.float32(1.0))},
        {"sampling": SamplingParams(seed=np.uint64(2**63))},
        {"sampling": SamplingParams(seed=np.array([1, 2]))},
        {"sampling": SamplingParams(top_k=np.float64(5.0))},
        {"sampling": SamplingParams(temperature=np.float32("nan"))},
        {"sampling": SamplingParams(top_p="0.8")},
        {"sampling": SamplingParams(temperature=10**400)},
        {"speed": np.float32("nan")},
        {"speed": np.float64("inf")},
        {"speed": np.True_},
        {"speed": 1j},
    ],
)
def test_wrong_settings_are_refused(engine, ask, options):
    with pytest.raises(InvalidRequestError):
        engine.stream(ask(**options))


def test_numbers_of_numpy_are_taken_as_pythons_own():
    """They come out of arrays and data frames; what leaves a process as JSON must be plain."""
    given = SamplingParams(
        np.int64(3), np.float32(0.5), np.uint8(7), np.int32(9), np.float64(0.25), np.int16(1)
    )
    plain = SamplingParams(3, 0.5, 7, 9, 0.25, 1)
    request = SynthesisRequest("Hello.", speed=np.float32(1.5), sampling=given)
    check_request(request, Limits())
    assert given == plain
    assert json.dumps([request.speed, asdict(given)]) == json.dumps([1.5, asdict(plain)])
    assert type(SamplingParams(temperature=np.float64(0.5)).temperature) is float
    assert type(check_speed(np.float32(0.5), Limits())) is float


def test_numbers_of_python_stay_as_they_are():
    """An int is no float: a batch tells by them whether a job is the same."""
    sampling = SamplingParams(seed=1, temperature=1, top_p=1)
    assert json.dumps([sampling.temperature, sampling.top_p]) == "[1, 1]"
    assert json.dumps(SynthesisRequest("Hello.", speed=2).speed) == "2"


# -- text streamed in -------------------------------------------------------------------------------------------

STREAMED = "Dr. Fox has 125 [laughter] hens, 3.5 ducks. <strong>All</strong>? Yes."


def cuttings(text):
    yield [text]
    yield list(text)
    inside = sorted(
        text.index(part) + shift for part, shift in (("125", 1), ("[la", 4), ("3.5", 2), ("</", 3))
    )
    yield [text[a:b] for a, b in itertools.pairwise([0, *inside, len(text)])]
    yield ["", text[:1], "", text[1:], ""]


def test_streamed_text_does_not_depend_on_the_cutting(engine, ask):
    results = [engine.synthesize(ask(iter(pieces), 7)) for pieces in cuttings(STREAMED)]
    for result in results[1:]:
        assert result.samples.tobytes() == results[0].samples.tobytes()
        assert result.spoken_text == results[0].spoken_text
    said = " ".join(results[0].spoken_text)
    assert "[laughter]" in said
    assert "<strong>All</strong>" in said
    assert "125" not in said
    assert said.endswith("Yes.")
    assert results[0].num_segments == 2


def test_streamed_text_begins_to_sound_before_it_ends(engine, ask):
    pulled = []

    def pieces():
        for number, piece in enumerate(STREAMED.split(" ")):
            pulled.append(number)
            yield piece + " "

    with engine.stream(ask(pieces())) as stream:
        next(stream)
        assert len(pulled) < len(STREAMED.split(" "))


def test_streamed_text_longer_than_a_segment(random_model_folder, ask):
    with other_engine(random_model_folder, limits=Limits(segment_text_tokens=20)) as engine:
        results = [engine.synthesize(ask(iter(pieces))) for pieces in ([SEVERAL], list(SEVERAL))]
    assert results[0].num_segments > 1
    assert " ".join(results[0].spoken_text) == SEVERAL
    assert results[1].spoken_text == results[0].spoken_text
    np.testing.assert_array_equal(results[0].samples, results[1].samples)


def test_short_streamed_text_is_spoken(engine, ask):
    result = engine.synthesize(ask(iter(["H", "i"])))
    assert result.spoken_text == ["Hi."]
    assert result.num_speech_tokens >= 2 * result.num_text_tokens > 0


@pytest.mark.parametrize(
    ("pieces", "code"),
    [
        ([], "empty_input"),
        ([" ", ""], "empty_input"),
        (["?!"], "unpronounceable_input"),
        ([b"x"], "invalid_type"),
    ],
)
def test_streamed_text_without_words_is_an_error(engine, ask, pieces, code):
    stream = engine.stream(ask(iter(pieces)))
    with pytest.raises(InvalidTextError) as caught:
        next(stream)
    assert caught.value.code == code
    assert engine.num_running == 0


@pytest.mark.parametrize("good_pieces", [0, 1])
def test_an_error_of_the_callers_iterator_reaches_the_caller(engine, ask, good_pieces):
    def pieces():
        yield from ["Once upon a time, there was a fox. "][:good_pieces]
        raise KeyError("the caller's own")

    stream = engine.stream(ask(pieces()))
    with pytest.raises(KeyError, match="the caller's own"):
        list(stream)
    assert engine.num_running == 0
    with pytest.raises(KeyError):
        next(stream)


def test_interrupting_the_callers_iterator_frees_the_request(engine, ask):
    def pieces():
        yield "Once. "
        raise KeyboardInterrupt

    stream = engine.stream(ask(pieces()))
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    assert engine.num_running == 0


def test_six_streamed_runs_with_instruction_are_equal_and_hold_no_prompt(
    engine, ask, encode, end_of_prompt, monkeypatch
):
    seen = []
    original = text_feed.Interleaver

    def recorded(config, **prompt):
        seen.append(prompt)
        return original(config, **prompt)

    monkeypatch.setattr(text_feed, "Interleaver", recorded)
    pieces = ["A gift from ", "a friend, from", " far away. "]
    runs = [engine.synthesize(ask(iter(pieces), instruction="Speak sadly.")).samples for _ in range(6)]
    for run in runs[1:]:
        np.testing.assert_array_equal(run, runs[0])
    for prompt in seen:
        assert prompt["instruction"] == [*encode("You are a helpful assistant. Speak sadly."), end_of_prompt]
        assert prompt["prompt_text"] == prompt["prompt_speech"] == []


def test_pushed_text(engine, ask):
    expected = engine.synthesize(ask(iter(["Hello ", "there."]))).samples
    live = engine.submit(ask(()), is_pushed=True)
    assert not engine.step()  # waits for text
    for piece in ("Hel", "lo there", "."):
        engine.push_text(live, piece)
    engine.finish_text(live)
    while engine.step():
        pass
    np.testing.assert_array_equal(np.concatenate([chunk.samples for chunk in live.chunks]), expected)


@pytest.mark.parametrize("end", [" ", "\n", "\r\n", " \n\n"])
def test_a_sentence_is_spoken_while_its_writer_pauses_behind_it(engine, ask, end):
    """Of the whole text it is the first segment: all of it is there, and what comes later changes none of it."""
    texts = "One moment please, Dr. Fox, I am coming.", "And here I am, as I have said."
    whole = engine.synthesize(ask(iter([f"{texts[0]}{end}{texts[1]}"])))
    live = engine.submit(ask(()), is_pushed=True)
    engine.push_text(live, texts[0] + end)
    first = drained(engine, live)
    engine.push_text(live, texts[1])
    engine.finish_text(live)
    rest = drained(engine, live)
    assert {chunk.segment for chunk in first} == {0}
    num_late = sum(len(chunk.samples) for chunk in rest if chunk.segment == 0)
    assert num_late < 0.2 * sum(len(chunk.samples) for chunk in first)
    np.testing.assert_array_equal(np.concatenate([chunk.samples for chunk in first + rest]), whole.samples)


# -- voices -----------------------------------------------------------------------------------------------------------


def test_clone_store_and_speak(engine, ask, voices_folder):
    voice = engine.make_voice(speech_like_wav(), "Something said.", name="clone-1", consent=True)
    assert len(voice.speech_tokens) == 50
    from_value = engine.synthesize(ask(voice=voice)).samples
    engine.voices.add(voice)
    from_name = engine.synthesize(ask(voice="clone-1")).samples
    np.testing.assert_array_equal(from_value, from_name)
    assert not np.array_equal(from_name, engine.synthesize(ask()).samples)
    engine.voices.remove("clone-1")


def test_voice_conversion(engine, voice):
    result = engine.transform(speech_like_wav(), voice).collect()
    assert result.audio_seconds == pytest.approx(2.0)
    assert result.finish_reason == "stop"
    assert result.times.prompt_ms > 0
    assert engine.voices.takes_recordings
    fast = engine.transform(speech_like_wav(), voice, speed=2.0, stream=False)
    assert [chunk.segment for chunk in fast] == [0]
    assert fast.summary().audio_seconds == pytest.approx(1.0, abs=0.02)
    assert {chunk.segment for chunk in engine.render_tokens([1, 2, 3] * 12, voice)} == {0}


def test_the_default_voice_is_the_models_own(engine, ask):
    by_default = engine.synthesize(ask(voice=None)).samples
    np.testing.assert_array_equal(by_default, engine.synthesize(ask(voice="noise")).samples)
    assert engine.voices.get("noise").prompt_text == "A voice made of noise."


def test_a_voice_that_is_not_there_or_not_of_this_model(engine, ask, config, voice):
    with pytest.raises(VoiceNotFoundError):
        engine.stream(ask(voice="nobody"))
    stranger = replace(voice, meta={"speech_token_size": 243})
    for call in (lambda: engine.stream(ask(voice=stranger)), lambda: engine.render_tokens([1], stranger)):
        with pytest.raises(InvalidVoiceError, match="243"):
            call()
    beyond = Voice(
        "beyond", "", np.full(2, 729, np.int32), np.zeros((4, 80), np.float32), np.ones(192, np.float32)
    )
    with pytest.raises(InvalidVoiceError):
        engine.stream(ask(voice=beyond))


@pytest.mark.parametrize(
    ("source", "code"), [(b"", "invalid_audio"), (7, "invalid_type"), ("SHORT", "audio_too_short")]
)
def test_a_wrong_recording_is_named_as_its_caller_names_it(engine, voice, source, code):
    if source == "SHORT":
        source = speech_like_wav(seconds=0.5)
    calls = {"source": engine.transform, "prompt_audio": engine.make_voice}
    for param, call in calls.items():
        with pytest.raises(InvalidAudioError) as caught:
            call(source)
        assert (caught.value.code, caught.value.param) == (code, param)
        assert "Prompt audio" not in caught.value.message


@pytest.mark.parametrize("cut", [str, list])
def test_text_tokens_count_from_the_first_chunk(engine, ask, cut):
    text = "Hello there, how are you on this fine day?"
    with engine.stream(ask(cut(text))) as stream:
        next(stream)
        so_far = stream.summary().num_text_tokens
        whole = stream.collect().num_text_tokens
    assert 0 < so_far <= whole
    assert whole == engine.synthesize(ask(cut(text))).num_text_tokens


@pytest.mark.parametrize("tokens", [[], [-1], [729]])
def test_wrong_tokens_are_refused(engine, voice, tokens):
    with pytest.raises(InvalidRequestError):
        engine.render_tokens(tokens, voice)


def test_a_folder_without_tokenizer_or_encoders_says_what_is_missing(tiny_model_folder, ask, tmp_path):
    with quiet_engine(tiny_model_folder, voices=tmp_path) as engine:
        with pytest.raises(ModelFolderError, match="vocab"):
            engine.stream(ask())
        with pytest.raises(ModelFolderError, match="speech_tokenizer"):
            engine.transform(speech_like_wav(), noise_voice(engine._config))
        assert not engine.voices.takes_recordings
        with pytest.raises(VoiceNotFoundError):
            engine.transform(speech_like_wav())


def test_prompts_are_kept_within_their_memory(engine, config):
    from vivace.engine.flow_runner import FlowRunner

    runner = FlowRunner(engine._assets.model.flow, kept_bytes=1)
    first, second = noise_voice(config, 30, seed=1), noise_voice(config, 30, seed=2)
    with torch.inference_mode():
        runner.open(first)
        kept = runner._prompts[first]
        runner.open(first)
        assert runner._prompts[first] is kept
        runner.open(second)
    assert list(runner._prompts) == [second]


def test_a_voice_can_be_warmed_before_its_first_request(random_model_folder):
    """Its prompt runs through the flow once, and not again in the request."""
    with other_engine(random_model_folder) as engine:
        voice, prompts = noise_voice(engine._config), engine._stages._flow._prompts
        assert voice not in prompts
        engine.warm_up(voice)
        kept = prompts[voice]
        next(engine.stream(SynthesisRequest("Hello there.", voice=voice)))
        assert prompts[voice] is kept


def test_an_engine_that_warms_up_has_the_library_that_reads_numbers(random_model_folder, tmp_path):
    """It takes longer to load than all the work in front of a first chunk."""
    library.load.cache_clear()
    for warm_up in (False, True):
        Engine.open(random_model_folder, voices_folder=tmp_path, warm_up=warm_up).close()
        assert library.load.cache_info().currsize == warm_up


@pytest.mark.parametrize("name", ["cross_lingual", "stream"])
def test_switches_are_true_or_false_and_nothing_that_looks_like_it(name):
    with pytest.raises(InvalidRequestError) as caught:
        check_request(SynthesisRequest("Hello.", **{name: "no"}), Limits())
    assert (caught.value.code, caught.value.param) == ("invalid_type", name)


def test_the_tokens_of_a_transcript_and_an_instruction_are_made_once(engine, monkeypatch):
    """And again for another one of either; what is wrong with one is said each time."""
    made, build = [], frontend.build_prompt
    monkeypatch.setattr(frontend, "build_prompt", lambda *a, **k: made.append(k) or build(*a, **k))
    own = engine._assets.frontend
    voice = replace(noise_voice(engine._config, PROMPT_TOKENS), prompt_text="A cat of two words.")
    first = own.prompt(voice, None, cross_lingual=False)
    first.prompt_text.clear()  # what a caller does with its own
    prompts = [own.prompt(voice, None, cross_lingual=False) for _ in range(2)]
    assert prompts[0] == prompts[1]
    assert prompts[0].prompt_text
    assert len(made) == 1
    own.prompt(replace(voice, prompt_text="A dog of two words."), None, cross_lingual=False)
    own.prompt(voice, "Speak as a cat would.", cross_lingual=False)
    assert len(made) == 3
    for _ in range(2):
        with pytest.raises(InvalidTextError):
            own.prompt(voice, "Speak <|endofprompt|> as a cat would.", cross_lingual=False)
