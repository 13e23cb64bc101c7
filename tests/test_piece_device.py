"""CosyVoice-300M's flow for many streams, on the CPU: the pieces of the plain stream, and whole utterances.

Everything runs in float32: the same sums in another order, so the tolerance is that of the flow's tests.
"""

import itertools

import pytest
import torch

from tests.test_flow_regulated import inputs, vectors  # noqa: F401  (fixture)
from tests.test_older_streams import built, first  # noqa: F401  (fixture)
from vivace.errors import SynthesisError
from vivace.models.flow_pieces import PieceFlow
from vivace.models.piece_device import BUCKETS, DevicePieceFlow
from vivace.models.piece_solver import PieceSolver

ATOL = 3e-4


@pytest.fixture(scope="module")
def flow():
    return built(PieceFlow)


@pytest.fixture(scope="module")
def device(flow):
    return DevicePieceFlow(flow, max_rows=4)


@torch.inference_mode()
def plain(flow, tokens, prompt_mel, embedding, cuts):
    stream, edges = flow.new_stream(embedding, prompt_mel), [0, *cuts, len(tokens)]
    parts = [flow.step(stream, tokens[a:b].tolist(), b == len(tokens)) for a, b in itertools.pairwise(edges)]
    return torch.cat(parts, dim=1)


@torch.inference_mode()
def on_device(device, tokens, prompt_mel, embedding, cuts):
    stream, edges = device.model.new_stream(embedding, prompt_mel), [0, *cuts, len(tokens)]
    parts = [
        device.launch_batch([(stream, tokens[a:b].tolist(), b == len(tokens))])[0].check()
        for a, b in itertools.pairwise(edges)
    ]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("with_prompt", [True, False])
@pytest.mark.parametrize(
    ("count", "cuts"), [(61, []), (75, [70]), (101, []), (160, [90, 130]), (320, [60, 130, 200, 270])]
)
def test_a_stream(flow, device, vectors, with_prompt, count, cuts):  # noqa: F811
    tokens, prompt_mel, embedding = inputs(vectors)
    given = (tokens[:count], prompt_mel if with_prompt else prompt_mel[:0], embedding)
    wanted, got = plain(flow, *given, cuts), on_device(device, *given, cuts)
    torch.testing.assert_close(got, wanted, atol=ATOL, rtol=0)


