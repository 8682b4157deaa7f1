"""The whole of QLASS on one page: all five stages on a frozen lake of sixteen cells, without files, flags or batches.

    python -m docs.whole    # a quarter of a minute on one core

Equations 5, 7, 9, 10 and 11, Algorithms 2 and 3, and Algorithm 4 with N = 1 are written out. Imported are the
environment and the player of its steps, a tiny Llama with its tokenizer, the rendering of a state as tokens, pi(a | s),
which samples among the valid actions, and the order and rate of updates. The five scripts do the same with resume,
batches and any model. A test holds this page to them: the same trees, Q-values and rewards.
"""

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import envs
from qlass.batching import Candidate, ask
from qlass.chat import Chat, Rendering
from qlass.messages import State, parse_action, replay, start, step
from qlass.policy import Policy
from qlass.tiny import AIDS, tiny_model
from qlass.training import cosine, updates_of

SEED = 3
GAMMA = 0.9  # of Eq. (7)
DEPTH, WIDTH = 2, 2  # D and W of Algorithm 2
ROLLOUTS = 6  # in a tree at most, half of them before the demonstration
STEPS = 8  # at which an episode of the agent is stopped
M = 4  # candidates at each step of the search

env = envs.make("frozenlake", map="4x4")


def executed(action: str) -> str:
    """The part of an action that the environment executes: actions that share it are one child."""
    return env.canonical(parse_action(action))


def distinct(drawn: list[Candidate]) -> list[str]:
    """The first of each group of actions that the environment executes alike."""
    first: dict[str, str] = {}
    for candidate in drawn:
        first.setdefault(executed(candidate.text), candidate.text)
    return list(first.values())


def optimise(model: nn.Module, lr: float, n: int, batch: int, epochs: int, backward: Callable) -> None:
    """AdamW with a short warm-up and a cosine of the rate. backward: adds the gradient of an update's mean loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.0)
    # Each example has size 1, so that an update has `batch` of them.
    updates = [update for epoch in range(epochs) for update in updates_of([1] * n, batch, SEED, epoch)]
    model.train()
    for number, update in enumerate(updates):
        optimizer.param_groups[0]["lr"] = lr * cosine(number, len(updates))
        backward(update)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


# ------------------------------------------------------------------------------- 1. behaviour cloning (Eq. 5), sft.py

# Each move of a demonstration is (action, the state that it leads to, reward, done); the first one is the start.
demonstrations = {task: list(replay(env, task)) for task in env.task_ids("train")}
trajectories = [moves[-1].state.prefix(-1) for moves in demonstrations.values()]  # up to the last action

torch.manual_seed(SEED)
model, tokenizer = tiny_model(text for trajectory in trajectories for _, text in trajectory.messages)
chat = Chat(tokenizer, Rendering(**AIDS, markov=env.markov))

examples: list[tuple[list[int], list[int]]] = []  # tokens of s_t, and of the expert's a_t
for trajectory in trajectories:
    for n in chat.aids.example_ends(trajectory):
        prompt, action = chat.message_tokens(trajectory.prefix(n))  # the last observation is all of s_t here
        examples.append((prompt, action))


def clone(update: list[int]) -> None:
    # In the order of the scripts, which batch examples of like length: a sum's rounding depends on it.
    batch = sorted((examples[i] for i in update), key=lambda example: -len(example[0] + example[1]))
    targets = sum(len(action) for _, action in batch)
    for prompt, action in batch:
        logits = model(input_ids=torch.tensor([prompt + action])).logits[0, len(prompt) - 1 : -1]
        loss = cross_entropy(logits, torch.tensor(action), reduction="sum")  # Eq. (5): -sum_t log pi(a_t | s_t)
        (loss / targets).backward()


optimise(model, lr=3e-3, n=len(examples), batch=7, epochs=6, backward=clone)
agent = Policy(model, chat, SEED)


def draw(state: State, n: int, key: tuple, temperature: float) -> list[Candidate]:
    """a ~ pi(a | s), n times; `env` must be in s. Random numbers depend on SEED, the key and the candidate's number."""
    return agent.sample([ask(env, state, n, key, chat.rendering, temperature)])[0]


# ------------------------------------------------------------------- 2. exploration trees (Algorithm 2), build_trees.py


@dataclass(eq=False)
class Node:
    """An action, and the state that it led to."""

    state: State
    snapshot: Any
    depth: int = 0
    action: str = ""
    reward: float = 0.0
    done: bool = False
    rollouts: int = 0
    children: dict[str, "Node"] = field(default_factory=dict)
    q: float = 0.0

    def subtree(self) -> list["Node"]:
        """This node and all below it, parents first."""
        return [self] + [node for child in self.children.values() for node in child.subtree()]


