"""A driver: submits a job to a cluster and waits for its end. To be killed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ray
from ray.train import RunConfig

from elastic_ft.hosts.ray.trainer import ElasticTrainer


def main() -> None:
    address, values, folder = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    config = RunConfig(name=folder.name, storage_path=str(folder.parent))
    ElasticTrainer(values, run_config=config).fit()


if __name__ == "__main__":
    main()
