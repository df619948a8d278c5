"""Which kernels Inductor would make of a plan, predicted from the joint graph: what each reads, writes and takes.

The buffers of both halves (`buffers`) are fused as Inductor's scheduler does (`Scheduler.fuse_nodes`,
`CppScheduling.can_fuse`, `SIMDScheduling.can_fuse`): in rounds, pairs that share most memory first, where loops agree
and no cycle arises. What only its own kernel reads is never written. tests/test_fusion.py holds the agreement with the
generated code in traffic and number of kernels.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from torch import fx

from remat import torch_internals
from remat.buffers import CPU_LIMITS, GPU_LIMITS, Buffer, Half, Layout, Limits, Views, contiguous, normal
from remat.channels_last import cloned_inputs
from remat.joint import JointGraph
from remat.plan import Plan

# torch._inductor.config: most buffers of one kernel; rounds of fusing; bytes below which shared memory counts as none.
MAX_FUSED: Final = 64
ROUNDS: Final = 10
SHARED_BYTES: Final = 10
# Pairs tried among the users of one buffer (max_fusion_buffer_group_pairwise_attempts).
NEIGHBOURS: Final = 64


@dataclass(frozen=True)
class Kernel:
    """One kernel: the places in the order that it computes, the bytes that it reads and writes.

    extern: an operator outside of the generated code, at `steps[0]`. buffers: what it computes, by number in its half,
    in the order of the code.
    """

    steps: tuple[int, ...]
    read_bytes: int
    written_bytes: int
    extern: bool
    buffers: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Lowering:
    """A plan as Inductor would run it, predicted: kernels and buffers of the forward and of the backward.

    held: to the plan's schedule.
    """

    forward_half: Half
    backward_half: Half
    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    held: bool = False

    @property
    def forward_order(self) -> Sequence[fx.Node]:
        """The forward's nodes, which its kernels' steps count."""
        return self.forward_half.order

    @property
    def backward_order(self) -> Sequence[fx.Node]:
        """The backward's nodes."""
        return self.backward_half.order

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """All of them, forward first."""
        return self.forward + self.backward

    @cached_property
    def traffic_bytes(self) -> int:
        """Bytes read and written."""
        return sum(kernel.read_bytes + kernel.written_bytes for kernel in self.kernels)

    @property
    def kernel_count(self) -> int:
        """Generated kernels."""
        return sum(not kernel.extern for kernel in self.kernels)


def predict(plan: Plan, held: bool = False) -> Lowering:
    """The kernels of a plan under Inductor, on the device of its joint graph.

    held: Inductor is held to the plan's schedule (`torch_internals_schedule`).
    """
    joint = plan.joint
    limits = CPU_LIMITS if joint.device.type in ("cpu", "meta") else GPU_LIMITS
    forward = tuple(node for node in plan.forward if node.op == "call_function")
    views = _views_of(joint)
    copies = cloned_inputs(forward, joint.device)
    first = Half(forward, [*joint.forward_outputs, *plan.saved], limits, views, copies)
    second = Half(plan.backward, joint.backward_outputs, limits, views, keeps_products=held)
    late = joint.tangent_closure if held else None
    return Lowering(first, second, kernels_of(first), kernels_of(second, late), held)


@functools.lru_cache(maxsize=4)
def _views_of(joint: JointGraph) -> Views:
    return {}


def kernels_of(half: Half, of_tangents: Set[fx.Node] | None = None) -> tuple[Kernel, ...]:
    """The kernels of one half, in the order of their first steps.

    of_tangents: of a backward whose recomputation stays where it is, what is no recomputation.
    """
    fuser = _Fuser(half, of_tangents)
    fuser.fuse()
    return tuple(fuser.kernels())


