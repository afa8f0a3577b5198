"""Look into a checkpoint without the model that it is of; no code from it is run.

python examples/01_three_lines.py runs/first
python examples/04_look_inside.py [HOME [EXPORT.safetensors]]
"""

import sys

import holdfast

home = sys.argv[1] if len(sys.argv) > 1 else "runs/first"

checkpoint = holdfast.open(home)  # the newest; step=500 takes another
print(f"step {checkpoint.step}, attempt {checkpoint.attempt}, saved by {checkpoint.world_size} ranks")

for key in checkpoint.keys():  # noqa: SIM118 - says what is meant
    info = checkpoint.info(key)
    print(f"  {key}: {info.dtype} {list(info.shape)}, {info.num_bytes:,} bytes")

weight = checkpoint["model.0.weight"]  # reads only what is needed, and checks it
print(f"model.0.weight: mean {weight.mean().item():+.4f}, deviation {weight.std().item():.4f}")

groups = checkpoint.values()["optimizer"]["param_groups"]
print(f"learning rate {groups[0]['lr']}")

report = checkpoint.verify()  # every byte of every file
for problem in report.problems:
    print(f"damaged: {problem.message}")
print(f"verified: {report.num_bytes:,} bytes, {'all good' if report.is_good else 'NOT good'}")

if len(sys.argv) > 2:
    holdfast.export_checkpoint(checkpoint, sys.argv[2], overwrite=True)
    print(f"exported to {sys.argv[2]}, which any safetensors reader opens")
