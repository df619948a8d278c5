"""What can go wrong, each kind with a name of its own, so that a user can catch exactly it."""


class RematError(Exception):
    """Base class of every error that remat raises."""


class SettingError(RematError, ValueError):
    """A flag or option has a value that is not allowed, or a name that does not exist."""


class UnsupportedGraph(RematError):
    """The joint graph holds something that remat does not partition; it falls back unless strict."""


class UnsatisfiableCut(RematError):
    """No finite cut: some value may be neither saved nor recomputed. The message tells it node by node."""


class InvalidPlan(RematError):
    """A plan or a partition breaks a rule that the verifier proves on every graph."""


class CheckFailed(RematError):
    """`check` found a tensor in which the partitioned step and the joint graph differ."""


class BudgetUnreachable(RematError):
    """No plan is as small as the budget asks (an error under `strict` only; else a warning)."""


class DryRunFailed(RematError):
    """A graph could not be lowered for a device that is not here; the message holds the other process's error."""


class RematWarning(UserWarning):
    """Category of every warning that remat issues."""
