"""What is shipped for containers, as far as it can be checked without one."""

import re
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import typer
import yaml

from capi.cli.app import app
from capi.config.files import load_config

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def documents() -> dict[str, dict[str, Any]]:
    parsed = yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text())
    return {document["kind"]: document for document in parsed}


def test__the_pods_of_the_job_find_each_other(documents: dict[str, dict[str, Any]]) -> None:
    service, job = documents["Service"], documents["Job"]
    pod = job["spec"]["template"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    (container,) = pod["spec"]["containers"]
    options = dict(
        argument.removeprefix("--").split("=") for argument in container["args"] if argument.startswith("--rdzv")
    )
    port = service["spec"]["ports"][0]["port"]
    # The name of the first pod of an Indexed Job, in the domain of the service.
    assert options["rdzv-endpoint"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}:{port}"


def test__the_numbers_of_machines_and_gpus_agree(documents: dict[str, dict[str, Any]]) -> None:
    job = documents["Job"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"] == 4
    assert "--nnodes=4" in container["args"]
    assert f"--nproc-per-node={container['resources']['limits']['nvidia.com/gpu']}" in container["args"]
    assert job["template"]["spec"]["restartPolicy"] == "Never", "a podFailurePolicy demands it"
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in job["template"]["spec"]["volumes"]}


def test__what_the_job_calls_is_what_the_command_line_takes(
    documents: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Typer hands other objects to callbacks than those it documents.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    (container,) = documents["Job"]["spec"]["template"]["spec"]["containers"]
    arguments = container["args"]
    assert container["command"] == ["torchrun"]
    start = arguments.index("-m")
    assert arguments[start : start + 3] == ["-m", "capi", "pretrain"]
    command = typer.main.get_command(app).commands["pretrain"]  # type: ignore[attr-defined]
    given = command.make_context("pretrain", arguments[start + 3 :]).params
    config = load_config(given["recipe"], given["overrides"])
    assert config.optimization.batch_size % (4 * 8 * config.optimization.micro_batches) == 0
    assert given["resume"]
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert given["data"]
    assert {f"/{Path(path).parts[1]}" for path in (*given["data"], given["out"])} <= mounted


def test__the_image_runs_without_rights_and_starts_the_command_line() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    instructions = [line.split(maxsplit=1) for line in lines if re.match(r"[A-Z]+ ", line)]
    by_name = dict(instructions)
    assert by_name["USER"] == "capi"
    assert by_name["ENTRYPOINT"] == '["python", "-m", "capi"]'
    copied = [word for name, value in instructions if name == "COPY" for word in value.split()[:-1]]
    assert all((ROOT / name).exists() for name in copied)
    # What the build of the package reads.
    assert {"pyproject.toml", "README.md", "LICENSE", "capi"} == set(copied)
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert not set(copied) & set(ignored)
