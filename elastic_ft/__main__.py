"""``python -m elastic_ft``."""

from elastic_ft.cli.app import main

main()
