"""Tree searches and retry on written worlds: what they find, when they stop, that they read no reward, their costs."""

import math
from pathlib import Path

import pytest
from fakes import WORLD, FakeEnv, Script, actions_of, path_of, refused, reverse, run, say, true_q, word_chat

import envs
from experiments import retry, tree_search
from experiments.retry import Reflect, Retry
from experiments.tree_search import TreeSearch
from q_search import Method
from qlass.batching import Candidate, Sample, Score
from qlass.messages import parse_action, react
from qlass.noise import uniforms
from reporting import results

CHAT, stage = word_chat(), tree_search
BOTH = Script({}, otherwise="left right")
PUCT = {"c": 1.0, "gamma": 0.9}
BLIND = [("lookahead", {"gamma": 0.9}), ("beam", {"k": 2}), ("mcts", {"S": 8} | PUCT)]


def written(table, otherwise=(0, 0)):
    """Scores of left and right by the path to a state."""

    def q(request):
        scores = table.get(path_of(request.state), otherwise)
        return [scores["right" in action] for action in request.actions]

    return q


# It knows a purse when it stands before it; from afar all that is left seems better.
short_sighted = written(
    {("left",): (0.0, 0.3), ("left", "right"): (0.5, 0.2), ("right",): (0.4, 0.3), ("right", "right"): (0.0, 1.0)},
    otherwise=(0.6, 0.3),
)


def by_key(request):
    return say(*("left" if uniforms(1, *request.key, k)[0] < 0.5 else "right" for k in range(request.n)))


def answer(q=true_q, draw=BOTH):
    return lambda request: draw(request) if isinstance(request, Sample) else q(request)


def play(name, M=2, N=1, q=true_q, draw=BOTH, env=None, task="test0", seed=0, **settings):
    """The line of a search, its actions, the environment, and the requests one by one."""
    env = env or FakeEnv()
    method = TreeSearch(name, M=M, N=N, select="q", own=tuple(settings.items()), seed=seed)
    reply = answer(q, draw)
    record, asked = run(method.play(env, task, CHAT), lambda together: list(map(reply, together.items)))
    requests = [request for together in asked for request in together.items]
    return record, actions_of(record), env, requests


@pytest.mark.parametrize("q", [true_q, short_sighted])
@pytest.mark.parametrize(("name", "settings"), [("mcts", {"S": 1} | PUCT), ("beam", {"k": 1})])
def test_one_expansion_a_step_is_qlass(name, settings, q):
    record, *_ = play(name, q=q, draw=by_key, **settings)
    expected, _ = run(Method("qlass", "q", M=2).play(FakeEnv(), "test0", CHAT), answer(q, by_key))
    assert (record["restores"], record["env_steps_replayed"]) == (0, record["env_steps"])
    assert record | expected == record


@pytest.mark.parametrize(("name", "settings"), BLIND)
def test_a_value_that_is_not_finite_ends_a_search(name, settings):
    with refused("scores are not finite"):
        play(name, q=written({}, otherwise=(math.nan, 0.3)), **settings)


def test_actions_that_mean_nothing_are_counted(monkeypatch):
    monkeypatch.setattr(FakeEnv, "knows", lambda env, action: action == "left")
    record, path, *_ = play("lookahead", q=written({(): (0.1, 0.9), ("right",): (0.9, 0.1)}), gamma=0.9)
    assert record["unknown_actions"] == path.count("right") > 0


def test_enough_simulations_find_the_best_leaf():
    assert play("mcts", q=short_sighted, S=60, c=2.0, gamma=0.95)[1] == ("right", "right", "right")


def test_the_texts_of_an_action_share_its_prior(monkeypatch):
    monkeypatch.setattr(FakeEnv, "canonical", lambda self, action: action.lower())
    drawn = [Candidate(text, 1, math.log(p)) for text, p in (("left", 0.2), ("LEFT", 0.1), ("right", 0.1))]
    assert tree_search.priors(FakeEnv(), drawn, ["left", "right"]) == pytest.approx([0.75, 0.25])


@pytest.mark.parametrize(("gamma", "first"), [(0.9, "left"), (1.0, "right")])
def test_a_leaf_counts_less_the_deeper_it_is(gamma, first):
    """Left pays .5 at once, right .52 a step later."""
    env = FakeEnv({"left": 0.5, "right": {"left": 0.52, "right": 0.52}})
    q = written({(): (0.5, 0.5), ("right",): (0.52, 0.52)})
    assert play("mcts", q=q, env=env, S=30, c=1.0, gamma=gamma)[1][0] == first


