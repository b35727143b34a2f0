"""Leaves that a step does not change: frozen ones, and all params while a rule only gathers."""

from __future__ import annotations

import dataclasses

import jax

from tsunax import guard
from tsunax.rules import accumulation
from tsunax.rules.leaf_owners import owners_of
from tsunax.state import TrainState, base, trained_part, with_rest


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
