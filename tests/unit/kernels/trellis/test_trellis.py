"""The parts of the `trellis` codec, each against something simpler."""

import hashlib
import itertools
import math

import numpy as np
import pytest
import torch

from kernels.common.random_bits import mixed, random_bits
from kernels.trellis import factors as trellis_factors
from kernels.trellis import lanes as trellis_lanes
from kernels.trellis import reference as trellis
from kernels.trellis import scales as trellis_scales
from kernels.trellis import tables as trellis_tables
from kernels.trellis.code import LOW, Coded
from kernels.trellis.grid import Grid, grid
from kernels.trellis.loops import dither
from kernels.trellis.tables import CLASSES, ESCAPE, FAMILIES, MAX_CLASS, MIDDLE, ROW, SYMBOLS, TOTAL
from tests.support.cases import each
from tests.support.trellis_cases import fit, predict
from wire.codecs.registry import codec
from wire.spec import TensorSpec

RNG = np.random.default_rng


# ---- tables


@pytest.mark.parametrize("family", range(FAMILIES))
def test_tables_share_out_every_slot(family: int) -> None:
    tables = trellis_tables.tables(family)
    assert (tables.frequency.sum(1) == TOTAL).all()
    for number in range(CLASSES):
        for odd in (0, 1):
            row = tables.frequency[2 * number + odd]
            reach = trellis_tables.reach(number)
            coded = range(MIDDLE - reach, MIDDLE + reach + 1 - odd)
            assert (row[coded.start : coded.stop] >= 1).all() and row[ESCAPE] == 1
            assert row.sum() - row[ESCAPE] == row[coded.start : coded.stop].sum()
            slots = tables.slots.reshape(-1, TOTAL)[2 * number + odd]
            symbols, start = slots >> 24, np.cumsum(row) - row
            assert (np.bincount(symbols, minlength=SYMBOLS) == row).all()
            assert ((slots >> 12 & 4095) + 1 == row[symbols]).all()
            assert ((slots & 4095) == np.arange(TOTAL) - start[symbols]).all()
            codes = tables.codes.reshape(-1, ROW)[2 * number + odd, :SYMBOLS]
            assert (codes[row > 0] == (start | row << 12)[row > 0]).all() and not codes[row == 0].any()


def test_tables_are_the_same_everywhere() -> None:
    """A changed frequency changes the format: every peer's tables must be these."""
    digest = hashlib.sha256()
    for family in range(FAMILIES):
        digest.update(trellis_tables.tables(family).frequency.astype("<i4").tobytes())
    assert digest.hexdigest() == "703bc8b27c1bbfe60ae8cc96174cc6255f1d9a781014903fa205b3094ea81180"


def test_costs_are_logarithms() -> None:
    bits = trellis_tables.bits_of_counts() / 65536
    assert np.abs(bits[1:] + np.log2(np.arange(1, TOTAL + 1) / TOTAL)).max() < 2**-15


def test_frequencies_are_those_of_the_normal_distribution() -> None:
    tables = trellis_tables.tables(trellis_tables.GAUSSIAN)
    for number in (8, 16, 23):
        deviation = math.sqrt(2 ** ((number - 12) / 2) + 0.07)
        for odd in (0, 1):
            for k in range(-3, 4):
                low, high = k - 0.5 * (1 - odd), k + 0.5 * (1 + odd)
                share = (math.erf(high / deviation / 2**0.5) - math.erf(low / deviation / 2**0.5)) / 2
                found = tables.frequency[2 * number + odd, k + MIDDLE] / TOTAL
                # Rounded down, a slot for every symbol, the rest to the middle.
                assert found == pytest.approx(share, abs=0.025 if k == 0 else 0.02)


# ---- lanes

STEP = 9000
GRIDS = (
    Grid(1, 1, 1, 1),
    Grid(300, 2, 7, 32),
    Grid(61, 3, 5, 5),
    Grid(4000, 2, 63, 32),
    Grid(700, 1, 700, 1),
)


