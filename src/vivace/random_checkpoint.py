"""A complete official-layout model folder with random weights.

For speed measurements and tests: every file is there and every size is real, the sound is noise. Weights are
scaled so that activations keep their size through the layers, in bf16 too.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from vivace.checkpoint import STAGES, Stage, weight_shapes, write_official
from vivace.checkpoint.files import (
    GENERATIONS,
    RANK_FILES,
    SPEAKER_ENCODER,
    SPEECH_TOKENIZERS,
    TOKENIZER_FOLDER,
    VOICES,
)
from vivace.checkpoint.model import DTYPES
from vivace.checkpoint.native import new_folder
from vivace.config import (
    ConformerLMConfig,
    DiTConfig,
    EncoderConfig,
    FlowConfig,
    ModelConfig,
    RegulatedFlowConfig,
    SpeechLMConfig,
    UNetConfig,
    UNetFlowConfig,
    VocoderConfig,
)
from vivace.errors import ModelFolderError
from vivace.onnx_writer import FLOAT, INT32, GraphWriter
from vivace.text.rank_tokenizer import RankTokenizer
from vivace.text.tokenizer import TextTokenizer

_MERGES = ("t h", "th e", "i n", "e r", "a n", "Ġ t", "Ġt h", "Ġth e", "Ġ a", "o u", "r e", "Ġ s", "in g")
_VOICE_TOKENS = 75  # three seconds
_VOICE_TEXT = "A voice made of noise."
_TINY_RANKS = 256 + len(_MERGES)
_WHISPER_SPECIALS = 1609
"""Whisper's special tokens: start and end, 100 languages, tasks, and 1501 times."""


def full_config(generation: int = 3) -> ModelConfig:
    """The sizes of Fun-CosyVoice3-0.5B, CosyVoice2-0.5B or CosyVoice-300M (50 Hz)."""
    if generation == 1:
        encoder = EncoderConfig(512, 512, heads=8, ff_size=2048, num_blocks=6)
        return _first_generation(
            "random-full",
            ConformerLMConfig(
                text_vocab_size=51_866,
                speech_token_size=4096,
                text_encoder=EncoderConfig(512, 1024, heads=16, ff_size=4096, num_blocks=6),
                decoder=EncoderConfig(1024, 1024, heads=16, ff_size=4096, num_blocks=14),
            ),
            encoder,
            UNetConfig((256, 256), dim_head=64, heads=8, num_blocks=4, num_mid_blocks=12),
            channels=512,
            f0_channels=512,
        )
    lm = SpeechLMConfig(
        hidden_size=896,
        intermediate_size=4864,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        text_vocab_size=151_936,
        speech_token_size=6561,
    )
    vocoder = VocoderConfig(base_channels=512, f0_cond_channels=512)
    if generation == 2:
        unet = UNetConfig(
            (256,), dim_head=64, heads=8, num_blocks=4, num_mid_blocks=12, static_chunk_frames=50
        )
        encoder = EncoderConfig(512, 512, heads=8, ff_size=2048, num_blocks=6)
        return _second_generation("random-full", lm, encoder, unet, vocoder)
    dit = DiTConfig(dim=1024, depth=22, heads=16, dim_head=64, ff_mult=2)
    flow = FlowConfig(dit=dit, vocab_size=6561, lookahead_channels=1024)
    return ModelConfig(generation=3, name="random-full", lm=lm, flow=flow, vocoder=vocoder)


