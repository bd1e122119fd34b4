"""Tensor-train embedding tables that take the place of nn.EmbeddingBag.

TTEmbeddingBag  the module: nn.EmbeddingBag's call, a small part of its bytes
TTSpec          the shape of a table: factors of rows and columns, ranks, bytes, FLOPs
reference       the definition in float64, slow and short
"""

from . import reference
from .embedding import TTEmbeddingBag
from .shapes import TTSpec

__all__ = ["TTEmbeddingBag", "TTSpec", "backends", "reference"]
__version__ = "0.1.0.dev0"


def backends() -> dict[str, str]:
    """What can compute a table's rows here, each "available" or why not."""
    return {"reference": "available", "torch": "available"}
