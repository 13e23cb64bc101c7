"""The teacher, Kokoro-82M, as a small PyTorch module that works on batches.

The published int8 ONNX file (Apache-2.0) is the source of the weights: ``convert`` names every weight in it
and keeps the integers with their scales in one archive, and ``load`` turns that archive into a module in
float32. Speech is made in two steps, so that items can be put into batches without any padding, which the
instance norms of the decoder would feel: ``read`` takes texts of equal length and gives durations and
features, and ``speak`` takes items that last equally many frames.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

SAMPLE_RATE = 24000
FRAME = 600  # samples for each frame of the alignment
SYMBOLS = 178
WIDTH = 512
STYLE = 128
UPSAMPLE_RATES = (10, 6)
UPSAMPLE_KERNELS = (20, 12)
BLOCK_KERNELS = (3, 7, 11)
DILATIONS = (1, 3, 5)
FFT, HOP = 20, 5
HARMONICS = 9
FINE = 300  # samples for each value of the pitch curve
GAIN = 1.5  # the ONNX export forgets to divide by the sum of its windows, so its speech is louder by this


class Albert(nn.Module):
    """The phoneme language model: one transformer layer, used twelve times."""

    def __init__(self, embedding: int = 128, width: int = 768, inner: int = 2048, heads: int = 12) -> None:
        super().__init__()
        self.heads = heads
        self.words = nn.Embedding(SYMBOLS, embedding)
        self.positions = nn.Embedding(512, embedding)
        self.types = nn.Embedding(2, embedding)
        self.embedding_norm = nn.LayerNorm(embedding, eps=1e-12)
        self.widen = nn.Linear(embedding, width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.dense = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width, eps=1e-12)
        self.inner = nn.Linear(width, inner)
        self.outer = nn.Linear(inner, width)
        self.layer_norm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token numbers ``[batch, length]`` to ``[batch, length, 768]``."""
        batch, length = tokens.shape
        places = torch.arange(length, device=tokens.device)
        x: Tensor = self.words(tokens) + self.positions(places) + self.types(torch.zeros_like(places))
        x = self.widen(self.embedding_norm(x))
        for _ in range(12):
            query, key, value = (
                linear(x).view(batch, length, self.heads, -1).transpose(1, 2)
                for linear in (self.query, self.key, self.value)
            )
            seen = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(x.shape)
            x = self.attention_norm(x + self.dense(seen))
            x = self.layer_norm(x + self.outer(F.gelu(self.inner(x), approximate="tanh")))
        return x


