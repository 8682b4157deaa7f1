"""Check the rules of docs/environment.md in a class of your own.

python -m environments.check MODULE:CLASS --env-option NAME=VALUE
"""

import argparse

import envs
from environments.guard import options_of
from environments.rules import check
from qlass import flags


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m environments.check", description=__doc__.split("\n")[0])
    parser.add_argument("env", metavar="MODULE:CLASS")
    parser.add_argument("--env-option", type=flags.option, action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    args = parser.parse_args(argv)
    env = envs.make(args.env, **options_of(envs.environment_class(args.env), args.env_option)[1])
    for text in check(env):
        print(f"{env.name}: {text}")


if __name__ == "__main__":
    flags.run_stage(main)
