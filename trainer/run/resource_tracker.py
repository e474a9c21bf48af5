"""Python's resource tracker for the workers of Ray. Each of them imports this module when it starts: keep it light."""

import os
import subprocess
import sys
from multiprocessing import resource_tracker

TRACKER = "import os; os.fork() and os._exit(0); from multiprocessing.resource_tracker import main; main({})"


def start_tracker() -> None:
    """Start the tracker of Python's multiprocessing for this worker of Ray and for its children. It removes what they
    leave in /dev/shm, when the last of them has ended. An orphan in a session of its own: Ray would kill it too early.
    """
    reader, writer = os.pipe()
    command = [sys.executable, "-c", TRACKER.format(reader)]
    subprocess.run(command, pass_fds=[reader], start_new_session=True, check=True)
    os.close(reader)
    resource_tracker._resource_tracker._fd = writer  # as multiprocessing does in the processes that it starts
