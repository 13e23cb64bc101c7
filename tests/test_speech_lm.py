"""The speech LM against the reference's numbers, and chunked against whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from vivace.config import SpeechLMConfig
from vivace.engine.interleave import Done, Feed, Interleaver, WaitForText
from vivace.layers.attention import rotary_tables
from vivace.models.speech_lm import SpeechLM

GOLDEN = Path(__file__).parent / "golden" / "cosyvoice3-tiny"
CONFIG = SpeechLMConfig(
    hidden_size=128,
    intermediate_size=256,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    text_vocab_size=151_936,
    speech_token_size=729,
    mix_ratio=(5, 15),
)
END_OF_PROMPT = 151_646

# float32 on both sides; the same sums in another order (fused attention, merged calls). Logits are of size
# ~10, float32 keeps 7 digits, and two layers lose less than one of them.
ATOL = 1e-4


@pytest.fixture(scope="module")
def vectors():
    with np.load(GOLDEN / "vectors.npz") as archive:
        wanted = ("text", "prompt_text", "prompt_token")
        return {k: archive[k] for k in archive.files if k in wanted or k.startswith(("lm.", "bistream."))}


@pytest.fixture(scope="module")
def lm():
    model = SpeechLM(CONFIG).eval()
    prefix = "llm/llm.model.model."
    state = {}
    with np.load(GOLDEN / "weights.npz") as archive:
        for key in archive.files:
            if key.startswith(prefix):
                state[key.removeprefix(prefix)] = torch.from_numpy(archive[key])
            elif key in ("llm/llm_decoder.weight", "llm/speech_embedding.weight"):
                state[key.removeprefix("llm/")] = torch.from_numpy(archive[key])
    model.load_state_dict(state)
    return model


def ids(values):
    return torch.as_tensor(np.asarray(values), dtype=torch.int64).reshape(1, -1)


def prefill(lm, vectors):
    text = ids(np.concatenate([vectors["prompt_text"][0], vectors["text"][0]]))
    parts = [
        lm.embed_speech(ids([CONFIG.sos_id])),
        lm.embed_text(text),
        lm.embed_speech(ids([CONFIG.task_id])),
        lm.embed_speech(ids(vectors["prompt_token"])),
    ]
    return torch.cat(parts, dim=1)


@torch.inference_mode()
def test_logits_with_cache_agree_with_the_reference(lm, vectors):
    cache = lm.new_cache(1, 8)  # far too small on purpose: it has to grow
    embeds = prefill(lm, vectors)
    got = [lm.logits(lm(embeds, cache)[:, -1])]
    got += [
        lm.logits(lm(lm.embed_speech(ids([token])), cache)[:, -1]) for token in vectors["lm.forced_tokens"]
    ]
    assert cache.length == embeds.shape[1] + 20
    want = torch.from_numpy(vectors["lm.logits"])
    assert want.std() > 1
    torch.testing.assert_close(torch.cat(got), want, atol=ATOL, rtol=0)


@torch.inference_mode()
@pytest.mark.parametrize("sizes", [[1] * 12, [5, 1, 6], [11, 1], [1, 11]])
def test_any_split_gives_the_same_hidden_states(lm, sizes):
    torch.manual_seed(0)
    embeds = torch.randn(2, 12, CONFIG.hidden_size)
    whole = lm(embeds)
    cache = lm.new_cache(2, 4)
    pieces = [lm(piece, cache) for piece in embeds.split(sizes, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, atol=ATOL, rtol=0)


@torch.inference_mode()
def test_a_forked_cache_continues_on_its_own(lm):
    torch.manual_seed(1)
    prompt, one, other = torch.randn(3, 1, 4, CONFIG.hidden_size)
    cache = lm.new_cache(1, 4)
    lm(prompt, cache)
    fork = cache.fork()
    first = lm(one, cache)
    second = lm(other, fork)
    torch.testing.assert_close(first, lm(torch.cat([prompt, one], dim=1))[:, 4:], atol=ATOL, rtol=0)
    torch.testing.assert_close(second, lm(torch.cat([prompt, other], dim=1))[:, 4:], atol=ATOL, rtol=0)


@torch.inference_mode()
def test_a_float16_models_stream_is_float32():
    """Its sums may be larger than any float16."""
    torch.manual_seed(3)
    model = SpeechLM(SpeechLMConfig(64, 64, 3, 1, 1, 64, 8, 8)).eval()
    for layer in model.layers:
        layer.mlp.down_proj.weight.mul_(3e4)
    half = SpeechLM(model.config).eval()
    half.load_state_dict(model.state_dict())
    half.half()
    stream = []
    half.norm.register_forward_pre_hook(lambda _, inputs: stream.append(inputs[0]))
    embeds = torch.randn(1, 40, 64).clamp(-3, 3) * 2e4
    whole, got = model(embeds), half(embeds.half())
    assert stream[0].abs().max() > torch.finfo(torch.float16).max
    assert got.dtype == torch.float16
    error = (whole - got.float()).square().mean() / whole.square().mean()
    assert error < 1e-4


@torch.inference_mode()
def test_bf16_model_tells_far_neighbouring_positions_apart():
    """Angles are float32 even in a bf16 model, where 513 and 514 are the same number."""
    torch.manual_seed(2)
    model = SpeechLM(SpeechLMConfig(64, 64, 1, 1, 1, 64, 8, 8)).eval()
    half = SpeechLM(model.config).eval()
    half.load_state_dict(model.state_dict())
    half.to(torch.bfloat16)
    embeds = torch.randn(1, 515, 64)
    whole, got = model(embeds), half(embeds.bfloat16()).float()
    # bf16 keeps 8 bits; what stands at one position must not drift as positions grow.
    error = (whole - got).abs().mean(dim=-1)[0]
    assert error[400:].mean() < 2 * error[:100].mean()
    assert rotary_tables(513, 1, 64, 1e6, torch.device("cpu"))[0].dtype == torch.float32


def run_stream(lm, vectors, name, *, as_reference):
    """Drive the interleaver as the recorder drove the reference: arg max over the speech tokens."""
    prompt_text = vectors["prompt_text"][0].tolist()
    border = prompt_text.index(END_OF_PROMPT) + 1
    prompt_speech = vectors["prompt_token"][0][: int(vectors[f"bistream.{name}.prompt_speech_len"])].tolist()
    total = int(vectors[f"bistream.{name}.piece_lengths"].sum())
    text = vectors["text"][0].tolist()[:total]
    limit = int(vectors[f"bistream.{name}.limit"])
    machine = Interleaver(
        CONFIG,
        instruction=prompt_text[:border],
        prompt_text=prompt_text[border:],
        prompt_speech=prompt_speech,
        as_reference=as_reference,
    )
    cache = lm.new_cache(1, 256)
    yielded, fed = [], []
    while not isinstance(action := machine.next_action(), Done):
        if isinstance(action, WaitForText):
            if text:
                machine.push_text([text.pop(0)])
            else:
                machine.finish()
            continue
        assert isinstance(action, Feed)
        embeds = [
            (lm.embed_text if piece.kind == "text" else lm.embed_speech)(ids(piece.ids))
            for piece in action.pieces
        ]
        fed += [(piece.kind, i) for piece in action.pieces for i in piece.ids]
        scores = lm.logits(lm(torch.cat(embeds, dim=1), cache)[0, -1])
        ends = action.final and len(machine.history) >= limit
        token = CONFIG.eos_id if ends else int(scores[: CONFIG.speech_token_size].argmax())
        speech = machine.accept(token)
        yielded += [] if speech is None else [speech]
    return machine, yielded, fed


@torch.inference_mode()
@pytest.mark.parametrize("name", ["long", "no_prompt_speech"])
def test_streamed_text_agrees_with_the_reference(lm, vectors, name):
    """The faults that the interleaver's docstring names included; ``short``'s is not copied."""
    machine, yielded, _ = run_stream(lm, vectors, name, as_reference=True)
    assert yielded == vectors[f"bistream.{name}.yielded"].tolist()
    assert machine.history[:-1] == vectors[f"bistream.{name}.decoded_with_fill"].tolist()


@torch.inference_mode()
def test_short_streamed_text_keeps_the_prompt_speech_that_the_reference_drops(lm, vectors):
    _, yielded, fed = run_stream(lm, vectors, "short", as_reference=False)
    prompt_speech = vectors["prompt_token"][0].tolist()
    assert [i for kind, i in fed if kind == "speech" and i < 729] == prompt_speech + yielded[:20]
    assert yielded[:20] != vectors["bistream.short.yielded"].tolist()
