"""The errors that end a run with one line for the user, besides `rlhf_utils.WeightSyncError`."""


class UserError(Exception):
    """An error whose message tells the user enough: no traceback is shown."""


class RunError(UserError, RuntimeError):
    """The run cannot start or continue."""


class EngineError(UserError, RuntimeError):
    """An engine cannot start. The message is what vLLM has logged."""


class TaskError(UserError, ValueError):
    """Prompts, a reward, a tool or an environment that cannot be used."""


class MismatchError(UserError, RuntimeError):
    """Engine and trainer disagree about the log-probabilities of the same tokens."""
