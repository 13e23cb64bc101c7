"""Launches of several chunks through all of the packed kernels: what one way leaves, the other takes up.

Without a GPU they run in Triton's interpreter, in float32, on a small model.
"""

import dataclasses

import pytest
import torch

from vivace.config import DiTConfig, FlowConfig

pytest.importorskip("tests.interpreter")  # before anything imports Triton
dit_packed = pytest.importorskip("vivace.kernels.dit_packed")

from vivace.models.flow import FlowModel  # noqa: E402
from vivace.models.flow_device import DeviceFlow  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DIM, CHUNK_TOKENS = 256, 5
CONFIG = FlowConfig(
    dit=DiTConfig(dim=DIM, depth=2, heads=4, dim_head=64, ff_mult=1, static_chunk_frames=2 * CHUNK_TOKENS),
    vocab_size=20,
    lookahead_channels=32,
    num_steps=1,
    noise_frames=200,
)
AROUND = {
    "embed_input": dit_packed._single(16, 128, 128),
    "convolve": dit_packed._single(16, 16, 16),
    "convolve_add": dit_packed._single(16, 16, 16),
    "attention": dit_packed._wide(16, 16, 1),
    "advance": dit_packed._single(16, 16, 128),
}
WIDE, LIBRARY = dit_packed._wide(32, 128, 128), dit_packed._library(8, 64, 1)
SINGLE = dit_packed._single(16, 32, 128)
ROWS = dit_packed._library(4, DIM, 1)  # the library's tiles that end a norm


@pytest.mark.parametrize(
    "ways",
    [(WIDE, ROWS, LIBRARY, ROWS), (LIBRARY, ROWS, LIBRARY, ROWS), (LIBRARY, WIDE, SINGLE, ROWS)],
    ids=["as 24 and 32", "as 4 to 16", "mixed"],
)
def test_ways_take_up_what_others_leave(ways):
    torch.manual_seed(5)
    model = FlowModel(CONFIG).eval().to(DEVICE)
    names = ("qkv", "add_attention", "ff_in", "add_ff")
    kernels = dit_packed.PackedKernels(2, {**AROUND, **dict(zip(names, ways, strict=True))})
    flow = DeviceFlow(model, kernels=kernels, max_streams=2, use_graphs=False)
    tokens = [[(3 * at + 5) % 20 for at in range(count)] for count in (5, 4)]
    streams = [flow.open(torch.ones(192), torch.zeros(0, 80)) for _ in tokens]
    items = [(stream, own, True) for stream, own in zip(streams, tokens, strict=True)]
    for handle, own in zip(flow.launch_batch(items), tokens, strict=True):
        with torch.no_grad():
            voice = torch.zeros(0, 80, device=DEVICE), torch.ones(192, device=DEVICE)
            wanted = model.generate(torch.tensor(own, device=DEVICE), *voice, True).squeeze(0)
        torch.testing.assert_close(handle.check(), wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "ways", [(LIBRARY, ROWS, LIBRARY, ROWS), (SINGLE, WIDE, SINGLE, WIDE)], ids=["as 4", "as 2"]
)
def test_chunks_of_one_stream(ways):
    torch.manual_seed(5)
    config = dataclasses.replace(CONFIG, num_steps=2, dit=dataclasses.replace(CONFIG.dit, depth=1))
    model = FlowModel(config).eval().to(DEVICE)
    names = ("qkv", "add_attention", "ff_in", "add_ff")
    kernels = dit_packed.PackedKernels(2, {**AROUND, **dict(zip(names, ways, strict=True))})
    flow = DeviceFlow(model, kernels=kernels, most_in_wave=2, use_graphs=False)
    tokens = [(3 * at + 5) % 20 for at in range(2 * CHUNK_TOKENS - 1)]
    voice = torch.zeros(0, 80, device=DEVICE), torch.ones(192, device=DEVICE)
    flow.step(flow.open(voice[1], voice[0]), tokens[:CHUNK_TOKENS], True)  # the start is known from now on
    mel = flow.step(flow.open(voice[1], voice[0]), tokens, True)
    assert list(flow._solvers) == [1, 2]
    with torch.no_grad():
        wanted = model.generate(torch.tensor(tokens, device=DEVICE), *voice, True).squeeze(0)
    torch.testing.assert_close(mel, wanted, atol=2e-4, rtol=1e-4)
