"""The manifests and the chart: strictly valid, whole, and of one mind with the application that they deploy."""

import copy
import importlib.metadata
import json
import re
import tomllib

import jsonschema
import pytest
import yaml
from charts import ROOT, VALUES, ChartError, NoHelm, documents, manifest, render

from pagedray import __version__
from pagedray.cluster.config import ApplicationConfig
from pagedray.scheduler.errors import ConfigError

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate has Kubernetes' schemas")
from schemas import CRDS, check, pod_templates  # noqa: E402

MANIFESTS = sorted((ROOT / "k8s").glob("rayservice-*.yaml"))
UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "m": 1e-3, "": 1}
# what the Prometheus operator defines is in no schema that we have; their selectors and ports are checked below
OPERATORS = ("PodMonitor", "ScrapeConfig")


@pytest.fixture(scope="module", params=MANIFESTS, ids=lambda p: p.stem)
def objects(request):
    return documents(request.param.read_text())


def of_kind(objects, kind):
    return [o for o in objects if o["kind"] == kind]


def quantity(value):
    number, unit = re.fullmatch(r"([\d.]+)(\w*)", str(value)).groups()
    return float(number) * UNITS[unit]


def cluster_of(objects):
    (service,) = of_kind(objects, "RayService")
    return service["spec"]["rayClusterConfig"]


def serve_config(objects):
    (service,) = of_kind(objects, "RayService")
    return yaml.safe_load(service["spec"]["serveConfigV2"])


def application(objects, tmp_path):
    """The application's arguments, parsed. Its tenants are those that k8s/README.md puts into the Secret."""
    (app,) = serve_config(objects)["applications"]
    args = app["args"]
    if "tenants" in args:
        text = (ROOT / "k8s" / "README.md").read_text()
        (tenants,) = re.findall(r"tenants\.yaml <<'END'\n(.*?)\nEND\n", text, re.DOTALL)
        file = tmp_path / "tenants.yaml"
        file.write_text(tenants)
        args = {**args, "tenants": str(file)}
    return ApplicationConfig.parse(args)


def containers(objects):
    return [c for o in objects for t in pod_templates(o) for c in t["spec"]["containers"]]


# Valid.


def test_there_are_the_manifests_that_were_promised():
    assert {m.stem for m in MANIFESTS} == {f"rayservice-{n}" for n in ("cpu", "gpu", "gpu-tp8", "gpu-tp8-pp2")}


def test_every_object_is_strictly_valid(objects):
    if not CRDS.is_dir():
        pytest.skip(f"no CRDs in {CRDS}")
    for document in objects:
        if document["kind"] not in OPERATORS:
            check(document)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "upgradeStrategie"), {}),
        (("spec", "upgradeStrategy", "clusterUpgradeOptions"), {"stepSizePercent": 5}),  # lacks what is required
        (("spec", "rayClusterConfig", "authOptions", "mode"), "tokens"),
        (("spec", "rayClusterConfig", "headGroupSpec", "rayStartParams", "num-cpus"), 0),  # must be a string
        (("spec", "rayClusterConfig", "headGroupSpec", "template", "spec", "shareProcessNamespac"), True),
        (("spec", "rayClusterConfig", "headGroupSpec", "template", "metadata", "label"), {}),
        (("spec", "rayClusterConfig", "gcsFaultToleranceOptions", "redisPassword", "valuefrom"), {}),
    ],
)
def test_the_check_itself_refuses(path, value):
    if not CRDS.is_dir():
        pytest.skip(f"no CRDs in {CRDS}")
    (service,) = of_kind(documents((ROOT / "k8s" / "rayservice-gpu.yaml").read_text()), "RayService")
    check(service)
    wrong = copy.deepcopy(service)
    place = wrong
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        check(wrong)


