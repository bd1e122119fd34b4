"""Lookups of tables as production has them: how many, how often the same rows, for how many rows.

The traces that the paper uses (Meta's `dlrm_datasets`, 788 tables) come with no package. What
is known of five of them is the part of a batch's lookups that are different rows, at seven batch
sizes. `FEATURES` are laws of popularity fitted to that, `meta788` is a population around them, and
`load` reads the original files where somebody has them.
Source: EcoRec, SC 2024, result files of the authors' artifact for figure 4.
"""

import gzip
import io
import math
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
HOT_ROWS = 8
CLASSES = 256
MOST_ROWS = 2**31
SCATTER = 2_654_435_761  # a prime above MOST_ROWS: multiplying by it permutes rows modulo any N


class Batch(NamedTuple):
    """The lookups of one feature: those of bag b are indices[offsets[b]:offsets[b + 1]].

    indices: [V] int64.
    offsets: [B + 1] int64 from 0 to V.
    """

    indices: Tensor
    offsets: Tensor

    @property
    def lengths(self) -> Tensor:
        """[B] int64 lookups of each bag."""
        return self.offsets.diff()


@dataclass(frozen=True)
class TableTrace:
    """A table and the law by which its rows are looked up, each lookup by itself.

    `hot_share` of the lookups fall on 8 rows alike, the others on the k-th of the remaining used
    rows with probability proportional to (k + shift)^-exponent. Rows are scattered over the table
    as a hash of ids would do.

    Args:
        name: of the table.
        num_embeddings: N, at most 2^31.
        pooling: mean lookups of a sample. With 1 each sample has exactly one, else their number
            is Poisson.
        used_rows: rows that are ever looked up, where the different rows of a batch saturate.
        exponent: of popularity; while nothing saturates, the different rows of V lookups grow as
            V^(1 / exponent) if it is above 1 (Heaps' law), and as V if it is below.
        shift: ranks over which popularity stays nearly flat before it falls.
        hot_share: in [0, 1).

    Raises:
        ValueError: a number outside its range.
    """

    name: str
    num_embeddings: int
    pooling: float
    used_rows: int
    exponent: float = 1.0
    shift: float = 1.0
    hot_share: float = 0.0

    def __post_init__(self) -> None:
        least_used = HOT_ROWS + 1 if self.hot_share > 0 else 1
        for name, is_right, rule in (
            ("num_embeddings", 1 <= self.num_embeddings <= MOST_ROWS, "in [1, 2^31]"),
            ("pooling", 0 < self.pooling < math.inf, "positive and finite"),
            (
                "used_rows",
                least_used <= self.used_rows <= self.num_embeddings,
                f"from {least_used} to num_embeddings",
            ),
            ("exponent", 0 <= self.exponent < math.inf, "at least 0 and finite"),
            ("shift", 0 < self.shift < math.inf, "positive and finite"),
            ("hot_share", 0 <= self.hot_share < 1, "in [0, 1)"),
        ):
            if not is_right:
                raise ValueError(f"{name} must be {rule}; got {getattr(self, name)}")

    def batch(self, samples: int, *, seed: int = 0) -> Batch:
        """Lookups of that many samples: indices [V] and offsets [samples + 1], int64.

        The same name, law, number and seed give the same lookups; another seed others of the same
        law. V is about samples * pooling.

        Raises:
            ValueError: samples or seed is negative.

        Cost: about 0.1 us and 40 bytes a lookup.
        """
        for name, number in (("samples", samples), ("seed", seed)):
            if number < 0:
                raise ValueError(f"{name} must be at least 0; got {number}")
        rng = np.random.default_rng([seed, zlib.crc32(self.name.encode())])
        lengths = (
            np.ones(samples, dtype=np.int64)
            if self.pooling == 1
            else rng.poisson(self.pooling, samples)
        )
        offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
        shares, edges = self._popularity
        rank = np.interp(rng.random(int(offsets[-1])), shares, edges).astype(np.int64)
        np.minimum(rank, self.used_rows - 1, out=rank)
        indices = (rank * SCATTER + 12345) % self.num_embeddings
        return Batch(torch.from_numpy(indices), torch.from_numpy(offsets))

    def expected_uniques(self, lookups: float) -> float:
        """Different rows that so many lookups have on average.

        Raises:
            ValueError: lookups is negative.
        """
        if lookups < 0:
            raise ValueError(f"lookups must be at least 0; got {lookups}")
        shares, edges = self._popularity
        rows = np.diff(edges)
        chance = np.minimum(np.diff(shares) / rows, 1 - 1e-12)  # log(0) would warn
        return float((rows * -np.expm1(lookups * np.log1p(-chance))).sum())

    @cached_property
    def _popularity(self) -> tuple[Floats, Floats]:
        """Shares of the lookups that fall on the ranks below each edge, and the edges.

        A rank is drawn evenly between two edges: an inverse distribution in straight pieces.
        """
        hot = HOT_ROWS if self.hot_share > 0 else 0
        cold = self.used_rows - hot
        edges = np.unique(np.concatenate([[0.0], np.geomspace(1, cold, CLASSES).round()]))
        middles = (edges[:-1] + edges[1:] - 1) / 2 + self.shift
        weights = np.diff(edges) * middles**-self.exponent
        shares = np.concatenate([[0.0], np.cumsum(weights) / weights.sum()])
        shares = self.hot_share + (1 - self.hot_share) * shares
        if hot:
            edges = np.concatenate([[0.0], edges + hot])
            shares = np.concatenate([[0.0], shares])
        return shares, edges


