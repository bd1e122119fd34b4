"""Tensor-train embedding tables that take the place of nn.EmbeddingBag.

TTEmbeddingBag            the module: nn.EmbeddingBag's call, a small part of its bytes
TTEmbedding               nn.Embedding's
TTSpec, suggest           the shape of a table, and the search for a fast one
convert_module            a model's tables, replaced in place
TTEmbeddingBagCollection  many tables, called with a KeyedJaggedTensor; TableConfig
DistributedTTCollection   the same over the ranks of a job; PipelinedTrainer, sharding_plan
reference                 the definition in float64, slow and short
"""

from . import reference, sharding_plan
from .collection import KeyedJaggedTensor, KeyedTensor, TableConfig, TTEmbeddingBagCollection
from .convert_module import convert_module
from .embedding import TTEmbedding, TTEmbeddingBag
from .pipelined_trainer import PipelinedTrainer
from .shape_search import suggest
from .shapes import TTSpec
from .table_wise_pipeline import DistributedTTCollection

__all__ = [
    "DistributedTTCollection", "KeyedJaggedTensor", "KeyedTensor", "PipelinedTrainer",
    "TTEmbedding", "TTEmbeddingBag", "TTEmbeddingBagCollection", "TTSpec", "TableConfig",
    "backends", "convert_module", "reference", "sharding_plan", "suggest",
]  # fmt: skip
__version__ = "0.1.0.dev0"


def backends() -> dict[str, str]:
    """What can compute a table's rows here, each "available" or why not."""
    from .backend import available

    return available()
