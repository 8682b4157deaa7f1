"""What the stages share."""


class UserError(Exception):
    """A mistake that its message says how to fix; the scripts print that one line and exit with code 2."""
