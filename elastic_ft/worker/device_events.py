"""What the driver says of this worker's GPU: errors that no retry in any process cures.

A GPU that has failed need not fail the call that waits for it: a kernel stays where it is, and all
ranks wait for it in their collectives, at one place. The driver knows whose it is (Xid errors, over
NVML), at once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

WAIT_MS = 10_000  # for one event; then the same again

# Xid errors after which a GPU has to be reset, or its machine, as "Xid Errors" (docs.nvidia.com,
# r570) says. What a program does wrong itself (13, 31, 43, 45, 68, 109) its own calls raise, and
# contained errors of memory (94) those of who was hit; 63 and 92 are notes.
FATAL_XIDS = {
    46: "the GPU has stopped processing",
    48: "double bit ECC error",
    61: "breakpoint or warning of the internal micro-controller",
    62: "the internal micro-controller has halted",
    64: "rows of memory can't be remapped",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    95: "uncontained memory error",
    110: "security fault",
    119: "the GPU's system processor does not answer",
    120: "error of the GPU's system processor",
    136: "link training has failed",
    140: "unrecovered ECC error",
    143: "the GPU could not be initialised",
    155: "NVLink software error",
    156: "memory has been retired, the GPU needs a reset",
}

log = logging.getLogger(__name__)


class DeviceEvents(threading.Thread):
    """Waits for the driver's word on one GPU, for as long as this process lives.

    Without ``nvidia-ml-py``, or where the driver gives no events (some virtual GPUs), nothing is
    watched, and a line in the log says so: the GPU's errors then show where its calls fail.
    """

    def __init__(self, uuid: str, sick: Callable[[str], object]) -> None:
        """``sick``: called at most once, from this thread, with what has happened."""
        super().__init__(name="device-events", daemon=True)
        self._uuid, self._sick = uuid, sick

    def run(self) -> None:
        try:
            import pynvml  # type: ignore[import-untyped]
        except ImportError as error:
            log.warning("%s is not watched for errors of its own: %s", self._uuid, error)
            return
        try:
            what = self._wait(pynvml)
        except pynvml.NVMLError as error:
            log.warning("%s is not watched for errors of its own: NVML: %s", self._uuid, error)
            return
        self._sick(f"{self._uuid}: {what}")

    def _wait(self, nvml: Any) -> str:
        """Returns what has made the GPU useless. Raises NVMLError where it can't be watched."""
        nvml.nvmlInit()
        gpu = nvml.nvmlDeviceGetHandleByUUID(self._uuid)
        wanted = nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError
        wanted &= nvml.nvmlDeviceGetSupportedEventTypes(gpu)
        if not wanted:
            raise nvml.NVMLError_NotSupported()
        events = nvml.nvmlEventSetCreate()
        nvml.nvmlDeviceRegisterEvents(gpu, wanted, events)
        while True:
            try:
                event = nvml.nvmlEventSetWait_v2(events, WAIT_MS)
            except nvml.NVMLError_Timeout:
                continue
            except nvml.NVMLError_GpuIsLost:
                return f"Xid 79, {FATAL_XIDS[79]}"
            if event.eventType == nvml.nvmlEventTypeDoubleBitEccError:
                return f"Xid 48, {FATAL_XIDS[48]}"
            if event.eventData in FATAL_XIDS:
                return f"Xid {event.eventData}, {FATAL_XIDS[event.eventData]}"
            log.warning("%s: Xid %d", self._uuid, event.eventData)


def watch_device(device: torch.device, sick: Callable[[str], object]) -> None:
    """Has ``sick`` told once ``device``, a GPU, can be used no more."""
    DeviceEvents(f"GPU-{torch.cuda.get_device_properties(device).uuid}", sick).start()
