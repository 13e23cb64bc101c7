"""What this machine and a model folder can do, found out without loading a model and without raising."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from vivace.environment import keep_to_ourselves
from vivace.errors import ModelFolderError

if TYPE_CHECKING:
    from vivace.config import ModelConfig

T = TypeVar("T")
Status: TypeAlias = Literal["ok", "missing", "problem"]

_PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "soundfile", "soxr", "onnxruntime", "wetext")
_CPU_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16", "sve")


@dataclass(frozen=True, slots=True)
class GpuReport:
    """One CUDA device."""

    name: str
    memory_gib: float
    capability: str


@dataclass(slots=True)
class MachineReport:
    """What the machine offers.

    Attributes:
        cpu: model name.
        cpu_flags: instruction sets that speed models up.
        cores: that this process may use.
        memory_gib: of the machine, None if unknown.
        packages: version by package; None if it is not installed.
        gpus: CUDA devices that PyTorch can use.
        onnx_providers: of ONNX Runtime.
        audio_formats: containers that can be decoded and written.
        problems: one line each.
    """

    system: str
    python: str
    cpu: str
    cpu_flags: list[str]
    cores: int
    memory_gib: float | None
    packages: dict[str, str | None]
    gpus: list[GpuReport] = field(default_factory=list)
    onnx_providers: list[str] = field(default_factory=list)
    audio_formats: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FileReport:
    """One file of a model folder."""

    name: str
    status: Status
    detail: str


@dataclass(slots=True)
class FolderReport:
    """What a model folder offers.

    Attributes:
        folder: its path.
        format: ``official`` or ``vivace``; None if it is neither.
        files: each file that a complete folder has.
        parameters: number of weights, by stage.
        features: ``speak``, ``instruct``, ``clone`` and ``convert_voice``: whether the folder has what they need.
        usable: it can speak with a stored voice or a cloned one.
        problems: one line each; a broken folder has at least one.
    """

    folder: str
    format: Literal["official", "vivace"] | None = None
    model: str | None = None
    files: list[FileReport] = field(default_factory=list)
    parameters: dict[str, int] = field(default_factory=dict)
    features: dict[str, bool] = field(default_factory=dict)
    usable: bool = False
    problems: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Report:
    """Everything that ``vivace doctor`` says."""

    machine: MachineReport
    folder: FolderReport | None

    @property
    def usable(self) -> bool:
        """False if the machine or the folder asked about cannot be used: exit code 2."""
        return not self.machine.problems and (self.folder is None or self.folder.usable)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "usable": self.usable}

    def lines(self) -> list[str]:
        """The report as text."""
        lines = _machine_lines(self.machine)
        if self.folder is not None:
            lines += ["", *_folder_lines(self.folder)]
        return lines


def examine(folder: str | Path | None = None, tokenizer: Path | None = None) -> Report:
    """Looks at the machine and, if one is given, at a model folder. Never raises on a broken one.

    Args:
        tokenizer: where the text tokenizer lies if not in the folder.
    """
    return Report(examine_machine(), None if folder is None else examine_folder(Path(folder), tokenizer))


def examine_machine() -> MachineReport:
    """What the machine offers; each part that cannot be found out is left out or named as a problem."""
    flags, cpu = _cpu()
    report = MachineReport(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        cpu=cpu,
        cpu_flags=flags,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_gib=_memory_gib(),
        packages={name: _version(name) for name in _PACKAGES},
    )
    for name, look in (
        ("torch", _look_at_torch),
        ("onnxruntime", _look_at_onnx),
        ("soundfile", _look_at_soundfile),
    ):
        try:
            look(report)
        except Exception as error:  # a broken installation fails in many ways; each is a finding
            report.problems.append(f"{name} does not work ({type(error).__name__}): install it again")
    return report


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> tuple[list[str], str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return [], platform.processor() or platform.machine()
    name, found = platform.machine(), set[str]()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        elif key.strip() in ("flags", "Features"):
            found |= set(value.split())
    return [flag for flag in _CPU_FLAGS if flag in found], name


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


def _look_at_torch(report: MachineReport) -> None:
    import torch

    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.cuda.get_device_properties(index)
        report.gpus.append(
            GpuReport(device.name, round(device.total_memory / 2**30, 1), f"{device.major}.{device.minor}")
        )


def _look_at_onnx(report: MachineReport) -> None:
    keep_to_ourselves()
    import onnxruntime

    report.onnx_providers = list(onnxruntime.get_available_providers())


def _look_at_soundfile(report: MachineReport) -> None:
    import soundfile

    report.audio_formats = sorted(soundfile.available_formats())


def examine_folder(folder: Path, tokenizer: Path | None = None) -> FolderReport:
    """What a model folder offers: headers and configuration are read, weights only as far as they name themselves."""
    from vivace.checkpoint import STAGES, load_config, num_parameters
    from vivace.checkpoint.files import GENERATIONS, is_native

    report = FolderReport(folder=str(folder))
    config = _attempt(report, lambda: load_config(folder))
    if config is None:
        report.features = dict.fromkeys(("speak", "instruct", "clone", "convert_voice"), False)
        return report
    report.format = "vivace" if is_native(folder) else "official"
    report.model = f"{GENERATIONS[config.generation]}, {config.lm.num_layers} + {config.flow.depth} layers"
    report.parameters = {stage: num_parameters(config, stage) for stage in STAGES}
    weights_ok = _look_at_weights(report, folder)
    parts = _look_at_parts(report, folder, config, tokenizer)
    encoders = "speaker_encoder" in parts and "speech_tokenizer" in parts
    has_text = weights_ok and "tokenizer" in parts and "voices" not in parts.broken
    speak = has_text and ("voices" in parts or encoders)
    report.features = {
        "speak": speak,
        "instruct": speak and config.pronunciation is None,  # the embedded model was taught no instructions
        "clone": speak and encoders,
        "convert_voice": weights_ok and encoders and "voices" not in parts.broken,
    }
    report.usable = speak
    if has_text and not speak:
        report.problems.append("no stored voice and no prompt encoders, so there is no voice to speak with")
    return report


class _Parts(set[str]):
    """Parts of a folder beside the weights that are there and can be opened; ``broken`` are there and cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.broken: set[str] = set()


