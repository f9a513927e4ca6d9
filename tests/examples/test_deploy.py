"""examples/deploy: the files parse, and every flag, route, port and file they name exists."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import needs
from tests.server.site import site
from tokserve.cli.main import parser
from tokserve.config.kv_connector import transfer_plan
from tokserve.version import __version__

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "deploy"
DOCKERFILES = ["Dockerfile", "Dockerfile.cuda"]
INSTRUCTIONS = {
    "FROM",
    "RUN",
    "WORKDIR",
    "COPY",
    "USER",
    "ENV",
    "EXPOSE",
    "HEALTHCHECK",
    "ENTRYPOINT",
    "CMD",
}


def routes() -> set[str]:
    return {route.path for route in site().app.routes}


def check_command(words: list[str]) -> dict[str, Any]:
    """What `tokserve` makes of its arguments; a flag that does not exist ends the test."""
    return vars(parser().parse_args(words))


def instructions(name: str) -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", (FOLDER / name).read_text())
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_dockerfiles(name: str) -> None:
    dockerfile = instructions(name)
    assert {word for word, _ in dockerfile} <= INSTRUCTIONS
    last = dict(dockerfile)  # of each instruction, the last
    values = check_command([*json.loads(last["ENTRYPOINT"])[1:], *json.loads(last["CMD"])])
    assert values["host"] == "0.0.0.0" and values["model"] == "demo"
    assert json.loads(last["ENTRYPOINT"])[0] == "tokserve" and last["USER"] == "10001"
    check = json.loads(last["HEALTHCHECK"].partition("CMD ")[2])
    (path,) = re.findall(r"http://127\.0\.0\.1:8000(/\w+)", check[2])
    assert check[:2] == ["python", "-c"] and path in routes() and last["EXPOSE"] == "8000"
    compile(check[2], "HEALTHCHECK", "exec")
    for word, rest in dockerfile:
        if word == "COPY":
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
    for _, rest in [pair for pair in dockerfile if pair[0] == "RUN"]:
        command = re.sub(r"^--mount=\S+\s+", "", rest)
        subprocess.run(["sh", "-n", "-c", command], check=True)


def test_what_the_images_are_built_from_is_all_that_the_package_needs() -> None:
    for name in DOCKERFILES:
        copied = {source for word, rest in instructions(name) if word == "COPY" for source in rest.split()[:-1]}
        assert {"pyproject.toml", "CMakeLists.txt", "csrc", "tokserve", "README.md", "LICENSE"} <= copied


def test_systemd_unit() -> None:
    unit = configparser.RawConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(FOLDER / "tokserve.service")
    assert unit.sections() == ["Unit", "Service", "Install"]
    service = unit["Service"]
    program, *words = shlex.split(service["ExecStart"])
    values = check_command(words)
    assert program.endswith("/bin/tokserve") and values["log_format"] == "json"
    assert float(service["TimeoutStopSec"]) > values["shutdown_timeout"]


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    needs.SYSTEMD.or_skip()
    unit = tmp_path / "tokserve.service"
    unit.write_text((FOLDER / "tokserve.service").read_text().replace("/opt/tokserve/bin/tokserve", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", "--recursive-errors=no", unit], capture_output=True, text=True)
    complaints = [line for line in done.stderr.splitlines() if "tokserve.service" in line]
    assert not complaints, complaints


def test_compose_starts_what_exists() -> None:
    folder = FOLDER / "compose"
    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    assert services.keys() == {"tokserve", "prometheus", "grafana"}
    server = services["tokserve"]
    values = check_command(["serve", "demo", *server["command"][1:]])
    assert values["host"] == "0.0.0.0" and float(server["stop_grace_period"].rstrip("s")) > 10.0
    assert (folder / server["build"]["context"] / server["build"]["dockerfile"]).exists()
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        for volume in service.get("volumes", ()):
            assert (folder / volume.partition(":")[0]).is_file(), volume
    scraped = yaml.safe_load((folder / "prometheus.yml").read_text())
    assert scraped["scrape_configs"][0]["static_configs"] == [{"targets": ["tokserve:8000"]}]
    local = yaml.safe_load((ROOT / "examples" / "monitoring" / "prometheus.yml").read_text())
    assert {name: scraped[name] for name in ("global", "rule_files")} == {
        name: local[name] for name in ("global", "rule_files")
    }
    (source,) = yaml.safe_load((folder / "datasource.yml").read_text())["datasources"]
    assert source["type"] == "prometheus" and source["url"] == "http://prometheus:9090"


def manifests() -> dict[str, Any]:
    folder = FOLDER / "kubernetes"
    names = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    assert {path.name for path in folder.iterdir()} == {*names, "kustomization.yaml"}
    return {manifest["kind"]: manifest for manifest in (yaml.safe_load((folder / name).read_text()) for name in names)}


def test_kubernetes_manifests() -> None:
    manifest = manifests()
    assert manifest.keys() == {"Secret", "Deployment", "Service", "PodDisruptionBudget"}
    pod = manifest["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    values = check_command(["serve", *container["args"]])
    stop = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["spec"]["terminationGracePeriodSeconds"] > values["shutdown_timeout"] + stop
    (port,) = container["ports"]
    assert port["containerPort"] == values["port"] and values["cpu_threads"] == int(
        container["resources"]["limits"]["cpu"]
    )
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container[kind]["httpGet"]
        assert probe["path"].partition("?")[0] in routes() and probe["port"] == port["name"]
    (key,) = container["env"]
    chosen = key["valueFrom"]["secretKeyRef"]
    assert key["name"] == "TOKSERVE_API_KEY" and chosen["name"] == manifest["Secret"]["metadata"]["name"]
    assert chosen["key"] in manifest["Secret"]["stringData"]
    labels = pod["metadata"]["labels"]
    for selector in (
        manifest["Deployment"]["spec"]["selector"]["matchLabels"],
        manifest["Service"]["spec"]["selector"],
        manifest["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    assert manifest["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}


def test_values_of_the_chart_are_declared_and_used() -> None:
    """That it renders what the manifests hold is checked by `make check-deploy`, which has Helm's library."""
    folder = FOLDER / "helm"
    chart = yaml.safe_load((folder / "Chart.yaml").read_text())
    values = yaml.safe_load((folder / "values.yaml").read_text())
    schema = json.loads((folder / "values.schema.json").read_text())
    templates = "".join(path.read_text() for path in (folder / "templates").iterdir())
    assert chart["appVersion"] == __version__
    assert values.keys() == schema["properties"].keys() - {"global"} == set(re.findall(r"\.Values\.(\w+)", templates))
    options = re.findall(r"- (--[\w-]+)=", templates)
    assert options == [word.partition("=")[0] for word in container_arguments() if word.startswith("--")]


