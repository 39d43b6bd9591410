"""The files in deploy/: flags that exist, metrics that exist, queries that parse."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import promql_parser
import pytest
import yaml
from prometheus_client import CollectorRegistry
from sglang.srt.observability import metrics_collector
from sglang.srt.server_args import ServerArgs

from sglang_parse.embedded import DRAFT_PATH, TARGET_PATH
from sglang_parse.reporting.telemetry import Prometheus

DEPLOY = Path(__file__).parents[2] / "deploy"
ENDS = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
}
# The newest version whose schema the validator has.
KUBERNETES = "1.37"
NAME = re.compile(r"sglang:\w+")


def documents(name):
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def dashboard():
    return json.loads((DEPLOY / "dashboard.json").read_text())


def rules():
    (file,) = documents("alerts.yaml")
    return [rule for group in file["groups"] for rule in group["rules"]]


def queries():
    """Every PromQL expression, as Prometheus gets it."""
    panels = (t["expr"] for p in dashboard()["panels"] for t in p["targets"])
    return [
        text.replace("$__rate_interval", "5m").replace("$model", ".*")
        for text in (*panels, *(rule["expr"] for rule in rules()))
    ]


def known_metrics():
    """Names on /metrics: PARSE's own by its registry, SGLang's by its source."""
    registry = CollectorRegistry()
    Prometheus("deploy", registry=registry)
    names = set()
    for family in registry.collect():
        names |= {family.name + end for end in ENDS[family.type]}
    source = Path(metrics_collector.__file__).read_text()
    return names | set(NAME.findall(source)) | {"up"}


def selectors(node):
    """Names of all metrics in a parsed query."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node.name
    for field in ("expr", "lhs", "rhs", "vector_selector", "param"):
        child = getattr(node, field, None)
        if isinstance(child, promql_parser.Expr):
            yield from selectors(child)
    for child in getattr(node, "args", None) or ():
        yield from selectors(child)


@pytest.mark.parametrize("query", queries())
def test_queries_parse_and_name_metrics_that_exist(query):
    """Red if a metric is renamed, or a query is no PromQL."""
    found = set(selectors(promql_parser.parse(query)))
    assert found and found <= known_metrics()
    assert found - {"up"} == set(NAME.findall(query))


def test_rules_are_whole():
    """Red if Prometheus would refuse the file of alerts, or a label is missing."""
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert set(rule["annotations"]) == {"summary", "description"}
        promql_parser.parse_duration(rule.get("for", "1m"))


# -- Manifests ---------------------------------------------------------------------


def compose():
    (file,) = documents("compose.yaml")
    return file["services"]


def pods():
    return {
        d["metadata"]["name"]: d["spec"]["template"]
        for d in documents("kubernetes.yaml")
        if d["kind"] in ("StatefulSet", "Deployment")
    }


def commands():
    """(where, words) of every server and router that the files start."""
    for name, service in compose().items():
        if "command" in service:
            yield name, service["command"]
    for name, pod in pods().items():
        for container in pod["spec"]["containers"]:
            yield name, [*container["command"], *container["args"]]


@pytest.mark.parametrize(("where", "words"), commands())
def test_flags_are_those_of_the_program(where, words, monkeypatch):
    """Red if a flag is misspelt, or PARSE refuses what a manifest asks for."""
    assert words[1] == "-m"
    if words[2] == "sglang_router.launch_router":
        launch = pytest.importorskip("sglang_router.launch_router")
        args = launch.parse_router_args(words[3:])
        assert len(args.worker_urls) == 2 and args.policy == "cache_aware"
        return
    parser = new_parser()
    flags = [word.partition("=") for word in words[3:]]
    here = {"--model-path": TARGET_PATH, "--speculative-draft-model-path": DRAFT_PATH}
    args = parser.parse_args([f"{k}{eq}{here.get(k, v)}" for k, eq, v in flags])
    assert args.speculative_algorithm == "PARSE"
    assert args.enable_metrics and args.port == 30000


def new_parser():
    import argparse

    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    return parser


