"""Parts of a training step: the gradient, calls of a loss function, populations, error messages.

It uses states and losses. It must not import loops, data or files.
"""
