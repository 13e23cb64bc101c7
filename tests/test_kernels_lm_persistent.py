"""The resident kernel of the speech LM: what blocks read; its scores and its sampling, on a GPU and emulated."""

import copy
import dataclasses

import pytest
import torch

from vivace.datatypes import SamplingParams
from vivace.engine.lm_device import LMDevice
from vivace.engine.lm_runner import LMSession, PlainSequence
from vivace.engine.sampler import SamplingRows, TokenKind, allowed_tokens, sample
from vivace.kernels import lm_persistent as persistent
from vivace.kernels.row_state import RowState
from vivace.layers.attention import rotary_tables
from vivace.models.speech_lm import SpeechLM
from vivace.random_checkpoint import full_config, tiny_config

from . import emulated_lm

FULL = persistent.Shape(896, 4864, 24, 14, 2, 6761, 6561, 1e-6)
LENGTHS = (1, 2, 31, 32, 33, 65, 129, 700)
has_gpu = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def test_shares_cover_everything_once():
    for count in (1, 5, 576, 6761):
        shares = [persistent.share(count, block, 132) for block in range(132)]
        assert [index for part in shares for index in range(part.start, part.stop)] == list(range(count))


def test_quads_are_what_a_lane_gives_the_matrix_units():
    pairs = torch.arange(11 * 2 * 128).reshape(11, 2, 128)
    first, rest = persistent.quad_rows(pairs).split((8 * 256, 3 * 256))
    packed = (first.reshape(4, 2, 8, 4, 2, 2, 2), rest.reshape(4, 2, 3, 4, 2, 2, 2))
    for run, half, lane, piece, row in torch.cartesian_prod(
        *(torch.arange(n) for n in (4, 2, 4, 2, 2))
    ).tolist():
        column = 32 * run + 8 * lane + 4 * half + 2 * piece
        for tile, at in zip(packed, (0, 8), strict=True):
            for pair in range(tile.shape[2]):
                got = tile[run, half, pair, lane, piece, row]
                assert torch.equal(got, pairs[at + pair, row, column : column + 2])


