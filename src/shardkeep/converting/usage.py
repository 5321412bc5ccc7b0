"""The error for requests that cannot be carried out."""


class UsageError(Exception):
    """A command line that cannot be carried out. The message says what to change."""
