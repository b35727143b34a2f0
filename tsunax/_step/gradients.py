"""The gradient of a loss function, of one batch or of many micro-batches: the first half of a step.

Gradients are taken of the trained leaves, in the precision of the state. The loss is multiplied by
its scale before, and the gradient is divided by it after.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownLambdaType=false
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsunax import guard
from tsunax._core import AxisName, Extra, Function, PyTree, checks, trees
from tsunax._state import thawed_flags
from tsunax._step.loss_fn import (
    CutsItsBatch,
    GradientOptions,
    LossFn,
    Problem,
    Strategy,
    scaled_loss,
)
from tsunax.errors import LossError, RuleError, WrongTypeError, warn
from tsunax.loss import Loss
from tsunax.state import (
    TrainState,
    check_state,
    master_params,
    overwritten_part,
    params_with_trained,
    trained_part,
)


def gradient_of(options: GradientOptions, where: str) -> Function:
    """The function that `value_and_grad` returns. Its errors name the call `where`."""
    accumulate, per_example = options.accumulate, options.per_example
    cuts_itself = isinstance(options.loss_fn, CutsItsBatch)
    fn, checkpoint = _loss_fn_of(options, where), _checkpoint(options.remat)
    strategy = _strategy(options)

    def f(
        state: TrainState, batch: PyTree, *, at: PyTree = None, **extra: Any
    ) -> tuple[Loss, PyTree]:
        check_state(state, where, batch)
        trained = trained_part(state)
        if at is not None:
            checks.check_like("(at=)", at, trained, "It has the structure of ts.trainable(state).")
            trained = at
        from tsunax.states import with_own_values

        return with_own_values(gradient_of_member, state, (trained,), batch, extra)

    def gradient_of_member(
        state: TrainState, trained: PyTree, batch: PyTree, extra: Extra
    ) -> tuple[Loss, PyTree]:
        parts = trained, overwritten_part(state)
        keywords = fn.keywords(state, extra, train=True)
        if "key" in fn.names and "key" not in keywords:
            _warn_of_no_key(options.loss_fn)
        if axes := axes_around(options.axis_name, where):
            parts, keywords = _varying(axes, parts, keywords, "key" in extra, cuts_itself)
        gradient = functools.partial(_differentiated, fn, checkpoint, state, parts)
        problem = Problem(
            gradient=gradient,
            batch=batch,
            keywords=keywords,
            state=state,
            overwritten=parts[1],
            axes=axes,
            finish=lambda grads: conjugated(_unscaled(state, grads)),
            square=_square_of(state) if options.noise_scale else None,
        )
        loss, grads = strategy(problem)
        if loss.terms and (axes or per_example or (accumulate > 1 and not cuts_itself)):
            from tsunax.microbatches import loss_over_devices

            # A term is a mean over the whole batch, but each part divided it by the weight of the
            # part. This second pass divides it by the weight of the batch, which the first pass has
            # summed; XLA drops the rest of the first pass.
            loss_of_all = loss_over_devices(loss, axes, None) if axes else loss
            part_of_all = functools.partial(gradient, whole=loss_of_all)
            loss, grads = strategy(dataclasses.replace(problem, gradient=part_of_all))
        if axes:
            from tsunax.microbatches import over_devices

            loss, grads = over_devices(loss, grads, axes, keywords.get("mask"))
        if not per_example:  # `per_example` finishes the gradient of each row
            grads = problem.finish(grads)
        return _with_weight_of_terms(_with_noise_scale(problem, loss, grads)), grads

    return f


def _with_weight_of_terms(loss: Loss) -> Loss:
    """The loss with the largest weight of its terms, if it has several, as a sum of two losses.

    The sum of the weights of parts would depend on how the batch was cut.
    """
    if not loss.terms:
        return loss
    largest_weight = functools.reduce(jnp.maximum, (term.weight for term in loss.terms))
    return dataclasses.replace(loss, weight=largest_weight)


def _warn_of_no_key(fn: Function) -> None:
    """Warn of a training step without the key that a loss function would take, unless bound."""
    if "key" not in getattr(fn, "keywords", {}):
        fix = "Give it one, setup(..., key=0), or functools.partial(loss_fn, key=None) to mean it."
        warn(f"{trees.describe_call(fn)} names key, but the state has none. {fix}")


def _loss_fn_of(options: GradientOptions, where: str) -> LossFn:
    """The loss function of these options, which are checked."""
    checks.check_count(options.accumulate, where, "accumulate")
    checks.check_choice(options.on_nonfinite, where, "on_nonfinite", guard.POLICIES)
    checks.check_flags(where, noise_scale=options.noise_scale)
    per_example, noise_scale = options.per_example, options.noise_scale
    if not isinstance(per_example, bool) and not callable(per_example):
        raise WrongTypeError("per_example", where, repr(per_example), "a bool or a function")
    fn, loss_fn = LossFn.of(options.loss_fn), options.loss_fn
    is_whole = isinstance(loss_fn, CutsItsBatch)
    conflicts = {
        "on_nonfinite='drop' for a loss without micro-batches, of the whole batch or per example": (
            options.reaction.drops and (is_whole or per_example)
        ),
        "per_example=True over an axis of devices": per_example is True and options.axis_name,
        "per_example or noise_scale of a whole_batch loss": is_whole
        and (per_example or noise_scale),
        "noise_scale without accumulate=2 or more, or with per_example": (
            noise_scale and (options.accumulate < 2 or per_example)
        ),
    }
    for conflict, is_present in conflicts.items():
        if is_present:
            raise WrongTypeError("options", where, conflict, "options that fit together")
    if isinstance(loss_fn, CutsItsBatch):
        return dataclasses.replace(fn, fn=loss_fn.in_micro_batches(options.accumulate))
    return fn


def _strategy(options: GradientOptions) -> Strategy:
    """The strategy that computes the gradient of a batch."""
    one_batch: Strategy = lambda problem: problem.gradient(problem.batch, problem.keywords)
    strategy, n = one_batch, options.accumulate
    if n > 1 and isinstance(options.loss_fn, CutsItsBatch):
        from tsunax._cpu import convolutions

        # The loss function itself loops over micro-batches, and on a CPU its convolutions would be
        # slow in a loop.
        strategy = lambda problem: convolutions.fast(lambda: one_batch(problem))()
    elif n > 1:
        from tsunax.microbatches import over_micro_batches

        strategy = functools.partial(over_micro_batches, n=n, drop=options.reaction.drops)
    if not options.per_example:
        return strategy
    from tsunax._step import per_example

    if options.per_example is True:
        return functools.partial(per_example.stacked, n=n)
    of_row = options.per_example
    return functools.partial(per_example.averaged, of_row=of_row, strategy=strategy)


def _varying(
    axes: tuple[str, ...], parts: PyTree, keywords: Extra, has_key: bool, carries: bool
) -> tuple[PyTree, Extra]:
    """Parts and keywords that vary over devices; if the user gave no key, each device has a key.

    If the loss `carries` the model state through a loop, the model state varies, too.
    """
    from tsunax._core import axes as named_axes

    if carries and "model_state" in keywords:
        keywords = keywords | {"model_state": named_axes.vary(keywords["model_state"], axes)}
    if "key" in keywords and not has_key:
        key = jax.random.fold_in(keywords["key"], jax.lax.axis_index(axes))
        keywords = keywords | {"key": key}
    return named_axes.vary(parts, axes), keywords


def _differentiated(
    fn: LossFn,
    checkpoint: Function,
    state: TrainState,
    parts: PyTree,
    rows: PyTree,
    keywords: Extra,
    whole: Loss | None = None,
) -> tuple[Loss, PyTree]:
    """The Loss, with the new overwritten leaves, and the gradients of its scaled mean.

    `parts` are the trained and the overwritten leaves of params.
    """
    notes: list[bool] = []  # one if the loss depends on the trained leaves

    def noted_mean(*parts: PyTree):
        params = params_with_trained(state, *parts)
        mean, loss = scaled_loss(fn, state, params, rows, keywords, whole)
        return _with_note(mean, notes), loss

    value_and_gradient = jax.value_and_grad(checkpoint(noted_mean), argnums=(0, 1), has_aux=True)
    if trees.is_tracing() and not any(map(guard.is_over_mesh, jax.tree.leaves(parts[0]))):
        from tsunax._cpu.kept_sums import keep_sums

        # On a CPU, XLA would compute sums of cotangents again for each of their readers.
        value_and_gradient = keep_sums(value_and_gradient)
    (_, loss), (grads, new) = value_and_gradient(*parts)
    if not notes:
        got = "one that does not depend on any trained leaf of params"
        fix = "Compute it from the given params, without stop_gradient, argmax or rounding."
        raise LossError("loss", trees.describe_call(fn.fn), got, "one that does", fix)
    # jax.checkpoint returns constants in a private class (jax 0.7)
    as_array = lambda x: x if trees.is_array(x) else np.asarray(x, trees.dtype_of(x))
    return dataclasses.replace(jax.tree.map(as_array, loss), overwritten=new), grads


def conjugated(grads: PyTree) -> PyTree:
    """JAX's complex gradients `∂f/∂x - i ∂f/∂y` as steepest ascent `∂f/∂x + i ∂f/∂y`, and back."""
    return jax.tree.map(lambda g: jnp.conj(g) if trees.is_a(g, np.complexfloating) else g, grads)


