"""What `fit` and `evaluate` compare when several processes train one state.

Every process runs the same program over all devices, with its part of the arrays. XLA does not
check that they agree: other rows, another number of batches or another rate on one of them give
wrong numbers, or a wait for ever. So the processes compare what decides, over JAX's coordination
service: settings, functions and data at the start, the program of the first call before it runs,
batches of other loaders as they come, and what a callback changed. A state on devices of one
process is not compared.
"""

import dataclasses
import functools
import inspect
import json
import time
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from tsunax._core import Function, PyTree, processes, stable_text, trees
from tsunax._step.members import check_local_members
from tsunax.data.cursors import Source
from tsunax.data.positions import Data, innermost
from tsunax.errors import DataError, ProcessError, StateError, told, warn
from tsunax.states import COUNTED

SMALL = 1 << 16  # bytes of an array that is compared in full


class Alike:
    """Compares the processes of a run or an evaluation; does nothing for one process alone."""

    def __init__(self, where: str, state: PyTree, data: Iterable[PyTree] | None) -> None:
        self.where = where
        self.everyone: processes.Alone = processes.current()
        arrays = (x for x in jax.tree.leaves(state) if isinstance(x, jax.Array))
        spread = next((x for x in arrays if not x.is_fully_addressable), None)
        self.spans: bool = spread is not None
        self._speaks = spread is not None and self.everyone.spans_all(spread.sharding.device_set)
        data = innermost(data)
        self._data: Any = data if isinstance(data, Data) and data.gathers else None
        is_known = self._data is not None and self._data.is_of_arrays  # by its settings
        self._has_program = False  # whether it was compared
        self._compares = self._speaks and not is_known  # the batches, one after the other
        if self.spans:
            check_local_members(state, where)
        if self._data is not None and self.everyone.count > 1:
            self._check_part(*self._data.process)
        if self.spans and not self._speaks:
            text = "the state is on devices of some processes only, which are not compared"
            warn(f"{where}: {text}, and a signal or a limit ends one of them alone")

    def _check_part(self, part: int, parts: int) -> None:
        if parts > 1 and not self.spans:
            got = "on devices of this process alone, and of the data only its part"
            fix = "ts.shard(state, ts.mesh()); or batches(..., process=(0, 1)), to train by itself."
            raise StateError("state", self.where, got, "on a mesh of all processes", fix)
        index, count = self.everyone.index, self.everyone.count
        if self.spans and parts not in (1, count):
            expected = f"of {count}, or of one with rows of its own"
            raise DataError("data", self.where, f"batches(process=) of {parts} processes", expected)
        if parts > 1 and part != index:
            got, expected = f"the part of process {part} on process {index}", "its own"
            raise DataError("data", self.where, got, expected, "It is so without process=.")

    def start(self, **settings: Any) -> None:
        """Compare settings, and the data. Raises ProcessError on all processes if they differ."""
        if not self._speaks:
            return
        if (data := self._data) is not None:
            found = dict(data.settings)
            # a process with rows of its own has them in its own order
            is_local = all(x.is_fully_addressable for x in jax.tree.leaves(data.resident))
            if data.process[1] == 1 and is_local:
                found |= {"seed": None, "rows": None, "batches": len(data)}
                found["rows of the last"] = data.tail_rows
            else:
                found["some rows"] = data.sample()
            settings["data"] = found
        self._compare(self.where, settings)

    def batch(self, place: str, batch: PyTree, steps: int = 1, then: str = "") -> None:
        """Compare how the next batches of other data look (None at the end); `then`: an error."""
        if not self._compares:
            return
        found = "none, the data have ended"
        if shapes := ", ".join(trees.describe(x) for x in jax.tree.leaves(batch)):
            found = f"{then}{then and ', after '}{steps} of {shapes}"
        self._compare(f"{place} of {self.where}", {"batches": found})

    def chunk(self, step: int, chunk: Any, source: Source) -> Any:
        """The batches of a call that begins with a step, compared."""
        given: Any = (None,)
        if chunk is not None:
            given = getattr(chunk.feed, "batch", chunk.feed), chunk.steps, source.trouble
        self.batch(f"step {step}", *given)
        return chunk

    def program(self, trace: Function, *given: Any) -> None:
        """Compare what the first call computes, `trace(*given)`, before it runs.

        Whatever a loss function, a rule or a setting is made of, it is in the program, and nothing
        else is: a function may refer to the index of its process for other things.
        """
        if not self._speaks or self._has_program:
            return
        self._has_program = True
        what, constants = "program of loss_fn and what it refers to", []
        try:
            traced = trace(*given).jaxpr
            program, constants = _hash_of_program(traced.jaxpr), small(traced.consts)
        except Exception as error:  # if all processes have it, the call raises it again
            program = f"none: {told(error)}"
        things = {what: program, "constants": constants}
        self._compare(f"the first call of {self.where}", things)

    def _compare(self, where: str, things: Mapping[str, Any]) -> None:
        self.everyone.compare(where, lambda: things, processes.LAST)

    def agree(self, asked: int) -> int:
        """What any process of the run was asked for, on all at the same call; 0 before."""
        return self.everyone.agree(asked) if self.spans else asked

    def _everyone(self, place: str, value: Any) -> list[Any]:
        """A value of each process, in order; of one process alone its own."""
        if not self._speaks:
            return [value]
        text = json.dumps(value)
        texts = self.everyone.gather(f"{place} of {self.where}", text, processes.LAST)
        return [json.loads(text) for text in texts]

    def numbers(self, place: str, found: dict[str, float]) -> dict[str, float]:
        """Those of process 0. Raises ProcessError for other names."""
        first, *others = self._everyone(place, found)
        for i, other in enumerate(others, start=1):
            if other.keys() != first.keys():
                got = f"{', '.join(other)} on {self.everyone.name_of(i)}"
                raise ProcessError("numbers", place, got, f"{', '.join(first)}, as on process 0")
        return first

    def boundary(self, place: str, stopped: str, state: PyTree, has_changed: bool) -> str:
        """Why the run stops, on any process. ProcessError if callbacks changed the state unlike."""
        everyone = self._everyone(place, (stopped, has_changed))
        if self._speaks and any(changed for _, changed in everyone):
            from tsunax.hyper import hyperparams

            numbers = hyperparams(state) if isinstance(state, COUNTED) else {}
            things = {"hyperparams": numbers, "state": small(state)}
            self._compare(f"the callbacks of {place}", things)
        return next((text for text, _ in everyone if text), "")

    def slowest(self, seconds: Mapping[str, float]) -> str:
        """The process that the others waited for, and how long; "" if it is no twentieth of all."""
        own = sum(seconds[cause] for cause in ("data", "evaluation", "callbacks"))
        times = self._everyone("the times", own)
        more = max(times) - min(times)
        name = self.everyone.name_of(times.index(max(times)))
        return f"{name} by {more:.1f} s" if more > sum(seconds.values()) / 20 else ""

    def signal(self, asked: int) -> int:
        """The signal that any of them got."""
        found = next(filter(None, self._everyone("the end", asked)), 0)
        # or the signal that one has got would end the next run
        while self._speaks and found and not self.everyone.agree(found):
            time.sleep(1e-3)
        return found


