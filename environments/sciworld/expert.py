"""ScienceWorld's experts: the simulator's own solutions as ReAct, and a choice among its thousands of valid actions.

thought, candidates    ReAct's reason for an action; the valid actions that are worth a look
expert_plan            a solution in fewer steps, proved by replay
"""

import collections
import functools
import itertools
import re
from collections.abc import Iterable

from .simulator import AMBIGUOUS, UNKNOWN, Task, simulators

# ------------------------------------------------------------------------------------------------- actions and thoughts
# What one would say before an action; {0} and {1} are its objects. The reason is the verb's, right or wrong.
REASONS = {
    "look around": "I need to see what is here.",
    "inventory": "I need to see what I hold.",
    "teleport to": "The {0} may have what I need.",
    "look at": "I want to know more about the {0}.",
    "focus on": "The task may be about the {0}.",
    "pick up": "I can use the {0}.",
    "put down": "I do not need to hold the {0}.",
    "move": "The {0} should be at the {1}.",
    "pour": "The {0} should be in the {1}.",
    "use": "I try the {0} on the {1}.",
    "mix": "What is in the {0} may react.",
    "connect": "The circuit may need the {0} joined to the {1}.",
    "open": "Something may be in the {0}.",
    "activate": "The {0} should be on.",
    "deactivate": "The {0} should be off.",
    "read": "The {0} may tell what to do.",
    "wait1": "This takes time.",
    "wait": "This takes a long time.",
}
_ACTION = re.compile(rf"({'|'.join(REASONS)})(?: (.*))?")
_OBJECTS = {verb: reason.count("{") for verb, reason in REASONS.items()}
_SECOND = {"move": " to ", "pour": " into ", "use": " on ", "connect": " to "}
AMONG = 60  # candidates
EXPLORES = {"pick up", "open", "activate", "deactivate", "read"}
SCENERY = {"agent", "air", "inventory", "door", "picture", "painting", "ground", "sewer", "drain"}
SCENERY |= {"kitchen", "foundry", "workshop", "bathroom", "outside", "living room", "bedroom", "greenhouse"}
SCENERY |= {"art studio", "hallway"}
CONTACTS = {"anode", "cathode", "terminal", "1", "2"}  # of batteries, lamps and wires: no page need name them


@functools.lru_cache(maxsize=100_000)
def parts(action: str) -> tuple[str, list[str]]:
    """ "move metal pot to sink" -> ("move", ["metal pot", "sink"]); ("", []) for an action of another form."""
    if match := _ACTION.fullmatch(action):
        objects = match[2].split(_SECOND.get(match[1], "\0"), 1) if match[2] else []
        if len(objects) == _OBJECTS[match[1]]:
            return match[1], objects
    return "", []


def thought(action: str) -> str:
    verb, objects = parts(action)
    return REASONS[verb].format(*objects) if verb else "Let me see what this does."


def words(text: str) -> str:
    """Its words between single blanks, so that whole words are found."""
    return f" {' '.join(re.findall(r'[a-z0-9]+', text.lower()))} "


@functools.lru_cache(maxsize=100_000)
def bare(name: str) -> str | None:
    """The words of an object's name without its place and contents; None for scenery."""
    name = re.split(r" in | on | containing ", name.lower())[0]
    scenery = name in SCENERY or name.startswith("door to") or name.endswith(" drain")
    return None if scenery else words(name)


def inventory_after(inventory: tuple[str, ...], observation: str) -> tuple[str, ...]:
    """The inventory as the agent has read it."""
    if observation.startswith("In your inventory, you see:"):
        return tuple(line.strip() for line in observation.splitlines()[1:])
    moved = re.fullmatch(r"You move the (.+) to the (.+)\.", observation.strip())
    if not moved:
        return inventory
    others = tuple(name for name in inventory if words(moved[1]) not in words(name))
    return (*others, moved[1]) if moved[2] == "inventory" else others


def candidates(valid: list[str], task: str, recent: str, inventory: str, here: str) -> list[str]:
    """At most AMONG of the valid actions, by a rule that knows what the agent has read: of what it holds, and here.

    Looking around, waiting and teleporting come first. Then the verbs take turns, each
    beginning with the objects that the task names (twice the weight), that the last turns spoke of, or that the agent
    holds; first what EXPLORES and what is done with such objects only, then the rest. Scenery is left out, as are
    things that the agent has not read of and the verbs that are not in REASONS.
    """
    texts = [(2, words(task)), (1, words(recent)), (1, words(inventory))]
    read = CONTACTS.union(words(f"{here} {inventory}").split())
    weight = functools.cache(lambda name: sum(w for w, text in texts if name in text))
    fixed, turns = [], collections.defaultdict(list)
    for action in valid:
        verb, objects = parts(action)
        names = [bare(name) for name in objects]
        if verb == "teleport to" or (verb and not names):
            fixed.append(action)
        elif verb and all(name and read.issuperset(name.split()) for name in names):
            weights = [weight(name) for name in names]
            later = verb not in EXPLORES and 0 in weights
            turns[later, verb].append((-sum(weights) / len(weights), action))
    order = [(later, turn, verb, a) for (later, verb), row in turns.items() for turn, (_, a) in enumerate(sorted(row))]
    return (fixed + [action for *_, action in sorted(order)])[:AMONG]


