"""Chooses the `trellis` codec's plan and model for a tensor on a GPU.

It takes the same decisions as `wire.codecs.trellis` on a CPU, with kernels that pass results in a few small
buffers (`kernels.trellis.triton.state`). Buffer sizes, programs and launches depend on the shape and the rate
only.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton

from kernels.common.triton.numbers import RECORD
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

# The most plans of a search, a power of two. After their histograms of row scales follow those of all rows,
# of the measured rows, of the residual (all and measured rows), and of the model (all and measured rows).
PLANS = 8
_WHOLE = PLANS
MODEL = PLANS + 4
_SETS = PLANS + 6
_RANK = spanning.RANK.value
# Elements per program; no bit depends on them.
_BLOCK = 1024
_ROWS, _COLUMNS = 16, 128
_SUM_ROWS, _SUM_COLUMNS, _SUM_TURNS = 32, 64, 4
_SCALE_COLUMNS, _MANY_COLUMNS = 256, 2048
_STEPS = 16
_SUMS = 32


@dataclass(frozen=True, slots=True)
class Constants:
    """Constants for a shape and rate, on the tensor's device."""

    plans: torch.Tensor  # int64 [plans, 4]
    numbers: torch.Tensor  # fp64 [NUMBERS]
    mean_costs: torch.Tensor  # int64 [FAMILIES, MAX_CLASS + 1]
    count_bits: torch.Tensor  # int32 [1024], for counts from 1024 on
    start: torch.Tensor | None  # fp32 [RANK, C]: the start of the search for a space


@cache
def _constants(settings: Settings, device: torch.device) -> Constants:
    numbers = torch.zeros(at.NUMBERS, dtype=torch.float64)
    numbers[at.ROWS_A_SAMPLE_ROW] = settings.rows / settings.sample_rows
    numbers[at.BUDGET] = 8 * settings.size
    numbers[at.LEAST_FREE] = settings.free
    numbers[at.THRESHOLDS : at.THRESHOLDS + 16] = torch.from_numpy(thresholds())
    numbers[at.ROOTS : at.ROOTS + 16] = torch.from_numpy(roots())
    start = None
    if settings.kinds:
        rank = max(rank for rank, _ in settings.kinds)
        start = torch.zeros(_RANK, settings.columns)
        start[:rank] = signs(settings.columns, rank).T
    return Constants(
        torch.tensor(settings.plans).to(device),
        numbers.to(device),
        torch.stack(
            [torch.from_numpy(tables(settings.first_family + one).mean_cost) for one in range(FAMILIES)]
        ).to(device),
        torch.from_numpy(bits_of_counts()[1024:2048].copy()).to(device),
        None if start is None else start.to(device),
    )


