"""What a chain means, in plain torch: the oracle of every backend, and the unfused path."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .chain import Chain
from .chain import chain as parse_chain

_POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def run(chain: Chain | str, *tensors: Tensor) -> Tensor:
    """The chain's result, one product after the other, in the inputs' dtype.

    Args:
        chain: a Chain or its text.
        tensors: the inputs in the order of `chain.operands`.

    Raises:
        ValueError: sizes that do not agree.
    """
    if isinstance(chain, str):
        chain = parse_chain(chain)
    chain.sizes([t.shape for t in tensors])
    value, *rest = tensors
    for contraction, right in zip(chain.contractions, rest, strict=True):
        left_letters, right_letters, output = contraction.letters
        value = torch.einsum(f"{left_letters},{right_letters}->{output}", value, right)
        value = stage(value, contraction.stages)
    return value


def stage(value: Tensor, words: tuple[str, ...]) -> Tensor:
    """The stages of an intermediate; a softmax is over its last dimension."""
    for word in words:
        value = value.softmax(-1) if word == "softmax" else _POINTWISE[word](value)
    return value
