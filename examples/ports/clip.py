"""A contrastive pair of networks learns which halves of handwritten digits belong together.

    python examples/ports/clip.py           # half a minute on two CPU cores; options: --steps, --seed

It ends in `left halves that find their right one, of 100: 0.40` (chance: 0.01) and fails below 0.33.
Each step compares 256 pairs with each other, in the memory of 64: the loss in two parts gives the
gradient of the whole batch.

Follows Hugging Face's hybrid CLIP (huggingface/transformers at 9a67324,
examples/research_projects/jax-projects/hybrid_clip/run_hybrid_clip.py), which compares the rows of
one device: its training is 93 lines of code at 119 columns, from the schedule of the learning rate
to the end, without its log lines.
"""

import argparse
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import tsunax as ts


def load():
    """Training and held-out pairs: left halves, right halves (n, 32)."""
    images = load_digits().images[np.random.default_rng(0).permutation(1797)] / 8 - 1
    left, right = (x.reshape(len(x), 32).astype(np.float32) for x in np.split(images, 2, 2))
    return {"left": left[297:], "right": right[297:]}, {"left": left[:297], "right": right[:297]}


def init(key, sizes=(32, 256, 256, 64)):
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {"w": jax.random.normal(key, (n, m)) * (2 / n) ** 0.5, "b": jnp.zeros(m)}
        for key, (n, m) in zip(keys, itertools.pairwise(sizes), strict=True)
    ]


def apply(layers, x):
    for layer in layers[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    x = x @ layers[-1]["w"] + layers[-1]["b"]
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def make(steps, seed=0):
    """Data, state and both parts of the loss, for `main` and for the tests."""
    keys = jax.random.split(jax.random.key(seed))
    params = {"left": init(keys[0]), "right": init(keys[1]), "scale": jnp.log(10.0)}

    # training
    def embed(params, rows):
        return {side: apply(params[side], rows[side]) for side in ("left", "right")}

    def compare(embeddings, batch, params):
        logits = jnp.exp(params["scale"]) * embeddings["left"] @ embeddings["right"].T
        own = jnp.arange(len(logits))
        loss = ts.losses.softmax_cross_entropy_with_integer_labels
        losses = (loss(logits, own) + loss(logits.T, own)) / 2
        return ts.Loss.mean(losses, metrics={"found": logits.argmax(1) == own})

    rate = ts.schedules.warmup_cosine_decay_schedule(0.0, 1e-3, steps // 10, steps)
    rule = ts.rules.adamw(rate, weight_decay=0.1, mask=["**/w"])
    state = ts.setup(rule, params)
    # end of training
    data = ts.batches(load()[0], 256, shuffle=True, seed=seed, drop_remainder=True)
    return data, state, (embed, compare)


def main(steps, seed, target=0.33):
    data, state, parts = make(steps, seed)
    # training
    loss_fn = ts.whole_batch(*parts)
    test = ts.batches(load()[1], 100, drop_remainder=True)
    score = ts.eval_step(loss_fn)
    state, _ = ts.fit(
        ts.train_step(loss_fn, accumulate=4),
        state,
        data,
        steps=steps,
        evaluate=lambda state: ts.evaluate(score, state, {"test": test}),
        evaluate_every="20 epochs",
    )
    found = ts.evaluate(score, state, test)["found"]
    # end of training
    print(f"left halves that find their right one, of 100: {found:.2f}")
    assert found >= target, f"expected at least {target}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
