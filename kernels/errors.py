"""The one exception for what a person got wrong."""


class UserError(ValueError):
    """A mistake in the input: the message is one line that says what, where and how to mend it.

    The command line prints it without a traceback and ends with exit code 2.
    """
