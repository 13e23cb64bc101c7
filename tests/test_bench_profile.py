"""``vivace bench profile``: gaps are found, the trace opens elsewhere, utilisation comes with advice."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

from vivace.bench import profile
from vivace.bench.nvml import Nvml, NVMLError
from vivace.bench.profile_device import DeviceSampler, advice
from vivace.bench.timeline import timeline_svg
from vivace.cli import app
from vivace.engine.trace import Span

SPANS = [
    Span("lm", 0.0, 4.0),
    Span("flow", 5.0, 8.0),
    Span("lm", 6.0, 9.0),
    Span("vocoder", 9.01, 10.0),
]


def test_gaps_are_where_no_stage_runs():
    assert profile.busy(SPANS) == pytest.approx(8.99)
    (gap,) = profile.find_gaps(SPANS)
    assert (gap.start_ms, gap.length_ms, gap.after, gap.before) == (4.0, 1.0, "lm", "flow")
    assert profile.find_gaps([]) == []


def test_picture_has_a_lane_of_gaps():
    picture = ElementTree.fromstring(timeline_svg(SPANS, [10.5], "one request"))
    texts = [element.text for element in picture.iter() if element.tag.endswith("text")]
    assert texts[-1] == "host gaps"
    says = [element.text for element in picture.iter() if element.tag.endswith("title")]
    assert [text for text in says if text.startswith("no stage")] == ["no stage, lm to flow: 4.00 to 5.00 ms"]
    bottom = max(
        float(e.get("y")) + float(e.get("height")) for e in picture.iter() if e.get("y") and e.get("height")
    )
    assert bottom <= float(picture.get("height"))


def test_chrome_trace_has_microseconds_and_a_row_a_stage():
    events = profile.chrome_trace(SPANS, [10.5])["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert list(names.values()) == ["text", "prompt", "speech LM", "flow", "vocoder", "host gaps"]
    drawn = [(names[event["tid"]], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    assert ("flow", 5000.0, 3000.0) in drawn
    assert ("host gaps", 4000.0, 1000.0) in drawn
    assert [event["ts"] for event in events if event["ph"] == "i"] == [10500.0]


def test_command_writes_a_picture_and_a_trace(random_model_folder, tmp_path):
    out = tmp_path / "made"
    arguments = ["bench", "profile", "-m", str(random_model_folder), "--seconds", "1", "--out", str(out)]
    done = CliRunner().invoke(app, [*arguments, "--batch", "2", "--requests", "1"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.output.splitlines()[-1])
    ElementTree.fromstring((out / "timeline.svg").read_text(encoding="utf-8"))
    events = json.loads((out / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    traced = sum(event["dur"] for event in events if event.get("cat") == "stage") / 1e3
    assert traced == pytest.approx(sum(document["stages_ms"].values()), abs=0.1)
    assert document["busy_ms"] + document["gap_ms"] <= document["wall_ms"] + 5
    assert document["load"]["sentences"] == 2
    if not torch.cuda.is_available():
        assert document["load"]["device"] is None
        assert "NVIDIA" in document["load"]["device_reason"]


@pytest.mark.parametrize(
    ("busy", "growth", "word"),
    [(40, 1.0, "larger"), (95, 2.0, "smaller"), (95, 1.1, "suits"), (75, 3, "suits")],
)
def test_advice_of_the_second_report(busy, growth, word):
    assert word in advice(busy, growth)


class FakeNvml:
    """What the binding offers, with figures of our own."""

    def __init__(self, fails=False):
        self.fails, self.looks, self.looked = fails, 0, threading.Event()

    def nvmlInit(self):
        if self.fails:
            raise RuntimeError("driver not loaded")

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return 0

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetPowerUsage(self, handle):
        raise RuntimeError("not supported")

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=2**30)

    def nvmlDeviceGetUtilizationRates(self, handle):
        self.looks += 1
        if self.looks == 2:
            self.looked.set()
        return SimpleNamespace(gpu=50 if self.looks == 1 else 100)


def test_sampler_sees_the_device_until_its_block_ends():
    library = FakeNvml()
    with DeviceSampler(torch.device("cuda"), library) as sampler:
        assert library.looked.wait(10)
    seen = sampler.summary()
    assert seen.samples == library.looks >= 2
    assert 75 <= seen.busy_percent_mean < 100
    assert (seen.busy_percent_max, seen.memory_bytes_max, seen.power_watts_mean) == (100, 2**30, None)


def test_sampler_says_why_it_sees_nothing():
    with DeviceSampler(torch.device("cuda"), FakeNvml(fails=True)) as sampler:
        pass
    assert sampler.summary() is None
    assert "driver not loaded" in sampler.reason
    assert "NVIDIA" in DeviceSampler(torch.device("cpu")).reason


class FakeDriver:
    """The driver's library as ``ctypes`` hands it out."""

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):
        return 6  # not found

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        handle._obj.value = 100 + index.value
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle, rates):
        rates._obj.gpu = handle.value
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle, memory):
        memory._obj.used = 3 * 2**33
        return 0

    def nvmlDeviceGetPowerUsage(self, handle, power):
        power._obj.value = 250_000
        return 0


def test_sampler_reads_the_driver_without_its_binding():
    with DeviceSampler(torch.device("cuda", 2), Nvml(FakeDriver())) as sampler:
        pass
    seen = sampler.summary()
    assert (seen.busy_percent_max, seen.memory_bytes_max, seen.power_watts_mean) == (102, 3 * 2**33, 250.0)
    with pytest.raises(NVMLError, match="nvmlDeviceGetHandleByUUID returned 6"):
        Nvml(FakeDriver()).nvmlDeviceGetHandleByUUID("GPU-0")