# Fitted to the fractions of `experiments/figure4`. Published is the pooling of f4 (46.4, from its
# lookups in table 1 of the artifact); one lookup a sample gives f0 its 4 rows and f44 its 2,300.
# Pooling 20 of f94 and f125, and all sizes, are our choice: a fraction depends on the lookups of a
# batch alone, so another pooling would scale used_rows and shift with it.
FEATURES = {
    trace.name: trace
    for trace in (
        TableTrace("f0", 4, 1.0, 4, exponent=0.0),
        TableTrace("f4", 28_700_000, 46.4, 9_874_000, 0.948, 1479.0, hot_share=0.651),
        TableTrace("f44", 2_464, 1.0, 2_289, 10.4, 5_690.0, hot_share=0.1757),
        TableTrace("f94", 10_000_000, 20.0, 1_240_000, 1.1196, 1.145, hot_share=0.3295),
        TableTrace("f125", 30_000_000, 20.0, 30_000_000, 1.2693, 109.2, hot_share=0.6812),
    )
}
TABLES = 788


def meta788(seed: int = 0) -> list[TableTrace]:
    """788 tables in the spread of the paper's largest workload, f0, f4, ... in their own places.

    Invented but for the five of `FEATURES`: sizes from 10 to 50 million rows, even in their
    logarithm; four tables in ten with one lookup a sample, the others with a long-tailed pooling of
    median 8, at most 200; Heaps exponents from 0.6 to 0.9. The same seed gives the same tables.
    The paper's smaller workloads are the first 480 and the first 240.

    Raises:
        ValueError: seed is negative.
    """
    if seed < 0:
        raise ValueError(f"seed must be at least 0; got {seed}")
    rng = np.random.default_rng(seed)
    rows = np.exp(rng.uniform(math.log(10), math.log(50_000_000), TABLES)).astype(int)
    one_lookup = rng.random(TABLES) < 0.4
    pooling = np.where(one_lookup, 1.0, np.minimum(rng.lognormal(math.log(8), 1.1, TABLES), 200))
    used = np.ceil(rows * rng.uniform(0.2, 1.0, TABLES)).astype(int)
    heaps = rng.uniform(0.6, 0.9, TABLES)
    shift = np.exp(rng.uniform(0, math.log(300), TABLES))
    hot_share = np.where(used > 10 * HOT_ROWS, rng.uniform(0.0, 0.6, TABLES), 0.0)
    tables = [
        TableTrace(
            name=f"f{n}",
            num_embeddings=int(rows[n]),
            pooling=round(float(pooling[n]), 1),
            used_rows=int(used[n]),
            exponent=1 / float(heaps[n]),
            shift=float(shift[n]),
            hot_share=float(hot_share[n]),
        )
        for n in range(TABLES)
    ]
    return [FEATURES.get(table.name, table) for table in tables]


def load(path: str | Path) -> list[Batch]:
    """The batches of an original trace file (`.pt.gz`), one of each of its T tables.

    The file is a gzip'd torch.save of (indices [V], offsets [T * B + 1], lengths [T, B]), table
    after table; nothing in it is executed. Offsets of each batch start at 0; indices are views.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds something else, or the three do not agree.

    Cost: the packed file and twice the unpacked one in memory while it is read.
    """
    path = Path(path)
    packed = path.read_bytes()
    try:
        held = torch.load(io.BytesIO(gzip.decompress(packed)), weights_only=True)
    except Exception as error:  # a damaged pickle raises nearly anything
        raise ValueError(f"{path} must be a gzip'd torch.save of three tensors") from error
    if not (isinstance(held, (tuple, list)) and len(held) == 3 and all(map(torch.is_tensor, held))):
        raise ValueError(f"{path} must hold three tensors: indices, offsets, lengths")
    if any(tensor.dtype not in (torch.int32, torch.int64) for tensor in held):
        kinds = ", ".join(str(tensor.dtype) for tensor in held)
        raise ValueError(f"{path} must hold integers, int32 or int64; got {kinds}")
    indices, offsets, lengths = (tensor.long() for tensor in held)
    if indices.ndim != 1 or offsets.ndim != 1 or lengths.ndim != 2:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in held)
        raise ValueError(f"{path} must hold shapes [V], [T * B + 1], [T, B]; got {shapes}")
    edges = torch.cat([lengths.new_zeros(1), lengths.flatten().cumsum(0)])
    if not torch.equal(edges, offsets) or edges[-1] != len(indices) or (lengths < 0).any():
        raise ValueError(
            f"the offsets in {path} must be the running sum of lengths, none negative, from 0 to "
            f"V = {len(indices)}"
        )
    samples = lengths.shape[1]
    of_table = [edges[t * samples : (t + 1) * samples + 1] for t in range(len(lengths))]
    return [Batch(indices[int(e[0]) : int(e[-1])], e - e[0]) for e in of_table]
