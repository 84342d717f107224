"""The parts of the `trellis` codec, each against something simpler."""

import hashlib
import itertools
import math

import numpy as np
import pytest

from kernels import trellis, trellis_factors, trellis_lanes, trellis_path, trellis_scales, trellis_tables
from kernels.trellis_tables import CLASSES, ESCAPE, FAMILIES, MIDDLE, SYMBOLS, TOTAL

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
            slots = tables.slots[2 * number + odd]
            symbols = slots >> 12 & 127
            assert (np.bincount(symbols, minlength=SYMBOLS) == row).all()
            assert (slots >> 19 == row[symbols]).all()
            assert ((slots & 4095) == np.arange(TOTAL) - tables.start[2 * number + odd][symbols]).all()


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


def grid_of(
    seed: int, steps: int, lanes: int, low: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """Symbols, rows, classes and low bits that a trellis could give."""
    rng = RNG(seed)
    classes = rng.integers(0, CLASSES, (steps, lanes)).astype(np.int32)
    low_bits = rng.integers(-1, 4, (steps, lanes)).astype(np.int32) if low else None
    symbols = np.empty((steps, lanes), dtype=np.int32)
    rows = np.empty_like(symbols)
    chain = max(1, steps // 2)
    current = before = np.zeros(lanes, dtype=np.int64)
    tables = trellis_tables.tables(0)
    for t in range(steps):
        if t % chain == 0:
            current = before = np.zeros(lanes, dtype=np.int64)
        rows[t] = 2 * classes[t] + current
        for lane in range(lanes):
            row = tables.frequency[rows[t, lane]]
            # Half of them as frequent as they should be, half from all that have a slot.
            weights = row / TOTAL if rng.random() < 0.5 else (row > 0) / (row > 0).sum()
            symbols[t, lane] = rng.choice(SYMBOLS, p=weights)
        parity = symbols[t] if low_bits is None else np.where(low_bits[t] < 0, symbols[t], low_bits[t])
        current, before = (parity ^ before) & 1, current
    return symbols, rows, classes, low_bits


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize(("steps", "lanes"), [(1, 1), (7, 3), (40, 33)])
def test_lanes_round_trip(steps: int, lanes: int, low: bool) -> None:
    symbols, rows, classes, low_bits = grid_of(steps, steps, lanes, low)
    tables = trellis_tables.tables(0)
    states, words = trellis_lanes.encode(symbols, rows, tables)
    assert states.min() >= 1 << 15
    chain = max(1, steps // 2)
    found, quantizers = trellis_lanes.decode(states, words, classes, low_bits, tables, chain)
    assert (found == symbols).all() and (quantizers == rows - 2 * classes).all()
    cost = tables.cost[rows, symbols].sum() - (symbols == ESCAPE).sum() * (32 << 16)
    assert 16 * words.size + 31 * lanes <= cost / 65536 + 32 * lanes


def test_streams_that_are_too_short_or_too_long_are_refused() -> None:
    symbols, rows, classes, _ = grid_of(5, 40, 8, False)
    tables = trellis_tables.tables(0)
    states, words = trellis_lanes.encode(symbols, rows, tables)
    for wrong in (words[:-1], words[1:], np.append(words, np.uint16(7)), words[:0]):
        with pytest.raises(trellis_lanes.StreamError):
            trellis_lanes.decode(states, wrong, classes, None, tables, 20)
    with pytest.raises(trellis_lanes.StreamError):
        trellis_lanes.decode(states ^ 1, words, classes, None, tables, 20)


# ---- path


def distance_of(values: list[int], n: tuple[int, ...]) -> int:
    return sum((value - 64 * chosen) ** 2 for value, chosen in zip(values, n, strict=True))


@pytest.mark.parametrize("seed", range(20))
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
    n, quantizer = trellis_path.choose(np.array(values, dtype=np.int32)[:, None], None)
    assert distance_of(values, tuple(n[:, 0].tolist())) == best
    current = before = 0
    for chosen, found in zip(n[:, 0].tolist(), quantizer[:, 0].tolist(), strict=True):
        assert found == current == chosen & 1
        current, before = ((chosen - current) >> 1 & 1) ^ before, current


def test_escaped_elements_have_even_parity_and_the_nearest_value() -> None:
    values = RNG(1).integers(-(1 << 20), 1 << 20, (50, 9)).astype(np.int32)
    escaped = RNG(2).random((50, 9)) < 0.3
    n, quantizer = trellis_path.choose(values, escaped)
    assert (np.abs(64 * n - values)[escaped] <= 32).all()
    current = before = np.zeros(9, dtype=np.int64)
    for t in range(50):
        assert (quantizer[t] == current).all()
        parity = np.where(escaped[t], 0, (n[t] - current) >> 1 & 1)
        current, before = parity ^ before, current


def test_a_path_is_a_decibel_better_than_rounding() -> None:
    values = RNG(3).integers(-4000, 4000, (400, 50)).astype(np.int32)
    n, _ = trellis_path.choose(values, None)
    noise = ((64 * n - values).astype(float) ** 2).mean()
    rounding = 128**2 / 12
    assert 0.9 < 10 * math.log10(rounding / noise) < 1.05


# ---- scales and factors


def test_scales_are_logarithms_of_means() -> None:
    x = (RNG(4).standard_normal((60, 80)) * np.logspace(-1, 3, 80)).astype(np.float32)
    row, column = trellis_scales.scales(x)
    means = np.abs(x).mean(1)
    assert (np.abs(row / 16 - np.log2(means)) < 1 / 31).all()
    weighted = (np.abs(x) * 2.0 ** (-row / 16)[:, None]).mean(0)
    assert (np.abs(column / 16 - np.log2(weighted)) < 1 / 30).all()


def test_scales_of_nothing_are_small_and_finite() -> None:
    row, column = trellis_scales.scales(np.zeros((3, 4), dtype=np.float32))
    assert row.max() + column.max() < -16 * 20 and row.min() + column.min() > -16 * 64


@pytest.mark.parametrize(("rank", "bits"), [(1, 3), (8, 4), (16, 6), (64, 5)])
def test_predictions_are_exact_products_of_integers(rank: int, bits: int) -> None:
    rng = RNG(rank)
    x = (rng.standard_normal((90, 12)) @ rng.standard_normal((12, 70)) * np.logspace(0, 2, 70)).astype(
        np.float32
    )
    factors = trellis_factors.fit(x, rank, bits)
    limit = 2 ** (bits - 1) - 1
    assert trellis_factors.bounded(bits, factors.multiplier)
    assert np.abs(factors.u).max() <= limit and np.abs(factors.v).max() <= limit
    sums = (factors.u.astype(np.int64) * factors.multiplier) @ factors.v.T.astype(np.int64)
    assert np.abs(sums).max() < 1 << 24
    scaled = sums * 2.0 ** (factors.exponent + factors.row_exponent)[:, None] * 2.0**factors.column_exponent
    assert (trellis_factors.predict(factors) == scaled).all()


def test_a_prediction_takes_most_of_a_matrix_of_low_rank() -> None:
    rng = RNG(7)
    x = (rng.standard_normal((200, 6)) @ rng.standard_normal((6, 150))).astype(np.float32)
    left = x - trellis_factors.predict(trellis_factors.fit(x, 8, 6))
    assert np.linalg.norm(left) < 0.06 * np.linalg.norm(x)


@pytest.mark.parametrize("x", [np.ones((40, 50)), np.eye(40), np.diag([1e-3] + [0] * 39)])
def test_matrices_of_smaller_rank_than_asked_for(x: np.ndarray) -> None:
    factors = trellis_factors.fit(x.astype(np.float32), 8, 4)
    assert np.isfinite(trellis_factors.predict(factors)).all()


# ---- the grid and steps


@pytest.mark.parametrize("elements", [1, 2, 1151, 1152, 5000, 786432, 2**20, 2**20 + 1, 40 * 2**20 + 12345])
def test_the_grid_holds_every_element(elements: int) -> None:
    where = trellis.grid(elements)
    assert where.blocks * where.block_elements >= elements
    assert where.steps % where.chain == 0
    assert where.lanes == 1 or where.steps >= 1152
    # Filling up costs at most the last steps of a block.
    assert where.block_elements * where.blocks - elements < where.blocks * (4 * where.lanes + 1)


def test_steps_rise_and_their_logarithms_with_them() -> None:
    codes = range(0, trellis.STEP_CODES, 97)
    steps = [float(trellis.step_of(code)) for code in codes]
    assert (
        steps == sorted(steps)
        and steps[0] == 2.0**-9
        and float(trellis.step_of(trellis.STEP_CODES - 1)) < 2**15
    )
    for code, step in zip(codes, steps, strict=True):
        assert trellis.step_logarithm(code) / 65536 == pytest.approx(math.log2(step), abs=2**-14)


def test_classes_are_counted_without_being_made() -> None:
    row = RNG(8).integers(-30, 60, 70).astype(np.int32)
    column = RNG(9).integers(-20, 70, 90).astype(np.int32)
    number = trellis.classes(row, column)
    counts = np.bincount(number, minlength=trellis_tables.MAX_CLASS + 1)
    assert (trellis.class_counts(row, column) == counts).all()
