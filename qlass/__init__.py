"""What the stages share."""


class UserError(Exception):
    """A mistake that its message says how to fix; scripts print that line and exit with code 2."""
