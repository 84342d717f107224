"""Our forward and gradients against Hugging Face transformers' on random weights, in float32."""

from typing import Any

import pytest
import torch
from torch import Tensor

from node.config.schema import ModelSection
from node.model.chunk import Chunk, build_chunk
from node.model.units import unit_names
from tests.support.huggingface import hf_model, hf_name, hf_transposed

CPU = torch.device("cpu")


def llama(heads: int, kv_heads: int, *, tied: bool = False, theta: float = 10000.0) -> ModelSection:
    return ModelSection(
        layers=3,
        hidden=16 * heads,
        heads=heads,
        kv_heads=kv_heads,
        ffn=100,
        vocab=131,
        sequence=48,
        tied=tied,
        rope_theta=theta,
        init_std=0.1,
    )


def gpt2(heads: int, *, tied: bool = False) -> ModelSection:
    return ModelSection(
        family="gpt2",
        layers=3,
        hidden=17 * heads,
        heads=heads,
        ffn=100,
        vocab=131,
        sequence=48,
        tied=tied,
        init_std=0.1,
    )


MODELS = {
    "llama-mha": llama(4, 4),
    "llama-gqa": llama(4, 2),
    "llama-mqa-odd": llama(3, 1),
    "llama-odd-tied": llama(5, 5, tied=True),
    "llama-gqa-tied-theta": llama(6, 3, tied=True, theta=500000.0),
    "gpt2": gpt2(4),
    "gpt2-odd-tied": gpt2(3, tied=True),
}


def theirs(model: ModelSection, attention: str) -> Any:
    """An equal transformers model, dropout off."""
    reference = hf_model(model)
    reference.set_attn_implementation(attention)
    return reference.eval()


def ours_with_random_norms(model: ModelSection) -> Chunk:
    """The whole model with norms and biases moved off their trivial initial values."""
    chunk = build_chunk(model, unit_names(model), seed=1, device=CPU)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for _, parameters in chunk.named_units():
            for parameter in parameters.values():
                if parameter.ndim == 1:
                    parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return chunk


def mapped(model: ModelSection, tensors: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    """By transformers' names, in its layout."""
    return {
        hf_name(model, unit, name): tensor.T if hf_transposed(model, unit, name) else tensor
        for unit, named in tensors.items()
        for name, tensor in named.items()
    }


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_forward_and_gradients_agree(name: str, attention: str) -> None:
    model = MODELS[name]
    ours = ours_with_random_norms(model)
    reference = theirs(model, attention)
    weights = {unit: {k: v.detach() for k, v in named.items()} for unit, named in ours.named_units()}
    # Strict both ways: every name is theirs, and none of theirs is left out.
    reference.load_state_dict(mapped(model, weights), strict=True)

    tokens = torch.randint(0, model.vocab, (2, model.sequence), generator=torch.Generator().manual_seed(3))
    labels = torch.randint(0, model.vocab, tokens.shape, generator=torch.Generator().manual_seed(4))
    expected = reference(tokens).logits
    logits = ours(tokens)
    assert logits.shape == (2, model.sequence, model.vocab)
    assert expected.abs().max() > 0.5  # or the tolerance below would say little
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)

    loss = ours.loss(tokens, labels)
    expected_loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(loss, expected_loss, rtol=0, atol=1e-5)
    torch.autograd.backward(loss)
    torch.autograd.backward(expected_loss)

    gradients: dict[str, dict[str, Tensor]] = {}
    for unit, parameters in ours.named_units():
        gradients[unit] = {}
        for key, parameter in parameters.items():
            assert parameter.grad is not None
            gradients[unit][key] = parameter.grad
    if model.tied:
        total = gradients["head"]["output.weight"] + gradients["embed"]["tokens.weight"]
        gradients["head"]["output.weight"] = gradients["embed"]["tokens.weight"] = total
    by_name = mapped(model, gradients)
    for key, parameter in reference.named_parameters():
        scale = float(parameter.grad.abs().max())
        torch.testing.assert_close(by_name[key], parameter.grad, rtol=0, atol=1e-5 * max(scale, 1e-2))


def test_shorter_inputs_than_the_longest_agree() -> None:
    model = MODELS["llama-gqa"]
    ours = ours_with_random_norms(model)
    tokens = torch.randint(0, model.vocab, (2, model.sequence))
    # Causal: the first tokens' logits do not know of the rest.
    torch.testing.assert_close(ours(tokens[:, :7]), ours(tokens)[:, :7], rtol=0, atol=1e-5)
