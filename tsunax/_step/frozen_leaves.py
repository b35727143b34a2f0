"""Leaves that a step does not change: frozen ones, and all params while a rule only gathers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsunax import guard
from tsunax._step.state_fields import trained_count
from tsunax.rules import accumulation
from tsunax.rules.leaf_owners import owners_of
from tsunax.state import TrainState, base, trained_part, with_rest


def thawed_flags(state: TrainState) -> list[Any]:
    """One scalar bool for each trained leaf, false if it is frozen."""
    n = trained_count(state)
    none = lambda words: [words[0] == 0] * n
    some = lambda words: [(words[k // 32] >> np.uint32(k % 32)) & 1 == 0 for k in range(n)]
    # On a CPU behind a cond, which makes the flag of a leaf an operand of its kernels. If XLA fuses
    # the flag into them, its place is a constant, and no two leaves can share a kernel. On other
    # devices a cond may wait for the host.
    apart = lambda words: jax.lax.cond(jnp.any(words != 0), some, none, words)
    return jax.lax.platform_dependent(state.frozen, cpu=apart, default=some)


def with_unmoved(old: TrainState, new: TrainState, thawed, emitted) -> TrainState:
    """`step._with_unmoved`: the declarations of the fields say which leaves belong to params."""
    moves = True if emitted is None else emitted  # a call that only gathers moves no parameter
    leaves = [moves & on for on in thawed or [True] * len(jax.tree.leaves(trained_part(old)))]
    fields = {}
    for f in old._fields:
        now, before, like = getattr(new, f.name), getattr(old, f.name), f.metadata["like"]
        if f.metadata["moves"] != "step" or now is before:
            continue
        if like == "params":
            fields[f.name] = with_rest(
                old, guard.choose(leaves, trained_part(new), trained_part(old))
            )
        elif like in ("trained", "average"):
            # beside the leaves an average has a count, which goes on if anything may move
            rest = [moves] * (len(jax.tree.leaves(now)) - len(leaves))
            fields[f.name] = guard.choose([*leaves, *rest], now, before)
        elif like == "rule" and thawed is not None:
            owners = owners_of(old.plan.init, before, old.numbers, base(old))
            sums = accumulation.in_sums(now)
            kept = [
                True if o is None or s else thawed[o] for o, s in zip(owners, sums, strict=True)
            ]
            fields[f.name] = guard.choose(kept, now, before)
    return dataclasses.replace(new, **fields)
