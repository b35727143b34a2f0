"""A loss of the whole batch in two parts: `embed`, which works row by row, and `loss`.

Under `accumulate=n` the embeddings are computed in micro-batches that store no activations; the
gradient computes the activations again, one micro-batch after the other (gradient caching,
arXiv:2101.06983). That is a checkpoint in a scan: for the rest of a step it is a loss function of
one batch, like any other.
"""

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsunax._core import Extra, Function, PyTree, trees
from tsunax._step.loss_fn import CutsItsBatch, LossFn
from tsunax.errors import LossError
from tsunax.loss import Loss, check_model_state, loss_of, rows_of
from tsunax.microbatches import check_rows, in_turn

# The key of `loss` is folded with this number, the keys of micro-batches with their index.
_LOSS = 0x6C6F7373


def whole_batch(embed: Function, loss: Function) -> Function:
    """A loss over the rows of the whole batch, exact under `accumulate`: CLIP, SimCLR, retrieval.

    It is the loss function `loss(embed(params, batch), batch)`, for `train_step`, `value_and_grad`
    and `eval_step`. Under `accumulate=n` it is the same function, with the memory of one
    micro-batch and of the embeddings, for one more forward pass of `embed`: gradient caching (Gao
    et al. 2021, arXiv:2101.06983).

    Args:
      embed: `embed(params, rows, ...)` returns any pytree of arrays with a first axis of rows, each
        computed from one row. If it names `model_state`, it returns `(embeddings, model_state)`;
        each micro-batch gets the model state of the previous one, and statistics are taken over
        micro-batches.
      loss: `loss(embeddings, batch, ...)` of all rows returns a scalar or a `Loss`. If it names
        `params`, for a temperature for example, it gets them.

    Both may name the arguments of a loss function: `key`, `train`, `mask`, `step`, `ema` and extra
    arguments. Both passes of a micro-batch have the same key; `loss` has another key.

    Raises LossError for a function of another form, and for embeddings without an axis of rows.

    >>> import tsunax as ts
    >>> def embed(params, rows):
    ...     return rows @ params["w"]
    >>> def loss(embeddings, batch):  # each row against all others
    ...     return jnp.mean(jax.nn.logsumexp(embeddings @ embeddings.T, axis=1))
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.eye(3)})
    >>> step = ts.train_step(ts.whole_batch(embed, loss), accumulate=4)
    >>> state, info = step(state, jnp.eye(8, 3))
    >>> print(f"{info.loss:.4f}")
    2.1524
    """
    return WholeBatch(embed, loss)


