"""The files under ``deploy/``, as far as they can be checked without Docker, a Kubernetes cluster or Grafana.

Every command line in them is parsed by the real commands and passes the rules of security. Ports and paths agree. The
dashboard asks only for metrics that exist.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from tests.deploy.command_lines import checked

from kvrelay.cli.options import SettingsSource
from kvrelay.cli.processes import WORKER_SETTINGS
from kvrelay.config import MetricsConfig, WorkerRole
from kvrelay.core.events import LoadMetrics
from kvrelay.core.tier_stats import StoreStats, TierCounts, TierStats
from kvrelay.engine.stats import EngineStats
from kvrelay.errors import ConfigError
from kvrelay.frontend.cluster.metrics import FrontendMetrics
from kvrelay.handoff.prefill_state import PrefillCounters
from kvrelay.planner.report import PlannerReport
from kvrelay.transfer.stats import StatsCounter, TransferStats
from kvrelay.version import __version__
from kvrelay.worker.reporting.metrics import WorkerMetrics, WorkerStats
from kvrelay.worker.reporting.stats import DecodeStats

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"


def opens_the_page(given: dict[str, Any]) -> bool:
    """With API keys only a key for metrics opens the page, so there must be a file of them."""
    files = given["api_keys_file"], given["metrics_keys_file"]
    return files == ("/etc/kvrelay/api-keys", "/etc/kvrelay/metrics-keys")


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


# -- Docker -----------------------------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions in order, continuation lines joined, comments left out."""
    lines = [line for line in (DEPLOY / "Dockerfile").read_text().splitlines() if line and not line.startswith("#")]
    return [tuple(line.split(None, 1)) for line in "\n".join(lines).replace("\\\n", " ").splitlines()]


def last(name: str) -> str:
    return [text for instruction, text in instructions() if instruction == name][-1]


def test_the_image_is_built_from_what_is_there() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    for instruction, text in instructions():
        if instruction == "COPY" and not text.startswith("--from"):
            for source in text.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert source.split("/")[0] not in ignored
    assert ("ARG", "BASE=python:3.11-slim-bookworm") in instructions()
    assert last("FROM") == "${BASE}"


def test_passwords_stay_out_of_the_image_and_of_the_repository() -> None:
    assert "deploy/etc" in (ROOT / ".dockerignore").read_text().split()
    assert {"deploy/etc/", "deploy/kubernetes/secrets.yaml"} <= set((ROOT / ".gitignore").read_text().split())


def test_torch_comes_first_and_from_its_own_index() -> None:
    (install,) = (text for name, text in instructions() if name == "RUN" and "TORCH_INDEX" in text)
    assert install.index("^torch==") < install.index("*.whl")
    assert "https://download.pytorch.org/whl/cpu" in "".join(text for _, text in instructions())


def test_the_image_does_not_run_as_root() -> None:
    names = [name for name, _ in instructions()]
    assert int(last("USER")) > 0
    assert "RUN" not in names[names.index("USER") :]


def test_the_image_s_own_command_starts_and_its_health_check_fits() -> None:
    entry, command = json.loads(last("ENTRYPOINT")), json.loads(last("CMD"))
    assert entry == ["tini", "--", "kvrelay"]
    given = checked(command, "")
    assert opens_the_page(given)
    assert f"KVRELAY_HEALTH_PORT={given['port']}" in last("ENV")
    probe = last("HEALTHCHECK")
    program = json.loads(probe[probe.index("CMD") + 3 :])
    assert "/health" in program[-1]
    compile(program[-1], "health check", "exec")
    exposed = {int(port) for port in last("EXPOSE").split()}
    assert exposed == {8000, 9400, 9500}


def compose() -> dict[str, Any]:
    (document,) = documents(DEPLOY / "compose.yaml")
    return document


