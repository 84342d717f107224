"""The runs of scripts/experiments/convergence.py: a model, and what each suite changes."""

from dataclasses import dataclass, replace
from typing import Any

from node.config.schema import ModelSection

SEQUENCE = 1024
GLOBAL_BATCH = 64
MICROBATCH = 64
STAGES = 4
MODEL = ModelSection(
    family="llama",
    layers=12,
    hidden=768,
    heads=12,
    kv_heads=12,
    ffn=2048,
    vocab=50304,
    sequence=SEQUENCE,
    tied=True,
)
"""124 million parameters; GPT-2's 50,257 tokens, padded to a round number."""
MIXTURE = "mixture"
MIXTURE_MODEL = replace(MODEL, family="mixture", experts=8, experts_per_token=2, balance_loss=0.01)
"""The same with eight experts in place of each feed-forward, of which a token has two."""
SMALL = "small"
SMALL_MODEL = replace(
    MODEL, layers=4, hidden=64, heads=2, kv_heads=2, ffn=172, vocab=256, sequence=256, tied=False
)
"""Of the suite `small`, for CPUs: 0.23 million parameters, bytes as tokens."""
GROUPS = 4
"""Gradient groups of a round."""
ROUNDS_WARMUP, EXACT_STEPS = 32, {SMALL: 96, "optimizer": 304}
"""Steps in which the learning rate rises in runs with rounds and in the suite `small`, and, by suite, exact
steps before the first round. The longest round, of 16 local steps, divides all of them."""
EPOCH_WINDOWS = 4960
"""Windows of the suite `epochs`: 310 steps see each of them four times."""
VALIDATION_WINDOWS = 256
COMPUTE = "compute"
OPTIMIZER = "optimizer"
MEMORY_SUITES = ("memory", "memory-long", COMPUTE)
NAIVE = "naive-4"
"""4 bits, symmetric, one scale for the whole tensor: the paper's naive quantizer."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run of a suite."""

    suite: str
    forward: str
    backward: str
    steps: int = 310
    seed: int = 0
    memory: str = "plain"
    """What a node stores in few bits: a key of `MEMORY`."""
    optimizer: str = "adamw"
    lr: float = 6e-4
    iterations: int = 5
    """Muon's."""
    every: int = 1
    """Local steps in a round of four gradient groups, in the suites `small` and `optimizer`; 1 is exact."""

    @property
    def name(self) -> str:
        kept = "" if self.memory == "plain" else f"-{self.memory}"
        if self.suite in (OPTIMIZER, SMALL):
            kept += "" if self.every == 1 else f"-every-{self.every}"
            fewer = "" if self.iterations == 5 else f"{self.iterations}-"
            way = f"{self.optimizer}-{fewer}{self.lr:g}-{self.forward}-{self.backward}"
            return f"{self.suite}-{self.steps}-{way}{kept}-{self.seed}"
        return f"{self.suite}-{self.forward}-{self.backward}{kept}-{self.seed}"

    @property
    def model(self) -> ModelSection:
        return {MIXTURE: MIXTURE_MODEL, SMALL: SMALL_MODEL}.get(self.suite, MODEL)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Of each stage."""
        return (self.model.layers // STAGES,) * STAGES

    @property
    def global_batch(self) -> int:
        """Samples of an optimizer step."""
        return 8 if self.suite == SMALL else GLOBAL_BATCH

    @property
    def microbatch(self) -> int:
        if self.suite == SMALL or self.every > 1:
            return self.global_batch if self.every == 1 else self.global_batch // GROUPS
        return 8 if self.suite in (*MEMORY_SUITES, MIXTURE) else MICROBATCH


_FEW: dict[str, Any] = {"gradients": "fp8", "moments": "fp8"}
MEMORY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "activations": ({"preset": "agoq"}, {}),
    "compact": ({"preset": "compact"}, {}),
    "attention-6": ({"preset": "compact", "attention": "6", "attention_output": "6"}, {}),
    "ffn-3": ({"preset": "compact", "ffn_input": "3"}, {}),
    "all-4": ({"preset": "agoq", "attention": "4", "attention_output": "4"}, {}),
    "gradients": ({}, {"gradients": "fp8"}),
    "moments": ({}, {"moments": "fp8"}),
    "three": ({"preset": "agoq"}, _FEW),
    "three-by-stage": ({"preset": "agoq", "bits_by_stage": True}, _FEW),
    "three-bf16-weights": ({"preset": "agoq"}, {**_FEW, "weights": "bfloat16"}),
    "fp8": ({}, {"compute": "fp8"}),
    "fp8-all-products": ({}, {"compute": "fp8", "weight_gradients": "fp8"}),
    "fp8-three": ({"preset": "agoq"}, {"compute": "fp8", **_FEW}),
}
"""[storage] and [training] of each way."""
COMPUTE_WAYS = ("plain", "fp8", "fp8-three", "fp8-all-products")

BETTER = "trellis-4.41"
PAIRS = (("fp32", "fp32"), ("tah", "fixed-8"), ("trellis-4.41", "dither-4.41"), ("trellis-3", "dither-3"))
RATES = {"adamw": (6e-4, 3e-4, 1.2e-3), "muon": (1.2e-3, 6e-4, 2.4e-3, 4.8e-3)}
"""Learning rates of each optimizer, the one that is used with all codecs first."""
FEWER = {200: 144, 900: 648}
"""The share of steps, 0.72, in which Muon is to reach AdamW's loss."""


