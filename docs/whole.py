"""The whole of QLASS on one page: all five stages on a frozen lake of sixteen cells, without files, flags or padding.

    python docs/whole.py    # a quarter of a minute on one core

Equations 5, 7, 9, 10 and 11, Algorithms 2 and 3, and Algorithm 4 with N = 1 are written out. Imported are the
environment and the player of its steps, a tiny Llama with its tokenizer, the rendering of a state as tokens,
pi(a | s), which samples among the valid actions, and the order and rate of updates. The five scripts do the same with
resume, batches and any model. A test holds this page to them: the same trees, Q-values and rewards. `make check`
trains QNet for 40 epochs on this lake, in place of two: QLASS earns 0.750 there and 0.500 here.
"""

import copy
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).parents[1]))  # the root of this code, from where the next lines import

import envs
from qlass.batching import ask
from qlass.chat import Chat, Rendering
from qlass.messages import State, parse_action, replay, start, step
from qlass.policy import Policy
from qlass.tiny import AIDS, tiny_model
from qlass.training import cosine, updates_of

SEED = 3
GAMMA = 0.9  # of Eq. (7)
DEPTH, WIDTH = 2, 2  # D and W of Algorithm 2
ROLLOUTS = 6  # in a tree at most, half of them before the demonstration
LOSS_ON = "last"  # tokens of (s, a); "all" is the paper's, but a tiny model learns more from the last one alone
STEPS = 8  # at which an episode of the agent is stopped
M = 4  # candidates at each step of the search
env = envs.make("frozenlake", map="4x4")


def executable(action: str) -> str:
    """The part of an action that the environment executes: actions that share it are one child."""
    return env.canonical(parse_action(action))


