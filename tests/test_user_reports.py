"""What users reported on other engines, tried on this one. ``docs/reported_faults.md`` tells rows and tests apart.

Rows that text, decoder or voices alone can show are in their own test files; here are those that need the engine: the
tiny random model where only the course of a request counts, the embedded model where it has to speak.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.helpers import noise_voice, quiet_engine, speech_like_wav
from vivace import InvalidTextError, InvalidVoiceError, SamplingParams, SynthesisRequest, VoiceNotFoundError
from vivace.audio.features import mel_24k
from vivace.checkpoint import load_config
from vivace.config import Limits
from vivace.engine.engine import Engine
from vivace.engine.flow_runner import FlowRunner
from vivace.engine.frontend import Frontend
from vivace.engine.loading import load_assets, model_folder
from vivace.engine.silence import is_near_silent
from vivace.models.speech_lm import SpeechLM

SAMPLES_PER_TOKEN = 960
AUDIBLE = 0.01
"""-40 dBFS over a whole utterance; the embedded model's own level is about -25."""
DIALECT = "用四川话说这句话"


@pytest.fixture(scope="module")
def tiny(random_model_folder, tmp_path_factory):
    """Random weights; says as little as it may."""
    with quiet_engine(
        random_model_folder,
        voices=tmp_path_factory.mktemp("voices"),
        limits=Limits(segment_text_tokens=100),
        num_steps=2,
        token_text_ratio=(0.2, 0.2),
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def mini(tmp_path_factory):
    """The embedded model with fewer Euler steps."""
    with quiet_engine(model_folder("mini"), voices=tmp_path_factory.mktemp("voices"), num_steps=3) as engine:
        yield engine


@pytest.fixture(scope="module")
def voice(tiny):
    return noise_voice(tiny._config, 40)


def loudness(samples):
    return float(np.sqrt(np.mean(np.square(samples, dtype=np.float64))))


# -- A: text ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "Bei 10 hoch 7 Metern ist natürlich die Fläche beleuchtet.",  # A1
        "IPTH、CKD和V，瘘",  # A4
        "啊？这也行啊，醉了醉了。",  # A11
        "唧唧复唧唧，木兰当户织。芝罘区，牟平区。",  # A13
        "レキシ テキ セカイ ニ オイ テ ワ、カコ ワ。",  # A14
        "一只小羊是养,两只小羊是养,三只小羊就不是养了,是喂。",  # A17
    ],
)
def test_A1_A4_A11_A13_A14_A17_every_letter_reaches_the_model_once(tiny, voice, sequences, text):
    result = tiny.synthesize(SynthesisRequest(text, voice=voice))
    spoken = "".join(tiny._assets.frontend._tokenizer.decode(ids) for _, ids, _ in sequences)
    assert spoken.replace(" ", "").removesuffix("。") == text.replace(" ", "").removesuffix("。")
    assert "".join(result.spoken_text).replace(" ", "") == spoken.replace(" ", "")


def test_A13_pinyin_reaches_the_model_as_single_tokens(tiny, voice, sequences):
    tokenizer = tiny._assets.frontend._tokenizer
    tiny.synthesize(SynthesisRequest("高管对报道[j][ǐ]予好评。", voice=voice))
    ((_, text, _),) = sequences
    place = text.index(tokenizer.special_id("[j]"))
    assert text[place + 1] == tokenizer.special_id("[ǐ]")


def test_A19_every_piece_of_a_long_text_is_in_the_audio(tiny, voice):
    text = (
        "Task: Classify the given sentence as overruling or non-overruling. Guidelines: - An overruling sentence "
        "is a statement that nullifies a previous case decision."
    )
    result = tiny.synthesize(SynthesisRequest(text, voice=voice))
    assert result.num_segments >= 2
    assert " ".join(result.spoken_text) == text
    assert len(result.samples) == SAMPLES_PER_TOKEN * result.num_speech_tokens


