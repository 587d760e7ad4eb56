"""Renders JobSets for Google Kubernetes Engine: TPU slices and GPU nodes, one process per host.

  python -m launch.sweep --sweep=... --workdir=losses --launcher=gke --gke_image=IMAGE \
    --gke_accelerator=tpu-v5p-slice --gke_topology=2x2x1 --gke_bucket=gs://BUCKET/runs [--dry_run]
  python -m launch.gke --name=big --gke_image=IMAGE --gke_accelerator=nvidia-h100-80gb \
    --gke_chips=8 --gke_hosts=2 --gke_bucket=gs://BUCKET --dry_run \
    -- python -m train_drafter --config=configs/dflash.py --workdir=/bucket/runs/big --distributed

Without --dry_run the YAML goes to `kubectl apply -f -`. A bucket is mounted by the Cloud Storage
FUSE driver below /bucket and holds the work folders, checkpoints and stores among them, so that a
restarted job goes on where it was. Checkpoints and parts of a store appear by renaming a folder,
which the driver refuses unless rename-dir-limit allows it. A bucket with a hierarchical namespace
renames in one piece; in a flat one it is object by object, so that a pod lost in the midst leaves a
part of a folder, which is told as damage later: there --config.storage.checkpoints=gs://... and
--config.storage.features=gs://... go past the mount and need no renaming. A bucket has no locks
between hosts: each job makes its stages itself. JobSet v1alpha2.
"""

import dataclasses
import hashlib
import math
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
from absl import flags

from launch import options as flag_options
from spec_jax import command
from spec_jax.errors import UserError

MOUNT = "/bucket"
# Objects of a folder that may be renamed: one checkpoint or one part of a store has fewer.
_MOUNT_OPTIONS = "implicit-dirs,rename-dir-limit=200000"
# Hosts must see at once what another one wrote: nothing is remembered of a file or of its absence.
_NO_CACHE = ",metadata-cache:ttl-secs:0,metadata-cache:negative-ttl-secs:0"
# Chips of one host by accelerator, with the topologies below which a slice is one host
# (cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus).
TPU_CHIPS_PER_HOST = {
    "tpu-v4-podslice": 4, "tpu-v5p-slice": 4, "tpu-v5-lite-podslice": 4, "tpu-v6e-slice": 4}
_SINGLE_HOST = {  # one host may hold the whole slice
    "tpu-v5-lite-podslice": {"1x1": 1, "2x2": 4, "2x4": 8},
    "tpu-v6e-slice": {"1x1": 1, "2x2": 4, "2x4": 8}}
# A pod is named <jobset>-<group>-<job>-<pod>-<5 letters>, 63 characters at most.
_LONGEST_NAME = 40
_PORT = 8476  # of JAX's coordinator


@dataclasses.dataclass(frozen=True)
class Options:
  """What a job asks for.

  Attributes:
    image: container image with this project in it.
    accelerator: value of the node label: tpu-v5p-slice, tpu-v6e-slice, nvidia-h100-80gb, ...
    topology: of a TPU slice, such as 2x2x1; "" for GPUs.
    chips: GPUs of a host; a TPU host has its own number.
    hosts: of a GPU job; those of a TPU slice follow from its topology.
    slices: TPU slices.
    bucket: gs://BUCKET/FOLDER, mounted at /bucket and added to the work folder.
    queue: Kueue's local queue; "" for none.
    namespace: of Kubernetes.
    service_account: of the pods, with access to the bucket.
    restarts: of the whole set, when a host fails or is taken away.
    spot: run on spot nodes.
    grace_s: seconds between SIGTERM and the end of a pod.
  """

  image: str = ""
  accelerator: str = ""
  topology: str = ""
  chips: int = 0
  hosts: int = 1
  slices: int = 1
  bucket: str = ""
  queue: str = ""
  namespace: str = "default"
  service_account: str = "default"
  restarts: int = 10
  spot: bool = False
  grace_s: int = 120


