"""Rules: optax transformations with live numbers, and the few that optax lacks.

Any rule here works in plain optax code, and any optax rule works in tsunax. The folder uses optax
and trees; it must not import `TrainState`.
"""

from tsunax._core import lazy as _lazy

# The stub `__init__.pyi` lists the names. Each is loaded when it is first used.
__all__, __getattr__, __dir__ = _lazy(globals())  # pyright: ignore[reportUnsupportedDunderAll]
