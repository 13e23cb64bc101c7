"""Runs a checkout of the reference implementation for ``compare_reference``, in an environment of its own.

Its streaming driver, language model, flow and vocoder run as they are, with a folder of weights in the official
layout of any generation. Prints a JSON document after every run, the medians so far. Imports nothing of Vivace.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

CONFIGURATIONS = ("cosyvoice3.yaml", "cosyvoice2.yaml", "cosyvoice.yaml")
END_OF_PROMPT = 151_646
"""Text token that the reference asks for in CosyVoice 3, whatever the vocabulary."""

NEVER_NEEDED = frozenset(
    {"gdown", "hydra", "lightning", "modelscope", "pyworld", "rootutils", "wget", "whisper"}
)
"""Packages for training and the front end: replaced by empty modules even where they are installed."""
OFTEN_MISSING = frozenset({"inflect", "librosa", "matplotlib", "onnxruntime", "tokenizers", "torchaudio"})
"""Packages that are imported but not used for speech: replaced where they are missing."""


def main() -> None:
    """Prints what ``measure`` finds, for each precision."""
    threading.excepthook = end_process
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repo", type=Path, required=True)
    parser.add_argument("--matcha", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--text-tokens", type=int, required=True)
    parser.add_argument("--runs", type=int, required=True)
    parser.add_argument("--precision", action="append", choices=("float32", "float16"), required=True)
    options = parser.parse_args()
    reference = Reference(options)
    for precision in options.precision:
        for document in reference.measure(precision, options.runs):
            print(json.dumps(document), flush=True)


def end_process(failure: Any) -> None:
    """A thread of the reference that dies leaves its streaming driver to wait for ever: ends the process instead."""
    threading.__excepthook__(failure)
    sys.stderr.flush()
    os._exit(1)


class Reference:
    """Its own model of the folder's generation; only the sampler is wrapped, to fix how many tokens are spoken."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch

        self.on_gpu = options.device != "cpu"
        if not self.on_gpu:
            torch.cuda.is_available = lambda: False
        torch.manual_seed(0)
        self.model, self.sample_rate_hz = load(options.repo, options.matcha, options.model)
        self.first_hop_tokens = getattr(self.model, "token_hop_len", None)
        hold_back_end(self.model.llm, options.tokens)
        voice = next(iter(torch.load(options.model / "spk2info.pt", weights_only=True).values()))
        text = torch.arange(options.text_tokens, dtype=torch.int32)[None]
        if type(self.model).__name__ == "CosyVoice3Model":
            text[0, 0] = END_OF_PROMPT
        self.inputs = {
            name: voice[name] for name in ("prompt_text", "llm_prompt_speech_token", "llm_embedding")
        }
        self.inputs["text"] = text
        flow = ("flow_prompt_speech_token", "prompt_speech_feat", "flow_embedding")
        self.flow_inputs = {name: voice[name] for name in flow}

    def measure(self, precision: str, runs: int) -> Iterator[dict[str, Any]]:
        """Medians after each of ``runs`` runs; one utterance ahead of them warms up."""
        import torch

        self.model.fp16 = precision == "float16"
        self.speak()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        spoken, speeds = [], []
        for run in range(1, runs + 1):
            spoken.append(self.speak())
            speeds.append(self.tokens_per_second())
            yield {
                "ttfb_ms_p50": round(median(first for first, _, _ in spoken) * 1e3, 2),
                "rtf": round(median(wall / audio for _, wall, audio in spoken), 5),
                "tps": round(median(speeds), 1),
                "audio_seconds": round(median(audio for _, _, audio in spoken), 2),
                "peak_memory_bytes": torch.cuda.max_memory_allocated() if self.on_gpu else None,
                "precision": "float32" if precision == "float32" else "float16 autocast",
                "runs": run,
                "torch": torch.__version__,
            }

    def speak(self) -> tuple[float, float, float]:
        """One streamed utterance: seconds to the first audio, to the end, and of audio."""
        if self.first_hop_tokens is not None:
            self.model.token_hop_len = self.first_hop_tokens  # grows with every chunk and is never set back
        started, first, samples = time.perf_counter(), 0.0, 0
        for part in self.model.tts(**self.inputs, **self.flow_inputs, stream=True):
            first = first or time.perf_counter() - started
            samples += part["tts_speech"].shape[1]
        return first, time.perf_counter() - started, samples / self.sample_rate_hz

    def tokens_per_second(self) -> float:
        """Of the language model alone."""
        model, inputs = self.model, self.inputs
        started = time.perf_counter()
        model.tts_speech_token_dict["lm"], model.llm_end_dict["lm"] = [], False
        prompt = (inputs["prompt_text"], inputs["llm_prompt_speech_token"], inputs["llm_embedding"])
        model.llm_job(inputs["text"], *prompt, "lm")
        return len(model.tts_speech_token_dict.pop("lm")) / (time.perf_counter() - started)


