"""Offsets in the small buffers through which the `trellis` planner's kernels pass results on a GPU.

Plain numbers, shared by the kernels and the host.
"""

# Histograms of scales: counts from -ORIGIN up. Scales are 16ths of an octave, from -464 to below 512.
BINS = 1024
ORIGIN = 512

# The plan's state, int64.
(
    PEAK,  # bits of the largest magnitude
    ROW_BASE,  # octaves of the rows' and the columns' exponents
    COLUMN_BASE,
    PLAN,
    ROW_TOP,  # largest row exponent of the prediction
    COLUMN_TOP,
    REST,  # bits of the residual's largest magnitude
    USED,  # whether the model predicts
    BY_ROW,  # whether every row has its own scale; columns likewise
    BY_COLUMN,
    SHARED_SCALE,  # the scale of all rows otherwise
    KIND,  # of prediction
    CODE,  # of the step that is tried
    LOW,  # codes of steps that are too small, and that fit
    HIGH,
    FOUND,
    SLOT,  # slot of this attempt's lanes
    BEST,  # slot of the best lanes
    BEST_CODE,
    BEST_WORDS,
    FAMILY,
    ROW_LEAST,  # the lowest scale that the model distinguishes, for rows and for columns
    COLUMN_LEAST,
) = range(23)
STATE = 32

# The plan's state, fp64.
SHARE, FREE = range(2)
SHARES = 2

# Inputs of the lanes, int64, for each of the families that are encoded at once.
ACTIVE, OF_FAMILY, TO_SLOT, OFFSET = range(4)
CONTROLS = 4

# Constants, fp64.
ROWS_A_SAMPLE_ROW, BUDGET, LEAST_FREE = range(3)
THRESHOLDS = 16
ROOTS = 32
NUMBERS = 48

# Steps with known costs, in 16ths of an octave, counted from the smallest.
FIRST_STEP = -9 * 16
COSTS = 448
# Sums of the class of a row and that of a column, counted down from the largest.
CLASS_SUMS = 128
CLASSES_A_SIDE = 64

# Sections of the payload, in order, and the offsets of these sections and of what follows.
SECTIONS = 7
(ROW_CLASSES, COLUMN_CLASSES, ROW_EXPONENTS, COLUMN_EXPONENTS, MULTIPLIERS, ROW_FACTORS, COLUMN_FACTORS) = (
    range(7)
)
