"""The files of ``deploy/`` say what is true of the product: paths, versions, options, names of figures."""

import io
import json
import re
import runpy
import shlex
import tomllib
from pathlib import Path

import pytest
import typer
import yaml

from tests.server_helpers import FakeService
from vivace import config as configuration
from vivace import environment
from vivace.cli import app
from vivace.server import metrics as server_metrics
from vivace.server.guard import MULTIPART_OVERHEAD_BYTES
from vivace.server.metrics import Metrics

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
STEPS = runpy.run_path(str(DEPLOY / "steps.py"))
ARGUMENTS, (BUILD, FINAL) = STEPS["parse"](DOCKERFILE)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
CUDA = yaml.safe_load((DEPLOY / "compose.cuda.yaml").read_text(encoding="utf-8"))
UNIT = (DEPLOY / "vivace.service").read_text(encoding="utf-8")
PROXIES = {name: (DEPLOY / name).read_text(encoding="utf-8") for name in ("nginx.conf", "Caddyfile")}
DRAIN_SECONDS = configuration.ServerConfig().drain_seconds


def texts(stage, instruction: str) -> list[str]:
    return [text for kind, text in stage.steps if kind == instruction]


def check_serve(words: list[str]) -> None:
    """Raises click's error of usage unless ``vivace WORDS`` is a way to start the server."""
    command = typer.main.get_command(app)
    name, found, rest = command.resolve_command(command.make_context("vivace", list(words)), list(words))
    assert name == "serve"
    found.make_context(name, list(rest))


# -- the image -------------------------------------------------------------------------------------------------------


def test_what_is_copied_exists_and_reaches_the_build():
    let_through = set(re.findall(r"^!(.+)$", (DEPLOY / "Dockerfile.dockerignore").read_text(), re.MULTILINE))
    sources = set()
    for text in texts(BUILD, "COPY"):
        stage, paths, _ = STEPS["copied"](text)
        assert stage is None
        sources |= set(paths)
    assert sources == let_through
    assert all((ROOT / path).exists() for path in sources)
    needed = {"pyproject.toml", "src", PROJECT["readme"], *PROJECT["license-files"]}
    assert needed <= sources
    assert STEPS["copied"](*texts(FINAL, "COPY")) == ("build", ["/opt/vivace"], "/opt/vivace")