def test_A20_segments_of_a_long_essay_leave_nothing_behind(tiny, voice):
    essay = "我们钦佩鲁迅先生，因为他敢于向黑暗的社会宣战。" * 4
    result = tiny.synthesize(SynthesisRequest(essay, voice=voice))
    assert result.num_segments >= 4
    assert tiny.num_running == 0
    assert max(len(text) for text in result.spoken_text) <= 100


def test_A22_D38_D43_chunks_sound_like_one_pass(mini):
    """The whole as one mel and one vocoder call is the definition; chunks add no break, no pop, no repetition."""
    voice = mini.voices.get("heart")
    model = mini._assets.model
    tokens = mini.voices.get("emma").speech_tokens.tolist()[:60]
    parts = [chunk.samples for chunk in mini.render_tokens(tokens, voice)]
    assert len(parts) >= 3
    with torch.inference_mode():
        mel = model.flow.generate(
            torch.tensor([*voice.speech_tokens.tolist(), *tokens]),
            torch.tensor(voice.mel),
            torch.tensor(voice.embedding),
            streaming=True,
        )
        whole = model.vocoder(mel[None])[0].numpy()
    streamed = np.concatenate(parts)
    # Float32 rounding of the flow, carried through the vocoder's running phase (see test_hift_stream).
    np.testing.assert_allclose(streamed, whole, atol=5e-3)
    jumps = np.abs(np.diff(streamed))
    borders = np.cumsum([len(part) for part in parts])[:-1]
    assert jumps[borders - 1].max() < jumps.max()


def test_A23_output_begins_behind_the_prompt(mini):
    """Every sample belongs to a token that the LM drew for this text; nothing of the prompt's own is given out."""
    result = mini.synthesize(SynthesisRequest("Good morning.", voice="heart"))
    assert len(result.samples) == SAMPLES_PER_TOKEN * result.num_speech_tokens
    prompt = mini.voices.get("heart").speech_tokens
    assert result.num_speech_tokens < len(prompt)


# -- B, F: instructions and prompts -------------------------------------------------------------------------------


def test_B25_B26_B29_F58_only_the_text_is_spoken(tiny, voice, sequences):
    tokenizer = tiny._assets.frontend._tokenizer
    text = "冬至，那个人坐在窗台下。"
    for written in (DIALECT, f"{DIALECT}<|endofprompt|>"):
        tiny.synthesize(SynthesisRequest(text, voice=voice, instruction=written))
    assert sequences[0] == sequences[1]
    prefix, spoken, speech = sequences[0]
    assert tokenizer.decode(spoken) == text
    assert speech == []
    assert prefix.count(tokenizer.end_of_prompt_id) == 1
    assert prefix[-1] == tokenizer.end_of_prompt_id


def test_B28_the_instruction_precedes_each_segment_as_a_prompt(tiny, voice, sequences):
    tokenizer = tiny._assets.frontend._tokenizer
    essay = "我们钦佩鲁迅先生，因为他敢于向黑暗的社会宣战。" * 3
    tiny.synthesize(SynthesisRequest(essay, voice=voice, instruction=DIALECT))
    assert len(sequences) >= 3
    assert len({tuple(prefix) for prefix, _, _ in sequences}) == 1
    assert "".join(tokenizer.decode(text) for _, text, _ in sequences) == essay


@pytest.mark.parametrize("written", ["", "<|endofprompt|>", "You are a helpful assistant.<|endofprompt|>"])
def test_F61_a_stored_voice_without_the_template(tiny, sequences, written):
    transcript = "它呈现在，挥毫泼墨，笔走龙蛇的宣纸上。"
    tiny.voices.add(tiny.make_voice(speech_like_wav(), written + transcript, name="boy", consent=True))
    sentences = ["听，那些回响在历史长河中的声音。", "青山埋忠骨，热血铸长城。"]
    try:
        results = [tiny.synthesize(SynthesisRequest(text, voice="boy")) for text in sentences]
    finally:
        tiny.voices.remove("boy")
    tokenizer = tiny._assets.frontend._tokenizer
    assert [result.spoken_text for result in results] == [[text] for text in sentences]
    for prefix, _, speech in sequences:
        assert prefix.count(tokenizer.end_of_prompt_id) == 1
        end = prefix.index(tokenizer.end_of_prompt_id)
        assert tokenizer.decode(prefix[end + 1 :]) == transcript
        assert len(speech) == 50


