"""The processes that train together, as the rest of the package sees them: one object.

    everyone = processes.current()
    everyone.compare("shard()", {"state": state})    # nothing to do for one process

`Alone` is one process, and agrees with itself. If there are several, `tsunax.distributed` has the
object with the same methods. So no caller counts processes, and one process does not load the code
of several.
"""

import importlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import jax

from tsunax.errors import ProcessError

# Seconds that processes wait while one works alone: in a callback of `fit`, or for final figures.
LAST = 1800.0

_is_alone_on_purpose = False  # because of start(num_processes=1)


class Alone:
    """One process, with the methods of several: its answer is the answer of all."""

    @property
    def sees_everything(self) -> bool:
        """Whether this process has all rows of a batch, and all numbers that callbacks log."""
        return True

    @property
    def index(self) -> int:
        """The index of this process. ProcessError if a launcher made several that did not start."""
        check_started()
        return 0

    @property
    def count(self) -> int:
        """The number of processes. Raises ProcessError like `index`."""
        check_started()
        return 1

    @property
    def is_first(self) -> bool:
        """Whether this is the process that prints and logs."""
        return True

    def check_alone(self, where: str) -> None:
        """Raise ProcessError in a call for one process if there are several."""
        check_started()

    def spans_all(self, devices: Iterable[Any]) -> bool:
        """Whether these devices belong to several processes, and all processes have some."""
        return False

    def gather(
        self, name: str, text: str = "", timeout: float | None = None, thread: str = ""
    ) -> list[str]:
        """The texts of all processes, by index, at the call with this name."""
        check_started()
        return [text]

    def together(
        self,
        name: str,
        f: Callable[[], tuple[Any, str]],
        *,
        timeout: float | None = None,
        thread: str = "",
        kinds: Sequence[type[Exception]] = (),
    ) -> tuple[Any, list[str]]:
        """Call `f() -> (value, word)` on all processes. Returns its value, and the words of all."""
        value, word = f()
        return value, [word]

    def compare(
        self, where: str, things: Callable[[], Mapping[str, Any]], timeout: float | None = None
    ) -> None:
        """Raise ProcessError unless `things()` are the same on all processes."""

    def agreement(self, where: str, state: Any, data: Any) -> "Unanimous":
        """The comparisons of processes during a run or an evaluation."""
        if getattr(data, "gathers", False):  # each process may read its share of the rows
            check_started()
        return Unanimous()

    def agree(self, asked: Any = 0) -> Any:
        """The number or list that a process passed, on all at the same call; 0 before."""
        return asked

    def reports(self, text: str) -> dict[str, str]:
        """The newest texts of all other processes, by name; process 0 alone reads them.

        Does not wait: "" for a process that called it with "" or never.
        """
        return {}

    def row_parts(self, count: int) -> int:
        """The number of equal parts into which a batch is cut if `count` processes share it."""
        return count

    def name_of(self, index: int) -> str:
        """How messages call a process."""
        return f"process {index}"


class Unanimous:
    """The agreement of one process, with the methods of `distributed.agreement.Agreement`."""

    spans: bool = False  # whether the state is on devices of several processes

    def start(
        self, functions: Mapping[str, Any], values: Mapping[str, Any], **settings: Any
    ) -> None:
        """Compare settings, functions and values before the first call."""

    def batch(self, place: str, batch: Any, steps: int = 1, trouble: str = "") -> None:
        """Compare the next batch of data that each process reads by itself."""

    def chunk(self, step: int, chunk: Any, source: Any) -> None:
        """Compare the batches of a call."""

    def epoch_end(self, step: int, has_ended: bool) -> None:
        """Compare whether an epoch has ended after a step."""

    def program(self, trace: Callable[..., Any], *arguments: Any) -> None:
        """Compare the program of the first call."""

    def agree(self, requests: Set[Any]) -> Set[Any]:
        """The requests of some process, tuples, at the same call on all; empty before."""
        return {*requests}

    def agree_at_end(self, requests: Set[Any]) -> Set[Any]:
        """The requests of all processes until the end of the run."""
        return {*requests}

    def numbers(self, place: str, row: dict[str, float]) -> dict[str, float]:
        """The numbers of process 0."""
        return row

    def slowest(self, seconds: Mapping[str, float]) -> str:
        """The process that made all wait; "" if none is slow."""
        return ""


ALONE = Alone()


def current() -> Alone:
    """This process and the processes that train with it."""
    if jax.distributed.is_initialized():
        # By name, because `distributed` is above `_core`, and one process does not load it.
        return importlib.import_module("tsunax.distributed.collectives").SEVERAL
    return ALONE


def number(name: str) -> int | None:
    """A variable of the environment as a number; None without. Raises ProcessError."""
    text = os.environ.get(name, "").strip()
    if text and not text.isdigit():
        raise ProcessError(name, "the environment", repr(text), "a number")
    return int(text) if text else None


def launched() -> int:
    """How many processes the variables of a launcher name; 1 without."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "JAX_NUM_PROCESSES"):
        if (n := number(name)) is not None:
            return n
    slurm = number("SLURM_STEP_NUM_TASKS") or number("SLURM_NTASKS") or 1
    return slurm if "SLURM_STEP_NODELIST" in os.environ else 1


def stay_alone(on_purpose: bool) -> None:
    """Set whether this process trains alone, also if a launcher started several."""
    global _is_alone_on_purpose
    _is_alone_on_purpose = on_purpose


def check_started() -> None:
    """Raise ProcessError if a launcher made several processes that did not call `start`."""
    if not _is_alone_on_purpose and (n := launched()) > 1:
        raise ProcessError(
            "process",
            "",
            got=f"one of {n}, and not started",
            expected="a call of ts.distributed.start() before",
            fix="Or start(num_processes=1), to train alone.",
        )
