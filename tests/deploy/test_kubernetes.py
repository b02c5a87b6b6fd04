"""The Kubernetes manifests are valid, restricted, and agree with the programs, the images and the compose file."""

from __future__ import annotations

import re
import runpy
from typing import Any

import kubernetes_validate
import pytest
import yaml
from pydantic import ValidationError

from openworld.environment import KNOWN
from service.routes import health
from service.settings import ServiceSettings
from tests.support.docker import SECRET, STAGES, services
from tests.support.kubernetes import FOLDER, OVERLAYS, containers, environment, files, one, pods, resources
from tests.support.paths import ROOT
from tests.support.prometheus import RULES, exported_metrics
from trainer.learning.settings import LearnerSettings
from trainer.worker.settings import WorkerSettings

CUSTOM_KINDS = {"ServiceMonitor", "PrometheusRule"}  # of the Prometheus operator: no schema of Kubernetes
OLDEST = "1.28"
CLOSE_SECONDS = 10  # to close connections after the last answer
PROGRAMS = {"openworld-server": "server", "openworld-trainer": "trainer"}

every_overlay = pytest.mark.parametrize("overlay", [None, *OVERLAYS], ids=lambda name: name or "files")


@every_overlay
@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
def test_the_schemas_of_kubernetes_accept_every_resource(overlay: str | None, version: str) -> None:
    checked = [manifest for manifest in resources(overlay) if manifest["kind"] not in CUSTOM_KINDS]
    assert len(checked) >= 10
    for manifest in checked:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_all_overlays_exist_and_every_file_is_used() -> None:
    assert {"small", "fleet", "gpu", "object-store"} == set(OVERLAYS)
    for path in files():
        used = yaml.safe_load((path.parent / "kustomization.yaml").read_text())["resources"]
        assert path.name in used, f"{path} is in no kustomization"


@every_overlay
def test_every_container_is_restricted(overlay: str | None) -> None:
    assert set(pods(overlay)) == {*PROGRAMS, *({"redis"} if overlay != "object-store" else ())}
    for name, pod in pods(overlay).items():
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False, name
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["runAsUser"] > 0, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
    for name, container in containers(overlay):
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] is True, name
        assert security["allowPrivilegeEscalation"] is False, name
        assert security["capabilities"] == {"drop": ["ALL"]}, name
        for bound in ("requests", "limits"):
            assert {"cpu", "memory"} <= set(container["resources"][bound]), f"{name} has no {bound}"
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert probe in container, f"{name} has no {probe}"
    assert one("Namespace", "openworld", overlay)["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == (
        "restricted"
    )


@every_overlay
def test_variables_of_the_manifests_are_settings_and_services_add_none(overlay: str | None) -> None:
    for name, container in containers(overlay):
        if name in PROGRAMS:
            named = {variable for variable in environment(container) if variable.startswith("OPENWORLD_")}
            assert named, name
            assert named <= KNOWN, name
    for name, pod in pods(overlay).items():
        assert pod["spec"]["enableServiceLinks"] is False, f"{name}: a Service would set OPENWORLD_SERVER_PORT"


@every_overlay
def test_the_programs_accept_the_values_of_the_manifests(overlay: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"OPENWORLD_KEYS": f"robot:predict:{SECRET}", "OPENWORLD_HOST": "0.0.0.0"}
    for _, container in containers(overlay):
        values = environment(container) if "env" in container else {}
        cores = {name: container["resources"]["limits"]["cpu"] for name, value in values.items() if value is None}
        for name, value in (cores | {k: v for k, v in values.items() if v is not None} | given).items():
            monkeypatch.setenv(name, value)
    assert ServiceSettings().threads == LearnerSettings().threads == 2
    assert WorkerSettings().redis_url is not None


