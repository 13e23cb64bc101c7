"""The flow of CosyVoice 2 against the reference implementation's vectors, and its stream against the whole.

Tolerances as in ``test_flow``: a velocity is good to a few float32 roundings, ten guided steps amplify them. The
encoder's values reach 4, and its width of 512 adds more terms to each sum.
"""

import numpy as np
import pytest
import torch

from tests.conftest import GOLDEN
from vivace.config import EncoderConfig, UNetConfig, UNetFlowConfig
from vivace.models.flow_encoder import UpsampleEncoder
from vivace.models.flow_unet import UNetFlow
from vivace.models.unet_stream import PreparedUNet

FOLDER = GOLDEN / "cosyvoice2-tiny"
TINY = UNetFlowConfig(
    encoder=EncoderConfig(512, 512, heads=8, ff_size=128, num_blocks=1),
    unet=UNetConfig((32,), dim_head=16, heads=2, num_blocks=1, num_mid_blocks=2, static_chunk_frames=50),
    vocab_size=729,
)
RENAMED = {"spk_embed_affine_layer.": "speaker_projection.", "decoder.estimator.": "unet."}


@pytest.fixture(scope="module")
def vectors():
    with np.load(FOLDER / "vectors.npz") as stored:
        wanted = ("token", "prompt_token", "prompt_feat", "speaker_embedding")
        names = [n for n in stored.files if n in wanted or n.startswith(("encoder.", "unet.", "flow."))]
        return {name: torch.from_numpy(stored[name]) for name in names}


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
    flow = UNetFlow(TINY).eval()
    flow.load_state_dict(state, strict=True)
    with torch.inference_mode():
        yield flow


def inputs(vectors):
    tokens = torch.cat((vectors["prompt_token"], vectors["token"]), dim=1)[0].long()
    return tokens, vectors["prompt_feat"][0], vectors["speaker_embedding"][0]


@pytest.mark.parametrize("mode", ["full", "streaming"])
def test_encoder(model, vectors, mode):
    tokens = torch.cat((vectors["prompt_token"], vectors["token"]), dim=1).long()
    encoded = model.encoder(model.input_embedding(tokens), None, mode == "streaming")
    torch.testing.assert_close(encoded, vectors[f"encoder.{mode}"], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", ["full", "streaming"])
def test_one_velocity(model, vectors, mode):
    parts = [vectors[f"unet.{name}"] for name in ("x", "mu", "cond", "spks", "t")]
    velocity = model.unet(*parts, streaming=mode == "streaming")
    torch.testing.assert_close(velocity, vectors[f"unet.out_{mode}"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", ["full", "streaming_final"])
def test_whole_sequence(model, vectors, mode):
    mel = model.generate(*inputs(vectors), streaming=mode != "full")
    torch.testing.assert_close(mel, vectors[f"flow.mel_{mode}"][0], atol=2e-4, rtol=0)


def test_partial_sequence(model, vectors):
    tokens, prompt_mel, embedding = inputs(vectors)
    mel = model.generate(tokens[:75], prompt_mel, embedding, streaming=True, context=tokens[75:78])
    torch.testing.assert_close(mel, vectors["flow.mel_streaming_partial"][0], atol=2e-4, rtol=0)


@pytest.mark.parametrize("sizes", [(133,), (30, 20, 1, 0, 82), (27, 26, 25, 25, 30), (1,) * 133])
def test_any_split_equals_the_whole(model, vectors, sizes):
    tokens, prompt_mel, embedding = inputs(vectors)
    stream = model.new_stream(embedding, prompt_mel, capacity_frames=8)
    pieces = tokens.split(list(sizes))
    parts = [
        model.step(stream, piece.tolist(), index == len(pieces) - 1) for index, piece in enumerate(pieces)
    ]
    whole = vectors["flow.mel_streaming_final"][0]
    assert stream.finished
    assert stream.num_frames == 2 * len(tokens)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=2e-4, rtol=0)


def test_later_tokens_never_change_finished_frames(model, vectors):
    tokens, prompt_mel, embedding = inputs(vectors)
    one, other = (model.new_stream(embedding, prompt_mel) for _ in range(2))
    changed = tokens.clone()
    changed[78:] = (changed[78:] + 1) % 729
    first = model.step(one, tokens[:100].tolist(), is_last=False)
    second = model.step(other, changed[:100].tolist(), is_last=False)
    assert torch.equal(first[:, :90], second[:, :90])
    assert first.shape[1] == 90  # 75 tokens with their look-ahead, without the prompt's 60 frames


def test_a_fork_goes_on_alone(model, vectors):
    tokens, prompt_mel, embedding = inputs(vectors)
    stream = model.new_stream(embedding, prompt_mel, capacity_frames=60)
    model.step(stream, tokens[:60].tolist(), is_last=False)
    fork = stream.fork(200)
    rest = model.step(stream, tokens[60:].tolist(), is_last=True)
    again = model.step(fork, tokens[60:].tolist(), is_last=True)
    assert torch.equal(rest, again)
    assert fork.num_bytes > 0


def test_an_utterance_that_ends_inside_the_lookahead(model, vectors):
    tokens, prompt_mel, embedding = inputs(vectors)
    for count in (51, 53, 75, 76):
        whole = model.generate(tokens[:count], prompt_mel, embedding, streaming=True)
        stream = model.new_stream(embedding, prompt_mel)
        parts = [model.step(stream, tokens[:40].tolist(), is_last=False)]
        parts.append(model.step(stream, tokens[40:count].tolist(), is_last=True))
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=2e-4, rtol=0)


def test_the_cost_of_a_chunk_is_flat(model, vectors, monkeypatch):
    """Each Euler step of each chunk runs the chunk's own frames, the encoder its own tokens."""
    frames, tokens = [], []
    velocity, encode = PreparedUNet.velocity, UpsampleEncoder.step

    def counted_velocity(unet, x, *rest):
        frames.append(x.shape[1])
        return velocity(unet, x, *rest)

    def counted_encode(encoder, state, x, *rest):
        tokens.append(x.shape[1])
        return encode(encoder, state, x, *rest)

    monkeypatch.setattr(PreparedUNet, "velocity", counted_velocity)
    monkeypatch.setattr(UpsampleEncoder, "step", counted_encode)
    _, prompt_mel, embedding = inputs(vectors)
    stream = model.new_stream(embedding, prompt_mel)
    for _ in range(12):
        model.step(stream, [3] * 25, is_last=False)
    assert frames == [50] * 10 * 11
    assert tokens == [25 + 3] + [2 + 25 + 3] * 10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_streams(vectors, dtype):
    tokens, prompt_mel, embedding = inputs(vectors)
    flow = UNetFlow(TINY).to(dtype).eval()
    assert flow.noise.dtype == torch.float32
    stream = flow.new_stream(embedding, prompt_mel)
    mel = torch.cat([flow.step(stream, part.tolist(), len(part) < 50) for part in tokens.split(50)], dim=1)
    whole = flow.generate(tokens, prompt_mel, embedding, streaming=True)
    assert mel.dtype == torch.float32
    # 8 or 11 bits of each value, through ten guided steps of values around 3.
    torch.testing.assert_close(mel, whole, atol=0.2 if dtype == torch.bfloat16 else 0.05, rtol=0)


def test_padded_shapes_give_the_same_offline(model, vectors):
    tokens, prompt_mel, embedding = inputs(vectors)
    model.use_graphs = True
    try:
        mel = model.generate(tokens, prompt_mel, embedding, streaming=False)
    finally:
        model.use_graphs = None
    torch.testing.assert_close(mel, vectors["flow.mel_full"][0], atol=2e-4, rtol=0)
