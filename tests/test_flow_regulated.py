"""The flow of CosyVoice-300M against the reference implementation's vectors.

Tolerances as in ``test_flow``.
"""

import numpy as np
import pytest
import torch

from tests.conftest import GOLDEN
from vivace.config import EncoderConfig, RegulatedFlowConfig, UNetConfig
from vivace.errors import SynthesisError
from vivace.models.flow_regulated import RegulatedFlow

FOLDER = GOLDEN / "cosyvoice1-tiny"
TINY = RegulatedFlowConfig(
    encoder=EncoderConfig(64, 64, heads=2, ff_size=128, num_blocks=2),
    unet=UNetConfig((32, 32), dim_head=16, heads=2, num_blocks=1, num_mid_blocks=2),
    vocab_size=256,
    input_size=64,
    token_rate_hz=50,
)
RENAMED = {"spk_embed_affine_layer.": "speaker_projection.", "decoder.estimator.": "unet."}


def golden_noise(frames: int = 3000) -> torch.Tensor:
    """The noise of the recorded vectors: a fixed sequence in place of the reference's random draws."""
    index = 3000 * np.arange(80)[:, None] + np.arange(frames)
    values = (index * 1103515245 + 12345) % 2**31 / 2**31
    return torch.from_numpy(((2 * values.astype(np.float32) - 1) * 1.7320508).astype(np.float32))[None]


def golden_flow() -> RegulatedFlow:
    state = {}
    with np.load(FOLDER / "weights.npz") as stored:
        for name in stored.files:
            if name.startswith("flow/"):
                key = name.removeprefix("flow/")
                for official, ours in RENAMED.items():
                    key = ours + key.removeprefix(official) if key.startswith(official) else key
                state[key] = torch.from_numpy(stored[name])
    flow = RegulatedFlow(TINY).eval()
    flow.load_state_dict(state, strict=True)
    flow.noise = golden_noise()
    return flow


@pytest.fixture(scope="module")
def vectors():
    with np.load(FOLDER / "vectors.npz") as stored:
        return {name: torch.from_numpy(stored[name]) for name in stored.files}


@pytest.fixture(scope="module")
def model():
    with torch.inference_mode():
        yield golden_flow()


def inputs(vectors):
    tokens = torch.cat((vectors["prompt_token"], vectors["token"]), dim=1)[0].long()
    return tokens, vectors["prompt_feat"][0], vectors["speaker_embedding"][0]


def test_encoder(model, vectors):
    tokens = inputs(vectors)[0]
    encoded = model.encoder(model.input_embedding(tokens[None]))
    torch.testing.assert_close(encoded, vectors["encoder.out"], atol=1e-5, rtol=1e-5)


def test_one_velocity(model, vectors):
    parts = [vectors[f"unet.{name}"] for name in ("x", "mu", "cond", "spks", "t")]
    velocity = model.unet(*parts, streaming=False)
    torch.testing.assert_close(velocity, vectors["unet.out"], atol=1e-5, rtol=1e-5)


def test_whole_sequence(model, vectors):
    mel = model.generate(*inputs(vectors))
    torch.testing.assert_close(mel, vectors["flow.mel_full"][0], atol=2e-4, rtol=0)


@pytest.mark.parametrize("count", [1, 2, 5, 40, 41])
def test_short_utterances_with_and_without_prompt(model, vectors, count):
    tokens, prompt_mel, embedding = inputs(vectors)
    frames = TINY.num_frames(count)
    assert model.generate(tokens[: 60 + count], prompt_mel, embedding).shape == (80, frames)
    assert model.generate(tokens[:count], prompt_mel[:0], embedding).shape == (80, frames)


def test_too_long_is_a_clear_error(model):
    with pytest.raises(SynthesisError, match="speech tokens"):
        model.generate(torch.zeros(9000, dtype=torch.long), torch.zeros(0, 80), torch.ones(192))


def test_padded_shapes_give_the_same(model, vectors):
    """What CUDA graphs do: one shape for several lengths, buffers used again."""
    inner = golden_flow()
    inner.use_graphs = True
    tokens, prompt_mel, embedding = inputs(vectors)
    for count in (320, 311, 100, 318, 61):
        mel = inner.generate(tokens[:count], prompt_mel, embedding)
        torch.testing.assert_close(
            mel, model.generate(tokens[:count], prompt_mel, embedding), atol=2e-4, rtol=0
        )
    assert len(inner._graphs._captured) == 3
    inner.train().eval()
    assert inner._graphs is None
