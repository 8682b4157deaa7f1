"""States, actions, marks and how they become tokens under the chat templates of real model families."""

import pytest
from fakes import TEMPLATES, FakeEnv, chat_tokenizer, word_chat
from hypothesis import given, settings
from hypothesis import strategies as st

from qlass.chat import MARK, Chat, Rendering, State, action_key, mark, parse_action, react, uniforms, unmark

CHATS = {name: Chat(chat_tokenizer(name), Rendering()) for name in TEMPLATES}
MARKING = Chat(chat_tokenizer("chatml"), Rendering(mark_matches=True, compact=True))

# ---------------------------------------------------------------------------------------------------- states, actions


def test_a_state_grows_by_an_action_and_its_observation():
    env = FakeEnv()
    observation, info = env.reset(options={"task_id": "t"})
    first = State.first(env, observation, info)
    assert first.messages == (("user", "walk"), ("assistant", "OK"), ("user", "you stand at start"))
    later = first.then("Action: left", "Observation: you")
    assert later.messages[:3] == first.messages and later.task == "find the purse"
    assert later.dump()[3:] == [
        {"role": "assistant", "content": "Action: left"},
        {"role": "user", "content": "Observation: you"},
    ]
    assert State.load(later.dump(), later.task) == later and hash(State.load(later.dump(), later.task)) == hash(later)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("Thought: I look.\nAction: click[Buy Now]", "click[Buy Now]"),
        ("Action: left", "left"),
        ("  Action:   go to desk 1  \n", "go to desk 1"),
        ("Thought: no action here", "Thought: no action here"),  # goes to the environment as it is
        ("click[buy now]", "click[buy now]"),
        ("", ""),
        ("Action:", ""),
        ("Thought: x\nAction: search[Action: movies]", "search[Action: movies]"),
    ],
)
def test_the_executable_part_of_an_action(text, action):
    assert parse_action(text) == action


@given(st.text(alphabet="ab :\n", max_size=20), st.text(alphabet="ab []", max_size=20))
def test_what_react_writes_parse_action_reads(thought, action):
    assert parse_action(react(thought, action)) == action.strip()


def test_equal_actions_have_equal_keys():
    assert action_key("Thought: one\nAction: Click[ Buy   now ]") == action_key(
        "Thought: other\nAction: click[ buy now ]"
    )
    assert action_key("Action: left") != action_key("Action: right")
    assert action_key("Action: click[ab]") != action_key("Action: click[a b]")


def test_noise_depends_on_its_key_alone():
    a, b = uniforms(5, 0, "task", 1), uniforms(3, 0, "task", 1)
    assert (a[:3] == b).all() and ((a >= 0) & (a < 1)).all()
    keys = [(0, "task", 1), (1, "task", 1), (0, "task", 2), (0, "task1", 1), (0, "task", "1")]
    assert len({uniforms(1, *key)[0] for key in keys}) == len(keys)
    # A million draws of one number each would have a standard error of .0003; here: 4000, .0046.
    assert abs(sum(uniforms(1, k)[0] for k in range(4000)) / 4000 - 0.5) < 0.02


# ------------------------------------------------------------------------------------------------------------- marks


def test_words_of_the_task_are_marked():
    assert mark("red cotton shirt", "a red shirt") == f"red {MARK} cotton shirt {MARK}"
    assert mark("Red, shirts and a T-shirt.", "a red t-shirt and") == f"Red {MARK}, shirts and a T-shirt {MARK}."
    assert mark("size 8.5 or 8", "size 8.5") == f"size {MARK} 8.5 {MARK} or 8"
    assert mark("is it for me", "is it for me") == "is it for me"  # words that every task has say nothing


def test_prices_within_the_tasks_limit_are_marked():
    task = "a red hat, and price lower than 60.00 dollars"
    assert mark("1 $60.0 red hat [SEP] $60.5 [SEP] $5.0 to $95.5", task) == (
        f"1 $60.0 {MARK} red {MARK} hat {MARK} [SEP] $60.5 [SEP] $5.0 {MARK} to $95.5"
    )
    assert mark("$5.0 for 5.0", "a red hat") == "$5.0 for 5.0"


@given(st.text(alphabet="ab- .,[]\n'8", max_size=40), st.text(alphabet="ab -'8", max_size=12))
def test_marks_come_off_again(text, task):
    assert unmark(mark(text, task)) == text


# --------------------------------------------------------------------------------------------------------- templates


def shown(chat: Chat, ids: list[int]) -> str:
    """Tokens as text, without the space that SentencePiece shows behind <s>."""
    return chat.tokenizer.decode(ids).replace("<s> ", "<s>").strip()


STATE = State((("user", "walk"), ("assistant", "OK"), ("user", "you see a door"))).then(
    "Thought: hm\nAction: open it", "Observation: it is shut"
)


