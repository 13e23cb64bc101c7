"""The order of tokens where text is streamed in (the numbers against the reference are in test_speech_lm)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vivace.config import SpeechLMConfig
from vivace.engine.interleave import Done, Feed, Interleaver, WaitForText

CONFIG = SpeechLMConfig(64, 64, 1, 1, 1, 64, 1000, speech_token_size=500, mix_ratio=(5, 15))


def drive(machine, script, *, tokens_final=8, fill_every=None):
    """Run to the end; ``script`` = pieces of text, pushed when the machine waits."""
    fed, spoken, finals = [], [], []
    script = list(script)
    while not isinstance(action := machine.next_action(), Done):
        if isinstance(action, WaitForText):
            if script:
                machine.push_text(script.pop(0))
            else:
                machine.finish()
            continue
        assert isinstance(action, Feed)
        fed += [(piece.kind, i) for piece in action.pieces for i in piece.ids]
        finals.append(action.final)
        if action.final and sum(finals) > tokens_final:
            token = CONFIG.eos_id
        elif not action.final and fill_every and (len(machine.history) + 1) % fill_every == 0:
            token = CONFIG.fill_id
        else:
            token = len(spoken) % 400
        out = machine.accept(token)
        spoken += [] if out is None else [out]
    return fed, spoken


def expected(instruction, prompt_text, prompt_speech, text, spoken):
    """The training format, written down directly."""
    words, sounds = [*prompt_text, *text], [*prompt_speech, *spoken]
    out = [("speech", CONFIG.sos_id)] + [("text", i) for i in instruction]
    for start in range(0, len(words) - 4, 5):
        group = sounds[start * 3 : start * 3 + 15]
        out += [("text", i) for i in words[start : start + 5]] + [("speech", i) for i in group]
    groups = len(words) // 5
    out += [("text", i) for i in words[groups * 5 :]] + [("speech", CONFIG.task_id)]
    return out + [("speech", i) for i in sounds[groups * 15 :]]


lengths = st.integers(0, 23)


@given(lengths, lengths, st.integers(0, 50), st.lists(st.integers(0, 7), max_size=8), st.integers(0, 3))
def test_the_sequence_is_the_training_format_and_loses_nothing(n_inst, n_prompt, n_speech, sizes, tail):
    instruction, prompt_text = list(range(n_inst)), list(range(100, 100 + n_prompt))
    prompt_speech = list(range(400, 400 + n_speech))
    total = sum(sizes)
    text = list(range(200, 200 + total))
    pieces, start = [], 0
    for size in sizes:
        pieces.append(text[start : start + size])
        start += size
    machine = Interleaver(
        CONFIG, instruction=instruction, prompt_text=prompt_text, prompt_speech=prompt_speech
    )
    fed, spoken = drive(machine, pieces, tokens_final=8 + tail)
    assert fed == expected(instruction, prompt_text, prompt_speech, text, spoken)
    assert machine.num_text_tokens == total


@given(st.lists(st.integers(0, 9), max_size=9), st.integers(0, 40), st.sampled_from([None, 7, 20]))
def test_when_text_arrives_does_not_matter(sizes, n_speech, fill_every):
    text = list(range(sum(sizes)))
    pieces, start = [], 0
    for size in sizes:
        pieces.append(text[start : start + size])
        start += size

    def make():
        return Interleaver(
            CONFIG, instruction=[9], prompt_text=[1, 2, 3], prompt_speech=list(range(n_speech))
        )

    one_by_one = drive(make(), [[i] for i in text], fill_every=fill_every)
    in_pieces = drive(make(), pieces, fill_every=fill_every)
    known = make()
    known.push_text(text)
    known.finish()
    assert drive(known, [], fill_every=fill_every) == one_by_one == in_pieces


def test_waits_for_a_full_group_and_then_forces_fill():
    machine = Interleaver(CONFIG, instruction=[7])
    assert isinstance(machine.next_action(), WaitForText)
    machine.push_text([1, 2, 3, 4])
    assert isinstance(machine.next_action(), WaitForText)
    machine.push_text([5])
    for step in range(15):
        action = machine.next_action()
        assert isinstance(action, Feed)
        assert not action.final
        assert [i for piece in action.pieces for i in piece.ids] == (
            [CONFIG.sos_id, 7, 1, 2, 3, 4, 5] if step == 0 else [step - 1]
        )
        assert machine.accept(step) == step
    assert isinstance(machine.next_action(), WaitForText)
    assert machine.history == [*range(15), CONFIG.fill_id]
    machine.finish()
    action = machine.next_action()
    assert isinstance(action, Feed)
    assert action.final
    assert [i for piece in action.pieces for i in piece.ids] == [14, CONFIG.task_id]
    assert machine.accept(CONFIG.eos_id) is None
    assert isinstance(machine.next_action(), Done)


def test_text_of_a_known_prompt_starts_before_any_new_text():
    machine = Interleaver(CONFIG, prompt_text=range(10), prompt_speech=range(20))
    action = machine.next_action()
    assert isinstance(action, Feed)
    assert sum(len(piece.ids) for piece in action.pieces) == 1 + 10 + 20


def test_misuse_is_refused():
    machine = Interleaver(CONFIG)
    machine.push_text(range(5))
    machine.next_action()
    with pytest.raises(AssertionError):
        machine.next_action()
    with pytest.raises(AssertionError):
        machine.accept(CONFIG.eos_id)
    machine.finish()
    with pytest.raises(AssertionError):
        machine.push_text([1])