def _look_at_parts(report: FolderReport, folder: Path, config: ModelConfig, tokenizer: Path | None) -> _Parts:
    """Opens tokenizer, encoders and voices. Only what stands in the way of any speech is a problem of the folder."""
    from vivace.checkpoint.files import find_paths

    paths, missing = find_paths(folder, config, tokenizer)
    own_voices = sorted((folder / "voices").glob("*.safetensors"))
    voices = paths.voices or (folder / "voices" if own_voices else None)
    parts = _Parts()
    for key, path, action in (
        ("tokenizer", paths.tokenizer, partial(_open_text_files, paths.tokenizer, folder, config)),
        (
            "speaker_encoder",
            paths.speaker_encoder,
            partial(_open_encoders, paths.speaker_encoder, None, config),
        ),
        (
            "speech_tokenizer",
            paths.speech_tokenizer,
            partial(_open_encoders, None, paths.speech_tokenizer, config),
        ),
        ("voices", voices, partial(_open_voices, paths.voices, own_voices, config)),
    ):
        error = ModelFolderError(missing[key]) if path is None else _error(action)
        if error is None and path is not None:
            parts.add(key)
            detail = _size(path) if path.is_file() else ""
            report.files.append(
                FileReport(
                    path.name, "ok", f"{len(own_voices)} built in" if path.name == "voices" else detail
                )
            )
            continue
        message = "" if error is None else error.message
        name, _, detail = message.partition(": ")
        is_missing = path is None and detail.startswith("is missing")
        report.files.append(FileReport(Path(name).name, "missing" if is_missing else "problem", detail))
        if path is not None:
            parts.broken.add(key)
        if key == "tokenizer" or (key == "voices" and path is not None):
            report.problems.append(message)
    return parts


def _error(action: Callable[[], object]) -> ModelFolderError | None:
    try:
        action()
    except ModelFolderError as error:
        return error
    except OSError as error:
        return ModelFolderError(f"{Path(str(error.filename)).name}: cannot be read ({error.strerror})")
    return None


def _open_text_files(tokenizer: Path | None, folder: Path, config: ModelConfig) -> None:
    from vivace.text.pronounce import Pronouncer
    from vivace.text.styles import open_tokenizer

    if tokenizer is not None:
        open_tokenizer(tokenizer, config)
    if config.pronunciation is not None:
        Pronouncer.from_folder(folder)


