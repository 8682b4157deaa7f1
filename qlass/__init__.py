"""What the stages share."""


class UserError(Exception):
    """A mistake that its message says how to fix: a script prints it and ends with code 2."""