@dataclass(frozen=True)
class WholeBatch(CutsItsBatch):
    """The result of `whole_batch`: a loss function that compares by value."""

    embed: Function
    loss: Function

    __name__ = "whole_batch"

    def __post_init__(self) -> None:
        try:
            names = [*inspect.signature(self.loss).parameters]
        except ValueError:  # a builtin without a signature
            names = ["embeddings"]
        takes_embeddings = names and names[0] != "params"
        if not takes_embeddings or any("batch" in x.names for x in (self._embed, self._loss)):
            got = f"{trees.describe_call(self.embed)}, {trees.describe_call(self.loss)}"
            expected = "embed(params, rows, ...), loss(embeddings, batch, ...)"
            raise LossError("signatures", "whole_batch()", got, expected)

    @functools.cached_property
    def _embed(self) -> LossFn:
        return LossFn.of(self.embed)

    @functools.cached_property
    def _loss(self) -> LossFn:
        return LossFn.of(self.loss)

    def keywords_of_parts(self) -> LossFn:
        """This loss function with the keywords of both parts."""
        parts = self._embed, self._loss
        names = dict.fromkeys(name for part in parts for name in part.names if name != "params")
        needed = {name for part in parts for name in part.names if name not in part.optional}
        takes_any = any(part.takes_any for part in parts)
        return LossFn(self, tuple(names), frozenset(names) - needed, takes_any)

    def __call__(self, params: PyTree, batch: PyTree, **keywords: Any) -> Any:
        return self.in_micro_batches(1)(params, batch, **keywords)

    def in_micro_batches(self, n: int) -> Function:
        """The same loss function, with the memory of one of n micro-batches."""
        fn = functools.partial(self._composed, n)
        return functools.wraps(self, ("__name__",), ())(fn)  # error messages show the name

    def mean_embedding(self, params: PyTree, batch: PyTree, **keywords: Any) -> Loss:
        """A loss that is a mean over rows unless `embed` mixes rows: `row_probe.py` tests it.

        A linear function of embeddings would not detect an `embed` that subtracts their mean.
        """
        state, out = self._embedded(params, batch, _named(self._embed, keywords))
        real = [jnp.real(_wide(x)) for x in jax.tree.leaves(out) if trees.is_inexact(x)]
        mean = sum((jnp.mean(jax.nn.softplus(x)) for x in real), jnp.float32(0))
        rows = np.float32(rows_of(batch))  # masked rows too: `embed` also gets them
        return Loss(mean * rows, rows, model_state=state)

    def _composed(self, n: int, params: PyTree, batch: PyTree, **keywords: Any) -> Any:
        embedded = self._embedded if n == 1 else functools.partial(self._in_turn, n)
        state, embeddings = embedded(params, batch, _named(self._embed, keywords))
        loss_keywords = _named(self._loss, keywords | {"params": params})
        if "key" in loss_keywords:
            loss_keywords["key"] = jax.random.fold_in(loss_keywords["key"], _LOSS)
        if state is None:
            return self.loss(embeddings, batch, **loss_keywords)
        loss_keywords |= _named(self._loss, {"model_state": state})
        out = loss_of(self.loss(embeddings, batch, **loss_keywords))
        return out._with_fields(model_state=state) if out.model_state is None else out

    def _in_turn(self, n: int, params: PyTree, batch: PyTree, keywords: Extra) -> tuple[Any, Any]:
        """The model state after the last micro-batch, and the embeddings of all rows.

        Gradients are summed in float32. Gradients that replace their leaf are joined by maximum.
        """
        check_rows(batch)
        # The mask has a value for each row, and is cut with the batch.
        row_keywords = {name: x for name, x in keywords.items() if name == "mask"}
        wide = _converted(params, lambda x: _copies(x, n), _wide)

        def part(state: PyTree, rows_and_keywords: Any, i: Any) -> tuple[Any, Any]:
            rows, row_keywords = rows_and_keywords
            state_keyword = {} if state is None else {"model_state": state}
            part_keywords = keywords | row_keywords | state_keyword
            if "key" in part_keywords:
                part_keywords["key"] = jax.random.fold_in(part_keywords["key"], i)
            params_of_part = trees.cast_like(_converted(wide, lambda x: x[i], lambda x: x), params)
            new, embeddings = self._embedded(params_of_part, rows, part_keywords)
            return jax.lax.stop_gradient(trees.cast_like(new, state)), embeddings

        part = jax.checkpoint(part, prevent_cse=False)
        return in_turn(part, n, keywords.get("model_state"), (batch, row_keywords))

    def _embedded(self, params: PyTree, rows: PyTree, keywords: Extra) -> tuple[Any, Any]:
        """The new model state, None if `embed` names none, and the embeddings of these rows."""
        state, out, n = None, self.embed(params, rows, **keywords), rows_of(rows)
        if "model_state" in keywords:
            if not (isinstance(out, tuple) and len(out) == 2):
                expected = "(embeddings, model_state), because embed names model_state"
                raise LossError("result", "embed", trees.describe(out), expected)
            out, state = out
            check_model_state(state, keywords["model_state"])
        leaves = list(trees.leaves_at("embeddings", out))
        for where, x in leaves or [("embeddings", out)]:
            if not leaves or jnp.shape(x)[:1] != (n,):
                expected = f"an array with a first axis of the {n} rows given to embed"
                fix = "What all rows share (a temperature) belongs into loss: it may name params."
                raise LossError("leaf", where, trees.describe(x), expected, fix)
        return state, out


def _named(part: LossFn, keywords: Extra) -> Extra:
    """The keywords for `embed`, or for `loss`."""
    if part.takes_any:
        return dict(keywords)
    return {name: x for name, x in keywords.items() if name in part.names}


def _wide(x: Any) -> Any:
    return x.astype(trees.wide_dtype(x)) if trees.is_inexact(x) else x


def _converted(params: PyTree, overwritten: Function, plain: Function) -> PyTree:
    """Params after `overwritten(leaf)` for leaves that gradients replace, else `plain(leaf)`."""
    convert = lambda path, x: overwritten(x) if trees.is_overwritten(path) else plain(x)
    return jax.tree_util.tree_map_with_path(convert, params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _copies(x: jax.Array, n: int) -> jax.Array:
    """n copies of a leaf that gradients replace: its next value is the maximum of n gradients."""
    return jnp.broadcast_to(x, (n, *jnp.shape(x)))


_copies.defvjp(lambda x, n: (_copies(x, n), None), lambda n, _, new: (new.max(0),))