def explore(task: str) -> Node:
    """Algorithm 2: the tree of a task."""
    branches = 0

    def add(node: Node, action: str, state: State, reward: float, done: bool) -> Node:
        child = Node(state, env.snapshot(), node.depth + 1, action, reward, done)
        node.children[executed(action)] = child
        return child

    def rollout(node: Node) -> list[Node]:  # lines 7-8
        branch = [node]
        draws = 3  # of the first action, to find a new child
        while not node.done and node.depth < STEPS:
            env.restore(node.snapshot)
            drawn = draw(node.state, draws, (task, branches, node.depth), temperature=1.0)
            new = [a.text for a in drawn if executed(a.text) not in node.children]
            action = new[0] if new else drawn[0].text
            child = node.children.get(executed(action))
            node = child or add(node, action, *step(env, node.state, action))
            branch.append(node)
            draws = 1
        return branch

    def process_queue(bound: int) -> None:  # lines 4-10
        nonlocal branches
        while queue and branches < bound:
            node = queue.popleft()  # line 5
            expandable = node.depth <= DEPTH and len(node.children) < WIDTH  # line 6
            if expandable and not node.done and node.rollouts < WIDTH + 2:  # as some find no new child
                branches += 1
                node.rollouts += 1
                branch = rollout(node)
                if branch[-1].reward:  # line 9
                    queue.extend(branch)  # line 10; `node` again, so that it can get more children

    root = Node(start(env, task), env.snapshot())  # lines 1-2
    queue = deque([root])  # line 3
    process_queue(ROLLOUTS // 2)
    branches += 1  # the demonstration is one, and no rollout
    branch = [root]
    moves = replay(env, task)
    next(moves)  # the start
    for move in moves:  # line 11: the demonstration joins the tree
        child = branch[-1].children.get(executed(move.action))
        branch.append(child or add(branch[-1], *move))
    queue.extendleft(reversed(branch))  # line 12
    process_queue(ROLLOUTS + 1)  # line 13
    return root


# In the scripts' order of --tasks new: from the far end, as an agent is cloned from the tasks at the beginning.
trees = {task: explore(task) for task in reversed(env.task_ids("train"))}

# ------------------------------------------------------------------------- 3. Q-values (Eq. 7, Algorithm 3), bellman.py

for root in trees.values():
    for node in reversed(root.subtree()):  # from the leaves to the root
        best = max((child.q for child in node.children.values()), default=0.0)
        node.q = node.reward + GAMMA * best  # Eq. (7): Q(s, a) = r + gamma max_a' Q(s', a')
    values = [node.q for node in root.subtree()]
    low, high = min(values), max(values)
    for node in root.subtree():  # min-max within the tree; all 0 if all are equal
        node.q = (node.q - low) / (high - low) if high > low else 0.0

# -------------------------------------------------------------------------------- 4. QNet (Eq. 9 to 11), train_qnet.py


class QNet(nn.Module):
    """Q(s, a): the agent's own language model, and a value head on each token."""

    def __init__(self, backbone: Any, hidden: int = 1024) -> None:
        super().__init__()
        self.backbone = backbone
        size = backbone.config.hidden_size
        self.head = nn.Sequential(  # Eq. (10)
            nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def forward(self, state: State, action: str) -> torch.Tensor:
        """The value V of each token of (s, a), (T,). The last one's is Q(s, a)."""
        ids = torch.tensor([chat.pair(state, action)])
        hidden = self.backbone(input_ids=ids).last_hidden_state  # Eq. (9): h_1 .. h_T, (1, T, D)
        return self.head(hidden)[0, :, 0]


torch.manual_seed(SEED)
qnet = QNet(copy.deepcopy(model.base_model))
pairs: list[tuple[State, str, float]] = []  # (s, a, q); a node's children are its actions
for root in list(trees.values())[1:]:  # the scripts hold the first one out, to see how QNet ranks siblings
    parents = {child: node for node in root.subtree() for child in node.children.values()}
    pairs += [(parents[node].state, node.action, node.q) for node in root.subtree()[1:]]


def regress(update: list[int]) -> None:
    for state, action, q in (pairs[i] for i in update):
        loss = (qnet(state, action) - q).square()  # (T,); Eq. (11) is its mean, loss.mean()
        (loss[-1] / len(update)).backward()  # a tiny model learns more from the last token alone


optimise(qnet, lr=1e-3, n=len(pairs), batch=16, epochs=2, backward=regress)

# -------------------------------------------------------------------- 5. Q-guided generation (Algorithm 4), q_search.py


@torch.inference_mode()
def episode(task: str, m: int, temperature: float) -> float:
    """One episode. Returns its reward."""
    state = start(env, task)  # line 3
    reward, done, t = 0.0, False, 0
    while not done and t < STEPS:  # line 4
        actions = distinct(draw(state, m, (task, 0, t), temperature))  # lines 5-6
        values = [float(qnet(state, action)[-1]) for action in actions]  # line 7: Q(s, a)
        action = actions[values.index(max(values))]  # line 8: argmax_a Q(s, a)
        state, reward, done = step(env, state, action)  # lines 9-10
        t += 1
    return reward


rewards = {
    "greedy": [episode(task, m=1, temperature=0.0) for task in env.task_ids("test")],
    "qlass": [episode(task, m=M, temperature=1.0) for task in env.task_ids("test")],
}
if __name__ == "__main__":
    nodes = sum(len(root.subtree()) for root in trees.values())
    print(f"{len(demonstrations)} demonstrations, {len(trees)} trees of {nodes} nodes, {len(pairs)} pairs of (s, a)")
    for name, outcomes in rewards.items():
        print(f"{name}: mean reward {sum(outcomes) / len(outcomes):.3f} over {len(outcomes)} test tasks")
