"""Streaming flow: chunked equals whole, at any split.

Tolerance: the stream adds the same float32 numbers in another order (joined projections, per-chunk matrix
products), so values around 1 to 5 differ by some 1e-6; 1e-4 is a hundred times below what a wrong frame gives.
Where the same computation runs twice, results are compared bit by bit.
"""

import copy
import functools
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.test_flow import inputs, model, vectors  # noqa: F401  (fixtures)
from vivace.config import DiTConfig, FlowConfig
from vivace.errors import CancelledRequestError, SynthesisError
from vivace.models.flow import FlowModel

CHUNK, AHEAD, VOCAB = 5, 3, 30
CONFIG = FlowConfig(
    dit=DiTConfig(dim=48, depth=2, heads=3, dim_head=16, ff_mult=2, static_chunk_frames=2 * CHUNK),
    vocab_size=VOCAB,
    lookahead_channels=12,
    num_steps=3,
    noise_frames=90,
)
LONGEST = CONFIG.noise_frames // 2
EMBEDDING = torch.linspace(-1, 1, 192)

token_lists = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=LONGEST)


@functools.cache
def flow():
    """One random model for all tests; larger weights than usual, so that errors show."""
    torch.manual_seed(7)
    random_model = FlowModel(CONFIG).eval()
    with torch.no_grad():
        for weight in random_model.parameters():
            weight.mul_(1.5)
    return random_model


def prompt_mel(num_tokens):
    return torch.sin(torch.arange(160.0 * num_tokens)).view(2 * num_tokens, 80)


def pieces(tokens, cuts):
    borders = [0, *sorted(cut for cut in cuts if cut < len(tokens)), len(tokens)]
    return [tokens[start:end] for start, end in itertools.pairwise(borders)]


def run(stream, parts, finish=True):
    done = [flow().step(stream, part, finish and index == len(parts) - 1) for index, part in enumerate(parts)]
    return torch.cat(done, dim=1)


def new_stream(prompt_tokens, capacity=4):
    return flow().new_stream(EMBEDDING, prompt_mel(prompt_tokens), capacity)


@settings(deadline=None, max_examples=60)
@given(tokens=token_lists, prompt=st.integers(0, 20), cuts=st.sets(st.integers(0, LONGEST), max_size=8))
def test_any_split_equals_whole(tokens, prompt, cuts):
    prompt = min(prompt, len(tokens))
    whole = flow().generate(torch.tensor(tokens), prompt_mel(prompt), EMBEDDING, streaming=True)
    streamed = run(new_stream(prompt), pieces(tokens, cuts))
    torch.testing.assert_close(streamed, whole.detach(), atol=1e-4, rtol=0)


@settings(deadline=None, max_examples=30)
@given(tokens=token_lists, later=token_lists, prompt=st.integers(0, 12))
def test_later_tokens_never_change_earlier_output(tokens, later, prompt):
    first = run(new_stream(prompt), [tokens], finish=False)
    longer = run(new_stream(prompt), [(tokens + later)[:LONGEST]])
    assert torch.equal(first, longer[:, : first.shape[1]])


