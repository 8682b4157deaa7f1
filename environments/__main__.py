"""Play the rules of docs/environment.md in an environment: `python -m environments --env MODULE:CLASS`."""

import envs
from environments.check import check
from qlass.settings import Run, read_settings, run_stage


def main(argv: list[str] | None = None) -> None:
    env = envs.from_config(read_settings(Run, __doc__, argv))
    check(env)
    print(f"{env.name}: keeps the rules")


if __name__ == "__main__":
    run_stage(main)
