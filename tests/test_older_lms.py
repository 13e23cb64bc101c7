"""The speech LMs of CosyVoice 2 and CosyVoice-300M against the golden vectors.

Tolerance: float32 on both sides with the same sums in another order, logits of size ~10.
"""

import numpy as np
import pytest
import torch

from tests.conftest import GOLDEN
from vivace.config import ConformerLMConfig, EncoderConfig, SpeechLMConfig
from vivace.models.conformer_lm import ConformerLM
from vivace.models.speech_lm import SpeechLM

ATOL = 1e-4
QWEN = SpeechLMConfig(
    hidden_size=128,
    intermediate_size=256,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    text_vocab_size=151_936,
    speech_token_size=729,
    num_special_rows=3,
    start_rows_apart=True,
    head_bias=True,
)
CONFORMER = ConformerLMConfig(
    text_vocab_size=600,
    speech_token_size=256,
    text_encoder=EncoderConfig(64, 64, heads=2, ff_size=128, num_blocks=2),
    decoder=EncoderConfig(64, 64, heads=2, ff_size=128, num_blocks=2),
)
CONFORMER_NAMES = {
    "text_encoder_affine_layer.": "text_projection.",
    "spk_embed_affine_layer.": "speaker_projection.",
    "llm.": "decoder.",
}


def weights(generation):
    with np.load(GOLDEN / f"cosyvoice{generation}-tiny" / "weights.npz") as data:
        return {k[4:]: torch.from_numpy(data[k]) for k in data.files if k.startswith("llm/")}


def vectors(generation):
    wanted = ("text", "prompt_text", "prompt_token", "speaker_embedding")
    with np.load(GOLDEN / f"cosyvoice{generation}-tiny" / "vectors.npz") as data:
        return {
            k: torch.from_numpy(data[k]).long() if k != "speaker_embedding" else torch.from_numpy(data[k])
            for k in data.files
            if k in wanted
        } | {k: torch.from_numpy(data[k]) for k in data.files if k.startswith("lm.")}


def join_start_rows(state):
    rows = state.pop("speech_embedding.weight"), state.pop("llm_embedding.weight")
    state["speech_embedding.weight"] = torch.cat(rows)
    return state


@pytest.fixture(scope="module")
def qwen():
    prefix = "llm.model.model."
    state = {
        name.removeprefix(prefix): value
        for name, value in join_start_rows(weights(2)).items()
        if name != "llm.model.lm_head.weight"
    }
    lm = SpeechLM(QWEN).eval()
    lm.load_state_dict(state)
    return lm


@pytest.fixture(scope="module")
def conformer():
    state = {}
    for name, value in join_start_rows(weights(1)).items():
        for official, ours in CONFORMER_NAMES.items():
            if name.startswith(official):
                name = ours + name.removeprefix(official)
                break
        if name.startswith("decoder."):
            name = name.replace(".norm1.", ".norm_mha.").replace(".norm2.", ".norm_ff.")
        state[name] = value
    lm = ConformerLM(CONFORMER).eval()
    lm.load_state_dict(state)
    return lm


def decode(lm, prefill, forced):
    """Logits after the prefill and after each forced token."""
    cache = lm.new_cache(1, 8)  # far too small on purpose: it has to grow
    scores = [lm.logits(lm(prefill, cache)[:, -1])]
    scores += [lm.logits(lm(lm.embed_speech(token.reshape(1, 1)), cache)[:, -1]) for token in forced]
    return torch.cat(scores)


def prefill(lm, given):
    start = torch.tensor([[lm.config.sos_id]])
    task = torch.cat((torch.tensor([[lm.config.task_id]]), given["prompt_token"]), dim=1)
    text = torch.cat((given["prompt_text"], given["text"]), dim=1)
    return torch.cat((lm.embed_speech(start), lm.embed_text(text), lm.embed_speech(task)), dim=1)


@torch.inference_mode()
def test_logits_of_cosyvoice2(qwen):
    given = vectors(2)
    scores = decode(qwen, prefill(qwen, given), given["lm.forced_tokens"])
    assert given["lm.logits"].std() > 1
    torch.testing.assert_close(scores, given["lm.logits"], atol=ATOL, rtol=0)


@torch.inference_mode()
def test_text_encoder_of_cosyvoice1(conformer):
    given = vectors(1)
    encoded = conformer.embed_text(torch.cat((given["prompt_text"], given["text"]), dim=1))
    torch.testing.assert_close(encoded, given["lm.text_encoded"], atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_logits_of_cosyvoice1(conformer):
    given = vectors(1)
    speaking = conformer.for_speaker(given["speaker_embedding"][0].numpy())
    embeds = prefill(speaking, given)
    torch.testing.assert_close(embeds, given["lm.input"], atol=1e-5, rtol=1e-5)
    scores = decode(speaking, embeds, given["lm.forced_tokens"])
    assert given["lm.logits"].std() > 0.5
    torch.testing.assert_close(scores, given["lm.logits"], atol=ATOL, rtol=0)


@torch.inference_mode()
def test_without_a_speaker_the_start_row_stands_alone(conformer):
    given = vectors(1)
    plain = prefill(conformer.for_speaker(None), given)
    spoken = prefill(conformer.for_speaker(given["speaker_embedding"][0].numpy()), given)
    assert torch.equal(plain, torch.cat((spoken[:, :1], spoken[:, 2:]), dim=1))


@torch.inference_mode()
@pytest.mark.parametrize("sizes", [[1] * 12, [5, 1, 6], [11, 1]])
def test_any_split_gives_the_same_hidden_states(conformer, sizes):
    torch.manual_seed(0)
    embeds = torch.randn(2, 12, 64)
    whole = conformer(embeds)
    cache = conformer.new_cache(2, 4)
    pieces = [conformer(piece, cache) for piece in embeds.split(sizes, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, atol=ATOL, rtol=0)


@torch.inference_mode()
def test_new_weights_are_seen(conformer):
    """Tables of projected distances are made anew when weights are loaded."""
    torch.manual_seed(0)
    embeds = torch.randn(1, 6, 64)
    other = ConformerLM(CONFORMER).eval()
    before = other(embeds)
    other.load_state_dict(conformer.state_dict())
    torch.testing.assert_close(other(embeds), conformer(embeds))
    assert not torch.allclose(before, conformer(embeds))
