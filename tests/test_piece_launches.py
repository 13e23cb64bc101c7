"""Launches of CosyVoice-300M's flow on a device: what shares them, what fails in them, what their kernels are given."""

import weakref

import pytest
import torch

from tests.test_flow_regulated import inputs, vectors  # noqa: F401  (fixture)
from tests.test_older_streams import built
from tests.test_piece_device import ATOL, plain
from vivace.kernels.unet_reference import PlainUNetOps
from vivace.models.flow_pieces import PieceFlow
from vivace.models.piece_device import BUCKETS, DevicePieceFlow
from vivace.models.piece_solver import PieceSolver


@pytest.fixture(scope="module")
def flow():
    return built(PieceFlow)


@pytest.fixture(scope="module")
def device(flow):
    return DevicePieceFlow(flow, max_rows=4)


@pytest.fixture
def launches(monkeypatch):
    """Tokens behind the prompt of each row, launch by launch."""
    found, send = [], PieceSolver.send

    def counted(solver, rows):
        found.append([len(row.ids) for row in rows])
        send(solver, rows)

    monkeypatch.setattr(PieceSolver, "send", counted)
    return found


def state(stream):
    return list(stream.prompt), list(stream.tokens), stream.first, stream.done, stream.finished


@torch.inference_mode()
def test_pieces_of_a_stream_are_rows_of_one_launch(flow, device, vectors, launches):  # noqa: F811
    """With the first and the last piece among them, which are shorter: a launch has the longest rows first."""
    tokens, prompt_mel, embedding = inputs(vectors)
    stream = flow.new_stream(embedding, prompt_mel)
    got = [device.launch_batch([(stream, tokens[:250].tolist(), False)])[0]]
    assert [len(rows) for rows in launches] == [3]  # up to 200 tokens, from 60 of the prompt on
    got.append(device.launch_batch([(stream, tokens[250:320].tolist(), True)])[0])
    assert [len(rows) for rows in launches] == [3, 3]
    wanted = plain(flow, tokens[:320], prompt_mel, embedding, [250])
    torch.testing.assert_close(torch.cat([part.check() for part in got], dim=1), wanted, atol=ATOL, rtol=0)
    assert [len(part.sizes) for part in got] == [3, 3]
    assert stream.done == 260


