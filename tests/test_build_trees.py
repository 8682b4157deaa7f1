"""Algorithm 2 on a written world: the exact tree that scripted agents must grow, and what holds for any agent."""

from pathlib import Path

import pytest
from fakes import FIRST, WORLD, FakeEnv, Script, explore, path_of, run, say, write
from hypothesis import given, settings
from hypothesis import strategies as st

from build_trees import EXTRA_DRAWS, EXTRA_ROLLOUTS, Explorer
from experiments.compare import Player
from qlass.chat import Rendering
from qlass.demonstrations import Demonstration, demonstrate
from qlass.files import meta_of
from qlass.messages import State, parse_action, replay
from qlass.trees import tree_records


def shown(*actions):
    """A demonstration of these actions."""
    state = FIRST
    for action in actions:
        state = state.extended(action, "hm")
    return Demonstration("train0", State(state.messages[:-1]), 1.0)


FREE = Rendering(temperature=0.9)


def grow(script, *limits, world=WORLD, **more):
    """Nodes as {path: (reward, source, branch)}, requests as (path, n), the root, and the environment."""
    env = FakeEnv(world)
    tree = explore(env, "train0", FREE, *limits, **more)
    root, asked = run(tree, script if callable(script) else Script(script))
    nodes = {path_of(n.state): (n.reward, n.source, n.branch) for n in root.subtree()}
    return nodes, [(path_of(r.state), r.n) for r in asked], root, env


L, R, LL, LR, RL, RR = ("left",), ("right",), ("left", "left"), ("left", "right"), ("right", "left"), ("right", "right")
NEW = 1 + EXTRA_DRAWS  # draws for the first step of a branch

SCRIPT = {(): "left left right", L: "right left", LR: "left", R: "left right right right", RR: "left"}


def test_algorithm_2_by_hand():
    nodes, asked, _, _ = grow(SCRIPT, with_expert=True)
    assert asked == [
        # 1: from the root; of left, left, right the first. It ends with .5: the root and L are pushed.
        ((), NEW), (L, 1), (LR, 1),
        # 2: the root again; left is known, right is not. It ends with .4: the root and R are pushed.
        ((), NEW), (R, 1),
        # 3: L; of left, right, left the first is new. It ends with 0: nothing is pushed.
        (L, NEW),
        # The root is popped, and is full. 4: R; right is new, and leads to 0.
        (R, NEW), (RR, 1),
        # 5 is the expert's, who meets R and RR on the way. The root and R are pushed, and are full.
    ]  # fmt: skip
    assert nodes == {
        (): (0.0, "root", 0),
        L: (0.0, "policy", 1), LR: (0.0, "policy", 1), (*LR, "left"): (0.5, "policy", 1), LL: (0.0, "policy", 3),
        R: (0.0, "policy", 2), RL: (0.4, "policy", 2), RR: (0.0, "policy", 4), (*RR, "left"): (0.0, "policy", 4),
        (*RR, "right"): (1.0, "expert", 5),
    }  # fmt: skip


def test_pruned_by_its_tail_a_branch_that_fails_is_gone_on_with_where_it_began():
    nodes, asked, _, _ = grow({(): "left right", L: "left right", LR: "left"}, depth=2, prune="tail")
    # Left, left is worth 0: the root and L are pushed. The root again: right, left is worth .4. L: right, left, .5.
    assert asked[:6] == [((), NEW), (L, 1), ((), NEW), (R, 1), (L, NEW), (LR, 1)]
    assert nodes[(*LR, "left")] == (0.5, "policy", 3)