def test_serve_takes_the_serve_config(objects):
    from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

    config = serve_config(objects)
    deploy = ServeDeploySchema.model_validate(config)
    assert deploy.http_options.host == "0.0.0.0", "or no probe and no client from outside of the pod gets there"
    assert set(config) <= set(ServeDeploySchema.model_fields)  # Ray ignores what it does not know
    for app in config["applications"]:
        assert set(app) <= set(ServeApplicationSchema.model_fields)


def test_pagedray_takes_the_arguments(objects, tmp_path):
    config = application(objects, tmp_path)
    assert config.models
    (app,) = serve_config(objects)["applications"]
    assert app["import_path"] == "pagedray.cluster.app:build"
    wrong = copy.deepcopy(app["args"])
    wrong["llm_configs"][0]["engine_kwargs"]["max_modell_len"] = 1
    with pytest.raises(ConfigError, match="max_modell_len is not a setting"):
        ApplicationConfig.parse(wrong)


def test_ray_start_takes_the_parameters(objects):
    from ray.scripts.scripts import start

    known = {option.removeprefix("--") for parameter in start.params for option in parameter.opts}
    cluster = cluster_of(objects)
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        assert set(group["rayStartParams"]) <= known
        if resources := group["rayStartParams"].get("resources"):
            assert json.loads(resources.strip("'"))  # KubeRay puts it on a command line as it is


# Whole: what must be there.


