"""QNet's values as other trainers take them: equal to its scores in the environment, and in the real libraries."""

import itertools

import pytest
from fakes import FakeEnv, serving, tiny_backbone, word_chat

from integrations.values import step_reward, turn_values
from qlass import UserError
from qlass.batching import Score
from qlass.messages import State
from train_qnet import QNet, scorer

MOVES = ["right", "right", "left"]


@pytest.fixture(scope="module")
def qnet(value_net):
    return scorer(QNet.from_pretrained(value_net))


def played(qnet) -> tuple[State, list[float]]:
    """An episode, and Q of its actions as a search asks for it."""
    env, q = FakeEnv(), []
    state = State.first(env, *env.reset(options={"task_id": "test0"}))
    for move in MOVES:
        q += qnet.score([Score(state, (f"Action: {move}",))])[0]
        state, *_ = state.act(env, f"Action: {move}")
    return state, pytest.approx(q)


def test_each_turn_has_the_value_that_a_search_sees(qnet):
    state, expected = played(qnet)
    q, gains = turn_values(qnet, state.dump(), state.task)
    assert q == expected and len(set(q)) == 3
    assert [sum(gains[: n + 1]) for n in range(3)] == pytest.approx(q)
    assert turn_values(qnet, state.dump()[:3], state.task) == ([], [])
    with pytest.raises(UserError, match="begin with an instruction and the agent's OK"):
        turn_values(qnet, state.dump()[2:])
    for aid in ("mark_matches", "compact"):  # of the tiny model, which reads no page without it
        chat = word_chat(**{aid: True})
        with pytest.raises(UserError, match=r"the task's sentence, so give it: turn_values\(\.\.\., task=\)"):
            turn_values(QNet(tiny_backbone(chat), chat, hidden=8), state.dump())


@pytest.mark.slow
def test_a_rollout_of_verifiers_has_step_rewards(qnet):
    vf = pytest.importorskip("verifiers.legacy", reason="pip install -r requirements-integrations.txt")
    from datasets import Dataset

    state, expected = played(qnet)
    gain, turns = step_reward(qnet), iter(MOVES)

    class World(vf.MultiTurnEnv):
        async def setup_state(self, state):
            state["env"] = FakeEnv()
            state["env"].reset(options={"task_id": "test0"})

        async def env_response(self, messages, state, **_):
            after, _, done = State((), "").act(state["env"], messages[-1].content)
            answer = [{"role": "user", "content": after.observation}]
            state["final_env_response"] = answer if done else None
            return answer

        async def add_trajectory_step(self, state, step):
            await super().add_trajectory_step(state, step)
            state.add_step_reward(await gain(state))

    def model(body):
        message = {"role": "assistant", "content": f"Action: {next(turns)}"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return 200, {"id": "1", "created": 0, "object": "chat.completion", "model": "m", "choices": [choice]}

    row = {"prompt": state.dump()[:3], "info": {"task_sentence": state.task}}
    env = World(dataset=Dataset.from_list([row]), rubric=vf.Rubric(funcs=[lambda state: state.total_step_reward()]))
    with serving(model) as url:
        client, rows = vf.ClientConfig(api_base_url=f"{url}/v1"), env.get_dataset().to_list()
        out = env.generate_sync(rows, client, model="m", state_columns=["trajectory"])["outputs"][0]
    assert list(itertools.accumulate(step["reward"] for step in out["trajectory"])) == expected
    assert out["reward"] == pytest.approx(sum(step["reward"] for step in out["trajectory"]))