def test_the_second_pass_expands_the_experts_branch():
    nodes, asked, root, _ = grow({RR: "right"}, width=3, with_expert=True)
    assert asked[:2] == [((), NEW), (L, 1)]  # the first pass as above; then the root and R of the expert's branch
    assert asked[2:4] == [((), NEW), (L, 1)]  # no new child is found: the tree is as it was, the branch is worth 0
    assert asked[4] == (R, NEW)
    assert nodes[RL] == (0.4, "policy", 4) and nodes[(*RR, "right")] == (1.0, "expert", 2)
    # R scores, so it is pushed again, though it finds no third child: that ends after W + EXTRA_ROLLOUTS rollouts.
    assert asked[5:] == [(R, NEW)] * (3 + EXTRA_ROLLOUTS - 1)
    assert root.children["left"].rollouts == 0 and root.children["right"].rollouts == 3 + EXTRA_ROLLOUTS


def test_under_a_bound_the_experts_nodes_come_before_what_the_first_pass_left():
    _, asked, _, _ = grow(SCRIPT, width=3, rollouts=4, with_expert=True)
    # Two branches as by hand above leave L, the root and R in the queue. The expert's root and R come before L.
    assert [ask for ask in asked[5:] if ask[1] == NEW] == [((), NEW), (R, NEW)]


def test_the_expert_branch_is_the_demonstration_where_there_is_one():
    mine = ["Thought: mine, not Action: right\nAction: left", "<think>Action: left</think>\nright", "Action: left"]
    expert = {"train0": shown(*mine), "other": shown("Action: right")}
    _, _, root, _ = grow({(): "right", R: "left"}, 0, 1, 0, expert=expert)
    assert [path_of(n.state) for n in root.subtree() if n.demonstrated] == [L, LR, (*LR, "left")]
    assert root.children["left"].action == mine[0]


@pytest.mark.parametrize(("steps", "source"), [(2, "expert"), (3, "policy")])
def test_a_demonstration_goes_on_where_the_agent_was_cut(steps, source):
    """Both go right; the third step ends the episode, also where it is the agent's last."""
    world = {"right": {"right": {"right": 1.0}}}
    nodes, _, root, _ = grow(lambda r: say("right"), 0, 1, 1, True, world=world, steps=steps)
    ends = [(n.done, n.demonstrated) for n in root.subtree()]
    assert ends == [(False, False), (False, True), (False, True), (True, True)]
    assert nodes[(*RR, "right")] == (1.0, source, 2 if source == "expert" else 1)


@pytest.mark.parametrize(
    ("recorded", "limit", "played"),
    [
        (RR, 5, 2),
        ((*RR, "right"), 1, 3),  # recorded with more steps than there are now
        ((*RL, "left"), 5, 2),
    ],
)
def test_recorded_actions_are_played_to_their_end(recorded, limit, played):
    """Beyond the limit of steps, which holds again afterwards, and never behind the episode's end."""
    env = FakeEnv(max_steps=limit)
    moves = replay(env, "train0", [f"Action: {action}" for action in recorded])
    assert [path_of(move.state) for move in moves] == [recorded[:n] for n in range(played + 1)]
    assert (env.path, env.max_steps) == (recorded[:played], limit)


def test_behind_the_agents_limit_no_branch_begins():
    """The demonstration has three steps, the agent's limit is one: it branches at the root alone."""
    world = {"right": {"right": {"right": 1.0, "left": 0.2}, "left": 0.2}, "left": 0.2}
    _, asked, root, _ = grow(lambda r: say("left", "right", "left")[: r.n], 5, 2, 9, True, world=world, steps=1)
    assert {path for path, _ in asked} == {()}
    assert [(n.source, n.rollouts) for n in root.subtree() if n.depth > 1] == [("expert", 0)] * 2


