"""elastic_ft on plain processes, told on stdin what a cluster does: ``run_processes.py JOB OUT``.

Lines: ``kill NODE``, ``drain NODE SECONDS``, ``add``.
"""

from __future__ import annotations

import itertools
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from elastic_ft.config import load_job
from elastic_ft.controller.controller import Controller
from elastic_ft.hosts.local import LocalHost
from elastic_ft.observe.run_folder import RunFolder


def obey(host: LocalHost) -> None:
    names = (f"added{i}" for i in itertools.count())
    for line in sys.stdin:
        match line.split():
            case ["kill", node]:
                host.kill_node(node)
            case ["drain", node, seconds]:
                host.drain_node(node, time.time() + float(seconds))
            case ["add"]:
                host.add_node(next(names), 1)


def main() -> None:
    job, out = load_job(sys.argv[1]), sys.argv[2]
    host = LocalHost({f"n{i}": 1 for i in range(job.elastic.max_workers)})
    folder = RunFolder(out)
    controller = Controller(job, host, folder, f"{folder.url}/checkpoints")
    signal.signal(signal.SIGTERM, lambda *_: controller.stop("measured"))
    threading.Thread(target=obey, args=(host,), daemon=True).start()
    controller.run()


if __name__ == "__main__":
    main()
