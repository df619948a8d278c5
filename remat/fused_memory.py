"""Bytes alive at every kernel of a step under Inductor, predicted without lowering: what `dryrun` reads off its code.

The kernels of `fusion`, in the order of `kernel_order`, are played as Inductor's wrapper runs them: memory is taken
just before the kernel that writes it and given back after the last that reads it; a kernel writes over a dying input
that it reads as it writes (`decide_inplace_update`); and freed memory is kept for a later buffer of the same size
where that keeps the estimated peak (`AllocateLine.should_reuse_buffer`). In C++ the kernels between two operators
outside are one function: what it writes is taken before it, and nothing is given back in between.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import fx

from remat.buffers import Buffer, Half, contiguous, normal
from remat.costs import tensor_bytes
from remat.fusion import Kernel, Lowering
from remat.kernel_order import Graph, Task, renames, tasks_of
from remat.memory import Life, Role, Timeline, alive_at_each, call_names
from remat.plan import Plan

aten = torch.ops.aten
# Operators outside that write into memory which the wrapper takes (`ExternKernelOut`); the others make their own.
_INTO_GIVEN: Final = frozenset({aten.mm, aten.addmm, aten.bmm, aten.baddbmm})
# A kernel may write over an input that is up to 5% larger (`can_match_buffer_size`).
NEARLY: Final = 0.95


@dataclass(eq=False)
class _Block:
    """One piece of memory, and from which step on it holds what.

    held: it lives to the end. donated: kernels may write over it. last: the step after which it is given back.
    """

    bytes: int
    owners: list[tuple[int, str, Role]]
    held: bool = False
    donated: bool = True
    last: int | None = None

    def lives(self, end: int) -> Iterable[Life]:
        """Each owner's part of its time."""
        last = end if self.last is None else self.last
        ends = [step - 1 for step, *_ in self.owners[1:]] + [last]
        for (born, name, role), until in zip(self.owners, ends, strict=True):
            yield Life(name, role, self.bytes, born, until)


def timeline(plan: Plan, lowering: Lowering, scratch: Mapping[fx.Node, int]) -> Timeline:
    """Bytes alive during each function that Inductor's wrapper calls, forward first, named by the last node in it.

    scratch: the bytes that operators outside take for themselves while they run.
    """
    joint = plan.joint
    merges = joint.device.type in ("cpu", "meta")
    roles = dict.fromkeys(plan.saved, Role.SAVED) | dict.fromkeys(joint.forward_outputs, Role.OUTPUT)
    first = _Player(lowering.forward_half, lowering.forward, merges, lowering.held, 0, {})
    first.play(call_names(plan), roles)
    boundary = len(first.names)
    for block in first.blocks_of(joint.forward_outputs):
        block.held, block.donated = True, False
    for block in first.blocks_of(node for node in plan.saved if node.op == "placeholder"):
        block.donated = False  # an input's copy, which AOTAutograd takes for the input
    given = {node: block for node in plan.saved for block in first.blocks_of([node])}
    saved = list(dict.fromkeys(given.values()))
    held = list(dict.fromkeys([*first.blocks_of(joint.forward_outputs), *saved]))
    for node in (node for node in joint.tangents if node.users):
        owners = [(boundary, node.name, Role.INCOMING)]
        given[node] = _Block(tensor_bytes(node.meta.get("val")), owners, node in joint.held_tangents, donated=False)
    passed = list(dict.fromkeys([*first.blocks_of(joint.forward_outputs), *given.values()]))
    again = [node for node in plan.backward if node not in joint.tangent_closure]
    roles = dict.fromkeys(again, Role.RECOMPUTED) | dict.fromkeys(joint.backward_outputs, Role.GRADIENT)
    second = _Player(lowering.backward_half, lowering.backward, merges, lowering.held, boundary, given)
    second.play(plan.backward_names, roles)
    steps = boundary + len(second.names)
    blocks = dict.fromkeys([*first.blocks, *passed, *second.blocks])
    lives = tuple(life for block in blocks for life in block.lives(steps - 1))
    own = [*first.scratch(scratch), *second.scratch(scratch)]
    alive = alive_at_each(lives, steps)
    for life in own:
        alive[life.born] += life.bytes
    return Timeline(
        tuple(alive),
        (*first.names, *second.names),
        boundary,
        sum(block.bytes for block in saved),
        sum(block.bytes for block in held),
        sum(block.bytes for block in passed),
        (*lives, *own),
    )


