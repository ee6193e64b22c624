"""Makes a trained model the one that ml4core ships: its files, checksums, figures and card.

    python -m tools.ship_tiny all --bf16 FOLDER --training figures.json --dense dense.json
                                  --first first.json --trained "710 million tokens, one H200"

does everything: FOLDER is what `python -m tools.train_tiny export --format bf16` wrote, the three
files are what its `evaluate` wrote of the model, of the dense baseline, and of the model when it
had seen the baseline's tokens. `checkpoint`, `figures`,
`card` and `readme` are its four steps. The figures take about half an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml4core.evaluation.plot import plot
from ml4core.evaluation.tables import Table, markdown, tables
from ml4core.models.embedded import EMBEDDED, SUMS_FILE, embedded_folder, sums_text
from ml4core.models.quantize import quantize
from ml4core.models.quantize_options import QuantizeOptions

ROOT = Path(__file__).resolve().parents[1]
FILES = ["consolidated.safetensors", "params.json", "tekken.json"]
FIGURES, PLOT, CARD = "figures.json", "figures.svg", "MODEL_CARD.md"
FORMATS = ("fp8_block", "nvfp4", "mxfp4", "mxfp4-floor", "mxfp4-roundup", "mxfp4-ceil")
SHOWN = ("books", "children", "synth_stories", "chat_story_chat", "chat_tools", "chat_basics")
_SECTION = re.compile(r"(<!-- figures: begin[^\n]*-->\n).*?(<!-- figures: end -->)", re.DOTALL)
_QUICK = re.compile(r"(^```\n\$ ml4 (generate [^\n]*)\n).*?(^```$)", re.DOTALL | re.MULTILINE)


def checkpoint(args: argparse.Namespace) -> None:
    """The weights in FP8 blocks, and the list of checksums. The tokenizer stays."""
    target = embedded_folder()
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / EMBEDDED
        options = QuantizeOptions("fp8_block", include_output=True, include_drafter=True)
        quantize(args.bf16, made, options)
        for name in FILES[:2]:
            shutil.copyfile(made / name, target / name)
    (target / SUMS_FILE).write_text(sums_text(target, FILES), "utf-8")


def figures(args: argparse.Namespace) -> None:
    """What `ml4 eval --full` finds of the shipped file, what each form costs BF16, and what was
    found after training.
    """
    weights = [word for form in FORMATS for word in ("--weights", form)]
    formats = _eval(str(args.bf16), "ppl", "--kv-cache-dtype", "float32", *weights)
    found: dict[str, Any] = {
        "trained": args.trained,
        "bytes": (embedded_folder() / FILES[0]).stat().st_size,
        "shipped": _eval("--full"),
        "formats": formats,
        "training": json.loads(args.training.read_text("utf-8")) if args.training else None,
        "dense": json.loads(args.dense.read_text("utf-8")) if args.dense else None,
        "first": json.loads(args.first.read_text("utf-8")) if args.first else None,
    }
    (embedded_folder() / FIGURES).write_text(json.dumps(found, indent=1) + "\n", "utf-8")


def _eval(*words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "ml4core", "eval", *words, "--json", "-"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def card(args: argparse.Namespace) -> None:
    """The card's section of figures, and its picture."""
    folder = embedded_folder()
    found = json.loads((folder / FIGURES).read_text("utf-8"))
    (folder / PLOT).write_text(plot(found["shipped"]), "utf-8")
    path = folder / CARD
    path.write_text(with_section(path.read_text("utf-8"), section(found)), "utf-8")


def with_section(text: str, section: str) -> str:
    """A card's text with other figures. Raises ValueError for one without their place."""
    changed, count = _SECTION.subn(lambda found: f"{found[1]}{section}{found[2]}", text)
    if count != 1:
        raise ValueError(f"the card has {count} sections of figures; it must have one")
    return changed


def section(found: Mapping[str, Any]) -> str:
    """What stands in the card, as Markdown."""
    minutes = found["shipped"]["cpu_seconds"] / 60
    parts = [
        f"Trained on {found['trained']}. The file has {found['bytes']:,} bytes.\n",
        "`ml4 eval --full` on the cpu backend, in float32, says of the shipped file (in "
        f"{minutes:.0f} minutes of one core; `ml4 eval` alone leaves out the longest prompts):\n",
        *map(markdown, tables(found["shipped"])),
        f"![the same as a picture]({PLOT})\n",
        "Against the weights before they were quantised (BF16, not shipped), by `ml4 quantize`:\n",
        *map(markdown, tables(found["formats"])),
    ]
    if found["training"] and found["dense"] and found["first"]:
        parts += [
            "After training, on validation parts in windows of 2,048 tokens, nats a token (of "
            "chats, the assistant's words). The dense model has the active size of this one, and "
            "saw the tokens of its first round:\n",
            markdown(_losses(found["training"], found["first"], found["dense"])),
        ]
    return "\n" + "\n".join(parts) + "\n"


def _losses(
    training: Mapping[str, Any], first: Mapping[str, Any], dense: Mapping[str, Any]
) -> Table:
    columns = (
        "part", "top-k 256", "full attention", "first round: full attention", "dense model"
    )  # fmt: skip
    shown = (training["sparse"], training["dense"], first["dense"], dense["dense"])
    rows = tuple(
        (part, *(f"{losses[part]:.3f}" if part in losses else "" for losses in shown))
        for part in SHOWN
        if part in shown[0]
    )
    return Table("Validation loss", columns, rows)


def readme(args: argparse.Namespace) -> None:
    """The text that the quick start of the README shows."""
    path = ROOT / "README.md"
    text = path.read_text("utf-8")
    found = _QUICK.search(text)
    if found is None:
        raise ValueError(f"{path}: no block that begins with `$ ml4 generate`")
    command = f"{sys.executable} -m ml4core {found[2]}"
    told = subprocess.run(command, shell=True, stdout=subprocess.PIPE, text=True, check=True).stdout
    path.write_text(text[: found.end(1)] + told + text[found.start(3) :], "utf-8")


def everything(args: argparse.Namespace) -> None:
    for step in (checkpoint, figures, card, readme):
        print(step.__name__, flush=True)
        step(args)


STEPS = {
    "all": everything,
    "checkpoint": checkpoint,
    "figures": figures,
    "card": card,
    "readme": readme,
}


def main() -> None:
    top = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("step", choices=STEPS)
    top.add_argument("--bf16", type=Path, help="the trained checkpoint")
    top.add_argument("--training", type=Path, help="figures of its training")
    top.add_argument("--dense", type=Path, help="figures of the baseline")
    top.add_argument("--first", type=Path, help="figures of its first round, on the same tokens")
    top.add_argument("--trained", default="", help="tokens and machine, for the card")
    args = top.parse_args()
    if args.step in ("all", "checkpoint", "figures") and args.bf16 is None:
        top.error(f"{args.step}: needs --bf16")
    STEPS[args.step](args)


if __name__ == "__main__":
    main()