@settings(deadline=None, max_examples=30)
@given(prompt=st.integers(0, 20))
def test_output_comes_at_the_first_border_after_the_prompt(prompt):
    border = (prompt // CHUNK + 1) * CHUNK
    stream = new_stream(prompt)
    emitted = [flow().step(stream, [position % VOCAB], False).shape[1] for position in range(border + AHEAD)]
    assert emitted[:-1] == [0] * (border + AHEAD - 1)
    assert emitted[-1] == 2 * (border - prompt)


@settings(deadline=None, max_examples=30)
@given(tokens=token_lists, other=token_lists, at=st.integers(0, LONGEST), prompt=st.integers(0, 8))
def test_forks_are_independent(tokens, other, at, prompt):
    head, tail = tokens[:at], tokens[at:]
    rest = other[: LONGEST - len(head)]
    trunk = new_stream(prompt)
    before = flow().step(trunk, head, False)
    branch = trunk.fork()
    after_fork = run(branch, [rest])
    after = run(trunk, [tail])
    assert torch.equal(torch.cat((before, after), 1), run(new_stream(prompt), [head, tail]))
    assert torch.equal(torch.cat((before, after_fork), 1), run(new_stream(prompt), [head, rest]))


@pytest.mark.parametrize("left", range(2 * CHUNK + AHEAD))
def test_last_call_computes_whatever_is_left(left):
    stream = new_stream(2)
    tokens = [position % VOCAB for position in range(2 * CHUNK + AHEAD + left)]
    early = run(stream, [tokens[: 2 * CHUNK + AHEAD]], finish=False)
    assert early.shape[1] == 2 * (2 * CHUNK - 2)
    late = run(stream, [tokens[2 * CHUNK + AHEAD :]])
    whole = flow().generate(torch.tensor(tokens), prompt_mel(2), EMBEDDING, streaming=True)
    torch.testing.assert_close(torch.cat((early, late), 1), whole.detach(), atol=1e-4, rtol=0)


def test_last_call_without_anything_left_is_empty():
    assert flow().step(new_stream(0), [], True).shape == (80, 0)


def test_buffers_grow_geometrically():
    stream = new_stream(0, capacity=10)
    capacities = set()
    for _ in range(9):
        flow().step(stream, [1] * CHUNK, False)
        capacities.add(stream.dit.caches[0].shape[4])
    assert capacities == {10, 20, 30, 45, 67, 100}


def test_a_fork_has_room_and_the_trunk_stays_tight():
    trunk = new_stream(0, capacity=2 * CHUNK)
    flow().step(trunk, [1] * (CHUNK + AHEAD), False)
    branch = trunk.fork(capacity_frames=60)
    cache = branch.dit.caches[0]
    run(branch, [[2] * 20])
    assert branch.dit.caches[0] is cache
    assert trunk.fork().num_bytes == trunk.num_bytes < branch.num_bytes


def test_too_long_is_refused_and_leaves_the_stream_alone():
    stream = new_stream(0)
    tokens = [position % VOCAB for position in range(LONGEST)]
    before = run(stream, [tokens[:-2]], finish=False)
    with pytest.raises(SynthesisError, match="45 speech tokens"):
        flow().step(stream, [1, 1, 1], False)
    after = run(stream, [tokens[-2:]])
    assert torch.equal(torch.cat((before, after), 1), run(new_stream(0), [tokens]))


def test_prepared_weights_follow_the_state_dict():
    torch.manual_seed(8)
    first, second = FlowModel(CONFIG).eval(), FlowModel(CONFIG).eval()
    tokens = list(range(12))

    def speak(one):
        return one.step(one.new_stream(EMBEDDING, prompt_mel(0)), tokens, True)

    assert not torch.equal(speak(first), speak(second))
    copied = copy.deepcopy(first)
    copied.load_state_dict(second.state_dict())
    assert torch.equal(speak(copied), speak(second))
    first.load_state_dict(second.state_dict())
    assert torch.equal(speak(first), speak(second))


@pytest.mark.parametrize("pieces_of", [1, 19, 25, 300])
def test_golden_stream(model, vectors, pieces_of):  # noqa: F811
    tokens, mel, embedding = inputs(vectors)
    ids = tokens.tolist()
    stream = model.new_stream(embedding, mel)
    parts = [ids[start : start + pieces_of] for start in range(0, len(ids), pieces_of)]
    done = [model.step(stream, part, index == len(parts) - 1) for index, part in enumerate(parts)]
    expected = vectors["flow.mel_streaming_final"][0]
    torch.testing.assert_close(torch.cat(done, dim=1), expected, atol=2e-4, rtol=0)


def test_golden_stream_partial(model, vectors):  # noqa: F811
    tokens, mel, embedding = inputs(vectors)
    stream = model.new_stream(embedding, mel)
    done = model.step(stream, tokens[:78].tolist(), False)
    torch.testing.assert_close(done, vectors["flow.mel_streaming_partial"][0], atol=2e-4, rtol=0)


def test_embedding_length_does_not_matter():
    tokens = list(range(8))
    mels = []
    for scale in (1.0, 37.0):
        stream = flow().new_stream(EMBEDDING * scale, prompt_mel(0))
        mels.append(flow().step(stream, tokens, True).numpy())
    np.testing.assert_allclose(mels[0], mels[1], atol=1e-4)


def test_a_chunk_that_nobody_wants_stops_between_two_euler_steps():
    """Wherever it stops, other streams of the same prompt give the bytes they give without it."""
    tokens = list(range(2 * CHUNK))
    prompt = flow().new_stream(EMBEDDING, prompt_mel(1))
    flow().step(prompt, [1], False)
    alone = run(prompt.fork(), [tokens])
    for wanted_steps in range(CONFIG.num_steps):
        answers = iter([False] * wanted_steps + [True])
        stopped = prompt.fork()
        stopped.should_stop = functools.partial(next, answers)
        with pytest.raises(CancelledRequestError):
            flow().step(stopped, tokens, True)
        assert list(answers) == []
        torch.testing.assert_close(run(prompt.fork(), [tokens]), alone, rtol=0, atol=0)
