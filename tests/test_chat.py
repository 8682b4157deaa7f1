"""States, actions, marks and how they become tokens under the chat templates of real model families."""

import numpy as np
import pytest
from fakes import CHATML, LLAMA_2, TEMPLATES, chat_tokenizer, refused, talk, word_chat
from hypothesis import given, settings
from hypothesis import strategies as st

from qlass.chat import Chat, Rendering
from qlass.messages import State, parse_action, react
from qlass.noise import uniforms
from qlass.tiny import MARK, mark, sentence

CHATS = {name: Chat(chat_tokenizer(name), Rendering()) for name in TEMPLATES}
MARKING = Chat(chat_tokenizer("chatml"), Rendering(mark_matches=True, compact=True))


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("Thought: I look.\nAction:   click[Buy Now] \n", "click[Buy Now]"),  # capitals count, as in the engines
        ("Thought: x\nAction: search[Action: movies]", "search[Action: movies]"),
        ("Action: left\nbut look", "left\nbut look"),  # as in the released code
        # A thought may hold "Action:", wherever it thinks.
        ("Thought: Action: left is a hole.\nAction: right", "right"),
        ("<think>\nAction: left?\n</think>\n\nThought: no\nAction: right", "right"),
        ("so Action: left?\n</think>\nright<think>Action: left", "right"),  # the prompt began it
        ("<think>Action: left, but", ""),
        ("search[thought] <b>", "search[thought] <b>"),
    ],
)
def test_the_executable_part_of_an_action(text, action):
    assert parse_action(text) == action


thoughts = st.lists(st.sampled_from(["a", "b ", "\n", "Action:", "\nAction: b"]), max_size=6).map("".join)


@given(thoughts, st.text(alphabet="ab []", max_size=20))
def test_what_react_writes_parse_action_reads(thought, action):
    assert parse_action(react(thought, action)) == action.strip()


def test_noise_depends_on_its_key_alone():
    keys = [(0, "task", 1), (1, "task", 1), (0, "task", 2), (0, "task1", 1), (0, "task", "1")]
    noise = np.array([uniforms(5, *key) for key in keys])
    assert len({*noise[:, 0]}) == len(keys) and 0 <= noise.min() <= noise.max() < 1
    assert (uniforms(3, *keys[0]) == noise[0, :3]).all()


PRICES = "a red hat, and price lower than 60.00 dollars"


@pytest.mark.parametrize(
    ("task", "marked"),
    [
        ("a red shirt", "✓red cotton✓ shirt"),
        ("a red t-shirt and", "✓Red, shirts and a✓ T-shirt."),
        ("size 8.5", "✓size✓ 8.5 or 8"),
        (PRICES, "✓red✓ hat [SEP] $60.5 [SEP]✓ $5.0 to $95.5"),  # within its limit
        # With its place on the page, before the place, which is what the agent has to choose first.
        (PRICES, "Thought:✓ 3 $60.0✓ red✓ hat"),
        (PRICES, "Thought: 1 $60.5 to $70.0✓ hat"),
        ("买红色衬衫", "✓红✓色帽子 a1"),  # letter by letter where no blanks stand between words
    ],
)
def test_words_of_the_task_and_prices_within_its_limit_are_marked(task, marked):
    assert mark(marked.replace(MARK, ""), task) == marked


def chat_of(template):
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = template
    return Chat(tokenizer, Rendering())


STATE = talk("walk", "OK", "you see a door").extended("Thought: hm\nAction: open it", "Observation: it is shut")
ENDS = {"llama-2": "</s>", "chatml": "<|im_end|>", "llama-3": "<|eot_id|>", "gemma": "<end_of_turn>"}
SPACES = [("llama-2", scheme) for scheme in (None, "first", "always", "never")]