def test_quads_of_the_down_product_hold_every_column_once():
    columns = torch.arange(64 * 24).reshape(64, 24)
    packed = persistent.quad_down(columns)
    whole, last = packed.split((64 * 16, 64 * 8))
    whole = whole.reshape(4, 8, 4, 2, 2, 2)  # [tile, pair, lane, eight, odd, column]
    last = last.reshape(2, 8, 4, 2, 2, 2)  # [two tiles, pair, lane, tile, odd, column]
    for tile, pair, lane, odd in torch.cartesian_prod(*(torch.arange(n) for n in (4, 8, 4, 2))).tolist():
        row = columns[16 * tile + 2 * pair + odd]
        for eight in range(2):
            at = 8 * eight + 2 * lane
            assert torch.equal(whole[tile, pair, lane, eight, odd], row[at : at + 2])
        assert torch.equal(last[tile // 2, pair, lane, tile % 2, odd], row[16 + 2 * lane : 18 + 2 * lane])


def test_rotated_pairs_turn_together():
    rows = torch.arange(2 * 64)[:, None]
    pairs = persistent.rotated_pairs(rows)[:, :, 0]
    assert pairs[0].tolist() == [0, 32]
    assert pairs[33].tolist() == [64 + 1, 64 + 33]


def layer(hidden=128, intermediate=256, heads=2, kv_heads=1):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    rows = (heads + 2 * kv_heads) * 64
    return {
        "before": draw(hidden),
        "qkv": draw(rows, hidden),
        "bias": draw(rows),
        "out": draw(hidden, hidden),
        "between": draw(hidden),
        "gate": draw(intermediate, hidden),
        "up": draw(intermediate, hidden),
        "down": draw(hidden, intermediate),
    }


def from_quads(numbers, width):
    """Pairs of rows ``[n, 2, width]`` from the order in which lanes take them."""
    tiles = []
    for tile in torch.split(numbers, 16 * width):
        columns = tile.reshape(
            width // 32, 2, -1, 4, 2, 2, 2
        )  # [run of 32, half, pair, lane, piece, row, column]
        tiles.append(columns.permute(2, 5, 0, 3, 1, 4, 6).reshape(-1, 2, width))
    return torch.cat(tiles)


def from_halves(numbers, width):
    """Rows ``[n, width]`` from ``quad_halves``."""
    columns = numbers.reshape(
        width // 64, 2, -1, 4, 2, 2, 2
    )  # [warp, half, row, lane, piece, run of 32, column]
    return columns.permute(2, 0, 5, 3, 1, 4, 6).reshape(-1, width)


@pytest.mark.parametrize("grid", [32, 37])
def test_the_blocks_streams_hold_every_weight_once(grid):
    weights = layer()
    packed = persistent.pack_layer(**weights)
    head = torch.randn(729, 128, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    last = torch.ones(128, dtype=torch.bfloat16)
    streams = persistent.pack([packed], last, head, grid, chunk_bytes=2048)
    assert streams.shape[1] * 2 % 2048 == 0
    rows = {name: [] for name in ("qkv", "bias", "out", "gate_up", "down", "head")}
    for block, stream in enumerate(streams):
        at = 0

        def take(count, unit=1, stream=stream):
            """So many numbers, behind zeros up to a multiple of ``unit``."""
            nonlocal at
            start = -(-at // unit) * unit
            assert not stream[at:start].any()
            at = start + count
            return stream[start:at]

        def part(count, block=block):
            found = persistent.share(count, block, grid)
            return found.stop - found.start

        assert torch.equal(take(128), weights["before"])
        rows["bias"].append(take(16)[: 2 * part(128)])
        rows["qkv"].append(from_quads(take(2 * part(128) * 128), 128))
        rows["out"].append(from_halves(take(2 * part(64) * 128), 128))
        assert torch.equal(take(128, 64), weights["between"])
        rows["gate_up"].append(from_quads(take(2 * part(256) * 128, 1024), 128))
        down = take(8 * 128, 1024).reshape(4, 8, 4, 2, 2, 2)  # [two tiles, pair, lane, tile, odd, column]
        down = down.permute(0, 3, 1, 4, 2, 5).reshape(128, 8)
        rows["down"].append(down[:, : part(256)].T)
        assert not down[:, part(256) :].any()
        assert torch.equal(take(128), last)
        rows["head"].append(from_quads(take(2 * part(365) * 128, 1024), 128).flatten(0, 1))
        assert not stream[at:].any()
    joined = {name: torch.cat(parts) for name, parts in rows.items()}
    assert torch.equal(joined["qkv"], persistent.rotated_pairs(weights["qkv"]))
    assert torch.equal(joined["bias"], persistent.rotated_pairs(weights["bias"]).flatten())
    turned = joined["out"].reshape(128, -1, 32, 2).transpose(2, 3).reshape(128, 128)
    assert torch.equal(turned, weights["out"])
    assert torch.equal(joined["gate_up"], torch.stack((weights["gate"], weights["up"]), dim=1))
    assert torch.equal(joined["down"].T, weights["down"])
    assert torch.equal(joined["head"][:729], head)
    assert not joined["head"][729:].any()


def test_which_models_and_devices_it_serves():
    for multiprocessors in (114, 132, 144):  # H100 PCIe; H100 SXM and H200; a whole chip
        assert FULL.problem(multiprocessors) is None
    assert "too few" in FULL.problem(112) or "share" in FULL.problem(112)
    assert FULL.problem(80) is not None
    assert dataclasses.replace(FULL, hidden=960).problem(132) is not None
    assert dataclasses.replace(FULL, intermediate=6400).problem(132) is not None
    tiny = tiny_config().lm
    shape = persistent.Shape(tiny.hidden_size, 256, 2, 2, 1, tiny.num_speech_rows, 729, 1e-6)
    assert shape.problem(32) is None


def test_which_rings_serve_a_model():
    for multiprocessors in (114, 132, 144):
        assert persistent.Tuning().problem(FULL, multiprocessors) is None
    assert "multiple" in persistent.Tuning(48, 3072).problem(FULL, 132)
    assert "do not hold" in persistent.Tuning(12, 8192).problem(FULL, 132)
    assert persistent.Tuning(13, 8192).problem(FULL, 132) is None
    assert persistent.Tuning(48, 4096).problem(FULL, 132) is None
    assert "do not hold" in persistent.Tuning(9, 8192).problem(dataclasses.replace(FULL, vocab=256), 132)


# -- the kernel --------------------------------------------------------------------------------------------------


class Rig:
    """A model with random weights, its kernel, a shuffled page table and one row among others."""

    def __init__(self, config, device, kernel, **options):
        torch.manual_seed(0)
        self.device = device
        with device:
            lm = SpeechLM(config).eval().requires_grad_(False)
        for name, weight in lm.named_parameters():
            if "norm" in name:
                weight.data.normal_().mul_(0.1).add_(1)
            elif "embed" in name:
                weight.data.normal_()
            elif weight.dim() == 2:
                weight.data.normal_().mul_(weight.shape[1] ** -0.5)
        lm.llm_decoder.weight.data.mul_(5)
        self.lm = lm.to(torch.bfloat16)
        cos, sin = rotary_tables(0, 4096, 64, config.rope_theta, device)
        self.kernel = kernel(
            persistent.Shape.of(config),
            [pack(one) for one in self.lm.layers],
            self.lm.norm.weight.data,
            self.lm.llm_decoder.weight.data,
            self.lm.speech_embedding.weight.data,
            torch.stack((cos[:, :32], sin[:, :32]), dim=-1).contiguous(),
            **options,
        )
        pages = 64
        shape = (config.num_layers, 2, pages, config.num_kv_heads, 32, 64)
        self.pool = torch.randn(shape, device=device).to(torch.bfloat16)
        self.state, self.slot = RowState.empty(3, 512, device), 1
        self.slots = torch.tensor([self.slot], dtype=torch.int32, device=device)
        self.tables = torch.zeros(3, pages, dtype=torch.int32, device=device)
        self.table = self.tables[self.slot]
        self.table.copy_(torch.randperm(pages, device=device))
        self.divergences = {}

    def prompt(self, ids):
        cache = self.lm.new_cache(1, len(ids) + 8)
        cache.storage.zero_()
        if len(ids) > 1:
            self.lm(self.lm.embed_speech(torch.tensor([ids[:-1]], device=self.device)), cache)
        for page in range((len(ids) + 30) // 32):
            end = min(len(ids) - 1, page * 32 + 32)
            self.pool[:, :, self.table[page], :, : end - page * 32] = cache.storage[
                :, :, 0, :, page * 32 : end
            ]
        self.set(token=ids[-1], length=len(ids) - 1, decoded=0, out_count=0, stop=0, remaining=400)

    def set(self, **values):
        for name, value in values.items():
            getattr(self.state, name)[self.slot] = value

    def rule(self, params, kind=TokenKind.ANY, place=0, min_place=0):
        row = SamplingRows.from_params([params], self.lm.config.sampling)
        self.set(
            seed=params.seed,
            top_p=row.top_p[0],
            top_k=row.top_k[0],
            win_size=row.win_size[0],
            tau_r=row.tau_r[0],
            temperature=row.temperature[0],
            kind=int(kind),
            place=place,
            min_place=min_place,
        )

    def run(self, steps):
        self.kernel.launch(self.state, self.slots, self.pool, self.tables, steps)
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def pack(one):
    attention, mlp = one.self_attn, one.mlp
    joined = [attention.q_proj, attention.k_proj, attention.v_proj]
    return persistent.pack_layer(
        one.input_layernorm.weight.data,
        torch.cat([part.weight for part in joined]),
        torch.cat([part.bias for part in joined]),
        attention.o_proj.weight.data,
        one.post_attention_layernorm.weight.data,
        mlp.gate_proj.weight,
        mlp.up_proj.weight,
        mlp.down_proj.weight.data,
    )


def emulated(config, **options):
    missing = emulated_lm.missing()
    if missing:
        pytest.skip(missing)
    return Rig(config, torch.device("cpu"), emulated_lm.EmulatedKernel, **options)


@pytest.fixture(scope="module", params=["emulated", "tiny", "full"])
def rig(request):
    if request.param == "emulated":  # the ring has so few chunks that it turns several times in a step
        return emulated(tiny_config().lm, grid=32, tuning=persistent.Tuning(6, 2048))
    if not has_gpu:
        pytest.skip("needs a GPU of compute capability 9.0")
    device = torch.device("cuda")
    if request.param == "tiny":
        return Rig(tiny_config().lm, device, persistent.PersistentKernel, grid=32)
    return Rig(full_config().lm, device, persistent.PersistentKernel)


@torch.inference_mode()
def test_scores_where_the_blocks_shares_differ():
    wide = {"hidden_size": 256, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 1590}
    config = dataclasses.replace(tiny_config().lm, **wide)
    rig = emulated(config, grid=37, tuning=persistent.Tuning(24, 2048))
    for length in (1, 40, 300):
        check_scores(rig, length)


CHOICES = [
    {"FLIGHT": 1, "FLIGHT_BUSY": 5, "FLIGHT_PARTS": 2, "FLIGHT_SUMS": 1},
    {"FLIGHT": 3, "FLIGHT_BUSY": 2, "FLIGHT_PARTS": 1, "FLIGHT_SUMS": 3},
]


@torch.inference_mode()
@pytest.mark.parametrize("choices", CHOICES, ids=str)
def test_scores_whatever_the_source_is_compiled_with(choices):
    wide = {"hidden_size": 256, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 1590}
    config, choices = dataclasses.replace(tiny_config().lm, **wide), tuple(choices.items())
    rig = emulated(config, grid=37, tuning=persistent.Tuning(24, 2048, choices))
    for length in (1, 40, 300):
        check_scores(rig, length)
    rig = emulated(tiny_config().lm, grid=32, tuning=persistent.Tuning(5, 2048, choices))
    for length in (2, 700):
        check_scores(rig, length)


@torch.inference_mode()
def test_marks_are_left_behind_the_words():
    rig = emulated(tiny_config().lm, grid=32, tuning=persistent.Tuning(6, 2048, (("PROFILE", 1),)))
    words, count = rig.kernel.words, 32 * 4 * 32
    rig.kernel.words = torch.cat((words, words.new_zeros(count, 2)))
    check_scores(rig, 40)
    marks = rig.kernel.words[-count:, 0].reshape(32, 4, 32)
    assert (marks[:, 0, :3] > 0).all()  # of the first warp
    assert (marks[0, 2, :5] > 0).all()  # of the helper of a block that attends
    assert (marks[:, 3, :3] > 0).all()  # of the thread that copies


@torch.inference_mode()
@pytest.mark.parametrize("length", LENGTHS)
def test_scores_are_those_of_the_plain_model(rig, length):
    divergence(rig, length)


@torch.inference_mode()
def test_scores_differ_little_in_the_mean(rig):
    mean = sum(divergence(rig, length) for length in LENGTHS) / len(LENGTHS)
    assert mean < 1e-3


def divergence(rig, length):
    """From the plain model's probabilities to the kernel's, in nats; computed once."""
    if length not in rig.divergences:
        rig.divergences[length] = check_scores(rig, length)
    return rig.divergences[length]


def check_scores(rig, length):
    """The divergence of one step behind ``length`` tokens."""
    ids = torch.randint(0, 700, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    rig.prompt(ids)
    rig.rule(SamplingParams())
    rig.run(1)
    plain = rig.lm.float()
    want = plain.logits(plain(plain.embed_speech(torch.tensor([ids], device=rig.device)))[0, -1]).log_softmax(
        -1
    )
    rig.lm.to(torch.bfloat16)
    got = rig.kernel.logits.log_softmax(-1)
    assert int(want.argmax()) == int(got.argmax())
    assert int(rig.state.length[rig.slot]) == length
    found = float((want.exp() * (want - got)).sum())
    assert found < 2e-3
    return found


CASES = [
    (SamplingParams(seed=1), TokenKind.ANY, 0),
    (SamplingParams(seed=2, temperature=0.7), TokenKind.SPEECH, 0),
    (SamplingParams(seed=3, temperature=0.0), TokenKind.ANY, 0),
    (SamplingParams(seed=4, top_p=1.0, top_k=60), TokenKind.SPEECH_OR_EOS, 0),
    (SamplingParams(seed=5, top_p=0.3, top_k=3), TokenKind.SPEECH_OR_FILL, 0),
    (SamplingParams(seed=6, win_size=30, tau_r=0.03, temperature=0.1), TokenKind.SPEECH, 0),
    (SamplingParams(seed=7, win_size=0, temperature=5.0), TokenKind.ANY, 1000),
]


@torch.inference_mode()
@pytest.mark.parametrize(("params", "kind", "min_place"), CASES)
def test_draws_are_the_samplers_on_the_kernels_own_scores(rig, params, kind, min_place):
    rig.prompt(list(range(40)))
    rig.rule(params, kind, place=7, min_place=min_place)
    allowed = allowed_tokens(rig.lm.config, rig.device)
    history = []
    for step in range(6):
        rig.run(1)
        drawn = int(rig.state.token[rig.slot])
        rows = SamplingRows.from_params([params], rig.lm.config.sampling, rig.device)
        recent = torch.tensor([([-1] * 64 + history)[-64:]], device=rig.device)
        used = TokenKind.SPEECH if 7 + step < min_place else kind
        place = torch.tensor([7 + step], device=rig.device)
        want, ok = sample(rig.kernel.logits[None], rows, place, recent, allowed[used][None])
        assert ok
        assert drawn == int(want)
        history.append(drawn)
        rig.set(stop=0)


@torch.inference_mode()
def test_a_burst_equals_single_steps_and_other_rows_stay_as_they_are(rig):
    made = []
    for burst in (1, 8):
        rig.prompt(list(range(30)))
        rig.rule(SamplingParams(seed=3), TokenKind.SPEECH)
        rig.set(remaining=16)
        for _ in range(16 // burst + 1):
            rig.run(burst)
        assert int(rig.state.out_count[rig.slot]) == 16
        made.append(rig.state.out[rig.slot, :16].tolist())
    assert made[0] == made[1]
    assert int(rig.state.out_count[0]) == int(rig.state.out_count[2]) == 0


@torch.inference_mode()
def test_values_that_are_not_finite_stop_the_row_alone(rig):
    rig.prompt(list(range(30)))
    rig.rule(SamplingParams())
    kept = rig.pool.clone()
    rig.pool[0, 0, rig.table[0], 0, 3, 5] = float("nan")
    rig.run(4)
    assert int(rig.state.stop[rig.slot]) == 2
    assert int(rig.state.out_count[rig.slot]) == 0
    rig.pool.copy_(kept)
    rig.set(stop=0)
    rig.run(1)
    assert int(rig.state.stop[rig.slot]) != 2


@torch.inference_mode()
def test_a_row_that_steps_alone_takes_it_and_says_what_the_plain_session_says(rig):
    """Beside it another row: then both take the other kernels, and alone again the first goes on where it is."""
    rules = {"segment": 0, "token_text_ratio": (10.0, 20.0), "max_tokens": 60}
    greedy = SamplingParams(temperature=0.0)
    exact = copy.deepcopy(rig.lm).float()
    plain = LMSession(exact, PlainSequence(exact, (1, 2), (3, 4, 5), (6, 7)), greedy, **rules)
    expected = plain.decode(18)
    device = LMDevice(rig.lm, max_rows=2, cache_tokens=2000, max_positions=500, resident=False)
    device.paged.use_single(rig.kernel)
    started = int(rig.kernel.epoch)
    session = device.open(PlainSequence(rig.lm, (1, 2), (3, 4, 5), (6, 7)), greedy, **rules)
    made = session.decode(3)
    made += session.decode(5)
    other = device.open(PlainSequence(rig.lm, (1, 2), (8, 9), ()), greedy, **rules)
    other.decode(1)
    alone = int(rig.kernel.epoch)
    assert alone > started
    device.launch([(session, 4), (other, 4)])
    made += session.collect()
    assert len(other.collect()) == 4
    assert int(rig.kernel.epoch) == alone
    made += session.decode(6)
    assert int(rig.kernel.epoch) > alone
    assert made == expected
    for each in (session, other):
        each.close()
    device.rows.check()
