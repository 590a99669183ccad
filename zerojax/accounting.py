"""The public names of `zerojax.cost.report` and the formulas beside it."""

from zerojax.cost.formulas import at_rest_bytes, communication_volume, model_state_bytes
from zerojax.cost.hlo import Collective, collectives
from zerojax.cost.report import Bound, Memory, Report, live_bytes, memory, report

__all__ = [
    "Bound",
    "Collective",
    "Memory",
    "Report",
    "at_rest_bytes",
    "collectives",
    "communication_volume",
    "live_bytes",
    "memory",
    "model_state_bytes",
    "report",
]