@functools.lru_cache(maxsize=16)  # every evaluation asks for it, and to print one takes long
def _hash_of_program(jaxpr: Any) -> str:
    return stable_text.hash_of(stable_text.without_address(str(jaxpr)).encode())


def outline(f: Any) -> Any:
    """What is known of a function before it is called: its code; of one of ours its settings.

    Values that it closes over may differ, such as the index of a process or its part of the data.
    """
    f = inspect.unwrap(getattr(f, "func", f))  # of a functools.partial, and of what jit returns
    if code := getattr(f, "__code__", None):
        return f"{f.__qualname__} {stable_text.hash_of_code(code)}"
    settings: dict[str, Any] = {"function": getattr(f, "__qualname__", type(f).__qualname__)}
    if dataclasses.is_dataclass(f) and type(f).__module__.startswith("tsunax."):
        for name, x in ((field.name, getattr(f, field.name)) for field in dataclasses.fields(f)):
            settings[name] = outline(x) if callable(x) else x
    return settings


def small(state: PyTree) -> Any:
    """A tree in which large arrays are their shapes: what is compared in no time."""
    is_small = lambda x: not isinstance(x, jax.Array) or x.nbytes <= SMALL
    return jax.tree.map(lambda x: x if is_small(x) else trees.describe(x), state)
