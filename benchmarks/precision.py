"""What a precision costs or saves in each model, and what the guards cost. CPUs are slower in 16 bits, as a rule.

float32, bfloat16 and float16 (with its loss scale) are the same step of tsunax over the same float32 params; a ratio
above 1 is a slower one. The guards are compared with the hand-written step with the same norms, finite check and select
(target: 1.05), and with a step without any (target on the GPT: 1.01).
"""

import jax
import tsunax as ts

from benchmarks._common import batch_of, interleave, mlp, mlp_loss, ratio, save, table
from benchmarks.accumulate import cnn, gpt
from benchmarks.step import by_hand, by_tsunax, guarded, unguarded

PRECISIONS = ("float32", "bfloat16", "float16")
ADAM = ts.rules.adam(1e-3)
MODELS = {  # params, batch, loss; steps of a burst
    "MLP 256-512-512-10": (lambda: (mlp([256, 512, 512, 10]), batch_of(256, 256), mlp_loss), 5),
    "CNN": (lambda: cnn(64), 2),
    "GPT": (lambda: gpt(16), 1),
}
GUARDED = {
    "tiny MLP 64-64-10": (lambda: (mlp([64, 64, 10]), batch_of(32, 64), mlp_loss), 300),
    "200 leaves": (lambda: (mlp([32] * 100 + [10]), batch_of(8, 32), mlp_loss), 15),
    "GPT": (lambda: gpt(16), 1),
}


def compare(title, contenders, floor, *, rounds, steps):
    times = interleave(contenders, rounds=rounds, steps=steps)
    found = {k: (sorted(v)[len(v) // 2], *ratio(times, k, floor)) for k, v in times.items()}
    table(title, [(k, *v) for k, v in found.items()], ("contender", "us/step", "x low", "x median", "x high"))


def main(rounds: int = 30) -> None:
    for name, (make, steps) in MODELS.items():
        params, batch, loss_fn = make()
        step = ts.train_step(loss_fn)
        contenders = {p: by_tsunax(step, ts.setup(ADAM, params, precision=p), batch) for p in PRECISIONS}
        compare(name, contenders, "float32", rounds=rounds, steps=steps)

    for name, (make, steps) in GUARDED.items():
        params, batch, loss_fn = make()
        spikes = ts.rules.chain(ts.rules.reject_spikes(), ADAM)
        step, bare = ts.train_step(loss_fn), ts.train_step(loss_fn, norms=False, on_nonfinite="ignore")
        tsunax = lambda step, rule, params=params, batch=batch: by_tsunax(step, ts.setup(rule, params), batch)
        floors = {
            "by hand, same norms and select": {
                "by hand, same norms and select": by_hand(guarded(jax.value_and_grad(loss_fn)), params, batch),
                "tsunax, norms and verdict": tsunax(step, ADAM),
                "tsunax, reject_spikes too": tsunax(step, spikes),
            },
            "tsunax, no guard": {
                "by hand, no guard": by_hand(unguarded(loss_fn), params, batch),
                "tsunax, no guard": tsunax(bare, ADAM),
                "tsunax, verdict": tsunax(ts.train_step(loss_fn, norms=False), ADAM),
                "tsunax, norms, verdict, spikes": tsunax(step, spikes),
            },
        }
        for floor, contenders in floors.items():
            title = f"guards, {name}, over {floor}"
            compare(title, contenders, floor, rounds=rounds, steps=steps)
    save("precision")


if __name__ == "__main__":
    main()
