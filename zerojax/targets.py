"""The public names of `zerojax.cost.targets`."""

from zerojax.cost.targets import Target, target

__all__ = ["Target", "target"]
