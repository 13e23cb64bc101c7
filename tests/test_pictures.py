"""Pictures from rows of results: which rows are drawn, and that those of the repository are."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from benchmarks import pictures
from benchmarks.steps import ROOT
from vivace.bench.serving_chart import serving_svg

RESULTS = ROOT / "benchmarks" / "results"


def rows_of(name):
    return pictures.read_rows(RESULTS / f"{name}.jsonl")


def write(folder, name, *rows):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_a_sweep_in_several_rows():
    base = rows_of("serving")[0]
    point = next(point for point in base["points"] if "streams" in point)
    others = {name: value for name, value in point.items() if name != "streams"}

    def row(*points, **other):
        return base | {"commit": "abc1234", "points": list(points)} | other

    rows_of_file = [
        row(point | {"streams": 7}, point | {"streams": 32}, commit="older00"),
        row(point | {"streams": 9}, commit="another", max_streams=3),
        row(point | {"streams": 1, "ttfb_ms_p50": 99.0}, point | {"streams": 32}),
        row(point | {"streams": 400}, point | {"streams": 1, "ttfb_ms_p50": 21.5}, others | {"offline": 400}),
        row(others | {"rate": 10.0}),
        row(point | {"streams": 16}, deterministic=True),
        row(point | {"streams": 2}, loop="reply"),
        row(point | {"streams": 3}, hardware="another"),
    ]
    merged = pictures.sweep(rows_of_file[:-1])
    loads = [point.get("streams", point.get("rate", point.get("offline"))) for point in merged["points"]]
    assert loads == [1, 7, 32, 400, 10.0, 400]
    assert merged["commit"] == "older00, abc1234"
    assert merged["points"][0]["ttfb_ms_p50"] == 21.5
    assert merged["most_streams_in_real_time"] == 400
    drawn = serving_svg(merged)
    assert "p50, 1: 21.5" in drawn
    assert "p50, 32:" in drawn
    assert [point["streams"] for point in pictures.sweep(rows_of_file)["points"]] == [3]
    with pytest.raises(ValueError, match="no row"):
        pictures.sweep(rows_of_file[5:7])


def test_committed_pictures_of_a_cpu_are_those_of_the_rows():
    made = pictures.draw(RESULTS)
    names = [f"{name}-cpu.svg" for name in ("ladder", "limits", "throughput", "profile")]
    assert names == [name for name in made if "cpu" in name]
    for name in names:
        assert made[name] == (pictures.PICTURES / name).read_text(encoding="utf-8"), f"draw {name} again"


def test_rows_of_a_gpu_give_all_its_pictures(tmp_path, capsys):
    """Also before its ladder is whole, and in halves although float32 was measured last."""
    gpu = {"hardware": "NVIDIA Made-up X9", "model": "full", "precision": "bfloat16"}
    for name in ("limits", "throughput", "profile"):
        row = rows_of(name)[-1] | gpu
        write(
            tmp_path, name, row, row | {"precision": "float32", "commit": "single0"}, row | {"model": "full2"}
        )
    point = rows_of("serving")[0]["points"][0]
    rate = {name: value for name, value in point.items() if name != "streams"} | {"rate": 5.0}
    sweep = rows_of("serving")[0] | gpu
    write(tmp_path, "serving", sweep, sweep | {"points": [rate, rate | {"rate": 10.0}]})
    published = tmp_path / "published"
    published.mkdir()
    (published / "single.json").write_text(json.dumps(gpu))
    (published / "timeline.svg").write_text("<svg/>")
    out = tmp_path / "pictures"
    pictures.main([str(tmp_path), "--published", str(published), "--out", str(out)])
    names = ["limits", "throughput", "profile", "serving", "serving-rates", "timeline"]
    assert [line.rsplit("/")[-1] for line in capsys.readouterr().out.splitlines()] == [
        f"{name}-x9.svg" for name in names
    ]
    for path in out.iterdir():
        assert "single0" not in "".join(ElementTree.parse(path).getroot().itertext())
    assert "listeners at once" in (out / "serving-x9.svg").read_text()
    assert "requests per second" in (out / "serving-rates-x9.svg").read_text()
    write(tmp_path, "ladder", rows_of("ladder")[-1] | gpu | {"model": "full2", "commit": "ladder0"})
    made = pictures.draw(tmp_path)
    assert list(made)[:2] == ["ladder-x9.svg", "limits-x9.svg"]
    assert "full2," in made["profile-x9.svg"]
