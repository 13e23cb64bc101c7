"""The simulated device raises for what a real one cannot do, and shows what a missing wait does."""

from __future__ import annotations

import pytest

import tests.interpreter  # noqa: F401  (before anything that imports Triton)

import torch  # isort: skip
import triton  # isort: skip
import triton.language as tl  # isort: skip

from tests.simulated_cuda import CaptureError, DeviceMixError, simulated_cuda

if torch.cuda.is_available():
    pytest.skip("there is a real one", allow_module_level=True)


@triton.jit
def double_kernel(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, 2 * tl.load(x + at))


@pytest.fixture
def x():
    with simulated_cuda(), torch.no_grad():
        yield torch.arange(4.0, device="cuda")


def capture(work):
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream()):
        work()


FORBIDDEN = {
    "item": lambda x: x[0].item(),
    "a branch": lambda x: 1 if x[0] > 0 else 2,
    "int": lambda x: range(int(x[0])),
    "tolist": lambda x: x.tolist(),
    "to the host": lambda x: x.cpu(),
    "to the host without waiting": lambda x: x.to("cpu", non_blocking=True),
    "a new tensor of numbers": lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0], device="cuda"),
    "numbers from pageable memory": lambda x: x.copy_(torch.ones(4), non_blocking=True),
    "numbers from locked memory, waited for": lambda x: x.copy_(torch.ones(4).pin_memory()),
    "a list as an index": lambda x: x[[0, 2]],
    "an index on the host": lambda x: x[torch.arange(2)],
    "a list as an index of a target": lambda x: x.__setitem__([0, 2], 1.0),
    "a mask": lambda x: x[x > 1],
    "a mask of a target": lambda x: x.__setitem__(x > 1, 0.0),
    "nonzero": lambda x: x.nonzero(),
    "where without values": lambda x: torch.where(x > 0),
    "masked_select": lambda x: x.masked_select(x > 1),
    "unique": lambda x: x.unique(),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "equal": lambda x: torch.equal(x, x),
    "an unknown generator": lambda x: x.normal_(generator=torch.Generator("cuda")),
    "waiting for the device": lambda x: torch.cuda.synchronize(),
    "waiting for a stream": lambda x: torch.cuda.default_stream().synchronize(),
    "waiting for work outside": lambda x: torch.cuda.current_stream().wait_stream(
        torch.cuda.default_stream()
    ),
    "work elsewhere": lambda x: torch.zeros(2, device="cuda:1"),
    "a branch off that is not joined": lambda x: branch(x, joins=False),
    "nothing": lambda x: None,
    "a graph inside": lambda x: capture(lambda: x + 1),
}
ALLOWED = {
    "numbers from locked memory": lambda x, host: x.copy_(host, non_blocking=True),
    "an index on the device": lambda x, host: x[x.long().clamp(max=3)],
    "a mask that keeps the shape": lambda x, host: torch.where(x > 1, x, 0.0),
    "repeats of one number": lambda x, host: x.repeat_interleave(3),
    "a size that is known": lambda x, host: x.repeat_interleave(x.long(), output_size=6),
    "numbers of the code": lambda x, host: x.fill_(3.0),
    "the default generator": lambda x, host: x.normal_(),
    "a branch off that is joined": lambda x, host: branch(x, joins=True),
    "a kernel": lambda x, host: double_kernel[(1,)](x, x, BLOCK=4),
}


def branch(x, *, joins):
    side, here = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(here)
    with torch.cuda.stream(side):
        x += 1
    if joins:
        here.wait_stream(side)


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_a_graph_cannot_hold(x, name):
    with pytest.raises(CaptureError):
        capture(lambda: FORBIDDEN[name](x))


@pytest.mark.parametrize("name", ALLOWED)
def test_what_a_graph_can_hold(x, name):
    host = torch.ones(4, pin_memory=True)
    capture(lambda: ALLOWED[name](x, host))


