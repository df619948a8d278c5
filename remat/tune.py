"""`tune`: what the prices cannot tell apart, told by the clock: the promising plans of a graph compiled and timed.

Each plan is compiled as it would be for the user, and steps of all of them are timed in turns, on made-up inputs. The
choice is kept on disk under the hash of the graph, so that the next process compiles that plan alone. The user's
tensors and random state are not touched.
"""

from __future__ import annotations

import logging
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from remat import torch_internals
from remat.costs import NOMINAL_SIZE
from remat.errors import RematError, RematWarning
from remat.measured import free_bytes
from remat.partitioner import NoSuchPlan, no_collection
from remat.plans import has_alternatives
from remat.settings import Settings
from remat.snapshot import machine_of
from remat.store import Document, Store, open_store
from remat.torch_internals_dynamo import copy_dynamo_graph

logger = logging.getLogger("remat")

# Compiles a graph by the promising plan of this place, forward and backward; NoSuchPlan where there are not so many.
CompilePlan = Callable[[fx.GraphModule, int], Callable[..., Any]]

# Steps are timed for so long, all plans together: next to nothing beside compiling them.
TIMED_SECONDS: Final = 1.0
# The median of five is not moved by two disturbed rounds. The most is a judgement: fifty short steps are enough.
FEWEST_ROUNDS: Final = 5
MOST_ROUNDS: Final = 50
# A plan must be this much faster than an earlier one to be taken. A judgement: nearer ones change places by noise.
TIE: Final = 0.01
# The document keeps the newest choices; each takes some hundred bytes.
MOST_REMEMBERED: Final = 1000
# Drawn once and repeated over an input, as for timing operators (measured.py).
_DRAWN: Final = 2**16 - 1
_SPREAD: Final = 0.1


@dataclass(frozen=True)
class Tuned:
    """Which plan was taken, and the time of each as a ratio of the first's."""

    choice: int
    ratios: tuple[float, ...]

    def line(self, graph: str) -> str:
        """What the user reads at log=plan."""
        ratio = self.ratios[self.choice]
        plan = f"plan {self.choice + 1} of {len(self.ratios)}"
        return f"remat: graph {graph}: tuned: {plan}, {ratio:.2f} of the first's time"


def choose(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    settings: Settings,
    graph: str,
    device: torch.device,
    compile_plan: CompilePlan,
) -> int:
    """The place of the promising plan to take for the Dynamo graph of this hash; 0, without a trial, for inference.

    What stops the tuning is one RematWarning, and the place is 0; under strict it is raised.
    """
    if settings.tune < 2 or not has_alternatives(settings) or not is_trained(module, example_inputs):
        return 0
    try:
        tuned = _tuned(module, example_inputs, settings, graph, device, compile_plan)
    except Exception as error:  # whatever made-up inputs do to a model, the user's training goes on
        if settings.strict:
            raise
        reason = str(error) if type(error) is RematError else f"{type(error).__name__}: {error}"
        warnings.warn(f"graph {graph} is not tuned ({reason})", RematWarning, stacklevel=2)
        return 0
    if tuned is None:
        return 0
    if settings.log == "warn":
        logger.debug("%s", tuned.line(graph))
    else:
        print(tuned.line(graph), file=sys.stderr)
    return tuned.choice


