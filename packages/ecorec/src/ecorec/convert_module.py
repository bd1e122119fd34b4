"""`convert_module`: the nn.EmbeddingBag and nn.Embedding of a model, replaced by tensor trains."""

import math
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .embedding import TTEmbedding, TTEmbeddingBag, TTTable
from .shapes import TTSpec, callers_level, check_dtype, check_positive, default_spec
from .tt_svd import decompose, largest_spec

INITS = ("match", "from_dense")
REPLACED_BY: dict[type[nn.Module], type[TTTable]] = {
    nn.EmbeddingBag: TTEmbeddingBag,
    nn.Embedding: TTEmbedding,
}
FLAGS = {
    nn.EmbeddingBag: ("mode", "padding_idx", "include_last_offset", "scale_grad_by_freq"),
    nn.Embedding: ("padding_idx", "scale_grad_by_freq"),
}
DEFAULT_RANK = 32

Dense = nn.EmbeddingBag | nn.Embedding
Select = Callable[[str, nn.Module], bool] | Collection[str]


@dataclass(frozen=True)
class TableReport:
    """What became of one table.

    names: the paths in the model of all modules that look it up. spec: its new shape, None when it
    was left alone, and then `reason` says why. bytes_before, bytes_after: of its parameters.
    relative_error: of its cores against its weights, None when they do not start from these.
    """

    names: tuple[str, ...]
    spec: TTSpec | None
    bytes_before: int
    bytes_after: int
    relative_error: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """What `convert_module` did: one entry for each table that it was asked for."""

    tables: tuple[TableReport, ...]

    @property
    def bytes_before(self) -> int:
        """Bytes of all these tables before."""
        return sum(table.bytes_before for table in self.tables)

    @property
    def bytes_after(self) -> int:
        """Bytes of all these tables now."""
        return sum(table.bytes_after for table in self.tables)

    def explain(self) -> str:
        """A line for each table: bytes, error and shape, or why it was left alone; then the sum."""
        lines = [f"{'bytes before':>15} {'after':>13} {'error':>8}  table"]
        for table in self.tables:
            error = "" if table.relative_error is None else f"{table.relative_error:.2g}"
            spec, names = table.spec, ", ".join(table.names)
            if spec is None:
                became = f"left alone: {table.reason}"
            else:
                became = f"p = {spec.p}, q = {spec.q}, ranks = {spec.ranks}"
            sizes = f"{table.bytes_before:>15,} {table.bytes_after:>13,}"
            lines.append(f"{sizes} {error:>8}  {names}: {became}")
        lines.append(f"{self.bytes_before:>15,} {self.bytes_after:>13,} {'':>8}  all")
        return "\n".join(lines)


def convert_module(
    model: nn.Module,
    *,
    select: Select | None = None,
    rank: int | None = None,
    max_bytes: int | None = None,
    init: str = "match",
    **kwargs: Any,
) -> Report:
    """Replaces the embeddings of a model by tensor trains, in place; returns what became of each.

    nn.EmbeddingBag becomes TTEmbeddingBag and nn.Embedding becomes TTEmbedding, wherever in the
    tree they are. Mode, padding_idx, include_last_offset, scale_grad_by_freq, device, dtype,
    training flag and requires_grad stay. A module under two names stays one; modules that share a
    weight share their cores and their fused optimiser. Gradients are dense even where `sparse` was
    set, and the padding row of a TTEmbedding is zeros. An optimiser made before still holds the old
    weights: make it afterwards.

    Left alone, with a reason in the report: a table that would not become smaller, or whose weight
    belongs to a module that is not converted, too; a module that has hooks, which would be lost; a
    subclass, which may mean something else; with init="match", a table of equal numbers, since
    cores of zeros learn nothing.

    Args:
        model: what holds the embeddings.
        select: those to convert, by a function of path and module or by their paths; None for all.
        rank: of every table; 32 when max_bytes is not given either.
        max_bytes: the most that each table may take; smaller ones are left alone.
        init: "match" for random cores of a table with the same standard deviation; "from_dense"
            for those closest to the table (`tt_svd.decompose`), which is good where rows of
            neighbouring ids are alike, and close to a table of zeros where ids are arbitrary.
        kwargs: of TTEmbeddingBag and TTEmbedding: optimizer, lr, backend, generator, ...

    Raises:
        ValueError: the model itself is an embedding; rank and max_bytes are both given, or one is
            too small; an unknown init; a path in `select` that leads to no embedding; weights that
            are not finite.
        TypeError: half precision; `select` is a single string; a keyword that does not exist.
        NotImplementedError: max_norm, in a module that `select` does not leave out.
        Nothing is changed when anything is raised.

    Cost: a pass over each table, or the passes of `decompose`.
    """
    if isinstance(model, Dense):
        raise ValueError(
            f"model must hold embeddings, not be one; got {type(model).__name__}: use "
            "TTEmbeddingBag.from_dense(model.weight, ...) instead"
        )
    if init not in INITS:
        raise ValueError(f"init must be one of {', '.join(INITS)}; got {init!r}")
    if rank is not None and max_bytes is not None:
        raise ValueError(f"rank and max_bytes exclude each other; got {rank} and {max_bytes}")
    for name, number in (("rank", rank), ("max_bytes", max_bytes)):
        if number is not None:
            check_positive(name, number)

    paths: dict[Dense, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Dense):
            paths.setdefault(module, []).append(path)
    chosen = _selected(paths, select)
    _check_max_norm(chosen, paths)
    tables: dict[Tensor, list[Dense]] = {}
    for module in chosen:
        tables.setdefault(module.weight, []).append(module)

    reports: list[TableReport] = []
    replacements: dict[Dense, TTTable] = {}
    for weight, modules in tables.items():
        names = tuple(path for module in modules for path in paths[module])
        reason = _reason_to_leave(model, weight, modules)
        try:
            plan = _Plan(reason=reason) if reason else _plan(weight, rank, max_bytes, init)
            replacements |= _replacements(modules, plan, kwargs)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise type(error)(f"{', '.join(names)}: {error}") from error
        after = weight.nbytes if plan.spec is None else plan.spec.bytes
        reports.append(
            TableReport(names, plan.spec, weight.nbytes, after, plan.relative_error, plan.reason)
        )
    for module, replacement in replacements.items():
        for path in paths[module]:
            model.set_submodule(path, replacement)
    return Report(tuple(reports))