def test_compose_starts_one_of_each() -> None:
    services, roles = compose()["services"], Counter[str]()
    address = {name: service["networks"]["cluster"]["ipv4_address"] for name, service in services.items()}
    assert len(set(address.values())) == len(services)
    subnet = compose()["networks"]["cluster"]["ipam"]["config"][0]["subnet"]
    assert all(each.startswith(subnet.removesuffix("0/24")) for each in address.values())
    for name, service in services.items():
        if name == "nats":
            continue
        given = checked(service["command"], f"nats://{service['command'][0]}:secret@{address['nats']}:4222")
        assert service["image"] == f"kvrelay:{__version__}"
        assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        if service["command"][0] == "worker":
            roles[given["role"]] += 1
            assert given["worker_host"] == address[name]
            assert service["environment"]["KVRELAY_HEALTH_PORT"] == str(given["metrics_port"])
        else:
            assert service["ports"] == [f"127.0.0.1:{given['port']}:{given['port']}"]
            assert opens_the_page(given)
            assert {"prefill", "decode"} == set(service["depends_on"])
        assert any(volume.endswith("}:/models/model:ro") for volume in service["volumes"])
    assert roles == {"prefill": 1, "decode": 1}


def test_compose_and_kubernetes_give_nats_the_roles_configuration() -> None:
    text = (DEPLOY / "nats.conf").read_text()
    for user in ("frontend", "worker"):
        (secret,) = (
            document["stringData"]["KVRELAY_CONTROL"]
            for document in documents(KUBERNETES / "secrets.example.yaml")
            if document["metadata"]["name"] == f"kvrelay-{user}"
        )
        assert secret == f"nats://{user}:change-me-{user}@nats:4222"
        assert f"user: {user}," in text
        assert f'"change-me-{user}"' in text
    assert "/etc/kvrelay/nats.conf" in compose()["services"]["nats"]["command"]


# -- Kubernetes -------------------------------------------------------------------------------------------------------


def manifests(*names: str) -> Iterator[dict[str, Any]]:
    (kustomization,) = documents(KUBERNETES / "kustomization.yaml")
    for name in names or kustomization["resources"]:
        yield from documents(KUBERNETES / name)


def deployments() -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in manifests() if each["kind"] == "Deployment"}


def container(deployment: dict[str, Any]) -> dict[str, Any]:
    (only,) = deployment["spec"]["template"]["spec"]["containers"]
    return only


def test_every_manifest_has_a_kind_a_name_and_its_place() -> None:
    files = {path.name for path in KUBERNETES.glob("*.yaml") if not path.name.endswith(".example.yaml")}
    (kustomization,) = documents(KUBERNETES / "kustomization.yaml")
    assert {*kustomization["resources"], "kustomization.yaml"} == files
    every = list(manifests(*(path.name for path in KUBERNETES.glob("*.yaml") if path.name != "kustomization.yaml")))
    assert all(each["apiVersion"] and each["metadata"]["name"] for each in every)
    kinds = {each["kind"] for each in every}
    assert {
        "Deployment",
        "Service",
        "PodDisruptionBudget",
        "NetworkPolicy",
        "Secret",
        "HorizontalPodAutoscaler",
    } < kinds


