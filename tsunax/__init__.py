"""tsunax: training for JAX as pure functions over one value, the training state.

    import tsunax as ts

    state = ts.setup(ts.rules.adam(1e-3), params)
    step = ts.train_step(loss_fn)
    for batch in data:
        state, info = step(state, batch)

Read `state.py` (what is carried), `step.py` (how it changes), `loop.py` (who calls it), in this
order.
"""

import importlib as _importlib
import re as _re
from pathlib import Path as _Path
from typing import Any as _Any

__version__ = "0.1.0.dev0"

# The names stand once, in the stub beside this file; each is loaded when it is first used.
_STUB = _Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_MODULE_OF = {
    name: module for module, name in _re.findall(r"^from (\S+) import (\w+) as", _STUB, _re.M)
}
__all__ = sorted(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> _Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'tsunax' has no attribute {name!r}")
    module = _MODULE_OF[name]
    if module == "tsunax":
        return _importlib.import_module(f"tsunax.{name}")
    value = getattr(_importlib.import_module(module), name, None)
    if value is None:  # a module of a folder
        value = _importlib.import_module(f"{module}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
