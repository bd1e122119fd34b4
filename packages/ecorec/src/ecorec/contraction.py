"""The different prefixes of a batch: what has to be multiplied, each once, and from which end.

Rows that share (i_1, ..., i_k) share the product of their first k cores. For sorted different
rows the prefixes come out sorted too, and the rows of one prefix lie next to each other. Rows that
share (i_2, i_3) share the product of their last two cores instead: with three cores the direction
is a choice, made for each i_2 (`directions`); `lower_bound` is what no choice can be below.
Source: TT-Rec and EL-Rec reuse rows or pairs; EcoRec, SC 2024, sorts and contracts both.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .shapes import TTSpec, chain_flops, mirrored, padded

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]
FLAGS_PER_ROW = 64  # above, a sort of the rows takes less time and memory


class PrefixLevel(NamedTuple):
    """The different prefixes of one length k, sorted.

    digit: [F_k] int64, i_k of each prefix.
    parent: [F_k] int64, its first k - 1 digits as a position in the level before (level 1: empty).
    """

    digit: Tensor
    parent: Tensor


def unique_prefixes(rows: Tensor, p: Sequence[int]) -> list[PrefixLevel]:
    """The d levels of prefixes of sorted different rows; the last level is the rows themselves.

    Args:
        rows: [U] int64, ascending, all different, in [0, prod p).
        p: the d row factors.

    Cost: one pass over the prefixes of each level.
    """
    levels = []
    prefixes = rows
    for factor in reversed(p[1:]):
        shorter, parent = torch.unique_consecutive(prefixes // factor, return_inverse=True)
        levels.append(PrefixLevel(prefixes % factor, parent))
        prefixes = shorter
    levels.append(PrefixLevel(prefixes, prefixes.new_empty(0)))
    return levels[::-1]


class Directions(NamedTuple):
    """Which rows of a batch start at their first core, which at their last, and what that costs.

    name: what the rows do, all or mixed.
    back_first: [p_2] bool on the CPU, True for each i_2 whose rows start at their last core; None
        when all start at the first.
    front_pairs, back_pairs: F and K, different (i_1, i_2) and (i_(d-1), i_d) of the batch; with
        two cores both are the rows.
    flops_front, flops_back: of a forward with all rows in one direction.
    flops: of a forward as `back_first` says.
    """

    name: Literal["front", "back", "mixed"]
    back_first: Tensor | None
    front_pairs: int
    back_pairs: int
    flops_front: int
    flops_back: int
    flops: int


def directions(rows: Tensor, spec: TTSpec) -> Directions:
    """The cheapest of: all rows front-first, all back-first, each i_2 the cheaper of its own two.

    With U_i, F_i and K_i the different rows, front pairs and back pairs that have i_2 = i, and
    D' = q_1 q_2 q_3, an i_2 costs, in FLOPs and exactly,

        front-first  2 q_1 q_2 r_1 r_2 F_i + 2 D' r_2 U_i
        back-first   2 r_1 q_2 q_3 r_2 K_i + 2 D' r_1 U_i

    and takes the second where that is less time: with q_1 q_2 and q_2 q_3 rounded up to the
    kernels' 8 lanes, which run full or not. At a tie, or where it does not occur, the first. The
    sum of the lesser times is never above that of all rows in one direction, so it is the answer.
    Two cores have no pair product and both directions cost the same; four cores are front-first
    only, at 2 q_1 ... q_k r_(k-1) r_k for each different prefix of k = 2, 3, 4 digits.

    Args:
        rows: [U] int64, ascending, all different, in [0, prod p); read on the CPU.
        spec: the table's shape.

    Cost: a few passes over the rows and over one flag for each possible (i_2, i_3), or a sort of
    the rows where such flags would be more than 64 a row.
    Source: EcoRec, SC 2024, has kernels for both directions; this rule is our own.
    """
    sorted_rows = rows.cpu().numpy()
    if len(spec.p) != 3:
        return _front_only(sorted_rows, spec)
    _, p2, p3 = spec.p
    pairs = sorted_rows // p3
    heads = pairs // p2
    middles = pairs - heads * p2
    starts = _runs(pairs)
    uniques_of = np.bincount(middles, minlength=p2)
    fronts_of = np.bincount(middles[starts], minlength=p2)
    backs_of = _different_by_middle(sorted_rows - heads * (p2 * p3), p2, p3)

    cost = Costs.of(spec)
    front = cost.front_pair * fronts_of + cost.front_row * uniques_of
    back = cost.back_pair * backs_of + cost.back_row * uniques_of
    price = prices(spec)
    is_back = np.asarray(
        price.back_pair * backs_of + price.back_row * uniques_of
        < price.front_pair * fronts_of + price.front_row * uniques_of
    )
    name: Literal["front", "back", "mixed"] = "mixed" if is_back.any() else "front"
    if name == "mixed" and is_back[uniques_of > 0].all():
        name = "back"
    return Directions(
        name,
        None if name == "front" else torch.from_numpy(is_back),
        front_pairs=len(starts),
        back_pairs=int(backs_of.sum()),
        flops_front=int(front.sum()),
        flops_back=int(back.sum()),
        flops=int(np.where(is_back, back, front).sum()),
    )


def prices(spec: TTSpec) -> "Costs":
    """What pairs and rows of three cores take: FLOPs, times how much slower each direction is."""
    q1, q2, q3 = spec.q
    cost = Costs.of(spec)
    in_front, in_back = int(padded(q1 * q2)) * q2 * q3, int(padded(q2 * q3)) * q1 * q2
    return Costs(
        cost.front_pair * in_front,
        cost.back_pair * in_back,
        cost.front_row * in_front,
        cost.back_row * in_back,
    )


def lower_bound(rows: Tensor, spec: TTSpec) -> int:
    """FLOPs of the cheapest forward in which each row may start at either end.

    The least, over all 2^U choices, of what the rows cost and of the pairs that they need: the
    front pair of each front-first row, the back pair of each back-first one. Computed as a minimum
    cut, so exact; the maximum flow of equal value is the proof that nothing is cheaper.

    Args:
        rows: [U] int64, ascending, all different, in [0, prod p).
        spec: two or three cores.

    Raises:
        NotImplementedError: four cores.
        OverflowError: the costs, in units of their common divisor, add up to 2^31 or more.

    Cost: a maximum flow over U + F + K nodes, 50 ms for 30,000 rows.
    Source: a weighted vertex cover of front and back pairs (Koenig), with project selection for
    the rows' own costs.
    """
    if len(spec.p) == 4:
        raise NotImplementedError("the exact bound is for 2 or 3 cores; got 4")
    if len(spec.p) == 2:
        return directions(rows, spec).flops
    _, p2, p3 = spec.p
    cost = Costs.of(spec)
    sorted_rows = rows.cpu().numpy()
    fronts, front_of = np.unique(sorted_rows // p3, return_inverse=True)
    backs, back_of = np.unique(sorted_rows % (p2 * p3), return_inverse=True)
    source, sink = 0, 1
    front_nodes = 2 + np.arange(len(fronts))
    back_nodes = 2 + len(fronts) + np.arange(len(backs))
    row_nodes = 2 + len(fronts) + len(backs) + np.arange(len(rows))
    # On the source's side of the cut: front pairs that are computed, back pairs that are not, rows
    # that are front-first. So cutting a pair's own edge pays for it, and a row's two edges to its
    # pairs are never worth cutting.
    front_dearer = cost.front_row - cost.back_row
    cut = _least_cut(
        [
            (front_nodes, sink, cost.front_pair),
            (source, back_nodes, cost.back_pair),
            (row_nodes, front_nodes[front_of], cost.front_pair),
            (back_nodes[back_of], row_nodes, cost.back_pair),
            (row_nodes, sink, max(0, front_dearer)),
            (source, row_nodes, max(0, -front_dearer)),
        ]
    )
    return len(rows) * min(cost.front_row, cost.back_row) + cut


@dataclass(frozen=True)
class BatchPlan:
    """What a forward of one batch has to compute, and what it does.

    Attributes:
        lookups: V.
        uniques: U, different rows.
        front_pairs, back_pairs: F and K, different (i_1, i_2) and (i_(d-1), i_d).
        direction: "front", "back" or "mixed" (`directions`).
        flops: of the pairs and rows as executed, each once. Not counted: the sums of bags, and
            pairs that a boundary between chunks makes computed twice.
        flops_front, flops_back: the same with all rows in one direction.
        flops_lower_bound: `lower_bound`, or None where it was not asked for.
        chunks: parts that the rows are computed in, one after another.
        workspace_bytes: what a forward and backward take beside inputs, output and gradients.
    """

    lookups: int
    uniques: int
    front_pairs: int
    back_pairs: int
    direction: Literal["front", "back", "mixed"]
    flops: int
    flops_front: int
    flops_back: int
    flops_lower_bound: int | None
    chunks: int
    workspace_bytes: int

    @staticmethod
    def of(
        rows: Tensor,
        spec: TTSpec,
        *,
        lookups: int,
        chunks: int,
        workspace_bytes: int,
        exact: bool = False,
    ) -> "BatchPlan":
        """The plan of a batch with these different rows.

        Args:
            rows: [U] int64, ascending, all different, in [0, prod p).
            spec: the table's shape.
            lookups: V.
            chunks, workspace_bytes: as they will be.
            exact: compute the lower bound too.

        Raises:
            NotImplementedError: exact with four cores.
        """
        found = directions(rows, spec)
        return BatchPlan(
            lookups=lookups,
            uniques=len(rows),
            front_pairs=found.front_pairs,
            back_pairs=found.back_pairs,
            direction=found.name,
            flops=found.flops,
            flops_front=found.flops_front,
            flops_back=found.flops_back,
            flops_lower_bound=lower_bound(rows, spec) if exact else None,
            chunks=chunks,
            workspace_bytes=workspace_bytes,
        )

    def explain(self) -> str:
        """Lines for people: what repeats in the batch, what is multiplied, what memory it takes."""
        lines = [
            f"{self.lookups:,} lookups of {self.uniques:,} different rows, with "
            f"{self.front_pairs:,} different front pairs and {self.back_pairs:,} back pairs",
            f"{self.direction}: {self.flops:,} FLOPs of a forward (all front-first "
            f"{self.flops_front:,}, all back-first {self.flops_back:,})",
        ]
        if self.flops_lower_bound is not None:
            above = self.flops / self.flops_lower_bound - 1 if self.flops_lower_bound else 0.0
            lines.append(
                f"no choice of directions takes fewer than {self.flops_lower_bound:,}: "
                f"{above:.2%} above it"
            )
        lines.append(f"workspace {self.workspace_bytes:,} bytes, chunks {self.chunks:,}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Costs:
    """FLOPs of one front pair, one back pair, and one row after either; two or three cores."""

    front_pair: int
    back_pair: int
    front_row: int
    back_row: int

    @staticmethod
    def of(spec: TTSpec) -> "Costs":
        """Those of a table; pairs of two cores are rows of the first and cost nothing."""
        if len(spec.q) == 2:
            row = 2 * math.prod(spec.q) * spec.ranks[0]
            return Costs(0, 0, row, row)
        q1, q2, q3 = spec.q
        r1, r2 = spec.ranks
        columns = 2 * q1 * q2 * q3
        return Costs(2 * q1 * q2 * r1 * r2, 2 * r1 * q2 * q3 * r2, columns * r2, columns * r1)


def _front_only(sorted_rows: Integers, spec: TTSpec) -> Directions:
    d = len(spec.p)
    fronts = [len(_runs(sorted_rows // math.prod(spec.p[k:]))) for k in range(2, d + 1)]
    backs = [len(_runs(np.sort(sorted_rows % math.prod(spec.p[d - k :])))) for k in range(2, d + 1)]
    flops = chain_flops(spec.core_shapes, fronts)
    flops_back = chain_flops(mirrored(spec.core_shapes), backs)
    return Directions("front", None, fronts[0], backs[0], flops, flops_back, flops)


def _different_by_middle(backs: Integers, p2: int, p3: int) -> Integers:
    """[p_2] how many different values of i_2 * p_3 + i_3 have each i_2."""
    if p2 * p3 <= FLAGS_PER_ROW * len(backs):
        occurs = np.zeros((p2, p3), dtype=np.bool_)
        occurs.reshape(-1)[backs] = True
        return np.asarray(np.count_nonzero(occurs, axis=1))
    backs = np.sort(backs)
    return np.bincount(backs[_runs(backs)] // p3, minlength=p2)


def _runs(ascending: Integers) -> Integers:
    """Where each different number, none negative, begins."""
    return np.flatnonzero(np.diff(ascending, prepend=-1))


def _least_cut(edges: Sequence[tuple[int | Integers, int | Integers, int]]) -> int:
    """The least capacity that separates node 1 from node 0.

    edges: tails and heads, broadcast, and the capacity of each.
    """
    from scipy.sparse import csr_array  # takes 0.3 s to import
    from scipy.sparse.csgraph import maximum_flow

    unit = math.gcd(*(capacity for _, _, capacity in edges)) or 1
    ends = [np.broadcast_arrays(tail, head) for tail, head, _ in edges]
    capacities = np.concatenate(
        [
            np.full(len(tails), capacity // unit)
            for (tails, _), (_, _, capacity) in zip(ends, edges, strict=True)
        ]
    )
    if capacities.sum() > np.iinfo(np.int32).max:
        raise OverflowError(
            f"the exact bound needs costs of at most 2^31 in units of {unit} FLOPs; got "
            f"{capacities.sum():,}: ask for it with fewer rows"
        )
    tails, heads = (np.concatenate(side).astype(np.int32) for side in zip(*ends, strict=True))
    nodes = int(max(tails.max(initial=1), heads.max(initial=1))) + 1
    graph = csr_array((capacities.astype(np.int32), (tails, heads)), shape=(nodes, nodes))
    graph.eliminate_zeros()
    return unit * int(maximum_flow(graph, 0, 1).flow_value)
