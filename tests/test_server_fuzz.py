"""Random requests made from our own description of the interface, right and wrong ones, for a bounded time."""

import json
import os

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode, openapi

from tests.server_helpers import FakeService, LoopbackServer, post, status_and_code
from vivace.server.schema import SPEECH_OPERATION

EXAMPLES = int(os.environ.get("VIVACE_FUZZ_EXAMPLES", "60"))
"""Per test; more for a long run."""
BOUNDED = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
MODES = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with LoopbackServer(lambda: FakeService(tmp_path_factory.mktemp("voices"))) as running:
        running.service.script = [0.02]
        yield running


def _check(response):
    """Nothing is our fault, and every error is by the contract."""
    assert response.status_code < 500 or response.status_code in (501, 503, 507), response.status_code
    assert response.headers["x-request-id"][0].startswith("req_")
    if response.status_code >= 400 and response.content:
        error = json.loads(response.content)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"].isprintable()


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/v1/audio/speech", "POST"),
        ("/v1/audio/voices", "POST"),
        ("/v1/audio/voices", "GET"),
        ("/v1/audio/voices/{name}", "DELETE"),
        ("/v1/audio/voice_consents", "POST"),
        ("/v1/audio/voice_consents", "GET"),
        ("/v1/audio/voice_consents/{consent_id}", "POST"),
        ("/v1/models", "GET"),
        ("/v1/models/{name}", "GET"),
    ],
)
def test_requests_by_the_description(server, path, method, mode):
    operation = openapi.from_url(f"{server.url}/openapi.json")[path][method]

    @seed(0)
    @BOUNDED
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case):
        _check(case.call(base_url=server.url))

    try:
        run()
    except Exception as error:
        if "Negative" in type(error).__name__ or "Unsatisfiable" in type(error).__name__:
            pytest.skip("nothing of it can be wrong")
        raise


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
NAMES = st.sampled_from(
    sorted(SPEECH_OPERATION["requestBody"]["content"]["application/json"]["schema"]["properties"])
)


@seed(0)
@BOUNDED
@given(members=st.dictionaries(NAMES, JSON, max_size=6))
def test_any_value_in_any_member(server, members):
    answer = server.exchange(post({"input": "Hi.", **members}, headers=("Connection: close",)))
    status, code = status_and_code(answer)
    assert status in (200, 400, 403, 404, 413)
    assert (code is None) == (status == 200)


@seed(0)
@BOUNDED
@given(body=st.binary(max_size=400))
def test_any_bytes_as_body(server, body):
    assert status_and_code(server.exchange(post(body, headers=("Connection: close",))))[0] == 400


@seed(0)
@BOUNDED
@given(data=st.binary(min_size=1, max_size=300))
def test_any_bytes_as_request(server, data):
    """With an end of its header behind it, so that no one has to wait."""
    answer = server.exchange(data + b"\r\n\r\n\r\n\r\n", timeout=0.5)
    assert not answer or status_and_code(answer)[0] in (400, 404, 405, 421, 431)
    assert b"200 OK" in server.exchange(
        b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    )


@seed(0)
@BOUNDED
@given(text=st.text(min_size=1, max_size=200))
def test_any_text_comes_through_whole(server, text):
    server.service.requests.clear()
    answer = server.exchange(post({"input": text}, headers=("Connection: close",)))
    assert answer.startswith(b"HTTP/1.1 200")
    assert server.service.requests[-1].text == text
