"""The job file: typed, units in names, unknown keys refused. One source of configuration.

``load_job(path)`` and ``Job.model_validate(dict)`` are the only ways in; ``parse_job`` turns
pydantic's findings into one line (``ConfigError``). The resolved job is saved with the run.
"""

from elastic_ft.config.comm import CommConfig as CommConfig
from elastic_ft.config.elastic import SnapshotConfig as SnapshotConfig
from elastic_ft.config.job import Job as Job
from elastic_ft.config.job_file import load_job as load_job
from elastic_ft.config.job_file import parse_job as parse_job
from elastic_ft.config.job_file import parse_text as parse_text
from elastic_ft.config.job_file import parse_yaml as parse_yaml
from elastic_ft.config.parallel import ParallelConfig as ParallelConfig
from elastic_ft.config.trained import DataConfig as DataConfig
from elastic_ft.config.trained import LoopConfig as LoopConfig
from elastic_ft.config.trained import LoraSection as LoraSection
from elastic_ft.config.trained import ModelConfig as ModelConfig
from elastic_ft.config.trained import OptimizerConfig as OptimizerConfig
from elastic_ft.config.trained import ParameterGroup as ParameterGroup