def check(options: Options) -> None:
  """Refuses what a node pool cannot hold.

  Raises:
    UserError: names the flag and its value.
  """
  for name in ("image", "accelerator"):
    if not getattr(options, name):
      raise UserError(f"--gke_{name} is needed")
  for name, least in {"chips": 0, "hosts": 1, "slices": 1, "restarts": 0, "grace_s": 1}.items():
    if getattr(options, name) < least:
      raise UserError(f"--gke_{name}={getattr(options, name)} must be at least {least}")
  if is_tpu(options):
    if options.accelerator not in TPU_CHIPS_PER_HOST:
      raise UserError(f"--gke_accelerator={options.accelerator} must be one of "
                      f"{', '.join(TPU_CHIPS_PER_HOST)}, or a GPU")
    if not re.fullmatch(r"\d+x\d+(x\d+)?", options.topology):
      raise UserError(f"--gke_topology={options.topology!r} must be like 2x4 or 2x2x1")
    if options.chips or options.hosts != 1:
      raise UserError("--gke_chips and --gke_hosts are for GPUs; a TPU slice has those of its "
                      "topology")
    tpu_shape(options)
  elif options.topology or options.slices != 1:
    raise UserError("--gke_topology and --gke_slices are for TPUs")
  elif not options.chips:
    raise UserError("--gke_chips is needed: GPUs of a host")
  if options.bucket and not re.fullmatch(r"gs://[a-z0-9][a-z0-9._-]+(/.*)?", options.bucket):
    raise UserError(f"--gke_bucket={options.bucket} must be gs://BUCKET/FOLDER, in "
                    "lower case up to the folder")


def is_tpu(options: Options) -> bool:
  """Whether the accelerator is a TPU."""
  return options.accelerator.startswith("tpu")


def tpu_shape(options: Options) -> tuple[int, int]:
  """(hosts, chips of each host) of one slice.

  Raises:
    UserError: the topology does not divide into hosts.
  """
  chips = math.prod(map(int, options.topology.split("x")))
  single = _SINGLE_HOST.get(options.accelerator, {}).get(options.topology)
  if single:
    return 1, single
  per_host = TPU_CHIPS_PER_HOST[options.accelerator]
  if chips % per_host:
    raise UserError(f"--gke_topology={options.topology}: {chips} chips are not hosts of {per_host}")
  return chips // per_host, per_host


def pods(options: Options) -> int:
  """Hosts, and so processes, of a job."""
  return options.slices * tpu_shape(options)[0] if is_tpu(options) else options.hosts


def inside(options: Options, root: Path) -> Path:
  """The folder of a sweep as the containers see it.

  Raises:
    UserError: there is no bucket, so nothing would outlive the pods.
  """
  if not options.bucket:
    raise UserError("--gke_bucket is needed: without it nothing outlives the pods")
  folder = options.bucket.removeprefix("gs://").partition("/")[2].strip("/")
  return Path(PurePosixPath(MOUNT, folder, root.name))


def dns_name(text: str) -> str:
  """A name that Kubernetes takes; of a text that loses something, with a hash of it."""
  name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "run"
  if name == text and len(name) <= _LONGEST_NAME:
    return name
  digest = hashlib.sha256(text.encode("utf-8")).hexdigest()[:6]
  return f"{name[:_LONGEST_NAME - 7].rstrip('-')}-{digest}"