def test_versions_and_images(objects):
    pinned = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"ray[serve]=={cluster_of(objects)['rayVersion']}" in pinned
    chart = yaml.safe_load((ROOT / "k8s/helm/pagedray/Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == __version__
    for container in containers(objects):
        name, _, tag = container["image"].rpartition(":")
        assert name and tag != "latest"
        if name == "pagedray":
            assert tag.startswith(f"{__version__}-")


def test_pods_have_no_rights_that_they_do_not_need(objects):
    for document in objects:
        for template in pod_templates(document):
            pod = template["spec"]["securityContext"]
            assert pod["runAsNonRoot"] and pod["runAsUser"] >= 1000
            assert pod["seccompProfile"]["type"] == "RuntimeDefault"
    contexts = [c["securityContext"] for c in containers(objects)]
    for context in [*contexts, cluster_of(objects)["autoscalerOptions"]["securityContext"]]:
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}
    for group in cluster_of(objects)["workerGroupSpecs"]:
        assert group["template"]["spec"]["automountServiceAccountToken"] is False


def test_no_secret_stands_in_a_manifest(objects):
    for container in containers(objects):
        for variable in container.get("env", ()):
            if re.search("TOKEN|PASSWORD|KEY|SECRET", variable["name"]):
                assert "secretKeyRef" in variable["valueFrom"]
    assert not of_kind(objects, "Secret")
    cluster = cluster_of(objects)
    assert cluster["authOptions"]["mode"] == "token"
    assert "secretKeyRef" in cluster["gcsFaultToleranceOptions"]["redisPassword"]["valueFrom"]
    assert "api_keys" not in json.dumps(serve_config(objects))


def test_memory_and_probes_of_ray_containers(objects):
    cluster = cluster_of(objects)
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        spec = group["template"]["spec"]
        (container,) = spec["containers"]
        resources = container["resources"]
        assert resources["requests"] == resources["limits"] and {"cpu", "memory"} <= resources["limits"].keys()
        volumes = {v["name"]: v for v in spec["volumes"]}
        mounted = {m["mountPath"]: volumes[m["name"]] for m in container["volumeMounts"]}
        shared = mounted["/dev/shm"]["emptyDir"]
        assert shared["medium"] == "Memory"
        store = int(group["rayStartParams"]["object-store-memory"])
        assert store < quantity(shared["sizeLimit"]) < quantity(resources["limits"]["memory"])
        assert {"/tmp", "/home/pagedray", "/models"} <= mounted.keys(), "the root file system is read-only"
        ports = {p["name"]: p["containerPort"] for p in container["ports"]}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container[probe]["httpGet"]["port"] in ports
        assert (ports["serve"], ports["metrics"], ports["agent"]) == (8000, 8080, 52365)


def test_a_pod_has_time_to_leave(objects, tmp_path):
    config = application(objects, tmp_path)
    graceful = max(
        o.get("graceful_shutdown_timeout_s", 20) for o in [config.ingress, *(m.deployment for m in config.models)]
    )
    for group in cluster_of(objects)["workerGroupSpecs"]:
        spec = group["template"]["spec"]
        (container,) = spec["containers"]
        command, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
        dockerfile = (ROOT / "Dockerfile").read_text()
        (source,) = re.findall(rf"^COPY (\S+) {command}$", dockerfile, re.MULTILINE)
        assert (ROOT / source).stat().st_mode & 0o111
        assert graceful < int(seconds) < spec["terminationGracePeriodSeconds"]


def test_the_head_outlives_its_pod_and_computes_nothing(objects):
    cluster = cluster_of(objects)
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    address = cluster["gcsFaultToleranceOptions"]["redisAddress"]
    (redis,) = (s for s in of_kind(objects, "Service") if f"{s['metadata']['name']}:6379" == address)
    (store,) = of_kind(objects, "StatefulSet")
    assert redis["spec"]["selector"].items() <= store["spec"]["template"]["metadata"]["labels"].items()
    for group in cluster["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        assert any(e["name"] == "RAY_gcs_rpc_server_reconnect_timeout_s" for e in container["env"])


# Of one mind.


def test_selectors_find_pods_and_ports_are_there(objects):
    pods = [t for o in objects for t in pod_templates(o)]

    def found(labels):
        return [p for p in pods if labels.items() <= p["metadata"]["labels"].items()]

    def ports(some):
        return {port["name"] for pod in some for c in pod["spec"]["containers"] for port in c["ports"]}

    for budget in of_kind(objects, "PodDisruptionBudget"):
        assert found(budget["spec"]["selector"]["matchLabels"])
        assert type(budget["spec"]["minAvailable"]) is int  # rayclusters have no scale subresource
    for policy in of_kind(objects, "NetworkPolicy"):
        selected = found(policy["spec"]["podSelector"]["matchLabels"])
        assert selected
        for rule in policy["spec"].get("ingress", ()):
            named = {p["port"] for p in rule.get("ports", ()) if isinstance(p["port"], str)}
            assert named <= ports(selected)
    (everything,) = (p for p in of_kind(objects, "NetworkPolicy") if "Ingress" in p["spec"]["policyTypes"])
    assert found(everything["spec"]["podSelector"]["matchLabels"]) == pods, "a pod without a policy is open to all"
    (monitor,) = of_kind(objects, "PodMonitor")
    assert "metrics" in ports(found(monitor["spec"]["selector"]["matchLabels"]))
    assert [e["port"] for e in monitor["spec"]["podMetricsEndpoints"]] == ["metrics"]
    # One target a service: every pod behind it shows the whole application, which would be added up.
    (scrape,) = of_kind(objects, "ScrapeConfig")
    assert scrape["spec"]["metricsPath"] == "/metrics"
    assert [c["role"] for c in scrape["spec"]["kubernetesSDConfigs"]] == ["Service"]
    kept = [r["regex"] for r in scrape["spec"]["relabelings"] if r.get("action") == "keep"]
    assert kept == ["serve"]  # KubeRay names the service's port after the pods'


def test_an_incremental_upgrade_has_what_it_takes(objects):
    (service,) = of_kind(objects, "RayService")
    strategy = service["spec"]["upgradeStrategy"]
    assert cluster_of(objects)["enableInTreeAutoscaling"] is True
    assert ("clusterUpgradeOptions" in strategy) == (strategy["type"] == "NewClusterWithIncrementalUpgrade")


def test_the_cluster_holds_what_the_application_asks_for(objects, tmp_path):
    """With the pods of minReplicas the least, with those of maxReplicas the most."""
    config = application(objects, tmp_path)
    for bound, replicas in (("minReplicas", "min_replicas"), ("maxReplicas", "max_replicas")):
        nodes = []  # what is free on each, in Ray's resources
        for group in cluster_of(objects)["workerGroupSpecs"]:
            (container,) = group["template"]["spec"]["containers"]
            limits = container["resources"]["limits"]
            node = {"CPU": float(limits["cpu"]), "GPU": float(limits.get("nvidia.com/gpu", 0))}
            node |= json.loads(group["rayStartParams"].get("resources", "'{}'").strip("'"))
            nodes += [dict(node) for _ in range(group[bound] * group["numOfHosts"])]

        def place(bundle, among):
            fits = (n for n in among if all(n.get(k, 0) >= v for k, v in bundle.items()))
            if node := next(fits, None):
                for key, value in bundle.items():
                    node[key] -= value
            return node

        actor = config.ingress["ray_actor_options"]
        wanted = {"CPU": actor["num_cpus"], **actor.get("resources", {})}
        left = list(nodes)
        for _ in range(config.ingress["num_replicas"]):
            node = place(wanted, left)
            assert node is not None, f"no place for an ingress at {bound}"
            left = [n for n in left if n is not node]  # max_replicas_per_node is 1
        for model in config.models:
            for _ in range(model.deployment["autoscaling_config"][replicas]):
                size, tp = model.engine.world_size, model.engine.tensor_parallel_size
                bundles = model.deployment["placement_group_bundles"]
                placed = [place(bundle, nodes) for bundle in bundles]
                assert all(placed), f"no place for a worker group at {bound}"
                for stage in range(0, size, tp):  # ranks that reduce in every layer, on one node
                    assert len({id(n) for n in placed[stage : stage + tp]}) == 1


# The chart and the image.


@pytest.fixture(scope="module")
def helm():
    try:
        return render({})
    except NoHelm as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("values", VALUES, ids=lambda p: p.stem)
def test_manifests_are_what_helm_makes_of_the_chart(helm, values):
    path, text = manifest(values)
    made, here = documents(text), documents(path.read_text())
    order = lambda o: (o["kind"], o["metadata"]["name"])  # noqa: E731
    assert sorted(made, key=order) == sorted(here, key=order), "run `python tests/deploy/charts.py`"


@pytest.mark.parametrize(
    "values",
    [
        {"networkPolicy": {"enabled": False}, "monitoring": {"enabled": False}, "disruptionBudget": {"enabled": False}},
        {
            "redis": {"enabled": False},
            "environment": {"A": "1"},
            "image": {"repository": "r/p", "tag": "t", "pullSecrets": ["s"]},
        },
        {"redis": {"address": "redis.example:6380"}},
        {"models": {"claim": {"enabled": True, "existing": "mine"}}, "head": {"nodeSelector": {"a": "b"}}},
        {
            "models": {"claim": {"enabled": True, "storageClassName": "fast"}},
            "secrets": {"tenants": "t", "huggingFace": "h"},
        },
        {"upgrade": {"type": "None"}, "config": {"tenants": [{"name": "a"}]}},
        {"networkPolicy": {"clients": [{}], "monitoring": [], "egress": [{"ports": [{"port": 3128}]}]}},
        {"config": {"prefill_config": "prefill.yaml", "decode_config": "decode.yaml"}},
    ],
)
def test_other_values_make_valid_objects(helm, values):
    if not CRDS.is_dir():
        pytest.skip(f"no CRDs in {CRDS}")
    made = documents(render(values, release="a-release-of-another-name"))
    for document in made:
        assert document["metadata"]["name"].startswith("a-release-of-another-name")
        if document["kind"] not in OPERATORS:
            check(document)
    kinds = {o["kind"] for o in made}
    assert ("NetworkPolicy" in kinds) == values.get("networkPolicy", {}).get("enabled", True)
    assert ("StatefulSet" in kinds) == ("redis" not in values)


@pytest.mark.parametrize(
    "values",
    [
        {"confg": {}},
        {"image": {"tag": "latest"}},
        {"upgrade": {"type": "Rolling"}},
        {"accelerator": "tpu"},
        {"config": {"llm_configs": []}},
        {"config": {"llm_configs": None}},
        {"config": {"prefill_config": {}}},
        {"workerGroups": [{"name": "w"}]},
        {"networkPolicy": {"clients": {"kubernetes.io/metadata.name": "default"}}},
        {"networkPolicy": {"operator": [{"kubernetes.io/metadata.name": "default"}]}},
    ],
)
def test_wrong_values_are_refused(helm, values):
    with pytest.raises(ChartError):
        render(values)


def test_who_may_speak_to_the_pods_and_to_whom_they_may(helm):
    anyone = {"matchExpressions": [{"key": "team", "operator": "Exists"}]}
    proxy = {"to": [{"ipBlock": {"cidr": "10.0.0.7/32"}}], "ports": [{"port": 3128, "protocol": "TCP"}]}
    values = {"clients": [anyone, {"matchLabels": {"a": "b"}}], "monitoring": [], "egress": [proxy]}
    policies = of_kind(documents(render({"networkPolicy": values})), "NetworkPolicy")
    (spec,) = (p["spec"] for p in policies if "Ingress" in p["spec"]["policyTypes"])
    (clients,) = (r["from"] for r in spec["ingress"] if [p["port"] for p in r.get("ports", ())] == ["serve"])
    selected = [{"namespaceSelector": selector} for selector in values["clients"]]
    assert clients == [{"podSelector": {}}, *selected]  # of the release's namespace, where Gateways are
    assert len(spec["ingress"]) == 3 and all(r["from"] for r in spec["ingress"])  # without peers it lets all in
    (names,) = (r for r in spec["egress"] if {p["port"] for p in r.get("ports", ())} == {53})
    assert "to" not in names
    assert spec["egress"][-1] == proxy


def test_prefill_and_decode_take_the_place_of_the_model_in_values(helm):
    def args(**config):
        return serve_config(documents(render({"config": config})))["applications"][0]["args"]

    default = args()
    model = {"model_loading_config": {"model_id": "m", "model_source": "org/m"}}
    roles = {"prefill_config": model, "decode_config": model}
    made = args(**roles)
    assert made == {**{k: v for k, v in default.items() if k != "llm_configs"}, **roles}
    assert [m.role for m in ApplicationConfig.parse(made).models] == ["prefill", "decode"]
    assert args(**roles, llm_configs=[model])["llm_configs"] == [model]
    assert args(llm_configs=[model]) == {**default, "llm_configs": [model]}


def test_helm_finds_nothing_to_say(helm):
    helm_python = pytest.importorskip("helm_python", reason="helm lint by helm-python-sdk")
    report = helm_python.lint(ROOT / "k8s" / "helm" / "pagedray", strict=True, kube_version="v1.31.0")
    assert not report["errors"] and all(m["severity"] < 2 for m in report["messages"]), report


def test_the_image_has_the_whole_package():
    text = (ROOT / "Dockerfile").read_text()
    copied = {
        source for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE) for source in line.split()
    }
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"].values()
    assert {*folders, "pyproject.toml", "README.md", "LICENSE"} <= copied
    assert all((ROOT / source).exists() for source in copied)
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")}
    assert all(any(source == s or source.startswith(f"{s}/") for s in sent) for source in copied)
    assert re.search(r"^USER 1000", text, re.MULTILINE)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert re.findall(r'what="\.\[(\S+)\]"', text) == ["trace", "gpu,trace"] and {"gpu", "trace"} <= extras.keys()


def test_ray_is_the_one_that_is_tested_here(objects):
    assert importlib.metadata.version("ray") == cluster_of(objects)["rayVersion"]
