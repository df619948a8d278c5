"""What users tell of their custom operators: what one run costs, and whether running one again gives the same.

    remat.register_op(torch.ops.mylib.norm, seconds=2e-5, recomputable=True)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from remat import torch_internals
from remat.errors import SettingError

Seconds = float | Callable[..., float] | None


@dataclass(frozen=True)
class Registered:
    """What is known of an operator: seconds of one run, a number or a function of the FX node, and its purity."""

    seconds: Seconds
    recomputable: bool


_registered: dict[str, Registered] = {}


def register_op(op: Any, *, seconds: Seconds = None, recomputable: bool = False) -> None:
    """Give a custom operator a price and say whether it may be recomputed.

    op: an operator of torch.library (`torch.ops.mylib.norm`, with or without its overload) or its name
        (`"mylib.norm"`). seconds: of one run; or a function that gets the arguments of the call, tensors as fake ones,
        and returns seconds; None: by what it reads and writes. recomputable: whether it is pure, so that a second run
        on the same arguments gives the same value and has no other effect.
    Raises SettingError for what is no operator or no price. Call it before compiling: what is compiled stays as it is,
    and a compile cache knows registrations apart.
    """
    name = _name(op)
    if not (seconds is None or callable(seconds)):
        _check(name, seconds)
    _registered[name] = Registered(seconds, bool(recomputable))


def is_declared_pure(target: Any) -> bool:
    """Whether this operator was registered as recomputable."""
    found = _find(target)
    return found is not None and found.recomputable


def seconds_of(nodes: Iterable[fx.Node]) -> dict[fx.Node, float]:
    """The registered seconds of the operators among these nodes."""
    found = {}
    for node in nodes:
        entry = _find(node.target) if node.op == "call_function" else None
        if entry is None or entry.seconds is None:
            continue
        if callable(entry.seconds):
            arguments, keywords = torch.utils._pytree.tree_map(_value, (node.args, node.kwargs))
            seconds = entry.seconds(*arguments, **keywords)
        else:
            seconds = entry.seconds
        found[node] = _check(str(node.target), seconds)
    return found


def cache_key() -> tuple[tuple[str, str, bool], ...]:
    """Everything registered, for the compile cache; a function counts by its code and what it closes over."""
    return tuple((name, _text(entry.seconds), entry.recomputable) for name, entry in sorted(_registered.items()))


def _text(seconds: Seconds) -> str:
    if not callable(seconds):
        return repr(seconds)
    code = getattr(seconds, "__code__", None)
    if code is None:
        return repr(seconds)
    closed = [cell.cell_contents for cell in getattr(seconds, "__closure__", None) or ()]
    return repr((code.co_code.hex(), code.co_consts, code.co_names, getattr(seconds, "__defaults__", None), closed))


def _value(argument: Any) -> Any:
    return argument.meta.get("val") if isinstance(argument, fx.Node) else argument


def _check(name: str, seconds: Any) -> float:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not (0 <= seconds < math.inf):
        raise SettingError(f"register_op({name}): seconds={seconds!r} is not allowed: a finite number >= 0")
    return float(seconds)


def _find(target: Any) -> Registered | None:
    if not _registered or not isinstance(target, torch._ops.OpOverload):
        return None
    full = str(target)
    return _registered.get(full) or _registered.get(full.rpartition(".")[0])


def _name(op: Any) -> str:
    if isinstance(op, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(op)
    if torch_internals.overload_of(op) is not None:
        return str(torch_internals.overload_of(op))
    if isinstance(op, str):
        name = op.removeprefix("torch.ops.").replace("::", ".")
        if name.count(".") in (1, 2):
            return name
    raise SettingError(f"register_op: {op!r} is not allowed: an operator such as torch.ops.mylib.norm, or its name")
