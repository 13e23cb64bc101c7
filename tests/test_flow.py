"""The flow against the reference implementation's vectors.

Tolerance: float32 with other sums' order than the reference. One velocity estimate is good to a few float32
roundings (1e-5 of values around 1); ten guided steps add and amplify them, so mel is held to 2e-4.
"""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from vivace.config import DiTConfig, FlowConfig
from vivace.errors import SynthesisError
from vivace.models.flow import FlowModel, time_grid

FOLDER = Path(__file__).parent / "golden" / "cosyvoice3-tiny"
TINY = FlowConfig(
    dit=DiTConfig(dim=128, depth=2, heads=2, dim_head=64, ff_mult=2), vocab_size=729, lookahead_channels=64
)
RENAMED = {
    "spk_embed_affine_layer.": "speaker_projection.",
    "pre_lookahead_layer.": "lookahead.",
    "decoder.estimator.": "dit.",
}


@pytest.fixture(scope="module")
def vectors():
    with np.load(FOLDER / "vectors.npz") as stored:
        return {name: torch.from_numpy(stored[name]) for name in stored.files}


@pytest.fixture(scope="module")
def model():
    state = {}
    with np.load(FOLDER / "weights.npz") as stored:
        for name in stored.files:
            if name.startswith("flow/"):
                key = name.removeprefix("flow/")
                for official, ours in RENAMED.items():
                    key = ours + key.removeprefix(official) if key.startswith(official) else key
                state[key] = torch.from_numpy(stored[name])
    flow = FlowModel(TINY).eval()
    flow.load_state_dict(state, strict=True)
    with torch.inference_mode():
        yield flow


def inputs(vectors):
    tokens = torch.cat((vectors["prompt_token"], vectors["token"]), dim=1)[0].long()
    return tokens, vectors["prompt_feat"][0], vectors["speaker_embedding"][0]


def test_lookahead(model, vectors):
    tokens = vectors["token"].long()
    whole = model.lookahead(model.input_embedding(tokens))
    torch.testing.assert_close(whole, vectors["lookahead.final"], atol=1e-5, rtol=1e-5)
    embedded = model.input_embedding(tokens)
    part = model.lookahead(embedded[:, :-3], embedded[:, -3:])
    torch.testing.assert_close(part, vectors["lookahead.partial"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", ["streaming", "full"])
def test_one_velocity(model, vectors, mode):
    parts = [vectors[f"dit.{name}"] for name in ("x", "mu", "cond", "spks", "t")]
    velocity = model.dit(*parts, streaming=mode == "streaming")
    torch.testing.assert_close(velocity, vectors[f"dit.out_{mode}"], atol=1e-5, rtol=1e-5)


def test_padded_rows_equal_rows_alone(model, vectors):
    x, mu, cond, spks, t = (vectors[f"dit.{name}"] for name in ("x", "mu", "cond", "spks", "t"))
    for streaming in (False, True):
        padded = model.dit(x, mu, cond, spks, t, streaming, torch.tensor([120, 73]))
        alone = model.dit(x[1:, :, :73], mu[1:, :, :73], cond[1:, :, :73], spks[1:], t[1:], streaming)
        torch.testing.assert_close(padded[1:, :, :73], alone, atol=1e-5, rtol=1e-5)


def test_noise(model, vectors):
    assert model.noise.shape == (1, 80, 15000)
    assert torch.equal(model.noise[0, :, :64], vectors["flow.noise_head"])


def test_time_accumulates_float_additions():
    steps = time_grid(10)
    assert steps[0][0] == 0.0
    for (t, dt), (following, _) in itertools.pairwise(steps):
        assert following == float(np.float32(t) + np.float32(dt))
    assert sum(steps[-1]) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("mode", ["full", "streaming_final"])
def test_whole_sequence(model, vectors, mode):
    mel = model.generate(*inputs(vectors), streaming=mode != "full")
    torch.testing.assert_close(mel, vectors[f"flow.mel_{mode}"][0], atol=2e-4, rtol=0)


def test_partial_sequence(model, vectors):
    tokens, prompt_mel, embedding = inputs(vectors)
    mel = model.generate(tokens[:75], prompt_mel, embedding, streaming=True, context=tokens[75:78])
    torch.testing.assert_close(mel, vectors["flow.mel_streaming_partial"][0], atol=2e-4, rtol=0)


def test_half_precision_keeps_rotary_angles_and_noise():
    flow = FlowModel(TINY).half()
    assert flow.dit.rotary_embed.inv_freq.dtype == torch.float32
    assert flow.noise.dtype == torch.float32
    assert flow.dit.proj_out.weight.dtype == torch.float16


def test_too_long_is_a_clear_error(model):
    with pytest.raises(SynthesisError, match="7500 speech tokens"):
        model.generate(torch.zeros(7501, dtype=torch.long), torch.zeros(0, 80), torch.ones(192), True)