def bidirectional(inputs: int) -> nn.LSTM:
    """The only shape of recurrent layer in the model: 256 units each way."""
    return nn.LSTM(inputs, WIDTH // 2, batch_first=True, bidirectional=True)


class TextEncoder(nn.Module):
    """Three convolutions and a recurrent layer over the phonemes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, WIDTH)
        self.convolutions = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 5, padding=2) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.lstm = bidirectional(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """``[batch, length]`` to ``[batch, length, 512]``."""
        x = self.embedding(tokens)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.leaky_relu(norm(convolution(x.transpose(1, 2)).transpose(1, 2)), 0.2)
        encoded: Tensor = self.lstm(x)[0]
        return encoded


class StyledNorm(nn.Module):
    """Normalisation whose gain and offset come from the style: over time, or over the channels."""

    def __init__(self, channels: int, over_channels: bool = False) -> None:
        super().__init__()
        self.fc = nn.Linear(STYLE, 2 * channels)
        self.over_channels = over_channels

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        """Over time: ``[batch, channels, length]``; over channels: ``[batch, length, channels]``."""
        gain, offset = self.fc(style).chunk(2, dim=1)
        if self.over_channels:
            normed = F.layer_norm(x, x.shape[-1:])
            return torch.addcmul(offset.unsqueeze(1), normed, 1 + gain.unsqueeze(1))
        normed = F.instance_norm(x)
        return torch.addcmul(offset.unsqueeze(2), normed, 1 + gain.unsqueeze(2))


class StyledBlock(nn.Module):
    """Residual block of the prosody predictor and of the decoder; it may double the length."""

    def __init__(self, inputs: int, outputs: int, double: bool = False) -> None:
        super().__init__()
        self.norm1 = StyledNorm(inputs)
        self.norm2 = StyledNorm(outputs)
        self.conv1 = nn.Conv1d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv1d(outputs, outputs, 3, padding=1)
        self.pool = (
            nn.ConvTranspose1d(inputs, inputs, 3, stride=2, groups=inputs, padding=1, output_padding=1)
            if double
            else None
        )
        self.shortcut = nn.Conv1d(inputs, outputs, 1, bias=False) if inputs != outputs else None

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        """``[batch, inputs, length]`` to ``[batch, outputs, length or 2 * length]``."""
        y = F.leaky_relu(self.norm1(x, style), 0.2)
        if self.pool is not None:
            y = self.pool(y)
            x = x.repeat_interleave(2, dim=2)
        y = self.conv1(y)
        y = self.conv2(F.leaky_relu(self.norm2(y, style), 0.2))
        result: Tensor = (y + (x if self.shortcut is None else self.shortcut(x))) * 0.5**0.5
        return result


class Prosody(nn.Module):
    """Durations, pitch and loudness."""

    def __init__(self) -> None:
        super().__init__()
        self.lstms = nn.ModuleList(bidirectional(WIDTH + STYLE) for _ in range(3))
        self.norms = nn.ModuleList(StyledNorm(WIDTH, over_channels=True) for _ in range(3))
        self.lstm = bidirectional(WIDTH + STYLE)
        self.duration = nn.Linear(WIDTH, 50)
        self.shared = bidirectional(WIDTH + STYLE)
        half = WIDTH // 2
        self.pitch = nn.ModuleList(
            [StyledBlock(WIDTH, WIDTH), StyledBlock(WIDTH, half, double=True), StyledBlock(half, half)]
        )
        self.loudness = nn.ModuleList(
            [StyledBlock(WIDTH, WIDTH), StyledBlock(WIDTH, half, double=True), StyledBlock(half, half)]
        )
        self.pitch_out = nn.Conv1d(half, 1, 1)
        self.loudness_out = nn.Conv1d(half, 1, 1)

    def durations(self, x: Tensor, style: Tensor, speed: float) -> tuple[Tensor, Tensor]:
        """Frames for every phoneme, and the features from which the curves are made."""
        beside = style.unsqueeze(1).expand(-1, x.shape[1], -1)
        x = torch.cat([x, beside], dim=2)
        for lstm, norm in zip(self.lstms, self.norms, strict=True):
            x = torch.cat([norm(lstm(x)[0], style), beside], dim=2)
        spread = torch.sigmoid(self.duration(self.lstm(x)[0])).sum(dim=2)
        return torch.round(spread / speed).clamp(min=1).long(), x

    def curves(self, x: Tensor, style: Tensor) -> tuple[Tensor, Tensor]:
        """Pitch and loudness, two values a frame, from aligned features ``[batch, frames, 640]``."""
        x = self.shared(x)[0].transpose(1, 2)
        pitch, loudness = x, x
        for block in self.pitch:
            pitch = block(pitch, style)
        for block in self.loudness:
            loudness = block(loudness, style)
        return self.pitch_out(pitch).squeeze(1), self.loudness_out(loudness).squeeze(1)


class SnakeBlock(nn.Module):
    """Three pairs of dilated convolutions with a periodic activation."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(
            nn.Conv1d(channels, channels, kernel, dilation=d, padding=(kernel - 1) * d // 2)
            for d in DILATIONS
        )
        self.convs2 = nn.ModuleList(
            nn.Conv1d(channels, channels, kernel, padding=(kernel - 1) // 2) for _ in DILATIONS
        )
        self.norms1 = nn.ModuleList(StyledNorm(channels) for _ in DILATIONS)
        self.norms2 = nn.ModuleList(StyledNorm(channels) for _ in DILATIONS)
        self.alpha1 = nn.ParameterList(nn.Parameter(torch.ones(1, channels, 1)) for _ in DILATIONS)
        self.alpha2 = nn.ParameterList(nn.Parameter(torch.ones(1, channels, 1)) for _ in DILATIONS)

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        """``[batch, channels, length]``, unchanged in shape."""
        for step in range(len(DILATIONS)):
            y = self.norms1[step](x, style)
            y = self.convs1[step](torch.addcdiv(y, torch.sin(y * self.alpha1[step]) ** 2, self.alpha1[step]))
            y = self.norms2[step](y, style)
            y = self.convs2[step](torch.addcdiv(y, torch.sin(y * self.alpha2[step]) ** 2, self.alpha2[step]))
            x = x + y
        return x


class Source(nn.Module):
    """The excitation: harmonics of the pitch where there is one, noise where there is none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HARMONICS, 1)

    def forward(self, pitch: Tensor, noise: bool) -> Tensor:
        """Pitch in hertz ``[batch, values]`` to samples ``[batch, 300 * values]``."""
        partials = pitch.unsqueeze(1) * torch.arange(1, HARMONICS + 1, device=pitch.device).view(1, -1, 1)
        turns = (partials / SAMPLE_RATE) % 1
        # The published model also draws a phase for each partial, but adds it to a sample which its
        # averaging over every 300 then drops: it is not heard, so it is left out here.
        phase = torch.cumsum(turns, dim=2) * (2 * torch.pi * FINE)
        waves = torch.sin(F.interpolate(phase, scale_factor=float(FINE), mode="linear")) * 0.1
        voiced = (pitch > 10).float().repeat_interleave(FINE, dim=1).unsqueeze(1)
        waves = waves * voiced
        if noise:
            waves = waves + (voiced * 0.003 + (1 - voiced) * (0.1 / 3)) * torch.randn_like(waves)
        return torch.tanh(self.linear(waves.transpose(1, 2))).squeeze(2)


class Vocoder(nn.Module):
    """From decoder features and pitch to samples, by way of a short inverse Fourier transform."""

    def __init__(self) -> None:
        super().__init__()
        channels = [WIDTH >> (1 + stage) for stage in range(len(UPSAMPLE_RATES))]
        self.source = Source()
        self.ups = nn.ModuleList(
            nn.ConvTranspose1d(2 * width, width, kernel, rate, padding=(kernel - rate) // 2)
            for width, rate, kernel in zip(channels, UPSAMPLE_RATES, UPSAMPLE_KERNELS, strict=True)
        )
        last = UPSAMPLE_RATES[-1]
        self.noise_convs = nn.ModuleList(
            [
                nn.Conv1d(FFT + 2, channels[0], 2 * last, stride=last, padding=(last + 1) // 2),
                nn.Conv1d(FFT + 2, channels[1], 1),
            ]
        )
        self.noise_blocks = nn.ModuleList([SnakeBlock(channels[0], 7), SnakeBlock(channels[1], 11)])
        self.blocks = nn.ModuleList(
            SnakeBlock(width, kernel) for width in channels for kernel in BLOCK_KERNELS
        )
        self.post = nn.Conv1d(channels[-1], FFT + 2, 7, padding=3)
        self.register_buffer("window", torch.hann_window(FFT), persistent=False)

    def forward(self, x: Tensor, style: Tensor, pitch: Tensor, noise: bool) -> Tensor:
        """``[batch, 512, values]`` and pitch ``[batch, values]`` to ``[batch, 300 * values]``."""
        window: Any = self.window
        wave = self.source(pitch, noise)
        spectrum = torch.stft(wave, FFT, HOP, FFT, window, return_complex=True)
        harmonics = torch.cat([spectrum.abs(), spectrum.angle()], dim=1)
        kernels = len(BLOCK_KERNELS)
        for stage, up in enumerate(self.ups):
            excitation = self.noise_blocks[stage](self.noise_convs[stage](harmonics), style)
            x = up(F.leaky_relu(x, 0.1))
            if stage == len(self.ups) - 1:
                x = F.pad(x, (1, 0), mode="reflect")
            x = x + excitation
            blocks = self.blocks[stage * kernels : (stage + 1) * kernels]
            x = torch.stack([block(x, style) for block in blocks]).mean(dim=0)
        x = self.post(F.leaky_relu(x, 0.01))
        magnitude, phase = torch.exp(x[:, : FFT // 2 + 1]), torch.sin(x[:, FFT // 2 + 1 :])
        return torch.istft(torch.polar(magnitude, phase), FFT, HOP, FFT, window)


class Decoder(nn.Module):
    """Puts text features, pitch and loudness together for the vocoder."""

    def __init__(self) -> None:
        super().__init__()
        wide, mixed = 2 * WIDTH, 2 * WIDTH + 64 + 2
        self.encode = StyledBlock(WIDTH + 2, wide)
        self.decode = nn.ModuleList(
            [
                StyledBlock(mixed, wide),
                StyledBlock(mixed, wide),
                StyledBlock(mixed, wide),
                StyledBlock(mixed, WIDTH, double=True),
            ]
        )
        self.pitch_conv = nn.Conv1d(1, 1, 3, stride=2, padding=1)
        self.loudness_conv = nn.Conv1d(1, 1, 3, stride=2, padding=1)
        self.text_conv = nn.Conv1d(WIDTH, 64, 1)
        self.vocoder = Vocoder()

    def forward(self, text: Tensor, pitch: Tensor, loudness: Tensor, style: Tensor, noise: bool) -> Tensor:
        """Aligned text features ``[batch, 512, frames]`` to samples ``[batch, 600 * frames]``."""
        curves = [self.pitch_conv(pitch.unsqueeze(1)), self.loudness_conv(loudness.unsqueeze(1))]
        narrow = self.text_conv(text)
        x = self.encode(torch.cat([text, *curves], dim=1), style)
        for block in self.decode:
            x = block(torch.cat([x, narrow, *curves], dim=1), style)
        samples: Tensor = self.vocoder(x, style, pitch, noise)
        return samples


@dataclass
class Reading:
    """What ``Kokoro.read`` gives: all tensors have one row for each text."""

    durations: Tensor  # frames, [batch, length]
    prosody: Tensor  # [batch, length, 640]
    text: Tensor  # [batch, length, 512]


class Kokoro(nn.Module):
    """The whole teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.albert = Albert()
        self.bridge = nn.Linear(768, WIDTH)
        self.text_encoder = TextEncoder()
        self.prosody = Prosody()
        self.decoder = Decoder()

    @torch.inference_mode()
    def read(self, tokens: Tensor, style: Tensor, speed: float = 1.0) -> Reading:
        """Texts of equal length ``[batch, length]`` (a 0 at both ends), styles ``[batch, 256]``."""
        features = self.bridge(self.albert(tokens))
        durations, prosody = self.prosody.durations(features, style[:, STYLE:], speed)
        return Reading(durations, prosody, self.text_encoder(tokens))

    @torch.inference_mode()
    def speak(self, prosody: Tensor, text: Tensor, style: Tensor, noise: bool = True) -> Tensor:
        """Features repeated by their durations, ``[batch, frames, ...]``, to samples."""
        pitch, loudness = self.prosody.curves(prosody, style[:, STYLE:])
        samples: Tensor = self.decoder(text.transpose(1, 2), pitch, loudness, style[:, :STYLE], noise)
        return GAIN * samples


# --- Weights ------------------------------------------------------------------------------------------

_ALBERT_LAYER = "bert.encoder.albert_layer_groups.0.albert_layers.0."
_RENAMED: list[tuple[str, Any]] = [
    (r"^(encoder|decoder)\.", ""),
    (r"^predictor\.text_encoder\.lstms\.(\d)\.fc", lambda found: f"prosody.norms.{int(found[1]) // 2}.fc"),
    (r"^predictor\.F0_proj", "prosody.pitch_out"),
    (r"^predictor\.N_proj", "prosody.loudness_out"),
    (r"^(?:predictor\.)?F0\.(\d)\.", r"prosody.pitch.\1."),
    (r"^(?:predictor\.)?N\.(\d)\.", r"prosody.loudness.\1."),
    (r"^predictor\.duration_proj\.linear_layer", "prosody.duration"),
    (r"^bert_encoder", "bridge"),
    (r"^bert\.embeddings\.word_embeddings", "albert.words"),
    (r"^bert\.embeddings\.position_embeddings", "albert.positions"),
    (r"^bert\.embeddings\.token_type_embeddings", "albert.types"),
    (r"^bert\.embeddings\.LayerNorm", "albert.embedding_norm"),
    (r"^bert\.encoder\.embedding_hidden_mapping_in", "albert.widen"),
    (re.escape(_ALBERT_LAYER) + r"attention\.LayerNorm", "albert.attention_norm"),
    (re.escape(_ALBERT_LAYER) + r"attention\.", "albert."),
    (re.escape(_ALBERT_LAYER) + r"full_layer_layer_norm", "albert.layer_norm"),
    (re.escape(_ALBERT_LAYER) + r"ffn_output", "albert.outer"),
    (re.escape(_ALBERT_LAYER) + r"ffn", "albert.inner"),
    (r"^text_encoder\.cnn\.(\d)\.0\.", r"text_encoder.convolutions.\1."),
    (r"^text_encoder\.cnn\.(\d)\.1\.gamma", r"text_encoder.norms.\1.weight"),
    (r"^text_encoder\.cnn\.(\d)\.1\.beta", r"text_encoder.norms.\1.bias"),
    (r"^decoder\.generator\.m_source\.l_linear", "decoder.vocoder.source.linear"),
    (r"^decoder\.generator\.noise_res", "decoder.vocoder.noise_blocks"),
    (r"^decoder\.generator\.resblocks", "decoder.vocoder.blocks"),
    (r"^decoder\.generator\.conv_post", "decoder.vocoder.post"),
    (r"^decoder\.generator\.", "decoder.vocoder."),
    (r"\.adain([12])\.", r".norms\1."),
    (r"^decoder\.F0_conv", "decoder.pitch_conv"),
    (r"^decoder\.N_conv", "decoder.loudness_conv"),
    (r"^decoder\.asr_res\.0", "decoder.text_conv"),
]
_LSTMS = {
    "/encoder/text_encoder/lstm": "text_encoder.lstm",
    "/encoder/predictor/text_encoder/lstms.0": "prosody.lstms.0",
    "/encoder/predictor/text_encoder/lstms.2": "prosody.lstms.1",
    "/encoder/predictor/text_encoder/lstms.4": "prosody.lstms.2",
    "/encoder/predictor/lstm": "prosody.lstm",
    "/encoder/lstm": "prosody.shared",
    "/encoder/predictor/shared": "prosody.shared",
    "/encoder/shared": "prosody.shared",
}


def _renamed(name: str) -> str:
    """The name here of what the published model calls ``name``."""
    for pattern, replacement in _RENAMED:
        name = re.sub(pattern, replacement, name)
    return name


def _unnamed_convolution(path: str, shape: tuple[int, ...], double: bool) -> str:
    """The module whose weight the export computed at ``path`` (weight norm folded, so its name was lost)."""
    folder, number = re.fullmatch(r"/(.+?)/Mul(?:_(\d+))?_output_0", path).groups()  # type: ignore[union-attr]
    place, index = folder.replace("/", "."), int(number or 0)
    if "cnn." in place:
        return _renamed(place + ".0.")[:-1]
    if re.search(r"resblocks\.|noise_res\.", place):
        step = (index - 2) // 3
        return _renamed(f"{place}.convs{step % 2 + 1}.{step // 2}")
    if place == "decoder.decoder":
        return ("decoder.pitch_conv", "decoder.loudness_conv")[index]
    if place.endswith("asr_res"):
        return "decoder.text_conv"
    if place.endswith("generator"):
        return ("decoder.vocoder.ups.0", "decoder.vocoder.ups.1", "decoder.vocoder.post")[index]
    names = (["pool"] if double else []) + ["conv1", "conv2", "shortcut"]
    return _renamed(place + ".") + names[index]


def _gates(matrix: np.ndarray) -> np.ndarray:
    """Rows in ONNX's order of gates (in, out, forget, cell) to PyTorch's (in, forget, cell, out)."""
    into, out, forget, cell = np.split(matrix, 4)
    return np.concatenate([into, forget, cell, out])


def convert(onnx_path: str | Path) -> dict[str, np.ndarray]:
    """Every weight of the ONNX file by its name here; integers keep ``.scale`` and ``.zero`` beside them."""
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(str(onnx_path)).graph
    constants = {entry.name: numpy_helper.to_array(entry) for entry in graph.initializer}
    doubled = {node.name.split("/pool/")[0] for node in graph.node if "/pool/" in node.name}
    weights: dict[str, np.ndarray] = {}
    used: set[str] = set()

    def keep(name: str, values: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> None:
        weights[name] = np.ascontiguousarray(values)
        weights[name + ".scale"] = scale.astype(np.float32)
        weights[name + ".zero"] = zero.astype(np.int32)

    for node in graph.node:
        inputs = list(node.input)
        if node.op_type == "DequantizeLinear":
            source = inputs[1].removesuffix("_scale")
            keep(
                _renamed(source),
                constants[source + "_quantized"],
                *(constants[entry] for entry in inputs[1:]),
            )
        elif node.op_type == "ConvInteger":
            source = inputs[1].removesuffix("_quantized")
            values = constants[inputs[1]]
            if source.startswith("/"):
                block = source.rsplit("/", 1)[0]
                name = _unnamed_convolution(source, values.shape, block in doubled) + ".weight"
            else:
                name = _renamed(source)
            keep(name, values, constants[source + "_scale"], constants[inputs[3]])
        elif node.op_type == "MatMulInteger":
            source = inputs[1].removesuffix("_quantized")
            place = re.sub(r"/(Gemm_)?MatMul_quant$", "", node.name).strip("/").replace("/", ".")
            name = _renamed(source if not source.startswith("onnx::") else place + ".weight")
            if inputs[1] in constants and inputs[1] not in used:  # the twelve layers share their weights
                used.add(inputs[1])
                keep(name, constants[inputs[1]].T, constants[source + "_scale"], constants[inputs[3]])
        elif node.op_type == "DynamicQuantizeLSTM":
            name = _LSTMS[re.sub(r"/LSTM_quant$", "", node.name)]
            for suffix, entry in (("ih", 1), ("hh", 2)):
                values = constants[inputs[entry]]
                scale, zero = (constants[inputs[8 + 2 * (entry - 1) + extra]] for extra in (0, 1))
                for way, end in enumerate(("_l0", "_l0_reverse")):
                    keep(f"{name}.weight_{suffix}{end}", _gates(values[way].T), scale[way], zero[way])
            biases = constants[inputs[3]]
            for way, end in enumerate(("_l0", "_l0_reverse")):
                outer, inner = np.split(biases[way], 2)
                weights[f"{name}.bias_ih{end}"] = _gates(outer)
                weights[f"{name}.bias_hh{end}"] = _gates(inner)
        elif node.op_type in ("Conv", "ConvTranspose") and inputs[1].startswith("/"):
            block = inputs[1].rsplit("/", 1)[0]
            values = constants[inputs[1]]
            name = _unnamed_convolution(inputs[1], values.shape, block in doubled) + ".weight"
            weights[name] = values
        elif node.op_type == "MatMul" and "l_linear" in node.name:
            weights["decoder.vocoder.source.linear.weight"] = constants[inputs[1]].T
    for source, values in constants.items():
        plain = re.match(r"(en|de)coder\..*(?<!_scale)(?<!_zero_point)$", source) and "istft" not in source
        if plain and values.dtype == np.float32:
            weights[_renamed(source)] = values
    return weights


def dequantise(weights: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """What ``convert`` gives, as float32 tensors ready for ``Kokoro.load_state_dict``."""
    state = {}
    for name, values in weights.items():
        if name.endswith((".scale", ".zero")):
            continue
        result = values.astype(np.float32)
        if name + ".scale" in weights:
            scale, zero = weights[name + ".scale"], weights[name + ".zero"].astype(np.float32)
            if scale.ndim and scale.size > 1:
                shape = (-1,) + (1,) * (values.ndim - 1)
                scale, zero = scale.reshape(shape), zero.reshape(shape)
            result = (result - zero) * scale
        state[name] = torch.from_numpy(np.ascontiguousarray(result, dtype=np.float32))
    return state


def load(weights: dict[str, np.ndarray], device: str | torch.device = "cpu") -> Kokoro:
    """The teacher with these weights, ready to speak."""
    with torch.device("meta"):
        model = Kokoro()
    model.load_state_dict(dequantise(weights), assign=True)
    model.decoder.vocoder.window = torch.hann_window(FFT)
    model.requires_grad_(False)
    return model.eval().to(device)