def test_F64_never_another_voice_silently(tiny, voice):
    tiny.voices.add(replace(voice, name="mine"))
    by_name = tiny.synthesize(SynthesisRequest("Hi.", voice="mine")).samples
    np.testing.assert_array_equal(by_name, tiny.synthesize(SynthesisRequest("Hi.", voice=voice)).samples)
    assert not np.array_equal(by_name, tiny.synthesize(SynthesisRequest("Hi.")).samples)
    stored = tiny.voices._folder / "mine.safetensors"
    stored.write_bytes(stored.read_bytes()[:-8])
    with pytest.raises((InvalidVoiceError, VoiceNotFoundError)):
        tiny.synthesize(SynthesisRequest("Hi.", voice="mine"))
    with pytest.raises(VoiceNotFoundError):
        tiny.synthesize(SynthesisRequest("Hi.", voice="nobody"))


@pytest.mark.parametrize("text", ["我爱你", "我爱你呀宝宝"])
def test_F62_short_texts_give_audio_without_a_long_tail(random_model_folder, voice, text):
    with quiet_engine(
        random_model_folder, num_steps=2
    ) as engine:  # the official bounds: 2 to 20 for a text token
        for streamed in (text, iter([text])):
            result = engine.synthesize(SynthesisRequest(streamed, voice=voice))
            assert 2 * result.num_text_tokens <= result.num_speech_tokens <= 20 * result.num_text_tokens
            assert len(result.samples) == SAMPLES_PER_TOKEN * result.num_speech_tokens


def test_F65_no_click_where_segments_join(tmp_path):
    limits = Limits(segment_text_tokens=16)
    with quiet_engine(model_folder("mini"), voices=tmp_path, limits=limits, num_steps=3) as engine:
        chunks = list(engine.stream(SynthesisRequest("Good morning. How are you?")))
    assert {chunk.segment for chunk in chunks} == {0, 1}
    samples = np.concatenate([chunk.samples for chunk in chunks])
    jumps = np.abs(np.diff(samples))
    joint = sum(len(chunk.samples) for chunk in chunks if chunk.segment == 0)
    around = jumps[joint - 2 * SAMPLES_PER_TOKEN : joint + 2 * SAMPLES_PER_TOKEN]
    assert around.max() <= jumps.max()
    assert jumps[joint - 1] < np.quantile(jumps, 0.999)


# -- C, D, E: prompts, streaming, company -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_C34_E50_half_precision_is_as_loud(mini, dtype, tmp_path):
    tokens = mini.voices.get("emma").speech_tokens.tolist()[:35]
    full = mini.render_tokens(tokens, mini.voices.get("heart")).collect().samples
    assets = load_assets(model_folder("mini"), dtype=dtype, voices_folder=tmp_path)
    assets.model.flow.config = mini._assets.model.flow.config
    assets.model.flow.train(False).prepare()
    with Engine(assets) as engine:
        half = engine.render_tokens(tokens, engine.voices.get("heart")).collect().samples
    assert np.isfinite(half).all()
    assert len(half) == len(full)
    # Within 1 dB: the words and the voice are the same, the rounding is not.
    assert loudness(half) == pytest.approx(loudness(full), rel=0.12)


def test_D37_the_last_token_is_heard_whatever_the_number(tiny, voice):
    """Around every place that a chunk border can have."""
    for count in (1, 9, 10, 11, 12, 13, 14, 35, 38):
        tokens = list(range(5, 5 + count))
        chunks = list(tiny.render_tokens(tokens, voice))
        assert sum(len(chunk.samples) for chunk in chunks) == SAMPLES_PER_TOKEN * count
        assert chunks[-1].is_last


