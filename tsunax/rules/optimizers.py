"""optax's optimizers made live, by name, `soap`, and six rules of Optimisers.jl.

All but these seven have the arguments and defaults of optax, and the same trajectory up to rounding
(docs/live-rules.md lists the rules that differ, and by how much).
"""

from typing import Final

import optax
import optax.contrib

from tsunax.rules import _flux, _soap
from tsunax.rules.live_factory import LiveFactory, live

adabelief: Final = live(optax.adabelief)
adadelta: Final = live(optax.adadelta)
adafactor: Final = live(optax.adafactor)
adagrad: Final = live(optax.adagrad)
adam: Final = live(optax.adam)
adamax: Final = live(optax.adamax)
adamaxw: Final = live(optax.adamaxw)
adamw: Final = live(optax.adamw)
adan: Final = live(optax.adan)
amsgrad: Final = live(optax.amsgrad)
fromage: Final = live(optax.fromage)
lamb: Final = live(optax.lamb)
lars: Final = live(optax.lars)
lbfgs: Final = live(optax.lbfgs)
lion: Final = live(optax.lion)
nadam: Final = live(optax.nadam)
nadamw: Final = live(optax.nadamw)
noisy_sgd: Final = live(optax.noisy_sgd)
novograd: Final = live(optax.novograd)
optimistic_adam: Final = live(optax.optimistic_adam)
optimistic_adam_v2: Final = live(optax.optimistic_adam_v2)
optimistic_gradient_descent: Final = live(optax.optimistic_gradient_descent)
polyak_sgd: Final = live(optax.polyak_sgd)
radam: Final = live(optax.radam)
rmsprop: Final = live(optax.rmsprop)
rprop: Final = live(optax.rprop)
sgd: Final = live(optax.sgd)
sign_sgd: Final = live(optax.sign_sgd)
signum: Final = live(optax.signum)
sm3: Final = live(optax.sm3)
yogi: Final = live(optax.yogi)

acprop: Final = live(optax.contrib.acprop)
ademamix: Final = live(optax.contrib.ademamix)
adopt: Final = live(optax.contrib.adopt)
cocob: Final = live(optax.contrib.cocob)
dadapt_adamw: Final = live(optax.contrib.dadapt_adamw)
dog: Final = live(optax.contrib.dog)
dowg: Final = live(optax.contrib.dowg)
galore: Final = live(optax.contrib.galore)
madgrad: Final = live(optax.contrib.madgrad)
momo: Final = live(optax.contrib.momo)
momo_adam: Final = live(optax.contrib.momo_adam)
muon: Final = live(optax.contrib.muon)
prodigy: Final = live(optax.contrib.prodigy)
# The factory checks these numbers in Python, so they are static.
reduce_on_plateau: Final = live(optax.contrib.reduce_on_plateau, static=("factor", "rtol", "atol"))
schedule_free_adamw: Final = live(optax.contrib.schedule_free_adamw)
schedule_free_sgd: Final = live(optax.contrib.schedule_free_sgd)
simplified_ademamix: Final = live(optax.contrib.simplified_ademamix)
sophia: Final = live(optax.contrib.sophia)

soap: Final = live(_soap.soap)

flux_adagrad: Final = live(_flux.flux_adagrad)
flux_adamw: Final = live(_flux.flux_adamw)
flux_amsgrad: Final = live(_flux.flux_amsgrad)
flux_momentum: Final = live(_flux.flux_momentum)
flux_oadam: Final = live(_flux.flux_oadam)
flux_rprop: Final = live(_flux.flux_rprop)

_LIVE = {name: rule for name, rule in globals().items() if isinstance(rule, LiveFactory)}
OPTAX = tuple(name for name in _LIVE if hasattr(optax, name))
CONTRIB = tuple(name for name in _LIVE if name not in OPTAX and hasattr(optax.contrib, name))
for _name in (*OPTAX, *CONTRIB):
    _module = "optax" if _name in OPTAX else "optax.contrib"
    _LIVE[_name].__name__ = _LIVE[_name].__qualname__ = _name
    # The text of optax follows. It is indented by two spaces, and so is this text.
    _LIVE[_name].__doc__ = (
        f"`{_module}.{_name}` with live numbers: the same arguments and defaults, the same "
        "trajectory up to rounding.\n\n  Raises HyperparameterError for a number that is out of "
        "range or not finite, and\n  WrongTypeError for an argument of another type.\n\n  "
        f"{_LIVE[_name].factory.__doc__}"
    )
