"""What rematerialisation saves: temporary bytes of a training step, by XLA's count. Compiled only, never run.

Of the GPT of examples/gpt.py, small size, under the policies of `train_step(remat=)`; and of eight blocks in a scan,
where one row has `jax.checkpoint` around each block instead of around the whole loss.
"""

import jax
import jax.numpy as jnp
import tsunax as ts
from examples.gpt import GPT, SIZES
from flax import nnx

from benchmarks._common import save, table

POLICIES = (None, True, "dots_saveable")


def mebibytes(loss_fn, params, batch, **options) -> float:
    lowered = ts.train_step(loss_fn, **options).lower(ts.setup(ts.rules.adam(1e-3), params), batch)
    analysis = lowered.compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes / 2**20


def gpt():
    width, depth, context, batch = (SIZES["small"][name] for name in ("width", "depth", "context", "batch"))
    graphdef, params = nnx.split(GPT(width, depth, nnx.Rngs(0)), nnx.Param)

    def loss_fn(params, rows):
        logits = nnx.merge(graphdef, params)(rows[:, :-1].astype(jnp.int32))
        return ts.losses.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()

    return loss_fn, params, jnp.zeros((batch, context + 1), jnp.uint8)


def blocks(wrap=lambda block: block):
    def block(x, p):
        hidden = jax.nn.gelu(x @ p["up"])
        return x + jnp.tanh(hidden * jax.nn.sigmoid(hidden)) @ p["down"], None

    loss_fn = lambda params, x: jnp.mean(jax.lax.scan(wrap(block), x, params)[0] ** 2)
    return loss_fn, {"up": jnp.zeros((8, 128, 512)), "down": jnp.zeros((8, 512, 128))}, jnp.zeros((2048, 128))


def main() -> None:
    found = {
        "GPT": {f"remat={policy!r}": mebibytes(*gpt(), remat=policy) for policy in POLICIES}
        | {"accumulate=2": mebibytes(*gpt(), accumulate=2)},
        "8 blocks in a scan": {f"remat={policy!r}": mebibytes(*blocks(), remat=policy) for policy in POLICIES}
        | {"jax.checkpoint around each block": mebibytes(*blocks(jax.checkpoint))},
    }
    for name, rows in found.items():
        first = rows["remat=None"]
        table(name, [(row, mib, mib / first) for row, mib in rows.items()], ("", "MiB", "x"))
    save("remat")


if __name__ == "__main__":
    main()
