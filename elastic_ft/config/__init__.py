"""The job file: typed, units in names, unknown keys refused. One source of configuration.

``load_job(path)`` and ``Job.model_validate(dict)`` are the only ways in; ``parse_job`` turns
pydantic's findings into one line (``ConfigError``). The resolved job is saved with the run.
"""

from elastic_ft.config.comm import CommConfig
from elastic_ft.config.elastic import SnapshotConfig
from elastic_ft.config.job import Job
from elastic_ft.config.job_file import load_job, parse_job, parse_text, parse_yaml
from elastic_ft.config.parallel import ParallelConfig
from elastic_ft.config.trained import (
    DataConfig,
    LoopConfig,
    LoraSection,
    ModelConfig,
    OptimizerConfig,
    ParameterGroup,
)
