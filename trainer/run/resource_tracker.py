"""The working folder of Ray's workers, and Python's resource tracker for them. Each of them imports this module when it
starts: keep it light."""

import os
import subprocess
import sys
from contextlib import suppress
from multiprocessing import resource_tracker

WORKING_FOLDER = "RLHF_WORKING_FOLDER"  # a variable of the workers' environment
TRACKER = "import os; os.fork() and os._exit(0); from multiprocessing.resource_tracker import main; main({})"


def set_up_worker() -> None:
    """Take the run's working folder for this worker's, if it is on this machine. Its modules are found last: none takes
    the place of a package, as it would with Ray's own order."""
    folder = os.environ[WORKING_FOLDER]
    with suppress(OSError):
        os.chdir(folder)
    sys.path.append(folder)
    start_tracker()


def start_tracker() -> None:
    """Start the tracker of Python's multiprocessing for this worker of Ray and for its children. It removes what they
    leave in /dev/shm, when the last of them has ended. An orphan in a session of its own: Ray would kill it too early.
    """
    reader, writer = os.pipe()
    command = [sys.executable, "-c", TRACKER.format(reader)]
    env = os.environ | {"RAY_RAYLET_PID": ""}  # by which a session finds the processes that it has to end
    subprocess.run(command, pass_fds=[reader], start_new_session=True, check=True, env=env)
    os.close(reader)
    resource_tracker._resource_tracker._fd = writer  # as multiprocessing does in the processes that it starts
