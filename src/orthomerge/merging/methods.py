"""Hand-written tables of merging methods; `FITTED` also need unlabelled inputs (`orthomerge.fitting`).

Third parties add rows by the entry-point group `orthomerge.methods` (`orthomerge.testing.check_method` checks them).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, get_args, get_type_hints

from orthomerge.core.errors import RecipeError, nearest, some
from orthomerge.core.schema import TableRow, build, find_row, maker_of, schema, with_plugins

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Row(TableRow):
    """One method; its options are the fields of its class, or the parameters of a function that fixes some of them.

    `base`: whether a base must be given; `experts`: how many, at least and at most; `fitted`: whether it needs inputs;
    `matrices`: whether it decomposes matrices, so that a GPU is faster.

    For the contracts of `orthomerge.testing`. `faithful`: options under which a single expert comes back unchanged, or
    why there are none. `quick`: options that make the other contracts fast.
    """

    base: bool = True
    experts: tuple[int, int | None] = (1, None)
    fitted: bool = False
    matrices: bool = False
    faithful: Options | str | None = None
    quick: Options = field(default_factory=dict)


_TIES = "Yadav et al. 2023, arXiv 2306.01708"
_DARE = "Yu et al. 2023, arXiv 2311.03099"
_ISO = "Marczak et al. 2025, arXiv 2502.04959"
_SUM = "Ilharco et al. 2023, arXiv 2212.04089"
_CRUMBS = "Davari and Belilovsky 2023, arXiv 2312.06795"
_STOCK = "Jang et al. 2024, arXiv 2403.19522"
_TALL = "Wang et al. 2024, arXiv 2405.07813"
_KNOTS = "Stoica et al. 2025, arXiv 2410.19735"
_WUDI = "Cheng et al. 2025, arXiv 2503.08099"
_MOMA = "Kong et al. 2026, arXiv 2412.13526 v3"
_ADA = "Yang et al. 2024, arXiv 2310.02575"
_CONCRETE = "Tang et al. 2023, arXiv 2312.06173"

_ONE: Options = {"scale": 1.0}
_ALL: Options = {"density": 1.0}
_BOTH: Options = {**_ALL, **_ONE}
_KEPT: Options = {"drop": 0.0, **_ONE}
_TWO = "it needs two experts"
_EQUAL = "it makes all singular values equal, of one expert too"
_PAIR: Options = {"base": False, "experts": (2, 2)}
_MATRIX: Options = {"matrices": True}
# The contracts test KnOTS with a merger that is a survey method and random.
_BY_DARE_TIES: Options = {**_MATRIX, "quick": {"merger": "dare_ties"}}
_FEW_STEPS: Options = {**_MATRIX, "quick": {"steps": 5}}
_STEPS: Options = {"steps": 4, "look": 2, "batch": 4}
_SMALL: Options = {"copies": 15, "solver": "ridge", **_STEPS}
_INPUTS: Options = {"inputs": 4}

# Name, maker, title, reference, `faithful`, and what differs from the defaults of a row.
_DATA_FREE: tuple[tuple[str, str, str, str, Options | str, Options], ...] = (
    ("average", "elements:Average", "Weighted average", "Wortsman et al. 2022, arXiv 2203.05482", {}, {"base": False}),
    ("task_arithmetic", "elements:TaskArithmetic", "Scaled sum of task vectors", _SUM, _ONE, {}),
    ("ties", "ties:ties", "TIES as in the paper: global trim, disjoint mean", _TIES, _BOTH, {}),
    ("ties_sum", "ties:ties_sum", "TIES as AdaMerging, Surgery and MOMA use it: disjoint sum", _TIES, _BOTH, {}),
    ("ties_per_tensor", "ties:ties_per_tensor", "TIES, trimmed tensor by tensor", _TIES, _BOTH, {}),
    ("ties@mergekit", "ties:ties_mergekit", "TIES as mergekit 0.1.5 reads it", _TIES, _ALL, {}),
    ("ties@peft", "ties:ties_peft", "TIES as peft 0.21 reads it", _TIES, _ALL, {}),
    ("ties@fusionbench", "ties:ties_fusionbench", "TIES as FusionBench 0.2 reads it", _TIES, _BOTH, {}),
    ("dare", "dare:dare", "Drop at random, rescale, add", _DARE, _KEPT, {}),
    ("dare_ties", "dare:dare_ties", "Drop at random, rescale, then TIES", _DARE, {**_KEPT, **_ALL}, {}),
    ("dare@mergekit", "dare:dare_mergekit", "dare_linear as mergekit 0.1.5 reads it", _DARE, _ALL, {}),
    ("dare_ties@mergekit", "dare:dare_ties_mergekit", "dare_ties as mergekit 0.1.5 reads it", _DARE, _ALL, {}),
    ("dare@peft", "dare:dare_peft", "dare_linear as peft 0.21 reads it", _DARE, _ALL, {}),
    ("dare_ties@peft", "dare:dare_ties_peft", "dare_ties as peft 0.21 reads it", _DARE, _ALL, {}),
    ("breadcrumbs", "elements:Breadcrumbs", "Drop outliers and small entries", _CRUMBS, _BOTH, {}),
    ("magmax", "elements:MagMax", "The entry of largest magnitude", "Marczak et al. 2024, arXiv 2407.06322", _ONE, {}),
    ("model_stock", "angles:ModelStock", "Average, drawn to the base", _STOCK, _TWO, {"experts": (2, None)}),
    ("slerp", "angles:Slerp", "Along the arc between two experts", "Shoemake 1985", _TWO, _PAIR),
    ("consensus", "elements:Consensus", "Only what several experts use (TALL masks)", _TALL, {**_ONE, "agree": 1}, {}),
    ("tsv_m", "tsv_m:TsvM", "Whitened task singular vectors", "Gargiulo et al. 2025, arXiv 2412.00081", _ONE, _MATRIX),
    ("iso_c", "iso:IsoC", "Isotropic merging in the common subspace", _ISO, _EQUAL, _MATRIX),
    ("iso_cts", "iso:IsoCts", "Isotropic merging in common and task subspaces", _ISO, _EQUAL, _MATRIX),
    ("knots", "knots:Knots", "Joint SVD of the updates, then a merger", _KNOTS, _BOTH, _BY_DARE_TIES),
    ("wudi", "wudi:Wudi", "Least interference, by descent", _WUDI, {"rest": "mean"}, _FEW_STEPS),
)
# Name, maker, title, reference, `quick`.
_FITTED: tuple[tuple[str, str, str, str, Options], ...] = (
    ("realign", "realign:Realign", "Distilled into one encoder, heads solved; adds nothing", "orthomerge", _SMALL),
    ("moma", "moma:Moma", "A mask over the merge and an orthogonal map per task", _MOMA, _STEPS),
    ("adamerging", "adamerging:AdaMerging", "Coefficients per task or layer by least entropy", _ADA, _STEPS),
    ("concrete_ta", "concrete:ConcreteTa", "A shared random mask by least entropy", _CONCRETE, _STEPS),
    (
        "concrete_am",
        "concrete:ConcreteAm",
        "Mask, then coefficients, by least entropy",
        _CONCRETE,
        {"adapt_steps": 2, **_STEPS},
    ),
    ("fisher", "fisher:Fisher", "Average weighted by Fisher", "Matena and Raffel 2022, arXiv 2111.09832", _INPUTS),
    ("regmean", "regmean:RegMean", "Least squares per layer", "Jin et al. 2023, arXiv 2212.09849", _INPUTS),
    ("regmean_pp", "regmean:RegMeanPp", "RegMean, block by block", "Nguyen et al. 2025, arXiv 2508.03121", _INPUTS),
    ("lm_cocktail", "lm_cocktail:LmCocktail", "Average by loss", "Xiao et al. 2023, arXiv 2311.13534", _INPUTS),
    ("model_tailor", "model_tailor:ModelTailor", "Sparse patches", "Zhu et al. 2024, arXiv 2402.12048", _INPUTS),
)

METHODS: Mapping[str, Row] = {
    name: Row(name, f"orthomerge.merging.{maker}", title, reference, faithful=faithful, **more)
    for name, maker, title, reference, faithful, more in _DATA_FREE
}
FITTED: Mapping[str, Row] = {
    name: Row(name, f"orthomerge.fitting.{maker}", title, reference, fitted=True, quick=quick)
    for name, maker, title, reference, quick in _FITTED
}


_BUILT_IN = {**METHODS, **FITTED}


@cache
def methods() -> Mapping[str, Row]:
    return with_plugins(_BUILT_IN, Row, group="orthomerge.methods")


def find_method(name: str) -> Row:
    return known_method(name) or find_row(methods(), name, what="method")


def known_method(name: str) -> Row | None:
    """Return the row of a method, or None. Plug-ins, which take time to find, are searched last."""
    return _BUILT_IN.get(name) or methods().get(name)


def make_method(name: str, options: Options, *, tasks: tuple[str, ...], seed: int = 0) -> Any:
    """Build a method from its name and options; numbers per expert may be a mapping by task."""
    return build_method(find_method(name), options, tasks=tasks, seed=seed)


def build_method(row: Row, options: Options, *, tasks: tuple[str, ...], seed: int = 0) -> Any:
    fewest, most = row.experts
    if len(tasks) < fewest or (most is not None and len(tasks) > most):
        needed = f"exactly {fewest}" if fewest == most else f"at least {fewest}"
        raise RecipeError(f"{row.name!r} merges {needed} experts, got {len(tasks)} ({some(tasks)})")
    return build(maker_of(row), _resolved(row, options, tasks=tasks, seed=seed), where=f"method {row.name}")


def options_of(method: object, name: str, options: Options, *, tasks: tuple[str, ...], seed: int) -> dict[str, Any]:
    row = find_method(name)
    maker = maker_of(row)
    if maker is type(method):
        return {key: getattr(method, key) for key in schema(maker)}
    # A row that fixes some fields of its class: a field may have the name of an option that means something else.
    resolved = _resolved(row, options, tasks=tasks, seed=seed)
    return {key: resolved.get(key, option.default) for key, (_, option) in schema(maker).items()}


def name_of(method: object) -> str:
    """Name of the first row that makes such an object, or else of its class."""
    cls = type(method)
    for name, row in methods().items():
        maker = maker_of(row)
        if maker is cls or get_type_hints(maker).get("return") is cls:
            return name
    return cls.__name__


def _resolved(row: Row, options: Options, *, tasks: tuple[str, ...], seed: int) -> dict[str, Any]:
    resolved, fields = dict(options), schema(maker_of(row))
    for key, value in options.items():
        kind = fields[key][0] if key in fields else None
        if kind != tuple[float, ...] and tuple[float, ...] not in get_args(kind):
            continue
        if isinstance(value, Mapping):
            resolved[key] = _by_task(key, value, tasks)
        elif isinstance(value, list | tuple) and len(value) != len(tasks):
            raise RecipeError(
                f"{row.name}: {key!r} has {len(value)} numbers for {len(tasks)} experts; give one per expert"
            )
    if "seed" in fields:
        resolved.setdefault("seed", seed)
    return resolved


def _by_task(key: str, value: Options, tasks: tuple[str, ...]) -> list[Any]:
    for name in value:
        if name not in tasks:
            raise RecipeError(f"{key!r} names {name!r}, which is no expert; {nearest(str(name), tasks)}")
    missing = [task for task in tasks if task not in value]
    if missing:
        raise RecipeError(f"{key!r} gives no number for {some(missing)}")
    return [value[task] for task in tasks]