class _Player:
    """One half, run by the wrapper from a step on.

    merges: kernels between two operators outside are one function. held: no memory is kept for a later buffer. given:
    memory of inputs; those not in it cost nothing.
    """

    def __init__(
        self,
        half: Half,
        kernels: Sequence[Kernel],
        merges: bool,
        held: bool,
        start: int,
        given: Mapping[fx.Node, _Block],
    ) -> None:
        self.half, self.merges, self.held, self.start, self.given = half, merges, held, start, given
        self.renamed = renames(half)
        returned = {self.renamed.get(number, number) for numbers in half.results.values() for number in numbers}
        graph = Graph(half, tasks_of(half, kernels), returned)
        self.order = graph.best()
        self.levels = graph.levels(self.order)
        self.peak = max(self.levels, default=0)
        self.place = {number: place for place, task in enumerate(self.order) for number in task.writes}
        self.returned = {self._root(number) for number in returned}
        self.readers: dict[int, list[Buffer]] = defaultdict(list)
        for buffer in half.buffers:
            for source in dict.fromkeys([*(load.buffer for load in buffer.loads), *buffer.after]):
                self.readers[self.renamed.get(source, source)].append(buffer)
        self.dying: list[list[int]] = [[] for _ in self.order]
        last = {self._root(n): at for at, task in enumerate(self.order) for n in (*task.reads, *task.writes)}
        for number in sorted(last, key=str):
            if number not in self.returned:
                self.dying[last[number]].append(number)
        self.block: dict[int, _Block] = {}
        self.blocks: list[_Block] = []
        self.names: list[str] = []
        self._calls_outside: list[tuple[int, fx.Node]] = []
        self.pool: dict[tuple[int, int], list[tuple[int, _Block]]] = defaultdict(list)

    def _root(self, number: int) -> int:
        inside = self.half.buffers[number].inside
        return number if inside is None else self._root(inside)

    def blocks_of(self, nodes: Iterable[fx.Node]) -> list[_Block]:
        """The memory of results, where they have any."""
        roots = [self._root(number) for node in nodes for number in self.half.results.get(node, ())]
        return [self.block[root] for root in roots if root in self.block]

    @property
    def step(self) -> int:
        """The step that runs now."""
        return self.start + len(self.names)

    # --- running ------------------------------------------------------------------------------------------------

    def play(self, names: Sequence[str], roles: Mapping[fx.Node, Role]) -> None:
        """Run every kernel; `names` are those of the half's nodes, in order."""
        self._names = names
        self._roles: dict[int, Role] = {}
        for node, role in roles.items():
            self._roles |= dict.fromkeys(map(self._root, self.half.results.get(node, ())), role)
        for buffer in self.half.buffers:
            if buffer.node is not None and buffer.node in self.given:
                self.block[buffer.index] = self.given[buffer.node]
        for tasks in self._calls():
            for task in tasks:
                for number in task.writes:
                    self._make(self.half.buffers[number], task)
            for task in tasks:
                for number in self.dying[self.place[task.writes[0]]]:
                    self._free(number, self.place[tasks[-1].writes[0]])
            last = max((self.half.buffers[number] for task in tasks for number in task.writes), key=lambda b: b.step)
            self.names.append(self._name(last))
            self._calls_outside += [(self.step - 1, self._node(task)) for task in tasks if task.extern]

    def scratch(self, bytes_of: Mapping[fx.Node, int]) -> Iterable[Life]:
        """What the operators outside that have run took for themselves."""
        for step, node in self._calls_outside:
            if node in bytes_of:
                yield Life(node.name, Role.SCRATCH, bytes_of[node], step, step)

    def _calls(self) -> Iterable[list[Task]]:
        """What the wrapper calls: C++ kernels that follow each other are one function."""
        together: list[Task] = []
        for task in self.order:
            if together and (task.extern or not self.merges):
                yield together
                together = []
            together.append(task)
            if task.extern:
                yield together
                together = []
        if together:
            yield together

    def _make(self, buffer: Buffer, task: Task) -> None:
        """Find memory for what a kernel writes."""
        root = self._root(buffer.index)
        if root in self.block:
            return
        over = None if task.extern or task.nop or root != buffer.index else self._overwritten(buffer, task)
        if over is not None:
            self._take_over(self.block.pop(over), root)
            return
        inner = all(reader.index in task.writes for reader in self.readers[root])
        if inner and root == buffer.index and root not in self.returned and not task.extern:
            return  # never written
        self._allocate(self.half.buffers[root], task)

    def _owner(self, root: int) -> tuple[int, str, Role]:
        buffer = self.half.buffers[root]
        return self.step, self._name(buffer), self._roles.get(root, Role.TEMPORARY)

    def _name(self, buffer: Buffer) -> str:
        if buffer.step >= 0:
            return self._names[max(buffer.steps, default=buffer.step)]
        copied = self.half.buffers[buffer.loads[0].buffer].node  # an input in another order
        return copied.name if copied is not None else ""

    def _take_over(self, block: _Block, root: int) -> None:
        block.owners.append(self._owner(root))
        block.last = None
        self.block[root] = block

    def _allocate(self, buffer: Buffer, task: Task) -> None:
        """New memory, or what was freed: right before, or where keeping it does not raise the estimated peak."""
        at = self.place[task.writes[0]]
        free = self.pool[buffer.itemsize, buffer.size_bytes]
        if free and self._from_pool(task):
            since, block = free[-1]
            between = self.levels[since + 1 : at]
            if since + 1 == at or buffer.size_bytes + max(between, default=0) <= self.peak:
                free.pop()
                self.levels[since + 1 : at] = [level + buffer.size_bytes for level in between]
                self._take_over(block, buffer.index)
                return
        self.block[buffer.index] = _Block(buffer.size_bytes, [self._owner(buffer.index)])
        self.blocks.append(self.block[buffer.index])

    def _from_pool(self, task: Task) -> bool:
        if self.held:
            return False
        return not task.extern or getattr(self._node(task).target, "overloadpacket", None) in _INTO_GIVEN

    def _node(self, task: Task) -> fx.Node:
        return self.half.order[task.steps[0]]

    def _free(self, number: int, at: int) -> None:
        block = self.block.get(number)
        if block is None or block.held:
            return
        block.last = self.step
        buffer = self.half.buffers[number]
        if buffer.node is None:
            self.pool[buffer.itemsize, buffer.size_bytes].append((at, block))

    # --- writing over an input ----------------------------------------------------------------------------------

    def _overwritten(self, buffer: Buffer, task: Task) -> int | None:
        """The input whose memory takes the result: read by nobody afterwards, element by element as it is written."""
        before = self._before(buffer, task)
        for load in buffer.loads:
            source = self.half.buffers[load.buffer]
            block = self.block.get(load.buffer)
            inner = block is None and load.buffer in before and self._fits_over(source, buffer)
            if inner and self._only_read_as_written(load.buffer, buffer, task, before):
                return None  # over a value that only this kernel sees, which takes memory by that
            if block is None or not block.donated or source.inside is not None or load.buffer in self.returned:
                continue
            if source.node is None and source.loops is None and not source.extern:
                continue
            if self._fits_over(source, buffer) and self._only_read_as_written(load.buffer, buffer, task, before):
                return load.buffer
        return None

    def _fits_over(self, source: Buffer, buffer: Buffer) -> bool:
        """Whether one is as large as the other, or nearly."""
        return source.itemsize == buffer.itemsize and (
            NEARLY * source.size_bytes <= buffer.size_bytes <= source.size_bytes
        )

    def _before(self, buffer: Buffer, task: Task) -> set[int]:
        """What the same kernel computes for this buffer."""
        found: set[int] = set()
        pending = [buffer]
        while pending:
            for load in pending.pop().loads:
                if load.buffer in task.writes and load.buffer not in found:
                    found.add(load.buffer)
                    pending.append(self.half.buffers[load.buffer])
        return found

    def _only_read_as_written(self, number: int, buffer: Buffer, task: Task, before: set[int]) -> bool:
        at, places = self.place[task.writes[0]], set()
        for reader in self.readers[number]:
            its = self.place[reader.index]
            if its > at or (its == at and reader is not buffer and reader.index not in before):
                return False
            if its == at:
                reads = [load for load in reader.loads if load.buffer == number]
                places |= {(normal(load.layout), load.offset, load.indirect) for load in reads}
        return places == {(normal(contiguous(buffer.shape)), 0, False)}