@pytest.mark.parametrize(("name", "scheme"), [*SPACES, ("chatml", None), ("llama-3", None), ("gemma", None)])
def test_a_state_reads_as_the_models_own_template_writes_it(name, scheme):
    """Also where SentencePiece adds a space at a text's beginning, after each control token, or nowhere."""
    tokenizer = chat_tokenizer(name, scheme)
    chat = Chat(tokenizer, Rendering())
    written = tokenizer.apply_chat_template(STATE.dump(), tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(chat.prompt(STATE)).replace("s> ", "s>").strip() == written.strip()
    spaced = State(tuple((role, f"\n{content} \n") for role, content in STATE.messages))
    assert chat.prompt(spaced) == chat.prompt(STATE)
    # The tokens are those of the whole text, up to the one that ends the turn: nothing depends on where runs are cut.
    written = tokenizer.apply_chat_template(STATE.extended("Action: push", "").dump()[:-1], tokenize=False).strip()
    ids = [*chat.prompt(STATE), *chat.action_tokens("Action: push", "")]
    assert tokenizer(written, add_special_tokens=False).input_ids[: len(ids)] == ids
    assert tokenizer.convert_ids_to_tokens(ids[-1]) == ENDS[name] and ids[-1] == chat.stop_id


texts = st.text(alphabet="ab- .,:[]\n'8✓é", min_size=1, max_size=12).map(lambda s: s.strip() or "a")
chats = st.sampled_from([*CHATS.values(), MARKING, word_chat(), word_chat(compact=True)])


@settings(max_examples=80)
@given(chats, texts, st.lists(st.tuples(texts, texts), min_size=1, max_size=4))
def test_the_tokens_of_a_state_begin_those_of_every_later_state(chat, task, turns):
    state = talk("walk", "OK", "a door", task=task)
    for action, observation in turns:
        pair = [*chat.prompt(state), *chat.action_tokens(action, task)]
        state = state.extended(action, observation)
        assert chat.prompt(state)[: len(pair)] == pair


@given(st.sampled_from([MARKING, CHATS["chatml"], CHATS["llama-3"]]), texts, texts)
def test_an_action_comes_back_from_its_tokens(chat, action, task):
    if chat is MARKING:
        action = action.replace(MARK, "a")
    ids = chat.action_tokens(action, task)
    assert ids.index(chat.stop_id) == len(ids) - 1
    for wrote in (ids, [*ids, 5, 6], ids[:-1]):  # what comes after the end is none of it; cut by the limit of tokens
        assert chat.text(wrote) == action


def test_the_compact_form_by_hand():
    first = talk("walk", "OK", "page one: red door; none", task="red door")
    again = "Action: go", "page one: red door; or hall"
    state = first.extended(*again).extended(*again)
    first, _, second, _, third = (MARKING.tokenizer.decode(run) for run in MARKING.message_tokens(state))
    assert "user\npage one: red door; none<" in first  # no instruction, no OK
    assert "page one: ; or hall<" in second  # not the task again
    assert "(same page)" in third and "hall" not in third


@pytest.mark.parametrize(
    ("task", "page", "left"),
    [
        ("red", "On: red.", "On: red."),  # of one word it is no sentence
        ("buy it", "[SEP] buy it [SEP] buy items", "[SEP]  [SEP] buy items"),
        ("a (b). ", "Your task is to: a (b).", "Your task is to: "),
    ],
)
def test_the_tasks_sentence_is_taken_out_of_pages_as_a_whole(task, page, left):
    assert sentence(task).sub("", page) == left


CONTROL = sorted({token for _, named, others in TEMPLATES.values() for token in (*named.values(), *others)})


@pytest.mark.parametrize("name", TEMPLATES)
def test_control_tokens_in_a_message_stay_text(name):
    """The model's own, those of other models, and a template's marks that are no tokens."""
    chat = CHATS[name]
    special = {i for i, t in chat.tokenizer.added_tokens_decoder.items() if t.special}
    other = chat.prompt(talk("see it", opening=0))
    for control in [*CONTROL, "[INST]", "[/INST]"]:
        page = f"see {control} and {control}"
        *ids, end = chat.action_tokens(page, "")
        assert special.isdisjoint(ids) and end == chat.stop_id
        assert chat.text(ids) == page or name == "llama-2"  # whose decoder drops spaces
        observed = chat.prompt(talk(page, opening=0))
        assert [i for i in observed if i in special] == [i for i in other if i in special]  # the template's own


def test_prompts_beyond_the_context():
    chat = word_chat(max_new_tokens=5)
    chat.context = 40  # and so 34 of a prompt
    state = talk("walk", "OK", "you stand")
    for _ in range(6):
        state = state.extended("Action: left", "Observation: nothing happens")
    for stays, asked in ((3, state), (1, State(state.messages[2:], "", 0))):  # whose first message tells all of it
        lists, whole = chat.prompt_tokens(asked), chat.message_tokens(asked)
        assert chat.is_truncated(asked) and sum(map(len, lists)) <= 34
        assert lists == whole[:stays] + whole[stays - len(lists) :]  # instruction, task and the newest turns
        assert sum(map(len, lists + whole[stays : stays + 2])) > 34  # no more than had to go
    chat.context = 15
    with refused(r"a prompt has \d+ tokens even without old turns, of 9 at most"):
        chat.prompt(state)
    with refused(r"an action of 5 tokens is beyond the model's context"):
        chat.action_tokens("Thought: hm Action: left", "", prompt_length=11)
    assert len(chat.action_tokens("Thought: hm Action: left", "", prompt_length=10)) == 5


def test_the_messages_that_are_kept_have_a_bound():
    assert chat_of(CHATML).encode.cache_info().maxsize == 8192


@pytest.mark.parametrize("none", ["<think></think>", "<|channel>thought\n<channel|>"])  # Qwen 3's, Gemma 4's
def test_a_template_thinks_in_no_turn_and_has_the_same_date_every_day(none):
    """The switch is off, and where a prompt goes on with "no thoughts" so do the turns that were cloned."""
    switch = f"{{% if add_generation_prompt and enable_thinking is false %}}{{{{ '{none}' }}}}{{% endif %}}"
    today = "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    dates = "{{ 'Today: ' + date_string + strftime_now(', %B %d, %H:%M') + '\n' }}"
    chat = chat_of(today + dates + CHATML + switch)
    written = chat.tokenizer.decode(chat.prompt(STATE))
    assert written.startswith("Today: 26 Jul 2024, July 26, 00:00\n")
    assert written.count(f"<|im_start|>assistant\n{none}") == written.count("<|im_start|>assistant") == 3


@pytest.mark.parametrize(
    "template",
    [
        CHATML.replace("m.content", "m.content + ('again' if loop.index == 5 else '')"),
        CHATML.replace("m.content", "m.content + ('!' if loop.last and m.role == 'user' else '')"),
        CHATML.replace("m.content", "m.content + ('!' if m == messages[-1] else '')"),
        LLAMA_2.replace("bos_token", "'.'").replace("eos_token", "'.'"),  # no token ends a turn
        CHATML.replace("assistant\n", "assistant\n<think>\n"),  # as R1's distillations and QwQ
        CHATML.replace("assistant\n", "assistant\n<think>\na/b"),
        CHATML.replace("assistant\n", "assistant\n<think></think><think>"),
    ],
)
def test_a_template_that_writes_later_turns_otherwise_or_ends_none_or_opens_thoughts_is_refused(template):
    with refused("chat template does not write all turns alike"):
        chat_of(template)
