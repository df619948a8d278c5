"""Private names of torch by which Inductor is kept to a plan's schedule: what it would hoist or keep alive for longer.

Fusion is Inductor's own, but for pairs in which a recomputation would run at an earlier stage of the backward; what the
code generator calls is the documented hook for fusion heuristics, `torch._inductor.choices.InductorChoices`.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator
from typing import Any

from torch._inductor import config as inductor_config

from remat.torch_internals import is_tangent


@contextlib.contextmanager
def kept_schedule() -> Iterator[None]:
    """While Inductor lowers a graph: recomputation stays where the plan has it, and memory is freed at its last use.

    A buffer that will be used again stays alive until then; Inductor lets it where a peak that it estimates allows
    that, too high a one, since it takes nothing to be written in place (GPT-2 of two layers at 0.5: 33.4 MiB, without
    29.0).
    """
    from torch._inductor.choices import InductorChoices
    from torch._inductor.virtualized import V

    given: Any = V.choices
    kind = type(given) if isinstance(given, InductorChoices) else InductorChoices
    late = _LateRecomputation()

    def can_fuse_horizontal(self: Any, scheduler: Any, one: Any, two: Any, score: int) -> bool:
        return late.allows(scheduler, one, two) and bool(given.can_fuse_horizontal(scheduler, one, two, score))

    choices: Any = type("LateRecomputation", (kind,), {"can_fuse_horizontal": can_fuse_horizontal})
    with V.set_choices_handler(choices()), inductor_config.patch(allow_buffer_reuse=False):
        yield


class _LateRecomputation:
    """Forbids fusing a recomputation with what runs before it, if an operator outside of the kernels is in between.

    Two recomputations that read the same saved value fuse otherwise, and the later stage's results are alive through
    the earlier one (GPT-2 of two layers at its smallest plan: 30.0 MiB where 21.3 were planned).
    """

    def __init__(self) -> None:
        self._scheduler: Any = None
        self._outside: list[int] = []  # places of operators outside of the kernels, growing
        self._of_tangents: set[str] = set()  # names of buffers
        self._is_backward = False

    def allows(self, scheduler: Any, one: Any, two: Any) -> bool:
        """Whether two kernels of which neither needs the other may become one."""
        if self._scheduler is not scheduler:
            self._read(scheduler)
        first, second = (one, two) if one.min_order < two.min_order else (two, one)
        between = bisect.bisect(self._outside, second.min_order) - bisect.bisect(self._outside, first.max_order)
        return between <= 0 or not (self._is_backward and self._is_recomputed(second))

    def _read(self, scheduler: Any) -> None:
        from torch._inductor.virtualized import V

        self._scheduler = scheduler
        self._outside = sorted(node.min_order for node in scheduler.nodes if node.is_extern())
        # By what is read, not by the nodes that a buffer comes of: a copy made for an operator outside names that too.
        self._of_tangents = {node.name for node in V.graph.graph.nodes if is_tangent(node)}
        self._is_backward = bool(self._of_tangents)
        for node in scheduler.nodes:
            if not self._of_tangents.isdisjoint(read.name for read in node.read_writes.reads):
                self._of_tangents |= node.get_buffer_names()

    def _is_recomputed(self, kernel: Any) -> bool:
        return any(self._of_tangents.isdisjoint(part.get_buffer_names()) for part in kernel.get_nodes())
