"""What running an operator again, somewhere in a sequence, takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from remat.schedule import Schedule


# Operators that need each other one after another beyond this are not run again as one: two calls each on Python's
# stack, of which a compilation has some hundreds already. Longer stretches come from the chain schedules.
DEEPEST: Final = 150


class Needed:
    """What running an operator again at a position takes: operators, longer lives, and what those cost."""

    def __init__(self, schedule: Schedule, at: int, budget: int, rate: float, limit: float) -> None:
        self.schedule, self.at, self.budget, self.rate, self.limit = schedule, at, budget, rate, limit
        self.operators: list[int] = []
        self.chosen: set[int] = set()
        self.prolonged: list[int] = []
        self.penalty = 0
        self.cost = 0
        self.possible = True
        self.depth = 0

    def run(self, operator: int) -> None:
        """Add an operator and, before it, whatever it reads that is not there."""
        self.chosen.add(operator)
        schedule, problem = self.schedule, self.schedule.problem
        self.cost += problem.cost[operator]
        if self.cost > self.limit or self.depth > DEEPEST:
            self.possible = False
            return
        for value in problem.reads[operator]:
            maker = problem.producer[value]
            if maker in self.chosen:
                continue
            event = schedule.newest(value, self.at)
            if event is None:
                self.possible = False
                return
            last = schedule.last(event, value)
            if last >= self.at or value in self.prolonged:
                continue
            self._provide(value, event, last)
            if not self.possible:
                return
        self.operators.append(operator)

    def _provide(self, value: int, event: int, last: int) -> None:
        schedule, problem = self.schedule, self.schedule.problem
        size, maker = problem.size[value], problem.producer[value]
        crossing = schedule.boundary_event
        barred = (
            value in problem.unsavable
            and crossing >= 0
            and schedule.position[event] < schedule.position[crossing] < self.at
        )
        above = schedule.alive[last + 1 : self.at] + (size - self.budget)
        penalty = 0
        if len(above) and int(above.max()) > 0:
            penalty = int(np.minimum(np.maximum(above, 0), size).sum())
        once = maker in problem.once
        if barred and once:
            self.possible = False
        elif not barred and (once or (not penalty or penalty * self.rate <= problem.cost[maker])):
            self.prolonged.append(value)
            self.penalty += penalty
        else:
            self.depth += 1
            self.run(maker)
            self.depth -= 1

    def excess_while_running(self, across: int) -> int:
        """Excess above the budget that the new steps themselves have."""
        problem = self.schedule.problem
        position = {operator: step for step, operator in enumerate(self.operators)}
        ends: list[int] = [0] * len(self.operators)
        for step, operator in enumerate(self.operators):
            for value in problem.reads[operator]:
                maker = problem.producer[value]
                if maker in position:
                    ends[position[maker]] = step
        across += sum(problem.size[value] for value in self.prolonged)
        excess, alive = 0, across
        dying: dict[int, list[int]] = {}
        for step, operator in enumerate(self.operators):
            written = sum(problem.size[value] for value in problem.writes[operator])
            alive += written
            excess += max(0, alive + problem.scratch[operator] - self.budget)
            dying.setdefault(max(ends[step], step), []).append(written)
            alive -= sum(dying.pop(step, ()))
        return excess
