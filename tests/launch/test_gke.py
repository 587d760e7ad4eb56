"""JobSets: as text, against the schema of the JobSet resource where that is at hand, and against
the models of the kubernetes client."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
import yaml

from launch import gke, sweep
from spec_jax.errors import UserError

ROOT = Path(__file__).parents[2]
TPU = gke.Options(image="reg/image:1", accelerator="tpu-v5p-slice", topology="2x2x2",
                  queue="research", bucket="gs://lab-data/runs", slices=2)
GPU = gke.Options(image="reg/image:1", accelerator="nvidia-h100-80gb", chips=8, hosts=4, spot=True)
WORDS = ["python", "-m", "train_drafter", "--config=configs/dflash.py",
         "--config.generate.temperatures=(0.0, 1.0,)", "--config.prompts.path="]


def pod_of(job):
  return job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def test_a_tpu_slice_has_a_pod_for_each_host():
  job = gke.job_set(TPU, "losses-loss=ce", [*WORDS, "--x=$(date)"])
  group = job["spec"]["replicatedJobs"][0]
  inner = group["template"]["spec"]
  assert group["replicas"] == 2 and inner["parallelism"] == inner["completions"] == 2
  assert inner["completionMode"] == "Indexed" and inner["backoffLimit"] == 0
  pod = pod_of(job)
  assert pod["nodeSelector"] == {
    "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
    "cloud.google.com/gke-tpu-topology": "2x2x2"}
  container = pod["containers"][0]
  assert container["command"] == [*WORDS, "--x=$$(date)"]
  assert container["resources"]["limits"] == {"google.com/tpu": "4"}
  mount = pod["volumes"][0]["csi"]["volumeAttributes"]
  assert mount["bucketName"] == "lab-data"
  assert "rename-dir-limit=" in mount["mountOptions"]  # parts and checkpoints appear by a rename
  assert "metadata-cache:ttl-secs:0" in mount["mountOptions"]  # hosts see each other's files
  one = gke.job_set(dataclasses.replace(TPU, topology="2x2x1", slices=1), "a", WORDS)
  assert "ttl-secs" not in pod_of(one)["volumes"][0]["csi"]["volumeAttributes"]["mountOptions"]
  assert container["volumeMounts"][0]["mountPath"] == gke.MOUNT
  assert job["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "research"}
  assert job["spec"]["failurePolicy"]["maxRestarts"] == 10 and pod["restartPolicy"] == "Never"


def test_only_a_slice_of_several_hosts_has_its_node_pool_alone():
  """Slices of one host share a pool: were it exclusive, the cells of a sweep would wait in line."""
  for topology, alone in [("2x2x2", True), ("2x2x1", False)]:
    job = gke.job_set(gke.Options(image="i", accelerator="tpu-v5p-slice", topology=topology), "a",
                      WORDS)
    assert any("exclusive" in name for name in job["metadata"]["annotations"]) == alone


def test_gpu_nodes():
  job = gke.job_set(GPU, "big", WORDS)
  pod = pod_of(job)
  assert pod["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb",
                                 "cloud.google.com/gke-spot": "true"}
  assert pod["containers"][0]["resources"]["requests"] == {"nvidia.com/gpu": "8"}
  assert job["spec"]["replicatedJobs"][0]["template"]["spec"]["parallelism"] == 4
  assert "labels" not in job["metadata"] and "volumes" not in pod
  assert job["metadata"]["name"] == "big"
  said = {e["name"]: e.get("value") or e["valueFrom"] for e in pod["containers"][0]["env"]}
  assert said["JAX_COORDINATOR_ADDRESS"] == "big-host-0-0.big:8476"
  assert said["JAX_NUM_PROCESSES"] == "4"
  assert "completion-index" in said["JAX_PROCESS_ID"]["fieldRef"]["fieldPath"]
  assert "env" not in pod_of(gke.job_set(TPU, "a", WORDS))["containers"][0]


@pytest.mark.parametrize("accelerator, topology, shape", [
  ("tpu-v5p-slice", "2x2x1", (1, 4)), ("tpu-v5p-slice", "4x4x4", (16, 4)),
  ("tpu-v5-lite-podslice", "2x4", (1, 8)), ("tpu-v5-lite-podslice", "4x4", (4, 4)),
  ("tpu-v6e-slice", "1x1", (1, 1)), ("tpu-v6e-slice", "16x16", (64, 4)),
])
def test_hosts_of_a_topology(accelerator, topology, shape):
  assert gke.tpu_shape(gke.Options(accelerator=accelerator, topology=topology)) == shape


def test_names_are_those_of_kubernetes_and_tell_runs_apart():
  texts = ["losses-loss=ce", "losses-loss-ce", "losses-loss=CE", "x" * 90, "x" * 91, "=", "a-"]
  names = [gke.dns_name(text) for text in texts]
  assert len(set(names)) == len(texts)
  for name in names:
    assert len(name) <= 40 and name.strip("-") == name and name == name.lower()
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


@pytest.mark.parametrize("options, said", [
  (gke.Options(), "--gke_image is needed"),
  (gke.Options(image="i", accelerator="tpu-v9"), "--gke_accelerator=tpu-v9 must be one of"),
  (gke.Options(image="i", accelerator="tpu-v5p-slice"), "--gke_topology='' must be like"),
  (gke.Options(image="i", accelerator="tpu-v5p-slice", topology="1x1x3"), "3 chips are not hosts"),
  (gke.Options(image="i", accelerator="nvidia-l4"), "--gke_chips is needed"),
  (gke.Options(image="i", accelerator="nvidia-l4", chips=1, topology="2x2"), "are for TPUs"),
  (gke.Options(image="i", accelerator="nvidia-l4", chips=1, bucket="lab"), "must be gs://"),
  (gke.Options(image="i", accelerator="nvidia-l4", chips=1, bucket="gs://LAB/x"), "in lower case"),
])
def test_what_no_node_pool_holds_is_refused(options, said):
  with pytest.raises(UserError, match=said):
    gke.check(options)


def test_the_yaml_reads_back_as_it_was():
  jobs = [gke.job_set(TPU, "a", WORDS), gke.job_set(GPU, "b", ["echo", "yes", "1e3", "é: x"])]
  assert list(yaml.safe_load_all(gke.to_yaml(jobs))) == jobs


def test_a_sweep_prints_a_job_for_each_cell(capsys, monkeypatch):
  """No target is opened and no stage shared: a bucket has no locks."""
  from absl import flags
  monkeypatch.chdir(ROOT)
  values = flags.FlagValues()
  sweep.define_flags(values)
  argv = ["sweep", "--sweep=configs/sweeps/losses.py:smoke", "--workdir=out/losses",
          "--launcher=gke", "--dry_run", "--gke_image=i", "--gke_accelerator=tpu-v5p-slice",
          "--gke_topology=2x2x1", "--gke_bucket=gs://lab/runs"]
  values(argv)
  assert sweep.execute(values) == 0
  jobs = list(yaml.safe_load_all(capsys.readouterr().out))
  assert len(jobs) == 3 and len({job["metadata"]["name"] for job in jobs}) == 3
  words = pod_of(jobs[0])["containers"][0]["command"]
  assert words[:3] == ["python", "-m", "train_drafter"] and "--config.train.loss=ce" in words
  assert words[-1] == "--workdir=/bucket/runs/losses/cells/loss=ce"
  assert not Path("out").exists()
  values.unparse_flags()
  values([*argv[:-2], "--gke_topology=2x2x2", argv[-1]])
  assert sweep.execute(values) == 0  # two hosts for each cell
  jobs = list(yaml.safe_load_all(capsys.readouterr().out))
  assert pod_of(jobs[0])["containers"][0]["command"] == [*words, "--distributed"]


def unknown_or_wrong(value, schema, where=""):
  """What an API server would refuse: fields that the schema lacks or types that differ, required
  fields that are absent, values outside an enumeration."""
  if schema.get("x-kubernetes-int-or-string"):
    return [] if isinstance(value, int | str) else [f"{where}: {value!r}"]
  if "enum" in schema and value not in schema["enum"]:
    return [f"{where}: {value!r} is not in {schema['enum']}"]
  kind = schema.get("type")
  known = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
  if kind in known and (not isinstance(value, known[kind]) or
                        isinstance(value, bool) != (kind == "boolean")):
    return [f"{where}: {value!r} is no {kind}"]
  bad = []
  if isinstance(value, dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
    bad += [f"{where}.{name} is missing" for name in schema.get("required", [])
            if name not in value]
    for name, item in value.items():
      inner = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
      # The schema leaves metadata to the server, as every resource does.
      if inner is None and (schema.get("properties") or where == ""):
        bad.append(f"{where}.{name} is unknown")
      elif inner:
        bad += unknown_or_wrong(item, inner, f"{where}.{name}")
  if isinstance(value, list):
    for i, item in enumerate(value):
      bad += unknown_or_wrong(item, schema.get("items", {}), f"{where}[{i}]")
  return bad


@pytest.fixture(scope="module")
def schema():
  folder = Path(os.environ.get("SPEC_JAX_KUBERNETES") or ROOT.parent / "shared/data/kubernetes")
  path = folder / "jobset-crd.yaml"
  if not path.exists():
    pytest.skip(f"no JobSet schema at {path}; SPEC_JAX_KUBERNETES names its folder")
  with open(path, encoding="utf-8") as file:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # a megabyte: the other takes seconds
    resource = yaml.load(file, loader)["spec"]
  assert resource["names"]["kind"] == "JobSet"
  version = next(v for v in resource["versions"] if v["name"] == "v1alpha2")
  return version["schema"]["openAPIV3Schema"]


@pytest.mark.parametrize("options", [TPU, GPU], ids=["tpu", "gpu"])
def test_the_job_set_is_one_by_the_schema_of_the_resource(options, schema):
  job = gke.job_set(options, "losses-loss=ce", WORDS)
  assert unknown_or_wrong(job, schema) == []
  # The check itself: each of these an API server refuses.
  wrong = gke.job_set(options, "x", WORDS)
  wrong["spec"]["replicatedJobs"][0]["template"]["spec"]["paralelism"] = 2
  assert unknown_or_wrong(wrong, schema) == [
    ".spec.replicatedJobs[0].template.spec.paralelism is unknown"]
  wrong = gke.job_set(options, "x", WORDS)
  del wrong["spec"]["replicatedJobs"][0]["name"]
  pod_of(wrong)["restartPolicy"] = 3
  assert len(unknown_or_wrong(wrong, schema)) == 2


@pytest.mark.parametrize("options", [TPU, GPU], ids=["tpu", "gpu"])
def test_the_jobs_inside_are_those_of_the_kubernetes_client(options):
  """What its models know comes back from them as it was; what they do not know is lost, and what
  they require and miss is an error. (JobSet itself has no model there.)"""
  client = pytest.importorskip("kubernetes.client", reason="the kubernetes client is not installed")
  api = client.ApiClient()

  def through(spec):
    return api.sanitize_for_serialization(
      api.deserialize(json.dumps(spec), "V1JobSpec", "application/json"))

  job = gke.job_set(options, "losses-loss=ce", WORDS)
  spec = job["spec"]["replicatedJobs"][0]["template"]["spec"]
  assert through(spec) == spec
  assert through({**spec, "paralelism": 2}) == spec
  pod_of(job)["containers"][0].pop("name")
  with pytest.raises(ValueError, match="name"):
    through(spec)
