"""The API for a training loop of one's own: ``elastic_ft.init``. See docs/bring-your-own.md."""
