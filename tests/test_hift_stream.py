"""Pieces of any size give what the whole mel gives: the vocoder and each of its parts."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vivace.config import VocoderConfig
from vivace.layers.conv import CausalConv1d, CausalDownsampleConv1d, CausalUpsampleConv1d, LookaheadConv1d
from vivace.layers.stft import ShortTimeFourier
from vivace.models.hift import CausalHiFT
from vivace.models.source import CounterNoise

# Other piece lengths mean other orders of summation in float32; samples reach 1.
TOLERANCE = 2e-5

TINY = VocoderConfig(
    base_channels=16,
    f0_cond_channels=8,
    resblock_kernel_sizes=(3, 5),
    resblock_dilation_sizes=((1, 3), (1, 2)),
    source_resblock_kernel_sizes=(3, 3, 5),
    source_resblock_dilation_sizes=((1,), (1, 3), (1,)),
)
CONFIGS = {
    "frame": TINY,
    "sample": VocoderConfig(
        base_channels=16,
        f0_cond_channels=8,
        upsample_rates=(4, 5, 2, 3),
        upsample_kernel_sizes=(9, 11, 4, 7),
        resblock_kernel_sizes=(3,),
        resblock_dilation_sizes=((1, 3),),
        source_resblock_kernel_sizes=(3, 3, 3, 3),
        source_resblock_dilation_sizes=((1,), (1,), (1,), (2,)),
        conv_pre_lookahead_frames=5,
        source_phase="sample",
    ),
}


def make_model(config: VocoderConfig) -> CausalHiFT:
    """Random weights that give F0 on both sides of the voicing threshold and audible output."""
    torch.manual_seed(0)
    model = CausalHiFT(config).eval()
    with torch.no_grad():
        model.f0_predictor.classifier.weight.mul_(2000.0)
        model.conv_post.weight.mul_(4.0)
    return model


MODELS = {name: make_model(config) for name, config in CONFIGS.items()}


def random_mel(frames: int, seed: int = 0) -> Tensor:
    return torch.randn(80, frames, generator=torch.Generator().manual_seed(seed)) * 2.0 - 3.0


def run_in_pieces(model: CausalHiFT, mel: Tensor, cuts: list[int], seed: int) -> list[Tensor]:
    """One result per piece; the last piece, which may be empty, is the end."""
    borders = [0, *sorted(cuts), mel.shape[1]]
    stream = model.new_stream(seed)
    pieces = [mel[:, a:b] for a, b in pairwise(borders)]
    return [model.step(stream, piece, i == len(pieces) - 1) for i, piece in enumerate(pieces)]


def cuts_of(frames: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, frames), max_size=5)


@pytest.mark.parametrize("name", MODELS)
@given(data=st.data())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_any_split_equals_the_whole(name: str, data: st.DataObject) -> None:
    frames, seed = data.draw(st.integers(1, 24)), data.draw(st.integers(0, 2**63 - 1))
    mel, model = random_mel(frames, seed % 97), MODELS[name]
    with torch.inference_mode():
        whole = model(mel[None], noise=CounterNoise(seed))[0]
    parts = run_in_pieces(model, mel, data.draw(cuts_of(frames)), seed)
    assert len(whole) == frames * 480
    torch.testing.assert_close(torch.cat(parts), whole, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", MODELS)
@given(data=st.data())
@settings(max_examples=10, deadline=None, derandomize=True)
def test_later_frames_never_change_earlier_samples(name: str, data: st.DataObject) -> None:
    """And samples come out as soon as the look-ahead allows."""
    model, frames = MODELS[name], data.draw(st.integers(1, 16))
    lookahead = model.config.conv_pre_lookahead_frames
    early = model.step(model.new_stream(), random_mel(frames), is_last=False)
    assert len(early) == max((frames - lookahead) * 480 - 4, 0)
    longer = torch.cat((random_mel(frames), random_mel(8, seed=1) + 5.0), dim=1)
    with torch.inference_mode():
        whole = model(longer[None])[0]
    torch.testing.assert_close(early, whole[: len(early)], atol=TOLERANCE, rtol=0)
    assert not torch.allclose(whole[len(early) :][:480], torch.zeros(480))


def test_a_look_ahead_too_short_for_the_source_is_refused() -> None:
    with pytest.raises(ValueError, match="conv_pre_lookahead_frames"):
        CausalHiFT(VocoderConfig(conv_pre_lookahead_frames=3))


def test_an_empty_utterance_has_no_samples() -> None:
    model = MODELS["frame"]
    assert len(model.step(model.new_stream(), random_mel(0), is_last=True)) == 0
    assert model(random_mel(0)[None]).shape == (1, 0)


def test_streams_do_not_share_state() -> None:
    model, mel = MODELS["sample"], random_mel(20)
    alone = torch.cat(run_in_pieces(model, mel, [9], seed=3))
    mine, other = model.new_stream(3), model.new_stream(4)
    parts = []
    for piece, is_last in ((mel[:, :9], False), (mel[:, 9:], True)):
        parts.append(model.step(mine, piece, is_last))
        model.step(other, random_mel(piece.shape[1], seed=5), is_last)
    assert torch.equal(torch.cat(parts), alone)


def tensors_of(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list):
        return [tensor for item in value for tensor in tensors_of(item)]
    fields = getattr(value, "__dataclass_fields__", {})
    return [tensor for name in fields for tensor in tensors_of(getattr(value, name))]


def test_state_stays_small_however_long_the_stream() -> None:
    """And owns its memory: a view would keep every piece's intermediate results alive."""
    model, mel = MODELS["sample"], random_mel(60)
    stream, sizes = model.new_stream(), []
    for piece in mel.split(20, dim=1):
        model.step(stream, piece, is_last=False)
        sizes.append(sum(tensor.untyped_storage().nbytes() for tensor in tensors_of(stream)))
        assert sizes[-1] == sum(tensor.nbytes for tensor in tensors_of(stream))
    assert len(tensors_of(stream)) > 40
    assert sizes[0] == sizes[1] == sizes[2]


