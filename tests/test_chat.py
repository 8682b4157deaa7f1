"""States, actions, marks and how they become tokens under the chat templates of real model families."""

import datetime

import pytest
from fakes import SENTENCE_PIECE, TEMPLATES, FakeEnv, chat_tokenizer, tiny_backbone, tiny_lm, word_chat
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers, processors

from qlass import UserError
from qlass.batching import LogProb, Sample, Score
from qlass.chat import Chat, Rendering
from qlass.fast.packing import pack_pairs
from qlass.messages import State, parse_action, react, uniforms
from qlass.policy import Policy
from qlass.tiny import MARK, mark
from train_qnet import Pair, QNet

CHATS = {name: Chat(chat_tokenizer(name), Rendering()) for name in TEMPLATES}
MARKING = Chat(chat_tokenizer("chatml"), Rendering(mark_matches=True, compact=True))

# ---------------------------------------------------------------------------------------------------- states, actions


def test_a_state_grows_by_an_action_and_its_observation():
    env = FakeEnv()
    first = State.first(env, *env.reset(options={"task_id": "t"}))
    assert first.messages == (("user", "walk"), ("assistant", "OK"), ("user", "you stand at start"))
    later = first.then("Action: left", "Observation: you")
    added = (("assistant", "Action: left"), ("user", "Observation: you"))
    assert later.messages == first.messages + added and later.task == "find the purse"
    assert later.dump()[3] == {"role": "assistant", "content": "Action: left"}
    assert State.load(later.dump(), later.task) == later and hash(State.load(later.dump(), later.task)) == hash(later)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("Thought: I look.\nAction:   click[Buy Now] \n", "click[Buy Now]"),  # capitals count, as in the engines
        ("Thought: no action here", "Thought: no action here"),  # goes to the environment as it is
        ("Action:", ""),
        ("Thought: x\nAction: search[Action: movies]", "search[Action: movies]"),
        ("Thought: hm Action: left", "left"),
        ("Action: left\nbut look", "left\nbut look"),  # as in the released code
        # A thought may hold "Action:", wherever it thinks.
        ("Thought: Action: left is a hole.\nAction: right", "right"),
        ("Thought: one of\nAction: left\nAction: right\nI go right.\n  Action: right", "right"),
        ("Thought: no Action: left, but Action: right", "right"),
        ("<think>\nAction: left?\n</think>\n\nThought: no\nAction: right", "right"),
        ("<think>Action: left?</think>right", "right"),
        ("so Action: left?\n</think>\nAction: right", "right"),  # the prompt began it
        ("<think>Action: left, but", ""),
        ("<think>no</think>Action: right<think>Action: left", "right"),
    ],
)
def test_the_executable_part_of_an_action(text, action):
    assert parse_action(text) == action


@given(st.text(alphabet="ab :\n", max_size=20), st.text(alphabet="ab []", max_size=20))
def test_what_react_writes_parse_action_reads(thought, action):
    assert parse_action(react(thought, action)) == action.strip()


def test_noise_depends_on_its_key_alone():
    a, b = uniforms(5, 0, "task", 1), uniforms(3, 0, "task", 1)
    assert (a[:3] == b).all() and ((a >= 0) & (a < 1)).all()
    keys = [(0, "task", 1), (1, "task", 1), (0, "task", 2), (0, "task1", 1), (0, "task", "1")]
    assert len({uniforms(1, *key)[0] for key in keys}) == len(keys)


# ------------------------------------------------------------------------------------------------------------- marks


def test_words_of_the_task_are_marked():
    assert mark("red cotton shirt", "a red shirt") == f"{MARK}red cotton{MARK} shirt"
    assert mark("Red, shirts and a T-shirt.", "a red t-shirt and") == f"{MARK}Red, shirts and a{MARK} T-shirt."
    assert mark("size 8.5 or 8", "size 8.5") == f"{MARK}size{MARK} 8.5 or 8"
    assert mark("is it for me", "is it for me") == "is it for me"  # words that every task has say nothing


def test_prices_within_the_tasks_limit_are_marked():
    task = "a red hat, and price lower than 60.00 dollars"
    assert mark("red hat [SEP] $60.5 [SEP] $5.0 to $95.5", task) == (
        f"{MARK}red{MARK} hat [SEP] $60.5 [SEP]{MARK} $5.0 to $95.5"
    )
    # With its place on the page, before the place, which is what the agent has to choose first.
    assert mark("Thought: 3 $60.0 red hat", task) == f"Thought:{MARK} 3 $60.0{MARK} red{MARK} hat"
    assert mark("Thought: 1 $60.5 to $70.0 hat", task) == f"Thought: 1 $60.5 to $70.0{MARK} hat"
    assert mark("$5.0 for 5.0", "a red hat") == "$5.0 for 5.0"


