"""CosyVoice 2's flow on pages: the same chunks as the plain stream, side by side, shared prompts, no page lost.

Everything runs on the CPU in float32: the same sums in another order, so the tolerance is that of the streaming tests.
"""

import numpy as np
import pytest
import torch

from tests.test_flow_unet import FOLDER, inputs, model, vectors  # noqa: F401  (fixtures)
from vivace.errors import SynthesisError
from vivace.models.unet_device import DeviceUNetFlow
from vivace.models.unet_pages import UNetPages
from vivace.models.unet_solver import UNetSolver

ATOL = 2e-4


@pytest.fixture(scope="module")
def device(model):  # noqa: F811
    return DeviceUNetFlow(model, max_bytes=pages(model, 24), max_streams=4)


def pages(model, count):  # noqa: F811
    return count * UNetPages.bytes_of(model.config, torch.float32)


def run(device, stream, parts):
    done = [device.step(stream, part, index == len(parts) - 1) for index, part in enumerate(parts)]
    return torch.cat(done, dim=1)


def test_the_recorded_stream(device, vectors):  # noqa: F811
    tokens, prompt_mel, embedding = inputs(vectors)
    stream = device.open(embedding, prompt_mel)
    mel = run(device, stream, [tokens[:30].tolist(), tokens[30:91].tolist(), [], tokens[91:].tolist()])
    torch.testing.assert_close(mel, vectors["flow.mel_streaming_final"][0], atol=ATOL, rtol=0)
    device.close(stream)
    device.close(stream)
    assert device.pages_in_use == 0