def tiny_config(generation: int = 3) -> ModelConfig:
    """A model of about a million weights with the same structure."""
    if generation == 1:
        encoder = EncoderConfig(64, 64, heads=2, ff_size=128, num_blocks=2)
        return _first_generation(
            "random-tiny",
            ConformerLMConfig(_TINY_RANKS + _WHISPER_SPECIALS, 243, text_encoder=encoder, decoder=encoder),
            encoder,
            UNetConfig((32, 32), dim_head=16, heads=2, num_blocks=1, num_mid_blocks=2),
            channels=64,
            f0_channels=32,
        )
    lm = SpeechLMConfig(
        hidden_size=128,
        intermediate_size=256,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        text_vocab_size=640,
        speech_token_size=729,
    )
    vocoder = VocoderConfig(base_channels=64, f0_cond_channels=32)
    if generation == 2:
        unet = UNetConfig((32,), dim_head=16, heads=2, num_blocks=1, num_mid_blocks=2, static_chunk_frames=50)
        encoder = EncoderConfig(64, 64, heads=2, ff_size=128, num_blocks=1)
        return _second_generation("random-tiny", lm, encoder, unet, vocoder)
    dit = DiTConfig(dim=128, depth=2, heads=2, dim_head=64, ff_mult=2)
    flow = FlowConfig(dit=dit, vocab_size=729, lookahead_channels=64)
    return ModelConfig(generation=3, name="random-tiny", lm=lm, flow=flow, vocoder=vocoder)


def _second_generation(
    name: str, lm: SpeechLMConfig, encoder: EncoderConfig, unet: UNetConfig, vocoder: VocoderConfig
) -> ModelConfig:
    return ModelConfig(
        generation=2,
        name=name,
        lm=replace(lm, num_special_rows=3, start_rows_apart=True, head_bias=True),
        flow=UNetFlowConfig(encoder, unet, vocab_size=lm.speech_token_size, input_size=encoder.input_size),
        vocoder=replace(vocoder, causal=False, source_phase="linear"),
        mel_fmax_hz=8000.0,
    )


def _first_generation(
    name: str,
    lm: ConformerLMConfig,
    encoder: EncoderConfig,
    unet: UNetConfig,
    *,
    channels: int,
    f0_channels: int,
) -> ModelConfig:
    return ModelConfig(
        generation=1,
        name=name,
        lm=lm,
        flow=RegulatedFlowConfig(
            encoder, unet, vocab_size=lm.speech_token_size, token_rate_hz=50, input_size=encoder.input_size
        ),
        vocoder=VocoderConfig(
            base_channels=channels,
            f0_cond_channels=f0_channels,
            sampling_rate=22_050,
            upsample_rates=(8, 8),
            upsample_kernel_sizes=(16, 16),
            source_resblock_kernel_sizes=(7, 11),
            source_resblock_dilation_sizes=((1, 3, 5), (1, 3, 5)),
            causal=False,
            source_phase="sample",
            fade_frames=20,
        ),
        sample_rate_hz=22_050,
        token_rate_hz=50,
        chunk_tokens=50,
        mel_fmax_hz=8000.0,
    )


SIZES = {"full": full_config, "tiny": tiny_config}


def write_random_checkpoint(
    out: str | Path, size: str = "tiny", seed: int = 0, dtype: str = "bfloat16", generation: int = 3
) -> ModelConfig:
    """Writes a folder that :func:`vivace.checkpoint.open_model` reads like an official one.

    Args:
        out: new folder; it appears complete or not at all.
        size: ``full`` (1.7 GB in bfloat16) or ``tiny``.
        seed: same seed, same weights, whatever the dtype is rounded to.
        dtype: of the stored weights; official files are float32.
        generation: 3, 2 or 1 (CosyVoice-300M).

    Raises:
        ModelFolderError: an unknown size, dtype or generation, ``out`` exists, or the disk is full.
    """
    if size not in SIZES:
        raise ModelFolderError(
            f"--size must be one of {', '.join(SIZES)}", code="unsupported_value", param="size"
        )
    if dtype not in DTYPES:
        raise ModelFolderError(
            f"--dtype must be one of {', '.join(DTYPES)}", code="unsupported_value", param="dtype"
        )
    if generation not in GENERATIONS:
        raise ModelFolderError("--generation must be 1, 2 or 3", code="unsupported_value", param="generation")
    config = SIZES[size](generation)
    try:
        with new_folder(Path(out)) as folder:
            write_official(folder, config, random_weights(config, seed, DTYPES[dtype]))
            tokenizer = _write_ranks(folder, config) if generation == 1 else _write_tokenizer(folder)
            (folder / SPEAKER_ENCODER).write_bytes(speaker_encoder(config, seed))
            (folder / SPEECH_TOKENIZERS[config.generation][0]).write_bytes(speech_tokenizer(config, seed))
            torch.save(_voices(config, seed, tokenizer.encode(_VOICE_TEXT)), folder / VOICES)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        raise ModelFolderError(
            f"{out}: cannot be written; free some space or choose another place"
        ) from error
    return config


