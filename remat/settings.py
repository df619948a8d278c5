"""Every knob of remat, once: the table below is what `python -m remat flags` and the README print.

A setting is given as `torch.compile(..., options={"budget": 0.5})`, or from outside as `REMAT_BUDGET=0.5`.
The option wins over the environment, the environment over the default. Settings are resolved once, when a
graph is compiled: the backward is compiled later and must not see another value.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from remat.errors import SettingError

Budget = float | int | str | None
_TRUE: Final = ("1", "true", "yes", "on")
_FALSE: Final = ("0", "false", "no", "off")


@dataclass(frozen=True)
class Settings:
    """Resolved values, one field for each row of `TABLE`, in its order; hashable and picklable."""

    budget: Budget = None
    exact: bool = True
    partitioner: str = "remat"
    plan_seed: int | None = None
    cost: str = "roofline"
    cache_dir: str | None = None
    tune: int = 0
    inner: str = "inductor"
    strict: bool = False
    check: bool = False
    check_tolerance: float | None = None
    log: str = "warn"
    dump: str | None = None
    save_ops: tuple[str, ...] = ()
    recompute_ops: tuple[str, ...] = ()
    user_checkpoints: str = "obey"
    memory_weight: float = 1.0
    recompute_weight: float = 1.0
    contraction_weight: float = 1.0
    launch_overhead: float | None = None
    memory_price: float = 0.0

    def weights_are_default(self) -> bool:
        """Whether the prices of the cut are untouched; then the default plan is also capped (see plans.py)."""
        defaults = Settings()
        return all(getattr(self, name) == getattr(defaults, name) for name in WEIGHTS)

    def keeps_schedule(self) -> bool:
        """Whether Inductor is held to the plan's schedule: under a budget, which its own would break."""
        return self.budget is not None and self.inner == "inductor" and self.partitioner == "remat"

    def wants_peak(self) -> bool:
        """Whether a plan of ours for a peak is asked for: not PyTorch's, nor a random one."""
        return self.budget is not None and self.partitioner != "torch" and self.plan_seed is None

    def for_compiled_code(self) -> Settings:
        """These settings with what changes no compiled code at its default: the compile cache pickles them whole."""
        free = {row.name: row.default for row in TABLE if not row.in_cache_key}
        return dataclasses.replace(self, **free)

    def cache_key(self) -> tuple[tuple[str, Any], ...]:
        """The settings that change the compiled code or whether it may exist, for the compile cache's key."""
        return tuple((row.name, getattr(self, row.name)) for row in TABLE if row.in_cache_key)


@dataclass(frozen=True)
class Setting:
    """One row of the table of settings."""

    name: str
    parse: Callable[[Any], Any]
    allowed: str
    help: str
    in_cache_key: bool = True

    @property
    def variable(self) -> str:
        """The environment variable."""
        return "REMAT_" + self.name.upper()

    @property
    def default(self) -> Any:
        """The value when neither the option nor the variable is given."""
        return getattr(Settings(), self.name)


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    text = str(value).strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError
    number = float(value)
    if not math.isfinite(number) or number < 0:
        raise ValueError
    return number


def _optional(parse: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def parsed(value: Any) -> Any:
        return None if value is None or str(value).strip().lower() == "none" else parse(value)

    return parsed


_UNITS: Final = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40
}  # fmt: skip


def _budget(value: Any) -> float | int | str:
    """A fraction of the peak of PyTorch's default plan as a float, bytes as an int, "min" or "auto"."""
    if isinstance(value, str) and value.strip().lower() in ("min", "auto"):
        return value.strip().lower()
    if isinstance(value, str):
        matched = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?i?b)?\s*", value, re.IGNORECASE)
        if matched is None:
            raise ValueError
        number, unit = matched.groups()
        if unit:
            return _whole_bytes(_number(number) * _UNITS[unit.upper()])
        value = _number(number) if not number.isdigit() else int(number)
    number = _number(value)
    if 0 < number <= 1:
        return number
    if isinstance(value, float):
        raise ValueError  # no fraction, and bytes are whole
    return _whole_bytes(number)


