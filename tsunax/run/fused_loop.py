"""Any number of steps in one compiled loop: one program with a traced trip count.

    for i in range(n):
        state, infos[i] = step(state, feed.batch_at(i))

The clock may decide how many steps a call has, and that must not change a bit of the result. XLA
compiles the body of a loop otherwise than the same step alone: it fuses other operations, and the
last digit may differ. A `lax.scan` of 8 steps and a `lax.scan` of 64 are two programs as well, and
a scan of one step is unrolled. So all calls run one program: a `while_loop` with its trip count as
an argument, over a buffer with room for the most batches of a call. Single steps use it, too.

The costs: a call of one step sends a buffer of two batches (XLA unrolls a loop of one), infos have
a row for each batch of the buffer, and a reverse-mode gradient cannot pass through a `while_loop`
(through `step` it can). Keep three things: the trip count is traced, the buffer does not depend on
the number of steps, and `run_steps` runs the same program for k = 1. The loop ends early after too
many rejected steps in a row, because the host reads their verdicts late.

Leaves that the step does not change are not carried by the loop. If a user's step changes one (by
`adjust`, or a leaf that is not trained), the leaf joins the carry.

On one GPU the loop is compiled as one CUDA graph, see `ONE_GRAPH`.

This file does not use epochs.
"""

import collections
import functools
import inspect
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsunax._core import Extra, Function, PyTree, Scalar, Step, checks, placement, trees
from tsunax.errors import StateError, WrongTypeError, hide_own_frames
from tsunax.guard import tracing
from tsunax.loss import Loss
from tsunax.program import Programs, Traced, TrainStep, place_state
from tsunax.run.info_columns import Infos, StatesInfo, with_numbers, with_scheduled
from tsunax.state import TrainState, donated
from tsunax.states import States, assemble_any, over_members, split_any, training_states

# Without these options XLA reads the condition of a loop back to the host before each step, and
# only the body is a CUDA graph: 200 steps of a small MLP took 2.0 times as long as in a scan by
# hand on an H200, and 1.09 times with them (docs/gpu.md). The first option is XLA's default with
# WHILE added; without the second one, a loop of one command would be too short for a graph.
ONE_GRAPH = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,"
    "DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
    "xla_gpu_graph_min_graph_size": "1",
}  # not on several GPUs: collectives are in no CUDA graph


_SENDS = jax.transfer_guard_host_to_device
_RECEIVES = jax.transfer_guard_device_to_host


@functools.cache
def _options_of_loop() -> dict[str, str]:
    """`ONE_GRAPH` if this version of XLA has these options, else no options."""
    try:
        jax.jit(lambda x: x, compiler_options=ONE_GRAPH).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return {}
    return ONE_GRAPH


def _platform_of(state: PyTree) -> str:
    """The platform of a state outside of any trace, for its own program; "" within a trace."""
    array = next(filter(trees.is_placed, jax.tree.leaves(state)), None)
    if trees.is_tracing():
        return ""
    device = jax.devices()[0] if array is None else next(iter(array.sharding.device_set))
    return device.platform


def _fast_on_cpu(fn: Function, platform: str) -> Function:
    """A function that runs as fast in a loop as outside. XLA for other platforms needs no help."""
    if platform not in ("cpu", ""):
        return fn
    from tsunax._cpu import convolutions

    return convolutions.fast(fn)


@dataclass(frozen=True)
class Single:
    """One batch, for a step that is called without a loop."""

    batch: PyTree

    def batch_at(self, i: Scalar) -> PyTree:
        return self.batch


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Nothing:
    """No batches, for a step that takes its data from the state."""

    size: int = field(metadata={"static": True})

    def batch_at(self, i: Scalar) -> None:
        return None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stacked:
    """Batches along a new first axis."""

    batches: PyTree
    # f32 (rows,): 0 for rows of padding; None without padding
    mask: jax.Array | np.ndarray | None = None

    @property
    def size(self) -> int:
        return jax.tree.leaves(self.batches)[0].shape[0]

    def batch_at(self, i: Scalar) -> PyTree:
        row = lambda x: jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False)
        return jax.tree.map(row, self.batches)