def random_weights(config: ModelConfig, seed: int, dtype: torch.dtype) -> dict[Stage, dict[str, Tensor]]:
    """Every weight of every stage, our names. Each is a function of (seed, name) alone."""
    return {
        stage: {
            name: _weight(f"{seed}/{stage}/{name}", name, shape).to(dtype)
            for name, shape in weight_shapes(config, stage).items()
        }
        for stage in STAGES
    }


def _weight(key: str, name: str, shape: tuple[int, ...]) -> Tensor:
    """One weight in float32: inputs of unit size give outputs of about unit size."""
    if name.endswith(".alpha") or (len(shape) == 1 and name.endswith(".weight")):
        return torch.ones(shape)
    generator = torch.Generator().manual_seed(_seed(key))
    if name == "f0_predictor.classifier.bias":
        return torch.full(shape, 150.0)  # Hz: voiced, so that the source does its work
    if name.endswith((".bias", "pos_bias_u", "pos_bias_v")):
        return 0.02 * torch.randn(shape, generator=generator)
    if name.endswith(("embed_tokens.weight", "embedding.weight")):
        return torch.randn(shape, generator=generator)
    fan_in = math.prod(shape[1:])
    return torch.randn(shape, generator=generator) * (_gain(name) / math.sqrt(fan_in))


