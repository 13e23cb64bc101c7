"""Puts the trained parts together: the embedded model's folder in the official layout.

    python -m recipes.mini.assemble --parts PARTS --prompts PROMPTS --out src/vivace/assets/mini

``PARTS`` holds ``tokenizer.pt``, ``speaker.pt``, ``vocoder.pt``, ``flow.pt`` and ``lm.pt`` as the training scripts
write them; ``PROMPTS`` one ``NAME.wav`` and ``NAME.txt`` (its words) for each built-in voice. Weights are stored in
float16, the flow's adaptive norms in float8 (``shrink``).
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from recipes.mini.config import mini_config
from recipes.mini.export_onnx import main as export_onnx
from recipes.mini.shrink import shrink_flow
from vivace.checkpoint import open_model, save_official
from vivace.config import Limits, ModelConfig, VocoderConfig
from vivace.models.flow import FlowModel
from vivace.models.hift import CausalHiFT
from vivace.models.prompt_encoders import SpeakerEncoder, SpeechTokenizer
from vivace.models.speech_lm import SpeechLM
from vivace.voice import make_voice, save_voice

DEFAULT_VOICE = "heart"

Module = TypeVar("Module", bound=nn.Module)


def load_part(path: Path) -> dict[str, Any]:
    """One checkpoint, as plain tensors and values."""
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return content


def fill(module: Module, state: dict[str, torch.Tensor]) -> Module:
    """Load weights, every name must match."""
    module.load_state_dict({name: value.float() for name, value in state.items()})
    return module.eval()


def read_config(parts: Path) -> ModelConfig:
    """The mini's sizes, with what the training scripts recorded."""
    codes = int(load_part(parts / "flow.pt")["codes"])
    config = dataclasses.replace(mini_config(codes), default_voice=DEFAULT_VOICE)
    vocoder = load_part(parts / "vocoder.pt")["config"]
    return dataclasses.replace(config, vocoder=VocoderConfig(**vocoder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    parts, out = args.parts, args.out
    config = read_config(parts)
    lm = fill(SpeechLM(config.lm), load_part(parts / "lm.pt")["state"])
    flow = fill(FlowModel(config.flow), load_part(parts / "flow.pt")["state"])
    vocoder = fill(CausalHiFT(config.vocoder), load_part(parts / "vocoder.pt")["model"])
    save_official(out, config, lm, flow, vocoder, torch.float16)
    print(f"flow.pt: adaptive norms in float8, relative error {shrink_flow(out / 'flow.pt', flow):.1e}")
    export_onnx(
        [
            "--tokenizer",
            str(parts / "tokenizer.pt"),
            "--speaker",
            str(parts / "speaker.pt"),
            "--out",
            str(out),
        ]
    )
    voices = out / "voices"
    shutil.rmtree(voices, ignore_errors=True)
    voices.mkdir()
    tokenizer = SpeechTokenizer(out / "speech_tokenizer_v3.onnx", config.lm.speech_token_size)
    encoder = SpeakerEncoder(out / "campplus.onnx")
    for prompt in sorted(args.prompts.glob("*.wav")):
        voice = make_voice(
            prompt,
            prompt.with_suffix(".txt").read_text().strip(),
            name=prompt.stem,
            config=config,
            speech_tokenizer=tokenizer,
            speaker_encoder=encoder,
            limits=Limits(),
            consent=True,
        )
        save_voice(voice, voices / f"{voice.name}.safetensors")
        print(f"{voice.name}: {len(voice.speech_tokens)} tokens, {voice.prompt_text}")
    open_model(out)
    total = 0
    for path in sorted(out.rglob("*")):
        if path.is_file():
            total += path.stat().st_size
            print(f"{path.stat().st_size / 1e6:7.2f} MB  {path.relative_to(out)}")
    print(f"{total / 1e6:7.2f} MB in all")


if __name__ == "__main__":
    main()
