"""YAML snippets of SkyPilot's model training guide, unchanged, each with a `run`."""

from __future__ import annotations

_RUN = "run: python train.py\n"

SNIPPETS = {
    "accelerators": """\
resources:
  accelerators:
    A100:1
    A100-80GB:1
    H100:1
"""
    + _RUN,
    "disk": """\
resources:
  disk_tier: best  # Use highest performance disk tier.
  disk_size: 1000 # GiB. Make the disk size large enough for checkpoints.
"""
    + _RUN,
    "mount": """\
file_mounts:
  /checkpoints:
    name: my-checkpoint-bucket
    mode: MOUNT_CACHED
"""
    + _RUN,
    "efa": """\
config:
  kubernetes:
    pod_config:
      spec:
        containers:
        - resources:
            limits:
              vpc.amazonaws.com/efa: 4
            requests:
              vpc.amazonaws.com/efa: 4
"""
    + _RUN,
    "gpudirect": """\
config:
  gcp:
    enable_gpu_direct: true
"""
    + _RUN,
    "bert": r"""# bert_qa.yaml
name: bert-qa

resources:
  accelerators: V100:1
  use_spot: true  # Use spot instances to save cost.
  disk_tier: best # using highest performance disk tier

file_mounts:
  /checkpoint:
    name: # NOTE: Fill in your bucket name
    mode: MOUNT_CACHED

envs:
  # Fill in your wandb key: copy from https://wandb.ai/authorize
  # Alternatively, you can use `--env WANDB_API_KEY=$WANDB_API_KEY`
  # to pass the key in the command line, during `sky jobs launch`.
  WANDB_API_KEY:

# Assume your working directory is under `~/transformers`.
workdir: ~/transformers

setup: |
  pip install -e .
  cd examples/pytorch/question-answering/
  pip install -r requirements.txt torch==1.12.1+cu113 --extra-index-url https://download.pytorch.org/whl/cu113
  pip install wandb

run: |
  cd examples/pytorch/question-answering/
  python run_qa.py \
    --model_name_or_path bert-base-uncased \
    --dataset_name squad \
    --do_train \
    --do_eval \
    --per_device_train_batch_size 12 \
    --learning_rate 3e-5 \
    --num_train_epochs 50 \
    --max_seq_length 384 \
    --doc_stride 128 \
    --report_to wandb \
    --output_dir /checkpoint/bert_qa/ \
    --run_name $SKYPILOT_TASK_ID \
    --save_total_limit 10 \
    --save_steps 1000
""",
}
"""Snippets by their subject."""