@torch.inference_mode()
def test_streams_side_by_side(flow, device, vectors):  # noqa: F811
    tokens, prompt_mel, embedding = inputs(vectors)
    texts = [tokens[:320], tokens[:95], tokens[40:200], tokens[60:64], tokens[:250], tokens[100:300]]
    prompts = [prompt_mel, prompt_mel, prompt_mel[:0], prompt_mel[:0], prompt_mel, prompt_mel[:40]]
    speakers = [embedding * (1 if index % 2 else -1) for index in range(6)]
    streams = [flow.new_stream(speaker, mel) for speaker, mel in zip(speakers, prompts, strict=True)]
    cuts = [len(text) // 2 for text in texts]
    halves = [
        device.launch_batch(
            [(s, t[:c].tolist(), False) for s, t, c in zip(streams, texts, cuts, strict=True)]
        ),
        device.launch_batch(
            [(s, t[c:].tolist(), True) for s, t, c in zip(streams, texts, cuts, strict=True)]
        ),
    ]
    for index, (before, after) in enumerate(zip(*halves, strict=True)):
        got = torch.cat((before.check(), after.check()), dim=1)
        wanted = plain(flow, texts[index], prompts[index], speakers[index], [cuts[index]])
        torch.testing.assert_close(got, wanted, atol=ATOL, rtol=0)


@torch.inference_mode()
def test_whole_utterances_side_by_side(flow, device, vectors):  # noqa: F811
    tokens, prompt_mel, embedding = inputs(vectors)
    items = [
        (tokens, prompt_mel, embedding),
        (tokens[:133], prompt_mel, -embedding),
        (tokens[60:61], prompt_mel[:0], embedding),
        (tokens[60:137], prompt_mel[:0], embedding),
        (tokens[:100], prompt_mel, embedding),
    ]
    handles = device.generate_batch(
        [(flow.new_stream(speaker, mel), each.tolist()) for each, mel, speaker in items]
    )
    for handle, item in zip(handles, items, strict=True):
        torch.testing.assert_close(handle.check(), flow.generate(*item), atol=ATOL, rtol=0)
    torch.testing.assert_close(handles[0].mel, vectors["flow.mel_full"][0], atol=ATOL, rtol=0)


@torch.inference_mode()
def test_an_utterance_beyond_all_buckets(flow, device, vectors):  # noqa: F811
    _, prompt_mel, embedding = inputs(vectors)
    tokens = torch.randint(0, 256, (1230,), generator=torch.Generator().manual_seed(0))
    assert flow.config.num_frames(1230) > BUCKETS[-1]
    handle = device.generate_batch([(flow.new_stream(embedding, prompt_mel[:0]), tokens.tolist())])[0]
    wanted = flow.generate(tokens, prompt_mel[:0], embedding)
    torch.testing.assert_close(handle.check(), wanted, atol=ATOL, rtol=0)


@torch.inference_mode()
def test_what_is_refused_or_not_finite_is_its_own(flow, device, vectors):  # noqa: F811
    tokens, prompt_mel, embedding = inputs(vectors)
    long, bad, good = (
        flow.new_stream(embedding, mel) for mel in (prompt_mel, prompt_mel * torch.nan, prompt_mel)
    )
    text = tokens[:200].tolist()
    handles = device.launch_batch([(long, [1] * 20_000, True), (bad, text, True), (good, text, True)])
    with pytest.raises(SynthesisError, match="speech tokens"):
        handles[0].check()
    with pytest.raises(SynthesisError, match="not finite"):
        handles[1].check()
    wanted = plain(flow, tokens[:200], prompt_mel, embedding, [])
    torch.testing.assert_close(handles[2].check(), wanted, atol=ATOL, rtol=0)
    again = on_device(
        device, tokens[:200], prompt_mel, embedding, []
    )  # the rows of the bad one are used again
    torch.testing.assert_close(again, wanted, atol=ATOL, rtol=0)
    assert not long.finished


@torch.inference_mode()
def test_a_launch_without_enough_tokens_gives_no_frames(flow, device, vectors):  # noqa: F811
    tokens, prompt_mel, embedding = inputs(vectors)
    stream = flow.new_stream(embedding, prompt_mel)
    assert device.launch_batch([(stream, tokens[:62].tolist(), False)])[0].check().shape == (80, 0)
    whole = flow.new_stream(embedding, prompt_mel), tokens[:60].tolist()
    assert device.generate_batch([whole])[0].check().shape == (80, 0)


def without_room(device, monkeypatch, fits):
    """Launches of rows for which ``fits`` is false find no memory."""
    run, sent = PieceSolver.run, {}
    send = PieceSolver.send
    monkeypatch.setattr(PieceSolver, "send", lambda self, rows: sent.update({self: rows}) or send(self, rows))

    def refuse(self):
        if not fits(sent[self]):
            raise torch.OutOfMemoryError("no memory")
        run(self)

    monkeypatch.setattr(PieceSolver, "run", refuse)


@torch.inference_mode()
def test_launches_that_do_not_fit_are_halved(flow, device, vectors, monkeypatch):  # noqa: F811
    """The frames stay; a stream that does not fit alone has its own error and is as it was, and the others go on."""
    tokens, prompt_mel, embedding = inputs(vectors)
    texts = [tokens[:90], tokens[10:120], tokens[5:90]]
    wanted = [plain(flow, text, prompt_mel, embedding, []) for text in texts]
    streams = [flow.new_stream(embedding, prompt_mel) for _ in texts]
    before, halved = streams[1].fork(), device.launches_halved
    large = texts[1].tolist()[60:80]
    with monkeypatch.context() as patched:
        without_room(device, patched, lambda rows: len(rows) == 1 and large[0] != rows[0].ids[60])
        items = [(stream, text.tolist(), True) for stream, text in zip(streams, texts, strict=True)]
        handles = device.launch_batch(items)
    assert device.launches_halved >= halved + 3
    for index in (0, 2):
        torch.testing.assert_close(handles[index].check(), wanted[index], atol=ATOL, rtol=0)
    with pytest.raises(torch.OutOfMemoryError):
        handles[1].check()
    assert (streams[1].tokens, streams[1].done, streams[1].finished) == (before.tokens, before.done, False)
    again = device.launch_batch([(streams[1], texts[1].tolist(), True)])[0]  # when there is room
    torch.testing.assert_close(again.check(), wanted[1], atol=ATOL, rtol=0)


@torch.inference_mode()
def test_memory_that_is_missing_behind_the_solver_loses_no_row(flow, device, vectors, monkeypatch):  # noqa: F811
    """Rows that have their frames are not computed again, which would move their streams twice."""
    tokens, prompt_mel, embedding = inputs(vectors)
    texts = [tokens[:90], tokens[10:120], tokens[20:90]]
    wanted = [plain(flow, text, prompt_mel, embedding, []) for text in texts]
    join, calls = flow.join, []

    def fail_once(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory")
        return join(*arguments)

    monkeypatch.setattr(flow, "join", fail_once)
    streams = [flow.new_stream(embedding, prompt_mel) for _ in texts]
    handles = device.launch_batch([(s, t.tolist(), True) for s, t in zip(streams, texts, strict=True)])
    for handle, mel in zip(handles, wanted, strict=True):
        torch.testing.assert_close(handle.check(), mel, atol=ATOL, rtol=0)


@torch.inference_mode()
def test_whole_utterances_that_do_not_fit_are_halved(flow, device, vectors, monkeypatch):  # noqa: F811
    tokens, prompt_mel, embedding = inputs(vectors)
    long = torch.randint(0, 256, (1230,), generator=torch.Generator().manual_seed(0))  # beyond all graphs
    texts = [tokens[:100], long, tokens[:133]]
    wanted = [flow.generate(text, prompt_mel, embedding) for text in (texts[0], texts[2])]
    without_room(device, monkeypatch, lambda rows: len(rows) == 1 and len(rows[0].ids) < 1000)
    handles = device.generate_batch([(flow.new_stream(embedding, prompt_mel), t.tolist()) for t in texts])
    with pytest.raises(torch.OutOfMemoryError):
        handles[1].check()
    for index, mel in zip((0, 2), wanted, strict=True):
        torch.testing.assert_close(handles[index].check(), mel, atol=ATOL, rtol=0)


def test_warm_up_makes_the_solvers_of_a_prompt(flow):
    device = DevicePieceFlow(flow, max_rows=2)
    device.warm_up(100)
    assert {rows for rows, _ in device._solvers} == {1, 2}
    before = dict(device._solvers)
    stream = flow.new_stream(torch.ones(192), torch.zeros(100, 80))
    prompt = flow.prompt_tokens(100)
    device.launch_batch([(stream, [1] * (prompt + 400), True)])
    assert device._solvers == before
