"""In place of ``service.local_nodes``: says who it is at an address of its own, and no more.

``service/stop`` ends the answers at once and the process a second later; of ``jobs: stop`` the
process stays.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from elastic_ft.service.local_nodes import FILE

OPTIONS = json.loads(sys.argv[1])
FOLDER, OVER = Path(OPTIONS["folder"]), threading.Event()


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        nothing = {"slots": {"used": 0, "all": 0}, "nodes": [], "queues": []}
        self.answer({"version": "0", "folder": str(FOLDER), "starts": os.getpid(), **nothing})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.shutdown()  # first: who asks after this answer finds nobody
        self.answer({"stopped": True})
        if asked["jobs"] == "keep":
            threading.Timer(1.0, OVER.set).start()

    def answer(self, what: dict[str, object]) -> None:
        content = json.dumps(what).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def main() -> None:
    with (FOLDER / "started").open("a") as file:
        file.write(f"{os.getpid()}\n")
    with ThreadingHTTPServer((OPTIONS["host"], OPTIONS["port"]), Answers) as server:
        url = f"http://{OPTIONS['host']}:{server.server_address[1]}"
        swap = FOLDER / f"{FILE}.{os.getpid()}"
        swap.write_text(json.dumps({"pid": os.getpid(), "url": url}))
        swap.replace(FOLDER / FILE)
        server.serve_forever()
    OVER.wait()


main()