def test_the_image_installs_what_the_makefile_installs():
    """The same constraints; every dependency of the project; Python new enough."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    installs = [text for text in texts(BUILD, "RUN") if "pip install" in text]
    assert "-c constraints.txt" in makefile
    assert all("-c constraints.txt" in text for text in installs[:2])
    assert "--no-deps ." in installs[2]
    code = re.search(r'python -c "(import tomllib.*?)" >', installs[1])[1]
    printed = []
    exec(code, {"print": printed.append, "open": lambda name, _: io.BytesIO((ROOT / name).read_bytes())})
    wanted = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["containers"]
    assert printed[0].splitlines() == wanted
    assert ARGUMENTS["BASE"] == "debian:bookworm-slim"  # with Python 3.11
    assert PROJECT["requires-python"] == ">=3.11"
    constrained = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert re.search(r"^torch==", constrained, re.MULTILINE)


def test_the_image_runs_as_nobody_in_particular_and_holds_no_secret():
    [user] = texts(FINAL, "USER")
    assert user == "10001:10001"
    assert "--uid 10001" in DOCKERFILE
    assert "--gid 10001" in DOCKERFILE
    order = [kind for kind, _ in FINAL.steps]
    assert "RUN" not in order[order.index("USER") :]
    # A build argument or variable that holds a key would stay in the image's history.
    names = {text.split("=")[0] for stage in (BUILD, FINAL) for text in texts(stage, "ARG")}
    names |= {
        name for stage in (BUILD, FINAL) for text in texts(stage, "ENV") for name in STEPS["pairs"](text)
    }
    assert not [name for name in names if re.search("KEY|TOKEN|SECRET|PASSWORD", name)]


def test_the_images_variables_are_read_and_lie_on_volumes(monkeypatch):
    variables = {}
    for text in texts(FINAL, "ENV"):
        variables |= STEPS["pairs"](text)
    volumes = json.loads(*texts(FINAL, "VOLUME"))
    for name, read in (
        ("VIVACE_VOICES", environment.voices_folder),
        ("VIVACE_CACHE", environment.cache_folder),
    ):
        monkeypatch.setenv(name, variables[name])
        assert str(read()) == variables[name]
        assert any(variables[name].startswith(volume) for volume in volumes)
    known = re.findall(r"VIVACE_[A-Z]+", Path(environment.__file__).read_text(encoding="utf-8"))
    assert {name for name in variables if name.startswith("VIVACE_")} <= set(known)


def test_the_image_starts_the_server_and_asks_for_its_health():
    [entry], [command] = texts(FINAL, "ENTRYPOINT"), texts(FINAL, "CMD")
    assert [*json.loads(entry)] == [next(iter(PROJECT["scripts"]))]
    check_serve(json.loads(command))
    [health] = texts(FINAL, "HEALTHCHECK")
    default_port = configuration.ServerConfig().port
    assert f"http://127.0.0.1:{default_port}/health/ready" in health
    compile(json.loads(health.partition("CMD ")[2])[2], "health check", "exec")
    assert texts(FINAL, "EXPOSE") == [f"{default_port} 10200"]


# -- compose, systemd ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("services", [COMPOSE["services"], CUDA["services"]], ids=["cpu", "cuda"])
def test_compose_starts_the_server(services):
    words = [re.sub(r"\$\{\w+:-(.*?)\}", r"\1", word) for word in services["vivace"]["command"]]
    check_serve(words)


def test_compose_names_what_is_there():
    vivace, prometheus, grafana = (COMPOSE["services"][name] for name in ("vivace", "prometheus", "grafana"))
    assert (DEPLOY / vivace["build"]["context"]).resolve() == ROOT
    assert (ROOT / vivace["build"]["dockerfile"]).is_file()
    assert set(vivace["build"]["args"]) <= {
        text.split("=")[0] for stage in (BUILD, FINAL) for text in texts(stage, "ARG")
    }
    assert {volume.split(":")[1] for volume in vivace["volumes"]} == set(json.loads(*texts(FINAL, "VOLUME")))
    for volume in prometheus["volumes"] + grafana["volumes"]:
        source = volume.split(":")[0]
        assert source in COMPOSE["volumes"] or (DEPLOY / source).exists()
    scraper = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"][0]
    assert scraper["static_configs"][0]["targets"] == [f"vivace:{configuration.ServerConfig().port}"]
    [secret] = prometheus["secrets"]
    assert scraper["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    assert COMPOSE["secrets"][secret]["environment"] == "VIVACE_API_KEY"


def test_nothing_is_open_to_others_and_no_password_is_written_down():
    for service in COMPOSE["services"].values():
        for port in service.get("ports", []):
            assert re.match(r"(\$\{\w+:-)?127\.0\.0\.1:", port)
    text = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    for name in ("VIVACE_API_KEYS", "GF_SECURITY_ADMIN_PASSWORD"):
        assert re.search(rf"{name}: \$\{{\w+:\?", text), f"{name} must be given by whoever starts it"


def test_whoever_stops_the_server_waits_for_its_drain():
    grace = int(COMPOSE["services"]["vivace"]["stop_grace_period"].removesuffix("s"))
    unit = int(re.search(r"^TimeoutStopSec=(\d+)", UNIT, re.MULTILINE)[1])
    assert min(grace, unit) > DRAIN_SECONDS
    assert "KillMode=mixed" in UNIT


def test_the_unit_starts_the_server():
    words = shlex.split(re.search(r"^ExecStart=(.+)$", UNIT, re.MULTILINE)[1])
    assert words[0] == "/opt/vivace/bin/vivace"
    check_serve(words[1:])
    known = Path(environment.__file__).read_text(encoding="utf-8")
    assert all(name in known for name in re.findall(r"VIVACE_[A-Z]+", UNIT))


# -- proxies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "unit"), [("nginx.conf", 2**20), ("Caddyfile", 10**6)])
def test_a_proxy_lets_the_largest_upload_through(name, unit):
    limit = int(re.search(r"(?:client_max_body_size|max_size) (\d+)", PROXIES[name])[1]) * unit
    assert limit > configuration.ServerConfig().upload_bytes + MULTIPART_OVERHEAD_BYTES


def test_nginx_waits_longer_than_the_server_and_holds_nothing_back():
    text = PROXIES["nginx.conf"]
    assert (
        int(re.search(r"proxy_read_timeout (\d+)s", text)[1]) > configuration.ServerConfig().request_seconds
    )
    for line in ("proxy_buffering off;", "proxy_http_version 1.1;", "proxy_set_header Host $http_host;"):
        assert line in text


# -- the dashboard ---------------------------------------------------------------------------------------------------


def registered_names(tmp_path) -> set[str]:
    """Every name that ``/metrics`` can show."""
    service = FakeService(tmp_path)
    service.figures = dict.fromkeys(server_metrics._SERVICE_GAUGES, 1.0)
    metrics = Metrics(service)
    metrics.accepted.labels("http").inc()
    metrics.ended.labels("http", "done").inc()
    metrics.errors.labels("x").inc()
    lines = metrics.render().decode().splitlines()
    return {re.match(r"\w+", line)[0] for line in lines if not line.startswith("#")}


def test_the_dashboards_panels_ask_for_figures_that_exist(tmp_path):
    known = registered_names(tmp_path)
    dashboard = json.loads((DEPLOY / "grafana/dashboards/vivace.json").read_text(encoding="utf-8"))
    source = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())
    asked = set()
    for panel in dashboard["panels"]:
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            names = set(re.findall(r"vivace_\w+", target["expr"]))
            assert names, panel["title"]
            assert names <= known, panel["title"]
            assert target["datasource"]["uid"] == source["datasources"][0]["uid"]
            asked |= names
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"]) > 12
    # Nothing that can be measured is left out, but what others are made of.
    shown = {re.sub(r"_(bucket|count|sum|created|total)$", "", name) for name in asked}
    measured = {re.sub(r"_(bucket|count|sum|created|total)$", "", name) for name in known}
    assert {name for name in measured - shown if name != "vivace_pages"} == set()


def test_labels_of_the_dashboard_exist(tmp_path):
    dashboard = (DEPLOY / "grafana/dashboards/vivace.json").read_text(encoding="utf-8")
    used = set(re.findall(r"\{\{(\w+)\}\}", dashboard)) | set(re.findall(r"by \((\w+)\)", dashboard))
    assert used == {"outcome", "front_end", "code", "state", "le", "engine"}