@pytest.mark.parametrize("name", [n for n in TEMPLATES if n != "none"])
def test_a_state_reads_as_the_models_own_template_writes_it(name):
    chat = CHATS[name]
    written = chat.tokenizer.apply_chat_template(STATE.dump(), tokenize=False, add_generation_prompt=True)
    assert shown(chat, chat.prompt(STATE)) == written.strip()
    whole = [*STATE.dump(), {"role": "assistant", "content": "Action: push"}]
    written = chat.tokenizer.apply_chat_template(whole, tokenize=False).strip()
    # The tokens are those of the whole text, up to the one that ends the turn: nothing depends on where runs are cut.
    ids = [*chat.prompt(STATE), *chat.action("Action: push", "")]
    assert chat.tokenizer(written, add_special_tokens=False).input_ids[: len(ids)] == ids


ENDS = {"llama-2": "</s>", "chatml": "<|im_end|>", "chatml-system": "<|im_end|>", "llama-3": "<|eot_id|>",
        "phi-3": "<|end|>", "none": "<|endoftext|>"}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_turn_ends_with_the_templates_own_token(name):
    chat = CHATS[name]
    ids = chat.action("Action: left", "")
    assert chat.tokenizer.convert_ids_to_tokens(ids[-1]) == ENDS[name] and ids[-1] == chat.stop_id
    assert ids.count(chat.stop_id) == 1
    assert chat.text([*ids, 5, 6]) == "Action: left"  # what comes after the end is none of the action's
    assert chat.text(ids[:-1]) == "Action: left"  # cut short by the limit of new tokens


def test_without_a_template_roles_are_words():
    chat = CHATS["none"]
    end = "<|endoftext|>"
    assert chat.tokenizer.decode([*chat.prompt(STATE), *chat.action("Action: push", "")]) == (
        f"User: walk\nAssistant: OK{end}\nUser: you see a door\nAssistant: Thought: hm\nAction: open it{end}\n"
        f"User: Observation: it is shut\nAssistant: Action: push{end}"
    )


texts = st.text(alphabet="ab [].:✓é\n", min_size=1, max_size=12).map(lambda s: s.strip() or "a")
chats = st.sampled_from([*CHATS.values(), MARKING, word_chat(), word_chat(compact=True)])


@settings(max_examples=80, deadline=None)
@given(chats, texts, st.lists(st.tuples(texts, texts), min_size=1, max_size=4))
def test_the_tokens_of_a_state_begin_those_of_every_later_state(chat, task, turns):
    state = State((("user", "walk"), ("assistant", "OK"), ("user", "a door")), task)
    for action, observation in turns:
        pair = [*chat.prompt(state), *chat.action(action, task)]
        state = state.then(action, observation)
        assert chat.prompt(state)[: len(pair)] == pair


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([c for n, c in CHATS.items() if n != "llama-2"]), texts)
def test_an_action_comes_back_from_its_tokens(chat, action):
    assert chat.text(chat.action(action, "")) == action


@given(st.text(alphabet="ab [].:\n", min_size=1, max_size=20), st.text(alphabet="ab ", max_size=8))
def test_a_marked_action_comes_back_without_marks(action, task):
    assert MARKING.text(MARKING.action(action, task)) == action.strip()


def test_the_compact_form_by_hand():
    first = State((("user", "walk"), ("assistant", "OK"), ("user", "page one: red door")), "red door")
    state = first.then("Action: go", "page: red door or hall").then("Action: go", "page: red door or hall")
    decoded = [MARKING.tokenizer.decode(run) for run in MARKING.message_tokens(state)]
    assert len(decoded) == 5  # no instruction, no OK
    assert "page one: red door<" in decoded[0]
    assert "page:  or hall" in decoded[2]  # not the task again
    assert "(same page)" in decoded[4] and "hall" not in decoded[4]


def test_a_rendering_is_kept_with_its_checkpoint(tmp_path):
    rendering = Rendering(temperature=0.3, candidates="valid", compact=True)
    rendering.save(tmp_path)
    assert Rendering.load(tmp_path) == rendering
    assert Rendering.load(tmp_path / "elsewhere") == Rendering()  # the paper's


def test_a_state_without_a_memory_is_its_last_observation():
    chat = word_chat(markov=True)
    state = State((("user", "walk"), ("assistant", "OK"), ("user", "you stand")), "find the purse")
    later = state.then("Action: left", "Observation: you stand at start")
    assert chat.message_tokens(state) == [chat.prompt(state)] and chat.message_tokens(later) == [chat.prompt(later)]
    assert chat.prompt(later) == chat.prompt(State(later.messages[-1:]))
    assert chat.tokenizer.convert_ids_to_tokens(chat.prompt(state)) == ["<user>", "you", "stand", "<agent>"]
