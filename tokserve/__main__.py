"""`python -m tokserve` and the `tokserve` script.  Until there is anything to clean up, a signal simply ends it."""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # imports take a while, and Ctrl-C must not print a traceback

from tokserve.cli.main import main  # noqa: E402

if __name__ == "__main__":
    main()
