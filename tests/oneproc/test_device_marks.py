"""How far a GPU has come, told by its events; here by ones that are over when the test says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elastic_ft.faults import Points
from elastic_ft.worker.device_marks import DeviceMarks

UNKNOWN = -1


class Device:
    """What is queued on it is over up to ``passed``."""

    def __init__(self) -> None:
        self.queued = self.passed = 0
        self.lost = False

    def event(self) -> Any:
        device = self

        class Event:
            def record(self) -> None:
                device.queued += 1
                self.number = device.queued

            def query(self) -> bool:
                if device.lost:
                    raise torch.AcceleratorError("CUDA error: unspecified launch failure")
                return self.number <= device.passed

        return Event()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    monkeypatch.setattr(torch.cuda, "Event", found.event)
    return found


@pytest.fixture
def points() -> Points:
    return Points("w0", (), lambda index: None)


def step(marks: DeviceMarks, model: nn.Sequential, micro_batches: int = 2) -> None:
    marks.begin()
    for _ in range(micro_batches):
        model(torch.ones(2, 4)).sum().backward()


def test_what_a_gpu_has_still_to_compute_of_a_step(device: Device, points: Points) -> None:
    """Each layer's forward and backward; how many there are, the step before has shown."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    marks = DeviceMarks(list(model), points)
    assert marks.left() == UNKNOWN
    step(marks, model)
    assert marks.left() == UNKNOWN
    marks.end()
    device.passed = device.queued
    step(marks, model)
    assert marks.left() == 12
    device.passed += 5
    assert marks.left() == 7
    device.lost = True
    assert marks.left() == 7
    device.lost, device.passed = False, device.queued
    assert marks.left() == 0
    marks.end()
    with torch.no_grad():
        model(torch.ones(2, 4))  # an evaluation is no part of a step
    step(marks, model)
    assert marks.left() == 12


def test_nothing_stays_on_modules_that_outlive_a_generation(device: Device, points: Points) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    marks = DeviceMarks(list(model), points)
    assert points.layers_left == marks.left
    marks.close()
    step(marks, model)
    assert device.queued == 0 and points.layers_left() == UNKNOWN


def test_layers_that_return_several_values_are_marked_once_each_way(
    device: Device, points: Points
) -> None:
    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[None, torch.Tensor]:
            return None, super().forward(x)

    layer = Layer(4, 4)
    marks = DeviceMarks([layer], points)
    marks.begin()
    layer(torch.ones(2, 4))[1].sum().backward()
    marks.end()
    marks.begin()
    assert marks.left() == 2