@pytest.mark.parametrize("name", ["frontend", "prefill", "decode"])
def test_a_deployment(name: str) -> None:
    deployment = deployments()[name]
    pod, only = deployment["spec"]["template"]["spec"], container(deployment)
    user = "frontend" if name == "frontend" else "worker"
    given = checked([word.replace("$(POD_IP)", "10.1.2.3") for word in only["args"]], f"nats://{user}:x@nats:4222")
    assert only["envFrom"] == [{"secretRef": {"name": f"kvrelay-{user}"}}]
    ports = {port["name"]: port["containerPort"] for port in only["ports"]}
    probed = "http" if name == "frontend" else "metrics"
    assert only["livenessProbe"]["httpGet"] == {"path": "/live", "port": probed}
    assert only["readinessProbe"]["httpGet"] == {"path": "/health", "port": probed}
    assert ports[probed] == given["port" if name == "frontend" else "metrics_port"]
    if name == "frontend":
        assert opens_the_page(given)
        assert given["shutdown_timeout_s"] + int(hook(only)[-1]) < pod["terminationGracePeriodSeconds"]
    else:
        assert given["role"] == name
        assert ports["requests"] == given["worker_port"]
        assert hook(only) == ["sh", "-c", "kill -TERM 1; sleep 590"]
        assert pod["terminationGracePeriodSeconds"] > 590
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    mounts = {mount["mountPath"] for mount in only["volumeMounts"]}
    assert {"/models", "/etc/kvrelay", "/tmp", "/var/cache/kvrelay"} <= mounts
    assert {mount["name"] for mount in only["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert pod["securityContext"]["runAsNonRoot"]
    assert only["securityContext"]["allowPrivilegeEscalation"] is False
    # A Service's variables would be taken for settings.
    assert pod["enableServiceLinks"] is False


def test_the_planner_acts_with_the_operator_s_login() -> None:
    only = container(deployments()["planner"])
    assert checked(only["args"], "nats://operator:x@nats:4222")["mode"] == "suggest"
    (secret,) = (source["secretRef"]["name"] for source in only["envFrom"])
    urls = {each["metadata"]["name"]: each["stringData"] for each in manifests("secrets.example.yaml")}
    assert urls[secret] == {"KVRELAY_CONTROL": "nats://operator:change-me-operator@nats:4222"}
    assert "user: operator," in (DEPLOY / "nats.conf").read_text()


def hook(only: dict[str, Any]) -> list[str]:
    return only["lifecycle"]["preStop"]["exec"]["command"]


def test_images_have_the_tag_of_this_release() -> None:
    (kustomization,) = documents(KUBERNETES / "kustomization.yaml")
    (image,) = kustomization["images"]
    assert image["newTag"] == __version__
    images = {container(each)["image"] for each in manifests() if "template" in each.get("spec", {})}
    assert images - {image["name"]} == {"nats:2.11-alpine"}


def test_each_container_has_requests_and_a_limit_of_memory() -> None:
    """None of the processor: a throttled worker's steps come late."""
    for each in manifests():
        if "template" in each.get("spec", {}):
            resources = container(each)["resources"]
            assert resources["requests"].keys() == {"cpu", "memory"}, each["metadata"]["name"]
            assert resources["limits"].keys() == {"memory"}


def test_block_storage_can_give_the_claims() -> None:
    """It knows one node at a time; so all pods with the model go to one node."""
    (kustomization,) = documents(KUBERNETES / "kustomization.yaml")
    (claim,) = (each for each in manifests() if each["kind"] == "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    (patch,) = kustomization["patches"]
    assert patch["target"] == {"kind": "Deployment"}
    ((only,),) = (
        each["value"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        for each in yaml.safe_load(patch["patch"])
    )
    assert only["topologyKey"] == "kubernetes.io/hostname"
    for each in deployments().values():
        assert only["labelSelector"]["matchLabels"].items() <= each["spec"]["template"]["metadata"]["labels"].items()


def test_selectors_meet_pods() -> None:
    labels = [
        each["spec"]["template"]["metadata"]["labels"] for each in manifests() if "template" in each.get("spec", {})
    ]
    for each in manifests():
        if each["kind"] in ("Service", "PodDisruptionBudget", "NetworkPolicy"):
            spec = each["spec"]
            wanted = spec.get("podSelector", spec.get("selector", {}))
            wanted = wanted.get("matchLabels", wanted)
            assert any(wanted.items() <= pod.items() for pod in labels), each["metadata"]["name"]


def test_frontends_reach_only_the_request_plane_of_workers() -> None:
    (policy,) = (each for each in manifests("network.yaml") if each["metadata"]["name"] == "workers")
    open_to = {
        json.dumps(rule["from"]): [port["port"] for port in rule.get("ports", [])] for rule in policy["spec"]["ingress"]
    }
    workers = [container(deployments()[name]) for name in ("prefill", "decode")]
    (requests,) = {port["containerPort"] for each in workers for port in each["ports"] if port["name"] == "requests"}
    callers = [{"podSelector": {"matchLabels": {"role": role}}} for role in ("frontend", "planner")]
    assert open_to[json.dumps(callers)] == [requests]
    # UCX takes any port; so no one else gets a rule without ports.
    assert [source for source, ports in open_to.items() if not ports] == [
        json.dumps([{"podSelector": {"matchLabels": {"plane": "kv"}}}])
    ]


def test_autoscalers_follow_metrics_that_exist() -> None:
    for scaler in manifests("autoscaling.example.yaml"):
        assert scaler["spec"]["scaleTargetRef"]["name"] in deployments()
        for metric in scaler["spec"]["metrics"]:
            (source,) = (value for key, value in metric.items() if key != "type")
            assert source["metric"]["name"] in exported()


def test_monitors_meet_pods_ports_and_keys() -> None:
    keys = {each["metadata"]["name"]: each["stringData"].keys() for each in manifests("secrets.example.yaml")}
    pods = [each["spec"]["template"] for each in deployments().values()]
    seen = []
    for monitor in manifests("monitoring.example.yaml"):
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        credentials = endpoint["authorization"]["credentials"]
        assert credentials["key"] in keys[credentials["name"]]
        # The dashboard and the alerts find their jobs by this word.
        assert "kvrelay" in f"{monitor['metadata']['namespace']}/{monitor['metadata']['name']}"
        for pod in pods:
            if monitor["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items():
                (only,) = pod["spec"]["containers"]
                assert endpoint["port"] in {port["name"] for port in only["ports"]}
                seen.append(pod["metadata"]["labels"]["role"])
    assert sorted(seen) == ["decode", "frontend", "prefill"]


def built_by_kustomize(folder: Path) -> str:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl here")
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kustomize_builds() -> None:
    built = [document for document in yaml.safe_load_all(built_by_kustomize(KUBERNETES)) if document]
    assert len(built) == len(list(manifests()))
    pods = [each["spec"]["template"]["spec"] for each in built if each["kind"] == "Deployment"]
    assert len(pods) == 4
    assert all("podAffinity" in pod["affinity"] for pod in pods)
    assert all(pod["containers"][0]["image"].endswith(f":{__version__}") for pod in pods)
    assert all(each["kind"] == "Namespace" or each["metadata"]["namespace"] == "kvrelay" for each in built)


def test_with_vllm_each_worker_has_a_gpu_and_the_others_have_none() -> None:
    built = {
        each["metadata"]["name"]: each
        for each in yaml.safe_load_all(built_by_kustomize(DEPLOY / "kubernetes-vllm"))
        if each["kind"] == "Deployment"
    }
    assert built.keys() == deployments().keys()
    for name, each in built.items():
        only, is_worker = container(each), name in ("prefill", "decode")
        assert only["image"] == f"kvrelay-vllm:{__version__}"
        assert ("nvidia.com/gpu" in only["resources"]["limits"]) == is_worker
        if is_worker:
            words = [word.replace("$(POD_IP)", "10.1.2.3") for word in only["args"]]
            assert checked(words, "nats://worker:x@nats:4222")["engine_kind"] == "vllm"
            probe = only["startupProbe"]
            assert probe["periodSeconds"] * probe["failureThreshold"] >= 900
            caches = {entry["value"] for entry in only["env"] if entry["name"] in ("HOME", "XDG_CACHE_HOME")}
            assert caches <= {mount["mountPath"] for mount in only["volumeMounts"]}


@pytest.mark.parametrize("folder", ["kubernetes", "kubernetes-vllm"])
def test_manifests_fit_kubernetes_schemas(folder: str, tmp_path: Path) -> None:
    program = shutil.which("kubernetes-validate", path=f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("no kubernetes-validate here (PyPI)")
    (tmp_path / "built.yaml").write_text(built_by_kustomize(DEPLOY / folder))
    done = subprocess.run(
        [program, "--strict", str(tmp_path / "built.yaml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


# -- systemd ----------------------------------------------------------------------------------------------------------


def unit(path: Path) -> dict[str, str]:
    return dict(
        line.split("=", 1) for line in path.read_text().splitlines() if "=" in line and not line.startswith("#")
    )


@pytest.mark.parametrize("name", ["kvrelay-frontend.service", "kvrelay-worker@.service"])
def test_a_unit_starts_a_command_that_exists(name: str) -> None:
    settings = unit(DEPLOY / "systemd" / name)
    line = (
        settings["ExecStart"]
        .replace("${MODEL}", "/srv/model")
        .replace("${ADDRESS}", "10.0.0.2")
        .replace("%i", "prefill")
    )
    program, *words = shlex.split(line)
    assert program == "/opt/kvrelay/bin/kvrelay"
    given = checked(words, "nats://worker:x@10.0.0.1:4222")
    assert "worker" in name or opens_the_page(given)
    assert int(settings["TimeoutStopSec"]) > given.get("shutdown_timeout_s", 0)
    assert settings["User"] != "root"


def test_the_second_worker_of_a_machine_can_have_another_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag would win over its own file."""
    settings = (DEPLOY / "systemd" / "kvrelay-worker@.service").read_text()
    assert "--metrics-port" not in settings
    files = re.findall("^EnvironmentFile=(.*)$", settings, re.MULTILINE)
    assert files == ["/etc/kvrelay/worker.env", "-/etc/kvrelay/worker-%i.env"]
    (line,) = re.findall("^Environment=(KVRELAY_METRICS_PORT=.*)$", settings, re.MULTILINE)
    monkeypatch.setenv(*line.split("="))
    assert SettingsSource(WORKER_SETTINGS, None, {}).build(MetricsConfig).metrics_port == 9400


def test_a_worker_may_take_back_its_niceness() -> None:
    """A plain number would be the raw limit, 20 minus the nice value; 0 would forbid it."""
    assert unit(DEPLOY / "systemd" / "kvrelay-worker@.service")["LimitNICE"] == "+0"


def systemd_analyze(*arguments: str) -> str:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("no systemd-analyze here")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


def units(directory: Path) -> list[str]:
    """A copy of the units and their drop-ins, with programs that are here."""
    shutil.copytree(DEPLOY / "systemd", directory, dirs_exist_ok=True)
    paths = sorted(directory.glob("*.service"))
    for path in paths:
        path.write_text(path.read_text().replace("/opt/kvrelay/bin", sysconfig.get_path("scripts")))
    return [str(path) for path in paths]


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    complaints = systemd_analyze("verify", *units(tmp_path))
    assert "kvrelay" not in complaints, complaints


def test_the_units_are_hardened(tmp_path: Path) -> None:
    """Exposure of at most 4.0 of 10: systemd's "OK"."""
    for path in units(tmp_path):
        systemd_analyze("security", "--offline=true", "--threshold=40", path)


# -- Grafana ----------------------------------------------------------------------------------------------------------


def exported() -> set[str]:
    """The names of all samples that frontends and workers export."""
    load = LoadMetrics("w", 1, 1, 1, 1, 1, 1.0, 1.0)
    tiers = TierStats(TierCounts(), {"host": StoreStats()}, 0)
    stats = WorkerStats(
        "w", "m", "mock", WorkerRole.BOTH, 0, True,
        EngineStats(load, tiers=tiers), DecodeStats(), PrefillCounters(),
        TransferStats((), 0, 0, 0), transfer_durations=StatsCounter().durations, prefixes=tiers,
    )  # fmt: skip
    frontend = FrontendMetrics()
    frontend.workers_of = lambda: {"m": 1}
    frontend.rejections_of = lambda: {"in_flight": 0}
    frontend.planners_of = lambda: [PlannerReport(planner_id="a", host="h", pid=1, started_unix=1.0, mode="act")]
    text = frontend.render().decode() + WorkerMetrics(lambda: stats).render().decode()
    return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}


def metrics_of(expressions: Iterable[str]) -> set[str]:
    return {name for each in expressions for name in re.findall(r"\b(?:kvrelay|process)_\w+", each)}


def board() -> dict[str, Any]:
    dashboard: dict[str, Any] = json.loads((DEPLOY / "grafana" / "kvrelay.json").read_text())
    return dashboard


def queries() -> list[str]:
    return [target["expr"] for panel in board()["panels"] for target in panel.get("targets", ())]


def test_the_dashboard_shows_metrics_that_exist() -> None:
    asked = metrics_of(queries())
    assert len(asked) > 30
    assert asked <= exported(), asked - exported()
    places = [tuple(panel["gridPos"].values()) for panel in board()["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in board()["panels"]}) == len(places)


def test_the_dashboard_shows_what_an_operator_asks_first() -> None:
    """Outcomes, goodput, objectives, planner, tiers and memory; each query by the chosen model where it is known."""
    assert metrics_of(queries()) >= {
        "kvrelay_request_outcomes_total",
        "kvrelay_answers_in_time_total",
        "kvrelay_missed_objectives_total",
        "kvrelay_planner_wants",
        "kvrelay_worker_kv_tier_loaded_bytes_total",
        "process_resident_memory_bytes",
    }
    without = ("kvrelay_planner", "kvrelay_rejections", "kvrelay_requests_in_flight", "kvrelay_worker_info")
    for expression in queries():
        for name in re.findall(r"(kvrelay_\w+)(?!\w|{model=~\"\$model\")", expression):
            assert name.startswith(without), expression


def test_prometheus_understands_the_dashboard(tmp_path: Path) -> None:
    texts = [each.replace("$__rate_interval", "5m").replace("$model", ".*") for each in queries()]
    rules = [{"record": f"query_{number}", "expr": text} for number, text in enumerate(texts)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}))
    promtool("check", "rules", str(tmp_path / "rules.yaml"))


# -- Prometheus -------------------------------------------------------------------------------------------------------


def promtool(*arguments: str) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("no promtool here (Debian: prometheus)")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def alerts() -> list[dict[str, Any]]:
    (document,) = documents(DEPLOY / "prometheus" / "alerts.yaml")
    return [rule for group in document["groups"] for rule in group["rules"]]


def test_alerts_follow_metrics_that_exist() -> None:
    asked = metrics_of(rule["expr"] for rule in alerts())
    assert "kvrelay_request_outcomes_total" in asked
    assert asked <= exported(), asked - exported()


def test_alerts_come_when_they_should() -> None:
    """``alerts_test.yaml`` has the loads."""
    promtool("test", "rules", str(Path(__file__).with_name("alerts_test.yaml")))


def test_each_alert_is_explained_and_tried() -> None:
    explained = (ROOT / "docs" / "alerts.md").read_text()
    tried = Path(__file__).with_name("alerts_test.yaml").read_text()
    for rule in alerts():
        assert f"| `{rule['alert']}` |" in explained
        assert tried.count(f"alertname: {rule['alert']}") >= 1
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]


def test_the_checks_refuse_what_would_be_wrong() -> None:
    with pytest.raises(ConfigError, match="no API key"):
        checked(["frontend", "--host", "0.0.0.0"], "nats://frontend:x@nats:4222")
    with pytest.raises(ConfigError, match="without credentials"):
        checked(["worker", "/models/model", "--worker-host", "10.0.0.1"], "nats://nats:4222")
