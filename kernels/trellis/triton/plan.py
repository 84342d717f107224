"""Choose the `trellis` codec's plan and model for a tensor on a GPU.

Takes the same decisions as `wire.codecs.trellis` on a CPU, with kernels that pass results in a few small
buffers (`kernels.trellis.triton.state`). Buffer sizes, programs and launches depend on the shape and the rate
only.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton

from kernels.trellis.factors import signs
from kernels.trellis.scales import roots, thresholds
from kernels.trellis.settings import Settings
from kernels.trellis.tables import FAMILIES, bits_of_counts, tables
from kernels.trellis.triton import costs as costing
from kernels.trellis.triton import fit as fitting
from kernels.trellis.triton import scales as scaling
from kernels.trellis.triton import search as searching
from kernels.trellis.triton import spaces as spanning
from kernels.trellis.triton import state as at

# Most plans of a search, a power of two. After their histograms of row scales follow those of all rows, of
# the measured rows, of the residual (all and measured rows), and of the model (all and measured rows).
PLANS = 8
_WHOLE = PLANS
MODEL = PLANS + 4
_SETS = PLANS + 6
_RANK = spanning.RANK.value
# Elements per program; no bit depends on them.
_BLOCK = 1024
_ROWS, _COLUMNS = 16, 128
_SUM_ROWS, _SUM_COLUMNS, _SUM_TURNS = 32, 64, 4
_STEPS = 16
# Alignment of buffers, in int64 elements.
_ALIGNED = 16
_SUMS = 32


@dataclass(frozen=True, slots=True)
class Constants:
    """Constants of a shape and rate, on the tensor's device."""

    plans: torch.Tensor  # int64 [plans, 4]
    numbers: torch.Tensor  # fp64 [NUMBERS]
    mean_costs: torch.Tensor  # int64 [FAMILIES, MAX_CLASS + 1]
    count_bits: torch.Tensor  # int32 [1024], for counts from 1024 on
    start: torch.Tensor | None  # fp32 [RANK, C]: where the search for a space starts


@cache
def _constants(settings: Settings, device: torch.device) -> Constants:
    numbers = torch.zeros(at.NUMBERS, dtype=torch.float64)
    numbers[at.ROWS_A_SAMPLE_ROW] = settings.rows / settings.sample_rows
    numbers[at.BUDGET] = 8 * settings.size
    numbers[at.LEAST_FREE] = settings.free
    cpu = torch.device("cpu")
    numbers[at.THRESHOLDS : at.THRESHOLDS + 16] = thresholds(cpu)
    numbers[at.ROOTS : at.ROOTS + 16] = roots(cpu)
    start = None
    if settings.kinds:
        rank = max(rank for rank, _ in settings.kinds)
        start = torch.zeros(_RANK, settings.columns)
        start[:rank] = signs(settings.columns, rank, cpu).T
    return Constants(
        torch.tensor(settings.plans).to(device),
        numbers.to(device),
        torch.stack(
            [torch.from_numpy(tables(settings.first_family + one).mean_cost) for one in range(FAMILIES)]
        ).to(device),
        torch.from_numpy(bits_of_counts()[1024:2048].copy()).to(device),
        None if start is None else start.to(device),
    )