def _whole_bytes(number: float) -> int:
    if number < 1:
        raise ValueError
    return int(number)


def _integer(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and value != int(value)):
        raise ValueError
    return int(value)


def _count(value: Any) -> int:
    number = _integer(value)
    if number < 0:
        raise ValueError
    return number


def _one_of(*choices: str) -> Callable[[Any], str]:
    def parsed(value: Any) -> str:
        if value not in choices:
            raise ValueError
        return str(value)

    return parsed


def _operators(value: Any) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) else list(value)
    if not all(isinstance(name, str) for name in names):
        raise ValueError
    names = [name.strip().removeprefix("torch.ops.") for name in names if name.strip()]
    if not all(name.count(".") in (1, 2) or "::" in name for name in names):
        raise ValueError
    return tuple(sorted({name.replace("::", ".") for name in names}))


def _path(value: Any) -> str:
    text = os.fspath(value)
    if not isinstance(text, str) or not text:
        raise ValueError
    return text


_WEIGHT = "a number >= 0"
TABLE: Final[tuple[Setting, ...]] = (
    Setting(
        "budget", _optional(_budget), "none, a fraction in (0, 1], bytes (8GiB, 500MB, an integer), min or auto",
        "Peak memory allowed (see Budgets), in bytes or as a fraction of PyTorch's default; min: the smallest peak; "
        "auto: what the device has free.",
    ),
    Setting(
        "exact", _flag, "0 or 1",
        "Under a budget and Inductor: lower plans until the exact peak of the generated code fits; 0: trust the "
        "prediction.",
    ),
    Setting(
        "partitioner", _one_of("remat", "torch"), "remat or torch",
        "Who decides what to save: remat, or PyTorch (schedule and checks stay ours; under a budget all is PyTorch's).",
    ),
    Setting(
        "plan_seed", _optional(_integer), "none or an integer",
        "Take a random valid plan drawn from this seed, to test that every plan gives the same gradients.",
    ),
    Setting(
        "cost", _one_of("roofline", "profile", "learned"), "roofline, profile or learned",
        "Where prices come from: figures of the device, operators of the graph timed on it, or a regression over what "
        "was timed.",
    ),
    Setting(
        "cache_dir", _optional(_path), "none or a folder",
        "Where calibration, timings and tuned choices are kept; none: `remat` in the user's cache folder.",
        in_cache_key=False,
    ),
    Setting(
        "tune", _count, "a whole number >= 0",
        "Compile the so many most promising plans, time a step of each, keep the fastest (remembered on disk); "
        "0: trust the prices.",
    ),
    Setting(
        "inner", _one_of("inductor", "eager"), "inductor or eager",
        "What runs the two graphs: Inductor's fused kernels, or op by op for debugging and exact tests.",
    ),
    Setting(
        "strict", _flag, "0 or 1",
        "Raise when a graph cannot be handled or a budget not be met, instead of a warning and a fallback.",
    ),
    Setting(
        "check", _flag, "0 or 1",
        "Run the joint graph whole beside the first training step and compare outputs, gradients, written inputs.",
    ),
    Setting(
        "check_tolerance", _optional(_number), "none or a number >= 0",
        "Largest relative error (2-norm of the difference over the 2-norm) that check accepts; none: by dtype.",
    ),
    Setting(
        "log", _one_of("warn", "plan", "values"), "warn, plan or values",
        "What to print on stderr: warnings only, a line for each plan, or also saved values and what is at the peak.",
        in_cache_key=False,
    ),
    Setting(
        "dump", _optional(_path), "none or a folder",
        "Write the joint, forward and backward graphs, the flow network and the plan there.",
    ),
    Setting(
        "save_ops", _operators, "operator names such as aten.mm, comma-separated",
        "Operators that are never recomputed (what they make is saved where the backward needs it).",
    ),
    Setting(
        "recompute_ops", _operators, "operator names such as mylib.norm, comma-separated",
        "Custom operators declared pure, so that they may be recomputed; others of unknown purity never are.",
    ),
    Setting(
        "user_checkpoints", _one_of("obey", "hint"), "obey or hint",
        "Whether torch.utils.checkpoint in the model is an order (without a budget), or only makes saving dearer.",
    ),
    Setting(
        "memory_weight", _number, _WEIGHT,
        "Scales the price of saving a value (the traffic it causes): higher saves less and recomputes more.",
    ),
    Setting(
        "recompute_weight", _number, _WEIGHT,
        "Scales the price of recomputing a value (its seconds): higher recomputes less and saves more.",
    ),
    Setting(
        "contraction_weight", _number, _WEIGHT,
        "Scales the price of recomputing a matmul, convolution or attention, on top of recompute_weight.",
    ),
    Setting(
        "launch_overhead", _optional(_number), "none or microseconds >= 0",
        "Price of each kernel that recomputation adds, in microseconds; none: the device's own figure.",
    ),
    Setting(
        "memory_price", _number, _WEIGHT,
        "Price of keeping a byte from forward to backward, in microseconds per MiB: higher saves fewer bytes.",
    ),
)
WEIGHTS: Final = ("memory_weight", "recompute_weight", "contraction_weight", "launch_overhead", "memory_price")
_BY_NAME: Final = {row.name: row for row in TABLE}
assert [field.name for field in dataclasses.fields(Settings)] == [row.name for row in TABLE]


