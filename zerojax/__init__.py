"""ZeRO for JAX: the memory of training partitioned over devices, for any loss, any optax optimizer, any Flax loop."""

from zerojax.accounting import report
from zerojax.config import Precision, ZeroConfig
from zerojax.contracts import Loss, TrainState, Variables
from zerojax.plan import Plan, make_plan
from zerojax.state import gather_params, init_state
from zerojax.step import make_eval_step, make_train_step, value_and_grad

__all__ = [
    "Loss",
    "Plan",
    "Precision",
    "TrainState",
    "Variables",
    "ZeroConfig",
    "gather_params",
    "init_state",
    "make_eval_step",
    "make_plan",
    "make_train_step",
    "report",
    "value_and_grad",
]
