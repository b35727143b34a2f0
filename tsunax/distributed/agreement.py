"""Processes that train one state compare their runs of `fit` and of `evaluate`.

Every process runs the same program over all devices, with its part of the arrays. XLA does not
check that they agree: other rows, another number of batches or another rate on one process give
wrong numbers, or a wait for ever. So the processes compare these, over JAX's coordination service:
settings, functions and data at the start, the program of the first call before it runs, batches of
other loaders as they come, and changes by a callback. A state on devices of one process is not
compared.
"""

import dataclasses
import functools
import inspect
import json
import time
from collections.abc import Mapping, Set
from typing import Any

import jax

from tsunax._core import Function, PyTree, processes, stable_text, trees
from tsunax.data.positions import Data
from tsunax.errors import DataError, ProcessError, StateError, told, warn
from tsunax.state import TrainState
from tsunax.states import States, check_local_members

SMALL = 1 << 16  # bytes of an array that is compared in full


class Agreement(processes.Unanimous):
    """Compares the processes of a run or an evaluation."""

    def __init__(self, where: str, state: PyTree, data: Any) -> None:
        self.where = where
        self.everyone: processes.Alone = processes.current()
        arrays = (x for x in jax.tree.leaves(state) if isinstance(x, jax.Array))
        spread = next((x for x in arrays if not x.is_fully_addressable), None)
        self.spans: bool = spread is not None
        self._speaks = spread is not None and self.everyone.spans_all(spread.sharding.device_set)
        self._data: Any = data if isinstance(data, Data) and data.gathers else None
        has_settings = self._data is not None and self._data.is_of_arrays
        self._has_program = False  # whether it was compared
        self._compares = self._speaks and not has_settings  # each batch
        if self.spans:
            check_local_members(state, where)
        if self._data is not None and self.everyone.count > 1:
            self._check_part(*self._data.process)
        if self.spans and not self._speaks:
            warn(
                f"{where}: the state is on devices of some processes only, which are not compared, "
                "and a signal or a limit ends one of them alone"
            )

    def _check_part(self, part: int, parts: int) -> None:
        if parts > 1 and not self.spans:
            raise StateError(
                "state",
                self.where,
                got="on devices of this process alone, and of the data only its part",
                expected="on a mesh of all processes",
                fix="ts.shard(state, ts.mesh()); or batches(..., process=(0, 1)), to train alone.",
            )
        place = self.everyone.index, self.everyone.count
        if parts > 1 and (part, parts) != place:
            raise DataError(
                "data",
                self.where,
                got=f"batches(process={(part, parts)})",
                expected=f"process={place}, the part of its own",
                fix="It is so without process=.",
            )

    def start(
        self, functions: Mapping[str, Any], values: Mapping[str, Any], **settings: Any
    ) -> None:
        """Compare settings, and the data. Raises ProcessError on all processes if they differ."""
        if not self._speaks:
            return
        # the state of another library's loader may name the part of its process
        settings["place"] = {**settings.get("place", {}), "data": None}
        for name, f in functions.items():
            settings[name] = list(map(outline, f)) if isinstance(f, list) else outline(f)
        settings |= {name: without_large_arrays(tree) for name, tree in values.items()}
        if (data := self._data) is not None:
            data_settings = dict(data.settings)
            # if each process has other rows, their order differs, too
            is_local = all(x.is_fully_addressable for x in jax.tree.leaves(data.resident))
            if data.process[1] == 1 and is_local:
                data_settings |= {"seed": None, "rows": None, "batches": len(data)}
                data_settings["rows of the last"] = data.tail_rows
            else:
                data_settings["some rows"] = data.sample()
            settings["data"] = data_settings
        self._compare(self.where, settings)

    def batch(self, place: str, batch: PyTree, steps: int = 1, trouble: str = "") -> None:
        """Compare the next batches of other data, None at the end; `trouble` is an error."""
        if not self._compares:
            return
        description = "none, the data have ended"
        if shapes := ", ".join(trees.describe(x) for x in jax.tree.leaves(batch)):
            description = f"{trouble}{trouble and ', after '}{steps} of {shapes}"
        self._compare(f"{place} of {self.where}", {"batches": description})

    def chunk(self, step: int, chunk: Any, source: Any) -> None:
        """Compare the batches of a call that begins with a step."""
        if chunk is None:
            self.batch(f"step {step}", None)
        else:
            batch = getattr(chunk.feed, "batch", chunk.feed)
            self.batch(f"step {step}", batch, chunk.steps, source.trouble)

    def epoch_end(self, step: int, has_ended: bool) -> None:
        """Compare whether an epoch has ended after a step: its end is a boundary for all."""
        if self._compares:
            batches = "none, the data have ended" if has_ended else "another one"
            self._compare(f"the next batch after step {step} of {self.where}", {"batches": batches})

    def program(self, trace: Function, *arguments: Any) -> None:
        """Compare the program of the first call, `trace(*arguments)`, before it runs.

        The program has all that a loss function, a rule or a setting computes, and nothing else: a
        function may refer to the index of its process for other things.
        """
        if not self._speaks or self._has_program:
            return
        self._has_program = True
        constants = []
        try:
            traced = trace(*arguments).jaxpr
            program, constants = _hash_of_program(traced.jaxpr), without_large_arrays(traced.consts)
        except Exception as error:  # if all processes have it, the call raises it again
            program = f"none: {told(error)}"
        things = {"program of loss_fn and what it refers to": program, "constants": constants}
        self._compare(f"the first call of {self.where}", things)

    def _compare(self, where: str, things: Mapping[str, Any]) -> None:
        self.everyone.compare(where, lambda: things, processes.LAST)

    def agree(self, requests: Set[Any]) -> Set[Any]:
        """The requests of some process, tuples, at the same call on all; empty before."""
        return {*map(tuple, self.everyone.agree([*requests]) or ())} if self.spans else {*requests}

    def _everyone(self, place: str, value: Any) -> list[Any]:
        """A value of each process, in order."""
        if not self._speaks:
            return [value]
        title = f"{place} of {self.where}"
        texts = self.everyone.gather(title, json.dumps(value), processes.LAST)
        return [json.loads(text) for text in texts]

    def numbers(self, place: str, row: dict[str, float]) -> dict[str, float]:
        """The numbers of process 0. Raises ProcessError for other names."""
        first, *rows = self._everyone(place, row)
        for i, row in enumerate(rows, start=1):
            if row.keys() != first.keys():
                raise ProcessError(
                    "numbers",
                    place,
                    got=f"{', '.join(row)} on {self.everyone.name_of(i)}",
                    expected=f"{', '.join(first)}, as on process 0",
                )
        return first

    def boundary(
        self, place: str, request: tuple[str, Any], state: PyTree, has_changed: bool
    ) -> tuple[str, Any]:
        """`(why the run stops, its rewind)`, of the first process that has a request.

        Raises ProcessError if callbacks have changed the states in different ways.
        """
        everyone = self._everyone(place, (request, has_changed))
        if self._speaks and any(changed for _, changed in everyone):
            from tsunax.hyper import hyperparams

            numbers = hyperparams(state) if isinstance(state, TrainState | States) else {}
            things = {"hyperparams": numbers, "state": without_large_arrays(state)}
            self._compare(f"the callbacks of {place}", things)
        return next((request for request, _ in everyone if any(request)), ("", None))

    def slowest(self, seconds: Mapping[str, float]) -> str:
        """The process that made all wait, and how long; "" if it is no twentieth of all."""
        busy_seconds = sum(seconds[cause] for cause in ("data", "evaluation", "callbacks"))
        times = self._everyone("the times", busy_seconds)
        delay = max(times) - min(times)
        name = self.everyone.name_of(times.index(max(times)))
        return f"{name} by {delay:.1f} s" if delay > sum(seconds.values()) / 20 else ""

    def agree_at_end(self, requests: Set[Any]) -> Set[Any]:
        """The requests of all processes until the end of the run."""
        requests_of_all = self._everyone("the end", [*requests])
        requests = {tuple(x) for requests_of_one in requests_of_all for x in requests_of_one}
        # wait for it here, because a request that arrives later would end the next run
        while self._speaks and requests and not self.agree(requests):
            time.sleep(1e-3)
        return requests