def test_D40_D41_three_in_a_row_and_two_at_once_start_alike(tiny, voice):
    text = (
        "天气很好，我们一起去公园里散步吧，带上好吃的东西，晚上再回来看电影，明天还要早起上班，别睡得太晚。"
        * 2
    )
    request = SynthesisRequest(text, voice=voice)
    first = [len(next(tiny.stream(request)).samples) for _ in range(3)]
    streams = [tiny.stream(request), tiny.stream(request)]
    together = [len(next(stream).samples) for stream in streams]
    pieces = [[len(chunk.samples) for chunk in stream] for stream in streams]
    assert len({*first, *together}) == 1
    assert pieces[0] == pieces[1]
    assert first[0] == ((50 - 40) * 2 - 4) * 480 - 4  # up to the border at 50, less the vocoder's look-ahead


def test_E53_the_reported_text_is_not_silent(mini):
    result = mini.synthesize(SynthesisRequest("Construction requires study and observation."))
    assert loudness(result.samples) > AUDIBLE
    assert 1.0 < result.audio_seconds < 6.0


# -- T: text that is meant to break things ---------------------------------------------------------------------------


def test_T12_a_break_of_a_day_is_no_silence(mini):
    result = mini.synthesize(SynthesisRequest('Wait <break time="99999s"/> here.'))
    assert result.spoken_text == ["Wait here."]
    assert result.audio_seconds < 4.0


@pytest.mark.parametrize("text", ["a", "I", "1", "π", "Hi", "No.", "OK"])
def test_T16_E53_one_character_or_word_is_heard(mini, text):
    for seed in range(5):
        result = mini.synthesize(SynthesisRequest(text, sampling=SamplingParams(seed=seed)))
        assert 0.1 <= result.audio_seconds <= 5.0
        assert loudness(result.samples) > AUDIBLE, seed


@pytest.mark.parametrize("text", ["a", "Hi"])
def test_T16_E53_a_word_left_near_silence_is_spoken_at_the_second_try(mini, monkeypatch, text):
    """The flow's first answer is muted, as this model's was for short texts that it had never learned to read."""
    generate, drawn = FlowRunner.generate, []

    def muted_at_first(self, voice, tokens):
        drawn.append(list(tokens))
        mel = generate(self, voice, tokens)
        return torch.full_like(mel, -8.0) if len(drawn) == 1 else mel

    monkeypatch.setattr(FlowRunner, "generate", muted_at_first)
    result = mini.synthesize(SynthesisRequest(text, stream=False))
    assert len(drawn) == 2
    assert drawn[0] != drawn[1], "other draws"
    assert 0.1 <= result.audio_seconds <= 5.0
    assert loudness(result.samples) > AUDIBLE


@pytest.mark.parametrize("text", ["啊", "你好，世界。", "Привет", "مرحبا", "😀", "w" * 5_000])
def test_T15_T16_text_that_the_embedded_model_cannot_read_is_refused_before_any_work(mini, text):
    with pytest.raises(InvalidTextError) as raised:
        mini.stream(SynthesisRequest(text))
    assert raised.value.code == "unpronounceable_input"
    stream = mini.stream(SynthesisRequest(iter(text)))
    with pytest.raises(InvalidTextError) as raised:
        next(stream)
    assert raised.value.code == "unpronounceable_input"
    assert stream.summary().num_speech_tokens == 0


def test_T15_what_the_embedded_model_leaves_out_of_a_text_is_named(mini):
    text = "We say 你好 in 12 places, and мир too."
    for given in (text, iter(text)):
        result = mini.synthesize(SynthesisRequest(given, language="zh"))
        assert "".join(result.spoken_text) == "We say in twelve places, and too."
        assert result.skipped_text == ["你好", "мир"]
        assert result.audio_seconds > 1.0


def test_T15_other_models_read_every_script(tiny, voice):
    result = tiny.synthesize(SynthesisRequest("We say 你好, мир.", voice=voice))
    assert (result.spoken_text, result.skipped_text) == (["We say 你好, мир."], [])


