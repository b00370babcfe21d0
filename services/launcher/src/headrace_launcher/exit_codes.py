"""Exit codes of `headrace`. 2, by argparse and settings: a wrong command line or setting."""

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_NOT_RUNNING = 3