def test_look_ahead_ranks_by_the_next_page():
    q = written({(): (0.9, 0.1), ("left",): (0.2, 0.3), ("right",): (0.5, 0.4), ("right", "right"): (0.1, 0.2)})
    record, path, env, _ = play("lookahead", q=q, gamma=0.9)
    # left: .9 * .3, right: .9 * .5; then left: .5, an end, so by Q itself; right: .9 * .2
    assert path == ("right", "left") and record["reward"] == 0.4
    assert [[c["q"] for c in step["candidates"]] for step in record["steps"]] == [[0.27, 0.45], [0.5, 0.18]]
    # Four looks and two steps. Restores: to the root twice (its second look, the step), to `right` twice, at depth 1.
    assert record["env_steps"] == len(env.played) == 6
    assert (record["restores"], record["env_steps_replayed"], record["resets"]) == (4, 8, 1)
    # Four states with two draws of three tokens each; test_q_search.py says how many tokens a page has.
    assert record["tokens"] == {"prompt": 3 + 6 + 8 + 8 + 9, "generated": 4 * 2 * 3, "scored": 34 + 4 * 2 * 5}


def test_a_wider_beam_keeps_what_seems_worse_at_first():
    q = written({(): (0.9, 0.1), ("left",): (0.2, 0.1), ("right",): (0.3, 0.8), ("right", "right"): (0.1, 0.95)})
    assert play("beam", q=q, k=1)[1][0] == "left"
    record, path, env, _ = play("beam", q=q, k=2)
    assert path == ("right", "right", "right") and record["env_steps"] == len(env.played) == 2 + 2 + 2


def test_particles_at_infinite_tau_are_independent_chains():
    chains = Method("best_of_n", N=4, select="q").play(FakeEnv(), "test0", CHAT)
    expected, asked = run(chains, answer(true_q, by_key))
    record, _, _, requests = play("particles", 1, 4, draw=by_key, tau=math.inf, gamma=0.9)
    assert {r for r in asked if isinstance(r, Sample)} == {r for r in requests if isinstance(r, Sample)}
    assert record["restores"] == 0 and record | expected | {"steps": record["steps"]} == record


def test_light_particles_give_way_to_copies_of_the_heavy():
    def draw(request):
        _, trial, t = request.key
        return say("right" if trial == 2 or t else "left")

    record, path, _, requests = play("particles", 1, 4, draw=draw, tau=0.01, gamma=1.0)
    keys = {request.key[1:] for request in requests if isinstance(request, Sample)}
    assert path == ("right", "right", "right") and record["reward"] == 1
    assert keys == {(i, t) for i in range(4) for t in range(3)}
    assert (record["env_steps"], record["restores"], record["env_steps_replayed"], record["resets"]) == (12, 3, 15, 4)


def slippery():
    """Ice, its first task, and the seeds of its slips as they come."""
    env, seeds = envs.make("frozenlake", map="4x4", slippery=True), []
    env.reseed = lambda seed: (seeds.append(seed), type(env).reseed(env, seed))
    return env, env.task_ids("all")[0], seeds


def test_another_seed_gives_other_copies_and_other_slips():
    def copies(seed):  # one chain weighs .77, and three .077: of four it is to have 3.08, and chance makes it 3 or 4
        draw = lambda r: say("left" if r.key[1] else "right")  # noqa: E731
        q = lambda r: [0.23 * r.actions[0].endswith("right")]  # noqa: E731
        return play("particles", 1, 4, q, draw, tau=0.1, gamma=1.0, seed=seed)[0]["restores"]

    def slips(seed):
        env, task, seeds = slippery()
        draw = lambda r: say("left", "down")  # noqa: E731
        play("beam", k=1, env=env, task=task, q=lambda r: [0.1, 0.2], draw=draw, seed=seed)
        return seeds

    assert len(set(map(copies, range(40)))) > 1 and copies(3) == copies(3)
    assert slips(0)[1] != slips(1)[1] and slips(1) == slips(1)


@pytest.mark.parametrize(("name", "settings"), [*BLIND, ("particles", {"tau": 0.1, "gamma": 0.9})])
def test_no_search_reads_rewards(name, settings):
    def walk(world):
        return play(name, 6, 8, lambda r: [0.5] * len(r.actions), by_key, FakeEnv(world), **settings)[1]

    assert walk(WORLD) == walk(reverse(WORLD))