@dataclass(frozen=True)
class Fused:
    """The compiled loop of a step: `(state, feed, (n, limit), extra) -> (state, infos)`.

    `step` is any function `(state, batch, **extra) -> (state, info)` that can be traced. `Infos`
    have a row for each batch of the feed, of which the first n are filled. A state with a clock
    stays as it is after `limit` rejected steps in a row: the host reads their verdicts late.
    """

    step: Step
    donate: bool

    @functools.cached_property
    def programs(self) -> Programs:
        return Programs(self._compiled_on)

    @functools.cached_property
    def known_types(self) -> dict[Any, list[Any]]:
        """The types of the calls that each program was compiled for."""
        return collections.defaultdict(list)

    def _compiled_on(self, place: tuple[placement.MeshShardings | None, str]) -> Any:
        shardings, platform = place
        # The compiled loop donates the moving leaves, and leaves the state where it was.
        is_on_gpu = shardings is None and platform == "gpu"
        return jax.jit(
            self._loop_on(shardings, platform),
            static_argnums=0,
            donate_argnums=(1,) if self.donate else (),
            out_shardings=shardings and (shardings.of_leaves, None, shardings.replicated),
            compiler_options=_options_of_loop() if is_on_gpu else None,
        )

    def _loop_on(self, shardings: placement.MeshShardings | None, platform: str) -> Function:
        """The loop, to be compiled for a state with these shardings, or on one device."""
        step, run = self.step, self.call_step
        if isinstance(step, TrainStep):
            mesh = None if shardings is None else shardings.replicated.mesh
            run = functools.partial(step.pure, mesh=mesh)

        # `n` are the counts of `chunks.count_of`: steps, and rejected steps in a row that end it.
        def train_steps(kind, moving, fixed, feed, n, extra):
            assemble = functools.partial(assemble_any, kind)
            state, trace = assemble(moving, fixed), None
            changed: list[int] = []  # the numbers of fixed leaves that the step changes
            if isinstance(step, TrainStep):
                trace = Traced.from_arguments("loop", shardings, state, {"batches": feed, **extra})

            def looped_step(moving, fixed, batch):
                state, step_extra = assemble(moving, fixed), extra
                if (mask := getattr(feed, "mask", None)) is not None:  # rows of padding on a mesh
                    from tsunax._step.on_mesh import masked

                    step_extra = {**extra, "mask": masked(extra.get("mask"), mask)}
                with tracing(shardings is not None):
                    new, info = run(state, batch, step_extra)
                _check_same(state, new)
                # without numbers, which are taken from the state after the call
                info = with_numbers(info, dict.fromkeys(training_states(state)))
                _, new, fixed_after = split_any(new)
                pairs = zip(jax.tree.leaves(fixed_after), jax.tree.leaves(fixed), strict=True)
                new_leaves = {i: x for i, (x, old) in enumerate(pairs) if x is not old}
                changed[:] = new_leaves.keys()  # the trace finds them for the loop below
                return new, [*new_leaves.values()], Infos.of_step(jax.tree.map(jnp.asarray, info))

            # traced once for the shapes and the loop
            looped_step = jax.jit(_fast_on_cpu(looped_step, platform))
            shapes = jax.eval_shape(looped_step, moving, fixed, feed.batch_at(0))[2]
            empty = lambda s: placement.stack_of_zeros(feed.size, s)

            def is_unfinished(carry):
                i, moving, *_ = carry
                if kind is None:  # a state of another type has no count of rejections
                    return i < n[0]
                return (i < n[0]) & jnp.any(assemble(moving, fixed).rejected_in_a_row < n[1])

            def body(carry):
                i, moving, changed_leaves, infos = carry
                current_fixed = _with_leaves(fixed, dict(zip(changed, changed_leaves, strict=True)))
                moving, changed_leaves, info = looped_step(moving, current_fixed, feed.batch_at(i))
                put_row = lambda stack, x: jax.lax.dynamic_update_index_in_dim(stack, x, i, 0)
                return i + 1, moving, changed_leaves, jax.tree.map(put_row, infos, info)

            changed_leaves = [jax.tree.leaves(fixed)[i] for i in changed]
            start = jnp.int32(0), moving, changed_leaves, jax.tree.map(empty, shapes)
            _, moving, changed_leaves, infos = jax.lax.while_loop(is_unfinished, body, start)
            self.programs.traced += 1  # here, so that a failed trace does not count
            if isinstance(step, TrainStep) and trace is not None:
                step.traces.append(trace)
            infos = with_scheduled(infos, state)
            return moving, dict(zip(changed, changed_leaves, strict=True)), infos

        return train_steps

    def call_step(self, state: PyTree, batch: PyTree, extra: Extra) -> tuple[PyTree, PyTree]:
        """Call the step once, without a loop; a population of `States` calls it for each member."""
        if not isinstance(state, States):
            return self._call_step(state, batch, extra)
        new, info = over_members(self._counted, state, batch, extra)
        counts = {name: new.tally[..., i] for i, name in enumerate(new.members)}
        return new, StatesInfo(info, new.clock, counts)

    def _counted(self, run: States, batch: PyTree, extra: Extra) -> tuple[PyTree, PyTree]:
        new, info = self._call_step(run, batch, extra)
        _check_same(run, new)
        if new.clock is run.clock:
            raise StateError(
                "state",
                "step",
                got="a run that counts no call",
                expected="one with a call more",
                fix="End it: return run.advance(...), info.",
            )
        return new, info

    def _call_step(self, state: PyTree, batch: PyTree, extra: Extra) -> tuple[PyTree, PyTree]:
        try:
            if isinstance(self.step, TrainStep):  # a run judges the verdict itself
                return self.step.call(state, batch, extra)
            arguments = (state, batch) if batch is not None or _takes_batch(self.step) else (state,)
            out = self.step(*arguments, **extra)
        except Exception:
            if isinstance(state, TrainState):
                _check_no_loss_fn(self.step, state, batch)
            raise
        if not isinstance(out, tuple) or len(out) != 2:
            raise StateError("result", "step", trees.describe(out), "two things: (state, info)")
        return out

    def __call__(self, state: PyTree, feed: PyTree, n: Any, extra: Extra) -> tuple[Any, Infos]:
        program, arguments = self._program_of(state, feed, n, extra)
        kind, moving, fixed, *_ = arguments
        first_look = self.step.first_look if isinstance(self.step, TrainStep) else None
        if first_look is not None and first_look.pending:
            with _SENDS("allow"):
                first = feed.batch_at(0)
            first_look(assemble_any(kind, moving, fixed), first, extra)
        try:
            moving, changed_leaves, infos = self._dispatch(program, arguments)
        except Exception as error:
            hide_own_frames(error)
            raise
        if changed_leaves:
            fixed = _with_leaves(fixed, changed_leaves)
        return assemble_any(kind, moving, fixed), infos

    def trace(self, state: PyTree, feed: PyTree, n: Any, extra: Extra) -> jax.stages.Traced:
        """The trace of the program of such a call, which the call then uses."""
        program, arguments = self._program_of(state, feed, n, extra)
        return program.trace(*arguments)

    def _program_of(
        self, state: PyTree, feed: PyTree, n: Any, extra: Extra
    ) -> tuple[Any, tuple[Any, ...]]:
        """The program for a state where it is placed, and its arguments."""
        kind, moving, fixed = split_any(state)
        if kind is not None:
            placed = self.programs.place_state(state, moving, fixed)
        elif any(map(trees.is_gone, jax.tree.leaves(state))):
            raise StateError(donated("the loop"))
        else:
            placed = place_state(moving)
        shardings, moving, fixed = placed
        program = self.programs[shardings, _platform_of(moving)]
        return program, (kind, moving, fixed, feed, n, extra)

    def _dispatch(self, program: Any, arguments: tuple[Any, ...]) -> Any:
        """Call a program. JAX's transfer guard proves that the call reads nothing back.

        Batches on the host are sent with the call, also under a user's guard against it: sending
        them before the call costs five times as much. The first call of a form is traced, which
        runs the user's code under the user's guard, and compiled, which reads constants.
        """
        types, known_types = _types(arguments), self.known_types[program]
        if program._cache_size() < len(known_types):  # `jax.clear_caches` has emptied it
            known_types.clear()
        if types in known_types:
            with _SENDS("allow"), _RECEIVES("disallow"):
                return program(*arguments)
        program.trace(*arguments)
        with _SENDS("allow"):
            out = program(*arguments)
        known_types.append(types)
        return out