def container_arguments() -> list[str]:
    (container,) = manifests()["Deployment"]["spec"]["template"]["spec"]["containers"]
    return list(container["args"])


def documents(folder: str) -> dict[tuple[str, str], Any]:
    """The objects of a kustomization, by kind and name."""
    names = yaml.safe_load((FOLDER / folder / "kustomization.yaml").read_text())["resources"]
    assert {path.name for path in (FOLDER / folder).iterdir()} == {*names, "kustomization.yaml"}
    manifest = [one for name in names for one in yaml.safe_load_all((FOLDER / folder / name).read_text())]
    return {(one["kind"], one["metadata"]["name"]): one for one in manifest}


def pods_of(manifest: dict[tuple[str, str], Any], name: str) -> list[str]:
    """The names by which the pods of a StatefulSet are reached."""
    spec = manifest["StatefulSet", name]["spec"]
    service = manifest["Service", spec["serviceName"]]["spec"]
    assert service["clusterIP"] == "None"
    assert service["selector"] == spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    return [f"{name}-{number}.{spec['serviceName']}" for number in range(spec["replicas"])]


def server_values(manifest: dict[tuple[str, str], Any], name: str) -> dict[str, Any]:
    """The options of the servers of a StatefulSet, whose probes, ports, secrets and mounts exist."""
    pod = manifest["StatefulSet", name]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    values = check_command(["serve", *container["args"]])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["http"] == values["port"]
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container[kind]["httpGet"]
        assert probe["path"].partition("?")[0] in routes() and probe["port"] == "http"
    for port in manifest["Service", name]["spec"]["ports"]:
        assert port["port"] == ports[port["targetPort"]]
    secret = manifest["Secret", "tokserve"]["stringData"]
    for variable in container["env"]:
        if "secretKeyRef" in variable["valueFrom"]:
            assert variable["valueFrom"]["secretKeyRef"]["key"] in secret
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
    if "secret" in volumes:
        assert {item["key"] for item in volumes["secret"]["secret"]["items"]} <= secret.keys()
    return values


