"""Chains of products with small reductions, as one kernel.

chain, Chain       what is to be fused, as text and as data
place, Placed      where loads, products and stores stand among the loops of a tiling expression
space, Space       all candidates, and the rules that prune them
reference          what a chain means
"""

from . import reference
from .chain import Chain, chain
from .placement import Placed, place
from .pruning import Candidate, Space, Step, space

__all__ = [
    "Candidate",
    "Chain",
    "Placed",
    "Space",
    "Step",
    "chain",
    "place",
    "reference",
    "space",
]
__version__ = "0.1.0.dev0"
