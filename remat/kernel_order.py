"""The order in which Inductor would run a half's kernels, predicted.

After fusion Inductor tries three topological orders beside its own and takes the one of least estimated peak
(`torch._inductor.memory.reorder_for_peak_memory`): LPMF, which greedily keeps the peak low, one breadth first and one
depth first. They are followed here on predicted kernels, ties included.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from remat.buffers import Half
from remat.fusion import Kernel

# Inputs of these names are never freed in Inductor's estimate (`is_nonfreeable_buffers`).
NOT_FREED: Final = ("primals_", "arg", "fwd_rng_state", "bwd_rng_state", "tangents")


@dataclass(eq=False)
class Task:
    """A kernel, or a place where buffers become one without a kernel (`nop`), in the scheduler's graph.

    reads: numbers of the buffers from elsewhere that it needs; writes: of those it makes, in order.
    size: bytes allocated, as estimated; frees: the buffers that it may be the last to read.
    """

    writes: tuple[int, ...]
    reads: tuple[int, ...]
    extern: bool = False
    nop: bool = False
    steps: tuple[int, ...] = ()
    place: int = 0
    size: int = 0
    before: list[Task] = field(default_factory=list)
    after: list[Task] = field(default_factory=list)
    frees: list[_Memory] = field(default_factory=list)


@dataclass(eq=False)
class _Memory:
    """What the estimate knows of a buffer: bytes freed after its last reader, and whether it is returned."""

    size: int
    maker: Task | None
    returned: bool
    readers: list[Task] = field(default_factory=list)


def tasks_of(half: Half, kernels: Sequence[Kernel]) -> list[Task]:
    """Kernels as the scheduler has them after fusion: by their first buffers, what is needed first."""
    renamed = renames(half)
    found = []
    for kernel in kernels:
        own = set(kernel.buffers)
        needed: dict[int, None] = {}
        for number in kernel.buffers:
            buffer = half.buffers[number]
            for source in (*(load.buffer for load in buffer.loads), *sorted(buffer.after)):
                source = renamed.get(source, source)
                if source not in own:
                    needed[source] = None
        found.append(Task(kernel.buffers, tuple(needed), kernel.extern, steps=kernel.steps))
    for buffer in half.buffers:
        if buffer.loops is None and not buffer.extern and buffer.step >= 0 and buffer.index not in renamed:
            found.append(Task((buffer.index,), tuple(sorted(buffer.after)), nop=True, steps=(buffer.step,)))
    return _needed_first(sorted(found, key=lambda task: min(task.writes)))


def renames(half: Half) -> dict[int, int]:
    """Buffers that are another's memory after it was written again, with the buffer that the writing made."""
    return {
        buffer.index: next(iter(buffer.after))
        for buffer in half.buffers
        if buffer.inside is not None and buffer.loops is None and not buffer.extern
    }


def _needed_first(tasks: list[Task]) -> list[Task]:
    """`Scheduler.topological_sort_schedule`: depth first, what a kernel needs by the names of the buffers."""
    maker = {number: task for task in tasks for number in task.writes}
    found: dict[Task, None] = {}
    for task in tasks:
        pending = [(task, iter(sorted(task.reads, key=str)))]
        entered = {task}
        while pending:
            current, needed = pending[-1]
            source = next((maker[number] for number in needed if number in maker), None)
            if source is None:
                found[current] = None
                pending.pop()
            elif source not in found and source not in entered:
                entered.add(source)
                pending.append((source, iter(sorted(source.reads, key=str))))
    return list(found)