def _parse(row: Setting, value: Any, given_as: str) -> Any:
    try:
        return row.parse(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise SettingError(f"{given_as}={value!r} is not allowed: {row.allowed}") from error


def _nearest(name: str, known: list[str], others: frozenset[str] = frozenset()) -> str:
    match = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    match = match or difflib.get_close_matches(name, sorted(others), n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else f"; known: {', '.join(known)}"


def resolve(
    options: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    passthrough: frozenset[str] = frozenset(),
) -> tuple[Settings, dict[str, Any]]:
    """Settle every setting: option over environment over default.

    `passthrough` holds the option names that belong to Inductor; they come back in the second value.
    Raises SettingError for a value that is not allowed or a name nobody knows, with the nearest known one.
    """
    environment = os.environ if environment is None else environment
    values: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    known_variables = [row.variable for row in TABLE]
    for variable in sorted(environment):
        if variable.startswith("REMAT_") and variable not in known_variables:
            raise SettingError(f"unknown variable {variable}{_nearest(variable, known_variables)}")
    for row in TABLE:
        if row.variable in environment:
            values[row.name] = _parse(row, environment[row.variable], row.variable)
    for key, value in (options or {}).items():
        name = key.replace("-", "_")
        if name in _BY_NAME:
            values[name] = _parse(_BY_NAME[name], value, f"options[{key!r}]")
        elif name in passthrough:
            rest[name] = value
        else:
            raise SettingError(f"unknown option {key!r}{_nearest(name, list(_BY_NAME), passthrough)}")
    return Settings(**values), rest


def rows() -> list[tuple[str, str, str, str, str, str]]:
    """The table as text: option, variable, default, allowed, help, whether it enters the cache key."""
    return [
        (row.name, row.variable, _shown(row.default), row.allowed, row.help, "yes" if row.in_cache_key else "no")
        for row in TABLE
    ]


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if value is None or value == ():
        return "none"
    return str(value)


def markdown() -> str:
    """The table as Markdown; the README holds exactly this (a test compares them)."""
    lines = ["| option | variable | default | allowed | what it does |", "|---|---|---|---|---|"]
    lines += [
        f"| `{name}` | `{variable}` | {default} | {allowed} | {text} |"
        for name, variable, default, allowed, text, _ in rows()
    ]
    return "\n".join(lines)
