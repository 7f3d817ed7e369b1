"""The runtime on plain processes of this machine, no Ray: tests, debugging, a single GPU box.

A launcher per run forks workers, keepers and controllers (``launcher``), from a process that has
imported what they need (``warm``). The controller asks it over a socket (``local_host``).
"""

from elastic_ft.hosts.local.local_host import LocalHost as LocalHost
from elastic_ft.hosts.local.run_local import run_local as run_local
