"""Python that a model wrote, in a process of its own with a limit of time and memory.

It has no variables of the environment, as they may hold keys. That is no sandbox: the code can read and write what its
user can. Ask a model whose scripts you would run.
"""

import json
import math
import subprocess
import sys

PROGRAM = """
import json, os, resource, sys
results = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the function prints is no result
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
name, source, calls = json.load(sys.stdin)
scope = {}
exec(source, scope)
for arguments in calls:
    try:
        value = float(scope[name](*arguments))
    except Exception:
        value = float("nan")
    print(value, file=results, flush=True)
"""


def values(name: str, source: str, calls: list[tuple], seconds: float = 10) -> list[float | None]:
    """What the source's function of this name gives for each tuple of arguments. None where it raises, gives no finite
    number, or comes too late: all calls together have so many seconds."""
    command, text = [sys.executable, "-I", "-c", PROGRAM], json.dumps([name, source, calls])
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "env": {}}
    try:
        printed = subprocess.run(command, input=text.encode(), timeout=seconds, **options).stdout
    except subprocess.TimeoutExpired as late:
        printed = late.stdout or b""
    numbers = [float(line) for line in printed.split()] + [math.nan] * len(calls)
    return [number if math.isfinite(number) else None for number in numbers[: len(calls)]]