def test_F61_a_prompt_that_the_embedded_model_cannot_read_is_left_out_of_its_text(mini):
    frontend, heart = mini._assets.frontend, mini.voices.get("heart")
    foreign = frontend.prompt(
        replace(heart, prompt_text="你好，世界，今天天气很好。"), None, cross_lingual=False
    )
    assert foreign == frontend.prompt(replace(heart, prompt_text=""), None, cross_lingual=False)
    assert frontend.prompt(heart, None, cross_lingual=False).prompt_text


def test_E53_what_counts_as_silence(mini):
    voice = mini.voices.get("heart")
    speech = mini.render_tokens(voice.speech_tokens.tolist()[:40], voice).collect().samples
    at_0_dbfs = speech / loudness(speech)

    def is_silent(level_dbfs, speaker=voice):
        mel = mel_24k((at_0_dbfs * 10 ** (level_dbfs / 20)).astype(np.float32))
        return is_near_silent(torch.tensor(mel.T), speaker)

    assert not any(is_silent(level) for level in range(-20, -66, -5))
    assert is_silent(-75)
    # A prompt of -65 dBFS, 40 dB below this voice's own level: speech that is as quiet is no fault of the model's.
    quiet = replace(voice, mel=voice.mel - np.float32(4.6))
    assert not is_silent(-75, quiet)
    assert is_silent(-105, quiet)
    assert not is_silent(-40, replace(voice, mel=voice.mel[:0], speech_tokens=voice.speech_tokens[:0]))


def test_T17_a_model_that_never_stops_is_cut(tiny, voice, monkeypatch):
    original = SpeechLM.logits

    def endless(self, hidden):
        logits = original(self, hidden)
        logits[..., self.config.speech_token_size :] = -1e3
        return logits

    monkeypatch.setattr(SpeechLM, "logits", endless)
    whole = tiny.synthesize(SynthesisRequest("a " * 30, voice=voice))
    assert (whole.finish_reason, whole.num_speech_tokens) == ("length", 25)  # one second at least
    streamed = tiny.synthesize(SynthesisRequest(iter(["a "] * 30), voice=voice))
    group_text, group_speech = tiny._config.lm.mix_ratio
    groups = streamed.num_text_tokens // group_text
    assert streamed.finish_reason == "length"
    assert streamed.num_speech_tokens <= 25 + groups * group_speech


def test_T17_two_thousand_letters_are_bounded_segments(mini):
    frontend = mini._assets.frontend
    segments = frontend.segments("a " * 2000, None)
    assert sum(text.count("a") for text, _ in segments) == 2000
    assert max(len(ids) for _, ids in segments) <= frontend.segment_tokens
    config = mini._config
    longest = config.token_text_ratio[1] * frontend.segment_tokens
    assert longest <= config.flow.noise_frames / config.flow.token_mel_ratio, (
        "each of them fits into one stream"
    )


def test_T17_a_repeated_word_ends(mini):
    result = mini.synthesize(SynthesisRequest(" ".join(["a"] * 12)))
    assert result.finish_reason in ("stop", "length")
    assert result.num_speech_tokens <= mini._config.token_text_ratio[1] * result.num_text_tokens


def test_T22_a_thousand_sentences_are_few_segments(mini):
    segments = mini._assets.frontend.segments("Hi. " * 1000, None)
    assert sum(text.count("Hi.") for text, _ in segments) == 1000
    assert len(segments) < 100
    for one, other in itertools.pairwise(segments):
        assert one[0].count("Hi.") >= other[0].count("Hi.") - 1


def test_A10_addresses_and_versions_are_read_in_words_by_the_embedded_model() -> None:
    """The dots reach a model that reads words; this one reads phonemes and would stop at each of them."""
    folder = model_folder("mini")
    frontend = Frontend(folder / "CosyVoice-BlankEN", folder, load_config(folder), Limits())
    in_words = "version v two point five point one is out"
    assert frontend.tokens("version v2.5.1 is out") == frontend.tokens(in_words)
    assert frontend.tokens("see www.example.com now") == frontend.tokens("see w w w dot example dot com now")
    assert len(frontend.tokens("[AA1][laughter]")) == 2
