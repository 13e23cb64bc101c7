"""CosyVoice 2 and CosyVoice-300M on a CUDA device: kernels in graphs against the plain definitions on the CPU.

Float32 on both sides with the same sums in another order; the convolutions of the vocoder multiply in TF32.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.helpers import quiet_engine
from tests.test_conformer_paged import RULES, SPEAKER, alone, make_device, sequence
from tests.test_flow_regulated import inputs
from tests.test_flow_unet import model, vectors  # noqa: F401  (fixtures of CosyVoice 2's flow)
from tests.test_hift_centred import golden_vocoder
from tests.test_older_lms import conformer  # noqa: F401  (fixture)
from tests.test_older_streams import built, first  # noqa: F401  (fixture)
from tests.test_piece_device import plain
from vivace import SamplingParams, SynthesisRequest
from vivace.engine.lm_kernels import kernels_run_on
from vivace.models.flow_pieces import PieceFlow
from vivace.models.hift_centred_device import CentredDeviceVocoder
from vivace.models.piece_device import DevicePieceFlow
from vivace.models.source import CounterNoise
from vivace.models.unet_device import DeviceUNetFlow
from vivace.random_checkpoint import write_random_checkpoint

CUDA = torch.device("cuda")
pytestmark = pytest.mark.skipif(not kernels_run_on(CUDA), reason="needs Triton and compute capability 8.0")


def snr_db(got, wanted):
    noise = np.square(got.astype(np.float64) - wanted).sum()
    return 10 * np.log10(np.square(wanted.astype(np.float64)).sum() / max(noise, 1e-30))


def copied(module):
    """The same module on the device; the fixture's own stays where it is."""
    import copy

    return copy.deepcopy(module).to(CUDA)


@pytest.mark.parametrize("speaker", [SPEAKER, None])
def test_rows_of_the_first_speech_lm(conformer, speaker):  # noqa: F811
    """Likeliest tokens, so that no rounding decides: alone, and five side by side in graphs."""
    sampling = SamplingParams(temperature=0.0)
    device = make_device(copied(conformer), max_rows=5)
    texts = [(3, 4, 5, 6), (9,), tuple(range(40, 100)), (7, 7), tuple(range(20))]
    wanted = [alone(conformer, speaker, sampling, text=text)[0] for text in texts]
    spoken = [sequence(device.lm, text, speaker=speaker) for text in texts]
    sessions = [device.open(each, sampling, segment=0, **RULES) for each in spoken]
    made = [[] for _ in texts]
    with torch.inference_mode():
        while running := [s for s in sessions if s.finish_reason is None]:
            assert not device.launch([(session, 16) for session in running])
            for session, own in zip(sessions, made, strict=True):
                own += session.collect()
    for own, parts in zip(made, wanted, strict=True):
        assert own == [token for part in parts for token in part][: len(own)]


@torch.inference_mode()
def test_scores_of_the_first_speech_lm_in_half_precision(conformer):  # noqa: F811
    """Beside the plain way in the same precision: no further from float32."""
    tokens, scores = [1, 5, 200, 7, 7, 31], {}
    cache = conformer.new_cache(1, 100)
    spoken = conformer.for_speaker(SPEAKER)
    start = torch.tensor([[conformer.config.sos_id]])
    parts = [spoken.embed_speech(start), spoken.embed_text(torch.tensor([[1, 2, 3, 4, 5, 6]]))]
    task = torch.tensor([[conformer.config.task_id, 7, 8, 9]])
    prompt = torch.cat((*parts, spoken.embed_speech(task)), dim=1)
    spoken(prompt, cache)
    exact = torch.cat(
        [
            conformer.logits(conformer(conformer.embed_speech(torch.tensor([[t]])), cache)[:, -1])
            for t in tokens
        ]
    )
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        device = make_device(copied(conformer).to(dtype))
        session = device.open(sequence(device.lm), SamplingParams(seed=1), segment=0, **RULES)
        session.decode(1)
        scores[dtype] = device.paged.forced_scores(session._lease.slot, tokens, 1).cpu()
    torch.testing.assert_close(scores[torch.float32], exact, atol=2e-4, rtol=0)
    for dtype, bound in ((torch.bfloat16, 0.3), (torch.float16, 0.05)):
        assert (scores[dtype] - exact).abs().max() < bound


