"""What a step needs, before it runs: predicted from shapes, or read from the compiled program.

Memory, bytes on the wire, products, time at least; for the devices that are here or for absent accelerators.
May import the core and `zerojax.units`; neither of them imports this room.
"""