@pytest.mark.parametrize(("name", "target"), PROGRAMS.items())
def test_a_pod_has_user_port_data_folder_and_health_check_of_its_image(name: str, target: str) -> None:
    stage, spec = STAGES[target], pods()[name]["spec"]
    (container,) = spec["containers"]
    assert f"{spec['securityContext']['runAsUser']}:{spec['securityContext']['runAsGroup']}" == stage.last("USER").value
    assert spec["securityContext"]["fsGroup"] == spec["securityContext"]["runAsGroup"], "the data folder is writable"
    assert [str(port["containerPort"]) for port in container["ports"]] == [stage.last("EXPOSE").value]
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted == {stage.environment["OPENWORLD_DATA"], "/tmp"}, "all else is read-only"
    assert container["image"] == services()[target]["image"].replace("${IMAGE_TAG:-local}", "local")
    if target == "trainer":
        for probe in ("startupProbe", "livenessProbe"):
            command = [word.split() for word in container[probe]["exec"]["command"]]
            assert command == [word.split() for word in stage.last("HEALTHCHECK").exec_form]


@every_overlay
def test_probes_name_routes_and_ports_that_exist(overlay: str | None) -> None:
    routes = {getattr(route, "path", "") for route in health.router.routes}
    for name, container in containers(overlay):
        ports = {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if request := container[probe].get("httpGet"):
                assert request["port"] in ports
                assert request["path"] in (routes if name == "openworld-server" else {"/metrics"})
    (server,) = pods(overlay)["openworld-server"]["spec"]["containers"]
    assert server["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert server["livenessProbe"]["httpGet"]["path"] == "/livez", "a server that is not ready must not be restarted"


def test_an_ending_server_has_time_to_drain() -> None:
    spec = pods()["openworld-server"]["spec"]
    (container,) = spec["containers"]
    program, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    drain = float(environment(container)["OPENWORLD_SERVE_DRAIN_SECONDS"])
    shutdown = ServiceSettings.model_fields["shutdown_seconds"].default
    assert spec["terminationGracePeriodSeconds"] >= float(seconds) + drain + shutdown + CLOSE_SECONDS


def test_redis_is_that_of_the_compose_file() -> None:
    (redis,) = pods()["redis"]["spec"]["containers"]
    assert redis["command"] == services()["redis"]["command"]
    assert redis["image"] == services()["redis"]["image"]
    assert environment_of("server")["OPENWORLD_REDIS_URL"] == services()["server"]["environment"]["OPENWORLD_REDIS_URL"]


def environment_of(target: str) -> dict[str, Any]:
    (container,) = pods()[f"openworld-{target}"]["spec"]["containers"]
    return environment(container)


@every_overlay
def test_services_budgets_and_policies_select_pods_and_their_ports(overlay: str | None) -> None:
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(overlay).items()}
    ports = {name: {port["name"] for port in container["ports"]} for name, container in containers(overlay)}
    for manifest in resources(overlay):
        spec, name = manifest.get("spec", {}), manifest["metadata"]["name"]
        if manifest["kind"] == "Service":
            assert spec["selector"].items() <= labels[name].items()
            assert {port["targetPort"] for port in spec["ports"]} <= ports[name]
        elif manifest["kind"] == "PodDisruptionBudget":
            assert spec["selector"]["matchLabels"].items() <= labels[name].items()
        elif manifest["kind"] == "NetworkPolicy" and name != "default-deny":
            assert spec["podSelector"]["matchLabels"].items() <= labels[name].items()
            assert {port["port"] for rule in spec["ingress"] for port in rule["ports"]} <= ports[name]


def test_only_server_and_trainer_reach_redis_and_nothing_else_is_open_by_default() -> None:
    denied = one("NetworkPolicy", "default-deny")["spec"]
    assert denied == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    (rule,) = one("NetworkPolicy", "redis")["spec"]["ingress"]
    ((expression,),) = [source["podSelector"]["matchExpressions"] for source in rule["from"]]
    assert sorted(expression["values"]) == sorted(PROGRAMS)


def test_the_rules_are_those_of_prometheus() -> None:
    generated = runpy.run_path(str(FOLDER / "prometheus_rules.py"))["resource"]()
    assert (FOLDER / "monitoring" / "prometheus-rules.yaml").read_text() == generated, "run: make docs"
    assert one("PrometheusRule", "openworld")["spec"] == yaml.safe_load(RULES.read_text())


def test_prometheus_gives_the_jobs_the_names_that_the_rules_refer_to() -> None:
    """The operator takes the name of the Service."""
    named = set(re.findall(r'job="([\w-]+)"', RULES.read_text()))
    assert named == set(PROGRAMS)
    for name in named:
        monitor, service = one("ServiceMonitor", name)["spec"], one("Service", name)
        assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        assert {end["port"] for end in monitor["endpoints"]} <= {port["name"] for port in service["spec"]["ports"]}


def test_the_autoscaler_uses_a_metric_that_servers_export_and_owns_the_number_of_servers() -> None:
    spec = one("HorizontalPodAutoscaler", "openworld-server")["spec"]
    (metric,) = spec["metrics"]
    assert metric["pods"]["metric"]["name"] in exported_metrics()
    limit = ServiceSettings.model_fields["images_in_flight"].default
    assert 0 < float(metric["pods"]["target"]["averageValue"]) < limit / 4, "long before requests are refused"
    assert "replicas" not in one("Deployment", "openworld-server", "fleet")["spec"]
    assert one("Deployment", "openworld-server", "small")["spec"]["replicas"] == 1


def test_the_gpu_overlay_demands_a_gpu_and_other_images() -> None:
    for name, container in containers("gpu"):
        if name in PROGRAMS:
            assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
            assert environment(container)["OPENWORLD_DEVICE"] == "cuda"
            assert container["image"].endswith("-gpu")


def test_the_object_store_overlay_needs_no_volume_of_several_machines_and_shares_everything_through_redis() -> None:
    overlay = "object-store"
    assert not [one for one in resources(overlay) if one["kind"] == "PersistentVolumeClaim"]
    for name, pod in pods(overlay).items():
        (container,) = pod["spec"]["containers"]
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        values = environment(container)
        size = int(volumes["data"]["emptyDir"]["sizeLimit"].removesuffix("Gi")) * 2**30
        assert int(values["OPENWORLD_STORE_CACHE_BYTES"]) < size, name
        assert size <= int(container["resources"]["limits"]["ephemeral-storage"].removesuffix("Gi")) * 2**30, name
        # The documentation replaces them by their places.
        assert list(values)[:3] == ["OPENWORLD_STORE", "OPENWORLD_STORE_CACHE_BYTES", "OPENWORLD_REDIS_URL"]
        assert values["OPENWORLD_REDIS_URL"].startswith("redis+sentinel://")
        assert values["OPENWORLD_STORE"].startswith("s3://")
    shared = environment(pods(overlay)["openworld-server"]["spec"]["containers"][0])["OPENWORLD_SERVE_SHARED"]
    assert set(shared.split(",")) == {"recent", "inbox", "rates", "keys"}
    assert one("StatefulSet", "openworld-trainer", overlay)["spec"]["replicas"] == 2
    for name in PROGRAMS:
        ports = [
            port["port"] for rule in one("NetworkPolicy", name, overlay)["spec"]["egress"] for port in rule["ports"]
        ]
        assert {443, 6379, 26379} <= set(ports)


def test_the_credentials_of_the_object_store_come_from_the_secret_of_the_example() -> None:
    secret = yaml.safe_load((FOLDER / "object-store" / "secret.example.yaml").read_text())
    kubernetes_validate.validate(secret, OLDEST, strict=True)
    for name, container in containers("object-store"):
        sources = [entry.get("valueFrom", {}).get("secretKeyRef", {}) for entry in container["env"]]
        read = {source["key"] for source in sources if source.get("name") == secret["metadata"]["name"]}
        assert read == set(secret["stringData"]), name


def test_the_example_of_the_secret_has_what_the_pods_read_and_is_refused_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secret = yaml.safe_load((FOLDER / "secret.example.yaml").read_text())
    kubernetes_validate.validate(secret, OLDEST, strict=True)
    sources = [entry.get("valueFrom", {}) for _, container in containers() for entry in container.get("env", [])]
    read = {(source["name"], source["key"]) for from_ in sources if (source := from_.get("secretKeyRef"))}
    assert read == {(secret["metadata"]["name"], key) for key in secret["stringData"]}
    (keys,) = secret["stringData"].values()
    assert f"OPENWORLD_KEYS={keys}" in (ROOT / ".env.example").read_text().splitlines()
    monkeypatch.setenv("OPENWORLD_KEYS", keys)
    with pytest.raises(ValidationError, match="openssl rand -hex 24"):
        ServiceSettings()
