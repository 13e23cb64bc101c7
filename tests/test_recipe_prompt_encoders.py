"""The recipe of the prompt encoders: features in batches, networks, export, short trainings."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from recipes.mini import export_onnx, train_speaker, train_tokenizer
from recipes.mini.corpus import Corpus, CorpusWriter
from recipes.mini.features_gpu import Speech16k, fbank80, log_mel128, played_faster, resample_24k_to_16k
from recipes.mini.schedule import batches
from recipes.mini.speaker_model import SpeakerNet, SpeakerSizes
from recipes.mini.symbols import alphabet, choose, edit_distance, error_rate, numbers
from recipes.mini.tokenizer_model import (
    CodeReader,
    Encoder,
    TokenizerSizes,
    TokenRecogniser,
    greedy,
    round_weights,
    rounded,
    to_index,
    to_levels,
)
from vivace.audio import features
from vivace.models.prompt_encoders import SpeakerEncoder, SpeechTokenizer

GOLDEN = Path(__file__).parent / "golden" / "frontend" / "features.npz"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as stored:
        return {name: torch.from_numpy(stored[name]) for name in stored.files}


@pytest.fixture(scope="module")
def corpus_folder(tmp_path_factory):
    """Eight utterances of buzzing noise by four voices, one of them a mixture."""
    folder = tmp_path_factory.mktemp("corpus")
    generator = np.random.default_rng(3)
    with CorpusWriter(folder) as writer:
        for index in range(8):
            at = np.arange(int(24_000 * (0.8 + 0.1 * index))) / 24_000
            sound = 0.3 * np.sign(np.sin(2 * np.pi * (90 + 40 * (index % 4)) * at)) * np.sin(9 * at) ** 2
            sound += 0.01 * generator.standard_normal(len(at))
            voice = ("anna", "bert", "cora", "mix0")[index % 4]
            mix = {"anna": 0.6, "bert": 0.4} if voice == "mix0" else None
            item = {"id": f"t{index}", "lang": "en", "text": "a cab bad", "voice": voice, "mix": mix}
            writer.add(item, sound.astype(np.float32))
    return folder


def padded_pair(signal):
    """The signal and its beginning as one batch, with noise behind both ends."""
    rows = [signal, signal[:20_000]]
    batch = torch.randn(2, len(signal) + 5_000, generator=torch.Generator().manual_seed(0))
    for row, samples in zip(batch, rows, strict=True):
        row[: len(samples)] = samples
    return batch, torch.tensor([len(row) for row in rows])


def test_features_equal_the_golden_ones_in_a_padded_batch(golden):
    batch, lengths = padded_pair(golden["signal16"])
    mel, frames = log_mel128(batch, lengths)
    assert frames.tolist() == [160, 125]
    # float32 sums in another order; the filter bank's logarithm of very quiet bands magnifies them
    torch.testing.assert_close(mel[0, :, :160], golden["whisper_logmel128_16k"][0], atol=2e-5, rtol=0)
    banks, frames = fbank80(batch, lengths)
    assert frames.tolist() == [158, 123]
    torch.testing.assert_close(banks[0, :158], golden["campplus_fbank80_16k"], atol=2e-3, rtol=0)


def test_features_of_a_shorter_row_equal_those_alone_and_those_of_the_package(golden):
    batch, lengths = padded_pair(golden["signal16"])
    short = golden["signal16"][:20_000].numpy()
    mel, _ = log_mel128(batch, lengths)
    banks, _ = fbank80(batch, lengths)
    # float32 sums in another order, seen through the logarithm of quiet bands
    np.testing.assert_allclose(mel[1, :, :125], features.log_mel128(short), atol=1e-4)
    np.testing.assert_allclose(banks[1, :123], features.fbank80(short), atol=2e-3)
    assert not mel[1, :, 125:].any()
    assert not banks[1, 123:].any()


@pytest.mark.parametrize("size", [2400, 2401, 2402, 48_000])
def test_resampling_agrees_with_soxr(size):
    at = np.arange(size) / 24_000
    samples = (0.4 * np.sin(2 * np.pi * 440 * at) + 0.2 * np.sin(2 * np.pi * 6500 * at)) * np.hanning(size)
    found = resample_24k_to_16k(torch.from_numpy(samples.astype(np.float32)), block=700).numpy()
    assert len(found) == -(-size * 2 // 3)
    wanted = features.resample(samples.astype(np.float32), 24_000, 16_000)
    common = min(len(found), len(wanted))
    # two good filters differ near the cut-off only; both tones lie well below it
    np.testing.assert_allclose(found[:common], wanted[:common], atol=1e-3)


def test_speech_of_a_corpus_does_not_leak_into_the_neighbours(corpus_folder):
    corpus = Corpus(corpus_folder)
    speech = Speech16k(corpus, CPU)
    for index in (0, 5, 7):
        samples, lengths = speech.batch(torch.tensor([index]))
        alone = resample_24k_to_16k(torch.from_numpy(corpus.waveform(index)))
        assert int(lengths[0]) == len(alone)
        torch.testing.assert_close(samples[0, : len(alone)], alone, atol=2.0 / 32768, rtol=0)
        assert not samples[0, len(alone) :].any()
    part, lengths = speech.batch(torch.tensor([3]), torch.tensor([100]), 2000)
    whole, _ = speech.batch(torch.tensor([3]))
    assert lengths.tolist() == [2000]
    torch.testing.assert_close(part[0], whole[0, 100:2100], atol=0, rtol=0)


def test_a_faster_tape_is_shorter_and_higher():
    tone = torch.sin(2 * torch.pi * 440 * torch.arange(16_000) / 16_000)[None]
    changed, change = played_faster(tone, 1.1)
    assert changed.shape[1] == 14_400 == round(change * 16_000)
    peak = torch.fft.rfft(changed[0]).abs().argmax() * 16_000 / 14_400
    assert float(peak) == pytest.approx(440 / 0.9, abs=2)


def test_code_numbers_follow_the_official_convention():
    levels = torch.tensor([[-1.0, -1, -1, -1, -1], [0, -1, -1, -1, -1], [-1, 0, -1, -1, 1], [1, 1, 1, 1, 1]])
    assert to_index(levels).tolist() == [0, 1, 3 + 2 * 81, 242]
    every = torch.arange(729)
    assert torch.equal(to_index(to_levels(every, 6)), every)


def test_mel_decoder_looks_three_tokens_ahead():
    torch.manual_seed(1)
    painter = CodeReader(5, 16, kernel=7, blocks=3, extra=2, causal=True).eval()
    levels = torch.randn(1, 40, 5)
    changed = levels.clone()
    changed[:, 20:] += 1.0
    inside, voice = torch.ones(1, 40, 1), torch.zeros(1, 2)
    moved = (painter(levels, inside, voice) - painter(changed, inside, voice)).abs().amax(-1)[0]
    assert moved[:17].max() == 0
    assert moved[17:].min() > 0


def test_rounding_gives_three_levels_and_passes_gradients():
    normal = torch.tensor([-3.0, -0.5, 0.2, 0.6, 4.0], requires_grad=True)
    levels = rounded(normal)
    torch.testing.assert_close(levels.detach(), torch.tensor([-1.0, 0, 0, 1, 1]), atol=1e-6, rtol=0)
    levels.sum().backward()
    assert (normal.grad > 0).all()


def test_greedy_reading_and_error_rate():
    best = torch.tensor([[1, 1, 0, 1, 2, 2, 0, 3]])
    assert greedy(torch.nn.functional.one_hot(best, 4), torch.tensor([7])) == [[1, 1, 2]]
    assert edit_distance([1, 2, 3], [1, 3]) == 1
    assert edit_distance([], [1, 3]) == 2
    assert edit_distance([2, 1], [1, 2]) == 2
    assert error_rate([[1, 2], [5]], [[1, 2], [5, 6]]) == 0.25


def test_symbols(corpus_folder):
    kind, spell = choose(Corpus(corpus_folder), "letters")
    assert kind == "letters"
    assert spell({"text": "A cab!"}) == ["a", "c", "a", "b"]
    kind, spell = choose(Corpus(corpus_folder), "teacher")
    assert spell({"phonemes": "ðə kˈæt, sˌɪts."}) == list("ðəkætsɪts")
    names = alphabet([["a", "b", "a"], ["c", "a", "b"]], least=2)
    assert names == ["<blank>", "a", "b"]
    assert numbers(["c", "b", "a"], names) == [2, 1]


def test_batches_hold_every_item_once_and_stay_small():
    seconds = torch.rand(200, generator=torch.Generator().manual_seed(1)) * 9 + 0.5
    items = torch.arange(0, 200, 2)
    drawn = batches(seconds, items, 40.0, torch.Generator().manual_seed(1))
    seen: list[int] = []
    while len(seen) < len(items):
        part = next(drawn)
        assert float(seconds[part].max()) * len(part) <= 40.0
        seen.extend(part.tolist())
    assert sorted(seen) == items.tolist()


def small_encoder(levels):
    torch.manual_seed(levels)
    sizes = TokenizerSizes(
        levels=levels, width=64, blocks=2, heads=2, feed_forward=96, kernel=5, window_tokens=8
    )
    encoder = Encoder(sizes).eval()
    encoder.quantiser.mean.fill_(0.01)
    encoder.quantiser.deviation.fill_(0.1)
    round_weights(encoder)
    return encoder


def test_encoder_gives_a_row_of_a_batch_the_tokens_it_has_alone():
    encoder = small_encoder(5)
    mel = torch.randn(2, 128, 203, generator=torch.Generator().manual_seed(2))
    mel[1, :, 90:] = 0.0
    tokens, counts = encoder(mel, torch.tensor([203, 90]))
    assert counts.tolist() == [51, 23]
    alone, _ = encoder(mel[1:, :, :90], torch.tensor([90]))
    assert torch.equal(alone[0], tokens[1, :23])
    assert len(tokens[0].unique()) > 10


@pytest.mark.parametrize("levels", [5, 6])
def test_exported_tokenizer_gives_the_same_tokens(levels, tmp_path):
    encoder = small_encoder(levels)
    path = tmp_path / export_onnx.TOKENIZER_NAME
    size = export_onnx.write_tokenizer(encoder, path)
    speech = export_onnx.check_speech(None, count=3)
    assert size == path.stat().st_size
    assert export_onnx.agreement(encoder, path, speech) >= 0.999
    tokenizer = SpeechTokenizer(path, 3**levels)
    samples = speech[0][0]
    mel = torch.from_numpy(features.log_mel128(samples.numpy()))[None]
    expected, _ = encoder(mel, torch.tensor([mel.shape[2]]))
    assert (tokenizer.encode(samples.numpy()) == expected[0].numpy()).mean() >= 0.99


def test_exported_tokenizer_ignores_what_lies_behind_the_length(tmp_path):
    encoder = small_encoder(5)
    path = tmp_path / "t.onnx"
    export_onnx.write_tokenizer(encoder, path)
    mel = torch.randn(1, 128, 120, generator=torch.Generator().manual_seed(4)).numpy()
    given = {"feats": mel, "feats_length": np.array([77], np.int32)}
    (short,) = export_onnx.session(path).run(None, given)
    expected, _ = encoder(torch.from_numpy(mel[:, :, :77]), torch.tensor([77]))
    np.testing.assert_array_equal(short, expected.numpy())


def test_exported_speaker_encoder_gives_the_same_embedding(tmp_path):
    torch.manual_seed(0)
    net = SpeakerNet(SpeakerSizes(width=32, blocks=2, attention=8)).eval()
    round_weights(net)
    path = tmp_path / export_onnx.SPEAKER_NAME
    export_onnx.write_speaker(net, path)
    speech = export_onnx.check_speech(None, count=2)
    # float32 sums in another order
    assert export_onnx.speaker_error(net, path, speech) < 1e-5
    embedding = SpeakerEncoder(path).embed(speech[0][0].numpy())
    assert np.linalg.norm(embedding) == pytest.approx(1.0, abs=1e-5)


def test_tokenizer_trains_resumes_tokenizes_and_reads_back(corpus_folder, tmp_path):
    shared = ["--data", str(corpus_folder), "--device", "cpu"]
    short = ["--steps", "1", "--batch-seconds", "5", "--symbols", "letters", "--levels", "6"]
    train_tokenizer.main([*shared, *short, "--out", str(tmp_path / "tokenizer")])
    checkpoint = tmp_path / "tokenizer" / "tokenizer.pt"
    assert checkpoint.stat().st_size < 16_000_000
    resumed = ["--resume", str(checkpoint.with_name("resume.pt")), "--out", str(tmp_path / "b")]
    train_tokenizer.main(["train", *shared, *short, *resumed])
    assert json.loads((tmp_path / "b" / "tokenizer.json").read_text())["steps"] == 1
    train_tokenizer.main(["tokenize", *shared, "--out", str(tmp_path)])
    with np.load(tmp_path / "tokens.npz") as found:
        tokens, offsets, codes = found["tokens"], found["offsets"], int(found["codes"])
    samples = [item["num_samples"] for item in Corpus(corpus_folder).items]
    assert codes == 729
    assert np.diff(offsets).tolist() == [size // 960 for size in samples]
    assert tokens.dtype == np.uint16
    assert tokens.max() < 729
    recogniser = TokenRecogniser(str(checkpoint), CPU)
    rows = [torch.from_numpy(tokens[offsets[i] : offsets[i + 1]].astype(np.int64)) for i in range(3)]
    together = recogniser.recognise(rows)
    assert together == [recogniser.recognise([row])[0] for row in rows]


def test_speaker_encoder_trains_and_embeds(corpus_folder, tmp_path):
    shared = ["--data", str(corpus_folder), "--device", "cpu"]
    train_speaker.main([*shared, "--steps", "1", "--batch", "4", "--out", str(tmp_path / "speaker")])
    out = tmp_path / "speakers.npz"
    train_speaker.main(["embed", *shared, "--out", str(tmp_path)])
    found = np.load(out)["embeddings"]
    assert found.shape == (8, 192)
    assert found.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, atol=1e-5)
    train_speaker.main(["embed", *shared, "--out", str(tmp_path), "--average"])
    mean = np.load(out)["embeddings"]
    np.testing.assert_array_equal(mean[0], mean[4])
    assert np.abs(mean[0] - mean[1]).max() > 0


def test_nearness_of_voices_follows_their_mixture(corpus_folder):
    voices = train_speaker.Voices(Corpus(corpus_folder))
    assert voices.names == ["anna", "bert", "cora", "mix0"]
    near = voices.nearness()
    assert near[3, 0] > near[3, 1] > near[3, 2] == 0
    assert float(near[0, 1]) == 0
