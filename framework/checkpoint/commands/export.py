"""`export`: the weights of a checkpoint as one file that needs none of this.

Guarantee: the bytes are verified before, and the file is there whole or not at all. Keys are those of the model, so
that `load_state_dict(strict=True)` takes it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from framework.checkpoint.commands.places import CHECKPOINT
from framework.errors import EXIT_DONE, CheckpointError

HELP = "the weights as one file: safetensors or torch"
EXAMPLES = (
    "export runs/digits --to digits.safetensors",
    "export s3://bucket/runs/digits --to digits.safetensors",
    "export runs/digits@500 --part ema --to digits.pt",
)
MORE = """NAME.safetensors: safetensors.torch.load_file; above 4 GiB in several files with NAME.safetensors.index.json.
NAME.pt: torch.load(weights_only=True). Both give a state dict without the prefix 'model.'; tied weights stand under
each of their names. --part ema: the averages, and the model's own buffers. From a URL no more is fetched than that needs,
to a temporary folder, see TMPDIR. Exit code: 0; 1 if it could not be written."""
SUFFIXES = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=CHECKPOINT)
    parser.add_argument("--step", type=int, help="the checkpoint of this step")
    parser.add_argument("--to", required=True, metavar="FILE", help="NAME.safetensors or NAME.pt")
    parser.add_argument("--part", default="model", metavar="NAME", help="model (default), ema, or another part")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    target = Path(arguments.to)
    if target.suffix not in SUFFIXES:
        raise CheckpointError(f"--to {target}: the name must end in one of {', '.join(SUFFIXES)}.")
    if not target.parent.is_dir():
        raise CheckpointError(f"--to {target}: there is no folder {target.parent}. Make it first.")
    from framework.checkpoint.commands.consolidated import write_safetensors, write_torch
    from framework.checkpoint.commands.opened import opened_to_read
    from framework.checkpoint.commands.places import choose
    from framework.checkpoint.commands.weights import weights_of
    from framework.speaking import answer, size_text

    chosen = choose(arguments.run, arguments.step)
    with chosen.kept(), opened_to_read(chosen.place) as opened:
        weights = weights_of(opened, arguments.part)
        write = write_torch if SUFFIXES[target.suffix] == "torch" else write_safetensors
        files = write(weights, target, force=arguments.force)
    sizes = {str(file): file.stat().st_size for file in files}
    facts = {"from": chosen.place, "part": arguments.part, "tensors": len(weights.names), "files": sizes}
    lines = [f"{file}  {size_text(size)}" for file, size in sizes.items()]
    answer(arguments, facts, *lines, f"{len(weights.names):,} tensors of {chosen.place}")
    return EXIT_DONE
