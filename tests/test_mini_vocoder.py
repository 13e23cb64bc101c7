"""What the vocoder's training rests on: mel, pitch, losses, and files to go on from."""

import argparse
import time
from pathlib import Path

import numpy as np
import torch

from recipes.mini.config import mini_vocoder_config
from recipes.mini.corpus import Corpus, CorpusWriter
from recipes.mini.mel_gpu import HOP, RATE, FlatSpeech, log_mel
from recipes.mini.pitch_gpu import track
from recipes.mini.train_vocoder import limit_norm, run
from recipes.mini.vocoder_fast import FastGenerator, Speed
from recipes.mini.vocoder_losses import Discriminators, SpectralLoss, discriminator_loss, generator_losses
from vivace.models.hift import CausalHiFT
from vivace.models.source import CounterNoise

FRONTEND = Path(__file__).parent / "golden" / "frontend" / "features.npz"


def make_corpus(folder: Path) -> Corpus:
    """Tones of known pitch with seven harmonics, each between two stretches of faint noise."""
    rng = np.random.default_rng(0)
    time = np.arange(RATE) / RATE
    with CorpusWriter(folder) as writer:
        for index, pitch_hz in enumerate((70.0, 110.0, 233.0, 440.0)):
            tone = sum(np.sin(2 * np.pi * pitch_hz * k * time) / k for k in range(1, 8)) * 0.1
            quiet = rng.normal(size=(2, RATE // 4)) * 0.003
            samples = np.concatenate((quiet[0], tone, quiet[1]))
            writer.add({"id": f"tone{index}", "voice": "tone", "text": "", "pitch": pitch_hz}, samples)
    return Corpus(folder)


def test_mel_equals_the_reference() -> None:
    with np.load(FRONTEND) as data:
        mel = log_mel(torch.from_numpy(data["signal24"])[None])
        np.testing.assert_allclose(mel.numpy(), data["mel80_24k"], atol=1e-5, rtol=0)


def test_mel_of_a_flat_corpus_equals_that_of_each_utterance(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path)
    speech = FlatSpeech(corpus, torch.device("cpu"))
    for index in range(len(corpus)):
        alone = log_mel(torch.from_numpy(corpus.waveform(index))[None])[0]
        first, count = speech.starts[index : index + 1], int(speech.lengths[index])
        assert alone.shape[1] == count
        flat = speech.mel_crops(first, count)[0]
        # The first and last two frames see silence instead of the mirror image.
        torch.testing.assert_close(flat[:, 2:-2], alone[:, 2:-2], atol=1e-4, rtol=0)
        samples = speech.crops(first + 10, 3)[0]
        assert torch.equal(samples, torch.from_numpy(corpus.waveform(index)[10 * HOP : 13 * HOP]))


def test_pitch_of_tones_and_of_noise(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path)
    speech = FlatSpeech(corpus, torch.device("cpu"))
    pitch = track(speech)
    for index, item in enumerate(corpus.items):
        start = int(speech.starts[index])
        mine = pitch[start : start + int(speech.lengths[index])]
        torch.testing.assert_close(mine[16:58], torch.full((42,), item["pitch"]), atol=0.0, rtol=0.002)
        assert mine[:9].count_nonzero() == 0
        assert mine[-9:].count_nonzero() == 0


def test_losses_prefer_the_truth() -> None:
    torch.manual_seed(0)
    true, discriminators, spectral = torch.randn(2, 4800) * 0.1, Discriminators(), SpectralLoss()
    near, far = true + torch.randn(2, 4800) * 0.01, torch.randn(2, 4800) * 0.02
    assert spectral(true, true) == 0.0
    assert spectral(near, true) < spectral(far, true)
    verdicts = [discriminators(samples) for samples in (true, near, far)]
    matching = [generator_losses(verdicts[0], other)[1] for other in verdicts]
    assert matching[0] == 0.0
    assert matching[1] < matching[2]
    perfect = [torch.ones(1)], [torch.zeros(1)]
    assert discriminator_loss(*perfect) == 0.0
    assert discriminator_loss(*reversed(perfect)) == 2.0


def test_fast_generator_equals_the_model() -> None:
    torch.manual_seed(0)
    model = CausalHiFT(mini_vocoder_config()).train()
    mel, f0 = torch.randn(2, 80, 7) - 5.0, torch.tensor([[120.0] * 7, [0.0] * 3 + [300.0] * 4])
    expected = model(mel, f0=f0, noise=CounterNoise())
    made = FastGenerator(model, Speed())(mel, f0, CounterNoise())
    # The same sums in another order.
    torch.testing.assert_close(made, expected, atol=1e-5 * float(expected.detach().abs().max()), rtol=0)
    weights = [model.resblocks[4].convs1[2].weight, model.resblocks[2].activations2[0].alpha]
    gradients = [torch.autograd.grad(x.square().sum(), weights) for x in (expected, made)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4 * float(one.abs().max()), rtol=0)


def test_gradients_far_above_the_usual_are_limited() -> None:
    usual = torch.tensor(0.0)
    limit_norm([torch.tensor([3.0, 4.0])], usual)
    assert usual == 5.0
    gradients = [torch.tensor([30.0]), torch.tensor([40.0])]
    limit_norm(gradients, usual)
    torch.testing.assert_close(torch.cat(gradients), torch.tensor([7.5, 10.0]))
    assert 5.0 < usual < 12.5


def test_training_can_be_resumed(tmp_path: Path) -> None:
    make_corpus(tmp_path / "corpus")
    (tmp_path / "first").mkdir()
    arguments = argparse.Namespace(
        data=tmp_path / "corpus", out=tmp_path / "first", minutes=2.0, steps=1, resume=None,
        device="cpu", batch=1, lr=1e-3, seed=0, graphs=False, kept=24, judged=16, warm=0.1,
        channels_last=True, bf16=False, fused_snake=True, fused=False,
    )  # fmt: skip

    run(arguments, time.monotonic())
    arguments.resume, arguments.out = tmp_path / "first" / "resume.pt", tmp_path / "second"
    run(arguments, time.monotonic())
    before, after = (torch.load(tmp_path / name / "vocoder.pt") for name in ("first", "second"))
    assert (before["steps"], after["steps"]) == (1, 2)
    assert before["model"].keys() == after["model"].keys()
    moved = [not torch.equal(before["model"][name], after["model"][name]) for name in before["model"]]
    assert all(moved), [n for n, m in zip(before["model"], moved, strict=True) if not m]
    limit = 16 * 2**20
    assert all(path.stat().st_size <= limit for path in (tmp_path / "second").glob("*.pt"))