def sample(where: Grid, seed: int, highest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements of every class up to one, some of them far too large for it."""
    generator = torch.Generator().manual_seed(seed)
    number = torch.randint(0, highest + 1, (where.elements,), generator=generator)
    x = torch.randn(where.elements, generator=generator) * torch.exp2((number - 12) / 4 + 1)
    x[::37] *= 50
    return x.clamp(-(2.0**14), 2.0**14), number.to(torch.uint8)


def coded(x: torch.Tensor, number: torch.Tensor, where: Grid, family: int) -> tuple[Coded, torch.Tensor]:
    made = trellis_lanes.encode(x, number, trellis.gain(STEP), where, family)
    words = torch.empty(int(made.counts.sum()), dtype=torch.int16)
    trellis_lanes.join(made, words)
    return made, words


@each("highest", [23, 30, MAX_CLASS])
@each("where", GRIDS)
def test_lanes_return_within_the_steps_of_a_path(where: Grid, highest: int) -> None:
    x, number = sample(where, where.steps, highest)
    for family in range(FAMILIES):
        made, words = coded(x, number, where, family)
        assert made.states.min() >= LOW
        n, whole = trellis_lanes.decode(made.states, made.counts.long(), words, number, where, family)
        # Four residues a path may have to take the farthest of, two steps away.
        assert whole and ((n * trellis.step_of(STEP) - x).abs() <= 2.01 * trellis.step_of(STEP)).all()


def test_words_take_the_bits_that_frequencies_promise() -> None:
    where = Grid(40000, 1, 1250, 32)
    x = torch.randn(where.elements, generator=torch.Generator().manual_seed(3)) * 2 * trellis.step_of(STEP)
    number = torch.full((where.elements,), 12, dtype=torch.uint8)
    _, words = coded(x, number, where, 0)
    mean = int(trellis_tables.tables(0).mean_cost[12]) / 65536
    assert 16 * words.numel() / where.elements == pytest.approx(mean, rel=0.05)


def test_threads_take_groups_and_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    where = GRIDS[3]
    x, number = sample(where, 5, 40)
    alone, words = coded(x, number, where, 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    beside, same = coded(x, number, where, 0)
    assert torch.equal(alone.states, beside.states) and torch.equal(words, same)


@pytest.mark.parametrize("where", GRIDS[1:], ids=str)
def test_streams_that_are_too_short_or_too_long_are_refused(where: Grid) -> None:
    x, number = sample(where, 7, 23)
    made, words = coded(x, number, where, 0)
    counts = made.counts.long()
    for change, stream in ((-1, words), (1, torch.cat((words, words[:1])))):
        wrong = counts.clone()
        wrong[0] += change
        _, whole = trellis_lanes.decode(made.states, wrong, stream, number, where, 0)
        assert not whole
    _, whole = trellis_lanes.decode(made.states ^ 1, counts, words, number, where, 0)
    assert not whole


# ---- path


def path_of(values: list[int]) -> list[int]:
    """n of one lane's values, in 64ths of a step, with classes that escape nothing."""
    where = Grid(len(values), 1, len(values), 1)
    x = torch.tensor(values, dtype=torch.float32)
    number = torch.full((len(values),), 20, dtype=torch.uint8)
    made = trellis_lanes.encode(x, number, 1.0, where, 0)
    words = torch.empty(int(made.counts.sum()), dtype=torch.int16)
    trellis_lanes.join(made, words)
    n, whole = trellis_lanes.decode(made.states, made.counts.long(), words, number, where, 0)
    assert whole
    return [int(one) for one in n]


@each("seed", range(20))
def test_no_path_is_shorter_than_the_chosen_one(seed: int) -> None:
    values = RNG(seed).integers(-400, 400, 6).tolist()
    best = None
    for parities in itertools.product((0, 1), repeat=6):
        current = before = total = 0
        for value, parity in zip(values, parities, strict=True):
            residue = 2 * parity + current
            total += min((value - 64 * n) ** 2 for n in range(-16, 17) if n % 4 == residue)
            current, before = parity ^ before, current
        best = total if best is None else min(best, total)
    found = path_of(values)
    assert sum((value - 64 * n) ** 2 for value, n in zip(values, found, strict=True)) == best
    current = before = 0
    for n in found:
        assert n & 1 == current
        current, before = (n >> 1 & 1) ^ before, current


def test_a_path_is_a_decibel_better_than_rounding() -> None:
    values = RNG(3).integers(-800, 800, 2000)
    noise = ((64 * np.array(path_of(values.tolist())) - values) ** 2).mean()
    rounding = 128**2 / 12
    assert 0.85 < 10 * math.log10(rounding / noise) < 1.15


# ---- scales and factors


def test_scales_are_logarithms_of_means() -> None:
    x = (RNG(4).standard_normal((60, 80)) * np.logspace(-1, 3, 80)).astype(np.float32)
    row, column = (found.numpy() for found in trellis_scales.scales(torch.from_numpy(x)))
    means = np.abs(x).mean(1)
    assert (np.abs(row / 16 - np.log2(means)) < 1 / 31).all()
    weighted = (np.abs(x) * 2.0 ** (-row / 16)[:, None]).mean(0)
    assert (np.abs(column / 16 - np.log2(weighted)) < 1 / 30).all()
    assert (trellis_scales.in_turn(torch.from_numpy(x), True, False)[0].numpy() == row).all()


def test_equal_scales_are_merged() -> None:
    x = torch.randn(7, 9, generator=torch.Generator().manual_seed(0))
    row, column = trellis_scales.scales(x, by_row=False, by_column=False)
    assert (row == row[0]).all() and not column.any()
    assert row[0].item() / 16 == pytest.approx(math.log2(x.abs().mean()), abs=1 / 30)


def test_scales_of_nothing_are_small_and_finite() -> None:
    row, column = trellis_scales.scales(torch.zeros(3, 4))
    assert row.max() + column.max() < -16 * 20 and row.min() + column.min() > -16 * 64


def low_rank(rows: int, columns: int, rank: int, seed: int) -> torch.Tensor:
    rng = RNG(seed)
    x = rng.standard_normal((rows, rank)) @ rng.standard_normal((rank, columns))
    return torch.from_numpy(x.astype(np.float32))


@pytest.mark.parametrize(("rank", "bits"), [(1, 3), (8, 4), (16, 6), (64, 5)])
def test_predictions_are_exact_products_of_integers(rank: int, bits: int) -> None:
    x = low_rank(90, 70, 12, rank) * torch.logspace(0, 2, 70)
    factors = fit(x, trellis_factors.spaces(x, rank, [(rank, bits)])[0])
    limit = 2 ** (bits - 1) - 1
    assert factors.multiplier.sum() <= trellis_factors.most_multipliers(bits)
    assert factors.u.abs().max() <= limit and factors.v.abs().max() <= limit
    sums = (factors.u.long() * factors.multiplier) @ factors.v.long().T
    assert sums.abs().max() < 1 << 24
    scaled = sums * 2.0 ** (factors.exponent + factors.row_exponent.double())[:, None]
    assert (predict(factors) == scaled * 2.0 ** factors.column_exponent.double()).all()


def test_a_prediction_takes_most_of_a_matrix_of_low_rank() -> None:
    x = low_rank(900, 150, 6, 7)
    # Found on a sixth of the rows.
    space = trellis_factors.spaces(x[::6], 32, [(8, 6)])[0]
    left = x - predict(fit(x, space))
    assert left.norm() < 0.06 * x.norm()


@pytest.mark.parametrize("x", [np.ones((40, 50)), np.eye(40), np.diag([1e-3] + [0] * 39)])
def test_matrices_of_smaller_rank_than_asked_for(x: np.ndarray) -> None:
    matrix = torch.from_numpy(x.astype(np.float32))
    for space in trellis_factors.spaces(matrix, 8, [(8, 4), (4, 6)]):
        assert predict(fit(matrix, space)).isfinite().all()


# ---- the grid and steps


@each("elements", [1, 2, 1151, 1152, 5000, 36863, 786432, 2**20, 2**20 + 1, 40 * 2**20 + 12345, 2**31 + 7])
def test_the_grid_holds_every_element(elements: int) -> None:
    where = grid(elements)
    assert where.bounds(0)[0] == 0 and where.bounds(where.groups - 1)[1] == elements
    start, stop = where.bounds(where.groups - 1)
    assert start < stop and where.steps <= 2304
    assert where.lanes == 1 or where.steps >= 1024
    # A lane's costs of 2**14 a step stay within 32 bits.
    assert where.steps << 14 < 1 << 29


def test_steps_rise_and_their_logarithms_with_them() -> None:
    codes = range(0, trellis.STEP_CODES, 97)
    steps = [trellis.step_of(code) for code in codes]
    assert steps == sorted(steps) and steps[0] == 2.0**-9 and trellis.step_of(trellis.STEP_CODES - 1) < 2**15
    for code, step in zip(codes, steps, strict=True):
        assert trellis.step_logarithm(code) / 65536 == pytest.approx(math.log2(step), abs=2**-14)


@pytest.mark.parametrize("code", [0, 5001, 9999, 24575])
def test_costs_are_those_of_every_elements_class(code: int) -> None:
    of = trellis.Scales.of(
        RNG(8).integers(-90, 160, 70).astype(np.int32), RNG(9).integers(-300, 70, 90).astype(np.int32)
    )
    row, column = of.classes(code)
    assert max(row.max() - row.min(), column.max() - column.min()) <= trellis.MAX_CLASS_STEP
    number = trellis.classes(torch.from_numpy(row), torch.from_numpy(column))
    mean = trellis_tables.tables(0).mean_cost[number.numpy()].sum() / 65536
    assert of.cost(code, 0) == pytest.approx(mean, rel=0.03, abs=100)


def test_inverses_divide_every_state_by_every_frequency() -> None:
    """At the ends, at random, and around multiples, where a quotient steps."""
    entries = trellis_tables.divided_codes(torch.device("cpu")).numpy()
    plain = np.concatenate([trellis_tables.tables(family).codes for family in range(2 * FAMILIES)])
    assert ((entries & ((1 << trellis_tables.SHIFT_AT) - 1)) == plain).all() and (
        (entries == 0) == (plain == 0)
    ).all()
    of_frequency = {
        int(code) >> trellis_tables.PRECISION: int(entry) for code, entry in zip(plain, entries, strict=True)
    }
    random = np.random.default_rng(1)
    for frequency, entry in of_frequency.items():
        if frequency == 0:
            continue
        shift, inverse = entry >> trellis_tables.SHIFT_AT & 63, entry >> 32 & 0xFFFFFFFF
        last = (1 << 31) - 1
        near = [k * frequency + d for k in (1, 2, last // frequency) for d in (-1, 0)]
        for n in (0, last, *near, *random.integers(0, last, 50).tolist()):
            assert n * inverse >> shift == n // frequency


# ---- dither: the loops give the reference's bits, and what is decoded has the tensor as its mean


CPU = torch.device("cpu")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def dithers(count: int, salt: int) -> torch.Tensor:
    """The dither of each element in steps, in plain torch."""
    return random_bits(count, salt, CPU).float().mul_(2.0).add_(1.0).mul_(2.0**-16).sub_(1.0)


def test_dithers_are_even_over_two_steps_and_follow_from_the_salt() -> None:
    made = dithers(1 << 16, 5)
    assert made.abs().max() < 1 and abs(made.mean()) < 0.01 and abs(made.var() - 1 / 3) < 0.005
    assert torch.equal(made, dithers(1 << 16, 5))
    other = dithers(1 << 16, 6)
    assert abs((made * other).mean()) < 0.01


@pytest.mark.parametrize("count", [1, 70_001, (1 << 20) + 3])
def test_loops_give_the_references_bits(count: int) -> None:
    x, gain, salt = normal(count) * 3, 37.7, 2**32 - 9
    by, of = torch.tensor(gain), dithers(count, salt)
    assert torch.equal(dither.added(x, gain, salt), (x * by).add_(of * 64))
    assert torch.equal(dither.subtract(x.clone(), gain, salt), x - of * by)


@pytest.mark.parametrize("rate", [2.0, 3.0])
def test_small_elements_are_not_lost(rate: float) -> None:
    """Some rows lie far below the one step. Over many salts
    `trellis` keeps its error, and the small rows with it; that of `dither` averages out, as noise does."""
    x = normal(32, 128) * 1e-5
    x[:8] /= 32
    small, spec, times = slice(0, 8), TensorSpec(x.dtype, tuple(x.shape)), 32

    def mean(name: str) -> tuple[torch.Tensor, float]:
        total, error = torch.zeros_like(x, dtype=torch.float64), 0.0
        for salt in range(times):
            which = codec(name).salted(mixed(salt + 1))
            found = which.decode(which.encode(x), spec).double()
            total += found / times
            error += float((found - x).norm() ** 2) / times
        return total, error**0.5

    def share(found: torch.Tensor) -> float:
        """How much of the small rows is left."""
        return float((found[small] * x[small]).sum() / (x[small].double() ** 2).sum())

    biased, error = mean(f"trellis-{rate:g}")
    unbiased, noise = mean(f"dither-{rate:g}")
    assert float((biased - x).norm()) > 0.99 * error
    assert float((unbiased - x).norm()) < 1.3 * noise / times**0.5
    # Few bits more noise than the biased code's error.
    assert noise < 1.4 * error
    assert share(biased) < 0.3 and abs(share(unbiased) - 1) < 0.25


def test_the_two_ends_need_the_same_salt() -> None:
    x = normal(64, 128)
    spec, one = TensorSpec(x.dtype, tuple(x.shape)), codec("dither-4")
    packed = one.salted(3).encode(x)
    right, wrong = one.salted(3).decode(packed, spec), one.salted(4).decode(packed, spec)
    assert (right - x).norm() < 0.1 * x.norm() < (wrong - x).norm() * 2
    assert torch.equal(one.encode(x), one.salted(0).encode(x))
    assert codec("trellis-4").salted(7) is codec("trellis-4")
