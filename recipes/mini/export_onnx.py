"""Write the prompt encoders as ONNX files with the inputs and outputs of the official ones, and check them.

    python -m recipes.mini.export_onnx --tokenizer FOLDER/tokenizer.pt --speaker FOLDER/speaker.pt --out MODEL

``speech_tokenizer_v3.onnx``: ``feats`` float32 [1, 128, frames], ``feats_length`` int32 [1] → ``indices``
int32 [1, ceil(frames / 4)].
``campplus.onnx``: ``input`` float32 [1, frames, 80] → ``output`` float32 [1, 192].
The check runs both files and the networks on the same speech (made up, or of a corpus), 1 to 30 s long.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import Tensor

from recipes.mini.corpus import Corpus
from recipes.mini.features_gpu import RATE, Speech16k, fbank80, log_mel128
from recipes.mini.onnx_graph import FLOAT, INT32, Graph
from recipes.mini.speaker_model import SpeakerNet, load_shipped_speaker
from recipes.mini.tokenizer_model import Block, ConvBlock, Encoder, load_shipped

CPU = torch.device("cpu")
TOKENIZER_NAME = "speech_tokenizer_v3.onnx"
SPEAKER_NAME = "campplus.onnx"


def _axes(graph: Graph, *axes: int) -> str:
    return graph.constant(list(axes), np.int64)


def _positions(graph: Graph, x: str, encoder: Encoder) -> tuple[str, str, str]:
    """Cosine and sine of the rotary positions and the attention window, for as many tokens as ``x`` has."""
    sizes = encoder.sizes
    half = sizes.width // sizes.heads // 2
    tokens = graph.node("Gather", graph.node("Shape", x), graph.constant(1, np.int64), axis=0)
    zero, one = graph.constant(0, np.int64), graph.constant(1, np.int64)
    places = graph.node("Cast", graph.node("Range", zero, tokens, one), to=FLOAT)
    column = graph.node("Unsqueeze", places, _axes(graph, 1))
    row = graph.node("Unsqueeze", places, _axes(graph, 0))
    rates = 1000.0 ** (-torch.arange(half) / half)  # the same float32 numbers as in Encoder.turns
    angles = graph.node("Mul", column, graph.constant(rates[None]))
    distance = graph.node("Abs", graph.node("Sub", column, row))
    far = graph.node("Greater", distance, graph.constant(sizes.window_tokens))
    window = graph.node("Where", far, graph.constant(-1e9), graph.constant(0.0))
    return graph.node("Cos", angles), graph.node("Sin", angles), window


def _rotate(graph: Graph, x: str, cosine: str, sine: str, half: int) -> str:
    first, second = graph.halves(x, half)
    left = graph.node("Sub", graph.node("Mul", first, cosine), graph.node("Mul", second, sine))
    right = graph.node("Add", graph.node("Mul", second, cosine), graph.node("Mul", first, sine))
    return graph.node("Concat", left, right, axis=3)


def _transformer_block(graph: Graph, block: Block, x: str, positions: tuple[str, str, str]) -> str:
    cosine, sine, window = positions
    width = block.out.in_features
    size = width // block.heads
    qkv = graph.linear(block.qkv, graph.norm(block.norm1, x))
    qkv = graph.node("Reshape", qkv, graph.constant([0, 0, 3, block.heads, size], np.int64))
    qkv = graph.node("Transpose", qkv, perm=[2, 0, 3, 1, 4])
    query, key, value = (
        graph.node("Gather", qkv, graph.constant(place, np.int64), axis=0) for place in range(3)
    )
    query = _rotate(graph, query, cosine, sine, size // 2)
    key = graph.node("Transpose", _rotate(graph, key, cosine, sine, size // 2), perm=[0, 1, 3, 2])
    scores = graph.node("Mul", graph.node("MatMul", query, key), graph.constant(size**-0.5))
    scores = graph.node("Softmax", graph.node("Add", scores, window), axis=-1)
    heard = graph.node("Transpose", graph.node("MatMul", scores, value), perm=[0, 2, 1, 3])
    heard = graph.node("Reshape", heard, graph.constant([0, 0, width], np.int64))
    x = graph.node("Add", x, graph.linear(block.out, heard))
    y = graph.convolution(block.depthwise, graph.swapped(graph.norm(block.norm2, x)))
    x = graph.node("Add", x, graph.linear(block.pointwise, graph.silu(graph.swapped(y))))
    y = graph.silu(graph.linear(block.up, graph.norm(block.norm3, x)))
    return graph.node("Add", x, graph.linear(block.down, y))


def write_tokenizer(encoder: Encoder, path: Path) -> int:
    """Write the encoder (weights rounded before) and give the size of the file in bytes."""
    graph = Graph()
    zero, two = _axes(graph, 0), _axes(graph, 2)
    stop = graph.node("Cast", "feats_length", to=7)  # int64
    x = graph.node("Slice", "feats", zero, stop, two)
    x = graph.silu(graph.convolution(encoder.conv1, x))
    x = graph.swapped(graph.silu(graph.convolution(encoder.conv2, x)))
    positions = _positions(graph, x, encoder)
    for block in encoder.blocks:
        assert isinstance(block, Block)
        x = _transformer_block(graph, block, x, positions)
    quantiser = encoder.quantiser
    y = graph.linear(quantiser.narrow, graph.norm(encoder.norm, x))
    y = graph.node(
        "Div", graph.node("Sub", y, graph.constant(quantiser.mean)), graph.constant(quantiser.deviation)
    )
    y = graph.node("Round", graph.node("Mul", graph.node("Tanh", y), graph.constant(0.999)))
    digits = graph.node("Add", y, graph.constant(1.0))
    powers = graph.constant((3.0 ** np.arange(encoder.sizes.levels))[:, None])
    index = graph.node("Squeeze", graph.node("MatMul", digits, powers), two)
    graph.node("Cast", index, name="indices", to=INT32)
    inputs = {"feats": (FLOAT, (1, 128, "frames")), "feats_length": (INT32, (1,))}
    return graph.write(path, "speech_tokenizer", inputs, ("indices", INT32, (1, "tokens")))


def _conv_block(graph: Graph, block: ConvBlock, x: str) -> str:
    y = graph.swapped(graph.convolution(block.depthwise, graph.swapped(x)))
    y = graph.silu(graph.linear(block.up, graph.norm(block.norm, y)))
    return graph.node("Add", x, graph.linear(block.down, y))


def write_speaker(net: SpeakerNet, path: Path) -> int:
    """Write the speaker encoder (weights rounded before) and give the size of the file in bytes."""
    graph = Graph()
    x = graph.silu(graph.swapped(graph.convolution(net.enter, graph.swapped("input"))))
    for block in net.blocks:
        assert isinstance(block, ConvBlock)
        x = _conv_block(graph, block, x)
    x = graph.norm(net.norm, x)
    time = _axes(graph, 1)
    scores = graph.linear(net.attend2, graph.node("Tanh", graph.linear(net.attend1, x)))
    weights = graph.node("Softmax", scores, axis=1)
    mean = graph.node("ReduceSum", graph.node("Mul", weights, x), time, keepdims=1)
    away = graph.node("Sub", x, mean)
    spread = graph.node("Mul", weights, graph.node("Mul", away, away))
    spread = graph.node("ReduceSum", spread, time, keepdims=1)
    spread = graph.node("Sqrt", graph.node("Add", spread, graph.constant(1e-4)))
    pooled = graph.node("Squeeze", graph.node("Concat", mean, spread, axis=2), time)
    y = graph.linear(net.leave, pooled)
    length = graph.node("ReduceL2", y, axes=[1], keepdims=1)
    graph.node("Div", y, graph.node("Max", length, graph.constant(1e-12)), name="output")
    shape = (1, net.sizes.embedding)
    return graph.write(
        path, "speaker_encoder", {"input": (FLOAT, (1, "frames", 80))}, ("output", FLOAT, shape)
    )


def session(path: Path) -> onnxruntime.InferenceSession:
    """One thread, on the CPU."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def check_speech(folder: Path | None, count: int = 12) -> list[Tensor]:
    """Float32 samples at 16 kHz, each ``[1, samples]``, from 1 s to 30 s."""
    if folder is not None:
        corpus = Corpus(folder)
        step = max(1, len(corpus) // count)
        speech = Speech16k(corpus.subset(range(0, len(corpus), step)), CPU)
        rows = [speech.batch(torch.tensor([index])) for index in range(len(speech.lengths))]
        found = [samples[:, : int(lengths[0])] for samples, lengths in rows]
        return [*found, torch.cat(found, 1)[:, : 30 * RATE]]
    generator = torch.Generator().manual_seed(0)
    made = []
    for seconds in np.linspace(1.0, 30.0, count):
        at = torch.arange(int(seconds * RATE)) / RATE
        pitch = 120.0 + 40.0 * torch.sin(2.0 * at)
        buzz = torch.sin(2 * torch.pi * pitch.cumsum(0) / RATE).sign() * torch.sin(9.0 * at).clamp_min(0.0)
        noise = torch.randn(len(at), generator=generator) * torch.sin(5.0 * at + 1.0).clamp_min(0.0)
        made.append((0.2 * buzz + 0.1 * noise)[None])
    return made


@torch.inference_mode()
def agreement(encoder: Encoder, path: Path, speech: list[Tensor]) -> float:
    """Share of tokens that the file and the network have in common."""
    runner, same, total = session(path), 0, 0
    for samples in speech:
        mel, frames = log_mel128(samples, torch.tensor([samples.shape[1]]))
        expected, _ = encoder(mel, frames)
        given = {"feats": mel.numpy(), "feats_length": frames.to(torch.int32).numpy()}
        (indices,) = runner.run(["indices"], given)
        same += int((indices == expected.numpy()).sum())
        total += expected.numel()
    return same / total


@torch.inference_mode()
def speaker_error(net: SpeakerNet, path: Path, speech: list[Tensor]) -> float:
    """Largest difference between the file's embedding and the network's."""
    runner, worst = session(path), 0.0
    for samples in speech:
        banks, frames = fbank80(samples, torch.tensor([samples.shape[1]]))
        (output,) = runner.run(["output"], {"input": banks.numpy()})
        worst = max(worst, float(np.abs(output - net(banks, frames).numpy()).max()))
    return worst


def main(argv: list[str] | None = None) -> None:
    """Export what is given and check it; ends with an error when file and network differ."""
    parser = argparse.ArgumentParser(prog="python -m recipes.mini.export_onnx", description=__doc__)
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.pt")
    parser.add_argument("--speaker", type=Path, help="speaker.pt")
    parser.add_argument("--out", type=Path, required=True, help="model folder")
    parser.add_argument("--data", type=Path, help="corpus whose speech checks the files (default: made up)")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    speech = check_speech(args.data)
    if args.tokenizer:
        trainer, _, _ = load_shipped(str(args.tokenizer), CPU)
        size = write_tokenizer(trainer.encoder, args.out / TOKENIZER_NAME)
        share = agreement(trainer.encoder, args.out / TOKENIZER_NAME, speech)
        print(f"{TOKENIZER_NAME}: {size / 1e6:.2f} MB, {share:.3%} of the tokens agree")
        if share < 0.999:
            raise SystemExit("the exported tokenizer differs from the network")
    if args.speaker:
        net = load_shipped_speaker(str(args.speaker), CPU)
        size = write_speaker(net, args.out / SPEAKER_NAME)
        error = speaker_error(net, args.out / SPEAKER_NAME, speech)
        print(f"{SPEAKER_NAME}: {size / 1e6:.2f} MB, largest difference {error:.1e}")
        if error > 1e-4:
            raise SystemExit("the exported speaker encoder differs from the network")


if __name__ == "__main__":
    main()
