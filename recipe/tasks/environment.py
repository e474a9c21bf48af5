"""An instance of a user's environment, in a thread of its own, and the event loops of this process."""

import asyncio
import inspect
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache, partial

NOT_TOOLS = ("reset", "get_reward")  # of an environment's methods


@cache
def event_loop(name: str = "users") -> asyncio.AbstractEventLoop:
    """One for all coroutines of users, since clients of web services belong to a loop; and one for each other name."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


class Environment:
    """The tools of one conversation at a time: functions, and the methods of an instance that `factory` makes, if there
    is one. It has a thread of its own, because a database's connection belongs to one."""

    def __init__(self, factory: Callable | None, functions: list[Callable], pool: list["Environment"]):
        self.pool, self.lost = pool, False  # lost: a call has not returned in time
        self.jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()
        self.instance = self.begin(factory).result() if factory else None
        members = inspect.getmembers(type(self.instance), inspect.isfunction)  # of the class: no property is evaluated
        names = [name for name, _ in members if name not in NOT_TOOLS and not name.startswith("_")]
        self.tools = {tool.__name__: tool for tool in [*functions, *(getattr(self.instance, name) for name in names)]}

    def begin(self, function: Callable, /, **arguments) -> Future:
        """Call a function in this environment's thread, or a coroutine function in the event loop of all."""
        if inspect.iscoroutinefunction(function):

            async def call():  # wrong arguments are the call's error, too
                return await function(**arguments)

            return asyncio.run_coroutine_threadsafe(call(), event_loop())
        future = Future()
        self.jobs.put(partial(_run, partial(function, **arguments), future))
        return future

    def release(self) -> None:
        """Let another conversation have it, unless it is lost."""
        if self.lost:
            self.jobs.put(None)
        else:
            self.pool.append(self)

    def _work(self) -> None:
        while job := self.jobs.get():
            job()


def _run(call: Callable, future: Future) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except BaseException as error:  # also an exit: it is for the one who waits
        odd = isinstance(error, StopIteration) or not isinstance(error, Exception)  # an event loop does not take it
        future.set_exception(RuntimeError(f"{type(error).__name__}: {error}") if odd else error)
