"""`python -m tokserve` and the `tokserve` script.  Until there is something to clean up, a signal ends the process."""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # imports take a while, and Ctrl-C must not print a traceback

from tokserve.cli.main import main  # noqa: E402

if __name__ == "__main__":
    main()
