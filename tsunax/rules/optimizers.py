"""optax's optimizers made live, by name, and six rules of Optimisers.jl that optax has otherwise.

Each is optax's own optimizer: the same arguments and defaults, and the same trajectory up to
rounding (docs/live-rules.md lists the rules that differ, and by how much).
"""

from __future__ import annotations

import optax
import optax.contrib

from tsunax.rules import _flux
from tsunax.rules.factories import LiveFactory, live

adabelief = live(optax.adabelief)
adadelta = live(optax.adadelta)
adafactor = live(optax.adafactor)
adagrad = live(optax.adagrad)
adam = live(optax.adam)
adamax = live(optax.adamax)
adamaxw = live(optax.adamaxw)
adamw = live(optax.adamw)
adan = live(optax.adan)
amsgrad = live(optax.amsgrad)
fromage = live(optax.fromage)
lamb = live(optax.lamb)
lars = live(optax.lars)
lbfgs = live(optax.lbfgs)
lion = live(optax.lion)
nadam = live(optax.nadam)
nadamw = live(optax.nadamw)
noisy_sgd = live(optax.noisy_sgd)
novograd = live(optax.novograd)
optimistic_adam = live(optax.optimistic_adam)
optimistic_adam_v2 = live(optax.optimistic_adam_v2)
optimistic_gradient_descent = live(optax.optimistic_gradient_descent)
polyak_sgd = live(optax.polyak_sgd)
radam = live(optax.radam)
rmsprop = live(optax.rmsprop)
rprop = live(optax.rprop)
sgd = live(optax.sgd)
sign_sgd = live(optax.sign_sgd)
signum = live(optax.signum)
sm3 = live(optax.sm3)
yogi = live(optax.yogi)

acprop = live(optax.contrib.acprop)
ademamix = live(optax.contrib.ademamix)
adopt = live(optax.contrib.adopt)
cocob = live(optax.contrib.cocob)
dadapt_adamw = live(optax.contrib.dadapt_adamw)
dog = live(optax.contrib.dog)
dowg = live(optax.contrib.dowg)
galore = live(optax.contrib.galore)
madgrad = live(optax.contrib.madgrad)
momo = live(optax.contrib.momo)
momo_adam = live(optax.contrib.momo_adam)
muon = live(optax.contrib.muon)
prodigy = live(optax.contrib.prodigy)
# its factory checks these in Python
reduce_on_plateau = live(
    optax.contrib.reduce_on_plateau, static=("factor", "rtol", "atol")
)  # it checks the others in Python
schedule_free_adamw = live(optax.contrib.schedule_free_adamw)
schedule_free_sgd = live(optax.contrib.schedule_free_sgd)
simplified_ademamix = live(optax.contrib.simplified_ademamix)
sophia = live(optax.contrib.sophia)

flux_adagrad = live(_flux.flux_adagrad)
flux_adamw = live(_flux.flux_adamw)
flux_amsgrad = live(_flux.flux_amsgrad)
flux_momentum = live(_flux.flux_momentum)
flux_oadam = live(_flux.flux_oadam)
flux_rprop = live(_flux.flux_rprop)

_LIVE = {name: rule for name, rule in globals().items() if isinstance(rule, LiveFactory)}
OPTAX = tuple(name for name in _LIVE if hasattr(optax, name))
CONTRIB = tuple(name for name in _LIVE if name not in OPTAX and hasattr(optax.contrib, name))
for _name in (*OPTAX, *CONTRIB):
    _home = "optax" if _name in OPTAX else "optax.contrib"
    _same = "the same arguments and defaults, the same trajectory up to rounding"
    _LIVE[_name].__name__ = _LIVE[_name].__qualname__ = _name
    _LIVE[_name].__doc__ = f"`{_home}.{_name}` with live numbers: {_same}."