def test_where_the_agent_is_cut_counts_what_the_environment_pays(monkeypatch):
    """Also for a second rollout, which follows the first to the limit without a step of the environment."""
    monkeypatch.setattr(FakeEnv, "reward_if_cut", lambda self: 0.25 if self.path == RR else 0.0)
    explorer = Explorer(FakeEnv(), "train0", FREE, 0, 2, 2, max_steps=2)
    root, _ = run(explorer.explore(None), Script({(): "right", R: "right"}))
    assert explorer.rewards == [0.25] * 2
    *_, end = tree_records(FakeEnv(), "train0", root, [])
    assert (end["reward"], end["done"], end["source"]) == (0.25, True, "policy") and "cut" not in end
    # The same where the demonstration was there first; it goes on to 1.
    world = {"right": {"right": {"right": 1.0}}, "left": 0.2}
    _, _, root, _ = grow({(): "left left left right right right", R: "right"}, 0, 3, 2, True, world=world, steps=2)
    end = root.children["right"].children["right"]
    assert (end.source, end.reward_at_limit, end.reward, end.done) == ("expert", 0.25, 0.0, False)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_demonstration_that_stops_early_earns_what_the_environment_pays_there(monkeypatch, depth):
    """As a player does; the agent may go on from its end, to .25."""
    monkeypatch.setattr(FakeEnv, "expert", lambda self, task_id: iter([("this way", "right")]))
    monkeypatch.setattr(FakeEnv, "reward_if_cut", lambda self: 0.5 if self.path == R else 0.0)
    assert demonstrate(FakeEnv(), "train0")["reward"] == 0.5
    (step,) = Player("expert").episode(FakeEnv(), "train0")
    assert step.reward == 0.5
    world = {"right": {"left": 0.25}, "left": 0.0}
    *_, root, _ = grow(lambda r: say(*["left"] * r.n), depth, 2, 4, True, world=world)
    lines = tree_records(FakeEnv(), "train0", root, [])
    (end,) = [line for line in lines if line["expert"]]
    below = [line["reward"] for line in lines if line["parent_id"] == end["node_id"]]
    own = {"reward": 0.0, "done": False, "cut": 0.5} if depth else {"reward": 0.5, "done": True}
    assert own.items() <= end.items() and below == [0.25] * depth


def test_the_expert_plays_under_the_limit_of_the_environment(monkeypatch):
    monkeypatch.setattr(FakeEnv, "max_steps", 2)
    world = {"left": 0.0, "right": {"right": {"right": 1.0}}}
    nodes, *_ = grow({(): "left"}, 0, 1, 1, True, world=world)
    assert nodes.keys() == {(), L, R, RR}


def test_texts_that_the_environment_takes_for_the_same_are_one_child(monkeypatch):
    """The first branch begins with LEFT, the second with the right of left, LEFT, right; tau_0 with the first child."""
    step = FakeEnv.step
    monkeypatch.setattr(FakeEnv, "canonical", lambda self, action: action.lower())
    monkeypatch.setattr(FakeEnv, "step", lambda self, action: step(self, action.lower()))
    told = {"train0": shown("Action: left", "Action: left")}
    _, asked, root, env = grow({(): "LEFT left right left LEFT right"}, depth=0, expert=told)
    assert [path for path, n in asked if n == NEW] == [()] * 2
    assert [parse_action(child.action) for child in root.children.values()] == ["LEFT", "right"]
    assert root.children["left"].demonstrated
    assert env.played.count(("train0", "left")) == 2  # by the agent once, and by the demonstration


worlds = st.recursive(
    st.sampled_from([0.0, 0.3, 1.0]), lambda w: st.dictionaries(st.sampled_from("abc"), w, min_size=1), max_leaves=12
).filter(lambda w: isinstance(w, dict))


@settings(max_examples=60, deadline=None)
@given(worlds, st.integers(0, 3), st.integers(1, 3), st.integers(1, 12), st.booleans(), st.randoms(),
       st.sampled_from(["branch", "tail"]))  # fmt: skip
