"""Any loss, cut into gather units and differentiated unit by unit.

Knows losses as lists of equations, and parameters by where they lie; neither plans nor states.
May import of the core what stands before `zerojax.gradient`, which stands above this room; of other rooms nothing.
"""