def is_trained(module: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether a backward may follow."""
    tensors = [*(value for value in example_inputs if isinstance(value, torch.Tensor)), *module.parameters()]
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _tuned(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    settings: Settings,
    graph: str,
    device: torch.device,
    compile_plan: CompilePlan,
) -> Tuned | None:
    """The choice: remembered, or made now; None where nothing is planned."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise RematError("the ranks of a distributed run could choose differently")
    machine = machine_of(device)
    if machine is None:
        raise RematError(f"no step can be timed on {device}")
    store, name = open_store(settings.cache_dir), f"tuned-{machine.key}.json"
    known = _entries(store.read(name), settings.tune).get(graph)
    if known is not None:
        return known
    with _undisturbed(device):
        ratios = _trials(module, example_inputs, settings.tune, device, compile_plan)
    return _remember(store, name, graph, Tuned(fastest(ratios), tuple(ratios)), settings.tune) if ratios else None


def fastest(ratios: Sequence[float]) -> int:
    """The first plan that is within a tie of the fastest."""
    limit = (1 + TIE) * min(ratios)
    return next(place for place, ratio in enumerate(ratios) if ratio <= limit)


def _trials(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    count: int,
    device: torch.device,
    compile_plan: CompilePlan,
) -> list[float]:
    """Compile at most so many plans, run a step of each, and time them; the ratios, none where nothing is planned."""
    inputs = made_up(example_inputs, device)
    steps: list[Step] = []
    for place in range(count):
        own = copy_dynamo_graph(module)
        try:
            compiled = compile_plan(own, place)
        except NoSuchPlan as error:
            logger.debug("%d plans are tried: %s", len(steps), error)
            break
        step = Step(compiled, inputs, [value for value in own.parameters() if value.requires_grad])
        step.prepare()
        step()
        if not step.has_backward:
            return []
        steps.append(step)
    return measure(steps, device) if len(steps) > 1 else [1.0] * len(steps)


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Keep the random state, and what the planner warns of: the compilation that counts says it again."""
    indices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=indices, enabled=True), warnings.catch_warnings():
        warnings.simplefilter("ignore", RematWarning)
        yield


# --- made-up inputs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in memory."""

    shape: list[int]
    stride: list[int]

    @property
    def count(self) -> int:
        """Its elements there, with those in its gaps."""
        spans = [(size - 1) * step for size, step in zip(self.shape, self.stride, strict=True)]
        return 1 + sum(spans) if math.prod(self.shape) else 0


@dataclass(frozen=True)
class Input:
    """An input like an example.

    value: a leaf that wants a gradient is given to each step as it is, of another tensor each gets an alias of its own,
    since it may come to want a gradient by what the step writes into it.
    source: of a tensor that wants a gradient and is no leaf: the leaf that each step's own copy is made from.
    """

    value: Any
    source: torch.Tensor | None = None

    def refill(self) -> None:
        """Make integers zero again, which a step may have counted up beyond what they may index."""
        value = self.value
        if isinstance(value, torch.Tensor) and not value.is_floating_point() and not value.is_complex():
            _flat(value).zero_()

    def given(self) -> Any:
        """What the next step is called with."""
        if self.source is not None:
            return self.source.clone().as_strided(self.value.shape, self.value.stride())
        if not isinstance(self.value, torch.Tensor) or self.value.requires_grad:
            return self.value
        return self.value.detach()

    @property
    def leaf(self) -> torch.Tensor | None:
        """What gets the gradient."""
        if self.source is not None:
            return self.source
        return self.value if isinstance(self.value, torch.Tensor) and self.value.requires_grad else None


def made_up(example_inputs: Sequence[Any], device: torch.device) -> list[Input]:
    """Inputs like the examples, which may be fake: small random numbers, zeros for integers and booleans.

    Raises RematError for kinds that cannot be made up, and where they would take more than half of the free memory.
    """
    with torch_internals.sizes_at_hand(), torch_internals.real_tensors(), torch.no_grad():
        layouts = [_layout(value) for value in example_inputs]
        pairs = list(zip(example_inputs, layouts, strict=True))
        needed = sum(layout.count * value.itemsize for value, layout in pairs if layout is not None)
        if 2 * needed > free_bytes(device):
            raise RematError(f"made-up inputs take {needed:,} bytes, more than half of the free memory")
        return [_made(value, layout) for value, layout in pairs]


def _layout(value: Any) -> Layout | None:
    """A tensor's layout, with symbolic sizes as they are at hand; None for another value."""
    if not isinstance(value, torch.Tensor):
        return None
    if value.layout is not torch.strided or value.is_quantized or hasattr(value, "__tensor_flatten__"):
        raise RematError(f"an input is a {type(value).__name__} of layout {value.layout}, which cannot be made up")
    shape = [torch_internals.nominal_size(size, NOMINAL_SIZE) for size in value.shape]
    return Layout(shape, [torch_internals.nominal_size(step, NOMINAL_SIZE) for step in value.stride()])


def _made(value: Any, layout: Layout | None) -> Input:
    if layout is None:
        if isinstance(value, torch.SymInt):
            return Input(torch_internals.nominal_size(value, NOMINAL_SIZE))
        if value is None or isinstance(value, bool | int | float):
            return Input(value)
        raise RematError(f"an input is a {type(value).__name__}, which cannot be made up")
    made = torch.empty_strided(layout.shape, layout.stride, dtype=value.dtype, device=value.device)
    flat = _flat(made)
    if value.dtype.is_floating_point or value.dtype.is_complex:
        drawn = torch.randn(_DRAWN, generator=torch.Generator().manual_seed(0)).mul_(_SPREAD)
        drawn = drawn.to(device=value.device, dtype=value.dtype)
        flat.copy_(drawn.repeat(math.ceil(flat.numel() / _DRAWN))[: flat.numel()])
    else:
        flat.zero_()
    if not value.requires_grad:
        return Input(made)
    return Input(made.requires_grad_()) if value.is_leaf else Input(made, flat.clone().requires_grad_())


def _flat(value: torch.Tensor) -> torch.Tensor:
    """All that lies in its memory, one after the other."""
    return value.as_strided((Layout(list(value.shape), list(value.stride())).count,), (1,))


# --- steps and their times -----------------------------------------------------------------------------------------


class Step:
    """Forward and backward of a compiled graph on made-up inputs; gradients are dropped.

    parameters: what the graph itself holds and gets gradients.
    """

    def __init__(
        self, compiled: Callable[..., Any], inputs: Sequence[Input], parameters: Sequence[torch.Tensor]
    ) -> None:
        self.compiled, self.inputs = compiled, inputs
        self.leaves = [*(leaf for value in inputs if (leaf := value.leaf) is not None), *parameters]
        self.arguments: list[Any] = []
        self.tangents: list[torch.Tensor] | None = None

    @property
    def has_backward(self) -> bool:
        """Whether anything that it returned wants a gradient; known after the first run."""
        return bool(self.tangents)

    def prepare(self) -> None:
        """Make the arguments of the next run, which belong to no time."""
        with torch_internals.real_tensors(), torch.enable_grad():
            for value in self.inputs:
                value.refill()
            self.arguments = [value.given() for value in self.inputs]

    def __call__(self) -> None:
        """Run once, after `prepare`."""
        arguments, self.arguments = self.arguments, []
        with torch_internals.real_tensors(), torch.enable_grad():
            results = self.compiled(*arguments)
            del arguments
            wanting = [value for value in results if isinstance(value, torch.Tensor) and value.requires_grad]
            if self.tangents is None:
                self.tangents = [torch.ones_like(value, requires_grad=False) for value in wanting]
            if wanting:
                torch.autograd.grad(wanting, self.leaves, self.tangents, allow_unused=True)


def measure(steps: Sequence[Step], device: torch.device) -> list[float]:
    """The time of each step as a ratio of the first's: the median over rounds, in which each runs once.

    Every other round goes backwards, so that a machine which gets slower or faster favours none.
    """
    rounds: list[list[float]] = []
    with no_collection():
        ended = time.perf_counter() + TIMED_SECONDS
        while len(rounds) < FEWEST_ROUNDS or (len(rounds) < MOST_ROUNDS and time.perf_counter() < ended):
            seconds = [0.0] * len(steps)
            places = range(len(steps))
            for place in places if len(rounds) % 2 == 0 else reversed(places):
                steps[place].prepare()
                seconds[place] = seconds_of(steps[place], device)
            rounds.append(seconds)
    return [statistics.median(row[place] / row[0] for row in rounds) for place in range(len(steps))]


def seconds_of(step: Callable[[], None], device: torch.device) -> float:
    """Seconds of one run, on a GPU by its own clock."""
    if device.type != "cuda":
        started = time.perf_counter()
        step()
        return max(time.perf_counter() - started, 1e-9)  # a clock that did not tick: no step is free
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    step()
    end.record()
    torch.cuda.synchronize(device)
    return max(start.elapsed_time(end) * 1e-3, 1e-9)


# --- the document ---------------------------------------------------------------------------------------------------


def _entries(document: Document | None, count: int) -> dict[str, Tuned]:
    """The sound entries of a document; count: how many plans there may be at most."""
    entries = None if document is None else document.get("choices")
    found = {}
    for graph, entry in entries.items() if isinstance(entries, dict) else ():
        choice, ratios = (entry.get("choice"), entry.get("ratios")) if isinstance(entry, dict) else (None, None)
        if type(choice) is not int or not isinstance(ratios, list) or not 0 <= choice < len(ratios) <= count:
            continue
        if all(type(ratio) in (int, float) and 0 < ratio < math.inf for ratio in ratios):
            found[graph] = Tuned(choice, tuple(ratios))
    return found


def _remember(store: Store, name: str, graph: str, tuned: Tuned, count: int) -> Tuned:
    """Keep a choice, unless another process made one meanwhile; the one that holds."""

    def change(document: Document | None) -> Document:
        entries = None if document is None else document.get("choices")
        kept = dict(entries) if isinstance(entries, dict) else {}
        if graph not in _entries(document, count):
            kept[graph] = {"choice": tuned.choice, "ratios": list(tuned.ratios)}
        return {"choices": dict(list(kept.items())[-MOST_REMEMBERED:])}

    return _entries(store.update(name, change), count).get(graph, tuned)
