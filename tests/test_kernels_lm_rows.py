"""The speech LM's Triton kernels against their plain versions, in Triton's interpreter or compiled on a GPU."""

from __future__ import annotations

from tests import interpreter  # isort: skip  (before anything imports Triton)

import pytest
import torch

from vivace.config import SpeechLMConfig
from vivace.engine.lm_kernels import draw_rows
from vivace.engine.sampler import TokenKind
from vivace.kernels import lm_launch
from vivace.kernels.reference import live_rows
from vivace.kernels.row_state import RowState
from vivace.models.lm_ops import PlainOps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, KV_HEADS, HEAD_DIM, PAGE = 6, 2, 32, 16
SLOTS = 7
CONFIG = SpeechLMConfig(
    hidden_size=40,
    intermediate_size=72,
    num_layers=1,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    text_vocab_size=50,
    speech_token_size=53,
    num_special_rows=8,
)


def random(*shape, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def slots(*numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def make_state(seed=0):
    """Rows in the middle of decoding: slot 2 has stopped, slot 5 has no tokens left."""
    generator = torch.Generator().manual_seed(seed)
    state = RowState.empty(SLOTS, 4, DEVICE)

    def ints(low, high, *shape):
        return torch.randint(low, high, (SLOTS, *shape), generator=generator)

    for name, values in {
        "token": ints(0, CONFIG.speech_token_size),
        "length": torch.tensor([0, 1, 40, 31, 32, 50, 63]),
        "place": ints(0, 1 << 44),
        "min_place": ints(0, 1 << 44),
        "kind": ints(0, 4),
        "seed": ints(0, 1 << 62),
        "top_p": torch.rand(SLOTS, generator=generator),
        "top_k": ints(1, 8),
        "win_size": torch.tensor([10, 0, 10, 64, 3, 10, 40]),
        "tau_r": torch.tensor([0.1, 0.1, 0.1, 0.02, 0.34, 0.1, 0.0]),
        "temperature": torch.tensor([1.0, 1.0, 1.0, 0.7, 0.0, 1.0, 1.5]),
        "recent": ints(0, CONFIG.num_speech_rows, 64),
        "decoded": torch.tensor([0, 5, 9, 64, 100, 1000, 63]),
        "stop": torch.tensor([0, 0, 1, 0, 0, 0, 0]),
        "remaining": torch.tensor([3, 1, 3, 9, 9, 0, 2]),
        "out_count": torch.tensor([0, 3, 1, 2, 0, 0, 1]),
    }.items():
        getattr(state, name).copy_(values)
    return state


def make_ops(state, splits=None):
    """The kernels and the plain versions on equal states, pages scattered."""
    table = (torch.randperm(SLOTS * 8, generator=torch.Generator().manual_seed(1)) + 1).view(SLOTS, 8)
    shared = {
        "heads": HEADS,
        "kv_heads": KV_HEADS,
        "eps": 1e-6,
        "table": table.int().to(DEVICE),
        "cos": random(128, HEAD_DIM // 2, seed=2),
        "sin": random(128, HEAD_DIM // 2, seed=3),
        "speech_token_size": CONFIG.speech_token_size,
    }
    copied = RowState(**{name: getattr(state, name).clone() for name in RowState.__slots__})
    kernels = lm_launch.KernelOps(
        **{name: value for name, value in shared.items() if name != "speech_token_size"},
        state=state,
        head_dim=HEAD_DIM,
        ids=(CONFIG.speech_token_size, CONFIG.num_speech_rows, CONFIG.fill_id, CONFIG.eos_id),
        pdl=False,
        splits=splits,
        part=16,
        top=8,
    )
    return kernels, PlainOps(**shared, state=copied, draw=draw_rows(CONFIG)), copied


def assert_same_state(first, second):
    for name in RowState.__slots__:
        assert torch.equal(getattr(first, name), getattr(second, name)), name


def close(first, second, dtype=torch.float32):
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(first.float(), second.float(), rtol=tolerance, atol=tolerance)


def test_embed():
    kernels, plain, _ = make_ops(make_state())
    table, rows = random(CONFIG.num_speech_rows, 40, seed=4, dtype=torch.bfloat16), slots(3, -1, 0)
    assert torch.equal(kernels.embed(table, rows), plain.embed(table, rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adds", [False, True])
def test_add_norm(dtype, adds):
    kernels, plain, _ = make_ops(make_state())
    x, delta = random(3, 40, seed=5), random(3, 40, seed=6, dtype=dtype) if adds else None
    mine, weight = x.clone(), random(40, seed=7, dtype=dtype)
    close(kernels.add_norm(mine, delta, weight), plain.add_norm(x, delta, weight), dtype)
    close(mine, x)


def test_silu_mul():
    kernels, plain, _ = make_ops(make_state())
    x = random(3, 2 * 1025, seed=8) * 8
    close(kernels.silu_mul(x), plain.silu_mul(x))


@pytest.mark.parametrize(("splits", "joined"), [(1, 128), (3, 128), (3, 8)])
@pytest.mark.parametrize("chosen", [(0, 1, 2, 3, 4, 5, 6), (6,), (-1, 4)])
def test_attend(monkeypatch, splits, joined, chosen):
    """Lengths at page borders, an empty past, a stopped row and an empty one: only live rows write.

    Parts are joined by one program, or by several.
    """
    monkeypatch.setattr(lm_launch, "_JOINED", joined)
    kernels, plain, state = make_ops(make_state(), splits)
    pool = random(2, SLOTS * 8 + 1, KV_HEADS, PAGE, HEAD_DIM, seed=9)
    rows, width = slots(*chosen), (HEADS + 2 * KV_HEADS) * HEAD_DIM
    qkv, bias = random(len(chosen), width, seed=10), random(width, seed=11)
    mine = pool.clone()
    got, expected = kernels.attend(qkv, bias, mine, rows), plain.attend(qkv, bias, pool, rows)
    live = live_rows(state, rows)
    close(got[live], expected[live])
    close(mine, pool)


def test_attend_in_half_precision():
    """float16: the interpreter has no bfloat16 products."""
    kernels, plain, _ = make_ops(make_state(), 2)
    pool = random(2, SLOTS * 8 + 1, KV_HEADS, PAGE, HEAD_DIM, seed=9, dtype=torch.float16)
    rows, width = slots(3, 6), (HEADS + 2 * KV_HEADS) * HEAD_DIM
    qkv = random(2, width, seed=10, dtype=torch.float16)
    bias = random(width, seed=11, dtype=torch.float16)
    mine = pool.clone()
    close(kernels.attend(qkv, bias, mine, rows), plain.attend(qkv, bias, pool, rows), torch.float16)
    assert torch.equal(mine, pool)


@pytest.mark.parametrize(("slot", "count"), [(0, 35), (3, 1), (1, 36)])
def test_attend_prompt(slot, count):
    """Positions behind the last one are padding, which neither is stored nor changes anything."""
    kernels, plain, _ = make_ops(make_state())
    pool = random(2, SLOTS * 8 + 1, KV_HEADS, PAGE, HEAD_DIM, seed=12)
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    qkv, bias = random(40, width, seed=13), random(width, seed=14)
    place = torch.tensor([slot, count], dtype=torch.int32)
    kernels._place.copy_(place)
    plain._place.copy_(place)
    mine = pool.clone()
    got, expected = kernels.attend_prompt(qkv, bias, mine), plain.attend_prompt(qkv, bias, pool)
    close(got[:count], expected[:count])
    close(mine, pool)
    x = random(40, 24, seed=15)
    assert torch.equal(kernels.prompt_end(x), plain.prompt_end(x))
    assert torch.equal(kernels._state.length, plain._state.length)


def test_embed_prompt():
    kernels, plain, _ = make_ops(make_state())
    text, speech = random(50, 40, seed=16), random(CONFIG.num_speech_rows, 40, seed=17)
    ids = torch.tensor([0, 49, 50, 50 + 60], device=DEVICE)
    assert torch.equal(kernels.embed_prompt(text, speech, ids), plain.embed_prompt(text, speech, ids))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_norm_linear(gated, rows):
    kernels, plain, _ = make_ops(make_state())
    x, gain, weight = random(rows, 40, seed=18), random(40, seed=19), random(2 * 19, 40, seed=20)
    expected = plain.add_norm(x, None, gain) @ weight.t()
    if gated:
        expected = plain.silu_mul(expected)
    close(kernels.norm_linear(x, gain, weight, gated=gated), expected)


@pytest.mark.parametrize("rows", [1, 4])
def test_linear_add(rows):
    kernels, _, _ = make_ops(make_state())
    x, weight, residual = random(rows, 72, seed=21), random(21, 72, seed=22), random(rows, 21, seed=23)
    expected = residual + x @ weight.t()
    kernels.linear_add(x, None, weight, residual)
    close(residual, expected)


def test_linear_add_joins_the_parts_of_the_attention():
    kernels, plain, _ = make_ops(make_state(), 3)
    pool = random(2, SLOTS * 8 + 1, KV_HEADS, PAGE, HEAD_DIM, seed=9)
    rows, width = slots(3, 6), (HEADS + 2 * KV_HEADS) * HEAD_DIM
    qkv, bias = random(2, width, seed=10), random(width, seed=11)
    parts, meta = kernels.attend_parts(qkv, bias, pool.clone(), rows, 3)
    weight, residual = random(24, HEADS * HEAD_DIM, seed=24), random(2, 24, seed=25)
    expected = residual + plain.attend(qkv, bias, pool, rows) @ weight.t()
    kernels.linear_add(parts, meta, weight, residual)
    close(residual, expected)


@pytest.mark.parametrize("seed", range(2))
def test_sample_draws_and_moves_rows_on_as_the_plain_version(seed):
    kernels, plain, copied = make_ops(state := make_state(seed))
    rows = slots(4, 0, -1, 6, 2, 1, 3, 5)
    for turn in range(2):
        logits = random(len(rows), 64, seed=100 * seed + turn) * 4
        kernels.sample(logits, rows)
        plain.sample(logits, rows)
        assert_same_state(state, copied)
    assert int(state.decoded[3]) == 66


def test_sample_with_scores_that_are_no_numbers():
    """A row with NaN or +inf among its allowed scores, or nothing allowed, stops alone."""
    kernels, plain, copied = make_ops(state := make_state())
    state.kind.fill_(TokenKind.SPEECH)
    copied.kind.fill_(TokenKind.SPEECH)
    logits = random(5, 64, seed=30)
    logits[0, 3], logits[1, 7], logits[2, :], logits[3, 60] = torch.nan, torch.inf, -torch.inf, torch.nan
    rows = slots(0, 1, 3, 4, 6)
    kernels.sample(logits, rows)
    plain.sample(logits, rows)
    assert_same_state(state, copied)
    assert state.stop.tolist() == [2, 2, 1, 2, 0, 0, 0]


def test_sample_takes_the_lower_of_equal_scores():
    kernels, plain, copied = make_ops(state := make_state())
    logits = torch.zeros(1, 64, device=DEVICE)
    logits[0, [9, 33]] = 5.0
    kernels.sample(logits, slots(4))  # temperature 0
    plain.sample(logits, slots(4))
    assert_same_state(state, copied)
    assert int(state.token[4]) == 9


def test_begin_and_report():
    kernels, plain, copied = make_ops(state := make_state())
    commands = torch.tensor([[3, 2, 1, 1 << 45], [-1, 0, 0, 0], [0, 4, 2, 7]], device=DEVICE)
    mine, theirs = slots(9, 9, 9), slots(9, 9, 9)
    kernels.begin(commands, mine)
    plain.begin(commands, theirs)
    assert torch.equal(mine, theirs)
    assert_same_state(state, copied)
    for tensor in (state.out_count, copied.out_count):
        tensor.copy_(torch.tensor([1, 0, 0, 4, 0, 0, 0]))
    state.out.copy_(torch.arange(SLOTS * 4).view(SLOTS, 4))
    results = torch.full((3, 4, 6), -7, dtype=torch.int32, device=DEVICE)
    kernels.report(mine, torch.tensor([4], device=DEVICE), results)
    assert results[1, 0].tolist() == [0, 4, 12, 13, 14, 15]
    assert results[1, 1, 1] == 0
    assert results[1, 2, :3].tolist() == [0, 1, 0]
    assert (results[[0, 2]] == -7).all()


assert interpreter
