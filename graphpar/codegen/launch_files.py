"""``launch.sh``, ``launch.sbatch``, ``launch.yaml``: start the program on the nodes of its cluster, with torchrun, Slurm or Kubernetes."""

from __future__ import annotations

import math
import re

from graphpar.ir.plan import Plan
from graphpar.runtime.modes import SCRIPTS
from graphpar.text import plural

_SHELL = """#!/usr/bin/env bash
# {verb} {name} on {where}. {usage}
#
# Set in the environment, where it is otherwise: NODES, DEVICES (of a node), PORT, JOB (a name, if several jobs share a node).
set -euo pipefail
cd "$(dirname "${{BASH_SOURCE[0]}}")"

nodes=${{NODES:-{nodes}}} devices=${{DEVICES:-{devices}}}
if ! [[ $nodes =~ ^[1-9][0-9]*$ && $devices =~ ^[1-9][0-9]*$ ]]; then
    echo "launch.sh: NODES=$nodes and DEVICES=$devices must be whole numbers above 0" >&2
    exit 2
fi
if ((nodes * devices != {ranks})); then
    echo "launch.sh: the program runs on {ranks} ranks; NODES=$nodes times DEVICES=$devices is $((nodes * devices))" >&2
    exit 2
fi
export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-1}}
if ((nodes == 1)); then
    # Ranks of one node meet in a file and on its loopback, where no other machine reaches them.
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    exec torchrun --nproc-per-node "$devices" --local-addr localhost --rdzv-id "${{JOB:-{job}}}" --rdzv-backend c10d \\
        --rdzv-conf store_type=file --rdzv-endpoint "$(mktemp)" {script} "$@"
fi
if [[ -z ${{HEAD:-}} ]]; then
    echo "launch.sh: set HEAD to the name or address of one node, the same on all" >&2
    exit 2
fi
exec torchrun --nnodes "$nodes" --nproc-per-node "$devices" --rdzv-id "${{JOB:-{job}}}" --rdzv-backend c10d \\
    --rdzv-endpoint "$HEAD:${{PORT:-29500}}" {script} "$@"
"""

_SLURM = """#!/usr/bin/env bash
# {verb} {name} on {where}. In this folder, which all nodes must see:
#
#     sbatch launch.sbatch {example}
#
#SBATCH --job-name={job}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{devices_of_a_task}#SBATCH --exclusive
#SBATCH --output=%x-%j.log
#SBATCH --signal=TERM@120
set -euo pipefail

HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HEAD JOB=$SLURM_JOB_ID
exec srun --kill-on-bad-exit=1 bash "$SLURM_SUBMIT_DIR/launch.sh" "$@"
"""

_KUBERNETES = """# {verb} {name} on {where}, with the training operator of Kubeflow: kubectl apply -f launch.yaml
# To be replaced: the image (it needs graphpar and torch), and the claim of the volume that holds this folder.
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata:
  name: {job}
spec:
  pytorchReplicaSpecs:
    Master:
      replicas: 1
      restartPolicy: Never
      template: &pod
        spec:
          containers:
            - name: pytorch
              image: REPLACE/IMAGE:TAG
              workingDir: /program
              command: ["bash", "-c", "HEAD=$MASTER_ADDR PORT=$MASTER_PORT exec bash launch.sh {example}"]
{resources}              volumeMounts:
                - {{name: program, mountPath: /program}}
                - {{name: shm, mountPath: /dev/shm}}
          volumes:
            - {{name: program, persistentVolumeClaim: {{claimName: REPLACE-CLAIM}}}}
            - {{name: shm, emptyDir: {{medium: Memory}}}}
{workers}"""

_RESOURCES = """              resources: {{limits: {{{vendor}.com/gpu: {devices}}}}}
"""

_WORKERS = """    Worker:
      replicas: {others}
      restartPolicy: Never
      template: *pod
"""


def launch_files(name: str, plan: Plan, example: str) -> dict[str, str]:
    """Write the files that start the program's script on the nodes of the plan's cluster, or on one where it names none.

    Args:
        name: of the model.
        example: options of that script, for the files to show.
    """
    ranks = plan.mesh.size
    node = plan.cluster.devices_per_node if plan.cluster is not None else ranks
    devices = min(node, ranks) if ranks % min(node, ranks) == 0 else math.gcd(node, ranks)
    nodes = ranks // devices
    gpus = plan.cluster is not None and plan.cluster.device.kind == "cuda"
    place = (
        _shown(plan.cluster.device.name) if plan.cluster is not None else plural(devices, "device").partition(" ")[2]
    )
    usage = f"In this folder:\n#\n#     ./launch.sh {example}"
    if nodes > 1:
        usage = (
            "On each of them, in a copy of this folder, with the name of one:"
            f"\n#\n#     HEAD=NAME ./launch.sh {example}"
        )
    job = re.sub(r"[^a-z0-9]+", "-", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower()).strip("-")[:50]
    values = {
        "script": SCRIPTS[plan.mode],
        "verb": "Train" if plan.mode == "train" else "Run",
        "name": _shown(name),
        "job": job or "graphpar",
        "nodes": nodes,
        "devices": devices,
        "ranks": ranks,
        "where": f"{plural(nodes, 'node')} of {devices} {place}" if nodes > 1 else f"one node of {devices} {place}",
        "example": example,
        "usage": usage,
        "devices_of_a_task": f"#SBATCH --gpus-per-node={devices}\n" if gpus else "",
        "resources": _RESOURCES.format(vendor="amd" if place.startswith("MI") else "nvidia", devices=devices)
        if gpus
        else "",
        "workers": _WORKERS.format(others=nodes - 1) if nodes > 1 else "",
    }
    templates = {"launch.sh": _SHELL, "launch.sbatch": _SLURM, "launch.yaml": _KUBERNETES}
    return {file: template.format(**values) for file, template in templates.items()}


def _shown(name: str) -> str:
    """A name as a comment of a shell script or of YAML may have it: nothing of it ends the line, or begins something else."""
    return re.sub(r"[^\w .,:+/()-]", "_", name)
