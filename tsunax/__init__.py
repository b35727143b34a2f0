"""tsunax: training for JAX as pure functions over one value, the training state.

    import tsunax as ts

    state = ts.setup(ts.rules.adam(1e-3), params)
    step = ts.train_step(loss_fn)
    for batch in data:
        state, info = step(state, batch)

Read `state.py` (what is carried), `step.py` (how it changes), `loop.py` (who calls it), in this
order.
"""

from tsunax._core import lazy as _lazy

__version__ = "0.1.0"

# The stub `__init__.pyi` lists the names; each is loaded when it is first used.
__all__, __getattr__, __dir__ = _lazy(globals())  # pyright: ignore[reportUnsupportedDunderAll]