def _unscaled(state: TrainState, grads: PyTree) -> PyTree:
    if (scale := state.loss_scale) is None:
        return grads
    unscale = lambda g: g.astype(trees.wide_dtype(g)) / scale.scale
    return jax.tree.map(lambda g, x: unscale(g).astype(x.dtype), grads, master_params(state))


def _square_of(state: TrainState) -> Function:
    """The squared norm of a gradient, in float32, over the leaves that are not frozen."""
    flags = thawed_flags(state)

    def square(grads: PyTree) -> jax.Array:
        squares = guard.square_sums(grads)
        if flags is not None:
            squares = [
                jnp.where(is_thawed, x, 0) for is_thawed, x in zip(flags, squares, strict=True)
            ]
        return jnp.float32(sum(squares))

    return square


def _with_noise_scale(problem: Problem, loss: Loss, grads: PyTree) -> Loss:
    if problem.square is None:
        return loss
    from tsunax.microbatches import NoiseScale

    # Σ w_i |g_i|² over the micro-batches, and their number
    squares, count = loss.noise_scale
    if (scale := problem.state.loss_scale) is not None:
        squares = squares / scale.scale**2
    square_of_mean = problem.square(grads)
    trace = (squares - loss.weight * square_of_mean) / (count - 1)
    estimate = NoiseScale(trace, square_of_mean - trace / loss.weight)
    return dataclasses.replace(loss, noise_scale=estimate)


