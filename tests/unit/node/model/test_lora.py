"""Adapters on frozen projections: gradients, frozen formats, dropout, what is trained and what it takes."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.common.random_bits import mixed, mixed_on_device, random_bits, signed
from node.config.schema import LoraSection, ModelSection, PipelineSection, RunConfig
from node.model.chunk import Chunk, build_chunk, compute_precision
from node.model.lora import Dropout, DropoutSource, FrozenLinear, merged
from node.model.lora_shapes import DOWN, UP, projections
from node.model.optimizers import unit_layout
from node.model.shard_shapes import frozen_bytes
from node.model.units import unit_names
from node.run_file.validate import problems
from tests.support.huggingface import hf_model, hf_name, hf_transposed

CPU = torch.device("cpu")
LLAMA = ModelSection(
    layers=2, hidden=48, heads=4, kv_heads=2, ffn=100, vocab=131, sequence=24, init_std=0.1, tied=True
)
GPT2 = ModelSection(
    family="gpt2", layers=2, hidden=48, heads=4, kv_heads=4, ffn=100, vocab=131, sequence=24, init_std=0.1
)
LORA = LoraSection(rank=4, alpha=8.0, base="float32")
TOKENS = torch.randint(131, (2, 25), generator=torch.Generator().manual_seed(3))
INPUTS, LABELS = TOKENS[:, :-1], TOKENS[:, 1:]


def adapted(model: ModelSection, lora: LoraSection = LORA, seed: int = 5) -> Chunk:
    """A whole model whose adapters all add something."""
    chunk = build_chunk(model, unit_names(model), seed, CPU, lora=lora)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in chunk.named_parameters():
            if name.endswith(UP):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return chunk


def gradients(chunk: Chunk) -> dict[str, Tensor]:
    loss = chunk.loss(INPUTS, LABELS)
    loss.backward()  # type: ignore[no-untyped-call]
    found = {name: parameter.grad for name, parameter in chunk.named_parameters()}
    assert all(gradient is not None for gradient in found.values())
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def frozen(chunk: Chunk) -> dict[str, FrozenLinear]:
    return {name: part for name, part in chunk.named_modules() if isinstance(part, FrozenLinear)}


def in_peft(model: ModelSection, chunk: Chunk, lora: LoraSection) -> nn.Module:
    """The same weights and adapters in transformers, by PEFT."""
    from peft import LoraConfig, get_peft_model  # takes seconds, which only some workers spend

    theirs = hf_model(model)
    whole = build_chunk(model, unit_names(model), 5, CPU)
    state = {}
    for unit, parameters in whole.named_units():
        for name, value in parameters.items():
            turned = hf_transposed(model, unit, name)
            state[hf_name(model, unit, name)] = value.detach().t() if turned else value.detach()
    theirs.load_state_dict(state, strict=False)
    names = {hf_name(model, "block.0000", f"{name}.weight") for name in (lora.targets or projections(model))}
    wanted = sorted({".".join(name.split(".")[-3:-1]) for name in names})
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        target_modules=wanted,
        fan_in_fan_out=model.family == "gpt2",
    )
    made: nn.Module = get_peft_model(theirs, config)
    theirs_named = dict(made.named_parameters())
    with torch.no_grad():
        for unit in chunk.units:
            for name, value in chunk.unit_parameters(unit).items():
                theirs_named[peft_name(model, unit, name)].copy_(value)
    return made


def peft_name(model: ModelSection, unit: str, name: str) -> str:
    path, kind = name.rsplit(".", 1)
    whole = hf_name(model, unit, f"{path}.weight").removesuffix(".weight")
    return f"base_model.model.{whole}.{kind}.default.weight"


@pytest.mark.filterwarnings("ignore")  # PEFT's and transformers' own
@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("some", [False, True], ids=["all", "some"])
def test_logits_and_gradients_are_those_of_peft(model: ModelSection, some: bool) -> None:
    lora = replace(LORA, targets=(projections(model)[0], "down") if some else ())
    chunk = adapted(model, lora)
    theirs = in_peft(model, chunk, lora)
    theirs.train()
    output = theirs(input_ids=INPUTS)
    torch.testing.assert_close(chunk(INPUTS), output.logits, rtol=1e-4, atol=1e-5)
    F.cross_entropy(output.logits.flatten(0, 1), LABELS.flatten()).backward()
    gradients(chunk)
    named = dict(theirs.named_parameters())
    compared = 0
    for unit in chunk.units:
        for name, parameter in chunk.unit_parameters(unit).items():
            expected = named[peft_name(model, unit, name)].grad
            assert expected is not None and parameter.grad is not None
            assert (parameter.grad - expected).norm() <= 1e-4 * expected.norm(), (unit, name)
            compared += 1
    assert compared == 2 * model.layers * (2 if some else len(projections(model)))


def test_an_adapter_starts_as_nothing_and_is_the_same_on_any_split() -> None:
    whole = build_chunk(LLAMA, unit_names(LLAMA), 5, CPU, lora=LORA)
    plain = build_chunk(LLAMA, unit_names(LLAMA), 5, CPU)
    assert torch.equal(whole(INPUTS), plain(INPUTS))
    part = build_chunk(LLAMA, ("block.0001", "head"), 5, CPU, lora=LORA)
    for name, value in part.unit_parameters("block.0001").items():
        assert torch.equal(value, whole.unit_parameters("block.0001")[name])
        if name.endswith(DOWN):
            bound = value.shape[1] ** -0.5
            assert 0.9 * bound < value.abs().max() <= bound and abs(value.mean()) < 0.2 * bound
    assert part.unit_parameters("head") == {}


@pytest.mark.parametrize("base", ["bf16", "8", "6", "5", "4", "3"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_packed_base_computes_as_what_it_unpacks_to(base: str, precision: str) -> None:
    """Bit for bit, forward and backward, and no product with it is left out."""
    packed = adapted(LLAMA, replace(LORA, base=base))
    plain = adapted(LLAMA)
    untouched = adapted(LLAMA)
    for name, one in frozen(plain).items():
        packed_one = frozen(packed)[name]
        one.weight.kept = packed_one.weight.dense(torch.float32)
        in_block = "layers.3" not in name
        assert packed_one.weight.form == (base if in_block else "bf16")
        error = (one.weight.kept - frozen(untouched)[name].weight.kept).norm()
        assert (
            0
            < error
            <= {"bf16": 0.01, "8": 0.02, "6": 0.06, "5": 0.1, "4": 0.2, "3": 0.4}[packed_one.weight.form]
            * one.weight.kept.norm()
        )
    for part, other in zip(plain.modules(), packed.modules(), strict=False):
        if isinstance(part, nn.Embedding):
            assert isinstance(other, nn.Embedding)
            part.weight = other.weight.float()
    with compute_precision(precision, CPU):
        expected, found = gradients(plain), gradients(packed)
        assert torch.equal(packed(INPUTS), plain(INPUTS))
    assert expected.keys() == found.keys() and len(found) == 2 * 2 * 7
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


def test_dropout_is_the_plain_formula_with_its_mask() -> None:
    source, generator = DropoutSource(CPU), torch.Generator().manual_seed(0)
    linear = nn.Linear(40, 30)
    layer = FrozenLinear(linear, torch.device("cpu"), "float32")
    down, up = torch.randn(4, 40, generator=generator), torch.randn(30, 4, generator=generator)
    dropout = Dropout(share=0.25, source=source, place=0xFEDCBA98)
    layer.adapt(down.clone(), up.clone(), 0.5, dropout)
    x = torch.randn(3, 50, 40, generator=generator, requires_grad=True)
    source.begin(0x89ABCDEF)
    made = layer(x)
    source.begin(1)  # the next microbatch goes forward before this one goes back
    upstream = torch.randn(made.shape, generator=generator)
    made.backward(upstream)
    plain = x.detach().clone().requires_grad_()
    a, b = down.clone().requires_grad_(), up.clone().requires_grad_()
    bits = random_bits(x.numel(), mixed(0x89ABCDEF ^ 0xFEDCBA98), CPU, bits=24).view(x.shape)
    mask = (bits >= 1 << 22).float()
    assert 0.2 < 1 - mask.mean().item() < 0.3
    expected = linear(plain) + 0.5 * ((plain * mask / 0.75) @ a.t()) @ b.t()
    expected.backward(upstream)
    torch.testing.assert_close(made, expected)
    assert layer.lora_A is not None and layer.lora_B is not None
    for found, wanted in ((x, plain), (layer.lora_A, a), (layer.lora_B, b)):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), linear(x) + 0.5 * (x @ down.t()) @ up.t())


def test_devices_drop_what_one_drops() -> None:
    """Rows of devices have other samples, tensor-parallel ranks other columns of an input."""
    source = DropoutSource(CPU)
    whole = Dropout(share=0.25, source=source, place=0xFEDCBA98, columns=40)
    salt, x = torch.tensor([77], dtype=torch.int32), torch.ones(4, 50, 40)
    expected = whole(x, salt)
    for row in range(2):
        for rank in range(2):
            source.row = row
            part = replace(whole, first=20 * rank)
            found = part(x[2 * row : 2 * row + 2, :, 20 * rank : 20 * rank + 20], salt)
            assert torch.equal(found, expected[2 * row : 2 * row + 2, :, 20 * rank : 20 * rank + 20])


def test_salts_on_a_device_hash_as_numbers_do() -> None:
    numbers = [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xDEADBEEF]
    kept = torch.tensor([signed(number) for number in numbers], dtype=torch.int32)
    assert mixed_on_device(kept).tolist() == [signed(mixed(number)) for number in numbers]
    for number, tensor in zip(numbers, kept, strict=True):
        drawn = random_bits(100, tensor.view(1), CPU, bits=24, first=7)
        assert torch.equal(drawn, random_bits(100, number, CPU, bits=24, first=7))


def test_a_merged_weight_gives_the_adapted_projection() -> None:
    chunk = adapted(LLAMA)
    for layer in frozen(chunk).values():
        if layer.lora_A is None or layer.lora_B is None:
            continue
        x = torch.randn(5, layer.weight.shape[1], generator=torch.Generator().manual_seed(2))
        whole = merged(layer.weight.dense(torch.float32), layer.lora_A, layer.lora_B, LORA)
        torch.testing.assert_close(layer(x), F.linear(x, whole, layer.bias), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("base", ["float32", "bf16", "8", "4", "3"])
def test_frozen_weights_take_what_is_counted(base: str) -> None:
    lora = replace(LORA, base=base)
    for model in (LLAMA, GPT2):
        chunk = build_chunk(model, unit_names(model), 5, CPU, lora=lora)
        for unit, layer in zip(chunk.units, chunk.layers, strict=True):
            tables = {"cos_sd", "sin_sd"}
            held = sum(
                value.nbytes for name, value in layer.named_buffers() if name.split(".")[-1] not in tables
            )
            assert held == frozen_bytes(model, lora, unit), unit


def test_snapshots_hold_adapters_alone() -> None:
    config = RunConfig(model=LLAMA, lora=replace(LORA, targets=("query", "value")))
    assert unit_layout(config, "embed") == {"step": ("int64", ())}
    names = {name for name in unit_layout(config, "block.0001") if name.startswith("parameter.")}
    assert names == {
        f"parameter.{name}.{kind}" for name in ("query", "value") for kind in ("lora_A", "lora_B")
    }


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"rank": -1}, "lora.rank must be at least 0"),
        ({"rank": 0, "dropout": 0.1}, "lora.rank is 0, which trains the whole model"),
        ({"rank": 49}, "lora.rank (49) must be at most 48"),
        ({"rank": 4, "alpha": 0.0}, "lora.alpha must be a finite number above 0"),
        ({"rank": 4, "alpha": 1e300}, "lora.alpha must be from 1e-37 to 1e+18"),
        ({"rank": 4, "dropout": 1.0}, "lora.dropout must be at least 0 and below 1"),
        ({"rank": 4, "base": "nf4"}, "lora.base 'nf4' is unknown"),
        ({"rank": 4, "targets": ("querry",)}, "lora.targets 'querry' is unknown; did you mean 'query'?"),
        ({"rank": 4, "targets": ("query", "query")}, "lora.targets names a projection twice"),
    ],
)
def test_impossible_settings_are_refused_in_one_line(lora: dict[str, object], words: str) -> None:
    config = RunConfig(
        model=replace(LLAMA, vocab=256),
        lora=LoraSection(**lora),
        pipeline=PipelineSection(stages=2),  # type: ignore[arg-type]
    )
    (found,) = problems(config)
    assert words in found and "\n" not in found