def _seed(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")


def _gain(name: str) -> float:
    """Smaller where a layer adds to a running sum, so that depth does not make it grow."""
    if name.endswith(("o_proj.weight", "down_proj.weight", "to_out.0.weight", "ff.2.weight", "net.2.weight")):
        return 0.2
    if name.endswith(("linear_out.weight", "w_2.weight")):
        return 0.2
    if "attn_norm.linear" in name or "norm_out.linear" in name:
        return 0.3
    if name.startswith(("resblocks", "source_resblocks")):
        return 0.3
    if name.startswith("conv_post"):
        return 0.1  # its exponential is the spectrum's magnitude
    return 1.0


def _write_tokenizer(model_folder: Path) -> TextTokenizer:
    """Byte-level tokenizer files in Qwen2's layout: the 256 bytes and a few English merges."""
    folder = model_folder / TOKENIZER_FOLDER
    entries = sorted(ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in _MERGES]
    vocab = {entry: index for index, entry in enumerate(entries)}
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    (folder / "merges.txt").write_text("\n".join(("#version: 0.2", *_MERGES)) + "\n", encoding="utf-8")
    return TextTokenizer.from_folder(folder)


def _write_ranks(folder: Path, config: ModelConfig) -> RankTokenizer:
    """A rank file in Whisper's layout: the 256 bytes, the merges, and numbered fillers up to the vocabulary's size."""
    merges = [merge.replace(" ", "").replace("Ġ", " ").encode() for merge in _MERGES]
    ranks = [bytes([byte]) for byte in range(256)] + merges
    ranks += [
        b"\x00filler%d" % index for index in range(config.lm.text_vocab_size - _WHISPER_SPECIALS - len(ranks))
    ]
    lines = (b"%b %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(ranks))
    path = folder / RANK_FILES[0]
    path.write_bytes(b"".join(lines))
    return RankTokenizer.from_file(path, config.lm.text_vocab_size)


def _numbers(key: str, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(_seed(key)).standard_normal(shape).astype(np.float32)


def speaker_encoder(config: ModelConfig, seed: int) -> bytes:
    """An ONNX file with campplus' inputs and outputs: a random projection of the energy over time."""
    graph = GraphWriter("random_speaker_encoder")
    graph.input("input", FLOAT, [1, "frames", 80])
    graph.constant("projection", _numbers(f"{seed}/speaker", 80, config.flow.spk_embed_dim) / 9)
    graph.node("Mul", ["input", "input"], "squares")
    graph.node("ReduceMean", ["squares"], "spread", {"axes": [1], "keepdims": 0})
    graph.node("MatMul", ["spread", "projection"], "output")
    graph.output("output", FLOAT, [1, config.flow.spk_embed_dim])
    return graph.serialise()


def speech_tokenizer(config: ModelConfig, seed: int) -> bytes:
    """An ONNX file with the speech tokenizer's inputs and outputs: 4 frames of 10 ms (2 at 50 Hz) to one token.

    A random convolution, each channel rounded to one of three levels (finite scalar quantisation, 3^k codes).
    """
    digits, stride = int(math.log(config.flow.vocab_size, 3) + 1e-9), 100 // config.token_rate_hz
    graph = GraphWriter("random_speech_tokenizer")
    graph.input("feats", FLOAT, [1, 128, "frames"])
    graph.input("feats_length", INT32, [1])
    graph.constant("kernel", _numbers(f"{seed}/tokenizer", digits, 128, 4) / 4)
    graph.constant("one", np.ones(1, np.float32))
    graph.constant("radix", (3.0 ** np.arange(digits)).astype(np.float32)[:, None])
    graph.node(
        "Conv", ["feats", "kernel"], "channels", {"kernel_shape": [4], "strides": [stride], "pads": [0, 3]}
    )
    graph.node("Tanh", ["channels"], "bounded")
    graph.node("Round", ["bounded"], "levels")
    graph.node("Add", ["levels", "one"], "digits")
    graph.node("Transpose", ["digits"], "rows", {"perm": [0, 2, 1]})
    graph.node("MatMul", ["rows", "radix"], "codes")
    graph.constant("last_axis", np.array([2], np.int64))
    graph.node("Squeeze", ["codes", "last_axis"], "flat")
    graph.node("Cast", ["flat"], "indices", {"to": INT32})
    graph.output("indices", INT32, [1, "tokens"])
    return graph.serialise()


def _voices(config: ModelConfig, seed: int, text_tokens: list[int]) -> dict[str, dict[str, Tensor]]:
    """One stored voice, as the reference's front end stores it."""
    rng = np.random.default_rng(seed)
    tokens = torch.from_numpy(rng.integers(0, config.flow.vocab_size, (1, _VOICE_TOKENS)).astype(np.int32))
    frames = config.flow.num_frames(_VOICE_TOKENS)
    mel = torch.from_numpy(_numbers(f"{seed}/voice-mel", 1, frames, config.flow.output_size) - 4)
    embedding = torch.from_numpy(_numbers(f"{seed}/voice", 1, config.flow.spk_embed_dim))
    text = torch.tensor([text_tokens], dtype=torch.int32)
    return {
        "noise": {
            "prompt_text": text,
            "prompt_text_len": torch.tensor([text.shape[1]], dtype=torch.int32),
            "llm_prompt_speech_token": tokens,
            "llm_prompt_speech_token_len": torch.tensor([_VOICE_TOKENS], dtype=torch.int32),
            "flow_prompt_speech_token": tokens,
            "flow_prompt_speech_token_len": torch.tensor([_VOICE_TOKENS], dtype=torch.int32),
            "prompt_speech_feat": mel,
            "prompt_speech_feat_len": torch.tensor([frames], dtype=torch.int32),
            "llm_embedding": embedding,
            "flow_embedding": embedding,
        }
    }