@functools.lru_cache(maxsize=16)  # every evaluation needs it, and to print a program takes long
def _hash_of_program(jaxpr: Any) -> str:
    return stable_text.hash_of(stable_text.without_address(str(jaxpr)).encode())


def outline(f: Any) -> Any:
    """The code of a function; the settings of a function of this package.

    Values that it closes over may differ, such as the index of a process or its part of the data.
    """
    f = inspect.unwrap(getattr(f, "func", f))  # the function of a functools.partial, or of jit
    if code := getattr(f, "__code__", None):
        return f"{f.__qualname__} {stable_text.hash_of_code(code)}"
    settings: dict[str, Any] = {"function": getattr(f, "__qualname__", type(f).__qualname__)}
    if dataclasses.is_dataclass(f) and type(f).__module__.startswith("tsunax."):
        for name, x in ((field.name, getattr(f, field.name)) for field in dataclasses.fields(f)):
            settings[name] = outline(x) if callable(x) else x
    return settings


def without_large_arrays(state: PyTree) -> Any:
    """A tree in which large arrays are their shapes, so that it is compared in no time."""
    is_small = lambda x: not isinstance(x, jax.Array) or x.nbytes <= SMALL
    return jax.tree.map(lambda x: x if is_small(x) else trees.describe(x), state)