def _open_encoders(speaker: Path | None, speech: Path | None, config: ModelConfig) -> None:
    from vivace.models.prompt_encoders import SpeakerEncoder, SpeechTokenizer

    if speaker is not None:
        SpeakerEncoder(speaker, config.flow.spk_embed_dim)
    if speech is not None:
        SpeechTokenizer(speech, config.lm.speech_token_size)


def _open_voices(official: Path | None, own: list[Path], config: ModelConfig) -> None:
    import safetensors

    from vivace.checkpoint import read_official_voices

    if official is not None:
        read_official_voices(official, config.flow.spk_embed_dim, config.flow.output_size)
    for path in own:
        try:
            with safetensors.safe_open(path, framework="np"):
                pass
        except safetensors.SafetensorError:
            raise ModelFolderError(f"{path.name}: is no voice, or a damaged one; download it again") from None


def _attempt(report: FolderReport, action: Callable[[], T]) -> T | None:
    """The action's result, or None with its error noted."""
    try:
        return action()
    except ModelFolderError as error:
        report.problems.append(error.message)
    except OSError as error:
        report.problems.append(f"{Path(report.folder).name}: cannot be read ({error.strerror})")
    return None


def _look_at_weights(report: FolderReport, folder: Path) -> bool:
    """Checks names, shapes and values of every stage: what opening the model would refuse is found here."""
    from vivace.checkpoint import STAGES, load_config
    from vivace.checkpoint.files import is_native
    from vivace.checkpoint.native import read_finite_weights
    from vivace.checkpoint.official import read_official_stage, stage_file

    config = load_config(folder)
    actions: dict[Path, Callable[[], object]]
    if is_native(folder):
        actions = {folder / "model.safetensors": partial(read_finite_weights, folder, config)}
    else:
        actions = {
            stage_file(folder, stage): partial(read_official_stage, stage_file(folder, stage), stage, config)
            for stage in STAGES
        }
        if (folder / "llm.rl.pt").exists():
            path = folder / "llm.rl.pt"
            actions[path] = partial(read_official_stage, path, "lm", config)
    good = True
    for path, action in actions.items():
        if _attempt(report, action) is not None:
            report.files.append(FileReport(path.name, "ok", _size(path)))
            continue
        good = good and path.name == "llm.rl.pt"
        report.files.append(
            FileReport(
                path.name, "problem" if path.exists() else "missing", report.problems[-1].partition(": ")[2]
            )
        )
    return good


def _size(path: Path) -> str:
    return f"{path.stat().st_size / 1e6:.1f} MB"


def _machine_lines(machine: MachineReport) -> list[str]:
    memory = "" if machine.memory_gib is None else f", {machine.memory_gib} GiB memory"
    lines = [
        f"system    {machine.system}, Python {machine.python}",
        f"CPU       {machine.cpu}: {machine.cores} cores{memory}, {' '.join(machine.cpu_flags)}".rstrip(
            ": ,"
        ),
    ]
    lines += [
        f"GPU       {gpu.name}, {gpu.memory_gib} GiB, capability {gpu.capability}" for gpu in machine.gpus
    ]
    if not machine.gpus:
        lines.append("GPU       none that PyTorch can use; models run on the CPU")
    packages = (f"{name} {version or 'MISSING'}" for name, version in machine.packages.items())
    lines += [
        f"packages  {', '.join(packages)}",
        f"ONNX      {', '.join(machine.onnx_providers) or 'none'}",
        f"audio     {', '.join(machine.audio_formats) or 'none'}",
    ]
    return lines + [f"PROBLEM   {problem}" for problem in machine.problems]


def _folder_lines(report: FolderReport) -> list[str]:
    lines = [f"folder    {report.folder}"]
    if report.model is not None:
        total = sum(report.parameters.values())
        lines.append(f"model     {report.model}, {total / 1e6:.1f} M weights, {report.format} format")
    lines += [f"  {file.status:8}{file.name}  {file.detail}".rstrip() for file in report.files]
    if report.format is not None:
        can = [name.replace("_", " ") for name, there in report.features.items() if there]
        lines.append(f"can       {', '.join(can) or 'nothing'}")
    return lines + [f"PROBLEM   {problem}" for problem in report.problems]