def test_selectors_ports_and_volumes_meet():
    """Red if a service of the manifest selects nothing, or a probe asks no port."""
    labels = {name: pod["metadata"]["labels"] for name, pod in pods().items()}
    for document in documents("kubernetes.yaml"):
        assert document["apiVersion"] in ("v1", "apps/v1")
        spec = document["spec"]
        if document["kind"] == "Service":
            assert spec["selector"] in labels.values()
            continue
        assert spec["selector"]["matchLabels"] == labels[document["metadata"]["name"]]
        pod = spec["template"]["spec"]
        volumes = {v["name"] for v in pod.get("volumes", ())}
        for container in pod["containers"]:
            ports = {p["name"] for p in container["ports"]}
            mounts = {m["name"] for m in container.get("volumeMounts", ())}
            probes = [v for k, v in container.items() if k.endswith("Probe")]
            assert mounts == volumes and probes
            assert all(p["httpGet"]["port"] in ports for p in probes)
    urls = [u for _, words in commands() for u in words if u.startswith("http://")]
    hosts = {u[len("http://") :].partition(":")[0] for u in urls}
    assert hosts == {
        *("worker-0", "worker-1"),
        *(f"parse-worker-{i}.parse-worker" for i in range(2)),
    }


def test_kubernetes_understands_every_field():
    """Red if a field of the manifest is misspelt, missing, or of the wrong kind."""
    validator = pytest.importorskip("kubernetes_validate")
    for document in documents("kubernetes.yaml"):
        validator.validate(document, KUBERNETES, strict=True)


def test_compose_understands_every_field():
    """Red if a field of the compose file is misspelt or holds what nobody reads."""
    specification = pytest.importorskip("compose_spec")
    text = (DEPLOY / "compose.yaml").read_text()
    text = re.sub(r"\$\{(\w+):[^}]*\}", r"/\1", text)  # as if they were set
    read = specification.PyCompose.from_json(json.dumps(yaml.safe_load(text)))
    assert set(read.service_names()) == set(compose())


def test_every_weight_of_the_wheel_has_its_origin():
    """Red if weights change, or join, without their line in embedded/WEIGHTS.md."""
    folder = DRAFT_PATH.parent
    told = dict(
        re.findall(
            r"^\| `(\S+)` .* `(\w{64})` \|$", (folder / "WEIGHTS.md").read_text(), re.M
        )
    )
    assert told == {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*.safetensors")
    }


def test_a_release_names_its_repository(tmp_path):
    """Red if the package index would show links that lead nowhere, or no address."""
    for name in ("README.md", "pyproject.toml", ".ci/name_repository"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(DEPLOY.parent / name, tmp_path / name)
    url, tag = "https://github.com/owner/name", "v0.5.23.post1"
    subprocess.run([tmp_path / ".ci" / "name_repository", url, tag], check=True)
    readme = (tmp_path / "README.md").read_text()
    assert f"]({url}/blob/{tag}/docs/recipes.md)" in readme
    assert not re.findall(r"\]\((?!https://)", readme)
    urls = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["urls"]
    assert {"Paper", "Source", "Issues"} < set(urls) and urls["Source"] == url


# As buildx answers for an image of a registry (its util/imagetools/printers.go).
# An image that is not there is an error.
DOCKER = """#!/bin/sh
set -e
[ "$1 $2 $3 $5" = "buildx imagetools inspect --format" ]
digest=$(sed -n "s|^$4 ||p" {registry} | grep .)
case "$6" in
"{{json .Manifest.Digest}}") echo "\\"$digest\\"" ;;
"{{.Manifest"*) echo "Name: docker.io/$4"; echo "Digest: $digest" ;;
*) exit 1 ;;
esac
"""


def test_every_image_gets_the_digest_of_its_registry(tmp_path):
    """Red if an image keeps a tag that can be moved or gets another one's digest, if a
    second run pins the pin or keeps an old one, or if an error is passed over."""
    folder, registry, docker = (tmp_path / x for x in ("deploy", "images", "docker"))
    shutil.copytree(DEPLOY, folder)
    docker.write_text(DOCKER.replace("{registry}", str(registry)))
    docker.chmod(0o755)
    path = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    images = ("lmsysorg/sglang:v0.5.23", "prom/prometheus:v3.5.0")
    images = (*images, "grafana/grafana:12.1.0")

    def pinned(first):
        digests = [f"sha256:{first + k:064x}" for k in range(len(images))]
        rows = [f"{i} {d}\n" for i, d in zip(images, digests, strict=True)]
        registry.write_text("".join(rows))
        done = subprocess.run([folder / "pin_images"], env=path, capture_output=True)
        text = "".join((folder / x).read_text() for x in ("compose.yaml", "Dockerfile"))
        assert text.count("@sha256") == len(images)
        assert all(f"{i}@{d}\n" in text for i, d in zip(images, digests, strict=True))
        return done.returncode

    assert pinned(1) == pinned(1) == pinned(10) == 0
    registry.write_text("")
    done = subprocess.run([folder / "pin_images"], env=path, capture_output=True)
    assert done.returncode != 0
