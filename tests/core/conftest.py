"""Property tests draw new examples every run; a failure prints the blob that replays it."""

from hypothesis import settings

settings.register_profile("core", derandomize=False, print_blob=True, deadline=None)
settings.load_profile("core")


def pytest_report_header() -> str:
    return "hypothesis: replay a failure with its @reproduce_failure blob or --hypothesis-seed"