@pytest.mark.parametrize("count", [1, 24, 25, 28, 51, 53, 130])
@pytest.mark.parametrize("with_prompt", [True, False])
def test_any_length_equals_the_plain_whole(device, model, vectors, count, with_prompt):  # noqa: F811
    tokens, prompt_mel, embedding = inputs(vectors)
    prompt_mel = prompt_mel[: min(60, 2 * count)] if with_prompt else prompt_mel[:0]
    stream = device.open(embedding, prompt_mel)
    mel = run(device, stream, [tokens[: count // 2].tolist(), tokens[count // 2 : count].tolist()])
    whole = model.generate(tokens[:count], prompt_mel, embedding, streaming=True)
    torch.testing.assert_close(mel, whole, atol=ATOL, rtol=0)
    device.close(stream)


def test_streams_side_by_side_equal_streams_alone(device, model, vectors):  # noqa: F811
    tokens, prompt_mel, embedding = inputs(vectors)
    texts = [tokens[:133], tokens[10:70], tokens[5:6], tokens[20:100], tokens[3:90]]
    speakers = [embedding * (1 if index % 2 else -1) for index in range(5)]
    prompts = [prompt_mel, prompt_mel[:20], prompt_mel[:0], prompt_mel[:50], prompt_mel[:0]]
    streams = [device.open(speaker, mel) for speaker, mel in zip(speakers, prompts, strict=True)]
    halves = [(text[: len(text) // 2].tolist(), text[len(text) // 2 :].tolist()) for text in texts]
    first = device.launch_batch([(s, h[0], False) for s, h in zip(streams, halves, strict=True)])
    second = device.launch_batch([(s, h[1], True) for s, h in zip(streams, halves, strict=True)])
    for index, (before, after) in enumerate(zip(first, second, strict=True)):
        mel = torch.cat((before.check(), after.check()), dim=1)
        whole = model.generate(texts[index], prompts[index], speakers[index], streaming=True)
        torch.testing.assert_close(mel, whole, atol=ATOL, rtol=0)
    for stream in streams:
        device.close(stream)
    assert device.pages_in_use == 0


def test_launches_are_as_few_as_can_be(model, vectors):  # noqa: F811
    """Successive chunks of one stream share launches with those of others; alone, each has a launch of its own."""
    tokens, prompt_mel, embedding = inputs(vectors)
    mels = {}
    for alone, wanted in ((False, [4, 4, 1]), (True, [1] * 9)):
        flow = DeviceUNetFlow(model, max_bytes=pages(model, 12), alone=alone)
        launched, run = [], flow._run
        flow._run = lambda works, run=run, launched=launched: (launched.append(len(works)), run(works))
        streams = [flow.open(embedding, prompt_mel), flow.open(-embedding, prompt_mel[:0])]
        items = zip(streams, (tokens[:133], tokens[:60]), (True, True), strict=True)
        handles = flow.launch_batch([(stream, part.tolist(), last) for stream, part, last in items])
        mels[alone] = [handle.check() for handle in handles]
        assert launched == wanted
    torch.testing.assert_close(mels[False], mels[True], atol=ATOL, rtol=0)


def test_launches_that_do_not_fit_are_halved(model, vectors, monkeypatch):  # noqa: F811
    """Whose rows they are: three chunks of one stream and one of another; a chunk that fits nowhere fails alone."""
    tokens, prompt_mel, embedding = inputs(vectors)
    texts, run, too_long = [tokens[:60].tolist(), tokens[:40].tolist()], UNetSolver.run, []
    flow = DeviceUNetFlow(model, max_bytes=pages(model, 12))

    def refuse(solver, num_pages):
        if solver.chunks > 1 or num_pages in too_long:
            raise torch.OutOfMemoryError("no memory")
        run(solver, num_pages)

    monkeypatch.setattr(UNetSolver, "run", refuse)
    streams = [flow.open(embedding, prompt_mel), flow.open(-embedding, prompt_mel[:0])]
    alone = [flow.step(flow.fork(stream), text, True) for stream, text in zip(streams, texts, strict=True)]
    before = flow.launches_halved, flow.pages_in_use
    items = [(flow.fork(stream), text, True) for stream, text in zip(streams, texts, strict=True)]
    for handle, wanted in zip(flow.launch_batch(items), alone, strict=True):
        torch.testing.assert_close(handle.check(), wanted, atol=ATOL, rtol=0)
    assert flow.launches_halved > before[0]
    for stream, _, _ in items:
        flow.close(stream)
    assert flow.pages_in_use == before[1]

    too_long.append(4)  # pages that the first stream's third chunk looks back on
    handles = flow.launch_batch([(stream, text, True) for stream, text in zip(streams, texts, strict=True)])
    with pytest.raises(torch.OutOfMemoryError):
        handles[0].check()
    torch.testing.assert_close(handles[1].check(), alone[1], atol=ATOL, rtol=0)
    assert (streams[0].pages, streams[0].waiting, streams[0].length, streams[0].finished) == (
        [],
        [],
        0,
        False,
    )
    too_long.clear()
    torch.testing.assert_close(flow.step(streams[0], texts[0], True), alone[0], atol=ATOL, rtol=0)


def test_a_prompt_is_computed_once_and_shared(device, vectors):  # noqa: F811
    tokens, prompt_mel, embedding = inputs(vectors)
    prompt = device.open(embedding, prompt_mel)
    device.step(prompt, tokens[:60].tolist(), is_last=False)
    assert device.pages_in_use == 2
    forks = [device.fork(prompt) for _ in range(2)]
    assert device.pages_in_use == 2
    one = device.step(forks[0], tokens[60:].tolist(), is_last=True)
    other = device.step(forks[1], tokens[60:].tolist(), is_last=True)
    torch.testing.assert_close(one, other)
    torch.testing.assert_close(
        one[:, -40:], vectors["flow.mel_streaming_final"][0][:, -40:], atol=ATOL, rtol=0
    )
    for stream in (prompt, *forks):
        device.close(stream)
    assert device.pages_in_use == 0


def test_full_memory_is_an_error_that_changes_nothing(model, vectors):  # noqa: F811
    tokens, prompt_mel, embedding = inputs(vectors)
    small = DeviceUNetFlow(model, max_bytes=pages(model, 3))
    stream = small.open(embedding, prompt_mel)
    small.step(stream, tokens[:60].tolist(), is_last=False)
    with pytest.raises(SynthesisError, match="no memory left"):
        small.step(stream, tokens[60:].tolist(), is_last=True)
    assert (small.pages_in_use, stream.length, stream.finished) == (2, 100, False)
    rest = small.step(stream, tokens[60:75].tolist(), is_last=True)
    assert rest.shape == (80, 50)


def test_values_that_are_not_finite_are_an_error_of_that_stream(device, vectors):  # noqa: F811
    tokens, prompt_mel, embedding = inputs(vectors)
    bad, good = device.open(embedding, prompt_mel * np.nan), device.open(embedding, prompt_mel)
    handles = device.launch_batch([(stream, tokens[:60].tolist(), False) for stream in (bad, good)])
    with pytest.raises(SynthesisError, match="not finite"):
        handles[0].check()
    assert bool(handles[1].check().isfinite().all())
    for stream in (bad, good):
        device.close(stream)
    again = device.open(embedding, prompt_mel)
    mel = run(device, again, [tokens.tolist()])
    torch.testing.assert_close(mel, vectors["flow.mel_streaming_final"][0], atol=ATOL, rtol=0)
    device.close(again)


def test_an_item_that_is_refused_leaves_the_others_alone(device, vectors):  # noqa: F811
    tokens, prompt_mel, embedding = inputs(vectors)
    long, short = device.open(embedding, prompt_mel[:0]), device.open(embedding, prompt_mel[:0])
    refused, done = device.launch_batch([(long, [1] * 8000, True), (short, tokens[:40].tolist(), True)])
    with pytest.raises(SynthesisError, match="longer than 7500 speech tokens"):
        refused.check()
    assert done.check().shape == (80, 80)
    assert not long.finished
    for stream in (long, short):
        device.close(stream)
    assert device.pages_in_use == 0


def test_warm_up_leaves_nothing_behind(device):
    device.warm_up(150)
    assert device.pages_in_use == 0
    assert not any(bool(part.any()) for part in device.pool.parts(0))  # which stands before every first chunk


def test_offline_mode(device, model, vectors):  # noqa: F811
    tokens, prompt_mel, embedding = inputs(vectors)
    mel = device.generate(tokens.tolist(), prompt_mel, embedding)
    torch.testing.assert_close(mel, vectors["flow.mel_full"][0], atol=ATOL, rtol=0)