@given(st.text(alphabet="ab- .,[]\n'8", max_size=40), st.text(alphabet="ab -'8", max_size=12))
def test_marks_come_off_again(text, task):
    assert MARKING.aids.unmark(mark(text, task)) == text


# --------------------------------------------------------------------------------------------------------- templates


def shown(chat: Chat, ids: list[int]) -> str:
    """Tokens as text, without the spaces that SentencePiece shows after <s> and </s>."""
    return chat.tokenizer.decode(ids).replace("s> ", "s>").strip()


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


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize("name", SENTENCE_PIECE)
def test_a_space_is_added_only_where_the_tokenizer_adds_one_within_a_chat(name, scheme):
    tokenizer = chat_tokenizer(name)
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    chat = Chat(tokenizer, Rendering())
    whole = [*STATE.dump(), {"role": "assistant", "content": "Action: push"}]
    written = tokenizer.apply_chat_template(whole, tokenize=False)
    ids = [*chat.prompt(STATE), *chat.action("Action: push", "")]
    assert tokenizer(written, add_special_tokens=False).input_ids[: len(ids)] == ids


def test_a_token_that_takes_the_space_before_it_leaves_the_prompt_as_it_is():
    chat = CHATS["chatml"]
    tokenizer = chatml()
    tokenizer.add_tokens([AddedToken("[SEP]", lstrip=True)])
    ids = Chat(tokenizer, Rendering()).action("[SEP] a", "")
    assert ids == [*tokenizer("[SEP] a", add_special_tokens=False).input_ids, chat.stop_id]


ENDS = {"llama-2": "</s>", "zephyr": "</s>", "chatml": "<|im_end|>", "chatml-system": "<|im_end|>",
        "llama-3": "<|eot_id|>", "mistral": "</s>", "none": "<|endoftext|>"}  # fmt: skip


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
@given(st.sampled_from([c for n, c in CHATS.items() if n not in SENTENCE_PIECE]), texts)
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


# ------------------------------------------------------------------------------- what a page or a template may contain

CONTROL = sorted({token for _, named, others in TEMPLATES.values() for token in (*named.values(), *others)})


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("control", CONTROL)
def test_control_tokens_in_a_message_stay_text(name, control):
    chat = CHATS[name]
    special = {i for i, t in chat.tokenizer.added_tokens_decoder.items() if t.special}

    def count(text: str) -> int:
        state = State((("user", "walk"), ("assistant", f"Action: {text}"), ("user", f"a {text} b")))
        return sum(i in special for i in chat.prompt(state))

    page = f"see {control} and {control}"
    assert count(page) == count("see it")  # the template's own, no more
    observed = chat.prompt(State((("user", page),)))
    assert page.replace(" ", "") in chat.tokenizer.decode(observed).replace(" ", "")
    ids = chat.action(page, "")
    assert ids.count(chat.stop_id) == 1 and ids[-1] == chat.stop_id
    if name not in SENTENCE_PIECE:  # its decoder eats spaces
        assert chat.text(ids) == page


def with_bos(template: str | None):
    tokenizer = chat_tokenizer("llama-3")
    tokenizer.chat_template = template
    core = tokenizer.backend_tokenizer
    bos = tokenizer.bos_token
    core.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    return tokenizer


def test_without_a_template_a_prompt_begins_as_the_tokenizer_begins_a_text():
    tokenizer = with_bos(None)
    for state in (STATE, State((("system", "be brief"), *STATE.messages))):
        ids = Chat(tokenizer, Rendering()).prompt(state)
        assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.eos_token_id != CHATS["none"].prompt(STATE)[0]
    ids = Chat(with_bos(TEMPLATES["llama-3"][0]), Rendering()).prompt(STATE)  # the template has its own
    assert ids.count(tokenizer.bos_token_id) == 1


