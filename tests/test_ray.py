"""Training on a real local Ray: plain actors, and Ray Train."""

import json
import sys

import numpy as np
import pytest
from tests.programs import processes
from tsunax.distributed import ray as ts_ray
from tsunax.errors import MissingLibraryError


@pytest.mark.filterwarnings("ignore")
def test_ray_train(ray, tmp_path):
    from ray.train import RunConfig

    def train(config):
        import ray.train
        import tsunax as ts

        ts.distributed.start()  # as the script would under mpirun: it has been
        found = processes.losses()
        ray.train.report({"loss": found[-1]})
        with open(f"{config['folder']}/{ts.distributed.process_index()}", "w") as file:
            json.dump(found, file)

    run = RunConfig(storage_path=str(tmp_path / "ray"))
    result = ts_ray.trainer(train, 2, config={"folder": str(tmp_path)}, start={"timeout": 60}, run_config=run).fit()
    assert result.error is None
    zero, one = (json.loads((tmp_path / str(i)).read_text()) for i in range(2))
    assert zero == one
    np.testing.assert_allclose(zero, processes.losses(), rtol=1e-5)


def test_without_ray(monkeypatch):
    for name in [*(name for name in sys.modules if name.startswith("ray.")), "ray", "ray.train", "ray.train.v2"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingLibraryError, match=r"pip install 'ray\[train,tune\]>=.*the extra 'ray'"):
        ts_ray.trainer(processes.losses, 2)