class Graph:
    """Tasks in the scheduler's order, linked, with the sizes that the estimate counts."""

    def __init__(self, half: Half, tasks: list[Task], returned: Iterable[int]) -> None:
        self.tasks = tasks
        kept = set(returned)
        self._memory: dict[int, _Memory] = {}
        maker = {number: task for task in tasks for number in task.writes}
        for place, task in enumerate(tasks):
            task.place = place
            for number in task.writes:
                buffer = half.buffers[number]
                size = 0 if self._mutates(half, number) else buffer.size_bytes
                self._memory[number] = _Memory(size, task, number in kept)
                task.size += size
        self.inputs: list[_Memory] = []
        for buffer in half.buffers:
            if buffer.node is not None and not buffer.node.name.startswith(NOT_FREED):
                self._memory[buffer.index] = _Memory(buffer.size_bytes, None, buffer.index in kept)
                self.inputs.append(self._memory[buffer.index])
        for task in tasks:
            for number in task.reads:
                self._link(half, task, number, maker)
        self.outputs = [memory for memory in self._memory.values() if memory.returned]

    def _mutates(self, half: Half, number: int) -> bool:
        buffer = half.buffers[number]
        return buffer.inside is not None and buffer.inside in buffer.after

    def _link(self, half: Half, task: Task, number: int, maker: dict[int, Task]) -> None:
        source = maker.get(number)
        if source is not None and source not in task.before:
            task.before.append(source)
            source.after.append(task)
        while self._mutates(half, number):  # the memory is that of what was written again
            number = half.buffers[number].inside or 0
        memory = self._memory.get(number)
        if memory is not None and task not in memory.readers:
            memory.readers.append(task)
            task.frees.append(memory)

    # --- the estimate and the orders ------------------------------------------------------------------------

    def levels(self, order: Sequence[Task]) -> list[int]:
        """Estimated bytes alive at each task (`estimate_peak_memory`)."""
        at = {task: step for step, task in enumerate(order)}
        change = [0] * (len(order) + 1)
        for memory in self.inputs:
            change[0] += memory.size
        for step, task in enumerate(order):
            change[step] += task.size
        for memory in self._memory.values():
            users = memory.readers or ([memory.maker] if memory.maker else [])
            if users and not memory.returned:
                change[max(at[user] for user in users) + 1] -= memory.size
        level, found = 0, []
        for step in range(len(order)):
            level += change[step]
            found.append(level)
        return found

    def best(self) -> list[Task]:
        """The order of least estimated peak; of equals the first tried."""
        return min(self.orders(), key=lambda order: max(self.levels(order), default=0))

    def orders(self) -> list[list[Task]]:
        """All that Inductor tries, its own first."""
        return [self.tasks, self._lpmf(), self._breadth(), self._depth()]

    def _lpmf(self) -> list[Task]:
        """`topological_sort_lpmf`: of the tasks that stay below the peak so far the one that leaves least alive."""
        missing = {task: len(task.before) for task in self.tasks}
        ready = dict.fromkeys(task for task in self.tasks if not task.before)
        left = {memory: len(memory.readers) + memory.returned for memory in self._memory.values()}
        frees = {task: sum(memory.size for memory in task.frees if left[memory] == 1) for task in self.tasks}
        for task in self.tasks:
            own = (self._memory[number] for number in task.writes)
            frees[task] += sum(memory.size for memory in own if left[memory] == 0)
        alive = sum(memory.size for memory in self.inputs)
        peak = max(alive, sum(memory.size for memory in self.outputs))
        order: list[Task] = []
        while ready:
            gap = peak - alive
            task = min(ready, key=lambda t: (t.size if t.size > gap else 0, t.size - frees[t], t.place))
            del ready[task]
            order.append(task)
            alive += task.size
            peak = max(peak, alive)
            alive -= frees[task]
            for follower in task.after:
                missing[follower] -= 1
                if not missing[follower]:
                    ready[follower] = None
            for memory in task.frees:
                left[memory] -= 1
                if left[memory] == 1:
                    for reader in memory.readers:
                        frees[reader] += memory.size
        return order

    def _breadth(self) -> list[Task]:
        """`topological_sort_bfs`: first what follows on what ran first."""
        missing = {task: len(task.before) for task in self.tasks}
        at: dict[Task, int] = {}
        ready: list[tuple[list[int], int, Task]] = [([], t.place, t) for t in self.tasks if not t.before]
        heapq.heapify(ready)
        while ready:
            task = heapq.heappop(ready)[2]
            at[task] = len(at)
            for follower in task.after:
                missing[follower] -= 1
                if not missing[follower]:
                    ran = sorted(at[source] for source in follower.before)
                    heapq.heappush(ready, (ran, follower.place, follower))
        return list(at)

    def _depth(self) -> list[Task]:
        """`topological_sort_dfs`: depth first, from the task that touches least."""
        weight = {task: task.size + sum(memory.size for memory in task.frees) for task in self.tasks}

        def lightest(tasks: Iterable[Task]) -> list[Task]:
            return sorted(tasks, key=lambda task: (weight[task], task.place))

        found: dict[Task, None] = {}
        for root in lightest(self.tasks):
            pending = [] if root in found else [(root, iter(lightest(root.before)))]
            while pending:
                task, needed = pending[-1]
                source = next((source for source in needed if source not in found), None)
                if source is None:
                    found[task] = None
                    pending.pop()
                else:
                    pending.append((source, iter(lightest(source.before))))
        return list(found)