@pytest.mark.parametrize(("name", "settings"), BLIND)
def test_on_slippery_ice_a_search_does_not_foresee_the_slips(name, settings):
    """What is played is what the same moves lead to without a search, unless it went through copies and says so. Each
    look has new random numbers."""
    env, task, seeds = slippery()
    again, *_ = slippery()
    draws = [Candidate(react("", move), 1, -1.0) for move in ("left", "down", "right", "up")]
    q = lambda r: list(uniforms(len(r.actions), len(r.state.messages)))  # noqa: E731
    record, moves, *_ = play(name, 4, task=task, env=env, q=q, draw=lambda r: draws, **settings)
    again.reset(options={"task_id": task})
    alike = [step["observation"] for step in record["steps"]] == [again.message(again.step(move)[0]) for move in moves]
    assert alike == TreeSearch(name).replays
    looks = [seed for seed in seeds if seed != env.luck]  # with which each restored state begins
    assert len(looks) == len(set(looks)) > 1


def test_lines_say_their_settings_and_the_report_reads_them(search):
    records = search("--method lookahead beam mcts particles -S 1 2 -N 3")
    players = {(r["method"], r["M"], r["N"], r["player"]) for r in records}
    assert ("lookahead", 2, 1, "gamma=0.9") in players and ("particles", 1, 3, "tau=0.1 gamma=0.9") in players
    assert ("beam", 2, 1, "k=2") in players and ("mcts", 2, 1, "S=2 c=1 gamma=0.9") in players
    assert len(results.read_results([("", Path("results.jsonl"))])) == len(players) == 5


TRIALS = ["left left", "right left", "right right right", "left right left"]  # rewards 0, .4, 1, .5
Q = [0.3, 0.8, 0.7, 0.1]  # what QNet thinks of them


def retried(select, stop, N=4, reflect=False):
    def in_trials(request):
        if isinstance(request, Sample):
            return say(TRIALS[request.key[1]].split()[request.key[2]])
        path = " ".join(path_of(request.state))
        if isinstance(request, Reflect):
            return f"plan after {path}"
        return [Q[TRIALS.index(f"{path} {parse_action(request.actions[0])}")]]

    method = Retry("retry", N=N, select=select, stop=stop, reflect=reflect)
    return run(method.play(FakeEnv(), "test0", CHAT), in_trials)


@pytest.mark.parametrize(
    ("select", "stop", "N", "trials", "reward"),
    [
        ("oracle", 1 - 1e-9, 4, 3, 1.0),  # it sees that the third is right
        ("oracle", 1 - 1e-9, 2, 2, 0.4),  # none is: the best of them
        ("q", 0.75, 4, 2, 0.4),  # QNet stops too early
        ("q", 0.9, 4, 4, 0.4),  # never, so QNet's choice of all
    ],
)
def test_when_it_stops_and_what_counts(select, stop, N, trials, reward):
    record, requests = retried(select, stop, N)
    assert (record["resets"], record["reward"]) == (trials, reward)
    assert (record["tokens"]["scored"] > 0) == any(isinstance(r, Score) for r in requests) == (select == "q")
    assert record["tokens"]["generated"] == 3 * record["env_steps"] == 3 * sum(len(t.split()) for t in TRIALS[:trials])


def test_a_plan_stands_in_the_next_prompt_and_costs_its_tokens():
    record, requests = retried("oracle", 1 - 1e-9, reflect=True)
    first = {r.key[1]: r.state.messages[0][1] for r in requests if isinstance(r, Sample)}
    plan = f"walk{retry.PLANS}plan after left left"
    assert list(first.values()) == ["walk", plan, f"{plan}\nplan after right left"]
    asked = [r.state.messages[-1][1] for r in requests if isinstance(r, Reflect)]
    assert len(asked) == 2 and asked[0].endswith(retry.ASK)
    # The first message has 3 tokens and those of the plans, their title 9; a page 6 to 9; a question 20 behind a page.
    assert record["tokens"]["prompt"] == 3 + 16 + 20 + 3 * 6 + 3 * 8 + 9 + 2 * (9 + 20)


def test_plans_stand_below_the_instruction_that_begins_the_task():
    lake = envs.make("frozenlake", map="4x4", max_steps=1)
    method = Retry("retry", N=2, select="oracle", reflect=True)
    task = lake.task_ids("test")[0]
    run(method.play(lake, task, CHAT), lambda asked: "plan" if isinstance(asked, Reflect) else say("left"))
    assert "The map:" in lake.instruction and lake.instruction.endswith(f"{retry.PLANS}plan")