# ------------------------------------------------------------------------------------------------------------- experts
def shorten(gold: list[str], straight: bool, wait: bool) -> list[str]:
    """A solution in fewer steps: teleporting instead of walking, straight to where something is done (or room by room,
    where a room passed counts), with a look around on arrival and at what was opened; and waiting instead of looking
    again and again until something is hot or cold enough, or has come to rest."""
    text = re.sub(r"(?:open door to .*\n)?go to (.*)", r"teleport to \1", "\n".join(gold))
    if straight:
        text = re.sub(r"(?:teleport to .*\n(?:look around\n)*)+(?=teleport to)", "", text)
    text = re.sub(r"((?:teleport to |open (?!door)).*\n)(?!look around)", r"\1look around\n", text)
    text = re.sub(r"pour (.*) in(?:to)? \1(?:\n|$)", "", text)  # the simulator's way to test that it holds something
    if wait:
        again = re.compile(r"((?:examine|look at) .*\n(?:use thermometer .*\n)?)(\1{2,})")
        text = again.sub(lambda m: m[1] + "wait\n" * (1 + m[2].count("\n") // 10) + m[1], text)
    return text.splitlines()


def wordings(action: str) -> list[str]:
    """An action in the words of the simulator's own lists of valid actions, as far as they can be guessed; as it is."""
    plain = re.sub(r"^drop ", "put down ", re.sub(r"^examine ", "look at ", action)).replace(" in inventory", "")
    forms = [plain]
    if plain.startswith("pour "):
        forms = [f"{plain[: m.start()]} into {plain[m.end() :]}" for m in re.finditer(" in(?:to)? ", plain)]
    return list(dict.fromkeys([*forms, action]))


def expert_plan(task: Task) -> tuple[str, ...]:
    """The first form of the simulator's own solution, from the shortest to the original, that reaches the full score in
    a replay; else the one that scores most."""
    gold = simulators().ask(task, None, "solution", lambda simulator: simulator.load(task, gold=True))
    forms = [shorten(gold, True, True), shorten(gold, True, False), shorten(gold, False, False), gold]
    best: tuple[float, tuple[str, ...]] = (-1.0, ())
    for actions, listed in itertools.product(dict.fromkeys(map(tuple, forms)), (True, False)):
        if best[0] < 1:
            best = max(best, rehearse(task, actions, listed), key=lambda played: played[0])
    return best[1]


def rehearse(task: Task, actions: Iterable[str], listed: bool) -> tuple[float, tuple[str, ...]]:
    """Play a solution in the first wording of each action that is understood, and fits one object only; what does
    nothing is left out. Returns the best score and the actions up to the one that reached it.

    listed: if possible in the words of the list of valid actions, of which a player chooses.
    """
    played, inventory, best, length = (), (), 0.0, 0
    for action in actions:
        forms = wordings(action)
        if listed:
            valid = simulators().valid_actions(task, played, words(" ".join(inventory)))
            forms = [name for form in forms for name in in_listed_words(form, valid)] + forms
        for form in forms:
            turn, after = simulators().step(task, played, form)
            understood = not turn.observation.startswith(UNKNOWN)
            if understood and (form == forms[-1] or not turn.observation.startswith(AMBIGUOUS)):
                break
        played, inventory = after, inventory_after(inventory, turn.observation)
        if turn.score > best:
            best, length = turn.score, len(played)
        if turn.over:
            break
    return best, played[:length]


def in_listed_words(action: str, valid: list[str]) -> list[str]:
    """The valid action whose names are nearest to an action's: "anode in battery" is a "battery anode"."""
    verb, objects = parts(action)
    bags = [name_words(name) for name in objects]
    distance = {}
    for other in valid:
        if parts(other)[0] == verb:
            pairs = list(zip(bags, map(name_words, parts(other)[1]), strict=True))
            if all(ours <= theirs or theirs <= ours for ours, theirs in pairs):
                distance[other] = sum(len(ours ^ theirs) for ours, theirs in pairs)
    return [min(distance, key=distance.__getitem__)] if verb and distance else []


@functools.lru_cache(maxsize=100_000)
def name_words(name: str) -> frozenset[str]:
    return frozenset(words(name).split()) - {"in", "on"}
