"""The driver of a sweep whose trials never come to an end. To be killed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import PopulationBasedTraining
from test_tune import trial


class Told(tune.Callback):
    """Of first results: whose process each is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any) -> None:
        found = self.folder / f"pid-{trial.config['rate']}"
        if not found.exists():
            unfinished = found.with_suffix(".unfinished")
            unfinished.write_text(str(result["pid"]))
            unfinished.replace(found)


def main() -> None:
    """Prints the errors of the trials, if it comes to that."""
    address, folder, kind, *rates = sys.argv[1:]
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    scheduler = None
    if kind == "pbt":
        mutations = {"rate": [0.1, 0.2]}
        scheduler = PopulationBasedTraining("training_iteration", hyperparam_mutations=mutations)
    found = tune.Tuner(
        tune.with_resources(trial, {"CPU": 0.5}),
        param_space={"rate": tune.grid_search([*map(float, rates)]), "folder": folder},
        tune_config=tune.TuneConfig(metric="score", mode="max", scheduler=scheduler),
        run_config=tune.RunConfig(name=kind, storage_path=folder, callbacks=[Told(Path(folder))]),
    ).fit()
    print(json.dumps([str(error) for error in found.errors]))


if __name__ == "__main__":
    main()