@dataclass(frozen=True)
class _Plan:
    """What is to become of a table; without a spec it is left alone for a reason."""

    reason: str = ""
    spec: TTSpec | None = None
    init_std: float = 1.0
    cores: list[Tensor] | None = None  # to start from, else random ones
    relative_error: float | None = None


def _selected(paths: dict[Dense, list[str]], select: Select | None) -> list[Dense]:
    if select is None:
        return list(paths)
    if isinstance(select, str):
        raise TypeError(f"select must be a function or a collection of paths; got {select!r}")
    if callable(select):
        return [m for m, known in paths.items() if any(select(path, m) for path in known)]
    every = [path for known in paths.values() for path in known]
    for path in select:
        if path not in every:
            raise ValueError(
                f"select must hold paths of embeddings ({', '.join(every) or 'there are none'}); "
                f"got {path!r}"
            )
    return [module for module, known in paths.items() if not set(known).isdisjoint(select)]


def _check_max_norm(modules: list[Dense], paths: dict[Dense, list[str]]) -> None:
    for module in modules:
        if module.max_norm is not None:
            raise NotImplementedError(
                f"max_norm of {paths[module][0]} would rewrite single rows, and a row of a "
                "tensor-train table shares its cores with other rows: leave the module out by "
                f"`select`, or set its max_norm to None; got {module.max_norm}"
            )


def _reason_to_leave(model: nn.Module, weight: Tensor, modules: list[Dense]) -> str:
    """Why modules that share a weight cannot be replaced; empty when they can."""
    for module in modules:
        if type(module) not in REPLACED_BY:
            return f"{type(module).__name__} is a subclass, which may mean something else"
        if any(hooks for name, hooks in vars(module).items() if name.endswith("_hooks")):
            return "its hooks would be lost"
    for path, other in model.named_modules():
        if other not in modules and any(own is weight for own in other._parameters.values()):
            return f"its weight belongs to {path or 'the model'}, too, which is not converted"
    return "" if weight.numel() else "it is empty"


def _plan(weight: Tensor, rank: int | None, max_bytes: int | None, init: str) -> _Plan:
    check_dtype(weight.dtype)
    N, D = weight.shape
    if max_bytes is None:
        with warnings.catch_warnings(record=True) as clipped:
            warnings.simplefilter("always")
            spec = default_spec(N, D, DEFAULT_RANK if rank is None else rank, weight.dtype)
        if spec.bytes >= weight.nbytes:
            return _Plan(f"its cores would take {spec.bytes:,} bytes")
        for warning in clipped if rank is not None else ():  # of a rank that was asked for
            warnings.warn(warning.message, stacklevel=callers_level())
    elif weight.nbytes <= max_bytes:
        return _Plan("it takes no more than max_bytes")
    else:
        spec = largest_spec(N, D, max_bytes, weight.dtype)
    if init == "match":
        if weight.is_meta:
            raise ValueError("weight must have numbers; it is on the meta device")
        std = float(weight.detach().std(correction=0))
        if not math.isfinite(std):
            raise ValueError("weight must be finite; got a NaN or an infinity in it")
        if std == 0:
            return _Plan("its numbers are all equal, and cores of zeros learn nothing")
        return _Plan(spec=spec, init_std=std)
    if max_bytes is None:
        spec, cores, report = decompose(weight, spec=spec)
    else:
        spec, cores, report = decompose(weight, max_bytes=max_bytes)
    return _Plan(spec=spec, cores=cores, relative_error=report.relative_error)


def _replacements(
    modules: list[Dense], plan: _Plan, kwargs: dict[str, Any]
) -> dict[Dense, TTTable]:
    """A new module for each; the same one for modules that are alike, all with the same cores."""
    spec = plan.spec
    if spec is None:
        return {}
    start: dict[str, Any] = {"init_std": plan.init_std}
    if plan.cores is not None:
        start = {"init": _returns(plan.cores)}
    alike: dict[tuple[Any, ...], TTTable] = {}
    found: dict[Dense, TTTable] = {}
    for module in modules:
        flags = {name: getattr(module, name) for name in FLAGS[type(module)]}
        key = (type(module), module.training, *flags.values())
        if key not in alike:
            weight = module.weight
            made = REPLACED_BY[type(module)](
                num_embeddings=spec.num_embeddings,
                embedding_dim=spec.embedding_dim,
                spec=spec,
                device=weight.device,
                dtype=weight.dtype,
                **start,
                **flags,
                **kwargs,
            )
            if alike:
                first = next(iter(alike.values()))
                made.cores, made.fused_optimizer = first.cores, first.fused_optimizer
            for core in made.cores:
                core.requires_grad_(weight.requires_grad)
            alike[key] = made.train(module.training)
        found[module] = alike[key]
    return found


def _returns(cores: list[Tensor]) -> Callable[..., list[Tensor]]:
    return lambda *_, **__: cores