def train(model: nn.Module, examples: list, loss_of: Callable, lr: float, batch: int, epochs: int) -> None:
    """AdamW with a short warm-up and a cosine of the learning rate. loss_of: the mean loss of an update's examples."""
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.0)
    updates = [update for epoch in range(epochs) for update in updates_of([1] * len(examples), batch, SEED, epoch)]
    for number, update in enumerate(updates):
        loss_of([examples[i] for i in update]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = lr * cosine(number, len(updates))
        optimizer.step()
        optimizer.zero_grad()


# ------------------------------------------------------------------------------- 1. behaviour cloning (Eq. 5), sft.py

# Each move of a demonstration is (action, the state that it leads to, reward, done); the first one is the start.
demonstrations = {task: list(replay(env, task)) for task in env.task_ids("train")}
trajectories = [moves[-1].state.prefix(-1) for moves in demonstrations.values()]  # up to the last action

torch.manual_seed(SEED)
model, tokenizer = tiny_model(text for trajectory in trajectories for _, text in trajectory.messages)
chat = Chat(tokenizer, Rendering(**AIDS, markov=env.markov))

# Tokens of s_t, which here are those of the last observation, and of the expert's a_t.
examples = [chat.message_tokens(state.prefix(n)) for state in trajectories for n in chat.aids.example_ends(state)]


def cloning_loss(batch: list[list[list[int]]]) -> torch.Tensor:
    """Eq. (5), -sum_t log pi(a_t | s_t), per token of the expert's actions; ()."""
    losses = []
    for prompt, action in batch:
        logits = model(input_ids=torch.tensor([prompt + action])).logits[0, len(prompt) - 1 : -1]
        losses.append(cross_entropy(logits, torch.tensor(action), reduction="sum"))
    return torch.stack(losses).sum() / sum(len(action) for _, action in batch)


train(model, examples, cloning_loss, lr=3e-3, batch=7, epochs=6)
agent = Policy(model, chat, SEED)


def draw(state: State, n: int, key: tuple, temperature: float) -> list[str]:
    """a ~ pi(a | s), n times; `env` must be in s. Random numbers depend on SEED, the key and the candidate's number."""
    (candidates,) = agent.sample([ask(env, state, n, key, chat.rendering, temperature)])
    return [candidate.text for candidate in candidates]


# ------------------------------------------------------------------- 2. exploration trees (Algorithm 2), build_trees.py


@dataclass(eq=False)
class Node:
    """An action, and the state that it led to."""

    state: State
    snapshot: tuple
    depth: int = 0
    parent: "Node | None" = None
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
        child = Node(state, env.snapshot(), node.depth + 1, node, action, reward, done)
        node.children[executable(action)] = child
        return child

    def rollout(node: Node) -> list[Node]:  # lines 7-8
        branch = [node]
        while not node.done and node.depth < STEPS:
            env.restore(node.snapshot)
            n = 3 if len(branch) == 1 else 1  # more draws of the first action, to find a new child
            drawn = draw(node.state, n, (task, branches, node.depth), temperature=1.0)
            new = [action for action in drawn if executable(action) not in node.children]
            action = new[0] if new else drawn[0]
            child = node.children.get(executable(action))
            node = child or add(node, action, *step(env, node.state, action))
            branch.append(node)
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
    for move in replay(env, task):  # line 11: the demonstration joins the tree
        if move.action:  # else it is the start
            child = branch[-1].children.get(executable(move.action))
            branch.append(child or add(branch[-1], *move))
    queue.extendleft(reversed(branch))  # line 12
    process_queue(ROLLOUTS + 1)  # line 13
    return root


# In the scripts' order of --tasks new: from the far end, as an agent is cloned from the tasks at the beginning.
trees = {task: explore(task) for task in reversed(env.task_ids("train"))}

# ------------------------------------------------------------------------- 3. Q-values (Eq. 7, Algorithm 3), bellman.py

for nodes in (root.subtree() for root in trees.values()):
    for node in reversed(nodes):  # from the leaves to the root
        best = max((child.q for child in node.children.values()), default=0.0)
        node.q = node.reward + GAMMA * best  # Eq. (7): Q(s, a) = r + gamma max_a' Q(s', a')
    low, high = min(node.q for node in nodes), max(node.q for node in nodes)
    for node in nodes:  # min-max within the tree; all 0 if all are equal
        node.q = (node.q - low) / (high - low) if high > low else 0.0

# -------------------------------------------------------------------------------- 4. QNet (Eq. 9 to 11), train_qnet.py


class QNet(nn.Module):
    """Q(s, a): the agent's own language model, and a value head on each token."""

    def __init__(self, backbone: nn.Module, hidden: int = 1024) -> None:
        super().__init__()
        self.backbone = backbone
        size = backbone.config.hidden_size
        self.head = nn.Sequential(  # Eq. (10)
            nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def forward(self, state: State, action: str) -> torch.Tensor:
        """The value V of each token of (s, a), (T,). The last one's is Q(s, a)."""
        ids = torch.tensor([chat.pair(state, action)])
        states = self.backbone(input_ids=ids).last_hidden_state  # Eq. (9): h_1 .. h_T, (1, T, D)
        return self.head(states)[0, :, 0]


torch.manual_seed(SEED)
qnet = QNet(copy.deepcopy(model.base_model))
# (s, a, q) of all trees but every tenth, from the first on, by which the scripts see how QNet ranks siblings.
training_set = [node for number, root in enumerate(trees.values()) if number % 10 for node in root.subtree()]
pairs = [(node.parent.state, node.action, node.q) for node in training_set if node.parent]


def q_loss(batch: list[tuple[State, str, float]]) -> torch.Tensor:
    """The mean of Eq. (11) over pairs, ()."""
    losses = []
    for state, action, q in batch:
        errors = qnet(state, action) - q  # (T,)
        errors = errors[-1:] if LOSS_ON == "last" else errors
        losses.append(errors.square().mean())  # Eq. (11): 1/n sum_j (V_j - q)^2 over n tokens of (s, a)
    return torch.stack(losses).mean()


train(qnet, pairs, q_loss, lr=1e-3, batch=16, epochs=2)

# -------------------------------------------------------------------- 5. Q-guided generation (Algorithm 4), q_search.py


@torch.inference_mode()
def episode(task: str, m: int, temperature: float) -> float:
    """One episode. Returns its reward."""
    state = start(env, task)  # line 3
    reward, done, t = 0.0, False, 0
    while not done and t < STEPS:  # line 4
        drawn = draw(state, m, (task, 0, t), temperature)  # lines 5-6
        distinct = [a for i, a in enumerate(drawn) if executable(a) not in map(executable, drawn[:i])]
        q = {action: float(qnet(state, action)[-1]) for action in distinct}  # line 7: Q(s, a)
        action = max(q, key=q.__getitem__)  # line 8: argmax_a Q(s, a)
        state, reward, done = step(env, state, action)  # lines 9-10
        t += 1
    return reward


size = sum(len(root.subtree()) for root in trees.values())
print(f"{len(demonstrations)} demonstrations, {len(trees)} trees of {size} nodes, {len(pairs)} pairs of (s, a)")
rewards = {}
for name, m, temperature in (("greedy", 1, 0.0), ("qlass", M, 1.0)):
    rewards[name] = [episode(task, m, temperature) for task in env.task_ids("test")]
    print(f"{name}: mean reward {sum(rewards[name]) / len(rewards[name]):.3f} over {len(rewards[name])} test tasks")