def _of_optimizers(steps: int, seeds: tuple[int, ...]) -> tuple[Run, ...]:
    """Every codec at the first rate, over all seeds, also in fewer steps by Muon; then the other rates,
    momentum in FP8, and fewer iterations."""
    ways = [("adamw", steps), ("muon", steps), ("muon", FEWER[steps])]

    def run(pair: tuple[str, str], optimizer: str, count: int, seed: int, lr: float) -> Run:
        forward, backward = pair
        return Run(
            suite=OPTIMIZER,
            forward=forward,
            backward=backward,
            steps=count,
            seed=seed,
            optimizer=optimizer,
            lr=lr,
        )

    # From exact steps on, groups take their own; the number of steps is a whole number of the longest rounds.
    exact = run(PAIRS[0], "muon", 656, seeds[0], RATES["muon"][0])
    rounds = [replace(exact, every=every) for every in (1, 4, 16)] if steps == 900 else []
    first = [run(pair, *way, seed, RATES[way[0]][0]) for seed in seeds for pair in PAIRS for way in ways]
    others = [run(PAIRS[0], *way, seeds[0], lr) for way in ways for lr in RATES[way[0]][1:]]
    # Three bits at a higher rate too: a rate that only exact gradients bear would be no advice.
    others += [run(PAIRS[3], *ways[2], seeds[0], lr) for lr in RATES["muon"][2:]]
    # The best rate of both.
    others += [
        run(pair, *ways[2], seed, RATES["muon"][2]) for seed in seeds[1:] for pair in (PAIRS[0], PAIRS[3])
    ]
    usual = run(PAIRS[0], *ways[2], seeds[0], RATES["muon"][0])
    again = [replace(usual, memory="moments"), *(replace(usual, iterations=count) for count in (3, 4))]
    return (*first, *rounds, *others, *again)


SMALL_RATES = {"adamw": (6e-3, 3e-3, 1.2e-2), "muon": (4.8e-2, 3e-3, 6e-3, 1.2e-2, 2.4e-2, 9.6e-2)}
"""The best of each optimizer after 112 steps, then the others."""


