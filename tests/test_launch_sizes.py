"""How many streams share a launch: costs that make padding cheaper than small launches, and the other way round."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.test_flow import inputs, model, vectors  # noqa: F401  (fixtures)
from tests.test_flow_device import tokens_of, whole
from tests.test_flow_stream import CHUNK, EMBEDDING, flow, prompt_mel
from vivace.errors import SynthesisError
from vivace.models.flow_device import DeviceFlow
from vivace.models.launch_sizes import cheapest, powers_of_two

COSTS = {1: 6.9, 2: 8.9, 4: 11.7, 8: 17.2, 16: 28.4}


def test_sizes_at_measured_costs():
    """A launch of one costs nearly as much as one of two."""
    expected = {1: [1], 2: [2], 3: [4], 5: [8], 9: [8, 1], 10: [8, 2], 15: [16], 17: [16, 1], 27: [16, 16]}
    assert {count: cheapest(count, COSTS) for count in expected} == expected


@given(st.integers(1, 9), st.dictionaries(st.integers(1, 6), st.floats(1, 9), min_size=1, max_size=3))
def test_no_other_sizes_cost_less(count, costs):
    sizes = cheapest(count, costs)
    assert sum(sizes) >= count > sum(sizes[:-1])
    for number in range(1, count + 1):
        for other in itertools.combinations_with_replacement(costs, number):
            if sum(other) >= count:
                assert sum(costs[size] for size in sizes) <= sum(costs[size] for size in other) + 1e-9


@pytest.mark.parametrize(
    ("count", "sizes"), [(1, [1]), (7, [4, 2, 1]), (15, [8, 4, 2, 1]), (40, [16, 16, 8])]
)
def test_powers_of_two(count, sizes):
    assert powers_of_two(count, 16) == sizes


def test_padding_changes_no_stream():
    """Launches of four only: the same mel as each stream alone, no page lost, known chunks told from unknown ones."""
    device = DeviceFlow(flow(), max_streams=4, costs={4: 1.0})
    lengths, prompts = (20, 9, 33, 26, 7), (7, 0, 13, 2, 0)
    for _ in range(2):
        lists = [tokens_of(length, 3 + index) for index, length in enumerate(lengths)]
        streams = [device.open(EMBEDDING, prompt_mel(prompt)) for prompt in prompts]
        items = [(stream, tokens, True) for stream, tokens in zip(streams, lists, strict=True)]
        handles = [*device.launch_batch(items[:3]), *device.launch_batch(items[3:])]
        for handle, stream, tokens, prompt in zip(handles, streams, lists, prompts, strict=True):
            torch.testing.assert_close(handle.check(), whole(tokens, prompt), atol=1e-4, rtol=0)
            device.close(stream)
        assert device.pages_in_use == 0
    assert list(device._solvers) == [4]


def test_a_padded_row_of_bad_values_is_nobodys_fault():
    """What lies in the padding's page before its first use means nothing."""
    device = DeviceFlow(flow(), max_streams=2, costs={2: 1.0})
    page = device._padding().pages[0]
    device._padding_pool.resolve(page).fill_(float("nan"))
    stream = device.open(EMBEDDING, prompt_mel(0))
    mel = device.step(stream, tokens_of(2 * CHUNK + 1), True)
    torch.testing.assert_close(mel, whole(tokens_of(2 * CHUNK + 1)), atol=1e-4, rtol=0)
    device.close(stream)


def test_without_memory_for_padding_fewer_streams_are_tried(monkeypatch):
    device = DeviceFlow(flow(), max_streams=4, costs={1: 9.0, 4: 1.0})

    def full():
        raise SynthesisError("full")

    monkeypatch.setattr(device._padding_pool, "take", full)
    streams = [device.open(EMBEDDING, prompt_mel(0)) for _ in range(3)]
    tokens = tokens_of(CHUNK + 3)
    for handle in device.launch_batch([(stream, tokens, True) for stream in streams]):
        torch.testing.assert_close(handle.check(), whole(tokens), atol=1e-4, rtol=0)
    assert device.launches_halved
    for stream in streams:
        device.close(stream)


def test_warm_up_makes_all_sizes():
    """As many rows as streams, or as chunks of one stream: what is more."""
    costs = {1: 2.0, 3: 3.0, 5: 4.0, 8: 5.0, 20: 9.0}
    for most_in_wave, sizes in ((1, [1, 3, 5]), (None, [1, 3, 5, 8])):
        device = DeviceFlow(flow(), max_streams=5, costs=costs, most_in_wave=most_in_wave)
        device.warm_up(2 * CHUNK)
        assert sorted(device._solvers) == sizes
        assert device.pages_in_use == 0