def _with_leaves(tree: PyTree, new: dict[int, Any]) -> PyTree:
    """The tree with some leaves replaced: `new` has them by their number."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten([new.get(i, x) for i, x in enumerate(leaves)])


def _takes_batch(step: Step) -> bool:
    """Whether a step takes positional arguments after the state, by its signature."""
    kinds = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD
    positional = [p for p in checks.parameters_of(step) if p.kind not in kinds]
    return len(positional) != 1 or positional[0].kind == inspect.Parameter.VAR_POSITIONAL


def _check_no_loss_fn(step: Step, state: TrainState, batch: PyTree) -> None:
    """Raise WrongTypeError if `step`, which failed on a state, is a loss function of its params."""
    try:
        out = step(state.params, batch)
    except Exception:
        return
    if isinstance(out, Loss) or np.shape(out) == ():
        got = f"{trees.describe_call(step)}, a loss function"
        expected = "a function (state, batch) -> (state, info)"
        fix = "Give ts.eval_step(loss_fn) or ts.train_step(loss_fn)."
        raise WrongTypeError("step", "", got, expected, fix) from None


def _check_same(old, new) -> None:
    checks.check_like("state", new, old, "A step returns (state, info), the state as it got it.")


def _types(arguments: tuple[Any, ...]) -> Any:
    """The structures, types and a sharding that a call is compiled for, to compare calls.

    A program returns the same objects each time, which are compared faster than they are hashed.
    """
    kind, moving, fixed, feed, _, extra = arguments
    leaves, treedef = jax.tree.flatten((moving, fixed, feed, extra))
    array_type = lambda x: (np.shape(x), getattr(x, "dtype", type(x)))
    types = [getattr(x, "aval", None) or array_type(x) for x in leaves]
    return kind, treedef, types, [getattr(x, "sharding", None) for x in leaves[:1]]


def lowerable(step: Any, state: PyTree) -> Any:
    """The step of a state, with `lower` and `trace`; a step of `States`, as `fit` would call it."""
    if not isinstance(state, States) or not callable(step) or hasattr(step, "lower"):
        return step

    def call(state: PyTree, batch: PyTree = None, **extra: Any) -> tuple[PyTree, PyTree]:
        new, call_info = fused(step, True).call_step(state, batch, extra)
        return new, call_info.info

    return jax.jit(_fast_on_cpu(call, _platform_of(state)), donate_argnums=0)


def fused(step: Any, donate: bool) -> Fused:
    """The loop of a step. Equal steps that refer to equal values share a loop, and its programs.

    A `TrainStep` keeps the values that it first referred to, as its own compiled program does.
    """
    if isinstance(step, TrainStep):
        return _shared(step, donate, step.references)
    from tsunax._core import stable_text

    return _shared(step, donate, stable_text.code_of(step, is_exact=True))


@functools.lru_cache(maxsize=32)
def _shared(step: Step, donate: bool, references: str) -> Fused:
    return Fused(step, donate)
