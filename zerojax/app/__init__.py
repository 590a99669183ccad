"""The ``zerojax`` command: its demo, its tables, the comparison of the stages and the page about it.

Shows what the other rooms compute, and computes nothing that a program could not ask of them.
May import all other rooms; none imports this one.
"""