def test_rows_of_a_batch_equal_single_streams() -> None:
    model, mels = MODELS["sample"], torch.stack((random_mel(12), random_mel(12, seed=1)))
    stream = model.new_stream(batch=2)
    rows = torch.cat(
        [model.step_batch(stream, mels[..., :7], False), model.step_batch(stream, mels[..., 7:], True)], 1
    )
    for row, mel in zip(rows, mels, strict=True):
        torch.testing.assert_close(row, torch.cat(run_in_pieces(model, mel, [7], 0)), atol=TOLERANCE, rtol=0)


def test_noise_depends_on_seed_and_position_only() -> None:
    device = torch.device("cpu")
    noise = CounterNoise(seed=2**62 + 11)
    whole = noise.uniform(0, 4000, 9, device)
    assert torch.equal(noise.uniform(1234, 100, 9, device), whole[:, 1234:1334])
    assert not torch.equal(CounterNoise(seed=12).uniform(0, 4000, 9, device), whole)
    far = noise.uniform(10**9, 4000, 9, device)  # eleven hours of audio
    for values in (whole, far):
        assert values.min() >= 0
        assert values.max() < 1
        # Standard error of the mean of 36 000 uniform values is 0.0015; of a correlation, 0.005.
        assert abs(values.mean() - 0.5) < 0.008
        assert torch.corrcoef(torch.cat((values, values.roll(1, dims=1)))).triu(1).abs().max() < 0.08


def test_phase_runs_on_inside_frames_and_agrees_at_their_ends() -> None:
    """Both phase modes follow the same angle; a steady tone has the asked frequency."""
    f0 = torch.full((1, 50), 200.0)
    waves = {
        name: model.m_source._sines(f0, model.m_source.initial_phase(1))[0] for name, model in MODELS.items()
    }
    torch.testing.assert_close(waves["sample"][..., 479::480], waves["frame"][..., ::480], atol=1e-4, rtol=0)
    spectrum = torch.fft.rfft(waves["sample"][0], dim=-1).abs()
    assert spectrum.argmax(dim=-1).tolist() == [200 * k for k in range(1, 10)]


def test_upsampling_equals_repeating_then_convolving() -> None:
    torch.manual_seed(1)
    for kernel, rate in ((16, 8), (11, 5), (7, 3), (3, 4), (1, 2)):
        layer, x = CausalUpsampleConv1d(6, 5, kernel, rate), torch.randn(2, 6, 13)
        repeated = torch.nn.functional.pad(x.repeat_interleave(rate, dim=-1), (kernel - 1, 0))
        expected = torch.nn.functional.conv1d(repeated, layer.weight, layer.bias)
        torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=0)


LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "causal": lambda: CausalConv1d(3, 4, 5, dilation=3),
    "point": lambda: CausalConv1d(3, 4, 1),
    "lookahead": lambda: LookaheadConv1d(3, 4, 5),
    "upsample": lambda: CausalUpsampleConv1d(3, 4, 11, 5),
    "upsample_short": lambda: CausalUpsampleConv1d(3, 4, 1, 2),
    "downsample": lambda: CausalDownsampleConv1d(3, 4, 3),
}


@pytest.mark.parametrize("name", LAYERS)
@given(data=st.data())
@settings(max_examples=15, deadline=None, derandomize=True)
@torch.inference_mode()
def test_every_convolution_runs_in_pieces(name: str, data: st.DataObject) -> None:
    torch.manual_seed(2)
    layer, length = LAYERS[name](), data.draw(st.integers(4, 30))
    x = torch.randn(2, 3, length)
    borders = [0, *sorted(data.draw(cuts_of(length))), length]
    state, parts = layer.initial_state(2), []  # type: ignore[operator]
    for a, b in pairwise(borders):
        last = (b == length,) if isinstance(layer, LookaheadConv1d) else ()
        if last == (True,) and state is None:
            continue
        y, state = layer.step(x[..., a:b], state, *last)  # type: ignore[operator]
        parts.append(y)
        if last == (True,):
            break
    torch.testing.assert_close(torch.cat(parts, dim=-1), layer(x), atol=1e-5, rtol=0)


@given(data=st.data())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_fourier_runs_in_pieces(data: st.DataObject) -> None:
    fourier, blocks = ShortTimeFourier(16, 4), data.draw(st.integers(3, 40))
    samples = torch.randn(1, 4 * blocks, generator=torch.Generator().manual_seed(3))
    borders = [0, *sorted(data.draw(cuts_of(4 * blocks))), 4 * blocks]
    analysis, synthesis = fourier.analysis_state(1), fourier.synthesis_state(1)
    spectra, outputs = [], []
    for index, (a, b) in enumerate(pairwise(borders)):
        is_last = index == len(borders) - 2
        spectra.append(fourier.analyse_step(samples[:, a:b], analysis, is_last))
        outputs.append(fourier.synthesise_step(spectra[-1], synthesis, is_last))
    torch.testing.assert_close(torch.cat(spectra, dim=-1), fourier.analyse(samples), atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.cat(outputs, dim=-1), samples, atol=1e-5, rtol=0)
