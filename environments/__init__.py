"""The environments behind `envs.py`: an engine, its data, its players and its `TextEnv`, a folder each.

No model and no stage of the pipeline is needed here, so that a folder can be lifted into another project.
"""


class UserError(Exception):
    """A mistake that its message says how to fix; the scripts print that one line and exit with code 2."""
