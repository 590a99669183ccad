"""ZeRO for JAX: the memory of training partitioned over devices, for any loss, any optax optimizer, any Flax loop."""

import importlib
from typing import TYPE_CHECKING

__all__ = [
    "Loss",
    "LossScale",
    "Plan",
    "Precision",
    "TrainState",
    "Variables",
    "ZeroConfig",
    "check_loss",
    "check_optimizer",
    "explain",
    "gather_params",
    "init_state",
    "make_eval_step",
    "make_plan",
    "make_train_step",
    "report",
    "value_and_grad",
]

if TYPE_CHECKING:
    from zerojax.config import LossScale, Precision, ZeroConfig
    from zerojax.contracts import Loss, TrainState, Variables
    from zerojax.cost.report import report
    from zerojax.equality import check_loss, check_optimizer
    from zerojax.evaluation import make_eval_step
    from zerojax.plan import Plan, make_plan
    from zerojax.state import gather_params, init_state
    from zerojax.step import make_train_step, value_and_grad
    from zerojax.units.explanation import explain

    __version__: str
else:  # on first use: JAX takes a second to import, for which the command's help need not wait
    _NAMES = {
        "config": ["LossScale", "Precision", "ZeroConfig"],
        "contracts": ["Loss", "TrainState", "Variables"],
        "equality": ["check_loss", "check_optimizer"],
        "plan": ["Plan", "make_plan"],
        "state": ["gather_params", "init_state"],
        "evaluation": ["make_eval_step"],
        "step": ["make_train_step", "value_and_grad"],
        "units.explanation": ["explain"],
        "cost.report": ["report"],
        "accounting": [],
        "targets": [],
    }

    def __getattr__(name):
        if name == "__version__":
            return _version()
        for module, names in _NAMES.items():
            if name == module:  # zerojax.accounting and the like need no import of their own
                return importlib.import_module(f"zerojax.{module}")
            if name in names:
                return getattr(importlib.import_module(f"zerojax.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *__all__, "__version__"})

    def _version():
        from importlib import metadata  # slow to import too

        try:
            return metadata.version("zerojax")
        except metadata.PackageNotFoundError:
            return "0+unknown"  # sources that are not installed