class Records:
    """Buffers of each matrix in one allocation, one record each: `kernels.common.triton.numbers.in_record`.

    Kernels get the buffers of the first record. The first buffers, int64, start as zeros.
    """

    def __init__(
        self,
        count: int,
        device: torch.device,
        zeros: dict[str, int],
        others: dict[str, tuple[torch.dtype, int]],
    ) -> None:
        """`zeros` and `others` have the number of elements by name."""
        places, start = self._places(zeros, others)
        self._whole = torch.empty(count, start, dtype=torch.uint8, device=device)
        self.record = start // RECORD
        zeroed = max((places[name][1] + places[name][2] for name in zeros), default=0)
        self._whole[:, :zeroed].zero_()
        self._parts = {
            name: self._whole[0, first : first + size].view(dtype)
            for name, (dtype, first, size) in places.items()
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._parts[name]

    @classmethod
    def nbytes(cls, zeros: dict[str, int], others: dict[str, tuple[torch.dtype, int]]) -> int:
        """Bytes of one record."""
        return cls._places(zeros, others)[1]

    @staticmethod
    def _places(
        zeros: dict[str, int], others: dict[str, tuple[torch.dtype, int]]
    ) -> tuple[dict[str, tuple[torch.dtype, int, int]], int]:
        """(dtype, first byte, bytes) by name, and the total number of bytes."""
        places: dict[str, tuple[torch.dtype, int, int]] = {}
        start = 0
        for name, (dtype, elements) in {name: (torch.int64, size) for name, size in zeros.items()}.items():
            places[name] = dtype, start, elements * dtype.itemsize
            start += -(-elements * dtype.itemsize // RECORD) * RECORD
        for name, (dtype, elements) in others.items():
            places[name] = dtype, start, elements * dtype.itemsize
            start += -(-elements * dtype.itemsize // RECORD) * RECORD
        return places, start


class Planner:
    """The plan for coding one tensor, or many of one row: the kernels' buffers and launches."""

    def __init__(
        self, x: torch.Tensor, settings: Settings, more: dict[str, tuple[torch.dtype, int]], *, many: bool
    ) -> None:
        """
        Args:
            x: the tensor, `[R, C]`; or with `many` `[n, C]` for n tensors `[1, C]`, whose settings have no
                kinds.
            more: the dtype and number of elements of each tensor's further buffers.
        """
        self.x, self.settings = x, settings
        device = x.device
        self.constants = _constants(settings, device)
        self.many = many
        self.count = x.shape[0] if many else 1
        zeros, others = self.buffers(settings, many=many)
        self.buffer = Records(self.count, device, zeros, {**others, **more})
        self.record = self.buffer.record
        self.field, self.row_scales = self.buffer["field"], self.buffer["row_scales"]
        self.column_scales, self.row_counts = self.buffer["column_scales"], self.buffer["row_counts"]
        self.class_sums, self.costs = self.buffer["class_sums"], self.buffer["costs"]
        self.doubles, self.directions = self.buffer["doubles"], self.buffer["directions"]
        self.energies, self.row_factors = self.buffer["energies"], self.buffer["row_factors"]
        self.fine = self.buffer["fine"].view(torch.int32)
        self.multiplier = self.buffer["multiplier"].view(torch.int32)
        self.exponent = torch.empty((self.count,) if self.many else (), dtype=torch.int32, device=device)

    @staticmethod
    def buffers(
        settings: Settings, *, many: bool
    ) -> tuple[dict[str, int], dict[str, tuple[torch.dtype, int]]]:
        """The number of elements by name: of buffers that start as zeros, int64, and of others."""
        rows, columns, sample = settings.rows, settings.columns, settings.sample_rows
        kinds = len(settings.kinds)
        dimensions = kinds * _RANK
        convolutions = (PLANS + 2) * 4 * (at.CLASS_SUMS // _SUMS)
        zeros = dict(
            state=at.STATE,
            control=FAMILIES * at.CONTROLS,
            totals=2,
            row_bins=_SETS * at.BINS,
            column_bins=(PLANS + 1) * at.BINS,
            sample_sums=0 if many else len(settings.plans) * columns,
            sums=0 if many else columns,
            spreads=max(kinds, 1) * _RANK,
            fine=max(kinds, 1),
            multiplier=max(kinds, 1) * _RANK,
        )
        others = dict(
            # A matrix without a prediction has no separate residual.
            field=(torch.float32, (2 if kinds else 1) * rows * columns + kinds * sample * columns),
            row_scales=(torch.int32, 2 * rows + kinds * sample),
            column_scales=(torch.int32, columns if many else (PLANS + 1) * columns),
            row_counts=(torch.int64, convolutions * at.CLASSES_A_SIDE),
            class_sums=(torch.int64, (PLANS + 2) * 4 * at.CLASS_SUMS),
            costs=(torch.int64, (PLANS + 2) * FAMILIES * at.COSTS),
            doubles=(torch.float64, at.SHARES + 1),
            directions=(torch.float32, dimensions * columns),
            energies=(torch.float64, dimensions),
            row_factors=(torch.int8, rows * _RANK if kinds else 0),
        )
        return zeros, others

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
        settings, state = self.settings, self.buffer["state"]
        elements = settings.rows * settings.columns
        scaling.largest[(triton.cdiv(elements, 4 * _BLOCK), self.count)](
            self.x,
            state,
            elements,
            self.record,
            BLOCK=4 * _BLOCK,
            MANY=self.many,
            enable_fp_fusion=True,
        )
        scaling.normalise[(settings.rows, self.count)](
            self.x,
            state,
            self.constants.numbers,
            self.field,
            self.row_scales,
            self.buffer["row_bins"],
            self.buffer["totals"],
            self.exponent,
            settings.rows,
            settings.columns,
            settings.every,
            settings.measured,
            _WHOLE,
            self.record,
            SHARED_SCALE=settings.shared_scales,
            BLOCK=_BLOCK,
            MANY=self.many,
            enable_fp_fusion=False,
        )

    def _scale_columns(self, first: int, count: int, *, sample: bool = True) -> None:
        """Column scales for some plans' samples, or for the model. Many tensors: one row each, no sums."""
        settings = self.settings
        rows, columns = settings.sample_rows if sample else settings.rows, settings.columns
        sums = self.buffer["sample_sums" if sample else "sums"]
        state, totals = self.buffer["state"], self.buffer["totals"]
        given = self.field, self.row_scales, state, self.constants.plans, totals, self.constants.numbers
        if not self.many:
            parts = triton.cdiv(rows, _SUM_ROWS * _SUM_TURNS)
            scaling.column_sums[(parts, triton.cdiv(columns, _SUM_COLUMNS), count)](
                *given,
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
        wide = _MANY_COLUMNS if self.many else _SCALE_COLUMNS
        scaling.column_scales[(triton.cdiv(columns, wide), count, self.count)](
            sums,
            *given,
            self.column_scales,
            self.buffer["column_bins"],
            self.buffer["row_bins"],
            rows,
            columns,
            first,
            0 if sample else PLANS,
            self.record,
            SAMPLE=sample,
            COLUMNS=wide,
            MANY=self.many,
            enable_fp_fusion=False,
        )

    def _span(self) -> None:
        """Find the space near the sample, and its dimensions for each kind of prediction."""
        settings, constants, state = self.settings, self.constants, self.buffer["state"]
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
        spanning.bases[(1,)](
            self.buffer["row_bins"], self.buffer["column_bins"], state, enable_fp_fusion=True
        )
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
            self.buffer["spreads"],
            *sizes,
            ROWS=_ROWS,
            BLOCK=_COLUMNS,
            enable_fp_fusion=False,
        )
        spanning.multipliers[(kinds,)](
            self.buffer["spreads"],
            constants.plans,
            self.multiplier,
            self.fine,
            rows,
            settings.plain,
            enable_fp_fusion=False,
        )

    def _predict(self, *, sample: bool) -> None:
        """Compute the sample's residual after each prediction, or the matrix's after the chosen one."""
        settings = self.settings
        rows = settings.sample_rows if sample else settings.rows
        fitting.residual[(triton.cdiv(rows, _ROWS), len(settings.kinds) if sample else 1)](
            self.field,
            self.row_scales,
            self.column_scales,
            self.buffer["state"],
            self.constants.numbers,
            self.constants.plans,
            self.directions,
            self.energies,
            self.multiplier,
            self.fine,
            self.row_factors,
            self.buffer["row_bins"],
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
        """Compute the expected bits from some of the histograms, for every step and family."""
        bins = self.buffer["row_bins"], self.buffer["column_bins"]
        # Costs are in the slot of the columns' histogram.
        places = row, column, column, each, slots, self.record
        costing.convolve[(self.count * slots, 4, at.CLASS_SUMS // _SUMS)](
            *bins,
            self.row_counts,
            self.class_sums,
            *places,
            BLOCK=_SUMS,
            MANY=self.many,
            enable_fp_fusion=True,
        )
        costing.costs[(self.count * slots, at.COSTS // _STEPS, FAMILIES)](
            *bins,
            self.class_sums,
            self.constants.mean_costs,
            self.costs,
            *places,
            STEPS=_STEPS,
            FAMILIES=FAMILIES,
            MANY=self.many,
            enable_fp_fusion=True,
        )

    def _choose(self) -> None:
        settings, constants = self.settings, self.constants
        searching.best_plan[(self.count,)](
            self.buffer["row_bins"],
            self.buffer["column_bins"],
            self.costs,
            constants.count_bits,
            constants.plans,
            constants.numbers,
            self.buffer["state"],
            settings.rows,
            settings.columns,
            settings.plain,
            len(settings.plans),
            settings.group_bits,
            self.record,
            FAMILIES=FAMILIES,
            PLANS=PLANS,
            MANY=self.many,
            enable_fp_fusion=False,
        )

    def _settle(self) -> None:
        settings = self.settings
        fitting.settle[(self.count,)](
            self.buffer["state"],
            self.constants.plans,
            self.buffer["totals"],
            self.constants.numbers,
            self.multiplier,
            self.fine,
            self.buffer["row_bins"],
            settings.rows,
            settings.columns,
            settings.plain,
            settings.measured_rows,
            _WHOLE,
            self.record,
            PREDICTS=bool(settings.kinds),
            MANY=self.many,
            enable_fp_fusion=False,
        )
