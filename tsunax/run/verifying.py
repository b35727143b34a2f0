"""A run that checks its own steps: some steps run twice, and have to give the same bits.

It finds faults that do not repeat: a bit that flips in memory or in a core, a race in a kernel.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

import jax
import jax.numpy as jnp
import numpy as np

from tsunax._core import PyTree, checks, trees
from tsunax.errors import StateError, warn
from tsunax.run.part import Part
from tsunax.run.run import Result, Run


@dataclass(frozen=True)
class verify(Part):
    """Run every n-th step twice, and compare all bits of the two states.

    It costs one step of `every` steps, with copies and a comparison of the state, and the memory of
    two further states then. The comparison comes before anything of that step is saved. On a mesh
    all processes compare their parts.

    `on_fault` is "raise" (the default): StateError that names the leaves; "redo": the step runs a
    third time, and the run continues with the state that two of the three runs have, with a
    warning, or raises if all differ; "warn": a warning and a mark in the history.

    It finds faults that do not repeat. A device that computes the same wrong number twice is not
    found, and neither is a step that is different by design in each call.

    >>> verify(every=500)
    verify(every=500, on_fault='raise')
    """

    every: int = 500  # type: ignore[assignment]
    _: KW_ONLY
    on_fault: str = "raise"

    def __post_init__(self) -> None:
        object.__setattr__(self, "every", checks.check_count(self.every, "verify()", "every"))
        checks.check_choice(self.on_fault, "verify()", "on_fault", ("raise", "redo", "warn"))

    def at(self, run: Run, events: list[str]) -> None:
        run.witnesses.append(self._compare)

    def _compare(self, run: Run, first: Result, repeat: Callable[[], Result]) -> Result:
        """The result with which the run continues. Raises StateError as `on_fault` says."""
        second = repeat()
        if not (names := different_leaves(first[0], second[0])):
            return first
        equal_results: list[Result] = []
        step = run.step + 1
        text, got = f"step {step}", f"other bits in {trees.listed(names, 4)} when it ran again"
        fix = "A fault that does not repeat: look at memory, card and kernels of this machine."
        if self.on_fault == "redo":
            third = repeat()
            equal_results = [x for x in (first, second) if not different_leaves(x[0], third[0])]
            if equal_results:
                got += "; two of three runs agree, and the run continues with their state"
        if self.on_fault == "raise" or (self.on_fault == "redo" and not equal_results):
            raise StateError(text, "verify()", got, "the same bits", fix)
        run.history.mark("verify", step, got)
        warn(f"verify(): {text} has {got}.")
        return (equal_results or [first])[0]


def different_leaves(first: PyTree, second: PyTree) -> list[str]:
    """The leaves of two states of one structure that differ in a bit."""
    leaves = zip(trees.leaves_at("state", first), jax.tree.leaves(second), strict=True)
    compared = [(name, _has_same_bits(x, y)) for (name, x), y in leaves]
    return [name for name, is_equal in compared if not bool(is_equal)]


@jax.jit
def _equal_bits(x: jax.Array, y: jax.Array) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.all(x == y)
    words = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}
    parts = [(x.real, y.real), (x.imag, y.imag)] if jnp.iscomplexobj(x) else [(x, y)]
    bits = lambda a: jax.lax.bitcast_convert_type(a, words[a.dtype.itemsize])
    return jnp.all(jnp.stack([jnp.all(bits(a) == bits(b)) for a, b in parts]))


def _has_same_bits(x: object, y: object) -> bool | jax.Array:
    if trees.is_key(x):
        x, y = jax.random.key_data(x), jax.random.key_data(y)  # type: ignore[arg-type]
    is_array = isinstance(x, jax.Array)
    return _equal_bits(x, y) if is_array else np.array_equal(x, y, equal_nan=True)  # type: ignore
