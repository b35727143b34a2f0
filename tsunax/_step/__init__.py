"""What a training step is made of, besides the files that `step.py` names: how a loss function is
called, populations, and what is said when a call fails.

It knows states and losses. It must not know loops, data or files.
"""
