"""The files in examples/deploy name flags, variables and paths that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from swiftspec.cli.arguments import parse_command
from swiftspec.cli.config_sources import VARIABLES
from swiftspec.deploy.ray import ray_application
from swiftspec.serve.link.frontend_process import requested_kv_events
from swiftspec.serve.middleware.security import PUBLIC_PATHS
from swiftspec.settings.settings import env_name
from swiftspec.signals import DRAIN_TIMEOUT_S
from swiftspec.startup.built_in_models import served_model_names

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "examples" / "deploy").iterdir())
BUILD_VARIABLES = {"SWIFTSPEC_CUDA", "SWIFTSPEC_CUDA_ARCHS"}


def manifests() -> Iterator[dict[str, Any]]:
    yield from yaml.safe_load_all((ROOT / "examples" / "deploy" / "kubernetes.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_variables_exist(file: Path) -> None:
    known = {env_name(name) for name in VARIABLES} | BUILD_VARIABLES
    assert {*re.findall(r"\bSWIFTSPEC_[A-Z_]+", file.read_text(encoding="utf-8"))} <= known


def test_the_server_of_the_manifest() -> None:
    """Its flags are valid, and its probes need no API key."""
    deployment = next(each for each in manifests() if each["kind"] == "Deployment")
    server = deployment["spec"]["template"]["spec"]["containers"][0]
    command = parse_command(["--port", "8000", *server["args"]])
    assert (command.settings.target_tp, command.settings.draft_tp) == (6, 2)
    assert deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > DRAIN_TIMEOUT_S
    probes = [server[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert {*probes} <= {*PUBLIC_PATHS}


def test_the_gateway_fits_the_server() -> None:
    """Pool, events and blocks have the labels, ports and sizes of the server with the arguments in the comment."""
    text = (ROOT / "examples" / "deploy" / "gateway.yaml").read_text(encoding="utf-8")
    pool, picker = yaml.safe_load_all(text)
    deployment = next(each for each in manifests() if each["kind"] == "Deployment")
    assert pool["spec"]["selector"] == deployment["spec"]["selector"]
    assert [each["number"] for each in pool["spec"]["targetPorts"]] == [8000]
    comment = re.sub(r"^# ?", "", text.partition("apiVersion")[0], flags=re.MULTILINE)
    args = yaml.safe_load(re.findall(r"args: (\[.*?\])$", comment, re.DOTALL | re.MULTILINE)[0])
    settings = parse_command(["--port", "8000", *args]).settings
    config = requested_kv_events(settings)
    assert config is not None and config.binds and config.topic == "kv@$(POD_IP):8000@MODEL"
    plugins = {each["type"]: each for each in yaml.safe_load(picker["data"]["config.yaml"])["plugins"]}
    events = plugins["precise-prefix-cache-producer"]["parameters"]
    ports = events["kvEventsConfig"]["podDiscoveryConfig"]
    assert config.endpoint.endswith(f":{ports['socketPort']}")
    assert config.replay_endpoint is not None and config.replay_endpoint.endswith(f":{ports['replaySocketPort']}")
    assert events["tokenProcessorConfig"]["blockSizeTokens"] == config.block_size
    assert plugins["token-producer"]["parameters"]["modelName"] == served_model_names(settings)[0]


def test_the_dashboard_of_the_compose_file_exists() -> None:
    compose = yaml.safe_load((ROOT / "examples" / "deploy" / "compose.yaml").read_text(encoding="utf-8"))
    assert (ROOT / "examples" / "deploy" / compose["configs"]["dashboard"]["file"]).is_file()
    build = compose["services"]["swiftspec"]["build"]
    assert (ROOT / build["dockerfile"]).is_file()


def test_the_context_of_the_images_has_what_they_copy() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for name in ("Dockerfile", "Dockerfile.cuda"):
        text = (ROOT / "examples" / "deploy" / name).read_text(encoding="utf-8")
        copied = {
            part for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE) for part in line.split()
        }
        assert copied <= allowed and all((ROOT / part).exists() for part in copied)


def test_applications_of_the_ray_config() -> None:
    config = yaml.safe_load((ROOT / "examples" / "ray_serve.yaml").read_text(encoding="utf-8"))
    for application in config["applications"]:
        assert application["import_path"] == f"{ray_application.__module__}:{ray_application.__name__}"
        made: Any = ray_application(application["args"])
        assert made._bound_deployment.name == application.get("deployments", [{"name": "Engine"}])[0]["name"]