@torch.inference_mode()
def test_pieces_and_whole_utterances_of_the_first_flow(first):  # noqa: F811
    flow = built(PieceFlow)
    tokens, prompt_mel, embedding = inputs(first)
    device = DevicePieceFlow(copied(flow), max_rows=4)
    device.warm_up(len(prompt_mel))
    texts = [tokens[:320], tokens[:95], tokens[:250], tokens[:64], tokens[:161]]
    streams = [device.model.new_stream(embedding.to(CUDA), prompt_mel.to(CUDA)) for _ in texts]
    items = [(stream, text.tolist(), True) for stream, text in zip(streams, texts, strict=True)]
    for handle, text in zip(device.launch_batch(items), texts, strict=True):
        wanted = plain(flow, text, prompt_mel, embedding, [])
        torch.testing.assert_close(handle.check().cpu(), wanted, atol=2e-3, rtol=0)
    streams = [device.model.new_stream(embedding.to(CUDA), prompt_mel.to(CUDA)) for _ in texts]
    whole = [(stream, text.tolist()) for stream, text in zip(streams, texts, strict=True)]
    for handle, text in zip(device.generate_batch(whole), texts, strict=True):
        wanted = flow.generate(text, prompt_mel, embedding)
        torch.testing.assert_close(handle.check().cpu(), wanted, atol=2e-3, rtol=0)


@torch.inference_mode()
@pytest.mark.parametrize("streams", [1, 4])
def test_chunks_of_the_second_flow(model, vectors, streams):  # noqa: F811
    tokens, prompt_mel, embedding = inputs(vectors)
    device = DeviceUNetFlow(copied(model), max_bytes=1 << 28, max_streams=4)
    device.warm_up(150)
    opened = [device.open(embedding, prompt_mel) for _ in range(streams)]
    wanted = model.generate(tokens, prompt_mel, embedding, streaming=True)
    halves = [
        device.launch_batch([(stream, tokens[:70].tolist(), False) for stream in opened]),
        device.launch_batch([(stream, tokens[70:].tolist(), True) for stream in opened]),
    ]
    for before, after in zip(*halves, strict=True):
        got = torch.cat((before.check(), after.check()), dim=1).cpu()
        torch.testing.assert_close(got, wanted, atol=2e-3, rtol=0)
    for stream in opened:
        device.close(stream)
    assert device.pages_in_use == 0


@pytest.mark.parametrize("generation", [1, 2])
def test_vocoders(generation):
    exact = golden_vocoder(generation)
    device = CentredDeviceVocoder(copied(exact), slots=4, max_rows=4)
    device.warm_up([1, 2, 4])
    mels = [
        torch.randn(80, frames, generator=torch.Generator().manual_seed(frames)) * 2 - 4
        for frames in (150, 60, 7)
    ]
    streams = [device.open(seed) for seed in range(3)]
    parts = [[] for _ in mels]
    for start in range(0, 150, 50):
        chosen = [i for i, mel in enumerate(mels) if start < mel.shape[1]]
        items = [
            (streams[i], mels[i][:, start : start + 50].to(CUDA), start + 50 >= mels[i].shape[1])
            for i in chosen
        ]
        for i, pending in zip(chosen, device.launch_batch(items), strict=True):
            parts[i].append(device.collect(pending))
    for seed, (mel, own) in enumerate(zip(mels, parts, strict=True)):
        with torch.inference_mode():
            wanted = exact(mel[None], noise=CounterNoise(seed))[0].numpy()
        assert snr_db(np.concatenate(own), wanted) > 30


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("generation", [1, 2])
def test_engine(generation, dtype, tmp_path):
    """Given tokens sound as on the CPU; text becomes speech, alone and side by side, streamed and offline."""
    from vivace import Engine

    folder = tmp_path / "model"
    write_random_checkpoint(folder, "tiny", dtype="float32", generation=generation)
    tokens = np.random.default_rng(0).integers(0, 200, 130).tolist()
    with quiet_engine(folder, voices=tmp_path) as plain_engine:
        voice = plain_engine._assets.default_voice
        wanted = plain_engine.render_tokens(tokens, voice).collect().samples
    with Engine.open(folder, device="cuda", dtype=dtype, voices_folder=tmp_path, max_streams=4) as engine:
        assert engine._stages.is_paged
        got = engine.render_tokens(tokens, voice).collect().samples
        assert got.shape == wanted.shape
        if dtype is torch.float32:
            assert snr_db(got, wanted) > 20
        for stream in (True, False):
            request = SynthesisRequest("A fox sang in the rain. Two dogs sat.", stream=stream)
            alone_samples = engine.synthesize(request).samples
            assert np.isfinite(alone_samples).all()
            assert np.abs(alone_samples).max() > 1e-3
            streams = [engine.stream(request) for _ in range(4)]
            for each in streams:
                assert each.collect().finish_reason in ("stop", "length")
        assert engine._stages._device.lm.rows.num_open_rows == 0