def _small() -> tuple[Run, ...]:
    """Rates; Muon's momentum in FP8; local rounds of both; codecs with Muon in 0.72 of AdamW's steps."""

    def run(optimizer: str, steps: int, seed: int, pair: tuple[str, str] = PAIRS[0]) -> Run:
        forward, backward = pair
        lr = SMALL_RATES[optimizer][0]
        return Run(
            suite=SMALL,
            forward=forward,
            backward=backward,
            steps=steps,
            seed=seed,
            optimizer=optimizer,
            lr=lr,
        )

    rates = [replace(run(name, 112, 0), lr=lr) for name, each in SMALL_RATES.items() for lr in each]
    muon = [run("muon", 288, seed) for seed in range(6)]
    moments = [replace(each, memory="moments") for each in muon]
    exact = [run(name, 288, seed) for seed in (0, 1) for name in SMALL_RATES]
    rounds = [replace(each, every=every) for every in (4, 16) for each in exact]
    # Runs that ought to be equal show how far rounding alone drives runs apart.
    alike = [run("muon", 288, seed, ("bf16", "bf16")) for seed in (0, 1, 2)]
    # Three bits last.
    packed = [
        run(name, steps, seed, pair)
        for pair in (PAIRS[0], *PAIRS[2:])
        for seed in (0, 1)
        for name, steps in (("muon", 288), ("adamw", 400))
    ]
    return tuple(dict.fromkeys((*rates, *muon, *moments, *exact, *rounds, *alike, *packed)))


RUNS = (
    *(
        Run(suite="long", forward=forward, backward=backward, seed=seed, steps=900)
        for forward, backward, seed in (
            ("fp16", "fp16", 0),
            (BETTER, "fixed-8", 0),
            ("tah", "fixed-8", 0),
            ("fp16", "fp16", 1),
            ("bf16", "bf16", 0),
        )
    ),
    *(
        Run(suite="pass", forward=forward, backward=backward, seed=seed)
        for forward, backward, seed in (
            ("fp16", "fp16", 0),
            ("tah", "fixed-8", 0),
            (BETTER, "fixed-8", 0),
            ("fixed-4", "fixed-8", 0),
            ("fp32", "fp32", 0),
            ("bf16", "bf16", 0),
            (BETTER, BETTER, 0),
            ("trellis-3.45", "fixed-8", 0),
            ("fp16", "fp16", 1),
        )
    ),
    *(
        Run(suite="backward", forward="fp16", backward=backward)
        for backward in (NAIVE, "tah", "fixed-4", BETTER)
    ),
    *(
        Run(suite="epochs", forward=forward, backward=backward)
        for forward, backward in (
            ("fp16", "fp16"),
            ("aqsgd-4", "fixed-8"),
            ("tah", "fixed-8"),
            ("fixed-4", "fixed-8"),
            (BETTER, "fixed-8"),
        )
    ),
    *(
        Run(suite="memory", forward="fp32", backward="fp32", memory=way)
        for way in MEMORY
        if not way.startswith("fp8")
    ),
    *(Run(suite="memory", forward="fp32", backward="fp32", seed=seed) for seed in (1, 2)),
    Run(suite="memory", forward="tah", backward="fixed-8", memory="three"),
    *(
        Run(suite="memory", forward="fp32", backward="fp32", memory=way, seed=seed)
        for seed in (1, 2)
        for way in ("compact", "three", "gradients", "moments")
    ),
    *(
        Run(suite="memory-long", forward="fp32", backward="fp32", memory=way, seed=seed, steps=900)
        for way in ("plain", "three", "gradients", "moments")
        for seed in (0, 1, 2)
    ),
    *(
        Run(suite="memory-long", forward="fp32", backward="fp32", memory=way, seed=seed, steps=900)
        for way in ("three-by-stage", "compact", "activations", "all-4")
        for seed in (0, 1, 2)
    ),
    *(
        Run(suite=COMPUTE, forward="fp32", backward="fp32", memory=way, seed=seed, steps=900)
        for seed in (0, 1, 2)
        for way in COMPUTE_WAYS
    ),
    *(
        Run(suite=MIXTURE, forward=forward, backward=backward, steps=900)
        for forward, backward in (("fp32", "fp32"), ("trellis-3", "dither-3"))
    ),
    *_of_optimizers(200, (0,)),
    *_of_optimizers(900, (0, 1, 2)),
    *_small(),
    # More seeds show how far runs differ by their seed alone.
    *(Run(suite="memory-long", forward="fp32", backward="fp32", seed=seed, steps=900) for seed in (3, 4)),
)
