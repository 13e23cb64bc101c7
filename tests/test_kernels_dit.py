"""Triton kernels of the streaming DiT against their plain versions: odd counts, groups at different places and steps.

Without a GPU they run in Triton's interpreter, which is slow: sizes are tiny. Both sides add the same float32 products
in another order.
"""

import pytest
import torch

from vivace.kernels import dit_reference
from vivace.kernels.dit_reference import Added, Guidance, Normed, Positions, Rows, fold

pytest.importorskip("tests.interpreter")  # before anything imports Triton
dit = pytest.importorskip("vivace.kernels.dit")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHUNK, HEADS, WIDTH, DIM, MEL, STEPS, PADDED = 5, 3, 16, 48, 32, 3, 64
INNER = HEADS * WIDTH
LAYER = 2 * HEADS * CHUNK * WIDTH
Tile = dit.Tile


def random(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE)


class Case:
    """Groups that stand at different frames, steps and pages of one arena, and all buffers that a kernel may touch."""

    def __init__(self, groups=3, look_back=3, dim=DIM, streams=None, heads=HEADS, step=1):
        self.look_back, self.dim = look_back, dim
        layer = 2 * heads * CHUNK * WIDTH
        self.block = 2 * layer + 2 * look_back * dim
        self.block = -(-self.block // 16) * 16
        pages = 4
        self.arena = random(groups * pages * STEPS * self.block)
        table = torch.arange(groups * pages).flip(0).view(groups, pages) * (STEPS * self.block)
        starts = torch.tensor([0, 15, 5, 10][:groups], dtype=torch.int32)
        counts = torch.tensor([5, 2, 4, 1][:groups], dtype=torch.int32)
        streams = streams or groups
        starts, counts = (part[:streams].repeat(groups // streams) for part in (starts, counts))
        current = (starts // CHUNK).long()
        steps = torch.full((groups,), step, dtype=torch.int32)
        at = torch.arange(groups)
        self.rows = Rows(
            CHUNK, look_back, starts.to(DEVICE), counts.to(DEVICE), steps.to(DEVICE),
            table[at, current].to(DEVICE), table[at, (current - 1).clamp(min=0)].to(DEVICE),
            torch.zeros(groups, dtype=torch.int32, device=DEVICE), table.to(DEVICE), self.block, 2 * layer, self.arena,
            lambda offset: self.arena[offset:], step,
        )  # fmt: skip
        self.hidden = random(PADDED, dim)

    def normed(self, tiles, filled=True):
        x = Normed(random(PADDED, self.dim), random(2 * PADDED * self.dim, seed=1), tiles)
        if filled:
            hidden = random(self.rows.num_rows, self.dim, seed=2) + 0.5
            dit_reference.store_normed(hidden, random(self.rows.num_rows, self.dim, seed=3), x)
        return x


def both(name, case, arguments, outputs, kernels=dit, **options):
    """Runs kernel and plain version from the same state, and compares ``outputs`` and all pages."""
    outputs = [*outputs, case.arena]
    before = [output.clone() for output in outputs]
    getattr(kernels, name)(case.rows, *arguments, **options)
    got = [output.clone() for output in outputs]
    for output, old in zip(outputs, before, strict=True):
        output.copy_(old)
    getattr(dit_reference, name)(case.rows, *arguments)
    assert any(not torch.equal(output, old) for output, old in zip(outputs, before, strict=True))
    for output, expected in zip(got, outputs, strict=True):
        torch.testing.assert_close(output, expected, atol=2e-4, rtol=1e-4)


def folded(width, dim=DIM):
    return fold(random(width, dim) / dim**0.5, random(width), random(STEPS, dim), random(STEPS, dim, seed=4))


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("tile", [Tile(16, 16, 16), Tile(32, 16, 48 // 3)])
def test_qkv(step, tile):
    case = Case(step=step)
    rope = random(2, 18, WIDTH // 2)  # fewer positions than rows reach: those beyond are not valid
    query = random(PADDED, INNER)
    both("qkv", case, (case.normed(3), folded(3 * INNER), rope, query, HEADS, LAYER), [query], tile=tile)


@pytest.mark.parametrize("rows", [16, 32])
def test_attention(rows):
    case = Case(groups=4)
    mixed = torch.zeros(PADDED, INNER, device=DEVICE)
    query = random(PADDED, INNER)
    both("attention", case, (query, mixed, HEADS, LAYER), [mixed], tile=Tile(rows, 16, 16))


@pytest.mark.parametrize("step", [0, 2])
def test_add_projection(step):
    case = Case(step=step)
    out = case.normed(3, filled=False)
    added = Added(random(DIM, 32), random(DIM), random(STEPS, DIM), random(STEPS, DIM, seed=5))
    hidden = case.hidden
    sums = [out.scaled, *out.view()]
    both(
        "add_projection",
        case,
        (random(PADDED, 32), added, hidden, out),
        [hidden, *sums],
        tile=Tile(16, 16, 16),
    )


@pytest.mark.parametrize("step", [0, 2])
def test_ff_in(step):
    case, out = Case(step=step), random(PADDED, 32)
    both("ff_in", case, (case.normed(3), folded(32), out), [out], tile=Tile(16, 32, 16))


@pytest.mark.parametrize(("streams", "look_back"), [(2, 3), (4, 8)])
def test_embed_input(streams, look_back):
    case = Case(groups=4, look_back=look_back, streams=streams)
    x, weight = random(streams, CHUNK, MEL), random(DIM, MEL)
    condition = random(4 * CHUNK, DIM)
    joined = [random(6, look_back + CHUNK, DIM, seed=seed) for seed in (6, 7)]
    both("embed_input", case, (x, weight, condition, *joined), joined, tile=Tile(16, 16, 32))


@pytest.mark.parametrize("look_back", [3, 8])
def test_convolve(look_back):
    case = Case(look_back=look_back, dim=64)
    joined, following = (random(8, look_back + CHUNK, 64, seed=seed) for seed in (6, 7))
    positions = Positions(random(look_back + 1, 64, 16) / 8, random(64))
    both("convolve", case, (joined, positions, following), [following], tile=Tile(16, 16, 16))


@pytest.mark.parametrize("first_chunk", [0, 1])
@pytest.mark.parametrize("look_back", [3, 5, 8, 12])
def test_groups_hand_on_what_the_next_chunks_look_back_on(look_back, first_chunk):
    """Three chunks of one stream and one of another; look-backs of less than a chunk, of one, of several."""
    case = Case(groups=4, look_back=look_back, dim=64)
    chunks = torch.tensor([first_chunk, first_chunk + 1, first_chunk + 2, 2], device=DEVICE)
    table = case.rows.table[[0, 0, 0, 3]]
    at = torch.arange(4, device=DEVICE)
    rows = case.rows._replace(
        starts=(chunks * CHUNK).int(),
        counts=torch.tensor([CHUNK, CHUNK, 2, CHUNK], dtype=torch.int32, device=DEVICE),
        here=table[at, chunks],
        before=table[at, (chunks - 1).clamp(min=0)],
        ahead=torch.tensor([0, 1, 2, 0], dtype=torch.int32, device=DEVICE),
        table=table,
    )
    x, weight, condition = random(4, CHUNK, MEL), random(64, MEL), random(4 * CHUNK, 64)
    positions = Positions(random(look_back + 1, 64, 16) / 8, random(64))
    arena, results = case.arena.clone(), []
    for kernels, tile in ((dit, {"tile": Tile(16, 16, 32)}), (dit_reference, {})):
        case.arena.copy_(arena)
        first, second = (random(8, look_back + CHUNK, 64, seed=seed) for seed in (6, 7))
        kernels.embed_input(rows, x, weight, condition, first, second, **tile)
        kernels.convolve(rows, first, positions, second, **tile)
        results.append([first[:4], second[:4], case.arena.clone()])
    for kernel, plain in zip(*results, strict=True):
        torch.testing.assert_close(kernel, plain, atol=2e-4, rtol=1e-4)
    joined = results[0][0]
    for part in results[0][:2]:
        assert torch.equal(
            part[1, :look_back],
            torch.cat((part[0, :look_back], part[0, look_back:]))[CHUNK : CHUNK + look_back],
        )
    assert not torch.equal(joined[3, :look_back], joined[2, CHUNK:])


def test_convolve_add():
    case = Case(dim=64)
    joined, first = (random(8, 3 + CHUNK, 64, seed=seed) for seed in (6, 7))
    positions = Positions(random(4, 64, 16) / 8, random(64))
    out = case.normed(4, filled=False)
    both(
        "convolve_add", case, (joined, positions, first, random(STEPS, 64), case.hidden, out),
        [case.hidden, out.scaled, *out.view()], tile=Tile(16, 16, 16),
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["both branches", "keep", "use"])
def test_advance(mode):
    groups, streams = (2, 2) if mode == "use" else (4, 2)
    case = Case(groups=groups, streams=streams)
    x, shared = random(streams, CHUNK, MEL), random(40, MEL)
    x[1, 4] = float("inf")  # not a valid frame of that stream
    guidance = Guidance(0.7, random(STEPS), shared, mode == "use", mode == "keep")
    fault = torch.zeros(streams, dtype=torch.int32, device=DEVICE)
    both(
        "advance", case, (case.normed(3), folded(MEL), guidance, x, fault), [x, shared, fault],
        tile=Tile(16, 16, 16),
    )  # fmt: skip
    assert fault.tolist() == [0, 0]
    x[1, 1, 7] = float("nan")
    dit.advance(case.rows, case.normed(3), folded(MEL), guidance, x, fault, tile=Tile(16, 16, 16))
    assert fault.tolist() == [0, 1]


def test_advance_behind_a_norm_that_is_ended():
    case = Case(groups=4, streams=2)
    x, fault = random(2, CHUNK, MEL), torch.zeros(2, dtype=torch.int32, device=DEVICE)
    guidance = Guidance(0.7, random(STEPS), random(40, MEL))
    arguments = (case.normed(1), folded(MEL), guidance, x, fault)
    both("advance", case, arguments, [x], tile=Tile(16, 16, 16))
