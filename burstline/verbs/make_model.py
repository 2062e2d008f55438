"""`burstline make-model`: a model folder for any engine, with no download."""

import argparse

from burstline.console import exit_codes
from burstline.models.model_folder import add_missing_formats, make_model
from burstline.models.weights import FORMATS


def run(args: argparse.Namespace) -> int:
    wanted = args.format or ("safetensors" if args.weights else "none")
    formats = tuple(kind for kind in FORMATS if wanted in (kind, "both"))
    if args.unless_exists and (args.folder / "config.json").exists():
        added = add_missing_formats(args.folder, formats)
        what = f"added {' and '.join(added)}" if added else "left as it is"
        print(f"{args.folder} holds a model already: {what}")
        return exit_codes.DONE
    make_model(args.folder, args.like, formats=formats, seed=args.seed, dtype=args.dtype)
    n_bytes = sum(file.stat().st_size for file in args.folder.iterdir())
    weights = (
        f"random weights ({', '.join(formats)})" if formats else "no weights: engines must generate them"
    )
    print(f"{args.folder}: shaped like {args.like}, {weights}; {n_bytes:,} bytes")
    return exit_codes.DONE
