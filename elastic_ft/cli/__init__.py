"""``elastic-ft``, a command each in a file of its own."""

from elastic_ft.cli.app import main as main
