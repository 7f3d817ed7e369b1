"""``python -m elastic_ft.cli``."""

from elastic_ft.cli.app import main

main()