@torch.inference_mode()
def test_pieces_of_a_stream_may_be_spread_over_launches(flow, device, vectors, launches):  # noqa: F811
    """Seven and three pieces by fours, sorted by length: joined in the order of their streams all the same."""
    tokens, prompt_mel, embedding = inputs(vectors)
    texts = [tokens[:320], tokens[40:200]]
    prompts, speakers = [prompt_mel, prompt_mel[:40]], [embedding, -embedding]
    streams = [flow.new_stream(speaker, mel) for speaker, mel in zip(speakers, prompts, strict=True)]
    handles = device.launch_batch(
        [(stream, text.tolist(), True) for stream, text in zip(streams, texts, strict=True)]
    )
    assert sum(len(rows) for rows in launches) == sum(len(handle.sizes) for handle in handles)
    assert len(launches) == -(-sum(len(handle.sizes) for handle in handles) // 4)
    for handle, text, mel, speaker in zip(handles, texts, prompts, speakers, strict=True):
        torch.testing.assert_close(handle.check(), plain(flow, text, mel, speaker, []), atol=ATOL, rtol=0)


@torch.inference_mode()
def test_a_piece_that_fails_takes_its_own_stream(flow, device, vectors, launches, monkeypatch):  # noqa: F811
    """The longest piece does not fit: the others of its stream are not computed any more."""
    tokens, prompt_mel, embedding = inputs(vectors)
    texts = [tokens[:320].tolist(), tokens[:95].tolist()]
    streams = [flow.new_stream(embedding, prompt_mel) for _ in texts]
    before = [state(stream) for stream in streams]
    run = PieceSolver.run

    def refuse(solver):
        if max(launches[-1]) > 200:
            raise torch.OutOfMemoryError("no memory")
        run(solver)

    with monkeypatch.context() as patched:
        patched.setattr(PieceSolver, "run", refuse)
        handles = device.launch_batch(
            [(stream, text, True) for stream, text in zip(streams, texts, strict=True)]
        )
    with pytest.raises(torch.OutOfMemoryError):
        handles[0].check()
    assert state(streams[0]) == before[0]
    wanted = plain(flow, tokens[:95], prompt_mel, embedding, [])
    torch.testing.assert_close(handles[1].check(), wanted, atol=ATOL, rtol=0)
    assert len(launches[-1]) == 1  # the other stream alone
    again = device.launch_batch([(streams[0], texts[0], True)])[0]
    wanted = plain(flow, tokens[:320], prompt_mel, embedding, [])
    torch.testing.assert_close(again.check(), wanted, atol=ATOL, rtol=0)


@pytest.mark.parametrize(("kind", "name"), [(PieceSolver, "run"), (DevicePieceFlow, "_row")])
@torch.inference_mode()
def test_what_is_no_streams_fault_leaves_all_as_they_were(
    flow,
    device,
    vectors,  # noqa: F811
    monkeypatch,
    kind,
    name,
):
    """So that whoever gives the same tokens again gets the same frames."""
    tokens, prompt_mel, embedding = inputs(vectors)
    stream = flow.new_stream(embedding, prompt_mel)
    text, before = tokens[:170].tolist(), state(stream)
    with monkeypatch.context() as patched:
        patched.setattr(kind, name, lambda self, *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            device.launch_batch([(stream, text, True)])
    assert state(stream) == before
    wanted = plain(flow, tokens[:170], prompt_mel, embedding, [])
    handle = device.launch_batch([(stream, text, True)])[0]
    torch.testing.assert_close(handle.check(), wanted, atol=ATOL, rtol=0)


@torch.inference_mode()
def test_a_piece_is_faded_once_where_memory_is_missing_meanwhile(flow, device, vectors, monkeypatch):  # noqa: F811
    """Joining overwrites its mel before the last of its own memory is taken."""
    tokens, prompt_mel, embedding = inputs(vectors)
    stream, join, calls = flow.new_stream(embedding, prompt_mel), flow.join, []

    def fail_once(stream, *arguments):
        calls.append(stream)
        if len(calls) == 2:
            join(stream.fork(), *arguments)
            raise torch.OutOfMemoryError("no memory")
        return join(stream, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(flow, "join", fail_once)
        handle = device.launch_batch([(stream, tokens[:200].tolist(), True)])[0]
    wanted = plain(flow, tokens[:200], prompt_mel, embedding, [])
    torch.testing.assert_close(handle.check(), wanted, atol=ATOL, rtol=0)
    assert len(calls) == 1 + len(handle.sizes)


class _Strict(PlainUNetOps):
    """Kernels get pointers alone: what does not lie behind each other would be read wrong."""

    def __init__(self):
        self.types = set()

    def _look(self, counts, *parts):
        for part in (counts, *parts):
            assert part is None or part.is_contiguous()
        # Triton compiles anew for other types, and for pointers that are not on 16 bytes.
        self.types.add((counts.dtype, counts.data_ptr() % 16))

    def group_norm_mish(self, y, bias, norm, groups, counts, shift=None, residual=None):
        self._look(counts, y, bias, *norm[:2], *(shift or ()), residual)
        return super().group_norm_mish(y, bias, norm, groups, counts, shift, residual)

    def masked_add(self, x, counts, bias=None):
        self._look(counts, x, bias)
        return super().masked_add(x, counts, bias)


@torch.inference_mode()
def test_kernels_get_what_lies_behind_each_other(flow, vectors, monkeypatch):  # noqa: F811
    tokens, prompt_mel, embedding = inputs(vectors)
    strict = _Strict()
    monkeypatch.setattr("vivace.models.piece_device._ops", lambda _: strict)
    device = DevicePieceFlow(flow, max_rows=2)
    for count in (100, 130):  # a row, and two
        handle = device.launch_batch(
            [(flow.new_stream(embedding, prompt_mel), tokens[:count].tolist(), True)]
        )
        handle[0].check()
    assert {rows for rows, _ in device._solvers} == {1, 2}
    assert strict.types == {(torch.int32, 0)}


def test_a_solver_keeps_the_tables_that_its_graphs_read():
    """Two longer utterances later the encoder has other ones."""
    device = DevicePieceFlow(built(PieceFlow))
    attention = device.model.encoder.encoders[0].self_attn
    with torch.inference_mode():
        most = len(attention.table()[0][0])
        attention.positions(most, most)
        device.solver(1, 64)
        kept = weakref.ref(attention.table()[0])
        attention.positions(4 * most, 4 * most)
    assert attention.table()[0] is not kept()
    assert kept() is not None


@torch.inference_mode()
def test_warm_up_makes_what_streams_take_behind_any_prompt(flow, monkeypatch):
    """Graphs that are captured in the middle of a stream hold it up."""
    device, made, used = DevicePieceFlow(flow), [], []
    monkeypatch.setattr(device, "solver", lambda rows, frames: made.append(frames))
    monkeypatch.setattr(device, "_run", lambda jobs: used.extend(len(job.row.places) for job in jobs))
    monkeypatch.setattr(device, "_join", lambda works: None)
    for prompt_frames in range(0, 1500, 29):
        made.clear(), used.clear()
        device.warm_up(prompt_frames)
        for shift in range(5):
            stream = flow.new_stream(torch.ones(192), torch.zeros(prompt_frames, 80))
            device.launch_batch([(stream, [1] * (flow.prompt_tokens(prompt_frames) + 400 + shift), True)])
        assert {next(size for size in BUCKETS if size >= frames) for frames in used} <= set(made)
        assert max((0, *(size for size in BUCKETS if size < max(made)))) < max(used) + 10  # and hardly more