def hold_back_end(llm: Any, num_tokens: int) -> None:
    """Lets no end come before ``num_tokens`` tokens, and one then. The choice of tokens stays the reference's."""
    speech, own_sampling = llm.speech_token_size, llm.sampling

    def sampling_ids(scores: Any, decoded: list[int], sampling: int, ignore_eos: bool = True) -> int:
        if len(decoded) >= num_tokens:
            return int(llm.eos_token)
        scores[speech:] = float("-inf")
        return int(own_sampling(scores, decoded, sampling))

    llm.sampling_ids = sampling_ids


def load(repo: Path, matcha: Path, folder: Path) -> tuple[Any, int]:
    """The model as the reference's own command line builds it, without its front end; and its sample rate in Hz."""
    sys.path[:0] = [str(repo), str(matcha)]
    sys.meta_path.insert(0, StandIns(NEVER_NEEDED))
    sys.meta_path.append(StandIns(OFTEN_MISSING))
    from hyperpyyaml import load_hyperpyyaml
    from transformers import AutoConfig, Qwen2ForCausalLM

    # The weights come from llm.pt: the folder need not hold those of the language model it was trained from.
    Qwen2ForCausalLM.from_pretrained = classmethod(lambda cls, path: cls(AutoConfig.from_pretrained(path)))
    from cosyvoice.utils.class_utils import get_model_type

    path = next(folder / name for name in CONFIGURATIONS if (folder / name).exists())
    stages = stages_only(path.read_text(encoding="utf-8"))
    qwen = {"qwen_pretrain_path": str(folder / "CosyVoice-BlankEN")}
    with uninitialised():
        configs = load_hyperpyyaml(stages, overrides=qwen if "qwen_pretrain_path:" in stages else None)
    model = get_model_type(configs)(configs["llm"], configs["flow"], configs["hift"], fp16=False)
    model.load(folder / "llm.pt", folder / "flow.pt", folder / "hift.pt")
    for stage in (model.llm, model.flow, model.hift):
        stage.float()
    fit_text_tokens(model.llm)
    return model, configs["sample_rate"]


def fit_text_tokens(llm: Any) -> None:
    """Lets a small model made for tests read ``END_OF_PROMPT``."""
    embedding = llm.llm.model.model.embed_tokens if hasattr(llm.llm, "model") else llm.text_embedding
    if embedding.num_embeddings <= END_OF_PROMPT:
        last = embedding.num_embeddings - 1
        embedding.register_forward_pre_hook(lambda _, ids: (ids[0].clamp(max=last),))


@contextmanager
def uninitialised() -> Iterator[None]:
    """Leaves weights as they are allocated, which saves half a minute: all of them are read from files."""
    import torch

    names = ("normal_", "uniform_", "kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "trunc_normal_")
    own = {name: getattr(torch.nn.init, name) for name in names}
    for name in names:
        setattr(torch.nn.init, name, lambda tensor, *_, **__: tensor)
    own_initialise = torch.Tensor.normal_
    torch.Tensor.normal_ = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.normal_ = own_initialise  # type: ignore[method-assign]
        for name in names:
            setattr(torch.nn.init, name, own[name])


def stages_only(yaml: str) -> str:
    """The model's configuration without what follows the stages: training data and features need more packages."""
    lines = yaml.splitlines(keepends=True)
    start = next(index for index, line in enumerate(lines) if line.startswith("hift:"))
    ends = (i for i in range(start + 1, len(lines)) if lines[i].strip() and not lines[i][0].isspace())
    return "".join(lines[: next(ends, len(lines))])


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of the named packages that hold whatever is asked of them."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def find_spec(
        self, name: str, path: object, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self.names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = _anything  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None: ...


def _anything(name: str) -> MagicMock:
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock()


if __name__ == "__main__":
    main()