def _with_note(mean: jax.Array, notes: list[bool]) -> jax.Array:
    """`mean`; its differentiation adds a note if it depends on the trained leaves."""

    @jax.custom_jvp
    def identity(x: Any):
        return x

    def rule(primals: Any, tangents: Any):
        (x,), (t,) = primals, tangents
        if isinstance(t, jax.custom_derivatives.SymbolicZero):
            return x, jnp.zeros_like(x)
        notes.append(True)
        return x, t

    identity.defjvp(rule, symbolic_zeros=True)
    return identity(mean)


def _checkpoint(remat: bool | str | Function | None) -> Function:
    """`jax.checkpoint` with the policy of `remat`; the identity without one."""
    if remat is None or isinstance(remat, bool):
        return jax.checkpoint if remat else lambda f: f
    policy = getattr(jax.checkpoint_policies, remat) if isinstance(remat, str) else remat
    return functools.partial(jax.checkpoint, policy=policy)


def axes_around(axis_name: AxisName, where: str) -> tuple[str, ...]:
    """The axes to take means over. Raises StateError for a forgotten or an absent axis."""
    from tsunax._core import axes

    return axes.checked_axes(axis_name, where)


def search_functions(
    fn: LossFn, state: TrainState, batch: PyTree, extra: Extra, axes: AxisName
) -> dict[str, Function]:
    """The loss and its gradient at other trained params, by the names that line searches use."""
    keywords = fn.keywords(state, extra, train=True)

    def value_fn(params: PyTree, **_: Any):
        if axes:
            place = f"train_step(axis_name={axes!r})"
            raise RuleError("rule", place, "a line search", "another, or arrays of ts.shard")
        if (thawed := thawed_flags(state)) is not None:
            params = guard.choose(thawed, params, trained_part(state))
        whole_params = params_with_trained(state, params)
        return scaled_loss(fn, state, whole_params, batch, keywords)[1].compute()

    return {
        "value_fn": value_fn,
        "obj_fn": value_fn,
        "grad_fn": lambda params, _=None: jax.grad(value_fn)(params),
    }
