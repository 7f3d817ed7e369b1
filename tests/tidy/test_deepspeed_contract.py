"""Every private name of DeepSpeed that ``engines.deepspeed_private`` uses is there.

In a process of its own: DeepSpeed changes environment and globals when it is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tidy.test_layering import ROOT, imports_of

NAMES = (
    "deepspeed.ops:__compatible_ops__",
    "deepspeed.comm.comm:cdb",
    "deepspeed.comm:init_distributed",
    "deepspeed.utils.groups:_WORLD_GROUP",
    "deepspeed.utils.groups:_release_process_group_references",
    "deepspeed.runtime.config:DeepSpeedConfig",
    "deepspeed.runtime.engine:DeepSpeedEngine._broadcast_model",
    "deepspeed.runtime.engine:DeepSpeedEngine.destroy",
    "deepspeed.runtime.engine:DeepSpeedEngine.get_global_grad_norm",
    "deepspeed.runtime.engine:DeepSpeedEngine.set_gradient_accumulation_boundary",
    "deepspeed.runtime.zero.partition_parameters:Init._zero_init_param",
    "deepspeed.runtime.zero.partition_parameters:Init.param_id",
    "deepspeed.runtime.zero.partition_parameters:Init._convert_to_deepspeed_param",
    "deepspeed.runtime.zero.partition_parameters:InsertPostInitMethodToModuleSubClasses",
    "deepspeed.runtime.zero.partition_parameters:zero_init_context",
    "deepspeed.runtime.zero.partition_parameters:top_level_context",
    "deepspeed.runtime.zero.partition_parameters:empty_buffers",
    "deepspeed.runtime.zero.partition_parameters:temp_contiguous_tensor",
    "deepspeed.runtime.zero.parameter_offload:FWD_MODULE_STACK",
    "deepspeed.runtime.zero.parameter_offload:"
    "DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__",
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.update_lp_params",
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.override_loss_scale",
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3._unflatten_partitioned_parameters",
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.override_loss_scale",
    "deepspeed.runtime.superoffload.superoffload_stage3:SuperOffloadOptimizer_Stage3",
)
ATTRIBUTES = {  # of instances: written in the source
    "deepspeed.runtime.zero.stage_1_and_2": ["single_partition_of_fp32_groups", "bit16_groups"],
    "deepspeed.runtime.zero.stage3": [
        "fp32_partitioned_groups_flat",
        "fp16_partitioned_groups_flat",
        "fp16_groups",
        "sub_group_to_group_id",
        "persistent_parameters",
    ],
    "deepspeed.runtime.engine": [
        "module_forward_pre_hook",
        "module_forward_post_hook",
        "param_names",
        "basic_optimizer",
    ],
}
LOOK = """
import functools, importlib, inspect, json, sys
names, attributes = json.loads(sys.argv[1])
missing = []
for path in names:
    module, _, name = path.partition(":")
    try:
        functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (AttributeError, ImportError) as error:
        missing.append(f"{path}: {error}")
for module, wanted in attributes.items():
    source = inspect.getsource(importlib.import_module(module))
    missing += [f"{module}: self.{n}" for n in wanted if f"self.{n}" not in source]
print(json.dumps(missing))
"""


def test_private_names_are_there() -> None:
    arguments = [sys.executable, "-W", "ignore", "-c", LOOK, json.dumps([NAMES, ATTRIBUTES])]
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


@pytest.mark.parametrize("path", sorted((ROOT / "elastic_ft").rglob("*.py")), ids=str)
def test_only_one_module_imports_deepspeed(path: Path) -> None:
    if path.name == "deepspeed_private.py":
        return
    found = [n for _, n in imports_of(path) if n.partition(".")[0] == "deepspeed"]
    assert not found, f"{path.name} imports {', '.join(found)}; put it into deepspeed_private.py"
