"""Optional methods of an environment: `envs.TextEnv` derives from `Hooks`.

Stages, experiments and tables call them. Each has a default, so that a class of your own names only those that it can
serve.
"""

from collections.abc import Callable, Iterator

from gymnasium.utils import seeding

from qlass import UserError


class Hooks:
    """The defaults. The caller of a player (an iterator of (thought, action)) steps the environment between two."""

    omniscient = False  # the expert knows what no page has shown: tables call it an oracle

    # Of the stages.

    def info(self) -> dict:
        """The report of `reset` and `step` beside the observation."""
        actions = self.valid_actions()
        return {"task_id": self.task_id, "task": self.task, "valid_actions": actions}

    def instruct(self, instruction: str) -> None:
        """Begin with another first user message."""
        self.instruction = instruction

    def task_type(self, task_id: str) -> str:
        """The kind of task, where an environment has several: tables have a row for each."""
        return ""

    def canonical(self, action: str) -> str:
        """One form for all texts that the engine takes for the same action, in whatever state.

        They are one child of a node, and one candidate of a search.
        """
        return action

    def knows(self, action: str) -> bool:
        """True if it would act on this text now."""
        valid = self.valid_actions()
        return not valid or self.canonical(action) in map(self.canonical, valid)

    def reward_if_cut(self) -> float:
        """The reward if a limit of steps stops the episode here."""
        return 0.0

    def expert(self, task_id: str) -> Iterator[tuple[str, str]]:
        """A player that knows the task and the pages shown so far, unless it is `omniscient`."""
        raise UserError(f"{self.name} has no expert: --expert FILE, or --no-expert")

    def candidates(self) -> list[tuple[str, str]]:
        """(thought, action) of every valid action in the state at hand, for `--candidates valid`.

        A thought says only what follows from the task, the pages so far and the valid actions.
        """
        return [("", action) for action in self.valid_actions()]

    def reseed(self, seed: int) -> None:
        """Use other random numbers from here on. A restored state brings its own."""
        self.np_random, _ = seeding.np_random(seed)

    def step_limit(self) -> int | None:
        """The number of the step that ends the episode at hand at the latest; None: it goes on."""
        return self.max_steps

    def published_id(self, record: dict) -> str | None:
        """Our id of the task of a record of ETO's files; None: only its words tell the task."""
        return None

    def in_own_words(self, text: str) -> str:
        """A message of a published demonstration in the words of this environment."""
        return text

    # Of experiments and tables.

    def subject(self, task_id: str) -> str:
        """The subject of a task: an agent that learned one task of a subject knows the others."""
        return task_id

    def block(self, task_id: str) -> str:
        """Tasks of one block vary together: intervals count blocks, by default subjects."""
        return self.subject(task_id)

    def picture(self, observation: str) -> str:
        """The picture that `reporting.show` draws below an observation."""
        return ""

    def oracle(self, task_id: str) -> Iterator[tuple[str, str]]:
        """The best player there is. It may know what no page has shown."""
        return self.expert(task_id)

    def rules(self) -> dict[str, Callable[[], Iterator[tuple[str, str]]]]:
        """Players that learn nothing, by name: what a trained agent has to beat."""
        return {}

    def optimal_value(self, gamma: float = 0.99) -> float:
        """The best discounted outcome still in reach."""
        raise UserError(f"{self.name}: has no oracle for the value of a state")