def test_what_holds_for_any_world_and_agent(world, depth, width, rollouts, with_expert, random, prune):
    def answer(request):
        return say(*(random.choice(["a", "b", "c", "A ", "jump"]) for _ in range(request.n)))

    nodes, asked, root, env = grow(answer, depth, width, rollouts, with_expert, prune, world=world)
    assert sum(n == NEW for _, n in asked) <= rollouts
    assert all(len(path) <= depth for path, n in asked if n == NEW)
    assert len({b for _, _, b in nodes.values()} - {0}) <= rollouts + with_expert
    for node in root.subtree():
        assert node.rollouts <= width + EXTRA_ROLLOUTS
        if node.depth or node.children:  # a path ends where the episode ends, or the agent at its limit
            assert bool(node.children) != (node.done or node.reward_at_limit is not None)
        assert not node.reward or node.done
        if node.parent:  # a demonstration that passes goes on in the words of the tree
            assert node.state.actions == (*node.parent.state.actions, node.action)
        # What the node says is what the world answers when its actions are played again.
        *_, end = replay(env, "train0", path_of(node.state))
        assert (end.state.observation, end.reward, end.done) == (node.state.observation, node.reward, node.done)
        assert len({parse_action(child.action) for child in node.children.values()}) == len(node.children)


# ---------------------------------------------------------------------------------------------------------- the file


def tasks_of(nodes):
    return list(dict.fromkeys(node["task_id"] for node in nodes))


def test_the_file_is_the_same_whatever_the_batch(build, monkeypatch):
    nodes, meta = build(), meta_of(Path("trees.jsonl"))
    rewards = [reward for node in nodes for reward in node.get("rollouts", [])]
    assert (meta["trees"], meta["nodes"], meta["rollouts"]) == (4, len(nodes), len(rewards))
    assert meta["mean_reward"] == pytest.approx(sum(rewards) / len(rewards))
    monkeypatch.setattr(FakeEnv, "side_by_side", 1)
    build(out="one.jsonl")
    assert Path("one.jsonl").read_bytes() == Path("trees.jsonl").read_bytes()
    assert build("--seed 1", out="other.jsonl") != nodes


@pytest.mark.parametrize(("flags", "own", "lowest"), [("", 5, 2), ("--steps 1", 5, 1), ("--steps 9", 1, 1)])
def test_new_tasks_are_the_last_ones_and_the_agent_keeps_the_lowest_step_limit(flags, own, lowest, build, monkeypatch):
    monkeypatch.setattr(FakeEnv, "tree_steps", 2)
    monkeypatch.setattr(FakeEnv, "max_steps", own)
    nodes = build(f"--no-expert {flags}")
    assert tasks_of(nodes) == ["train5", "train4", "train3", "train2"]
    assert max(node["depth"] for node in nodes) == lowest
    assert {node["source"] for node in nodes} == {"root", "policy"}


def test_trees_of_the_cloned_tasks_have_their_demonstrations(build, capsys):
    """In the order of the environment; of two demonstrations of a task that of the higher reward."""
    ways = [("train3", "right", 0.5), ("train3", "left", 0.1), ("train1", "right", 1.0), ("test1", "right", 1.0)]
    lines = [
        {"task_id": task, "messages": shown(f"Action: {action}").state.dump(), "reward": reward}
        for task, action, reward in ways
    ]
    write("mine.jsonl", lines)
    nodes = build("--tasks cloned --expert mine.jsonl")
    assert tasks_of(nodes) == ["train1", "train3"]
    assert [node["action"] for node in nodes if node["expert"]] == ["Action: right"] * 2  # not the expert's own way
    # They lack their ends.
    assert "another reward than recorded in 2 of 2 demonstrations" in capsys.readouterr().err


def test_a_root_has_its_page_alone_where_a_task_completes_the_instruction(build, monkeypatch):
    def begin(env, task_id):
        env.path, env.instruction = (), "walk on: "
        return env._look()

    monkeypatch.setattr(FakeEnv, "begin", begin)
    monkeypatch.setattr(FakeEnv, "agreement", "")
    root, *_ = build("--limit 1")
    assert root["observation"] == "you stand at start"
