"""A consumer that leaves in the midst of a chunk does not have it finished."""

import pytest

from tests.helpers import noise_voice, quiet_engine
from vivace import CancelledRequestError, SynthesisRequest
from vivace.models.dit_stream import PreparedDiT


@pytest.mark.parametrize("num_steps_before", [0, 1, 5, 9])
def test_the_flow_stops_at_the_next_euler_step_and_no_vocoder_runs(
    random_model_folder, monkeypatch, num_steps_before
):
    engine = quiet_engine(random_model_folder, num_steps=10, token_text_ratio=(2.0, 2.6))
    request = SynthesisRequest("Hello there.", voice=noise_voice(engine._config))
    engine.synthesize(request)  # now the voice's prompt is known
    live = engine.submit(request)
    steps, launched = [], []
    velocity = PreparedDiT.velocity

    def leave_in_the_midst(self, x, condition, step, state, span):
        steps.append(step)
        if len(steps) == num_steps_before + 1:
            engine.cancel(live)
        return velocity(self, x, condition, step, state, span)

    monkeypatch.setattr(PreparedDiT, "velocity", leave_in_the_midst)
    monkeypatch.setattr(live.vocoder, "launch", lambda *_, **__: launched.append(1))
    while not live.is_done:
        engine.step()
    assert len(steps) == num_steps_before + 1
    assert not launched
    assert live.finish_reason == "cancelled"
    assert isinstance(live.error, CancelledRequestError)
    engine.close()