class _Zeros:
    """Buffers that start as zeros, in one allocation."""

    def __init__(self, device: torch.device, **sizes: int) -> None:
        # Align every buffer as Triton expects, so that one compilation serves all shapes.
        places = {name: -(-size // _ALIGNED) * _ALIGNED for name, size in sizes.items()}
        whole = torch.zeros(sum(places.values()), dtype=torch.int64, device=device)
        self._parts: dict[str, torch.Tensor] = {}
        start = 0
        for name, size in sizes.items():
            self._parts[name] = whole[start : start + size]
            start += places[name]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._parts[name]


class Planner:
    """The plan for coding one tensor: the kernels' buffers and launches."""

    def __init__(self, x: torch.Tensor, settings: Settings) -> None:
        self.x, self.settings = x, settings
        device = x.device
        rows, columns, sample = settings.rows, settings.columns, settings.sample_rows
        kinds = len(settings.kinds)
        self.constants = _constants(settings, device)
        self.zeros = _Zeros(
            device,
            state=at.STATE,
            control=FAMILIES * at.CONTROLS,
            totals=2,
            row_bins=_SETS * at.BINS,
            column_bins=(PLANS + 1) * at.BINS,
            sample_sums=len(settings.plans) * columns,
            sums=columns,
            spreads=max(kinds, 1) * _RANK,
            fine=max(kinds, 1),
            multiplier=max(kinds, 1) * _RANK,
        )
        self.field = torch.empty(
            2 * rows * columns + kinds * sample * columns, dtype=torch.float32, device=device
        )
        self.row_scales = torch.empty(2 * rows + kinds * sample, dtype=torch.int32, device=device)
        self.column_scales = torch.empty((PLANS + 1) * columns, dtype=torch.int32, device=device)
        convolutions = (PLANS + 2) * 4 * (at.CLASS_SUMS // _SUMS)
        self.row_counts = torch.empty(convolutions * at.CLASSES_A_SIDE, dtype=torch.int64, device=device)
        self.class_sums = torch.empty((PLANS + 2) * 4 * at.CLASS_SUMS, dtype=torch.int64, device=device)
        self.costs = torch.empty((PLANS + 2) * FAMILIES * at.COSTS, dtype=torch.int64, device=device)
        self.doubles = torch.empty(at.SHARES + 1, dtype=torch.float64, device=device)
        self.fine = self.zeros["fine"].view(torch.int32)
        self.multiplier = self.zeros["multiplier"].view(torch.int32)
        dimensions = kinds * _RANK
        self.directions = torch.empty(dimensions * columns, dtype=torch.float32, device=device)
        self.energies = torch.empty(dimensions, dtype=torch.float64, device=device)
        self.row_factors = torch.empty(rows * _RANK if kinds else 0, dtype=torch.int8, device=device)
        self.exponent = torch.empty((), dtype=torch.int32, device=device)

    def run(self) -> None:
        """Compute the model and the expected bits of its elements."""
        settings = self.settings
        self._normalise()
        self._scale_columns(0, settings.plain)
        if settings.kinds:
            self._span()
            self._predict(sample=True)
            self._scale_columns(settings.plain, len(settings.kinds))
        self._cost(len(settings.plans), row=0, column=0, each=1)
        self._choose()
        if settings.kinds:
            self._predict(sample=False)
        self._settle()
        self._scale_columns(0, 1, sample=False)
        self._cost(2, row=MODEL, column=PLANS, each=0)

    def _normalise(self) -> None:
        settings, state = self.settings, self.zeros["state"]
        elements = self.x.numel()
        scaling.largest[(triton.cdiv(elements, 4 * _BLOCK),)](self.x, state, elements, BLOCK=4 * _BLOCK)
        scaling.normalise[(settings.rows,)](
            self.x,
            state,
            self.constants.numbers,
            self.field,
            self.row_scales,
            self.zeros["row_bins"],
            self.zeros["totals"],
            self.exponent,
            settings.rows,
            settings.columns,
            settings.every,
            settings.measured,
            _WHOLE,
            SHARED_SCALE=settings.shared_scales,
            BLOCK=_BLOCK,
            enable_fp_fusion=False,
        )

    def _scale_columns(self, first: int, count: int, *, sample: bool = True) -> None:
        """Column scales for some plans' samples, or for the model."""
        settings = self.settings
        rows, columns = settings.sample_rows if sample else settings.rows, settings.columns
        sums = self.zeros["sample_sums" if sample else "sums"]
        programs = triton.cdiv(rows, _SUM_ROWS * _SUM_TURNS), triton.cdiv(columns, _SUM_COLUMNS), count
        scaling.column_sums[programs](
            self.field,
            self.row_scales,
            self.zeros["state"],
            self.constants.plans,
            self.zeros["totals"],
            self.constants.numbers,
            sums,
            rows,
            columns,
            first,
            settings.plain,
            settings.rows,
            settings.every,
            SAMPLE=sample,
            ROWS=_SUM_ROWS,
            COLUMNS=_SUM_COLUMNS,
            TURNS=_SUM_TURNS,
            enable_fp_fusion=False,
        )
        scaling.column_scales[(triton.cdiv(columns, 256), count)](
            sums,
            self.zeros["state"],
            self.constants.plans,
            self.zeros["totals"],
            self.constants.numbers,
            self.column_scales,
            self.zeros["column_bins"],
            self.zeros["row_bins"],
            rows,
            columns,
            first,
            0 if sample else PLANS,
            SAMPLE=sample,
            COLUMNS=256,
            enable_fp_fusion=False,
        )

    def _span(self) -> None:
        """The space near which the sample lies, and its dimensions for each kind of prediction."""
        settings, constants, state = self.settings, self.constants, self.zeros["state"]
        rows, columns, kinds = settings.sample_rows, settings.columns, len(settings.kinds)
        device = self.x.device
        image = torch.empty(_RANK * rows, dtype=torch.float64, device=device)
        image_whole = torch.empty(_RANK * rows, dtype=torch.float32, device=device)
        found = torch.empty(_RANK * columns, dtype=torch.float64, device=device)
        parts = torch.empty_like(found)
        products = torch.empty(_RANK * _RANK, dtype=torch.float64, device=device)
        basis = torch.empty(_RANK * columns, dtype=torch.float32, device=device)
        matrix = self.field, self.row_scales, self.column_scales, state
        sizes = rows, columns, settings.every
        spanning.bases[(1,)](self.zeros["row_bins"], self.zeros["column_bins"], state)
        across = (triton.cdiv(rows, _ROWS),)
        for turn in range(2):
            start = constants.start if turn == 0 else basis
            spanning.project[across](
                *matrix, start, image, *sizes, ROWS=_ROWS, BLOCK=_COLUMNS, enable_fp_fusion=False
            )
            spanning.integers[(_RANK,)](image, image_whole, rows, BLOCK=_BLOCK, enable_fp_fusion=False)
            spanning.combine[(triton.cdiv(columns, _ROWS),)](
                *matrix, image_whole, found, *sizes, COLUMNS=_ROWS, BLOCK=_COLUMNS, enable_fp_fusion=False
            )
            spanning.whole_parts[(_RANK,)](found, parts, columns, BLOCK=_BLOCK, enable_fp_fusion=False)
            spanning.gram[(_RANK,)](parts, products, columns, BLOCK=128, enable_fp_fusion=False)
            spanning.orthogonal[(_RANK,)](parts, products, found, columns, BLOCK=128, enable_fp_fusion=False)
            if turn == 0:
                spanning.integers[(_RANK,)](found, basis, columns, BLOCK=_BLOCK, enable_fp_fusion=False)
        spanning.dimensions[(_RANK, kinds)](
            found,
            constants.plans,
            self.directions,
            self.energies,
            columns,
            settings.plain,
            BLOCK=_BLOCK,
            enable_fp_fusion=False,
        )
        spanning.spread[(*across, kinds)](
            *matrix,
            self.directions,
            self.energies,
            self.zeros["spreads"],
            *sizes,
            ROWS=_ROWS,
            BLOCK=_COLUMNS,
            enable_fp_fusion=False,
        )
        spanning.multipliers[(kinds,)](
            self.zeros["spreads"],
            constants.plans,
            self.multiplier,
            self.fine,
            rows,
            settings.plain,
            enable_fp_fusion=False,
        )

    def _predict(self, *, sample: bool) -> None:
        """The sample's residual after each prediction, or the matrix's after the chosen one."""
        settings = self.settings
        rows = settings.sample_rows if sample else settings.rows
        fitting.residual[(triton.cdiv(rows, _ROWS), len(settings.kinds) if sample else 1)](
            self.field,
            self.row_scales,
            self.column_scales,
            self.zeros["state"],
            self.constants.numbers,
            self.constants.plans,
            self.directions,
            self.energies,
            self.multiplier,
            self.fine,
            self.row_factors,
            self.zeros["row_bins"],
            rows,
            settings.columns,
            settings.every if sample else 1,
            settings.plain,
            settings.measured,
            settings.rows,
            _WHOLE + 2,
            SAMPLE=sample,
            ROWS=_ROWS,
            BLOCK=_COLUMNS,
            num_warps=8,
            enable_fp_fusion=False,
        )

    def _cost(self, slots: int, *, row: int, column: int, each: int) -> None:
        """Expected bits from some of the histograms, for every step and family."""
        bins = self.zeros["row_bins"], self.zeros["column_bins"]
        # Costs have the slot of the columns' histogram.
        places = row, column, column, each
        costing.convolve[(slots, 4, at.CLASS_SUMS // _SUMS)](
            *bins, self.row_counts, self.class_sums, *places, BLOCK=_SUMS
        )
        costing.costs[(slots, at.COSTS // _STEPS, FAMILIES)](
            *bins,
            self.class_sums,
            self.constants.mean_costs,
            self.costs,
            *places,
            STEPS=_STEPS,
            FAMILIES=FAMILIES,
        )

    def _choose(self) -> None:
        settings, constants = self.settings, self.constants
        searching.best_plan[(1,)](
            self.zeros["row_bins"],
            self.zeros["column_bins"],
            self.costs,
            constants.count_bits,
            constants.plans,
            constants.numbers,
            self.zeros["state"],
            settings.rows,
            settings.columns,
            settings.plain,
            len(settings.plans),
            settings.group_bits,
            FAMILIES=FAMILIES,
            PLANS=PLANS,
            enable_fp_fusion=False,
        )

    def _settle(self) -> None:
        settings = self.settings
        fitting.settle[(1,)](
            self.zeros["state"],
            self.constants.plans,
            self.zeros["totals"],
            self.constants.numbers,
            self.multiplier,
            self.fine,
            self.zeros["row_bins"],
            settings.rows,
            settings.columns,
            settings.plain,
            settings.measured_rows,
            _WHOLE,
            PREDICTS=bool(settings.kinds),
            enable_fp_fusion=False,
        )