def router_arguments(manifest: dict[tuple[str, str], Any]) -> list[str]:
    (container,) = manifest["Deployment", "tokserve-router"]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["vllm-router"]
    return list(container["args"])


def test_manifests_of_a_router() -> None:
    manifest = documents("kubernetes-router")
    pods, values = pods_of(manifest, "tokserve"), server_values(manifest, "tokserve")
    config = values["kv_events_config"]
    sources = {config["endpoint"].rpartition(":")[2], config["replay_endpoint"].rpartition(":")[2]}
    policy = manifest["NetworkPolicy", "tokserve"]["spec"]["ingress"][1]
    assert {str(port["port"]) for port in policy["ports"]} == sources
    arguments = router_arguments(manifest)
    for pod in pods:
        address = f"http://{pod}:{values['port']}"
        assert address in arguments
        assert {f"{address}=tcp://{pod}:{port}" for port in sources} <= set(arguments)
    assert f"--kv-event-model={values['model']}" in arguments


def test_manifests_of_prefill_and_decode() -> None:
    manifest = documents("kubernetes-disaggregated")
    key = {"key_file": "/etc/tokserve/transfer-key"}
    pods = {name: pods_of(manifest, f"tokserve-{name}") for name in ("prefill", "decode")}
    producer = server_values(manifest, "tokserve-prefill")
    plan = transfer_plan(producer["kv_transfer_config"])
    assert plan is not None and plan.role == "kv_producer" and plan.key_file == key["key_file"]
    assert [plan.advertised.replace("$(POD_NAME)", pod.partition(".")[0]) for pod in pods["prefill"]] == pods["prefill"]
    policy = manifest["NetworkPolicy", "tokserve-prefill"]["spec"]["ingress"][1]
    assert policy["ports"] == [{"port": plan.port}]
    other = transfer_plan(server_values(manifest, "tokserve-decode")["kv_transfer_config"])
    assert other is not None and other.role == "kv_consumer" and other.key_file == key["key_file"]
    assert [*other.peers] == pods["prefill"]
    arguments = router_arguments(manifest)
    for kind, names in pods.items():
        urls = [arguments[i + 1] for i, argument in enumerate(arguments) if argument == f"--{kind}"]
        assert urls == [f"http://{pod}:{producer['port']}" for pod in names]


@pytest.mark.parametrize("folder", ["deploy", "monitoring"])
def test_readmes_name_flags_routes_and_files_that_exist(folder: str) -> None:
    text = (ROOT / "examples" / folder / "README.md").read_text()
    serve = parser()._subparsers._group_actions[0].choices["serve"]  # type: ignore[union-attr,index,call-overload]
    flags = {flag for action in serve._actions for flag in action.option_strings}
    for flag in re.findall(r"`(--[\w-]+)", text) + re.findall(r"tokserve serve[^\n`]*?(--[\w-]+)", text):
        assert flag in flags, flag
    for path in re.findall(r"`(/[a-z]+)[`?]", text):
        assert path in routes(), path
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / "examples" / folder / target).exists(), target