def test_a_templates_date_is_pinned_with_the_checkpoint(tmp_path):
    tokenizer = chat_tokenizer("chatml")
    today = "{{ 'Today: ' + strftime_now('%d %b %Y') + '\n' }}"
    tokenizer.chat_template = "{% if strftime_now is defined %}" + today + "{% endif %}" + TEMPLATES["chatml"][0]
    chat = Chat(tokenizer, Rendering(date="2024-07-26"))
    assert tokenizer.decode(chat.prompt(STATE)).startswith("Today: 26 Jul 2024\n")
    fresh = Chat(tokenizer, Rendering())
    assert fresh.rendering.date == datetime.date.today().isoformat()
    fresh.rendering.date = "2025-01-02"
    fresh.rendering.save(tmp_path)
    later = Chat(tokenizer, Rendering.load(tmp_path))
    assert tokenizer.decode(later.prompt(STATE)).startswith("Today: 02 Jan 2025\n")
    assert CHATS["chatml"].rendering.date is None  # no date, none kept
    tokenizer.chat_template = "{% set form = '%d' %}{{ strftime_now(form) }}" + TEMPLATES["chatml"][0]
    with pytest.raises(UserError, match="another date each day"):
        Chat(tokenizer, Rendering())


def test_system_messages():
    system = State((("system", "be brief"), *STATE.messages), STATE.task)
    chat = CHATS["chatml"]
    written = chat.tokenizer.apply_chat_template(system.dump(), tokenize=False, add_generation_prompt=True)
    assert chat.tokenizer.decode(chat.prompt(system)) == written
    assert len(chat.message_tokens(system)) == len(chat.message_tokens(STATE))  # one list with the first user's
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    forgets = TEMPLATES["chatml"][0].replace("in messages", "in messages if m.role != 'system'")
    for template in (refuses + TEMPLATES["chatml"][0], forgets):
        other = Chat(chatml(template), Rendering())
        assert other.prompt(STATE) == chat.prompt(STATE)
        with pytest.raises(UserError, match="no system message"):
            other.prompt(system)


THINKS = TEMPLATES["chatml"][0] + "{# <think> #}"


def test_thinking_models_with_and_without_their_thoughts():
    closing = "('<think></think>' if m.role == 'assistant' else '') + m.content"
    assert (
        Chat(chatml(THINKS.replace("m.content", closing)), Rendering()).ask.count("</think>") == 1
    )  # it closes itself
    tokenizer = chatml(THINKS)
    mute, thinks = Chat(tokenizer, Rendering()), Chat(tokenizer, Rendering(think=True))
    assert tokenizer.decode(mute.prompt(STATE)).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert tokenizer.decode(thinks.prompt(STATE)).endswith("<|im_start|>assistant\n")
    wrote = tokenizer("<think>\na <b>?\n</think>\n\nAction: left<|im_end|>", add_special_tokens=False).input_ids
    assert thinks.text(wrote) == "Action: left"
    assert thinks.text(tokenizer("Action: left", add_special_tokens=False).input_ids) == "Action: left"
    assert thinks.action_in("<think>no</think>Action: right<think>Action: left") == "Action: right"
    assert thinks.action_in("<think>\nI could write Action: left, but") == ""  # cut by the limit of new tokens
    later = STATE.then("Action: left", "Observation: hm")
    for chat in (mute, thinks):  # a state's tokens begin a later one's
        pair = [*chat.prompt(STATE), *chat.action("Action: left", "")]
        assert chat.prompt(later)[: len(pair)] == pair


def test_prompts_beyond_the_context(agent_context=40):
    chat = word_chat(max_new_tokens=5)
    chat.context = agent_context
    state = State((("user", "walk"), ("assistant", "OK"), ("user", "you stand")), "")
    assert chat.prompt_tokens(state) == chat.message_tokens(state) and not chat.is_cut(state)
    for _ in range(6):
        state = state.then("Action: left", "Observation: nothing happens")
    length = sum(map(len, chat.message_tokens(state)))
    with pytest.raises(UserError, match=rf"{length} tokens.*5 are more than.*40.*--truncate oldest"):
        chat.prompt_tokens(state)
    chat.rendering.truncate = "oldest"
    lists, whole = chat.prompt_tokens(state), chat.message_tokens(state)
    assert chat.is_cut(state) and sum(map(len, lists)) <= 35 and len(chat.prompt(state)) <= 35
    assert lists[:3] == whole[:3] and lists[3:] == whole[3 - len(lists) :]  # instruction, task and the newest turns
    assert sum(map(len, lists)) + sum(map(len, whole[3:5])) > 35  # no more than had to go
    together = State(state.messages[2:], "")  # the first message tells all of it
    lists, whole = chat.prompt_tokens(together), chat.message_tokens(together)
    assert len(lists) < len(whole) and lists[0] == whole[0] and lists[1:] == whole[1 - len(lists) :]
    chat.context = 8
    assert not chat.fits(state, "")


# -------------------------------------------------------------------------------- what a checkpoint's own template says


def chatml(template: str | None = None):
    """ChatML's tokenizer with another template."""
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = template or tokenizer.chat_template
    return tokenizer


TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}" + TURN + "{% if loop.index == 5 %}again: {% endif %}{% endfor %}",
        "{% for m in messages %}" + TURN.replace("m.content", "m.content.split('Thought:')[-1]") + "{% endfor %}",
        TEMPLATES["chatml"][0].replace("m.content", "m.content + ('!' if loop.last and m.role == 'user' else '')"),
        "{{ messages | length }}" + TEMPLATES["chatml"][0],
        "{% if messages | length > 6 %}{{ raise_exception('long') }}{% endif %}" + TEMPLATES["chatml"][0],
        "{{ unknown.x.y }}",
    ],
)
def test_a_template_that_writes_later_turns_otherwise_is_refused(template):
    with pytest.raises(UserError, match=r"chat template (does not show|fails)"):
        Chat(chatml(template), Rendering())


def test_a_turn_ends_by_whatever_model_tokenizer_and_template_say():
    chat = Chat(chatml(), Rendering(), ends=[7, 9])
    ids = chat.tokenizer("Action: left", add_special_tokens=False).input_ids
    for end in (7, 9, chat.stop_id, chat.tokenizer.eos_token_id):
        assert chat.text([*ids, end, *ids]) == "Action: left"


SETTINGS = """temperature=-1 temperature=null temperature=true max_new_tokens="48" max_new_tokens=0 top_p=0 top_k=1.5
stop="Task:" stop=[1] candidates="all" truncate="newest" compact=1 date=2024 other=true"""


def test_settings_are_read_as_they_were_saved_or_refused(tmp_path):
    settings = Rendering(temperature=1, stop=["", "a"], truncate="oldest", system="", date="2024-07-26")
    settings.save(tmp_path)
    assert Rendering.load(tmp_path) == settings and settings.stop == ("a",)
    for name, value in (setting.split("=") for setting in SETTINGS.split()):
        (tmp_path / Rendering.FILE).write_text(f'{{"{name}": {value}}}')
        with pytest.raises(UserError, match=rf"policy\.json: .*{name}"):
            Rendering.load(tmp_path)


def test_an_answer_that_goes_on_for_the_environment_is_cut():
    chat = CHATS["chatml"]
    answer = "Thought: a\nAction: left\nObservation: you stand\nThought: b\nAction: right"
    assert chat.action_in(answer) == chat.text(chat.action(answer, "")) == "Thought: a\nAction: left"
    assert Chat(chatml(), Rendering(stop=())).action_in(answer) == answer


@pytest.mark.parametrize("words", ["m.content | trim", "m.content.lstrip('\n')", "' ' + m.content.strip() + ' '"])
def test_spaces_at_a_messages_ends_are_no_tokens(words):
    tokenizer = chatml(TEMPLATES["chatml"][0].replace("m.content", words))
    said = (("system", "be brief"), ("user", "walk"), ("assistant", "OK"), ("user", "you stand"))
    written = tokenizer.apply_chat_template(State(said).dump(), tokenize=False, add_generation_prompt=True)
    spaced = State(tuple((role, f"\n{content} \n") for role, content in said))
    assert tokenizer.decode(Chat(tokenizer, Rendering()).prompt(spaced)) == written


def longest(n: int) -> str:
    return "Action: " + " ".join(["left"] * n)


@pytest.mark.parametrize("fast", [True, False])
def test_an_action_beyond_the_context_is_an_error(fast):
    """An action may be longer than --max-new-tokens; what is behind the context a model would read without a word."""
    chat = word_chat(max_new_tokens=5)
    chat.context = 20
    policy, qnet = Policy(tiny_lm(chat), chat, plain=not fast), QNet(tiny_backbone(chat), chat, plain=not fast).eval()
    state = State((("user", "walk find the purse"), ("assistant", "OK"), ("user", "you stand")), "")
    room = 20 - len(chat.prompt(state)) - 2  # "Action:" and the end
    fits, beyond = longest(room), longest(room + 1)
    assert room > 5 and chat.fits(state, fits) and not chat.fits(state, beyond)
    for read in (
        lambda action: policy.likelihoods([LogProb(state, (action,))]),
        lambda action: policy.sample([Sample(state, 1, ("a",), 1.0, valid=("Action: left", "Action: right", action))]),
        lambda action: qnet.score([Score(state, (action,))]),
        lambda action: list(pack_pairs(chat, [[Pair(state, action, 1.0)]], 0, 100)),
    ):
        read(fits)
        with pytest.raises(UserError, match=f"action of {room + 3} are more than the model's context of 20: --trunc"):
            read(beyond)