@pytest.mark.parametrize("name", [n for n in FORBIDDEN if n not in ("nothing", "a graph inside")])
def test_outside_of_a_capture_all_of_it_is_allowed(x, name):
    FORBIDDEN[name](x)


def test_a_graph_works_on_what_lies_in_its_tensors(x):
    graph, number = torch.cuda.CUDAGraph(), 2.0
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        y = x * number
        x += 1
    number = 5.0
    assert x.tolist() == [0, 1, 2, 3]  # a capture runs nothing
    graph.replay()
    assert (y.tolist(), x.tolist()) == ([0, 2, 4, 6], [1, 2, 3, 4])
    graph.replay()
    assert y.tolist() == [2, 4, 6, 8]


MIXED = {
    "a tensor of the host": lambda x: x + torch.ones(4),
    "a weight of the host": lambda x: torch.nn.functional.linear(x, torch.ones(2, 4)),
    "a part of the host": lambda x: torch.cat((x, torch.ones(1))),
    "another device": lambda x: x + torch.ones(4, device="cuda:1"),
    "a pointer to the host": lambda x: double_kernel[(1,)](torch.ones(4), x, BLOCK=4),
}


@pytest.mark.parametrize("name", MIXED)
def test_tensors_of_two_devices(x, name):
    with pytest.raises(DeviceMixError):
        MIXED[name](x)


def test_numbers_of_the_host_go_along(x):
    assert (x * torch.tensor(2.0)).tolist() == [0, 2, 4, 6]


def test_a_kernel_runs_on_the_current_device(x):
    double_kernel[(1,)](x, x, BLOCK=4)
    assert x.tolist() == [0, 2, 4, 6]
    with pytest.raises(DeviceMixError, match="current"), torch.cuda.device(1):
        double_kernel[(1,)](x, x, BLOCK=4)


def test_a_reader_that_does_not_wait_reads_too_early(x):
    side = torch.cuda.Stream()
    x += 1
    with torch.cuda.stream(side):
        early = (2 * x).tolist()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert (2 * x).tolist() == [2, 4, 6, 8]
    assert early != [2, 4, 6, 8]


def test_locked_memory_is_read_when_its_turn_comes(x):
    host = torch.zeros(4, pin_memory=True)
    x.copy_(host, non_blocking=True)
    host += 1  # too early
    assert x.tolist() == [1, 1, 1, 1]
    pageable = torch.zeros(4)
    x.copy_(pageable, non_blocking=True)
    pageable += 1
    assert x.tolist() == [0, 0, 0, 0]


def test_a_copy_to_the_host_arrives_with_its_event(x):
    host, done = torch.zeros(4, pin_memory=True), torch.cuda.Event()
    host.copy_(x, non_blocking=True)
    done.record()
    assert host.tolist() == [0, 0, 0, 0]
    done.synchronize()
    assert host.tolist() == [0, 1, 2, 3]


def test_memory_that_another_stream_still_reads_is_given_away(x):
    side = torch.cuda.Stream()
    y = x + 1
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        z = 2 * y
    del y
    torch.cuda.current_stream().synchronize()
    assert z.isnan().all()


def test_a_graph_reads_memory_that_is_given_away(x):
    graph, y = torch.cuda.CUDAGraph(), x + 1
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        z = 2 * y
    graph.replay()
    assert z.tolist() == [2, 4, 6, 8]
    del y
    graph.replay()
    assert z.isnan().all()


def doubled(seed, *, waits):
    with simulated_cuda(seed=seed), torch.no_grad():
        x, side = torch.zeros(2, device="cuda"), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        for _ in range(20):
            x += 1
            if waits:
                side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                x *= 2
            torch.cuda.current_stream().wait_stream(side)
        return x.tolist() == [2**21 - 2] * 2


def test_at_random_moments():
    """Whatever runs when: what waits is right, and what does not is found to be wrong."""
    assert all(doubled(seed, waits=True) for seed in range(5))
    assert not all(doubled(seed, waits=False) for seed in range(5))
