"""remat: a torch.compile backend that decides what to save for the backward and what to recompute.

    torch.compile(model, backend="remat", options={"budget": 0.5})

No import is needed where the package is installed; `import remat` also makes the backend known from a checkout.
"""

from remat.backend import remat
from remat.elsewhere import dry_run
from remat.errors import (
    BudgetUnreachable,
    CheckFailed,
    DryRunFailed,
    InvalidPlan,
    RematError,
    RematWarning,
    SettingError,
    UnsatisfiableCut,
    UnsupportedGraph,
)
from remat.partitioner import Partitioner
from remat.registry import register_op
from remat.report import PlanSummary, SavedValue
from remat.session import summaries
from remat.settings import Settings
from remat.torch_internals import register_backend

__version__ = "0.1.0"
__all__ = [
    "BudgetUnreachable",
    "CheckFailed",
    "DryRunFailed",
    "InvalidPlan",
    "Partitioner",
    "PlanSummary",
    "RematError",
    "RematWarning",
    "SavedValue",
    "SettingError",
    "Settings",
    "UnsatisfiableCut",
    "UnsupportedGraph",
    "dry_run",
    "register_op",
    "remat",
    "summaries",
]

register_backend(remat, "remat")
