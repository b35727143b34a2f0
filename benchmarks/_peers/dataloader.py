"""A training from a torch DataLoader gives the bits of the same batches from a list. Needs torch and tsunax."""

import jax.numpy as jnp
import numpy as np
import torch
import tsunax as ts


def trained(data, **goal):
    state = ts.setup(ts.rules.sgd(0.05), {"w": jnp.zeros((8, 1))})
    step = ts.train_step(lambda params, batch: jnp.mean((batch[0] @ params["w"] - batch[1]) ** 2))
    state, history = ts.fit(step, state, data, **goal, log_every=1, progress=False)
    return np.asarray(state.params["w"]), history["loss"]


def loader():
    x = torch.randn(500, 8, generator=torch.Generator().manual_seed(0))
    rows = torch.utils.data.TensorDataset(x, x @ torch.arange(8.0)[:, None])
    return torch.utils.data.DataLoader(rows, 32, shuffle=True, generator=torch.Generator().manual_seed(1))


same = loader()  # its order goes on from epoch to epoch
batches = [tuple(part.numpy() for part in batch) for _ in range(3) for batch in same]
w, losses = trained(loader(), epochs=3)
w_of_list, losses_of_list = trained(batches, steps=48)
assert len(losses) == 48 and losses[-1] < losses[0] / 2, losses
np.testing.assert_array_equal(w, w_of_list)
np.testing.assert_array_equal(losses, losses_of_list)
print("equal, bit by bit")
