"""The task in other words, so that each of the M candidates of a step is sampled under its own wording (App. A.3.2).

A chat model words it (--paraphrase-server of experiments.compare), which is asked in our words for what the paper
describes; wording 0 is the task itself. Nothing checks the answers, as nothing does in the paper.
"""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence

from integrations.servers import Remote, Server
from q_search import Episode, Method
from qlass import UserError
from qlass.batching import Candidate, Sample
from qlass.chat import Chat
from qlass.messages import State
from qlass.results import environment_tokens
from qlass.settings import Sampling
from qlass.tiny import sentence

Reworder = Callable[[str, int], str]  # (task, wording's index) -> wording

ROOM = 200  # tokens of a wording
PROMPT = (
    "Say the following shopping request in other words. Keep all that it asks for: the product, its attributes, each "
    "option with its value, numbers, units and the price limit. Answer with the new request alone, in one line.\n\n"
)


def reword(state: State, wording: str) -> State:
    """The state as it would be if its task had been worded like this: in the user's messages, and not in the agent's.
    UserError if the first of them do not say the task."""
    if wording == state.task:
        return state
    pattern = sentence(state.task)
    begin = state.messages[: state.opening + 1]  # the instruction and the first observation
    if not any(pattern.search(text) for role, text in begin if role == "user"):
        problem = "does not stand in the first messages, as a sentence of its own: leave --paraphrase-server out"
        raise UserError(f"the task {state.task!r:.60} {problem}")
    messages = []
    for role, text in state.messages:
        if role == "user":
            text = pattern.sub(lambda _: wording, text)
        messages.append((role, text))
    return State(tuple(messages), wording, state.opening)


@dataclasses.dataclass(frozen=True)
class Reworded(Candidate):
    wording: str = ""  # that it was sampled under


def under_wordings(sample: Callable, reworder: Reworder) -> Callable:
    """Return a function that answers `Sample` requests as `sample` does, candidate k of trial n under wording n M + k
    of the task. A process asks for each wording once."""
    reworder = functools.cache(reworder)

    def parts_of(request: Sample) -> list[Sample]:
        """One request for each wording; a request's key is (task, trial, step)."""
        first = request.key[1] * request.n
        counts = Counter(reworder(request.state.task, first + k) for k in range(request.n))
        parts = []
        for wording, n in counts.items():
            key = request.key if wording == request.state.task else (*request.key, wording)
            parts.append(dataclasses.replace(request, state=reword(request.state, wording), n=n, key=key))
        return parts

    def answer(requests: list[Sample]) -> list[list[Candidate]]:
        parts = list(map(parts_of, requests))
        drawn = iter(sample(list(itertools.chain(*parts))))
        answers = []
        for several in parts:
            answers.append([])
            for part in several:
                answers[-1] += [Reworded(**vars(c), wording=part.state.task) for c in next(drawn)]
        return answers

    return answer


def by_server(url: str, timeout: int = Sampling.timeout) -> Reworder:
    """Wordings by an OpenAI-compatible chat server; where it says nothing, the task's own."""
    server = Server(url, timeout=timeout)
    text = Remote(
        lambda asked: server.text([("user", PROMPT + asked[0])], temperature=0.7, max_tokens=ROOM, seed=asked[1])
    )

    def ask(task: str, index: int) -> str:
        if index == 0:
            return task
        (wording,) = text([(task, index)])
        return " ".join(wording.split()).strip("\"' ") or task

    return ask


def counted(method: Method) -> Method:
    """The same method, whose lines count the tokens of all wordings that the agent reads."""

    class Worded(type(method)):
        def outcome(self, chat: Chat, best: Episode, episodes: list[Episode]) -> dict:
            outcome = super().outcome(chat, best, episodes)
            outcome["tokens"]["prompt"] = prompt_tokens(chat, episodes)
            return outcome

    return Worded(**vars(method))


def prompt_tokens(chat: Chat, episodes: Sequence[Episode]) -> int:
    """Tokens that the policy reads for `Reworded` draws, as `results.costs_of` counts them with one wording. Of
    several, the task's own alone has the agent's words in the cache; each other one reads the full conversation."""
    cached = []
    again = 0
    for steps in episodes:
        states = [step.state for step in steps]
        last = states[-1]
        wordings = {candidate.wording for step in steps for candidate in step.samples}
        alone = wordings if len(wordings) == 1 else wordings & {last.task}
        cached += [reword(state, wording) for state in states for wording in alone]
        again += sum(len(chat.prompt(reword(last, wording))) for wording in wordings - alone)
    return environment_tokens(chat, cached) + again