def job_set(options: Options, name: str, words: Sequence[str]) -> dict[str, Any]:
  """A JobSet of one command, one pod for each host.

  Args:
    options: what the job asks for, checked.
    name: of the run; Kubernetes gets `dns_name` of it.
    words: the command line.
  """
  if is_tpu(options):
    hosts, chips = tpu_shape(options)
    selector = {"cloud.google.com/gke-tpu-accelerator": options.accelerator,
                "cloud.google.com/gke-tpu-topology": options.topology}
    resource = "google.com/tpu"
  else:
    hosts, chips = options.hosts, options.chips
    selector = {"cloud.google.com/gke-accelerator": options.accelerator}
    resource = "nvidia.com/gpu"
  if options.spot:
    selector["cloud.google.com/gke-spot"] = "true"
  container: dict[str, Any] = {
      "name": "run", "image": options.image,
      "command": [word.replace("$(", "$$(") for word in words],  # $(NAME) would be a variable
      "resources": {"limits": {resource: str(chips)}, "requests": {resource: str(chips)}}}
  pod: dict[str, Any] = {
      "restartPolicy": "Never",  # the set restarts as a whole: JAX cannot take back a lost process
      "serviceAccountName": options.service_account,
      "terminationGracePeriodSeconds": options.grace_s,
      "nodeSelector": selector,
      "containers": [container]}
  if not is_tpu(options):
    pod["tolerations"] = [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    if hosts > 1:  # TPU hosts find each other, these are told (train_drafter --distributed)
      container["env"] = _joining(dns_name(name), hosts)
  template: dict[str, Any] = {"spec": pod}
  if options.bucket:
    bucket = options.bucket.removeprefix("gs://").partition("/")[0]
    template["metadata"] = {"annotations": {"gke-gcsfuse/volumes": "true"}}
    pod["volumes"] = [{"name": "bucket", "csi": {
        "driver": "gcsfuse.csi.storage.gke.io",
        "volumeAttributes": {"bucketName": bucket, "mountOptions":
                             _MOUNT_OPTIONS + _NO_CACHE * (pods(options) > 1)}}}]
    container["volumeMounts"] = [{"name": "bucket", "mountPath": MOUNT}]
  metadata: dict[str, Any] = {
      "name": dns_name(name), "namespace": options.namespace,
      "annotations": {
          "spec-jax/run": name,
          # A slice of several hosts is a node pool, and takes the pods of one job.
          **({"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
             if is_tpu(options) and hosts > 1 else {})}}
  if options.queue:
    metadata["labels"] = {"kueue.x-k8s.io/queue-name": options.queue}
  return {
      "apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata,
      "spec": {
          "failurePolicy": {"maxRestarts": options.restarts},
          "network": {"enableDNSHostnames": True},
          "replicatedJobs": [{
              "name": "host", "replicas": options.slices,
              "template": {"spec": {
                  "parallelism": hosts, "completions": hosts, "completionMode": "Indexed",
                  "backoffLimit": 0, "template": template}}}]}}


def _joining(job: str, hosts: int) -> list[dict[str, Any]]:
  """The variables that say which process a pod is; the first pod is the coordinator."""
  field = {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
  return [
      {"name": "JAX_COORDINATOR_ADDRESS", "value": f"{job}-host-0-0.{job}:{_PORT}"},
      {"name": "JAX_NUM_PROCESSES", "value": str(hosts)},
      {"name": "JAX_PROCESS_ID", "valueFrom": {"fieldRef": field}}]


def to_yaml(jobs: Sequence[dict[str, Any]]) -> str:
  """The jobs as one YAML stream."""
  return yaml.safe_dump_all(jobs, sort_keys=False, width=100)


def apply(jobs: Sequence[dict[str, Any]]) -> int:
  """Hands the jobs to kubectl and returns its exit status.

  Raises:
    UserError: kubectl is missing.
  """
  try:
    return subprocess.run(
        ["kubectl", "apply", "-f", "-"], input=to_yaml(jobs), text=True, check=False).returncode
  except FileNotFoundError:
    raise UserError("kubectl: not found; --dry_run prints the YAML") from None


# The command line.


def define_flags(values: flags.FlagValues) -> None:
  """Defines the flags --gke_... in `values`."""
  flag_options.define("gke", Options, values)


def options(values: flags.FlagValues) -> Options:
  """The options of the command line, checked.

  Raises:
    UserError: names the flag and its value.
  """
  return flag_options.read("gke", Options, check, values)


def main() -> None:
  """Applies, or prints, the JobSet of one command: what stands behind `--`."""
  define_flags(flags.FLAGS)
  flags.DEFINE_string("name", "spec-jax", "name of the run")
  flags.DEFINE_bool("dry_run", False, "print the YAML")

  def execute(parsed):
    values, words = parsed
    jobs = [job_set(options(values), values.name, words)]
    if values.dry_run:
      print(to_yaml(jobs))
      return 0
    return apply(jobs)

  command.run(execute, flag_options.parse)


if __name__ == "__main__":
  main()
