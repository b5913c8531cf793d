"""The one exception for mistakes the user can fix."""


class UsageError(Exception):
    """Bad input from the user.

    Its text is one line that names the thing, the place and the fix. The command line prints that line without a
    traceback and exits with status 2.
    """