class _Group:
    """Buffers in one kernel."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self.buffers = list(buffers)
        self.loops = buffers[0].loops or ((), ())
        self.outer: tuple[int, ...] | None = None  # the shared loop over rows, once there is one
        self.reads: dict[tuple[int, Layout, int], int] = {}
        self.indirect: set[int] = set()
        self.writes: dict[tuple[int, Layout, int], int] = {}
        for buffer in buffers:
            self._add(buffer)

    def _add(self, buffer: Buffer) -> None:
        for load in buffer.loads:
            self.reads[load.buffer, normal(load.layout), load.offset] = load.count
            if load.indirect:
                self.indirect.add(load.buffer)
        self.writes[buffer.index, normal(contiguous(buffer.shape)), 0] = math.prod(buffer.shape)

    @property
    def reduces(self) -> bool:
        return any(buffer.loops is not None and buffer.loops[1] for buffer in self.buffers)

    def take(self, other: _Group) -> None:
        for buffer in other.buffers:
            self._add(buffer)
        self.buffers += other.buffers
        if math.prod(other.loops[0] + other.loops[1]) > math.prod(self.loops[0] + self.loops[1]) or other.loops[1]:
            self.loops = other.loops if not self.loops[1] else self.loops


class _Fuser:
    def __init__(self, half: Half, of_tangents: Set[fx.Node] | None) -> None:
        self.half = half
        self.of_tangents = of_tangents
        self.outside = [buffer.index for buffer in half.buffers if buffer.extern]
        self.limits: Limits = half.limits
        self.size = {buffer.index: buffer for buffer in half.buffers}
        # One place for each buffer: generated ones start as groups, an operator's results are one.
        self.group_of: dict[int, int] = {}
        self.groups: dict[int, _Group] = {}
        self.needs: dict[int, int] = {}  # ancestors of each place, as bits
        places: dict[tuple[bool, int], int] = {}
        for buffer in half.buffers:
            place = places.setdefault((True, buffer.step), buffer.index) if buffer.extern else buffer.index
            self.group_of[buffer.index] = place
            if buffer.loops is not None:
                self.groups[place] = _Group([buffer])
        for buffer in half.buffers:
            place = self.group_of[buffer.index]
            before = self.needs.get(place, 0)
            for source in {load.buffer for load in buffer.loads} | buffer.after:
                root = self.group_of[source]
                if root != place:
                    before |= self.needs.get(root, 0) | (1 << root)
            self.needs[place] = before
        # The same before anything was fused: what Inductor knows of a pair when it lists it.
        self.ancestors = dict(self.needs)
        self.members = {place: 1 << place for place in self.needs}

    # --- fusing -----------------------------------------------------------------------------------------------

    def fuse(self) -> None:
        """Fuse in rounds until nothing fuses.

        A round tries the pairs of the best kind alone, and the rounds end when one fuses nothing: a plain pair that a
        cycle forbids keeps all loops over rows from being shared, as in Inductor (T5: 88 kernels instead of 64).
        """
        for _ in range(ROUNDS):
            fused = False
            for first, second in self._pairs():
                one, two = self.group_of[first], self.group_of[second]
                if one != two and self._may_fuse(one, two) and not self._makes_cycle(one, two):
                    self._join(one, two)
                    fused = True
            if not fused:
                return

    def _pairs(self) -> list[tuple[int, int]]:
        """Pairs of groups that share memory and may fuse, the best kind of them, the most promising first."""
        users: dict[int, list[int]] = defaultdict(list)
        for place, group in self.groups.items():
            for buffer in dict.fromkeys([index for index, *_ in group.reads] + [index for index, *_ in group.writes]):
                users[buffer].append(place)
        pairs: dict[tuple[int, int], tuple[int, int, int, int]] = {}
        for sharing in users.values():
            for position, one in enumerate(sharing):
                for two in sharing[position + 1 : position + 1 + NEIGHBOURS]:
                    pair = (min(one, two), max(one, two))
                    if pair not in pairs and self._may_fuse(*pair):
                        first, second = self.groups[pair[0]], self.groups[pair[1]]
                        late = self._only_outer(first, second)
                        unlike = first.reduces != second.reduces
                        pairs[pair] = (late, unlike, -self._shared(first, second), pair[1] - pair[0])
        best = min((late for late, *_ in pairs.values()), default=0)
        return sorted((pair for pair in pairs if pairs[pair][0] == best), key=lambda pair: pairs[pair])

    def _shared(self, one: _Group, two: _Group) -> int:
        """Bytes that both touch in the same way."""
        touched = one.reads | one.writes
        return sum(
            min(count * self.size[key[0]].itemsize, self.size[key[0]].size_bytes)
            for key, count in (two.reads | two.writes).items()
            if key in touched
        )

    def _may_fuse(self, one: int, two: int) -> bool:
        first, second = self.groups[one], self.groups[two]
        if len(first.buffers) + len(second.buffers) > MAX_FUSED:
            return False
        if self.ancestors[one] & self.members[two]:
            one, two, first, second = two, one, second, first
        if self.ancestors[two] & self.members[one]:
            if self.ancestors[one] & self.members[two] or self._something_between(one, two):
                return False
            if not self._lined_up(first, second) or not self._fits_vertically(first, second):
                return False
        elif self._shared(first, second) < SHARED_BYTES or not self._fits(first, second):
            return False
        else:
            return not self._runs_earlier(first, second)
        return True

    def _runs_earlier(self, one: _Group, two: _Group) -> bool:
        """Whether a recomputation would join what runs before it, with an operator outside in between."""
        if self.of_tangents is None:
            return False
        first, second = sorted((one, two), key=lambda group: min(buffer.index for buffer in group.buffers))
        end, start = max(b.index for b in first.buffers), min(b.index for b in second.buffers)
        if bisect.bisect(self.outside, start) <= bisect.bisect(self.outside, end):
            return False
        return any(self._is_recomputed(buffer) for buffer in second.buffers)

    def _is_recomputed(self, buffer: Buffer) -> bool:
        assert self.of_tangents is not None
        return all(self.half.order[step] not in self.of_tangents for step in buffer.steps)

    def _something_between(self, one: int, two: int) -> bool:
        """Whether what the second reads besides the first needs the first."""
        group = self.groups[two]
        sources = {index for index, *_ in group.reads} | {index for b in group.buffers for index in b.after}
        places = {self.group_of[index] for index in sources} - {one, two}
        return any(self.ancestors[place] & self.members[one] for place in places)

    def _lined_up(self, first: _Group, second: _Group) -> bool:
        """Whether the second reads what the first writes in the order of the writing."""
        written = {index: (layout, offset) for index, layout, offset in first.writes}
        return all((at, offset) == written[index] for index, at, offset in second.reads if index in written)

    def _fits(self, first: _Group, second: _Group) -> bool:
        """Whether two can run in one loop nest."""
        if self.limits.outer_loops and (first.outer is not None or second.outer is not None):
            return False
        (outside, inside), (others, reduced) = first.loops, second.loops
        if (outside, inside) == (others, reduced):
            return True
        if not self.limits.outer_loops:
            rows, columns = math.prod(outside), math.prod(inside)
            more, depth = math.prod(others), math.prod(reduced)
            if (rows, columns) == (more, depth) or (rows == more and 1 in (columns, depth)):
                return True
            return (not inside and rows == more * depth) or (not reduced and more == rows * columns)
        if not inside and outside == others + reduced:
            return True
        if not reduced and others == outside + inside:
            return True
        plain = not inside and not reduced and math.prod(outside) == math.prod(others)
        return plain and 1 in (len(outside), len(others)) and self._same_shape(first, second)

    def _same_shape(self, first: _Group, second: _Group) -> bool:
        """The compatible ranges of `CppScheduling._can_fuse_nodes_with_compatible_ranges`."""
        narrow = first if len(first.loops[0]) < len(second.loops[0]) else second
        if len(narrow.buffers) > 1 or self._draws(narrow.buffers[0]):
            return False
        return len({b.shape for b in (*first.buffers, *second.buffers)}) == 1

    def _draws(self, buffer: Buffer) -> bool:
        """Whether it holds random numbers, which count elements in one axis, and so keep to it."""
        return any(self.half.order[step].target is torch_internals.RANDOM for step in buffer.steps)

    def _fits_vertically(self, first: _Group, second: _Group) -> bool:
        if not self.limits.outer_loops:
            return self._fits(first, second)
        return (self._fits(first, second) and not first.reduces) or self._shares_rows(first, second)

    def _shares_rows(self, first: _Group, second: _Group) -> bool:
        """C++ only: what follows a reduction over rows runs in the same loop over rows."""
        rows, others = self._last_loops(first), self._first_loops(second)
        if (not rows and not others) or (first.outer and second.outer):
            return bool(first.outer) and first.outer == second.outer
        depth = min(len(rows), len(others))
        if depth < 1 or rows[:depth] != others[:depth]:
            return False
        already = first.outer or second.outer
        return already is None or len(already) == depth

    def _last_loops(self, group: _Group) -> tuple[int, ...]:
        last = group.buffers[-1].loops if group.outer else group.loops
        return last[0] if last else ()

    def _first_loops(self, group: _Group) -> tuple[int, ...]:
        first = group.buffers[0].loops if group.outer else group.loops
        return first[0] if first else ()

    def _only_outer(self, first: _Group, second: _Group) -> bool:
        return self.limits.outer_loops and not (self._fits(first, second) and not first.reduces)

    def _makes_cycle(self, one: int, two: int) -> bool:
        """Whether a third place lies on a way from one to the other."""
        if self.needs[one] >> two & 1:
            one, two = two, one
        between = self.needs[two] & ~(1 << one)
        while between:
            lowest = between & -between
            place = lowest.bit_length() - 1
            if self.needs.get(place, 0) >> one & 1:
                return True
            between ^= lowest
        return False

    def _join(self, one: int, two: int) -> None:
        """Fuse the second place into the first."""
        if self.needs[one] >> two & 1:
            first, second = self.groups[two], self.groups[one]
        else:
            first, second = self.groups[one], self.groups[two]
        rows = None
        if self._only_outer(first, second) and self.needs[one] | self.needs[two]:
            rows = self._last_loops(first)[: min(len(self._last_loops(first)), len(self._first_loops(second)))]
        first.take(second)
        first.outer = first.outer or second.outer or rows
        self.ancestors[one] = self.ancestors[one] | self.ancestors.pop(two)
        self.members[one] |= self.members.pop(two)
        self.groups.pop(two)
        self.groups[one] = first
        for buffer in first.buffers:
            self.group_of[buffer.index] = one
        together = (1 << one) | (1 << two)
        before = (self.needs[one] | self.needs.pop(two)) & ~together
        self.needs[one] = before
        for place, needs in self.needs.items():
            if needs & together:
                self.needs[place] = (needs & ~(1 << two)) | before | (1 << one)

    # --- what came of it ------------------------------------------------------------------------------------------

    def kernels(self) -> Iterator[Kernel]:
        """Every kernel with its traffic."""
        readers: dict[int, set[int]] = defaultdict(set)
        for buffer in self.half.buffers:
            for source in {load.buffer for load in buffer.loads} | buffer.after:
                readers[source].add(self.group_of[buffer.index])
        found = [(min(b.step for b in group.buffers), self._generated(place, group, readers))
                 for place, group in self.groups.items()]
        outside: dict[int, list[Buffer]] = defaultdict(list)
        for buffer in self.half.buffers:
            if buffer.extern:
                outside[buffer.step].append(buffer)
        for step, results in outside.items():
            read = sum(self.size[index].size_bytes for index in results[0].after)
            numbers = tuple(buffer.index for buffer in results)
            steps = tuple(results[0].steps)
            found.append((step, Kernel(steps, read, sum(b.size_bytes for b in results), True, numbers)))
        for _, kernel in sorted(found, key=lambda pair: pair[0]):
            yield kernel

    def _generated(self, place: int, group: _Group, readers: dict[int, set[int]]) -> Kernel:
        own = {buffer.index for buffer in group.buffers}
        counts: dict[int, int] = defaultdict(int)
        for (index, *_), count in group.reads.items():
            if index not in own:
                buffer = self.size[index]
                whole = index in group.indirect and len(group.buffers) > 1
                counts[index] += buffer.size_bytes if whole else count * buffer.itemsize
        read = sum(min(count, self.size[index].size_bytes) for index, count in counts.items())
        written = sum(b.written_bytes for b in group.buffers if b.kept or readers[b.index] - {place})
        steps = frozenset().union(*(buffer.steps for buffer in group.buffers))
        return Kernel(tuple(sorted(steps)), read, written, False, tuple(b.index for b in group.buffers))
